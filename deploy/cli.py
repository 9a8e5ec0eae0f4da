"""The `tinyloop` command: a table of contents. Flags in, one function of `deploy/commands/` out.

Starts fast: what is imported here only declares flags, each command imports its own needs when it runs.
Exit statuses are those of EXITS, for every command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tinyloop_serve.deploy.commands import artifacts, asking, machine, operating, serving

EXITS = """exit status:
  0    done
  1    it failed: the engine, a replica or the fleet broke on it; trying again may help
  2    the command or the request is wrong; the message says what is accepted
  69   no fleet answers at the endpoint
  75   not now: the fleet is overloaded or the deadline passed; try again later
  78   the model file or the configuration is wrong
  130  interrupted
"""
GROUPS = (
    serving,  # up, reload
    asking,  # generate, chat
    operating,  # status, top, handles, drain, resume, attach, detach
    artifacts,  # inspect, convert
    machine,  # doctor, keys, deploy, completion
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    flags = parser().parse_args(arguments)
    from tinyloop_serve.deploy import outcome

    with outcome.reported(as_json=getattr(flags, "json", False)) as result:
        result.status = flags.run(flags)
    return result.status


def parser() -> argparse.ArgumentParser:
    """Every command and flag; `run` of what it parses is the command's function."""
    whole = argparse.ArgumentParser(
        "tinyloop",
        description="Serve looped language models: choose the number of loops per request.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action=_Version)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add(commands)
    for command in commands.choices.values():
        command.allow_abbrev = False
    return whole


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


if __name__ == "__main__":
    sys.exit(main())
