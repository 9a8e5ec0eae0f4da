"""One reader per kind of configuration value: from TOML or a flag's text to what `Config` holds.

Every refusal names field, value and what is accepted. This file must not know which fields there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.limits import IPC_PATH_BYTES


class ConfigError(TinyLoopError):
    """A configuration value is not accepted; `field`, `value` and `accepted` say which and why."""

    code: ClassVar[str] = "config"


def refuse(field: str, value: object, accepted: str) -> ConfigError:
    message = f"{field}: {value!r} is not accepted; expected {accepted}"
    return ConfigError(message, field=field, value=repr(value), accepted=accepted)


Reader = Callable[[str, Any], object]


def number(kind: type[int] | type[float], low: float, high: float) -> Reader:
    def read(field: str, value: Any) -> object:
        accepted = f"{'a whole number' if kind is int else 'a number'} from {low:g} to {high:g}"
        try:
            number = kind(value) if isinstance(value, str) or kind is float else value
        except (TypeError, ValueError):
            raise refuse(field, value, accepted) from None
        if isinstance(value, bool) or not isinstance(number, kind) or not low <= number <= high:
            raise refuse(field, value, accepted)
        return number

    return read


def several(one: Reader) -> Reader:
    def read(field: str, value: Any) -> object:
        items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not items:
            raise refuse(field, value, "a list with at least one entry")
        parsed: list[Any] = [one(f"{field}[{index}]", item) for index, item in enumerate(items)]
        if len(set(parsed)) != len(parsed):
            raise refuse(field, value, "entries that differ")
        return tuple(sorted(parsed)) if isinstance(parsed[0], int) else tuple(parsed)

    return read


def word(field: str, value: Any) -> object:
    if not isinstance(value, str) or not value.strip():
        raise refuse(field, value, "a name")
    return value


def text(field: str, value: Any) -> object:
    if not isinstance(value, str):
        raise refuse(field, value, "text")
    return value


def boolean(field: str, value: Any) -> object:
    if not isinstance(value, bool):
        raise refuse(field, value, "true or false")
    return value


def one_of(choices: Sequence[str]) -> Reader:
    def read(field: str, value: Any) -> object:
        if value not in choices:
            raise refuse(field, value, "one of " + ", ".join(choices))
        return value

    return read


def key(field: str, value: Any) -> object:
    """A CURVE public key in Z85 (ZeroMQ RFC 32)."""
    if not isinstance(value, str) or not _Z85.fullmatch(value):
        raise refuse(field, value, "a public key of 40 characters in Z85")
    return value


def endpoint(field: str, value: Any) -> object:
    """`ipc:///absolute/path` or `tcp://host:port`; where tcp may go without keys is not asked here."""
    scheme, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if scheme == "ipc" and rest.startswith("/"):
        if len(rest.encode()) > IPC_PATH_BYTES:
            raise refuse(field, value, f"a path of at most {IPC_PATH_BYTES} bytes")
    elif scheme == "tcp" and ":" in rest:
        host, _, port = rest.rpartition(":")
        if not host or (port != "*" and not (port.isdecimal() and int(port) < 65536)):
            raise refuse(field, value, "a port from 0 to 65535, or * for a free one")
    else:
        raise refuse(field, value, "ipc:///absolute/path or tcp://127.0.0.1:port")
    return value


def http_address(field: str, value: Any) -> object:
    """HOST:PORT; port 0 is a free one, "" is nowhere."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if value != "" and not (host and port.isdecimal() and int(port) < 65536):
        raise refuse(field, value, 'HOST:PORT, such as 127.0.0.1:9190, or ""')
    return value


_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
