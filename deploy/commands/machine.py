"""`tinyloop doctor`, `keys`, `deploy`, `completion`: this machine and its files."""

from __future__ import annotations

import argparse

from tinyloop_serve.deploy.flags import Subcommands, add_endpoint, add_json, positive


def add(commands: Subcommands) -> None:
    doctor = commands.add_parser("doctor", help="what is wrong with this machine or a configuration")
    doctor.add_argument("--config", default="", metavar="FILE", help="TOML, as for `tinyloop up`")
    doctor.add_argument("--model", default="", metavar="FILE", help="default: the demo model; [fleet] wins")
    doctor.add_argument("--replicas", type=positive, default=0, metavar="N", help="default: [fleet]'s, or 2")
    doctor.add_argument("--threads", type=positive, default=0, metavar="N", help="as for `tinyloop up`")
    add_endpoint(doctor)
    add_json(doctor)
    doctor.set_defaults(run=_doctor)

    keys = commands.add_parser("keys", help="keys for fleets and clients on a network")
    what = keys.add_subparsers(dest="what", required=True, metavar="WHAT")
    new = what.add_parser("new", help="make a pair: NAME.key is secret, NAME.pub is not")
    new.add_argument("name", metavar="NAME")
    for command in (new, what.add_parser("list", help="the public keys of a directory")):
        command.add_argument(
            "--dir", metavar="DIR", help="default: tinyloop/keys in the configuration directory"
        )
        add_json(command)
    keys.set_defaults(run=_keys)

    deploy = commands.add_parser("deploy", help="files for running a fleet as services")
    kinds = deploy.add_subparsers(dest="kind", required=True, metavar="KIND")
    systemd = kinds.add_parser("systemd", help="unit files, from the [fleet] table of a configuration file")
    systemd.add_argument("--config", required=True, metavar="FILE", help="TOML, as for `tinyloop up`")
    systemd.add_argument("--prefix", required=True, metavar="DIR", help="the files are written below it")
    add_json(systemd)
    deploy.set_defaults(run=_deploy)

    completion = commands.add_parser("completion", help="a script with which a shell completes our commands")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_completion)


def _doctor(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy.doctor import report

    named = (flags.config, flags.model, flags.endpoint or "")
    return report.run(*named, flags.replicas, flags.threads, as_json=flags.json)


def _keys(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import keyring

    directory = flags.dir or keyring.default_directory()
    if flags.what == "new":
        return keyring.new(flags.name, directory, as_json=flags.json)
    return keyring.show(directory, as_json=flags.json)


def _deploy(flags: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from tinyloop_serve.deploy import systemd

    written = [str(path) for path in systemd.render(flags.config, Path(flags.prefix))]
    print(json.dumps({"files": written}) if flags.json else "\n".join(written))
    return 0


def _completion(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import cli, completion

    print(completion.SHELLS[flags.shell](cli.parser()), end="")
    return 0
