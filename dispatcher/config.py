"""Configuration of one dispatcher: parsed once, from a TOML file and flags, into a frozen structure.

Keys of the file's `[dispatcher]` table and flags are the fields of `Config` (`max_wait_ms` is
`--max-wait-ms`); a flag wins over the file. Every value passes the one reader of its field, whose refusal
names field, value and what is accepted. This file opens nothing but the configuration file.
"""

from __future__ import annotations

import argparse
import ipaddress
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.limits import MAX_BODY_BYTES
from tinyloop_serve.protocol.modes import CACHE_MODES

EXIT_CONFIG = 78  # EX_CONFIG: a service manager must not restart us
IPC_PATH_BYTES = 107  # sockaddr_un.sun_path


class ConfigError(TinyLoopError):
    """A configuration value is not accepted; `field`, `value` and `accepted` say which and why."""

    code: ClassVar[str] = "config"


@dataclass(frozen=True)
class Config:
    """Times in milliseconds, sizes in bytes, lengths in tokens."""

    front: str  # endpoint that clients connect to
    replicas: tuple[str, ...]  # endpoints that replicas bind
    batch_sizes: tuple[int, ...] = (2, 4, 8)  # lanes of one generate_batch
    min_batch_size: int = 2  # fewer ready requests than this run one by one
    max_wait_ms: float = 8.0  # how long a request waits for company while a replica is idle
    max_tokens_bands: tuple[int, ...] = (32, 128, 512, 2048)  # upper ends; requests of one band share batches
    cache_modes: tuple[str, ...] = CACHE_MODES  # the product's allow-list
    max_waiting: int = 1024  # requests not yet on a replica; more are refused as overloaded
    max_body: int = MAX_BODY_BYTES  # of one message body
    heartbeat_ms: float = 250.0  # a replica is pinged this often
    loss_ms: float = 2000.0  # a ping unanswered for this long: the replica is lost
    stall_ms: float = 30_000.0  # work but no step for this long: the replica is lost
    replica_wait_ms: float = 10_000.0  # a request waits this long for any replica; 0 = refuse at once
    client_bytes: int = 8 << 20  # held for one client that reads slowly; more and its requests are failed
    client_stall_ms: float = 30_000.0  # the same when it reads nothing for this long
    drain_ms: float = 5000.0  # how long running requests may go on after SIGTERM
    die_with_parent: int = 0  # process id of the supervisor that we stop with; 0 = none


def parse(arguments: Sequence[str]) -> Config:
    """The configuration from command-line `arguments`.

    Raises `ConfigError`; the process must then exit with `EXIT_CONFIG`.
    """
    return load(read_flags(arguments))


def load(raw: dict[str, object]) -> Config:
    """The configuration from raw values (numbers, lists, or the strings of the command line)."""
    for name in raw:
        if name not in _READERS:
            raise _refuse(name, raw[name], "one of " + ", ".join(sorted(_READERS)))
    for name in ("front", "replicas"):
        if name not in raw:
            raise _refuse(name, None, "an endpoint: set it in the file or by flag")
    config = Config(**{name: _READERS[name](name, value) for name, value in raw.items()})  # type: ignore[arg-type]
    if config.min_batch_size > max(config.batch_sizes):
        accepted = f"at most {max(config.batch_sizes)}, the largest of batch_sizes"
        raise _refuse("min_batch_size", config.min_batch_size, accepted)
    if config.loss_ms <= config.heartbeat_ms:
        raise _refuse("loss_ms", config.loss_ms, f"more than heartbeat_ms = {config.heartbeat_ms:g}")
    if config.front in config.replicas:
        raise _refuse("replicas", config.front, "endpoints other than front")
    return config


def read_flags(arguments: Sequence[str]) -> dict[str, object]:
    """Raw values of the flags, over those of the `--config` file."""
    parser = _Parser("tinyloop-dispatcher", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with a [dispatcher] table")
    for field in fields(Config):
        if field.name == "replicas":
            parser.add_argument("--replica", dest="replicas", action="append", metavar="ENDPOINT")
        else:
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, dest=field.name, metavar=field.name.rpartition("_")[2].upper())
    flags = vars(parser.parse_args(list(arguments)))
    path = flags.pop("config", None)
    return (read_file(Path(path)) if path is not None else {}) | flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_file(path: Path) -> dict[str, object]:
    """The `[dispatcher]` table of a TOML file; other tables belong to other processes."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file).get("dispatcher", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise _refuse("config", str(path), f"a readable TOML file ({error})") from error
    if not isinstance(table, dict):
        raise _refuse("config", str(path), "a [dispatcher] table")
    return table


def _refuse(field: str, value: object, accepted: str) -> ConfigError:
    message = f"{field}: {value!r} is not accepted; expected {accepted}"
    return ConfigError(message, field=field, value=repr(value), accepted=accepted)


# ------------------------------------------------------------------ one reader per kind of field

Reader = Callable[[str, Any], object]


def _number(kind: type[int] | type[float], low: float, high: float) -> Reader:
    def read(field: str, value: Any) -> object:
        accepted = f"{'a whole number' if kind is int else 'a number'} from {low:g} to {high:g}"
        try:
            number = kind(value) if isinstance(value, str) or kind is float else value
        except (TypeError, ValueError):
            raise _refuse(field, value, accepted) from None
        if isinstance(value, bool) or not isinstance(number, kind) or not low <= number <= high:
            raise _refuse(field, value, accepted)
        return number

    return read


def _several(one: Reader) -> Reader:
    def read(field: str, value: Any) -> object:
        items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not items:
            raise _refuse(field, value, "a list with at least one entry")
        parsed: list[Any] = [one(f"{field}[{index}]", item) for index, item in enumerate(items)]
        if len(set(parsed)) != len(parsed):
            raise _refuse(field, value, "entries that differ")
        return tuple(sorted(parsed)) if isinstance(parsed[0], int) else tuple(parsed)

    return read


def _word(field: str, value: Any) -> object:
    if not isinstance(value, str) or not value.strip():
        raise _refuse(field, value, "a name")
    return value


def _endpoint(field: str, value: Any) -> object:
    """`ipc:///absolute/path` or `tcp://loopback:port`: without keys, tcp may not leave the machine."""
    scheme, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if scheme == "ipc" and rest.startswith("/"):
        if len(rest.encode()) > IPC_PATH_BYTES:
            raise _refuse(field, value, f"a path of at most {IPC_PATH_BYTES} bytes")
    elif scheme == "tcp" and ":" in rest:
        host, _, port = rest.rpartition(":")
        if port != "*" and not (port.isdecimal() and int(port) < 65536):
            raise _refuse(field, value, "a port from 0 to 65535, or * for a free one")
        if not _is_loopback(host.strip("[]")):
            raise _refuse(field, value, "a loopback address (127.0.0.1, [::1]): tcp is not encrypted yet")
    else:
        raise _refuse(field, value, "ipc:///absolute/path or tcp://127.0.0.1:port")
    return value


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_milliseconds = _number(float, 0, 86_400_000)
_READERS: dict[str, Reader] = {
    "front": _endpoint,
    "replicas": _several(_endpoint),
    "batch_sizes": _several(_number(int, 2, 32)),  # more lanes of long prompts would not fit one Run
    "min_batch_size": _number(int, 1, 32),
    "max_wait_ms": _milliseconds,
    "max_tokens_bands": _several(_number(int, 1, 1 << 24)),
    "cache_modes": _several(_word),
    "max_waiting": _number(int, 1, 1_000_000),
    "max_body": _number(int, 1024, MAX_BODY_BYTES),
    "heartbeat_ms": _number(float, 10, 60_000),
    "loss_ms": _number(float, 20, 600_000),
    "stall_ms": _number(float, 100, 86_400_000),
    "replica_wait_ms": _milliseconds,
    "client_bytes": _number(int, 4096, 1 << 40),
    "client_stall_ms": _number(float, 100, 86_400_000),
    "drain_ms": _milliseconds,
    "die_with_parent": _number(int, 0, 1 << 31),
}
