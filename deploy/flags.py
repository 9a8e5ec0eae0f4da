"""The flags that several commands share, and what they become: an endpoint, keys, the fields of a request.

Imported at every start of `tinyloop`, so it imports next to nothing.
"""

from __future__ import annotations

import argparse
import os
from typing import TypeAlias

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

REQUEST = {
    *("loops", "max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("stop", "ignore_eos", "cache_mode", "deadline_s"),
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected a whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected seconds from 0 to 86400")
    return value


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on standard output")


def add_endpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--endpoint", metavar="E", help="default: $TINYLOOP_ENDPOINT, or this user's own fleet"
    )


def add_connection(command: argparse.ArgumentParser) -> None:
    """Of a command that talks to a fleet."""
    add_endpoint(command)
    command.add_argument("--key", metavar="FILE", help="our key, for tcp; default: $TINYLOOP_KEY")
    command.add_argument(
        "--server-key", metavar="KEY", help="the dispatcher's public key; default: $TINYLOOP_SERVER_KEY"
    )


def endpoint(flags: argparse.Namespace) -> str:
    """Also puts the flags for keys where `connect` and all that this command starts look for them."""
    from tinyloop_serve.deploy.endpoints import default_endpoint

    for name, variable in (("key", "TINYLOOP_KEY"), ("server_key", "TINYLOOP_SERVER_KEY")):
        if given := getattr(flags, name, None):
            os.environ[variable] = given
    return flags.endpoint or default_endpoint()


def add_request(command: argparse.ArgumentParser) -> None:
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


def request(flags: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(flags).items() if name in REQUEST}
