"""The configuration file of a fleet: one TOML file, with tables for all that reads it.

`[dispatcher]`, `[tenants.NAME]` and `[replica]` are those processes' own, who judge what is in them;
`[load]` is a load test's. `[fleet]` is read here: what to run, for `tinyloop up` and for units of systemd
alike. A table that nobody reads is refused: a slip in its name would switch its settings off in silence.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

TABLES = ("dispatcher", "tenants", "replica", "fleet", "load")
FRONT = "ipc:///run/tinyloop/front/front.sock"
MOST_REPLICAS = 1024
SET_BY_FLEET = {  # flags of a replica that are not the [replica] table's to set, and what is
    "model": "[fleet] model, or --model",
    "device": "[fleet] devices, or --devices",
    "device_share": "[fleet] devices, or --devices, whose replicas have equal parts of each",
    "endpoint": "[fleet] front, or --endpoint, for clients; each replica is given its own",
    "name": "no such key: they are replica-0, replica-1 and so on",
    "die_with_parent": "no such key: whoever starts a replica sees to that",
}


class BadConfig(Exception):
    """The configuration file cannot be used."""


@dataclass(frozen=True)
class FleetTable:
    """The `[fleet]` table. The second half is for units of systemd alone."""

    model: str = ""  # absolute path of the artifact, on the machine that serves it; "" = not said
    replicas: int = 0  # 0 = not said
    devices: str = "cpu"  # that the replicas are on, in turn: "cuda:0,cuda:1"
    user: str = "tinyloop"
    python: str = sys.executable
    front: str = FRONT
    watchdog_s: float = 10.0


def load(path: str) -> dict[str, Any]:
    """What is in the file. Raises `BadConfig` for one that cannot be read, or that sets for every replica
    what each has to itself."""
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path}: not TOML: {error}") from error
    for name in TABLES:
        if not isinstance(tables.get(name, {}), dict):
            raise BadConfig(f"{path}: {name}: {tables[name]!r} is not accepted; expected a [{name}] table")
    for name, value in tables.get("replica", {}).items():
        if instead := SET_BY_FLEET.get(name.replace("-", "_")):
            raise BadConfig(f"{path}: replica.{name}: {value!r} is not accepted; expected {instead}")
    return tables


def read(path: str) -> dict[str, Any]:
    """The same; raises `BadConfig` for a table that nobody reads, too."""
    tables = load(path)
    for name in tables:
        if name not in TABLES:
            accepted = ", ".join(f"[{each}]" for each in TABLES)
            raise BadConfig(f"{path}: [{name}] is not accepted; expected one of {accepted}")
    return tables


def fleet_of(tables: dict[str, Any]) -> FleetTable:
    """Raises `BadConfig` naming the key at fault."""
    table = tables.get("fleet", {})
    known = {field.name: str(field.type) for field in fields(FleetTable)}
    for name, value in table.items():
        if name not in known:
            raise _refused(name, value, f"one of {', '.join(known)}")
        kind = {"int": int, "float": (int, float), "str": str}[known[name]]
        if isinstance(value, bool) or not isinstance(value, kind):  # type: ignore[arg-type]
            raise _refused(name, value, f"a value of type {known[name]}")
    for name in ("model", "python"):
        if name in table and not os.path.isabs(table[name]):
            raise _refused(name, table[name], "an absolute path")
    if "replicas" in table and not 1 <= table["replicas"] <= MOST_REPLICAS:
        raise _refused("replicas", table["replicas"], f"a whole number from 1 to {MOST_REPLICAS}")
    return FleetTable(**table)


def _refused(name: str, value: object, accepted: str) -> BadConfig:
    return BadConfig(f"fleet.{name}: {value!r} is not accepted; expected {accepted}")


def replica_flags(tables: dict[str, Any]) -> tuple[str, ...]:
    """The `[replica]` table as flags: `max_handles = 4` is `--max-handles 4`, and a list is the flag once for
    each. The replica judges names and values."""
    flags: list[str] = []
    for name, value in tables.get("replica", {}).items():
        for each in value if isinstance(value, list) else [value]:
            flags += [f"--{name.replace('_', '-')}", str(each)]
    return tuple(flags)


def dispatcher_values(tables: dict[str, Any], front: str, replicas: Sequence[str]) -> dict[str, Any]:
    """What the dispatcher will read of the file, beside the flags for `front` and its `replicas`."""
    tenants = {"tenants": tables["tenants"]} if "tenants" in tables else {}
    return {**tables.get("dispatcher", {}), "front": front, "replicas": list(replicas), **tenants}
