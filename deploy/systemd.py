"""`tinyloop deploy systemd`: unit files, a user, environment files and the configuration of a fleet, rendered
below a prefix.

The templates are deploy/units/; the configuration's `[fleet]` table says what fills them. Nothing is
installed, started or asked of a running systemd.
"""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from tinyloop_serve.deploy.fleet import MOST_REPLICAS, BadConfig, replica_flags
from tinyloop_serve.deploy.placement import Place, named, placed
from tinyloop_serve.dispatcher.config import Config as Dispatcher
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.replica.config import Config as Replica

UNITS = "etc/systemd/system"
FRONT = "ipc:///run/tinyloop/front/front.sock"
ON_DEVICE = ("--device", "${DEVICE}", "--device-share", "${DEVICE_SHARE}")  # each unit's own: device.conf
STOP_MARGIN_S = 5.0  # between a process's own drain deadline and the manager's patience


@dataclass(frozen=True)
class Fleet:
    """The `[fleet]` table: what the units need beyond `[dispatcher]`, `[tenants.NAME]` and `[replica]`."""

    model: str  # absolute path of the artifact on the target machine
    replicas: int = 2
    user: str = "tinyloop"
    python: str = sys.executable
    front: str = FRONT
    devices: str = "cpu"  # that the replicas are on, in turn: "cuda:0,cuda:1"
    watchdog_s: float = 10.0


def render(config_path: str, prefix: Path) -> list[Path]:
    """Writes the files; returns their paths. Raises `BadConfig` naming the table and the key at fault."""
    written = []
    for name, content in rendered(config_path).items():
        path = prefix / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        written.append(path)
    return written


def rendered(config_path: str) -> dict[str, str]:
    """The files' contents, by their paths below the prefix. Raises `BadConfig`."""
    text, tables = _read(config_path)
    fleet = _fleet(tables)
    places = _places(fleet)
    dispatcher = _checked(tables, fleet)
    flags = replica_flags(config_path)
    values = _values(fleet, dispatcher, tables, flags, on_devices=bool(places))
    units = files("tinyloop_serve.deploy").joinpath("units")
    made = {
        f"{UNITS}/{name}": _fill(units.joinpath(name).read_text("utf-8"), values)
        for name in ("tinyloop.target", "tinyloop-dispatcher.service", "tinyloop-replica@.service")
    }
    for n, place in enumerate(places):
        made[f"{UNITS}/tinyloop-replica@{n}.service.d/device.conf"] = (
            f"[Service]\nEnvironment=DEVICE={place.device} DEVICE_SHARE={place.share}\n"
        )
    made["usr/lib/sysusers.d/tinyloop.conf"] = _fill(
        units.joinpath("tinyloop.sysusers").read_text("utf-8"), values
    )
    made["etc/tinyloop/tinyloop.env"] = units.joinpath("tinyloop.env").read_text("utf-8")
    made["etc/tinyloop/fleet.toml"] = text
    return made


def fleet_of(config_path: str) -> Fleet:
    """The `[fleet]` table of a configuration file. Raises `BadConfig`."""
    return _fleet(_read(config_path)[1])


def _read(path: str) -> tuple[str, dict[str, Any]]:
    try:
        text = Path(path).read_text("utf-8")
        return text, tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path}: {error}") from error


def _fleet(tables: dict[str, Any]) -> Fleet:
    table = tables.get("fleet", {})
    known = {field.name: field for field in fields(Fleet)}
    for name, value in table.items():
        if name not in known:
            raise BadConfig(f"fleet.{name}: {value!r} is not accepted; expected one of {', '.join(known)}")
        kind = {"int": int, "float": (int, float), "str": str}[str(known[name].type)]
        if isinstance(value, bool) or not isinstance(value, kind):  # type: ignore[arg-type]
            raise BadConfig(f"fleet.{name}: {value!r} is not accepted; expected a {known[name].type}")
    if "model" not in table:
        raise BadConfig("fleet.model: missing; expected the artifact's absolute path")
    fleet = Fleet(**table)
    for name in ("model", "python"):
        if not os.path.isabs(getattr(fleet, name)):
            value = getattr(fleet, name)
            raise BadConfig(f"fleet.{name}: {value!r} is not accepted; expected an absolute path")
    if not 1 <= fleet.replicas <= MOST_REPLICAS:
        raise BadConfig(f"fleet.replicas: {fleet.replicas} is not accepted; expected 1 to {MOST_REPLICAS}")
    return fleet


def _checked(tables: dict[str, Any], fleet: Fleet) -> Dispatcher:
    """The dispatcher's configuration, as it will read it itself."""
    raw = dict(tables.get("dispatcher", {}))
    raw |= {"front": fleet.front, "replicas": _sockets(fleet)}
    if "tenants" in tables:
        raw["tenants"] = tables["tenants"]
    try:
        return load(raw)
    except ConfigError as error:
        raise BadConfig(f"dispatcher.{error}") from error


def _places(fleet: Fleet) -> list[Place]:
    """None where all replicas are on the processor."""
    if fleet.devices == "cpu":
        return []
    try:
        return placed(fleet.replicas, named(fleet.devices))
    except ValueError as error:
        raise BadConfig(f"fleet.devices: {error}") from error


def _sockets(fleet: Fleet) -> list[str]:
    return [f"ipc:///run/tinyloop/replica-{n}/replica.sock" for n in range(fleet.replicas)]


def _values(
    fleet: Fleet, dispatcher: Dispatcher, tables: dict[str, Any], flags: tuple[str, ...], *, on_devices: bool
) -> dict[str, str]:
    networked = fleet.front.startswith("tcp://") or bool(dispatcher.http)
    # A virtual environment in /srv may well link to an interpreter in somebody's home.
    paths = [path for name in (fleet.python, fleet.model) for path in (name, os.path.realpath(name))]
    at_home = any(path.startswith(("/home/", "/root/")) for path in paths)
    drain_s = float(tables.get("replica", {}).get("drain_s", Replica.drain_s))
    key = dispatcher.key
    values = {
        "user": fleet.user,
        "python": fleet.python,
        "model": fleet.model,
        "front": fleet.front,
        "replica units": " ".join(f"tinyloop-replica@{n}.service" for n in range(fleet.replicas)),
        "replica flags": " ".join(f"--replica {socket}" for socket in _sockets(fleet)),
        "replica options": " ".join([*flags, *(ON_DEVICE if on_devices else ())]),
        "dispatcher credential": f"LoadCredential=dispatcher.key:{key}" if key else "",
        "dispatcher key": "--key %d/dispatcher.key" if key else "",
        "watchdog s": f"{fleet.watchdog_s:g}",
        "dispatcher stop s": f"{dispatcher.drain_ms / 1000 + STOP_MARGIN_S:g}",
        "replica stop s": f"{drain_s + STOP_MARGIN_S:g}",
        "protect home": "read-only" if at_home else "yes",
        "private devices": "no" if on_devices else "yes",
        "device policy": "auto" if on_devices else "closed",
        "private network": "no" if networked else "yes",
        "address families": "AF_UNIX AF_INET AF_INET6" if networked else "AF_UNIX",
        "address deny": "" if networked else "any",
        "deny write execute": "no" if on_devices else "yes",
    }
    hardening = files("tinyloop_serve.deploy").joinpath("units", "hardening.conf").read_text("utf-8")
    values["hardening"] = _fill(hardening, values).rstrip()
    return values


def _fill(template: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        template = template.replace(f"<{name}>", value)
    lines = [line.rstrip() for line in template.splitlines()]
    return "\n".join(_spaced([line for line in lines if line])) + "\n"


def _spaced(lines: list[str]) -> list[str]:
    """An empty line before every section but the first."""
    return [("\n" + line) if line.startswith("[") and at else line for at, line in enumerate(lines)]
