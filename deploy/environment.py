"""The TINYLOOP_* variables of the environment: all there are, and what is wrong with those that are set.

Each is read where it is used; this is their list. A variable that is not here is a slip of the pen, which
would otherwise do nothing in silence.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tinyloop_serve.protocol.modes import CACHE_MODES

PREFIX = "TINYLOOP_"
WEIGHTS = ("auto", "fp16", "bf16", "int8", "int4")


def _threads(value: str) -> str:
    good = value.isdecimal() and 1 <= int(value) <= 1024
    return "" if good else f"{value!r} is not accepted; expected a whole number from 1 to 1024"


def _one_of(accepted: Sequence[str]) -> Callable[[str], str]:
    def fault(value: str) -> str:
        return "" if value in accepted else f"{value!r} is not accepted; expected {', '.join(accepted)}"

    return fault


def _threshold(value: str) -> str:
    try:
        good = 0 <= float(value) <= 1
    except ValueError:
        good = False
    return "" if good else f"{value!r} is not accepted; expected 0 (off) to 1"


def _endpoint(value: str) -> str:
    from tinyloop_serve.dispatcher.readers import ConfigError, endpoint

    try:
        endpoint("TINYLOOP_ENDPOINT", value)
    except ConfigError as error:
        return f"{value!r} is not accepted; expected {error.accepted}"
    return ""


def _key(value: str) -> str:
    from tinyloop_serve.protocol.errors import InvalidRequest
    from tinyloop_serve.protocol.keys import read_pair

    try:
        read_pair(value)
    except (InvalidRequest, OSError) as error:
        return str(error)
    return ""


def _server_key(value: str) -> str:
    from tinyloop_serve.protocol.errors import InvalidRequest
    from tinyloop_serve.protocol.keys import public_key

    try:
        public_key(value)
    except InvalidRequest as error:
        return str(error)
    return ""


def _directories(value: str) -> str:
    missing = [folder for folder in value.split(":") if folder and not os.path.isdir(folder)]
    return f"{missing[0]!r} is not a directory" if missing else ""


@dataclass(frozen=True)
class Variable:
    default: str  # for people
    meaning: str
    fault: Callable[[str], str]  # of a value; "" when there is none


VARIABLES = {
    "TINYLOOP_ENDPOINT": Variable("this user's own fleet", "where clients find the fleet", _endpoint),
    "TINYLOOP_KEY": Variable("none", "file of a client's key pair, for tcp", _key),
    "TINYLOOP_SERVER_KEY": Variable("none", "the dispatcher's public key, for tcp", _server_key),
    "TINYLOOP_THREADS": Variable("all cores", "threads of an engine that is not told otherwise", _threads),
    "TINYLOOP_WEIGHTS": Variable("the artifact's", "what engines hold matrices in", _one_of(WEIGHTS)),
    "TINYLOOP_CACHE_MODE": Variable(
        "fp16", "caches of engine calls that name no mode; requests to a fleet do", _one_of(CACHE_MODES)
    ),
    "TINYLOOP_EARLY_EXIT": Variable("0 (off)", "exit_threshold of engine calls that name none", _threshold),
    "TINYLOOP_SPECULATIVE": Variable(
        "0", "1: engine calls speculate where they may; same tokens", _one_of(("0", "1"))
    ),
    "TINYLOOP_WERROR": Variable("OFF", "of a build from source: warnings are errors", _one_of(("ON", "OFF"))),
    "TINYLOOP_BACKEND_PATH": Variable(
        "the package's own directory", "where libraries of other devices lie, too; by colon", _directories
    ),
}


@contextlib.contextmanager
def without_faults() -> Iterator[None]:
    """Meanwhile the variables that are wrong are not there, for this process and its engine."""
    saved = {name: os.environ.pop(name) for name, _ in list(faults(os.environ))}
    try:
        yield
    finally:
        os.environ.update(saved)


def faults(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, what is wrong) for each that is set and unknown, or has a value that is not accepted."""
    for name, value in sorted(environ.items()):
        if not name.startswith(PREFIX):
            continue
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, 1)
            yield name, f"no such variable{f'; {close[0]} is meant?' if close else ''}"
        elif value and (fault := VARIABLES[name].fault(value)):
            yield name, fault
