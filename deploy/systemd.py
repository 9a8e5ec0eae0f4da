"""`tinyloop deploy systemd`: unit files, a user, environment files and the configuration of a fleet, rendered
below a prefix.

The templates are deploy/units/; the configuration's `[fleet]` table says what fills them. Nothing is
installed, started or asked of a running systemd.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tinyloop_serve.deploy import tables
from tinyloop_serve.deploy.placement import Place, named, placed
from tinyloop_serve.deploy.plan import Plan
from tinyloop_serve.deploy.tables import BadConfig, FleetTable
from tinyloop_serve.dispatcher.config import Config as Dispatcher
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.replica.config import Config as Replica

UNITS = "etc/systemd/system"
ON_DEVICE = ("--device", "${DEVICE}", "--device-share", "${DEVICE_SHARE}")  # each unit's own: device.conf
STOP_MARGIN_S = 5.0  # between a process's own drain deadline and the manager's patience


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
    configured = tables.read(config_path)
    fleet = _fleet(configured)
    places = _places(fleet)
    values = _values(fleet, _checked(configured, fleet), configured, on_devices=bool(places))
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
    made["etc/tinyloop/fleet.toml"] = Path(config_path).read_text("utf-8")
    return made


def fleet_of(config_path: str) -> FleetTable:
    """The `[fleet]` table of a configuration file, as units need it. Raises `BadConfig`."""
    return _fleet(tables.read(config_path))


def _fleet(configured: dict[str, Any]) -> FleetTable:
    fleet = tables.fleet_of(configured)
    if not fleet.model:
        raise BadConfig("fleet.model: missing; expected the artifact's absolute path")
    return replace(fleet, replicas=fleet.replicas or Plan.replicas)


def _checked(configured: dict[str, Any], fleet: FleetTable) -> Dispatcher:
    """The dispatcher's configuration, as it will read it itself."""
    try:
        return load(tables.dispatcher_values(configured, fleet.front, _sockets(fleet)))
    except ConfigError as error:
        raise BadConfig(f"dispatcher.{error}") from error


def _places(fleet: FleetTable) -> list[Place]:
    """None where all replicas are on the processor."""
    if fleet.devices == "cpu":
        return []
    try:
        return placed(fleet.replicas, named(fleet.devices))
    except ValueError as error:
        raise BadConfig(f"fleet.devices: {error}") from error


def _sockets(fleet: FleetTable) -> list[str]:
    return [f"ipc:///run/tinyloop/replica-{n}/replica.sock" for n in range(fleet.replicas)]


def _values(
    fleet: FleetTable, dispatcher: Dispatcher, configured: dict[str, Any], *, on_devices: bool
) -> dict[str, str]:
    networked = fleet.front.startswith("tcp://") or bool(dispatcher.http)
    # A virtual environment in /srv may well link to an interpreter in somebody's home.
    paths = [path for name in (fleet.python, fleet.model) for path in (name, os.path.realpath(name))]
    at_home = any(path.startswith(("/home/", "/root/")) for path in paths)
    drain_s = float(configured.get("replica", {}).get("drain_s", Replica.drain_s))
    key = dispatcher.key
    values = {
        "user": fleet.user,
        "python": fleet.python,
        "model": fleet.model,
        "front": fleet.front,
        "replica units": " ".join(f"tinyloop-replica@{n}.service" for n in range(fleet.replicas)),
        "replica flags": " ".join(f"--replica {socket}" for socket in _sockets(fleet)),
        "replica options": " ".join([*tables.replica_flags(configured), *(ON_DEVICE if on_devices else ())]),
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
