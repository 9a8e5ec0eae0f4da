"""The fleet that a load is for: one that runs, or one started from a configuration file and stopped again."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.faults.fleet import fleet_of
from scripts.load.drive import Door
from scripts.load.mix import LoadFault, Mix
from tinyloop_serve.native import demo_model_path
from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.messages import Status

READY_S = 60.0
IDLE_S = 60.0
LOOK_S = 0.05


@dataclass(frozen=True)
class Target:
    door: Door
    model: Path | None  # what it serves, where that is known

    def status(self) -> Status:
        with Client(self.door.endpoint, **self.door.tenants[0]) as client:
            return client.status()

    def wait_calibrated(self, patience_s: float = READY_S) -> Status:
        """Until every replica serves, and has measured whether speculation pays."""
        return self._wait("not every replica is ready", patience_s, _settled)

    def wait_idle(self, patience_s: float = IDLE_S) -> Status:
        """Until nothing waits or runs."""
        return self._wait("requests are left", patience_s, lambda status: not status.waiting + status.running)

    def _wait(self, otherwise: str, patience_s: float, done: Any) -> Status:
        deadline = time.monotonic() + patience_s
        while not done(status := self.status()):
            if time.monotonic() > deadline:
                raise LoadFault(f"{self.door.endpoint}: {otherwise} after {patience_s:g} s: {status}")
            time.sleep(LOOK_S)
        return status


def _settled(status: Status) -> bool:
    serving = [each for each in status.replicas if each.state in ("ready", "busy")]
    starting = any(each.state == "starting" for each in status.replicas)
    return bool(serving) and not starting and all(each.speculation != "pending" for each in serving)


def running(endpoint: str, key_files: Sequence[str], server_key: str, model: Path | None) -> Target:
    """A fleet that is there; each of the `key_files` is a tenant."""
    tenants = tuple({"key": key, "server_key": server_key} for key in key_files) or ({},)
    return Target(Door(endpoint, tenants), model)


@contextlib.contextmanager
def started(config: Path, mix: Mix, model: Path | None, flags: Sequence[str]) -> Iterator[Target]:
    """A fleet of its own; `flags` are further ones of `tinyloop up`. With several tenants it listens on
    loopback tcp, with a key for each."""
    try:
        text = config.read_text("utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LoadFault(f"{config}: {error}") from error
    model = model or demo_model_path()
    words = ["--model", str(model), *flags]
    with contextlib.ExitStack() as stack:
        tenants: tuple[dict[str, Any], ...] = ({},)
        if mix.tenants > 1:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-keys-")))
            tenants = _tenants(folder, mix.tenants, tables)
            text = toml(tables)
            words += ["--endpoint", "tcp://127.0.0.1:0"]
        fleet = stack.enter_context(fleet_of(text, *words))
        yield Target(Door(fleet.endpoint, tenants), model)


def _tenants(folder: Path, count: int, tables: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Makes their keys and puts them into the configuration; -> the options of their clients."""
    server, server_public = keys.create("dispatcher", folder)
    tables.setdefault("dispatcher", {})["key"] = str(server)
    tables["tenants"] = {}
    options = []
    for number in range(count):
        key, public = keys.create(f"tenant-{number}", folder)
        tables["tenants"][f"tenant-{number}"] = {"keys": [public]}
        options.append({"key": str(key), "server_key": server_public})
    return tuple(options)


def toml(tables: dict[str, Any], above: str = "") -> str:
    """Tables of plain values and lists of them: JSON's spelling of those is TOML's too."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in tables.items() if not isinstance(value, dict)]
    for name, value in tables.items():
        if isinstance(value, dict):
            lines += [f"[{above}{name}]", toml(value, f"{above}{name}.")]
    return "\n".join(lines)


@contextlib.contextmanager
def scaffolds(target: Target, mix: Mix, vocabulary: int) -> Iterator[None]:
    """The mix's prefixes are there, for every tenant and at every loops and cache mode that it asks for."""
    with Client(target.door.endpoint, **target.door.tenants[0]) as client:
        held = [
            client.create_scaffold(mix.prefix(number, vocabulary), loops=loops, cache_mode=mode, shared=True)
            for number in range(mix.prefixes)
            for loops in mix.loops or (0,)
            for mode in dict.fromkeys(mix.cache_mode)
        ]
        yield
        for handle in held:
            handle.drop()
