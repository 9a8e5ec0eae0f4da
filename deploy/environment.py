"""The TINYLOOP_* variables of the environment: all there are, and what is wrong with those that are set.

Each is read where it is used; this is their list. A variable that is not here is a slip of the pen, which
would otherwise do nothing in silence.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

PREFIX = "TINYLOOP_"


def _threads(value: str) -> str:
    good = value.isdecimal() and 1 <= int(value) <= 1024
    return "" if good else f"{value!r} is not accepted; expected a whole number from 1 to 1024"


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


def _directory(value: str) -> str:
    return "" if os.path.isdir(value) else f"{value!r} is not a directory"


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
    "TINYLOOP_BACKEND_PATH": Variable(
        "the package's own directory", "where libraries of other devices lie", _directory
    ),
}


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
