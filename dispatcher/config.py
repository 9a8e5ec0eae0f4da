"""Configuration of one dispatcher: parsed once, from a TOML file and flags, into a frozen structure.

Keys of the file's `[dispatcher]` table and flags are the fields of `Config` (`max_wait_ms` is
`--max-wait-ms`); a flag wins over the file. Every value passes the one reader of its field, whose refusal
names field, value and what is accepted. This file opens nothing but the configuration file.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from tinyloop_serve.dispatcher import readers
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.dispatcher.tenants import Tenant, Tenants
from tinyloop_serve.protocol.keys import needs_keys
from tinyloop_serve.protocol.limits import MAX_BODY_BYTES
from tinyloop_serve.protocol.modes import CACHE_MODES

FEATURES = ("beam", "cache_window", "handles", "speculative", "tree_speculative")
EXIT_CONFIG = 78  # EX_CONFIG: a service manager must not restart us


@dataclass(frozen=True)
class Config:
    """Times in milliseconds, sizes in bytes, lengths in tokens."""

    front: str  # endpoint that clients connect to
    replicas: tuple[str, ...]  # endpoints that replicas bind
    batch_sizes: tuple[int, ...] = (2, 4, 8)  # lanes of one generate_batch; (1,): never more than one
    min_batch_size: int = 2  # fewer ready requests than this run one by one
    max_wait_ms: float = 8.0  # how long a request waits for company while a replica is idle
    max_tokens_bands: tuple[int, ...] = (32, 128, 512, 2048)  # upper ends; requests of one band share batches
    priority_ms: float = 1000.0  # a step of priority counts as having arrived this much earlier
    cache_modes: tuple[str, ...] = CACHE_MODES  # the product's allow-list
    features: tuple[str, ...] = FEATURES  # the same, for what a request may use beside plain decoding
    max_waiting: int = 1024  # requests not yet on a replica; more are refused as overloaded
    max_queue_ms: float = 30_000.0  # a request that would wait longer is refused as overloaded; 0 = no bound
    poison_losses: int = 2  # replicas lost in a row, at the same token, until a request is not tried again
    sticky_wait_ms: float = (
        50.0  # how long a request waits for the replica that holds its handle, others idle
    )
    max_lease_ms: float = 3_600_000.0  # the longest lease of a handle
    max_body: int = MAX_BODY_BYTES  # of one message body
    heartbeat_ms: float = 250.0  # a replica is pinged this often
    loss_ms: float = 2000.0  # a ping unanswered for this long: the replica is lost
    stall_ms: float = 30_000.0  # work but no step for this long: the replica is lost
    replica_wait_ms: float = 10_000.0  # a request waits this long for any replica; 0 = refuse at once
    client_bytes: int = 8 << 20  # held for one client that reads slowly; more and its requests are failed
    client_stall_ms: float = 30_000.0  # the same when it reads nothing for this long
    http: str = ""  # HOST:PORT of the pages for monitoring (/metrics, /health, /ready); "" = none
    drain_ms: float = 5000.0  # how long running requests may go on after SIGTERM
    key: str = ""  # file of our secret CURVE key; needed for tcp beyond loopback
    replica_keys: tuple[str, ...] = ()  # public CURVE keys of the replicas, Z85: one for all, or one for each
    tenants: Tenants = Tenants({})  # the configuration file's [tenants.NAME] tables
    die_with_parent: int = 0  # process id of the supervisor that we stop with; 0 = none


def parse(arguments: Sequence[str]) -> Config:
    """The configuration from command-line `arguments`.

    Raises `ConfigError`; the process must then exit with `EXIT_CONFIG`.
    """
    return load(read_flags(arguments))


def load(raw: dict[str, object]) -> Config:
    """The configuration from raw values (numbers, lists, or the strings of the command line).

    Raises `ConfigError`."""
    for name in raw:
        if name not in _READERS:
            raise readers.refuse(name, raw[name], "one of " + ", ".join(sorted(_READERS)))
    for name in ("front", "replicas"):
        if name not in raw:
            raise readers.refuse(name, None, "an endpoint: set it in the file or by flag")
    config = Config(**{name: _READERS[name](name, value) for name, value in raw.items()})  # type: ignore[arg-type]
    if config.min_batch_size > max(config.batch_sizes):
        accepted = f"at most {max(config.batch_sizes)}, the largest of batch_sizes"
        raise readers.refuse("min_batch_size", config.min_batch_size, accepted)
    if config.loss_ms <= config.heartbeat_ms:
        raise readers.refuse("loss_ms", config.loss_ms, f"more than heartbeat_ms = {config.heartbeat_ms:g}")
    for name, endpoint in [("front", config.front)] + [
        (f"replicas[{index}]", each) for index, each in enumerate(config.replicas)
    ]:
        if not config.key and needs_keys(endpoint):
            accepted = "a loopback address (127.0.0.1, [::1]), or any with a `key` to encrypt with"
            raise readers.refuse(name, endpoint, accepted)
    if config.replica_keys and len(config.replica_keys) not in (1, len(config.replicas)):
        accepted = f"one key for all replicas, or {len(config.replicas)}"
        raise readers.refuse("replica_keys", len(config.replica_keys), accepted)
    if config.front in config.replicas:
        raise readers.refuse("replicas", config.front, "endpoints other than front")
    return config


def read_flags(arguments: Sequence[str]) -> dict[str, object]:
    """Raw values of the flags, over those of the `--config` file."""
    parser = _Parser("tinyloop-dispatcher", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with a [dispatcher] table")
    for field in fields(Config):
        if field.name == "replicas":
            parser.add_argument("--replica", dest="replicas", action="append", metavar="ENDPOINT")
        elif field.name != "tenants":  # tables: in the file alone
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, dest=field.name, metavar=field.name.rpartition("_")[2].upper())
    flags = vars(parser.parse_args(list(arguments)))
    path = flags.pop("config", None)
    return (read_file(Path(path)) if path is not None else {}) | flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_file(path: Path) -> dict[str, object]:
    """The `[dispatcher]` and `[tenants.NAME]` tables of a TOML file; others belong to other processes."""
    try:
        with path.open("rb") as file:
            everything = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise readers.refuse("config", str(path), f"a readable TOML file ({error})") from error
    table = everything.get("dispatcher", {})
    if not isinstance(table, dict):
        raise readers.refuse("config", str(path), "a [dispatcher] table")
    return table | ({"tenants": everything["tenants"]} if "tenants" in everything else {})


def _tenants(field: str, value: Any) -> object:
    if not isinstance(value, dict) or not all(isinstance(table, dict) for table in value.values()):
        raise readers.refuse(field, value, "tables [tenants.NAME]")
    found: dict[str, Tenant] = {}
    owners: dict[str, str] = {}
    for name, table in value.items():
        where = f"tenants.{name}"
        for option in table:
            if option not in _TENANT_READERS:
                raise readers.refuse(
                    f"{where}.{option}", table[option], "one of " + ", ".join(_TENANT_READERS)
                )
        options = {key: _TENANT_READERS[key](f"{where}.{key}", each) for key, each in table.items()}
        found[name] = Tenant(name, **options)  # type: ignore[arg-type]
        for key in found[name].keys:
            if key in owners:
                raise readers.refuse(
                    f"{where}.keys", key, f"a key that is not also of tenant {owners[key]!r}"
                )
            owners[key] = name
    return Tenants(found)


_milliseconds = readers.number(float, 0, 86_400_000)
_READERS: dict[str, readers.Reader] = {
    "front": readers.endpoint,
    "replicas": readers.several(readers.endpoint),
    "batch_sizes": readers.several(
        readers.number(int, 1, 32)
    ),  # more lanes of long prompts would not fit one Run
    "min_batch_size": readers.number(int, 1, 32),
    "max_wait_ms": _milliseconds,
    "max_tokens_bands": readers.several(readers.number(int, 1, 1 << 24)),
    "priority_ms": _milliseconds,
    "cache_modes": readers.several(readers.one_of(CACHE_MODES)),
    "features": readers.several(readers.one_of(FEATURES)),
    "max_waiting": readers.number(int, 1, 1_000_000),
    "max_queue_ms": _milliseconds,
    "poison_losses": readers.number(int, 1, 1000),
    "sticky_wait_ms": _milliseconds,
    "max_lease_ms": _milliseconds,
    "max_body": readers.number(int, 1024, MAX_BODY_BYTES),
    "heartbeat_ms": readers.number(float, 10, 60_000),
    "loss_ms": readers.number(float, 20, 600_000),
    "stall_ms": readers.number(float, 100, 86_400_000),
    "replica_wait_ms": _milliseconds,
    "client_bytes": readers.number(int, 4096, 1 << 40),
    "client_stall_ms": readers.number(float, 100, 86_400_000),
    "http": readers.http_address,
    "drain_ms": _milliseconds,
    "key": readers.text,
    "replica_keys": readers.several(readers.key),
    "tenants": _tenants,
    "die_with_parent": readers.number(int, 0, 1 << 31),
}
_TENANT_READERS: dict[str, readers.Reader] = {
    "keys": readers.several(readers.key),
    "weight": readers.number(float, 0.001, 1000),
    "max_waiting": readers.number(int, 0, 1_000_000),
    "max_running": readers.number(int, 0, 1_000_000),
    "max_handles": readers.number(int, 0, 1_000_000),
    "max_priority": readers.number(int, -10, 10),
    "admin": readers.boolean,
}
