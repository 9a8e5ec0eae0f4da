"""The `tinyloop` command: flags in, one function of another file out. Starts fast: each command imports
its own needs.

Exit statuses are those of EXITS, for every command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

EXITS = """exit status:
  0    done
  1    it failed: the engine, a replica or the fleet broke on it; trying again may help
  2    the command or the request is wrong; the message says what is accepted
  69   no fleet answers at the endpoint
  75   not now: the fleet is overloaded or the deadline passed; try again later
  78   the model file or the configuration is wrong
  130  interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    flags = _parser().parse_args(arguments)
    from tinyloop_serve.deploy import outcome

    with outcome.reported(as_json=getattr(flags, "json", False)) as result:
        result.status = _COMMANDS[flags.command](flags)
    return result.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tinyloop",
        description="Serve looped language models: choose the number of loops per request.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="a dispatcher and replicas in the foreground, until Ctrl-C")
    up.add_argument("--model", metavar="FILE", help="a .tinyloop artifact (default: the demo model)")
    up.add_argument("--replicas", type=_positive, default=2, metavar="N", help="default 2")
    up.add_argument(
        "--threads", type=_positive, default=0, metavar="N", help="per replica (default: share cores)"
    )
    up.add_argument("--max-seq-len", type=_positive, default=0, metavar="N", help="default: the model's")
    up.add_argument(
        "--config", default="", metavar="FILE", help="TOML: [dispatcher], [tenants.NAME], [replica] tables"
    )
    up.add_argument("--log", default="", metavar="FILE", help="append a JSON line per request")
    up.add_argument(
        "--die-with-parent", type=_positive, default=0, metavar="PID", help="stop when PID is gone"
    )

    generate = commands.add_parser("generate", help="complete a text; `-` reads it from standard input")
    generate.add_argument("text", metavar="TEXT")
    generate.add_argument(
        "--chat", action="store_true", help="TEXT is a question: use the model's chat template"
    )
    generate.add_argument("--system", default="", metavar="TEXT", help="system message, with --chat")
    generate.add_argument(
        "--json", action="store_true", help="one JSON object: text, tokens, stop_reason, stats"
    )

    chat = commands.add_parser("chat", help="a conversation, line by line")
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    for command in (generate, chat):
        _add_options(command)

    status = commands.add_parser("status", help="replicas, queues and counts of the fleet")
    status.add_argument("--json", action="store_true")

    handles = commands.add_parser("handles", help="prefixes and resume handles that the fleet holds")
    handles.add_argument("--drop", default="", metavar="NAME", help="free this one")
    handles.add_argument("--json", action="store_true")

    for command in (up, generate, chat, status, handles):
        command.add_argument(
            "--endpoint", metavar="E", help="default: $TINYLOOP_ENDPOINT, or this user's own fleet"
        )
    for command in (generate, chat, status, handles):
        command.add_argument("--key", metavar="FILE", help="our key, for tcp; default: $TINYLOOP_KEY")
        command.add_argument(
            "--server-key", metavar="KEY", help="the dispatcher's public key; default: $TINYLOOP_SERVER_KEY"
        )

    keys = commands.add_parser("keys", help="keys for fleets and clients on a network")
    what = keys.add_subparsers(dest="what", required=True, metavar="WHAT")
    new = what.add_parser("new", help="make a pair: NAME.key is secret, NAME.pub is not")
    new.add_argument("name", metavar="NAME")
    for command in (new, what.add_parser("list", help="the public keys of a directory")):
        command.add_argument(
            "--dir", metavar="DIR", help="default: tinyloop/keys in the configuration directory"
        )

    inspect = commands.add_parser("inspect", help="what is in a .tinyloop artifact")
    inspect.add_argument("path", metavar="PATH")
    inspect.add_argument("--json", action="store_true")

    deploy = commands.add_parser("deploy", help="files for running a fleet as services")
    kinds = deploy.add_subparsers(dest="kind", required=True, metavar="KIND")
    systemd = kinds.add_parser("systemd", help="unit files, from the [fleet] table of a configuration file")
    systemd.add_argument("--config", required=True, metavar="FILE", help="TOML, as for `tinyloop up`")
    systemd.add_argument("--prefix", required=True, metavar="DIR", help="the files are written below it")

    convert = commands.add_parser(
        "convert",
        help="make a .tinyloop artifact from a GGUF file, a Hugging Face folder or another artifact",
    )
    convert.add_argument("source", metavar="SOURCE")
    convert.add_argument("target", metavar="TARGET")
    convert.add_argument(
        "--weights",
        choices=("fp16", "bf16", "fp32"),
        help="type of the matrices (default: fp16; another artifact's: as they are)",
    )
    convert.add_argument(
        "--layout",
        choices=("panels", "plain"),
        default="panels",
        help="of the matrices: panels (default), which the replicas of a host map and share, or plain rows",
    )
    convert.add_argument(
        "--max-loops",
        type=_positive,
        metavar="N",
        help="that a request may ask for (default: twice the model's)",
    )
    convert.add_argument("--no-beta", action="store_true", help="do not measure the gain of the core")
    for command in commands.choices.values():
        command.allow_abbrev = False
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    """The fields of a request. What is left out has the protocol's own default."""
    suppress = argparse.SUPPRESS
    command.add_argument(
        "--loops", type=int, default=suppress, metavar="N", help="depth (default: the model's)"
    )
    command.add_argument("--max-tokens", type=int, default=suppress, metavar="N", help="default 128")
    command.add_argument("--seed", type=int, default=suppress, metavar="S", help="default 0")
    command.add_argument(
        "--temperature", type=float, default=suppress, metavar="T", help="0 = greedy (default)"
    )
    command.add_argument("--top-k", type=int, default=suppress, metavar="N", help="0 = off (default)")
    command.add_argument("--top-p", type=float, default=suppress, metavar="P", help="1 = off (default)")
    command.add_argument("--min-p", type=float, default=suppress, metavar="P", help="0 = off (default)")
    command.add_argument(
        "--repetition-penalty", type=float, default=suppress, metavar="R", help="1 = off (default)"
    )
    command.add_argument(
        "--stop", action="append", default=suppress, metavar="S", help="end before S; repeatable"
    )
    command.add_argument("--ignore-eos", action="store_true", default=suppress, help="go on to --max-tokens")
    command.add_argument("--cache-mode", default=suppress, metavar="M", help="fp16 (default)")
    command.add_argument(
        "--deadline-s", type=float, default=suppress, metavar="S", help="give up after S seconds"
    )


OPTIONS = {
    *("loops", "max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("stop", "ignore_eos", "cache_mode", "deadline_s"),
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected a whole number from 1")
    return int(text)


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"tinyloop {version()}")
        parser.exit()


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tinyloop-serve")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"


# ------------------------------------------------------------------ the commands


def _up(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy.fleet import Fleet, Plan, replica_flags

    if flags.die_with_parent:
        from tinyloop_serve.protocol.host import die_with_parent

        die_with_parent(flags.die_with_parent)
    plan = Plan(
        model=flags.model or _demo_model(),
        endpoint=_endpoint(flags),
        replicas=flags.replicas,
        threads=flags.threads,
        max_seq_len=flags.max_seq_len,
        log=flags.log,
        config=os.path.abspath(flags.config) if flags.config else "",
        replica_flags=replica_flags(flags.config) if flags.config else (),
    )
    return Fleet(plan).run()


def _generate(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import ask

    text = sys.stdin.read() if flags.text == "-" else flags.text
    messages = ask.conversation(flags.system, text) if flags.chat else None
    return ask.generate(_endpoint(flags), text, messages, _options(flags), as_json=flags.json)


def _chat(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import ask

    return ask.chat(_endpoint(flags), flags.system, _options(flags))


def _status(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import report

    return report.status(_endpoint(flags), as_json=flags.json)


def _inspect(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import report

    return report.inspect(flags.path, as_json=flags.json)


def _convert(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import report

    return report.convert(
        flags.source,
        flags.target,
        flags.weights,
        flags.layout,
        max_loops=flags.max_loops,
        measure_beta=not flags.no_beta,
    )


def _deploy(flags: argparse.Namespace) -> int:
    from pathlib import Path

    from tinyloop_serve.deploy import systemd

    for path in systemd.render(flags.config, Path(flags.prefix)):
        print(path)
    return 0


def _handles(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import handles

    if flags.drop:
        return handles.drop(_endpoint(flags), flags.drop)
    return handles.show(_endpoint(flags), as_json=flags.json)


def _keys(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import keyring

    directory = flags.dir or keyring.default_directory()
    return keyring.new(flags.name, directory) if flags.what == "new" else keyring.show(directory)


_COMMANDS = {
    "up": _up,
    "generate": _generate,
    "chat": _chat,
    "status": _status,
    "inspect": _inspect,
    "convert": _convert,
    "deploy": _deploy,
    "handles": _handles,
    "keys": _keys,
}


def _endpoint(flags: argparse.Namespace) -> str:
    """Also puts the flags for keys where `connect` and all that this command starts look for them."""
    from tinyloop_serve.deploy.endpoints import default_endpoint

    for name, variable in (("key", "TINYLOOP_KEY"), ("server_key", "TINYLOOP_SERVER_KEY")):
        if given := getattr(flags, name, None):
            os.environ[variable] = given
    return flags.endpoint or default_endpoint()


def _options(flags: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(flags).items() if name in OPTIONS}


def _demo_model() -> str:
    from tinyloop_serve.native import demo_model_path

    return str(demo_model_path())


if __name__ == "__main__":
    sys.exit(main())
