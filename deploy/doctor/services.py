"""The units of systemd: whether the installed ones are those of the configuration, and how they are."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tinyloop_serve.deploy import environment, systemd
from tinyloop_serve.deploy.doctor.finding import Finding, fault, ok, warning
from tinyloop_serve.deploy.tables import BadConfig

UNITS = ("tinyloop.target", "tinyloop-dispatcher.service")


def findings(path: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Of a configuration file with a `[fleet]` table, against the files below `root`."""
    try:
        wanted = systemd.rendered(path)
        fleet = systemd.fleet_of(path)
    except BadConfig as error:
        yield fault("services", str(error))
        return
    install = f"tinyloop deploy systemd --config {path} --prefix {root}"
    found = {name: _text(root / name) for name in wanted}
    if not any(found[name] for name in found if name.startswith(systemd.UNITS)):
        yield ok("services", f"the units are not installed ({install})")
        return
    stale = [f"/{name}" for name in wanted if found[name] != wanted[name] and not name.endswith(".env")]
    if stale:
        remedy = f"{install}; systemctl daemon-reload; systemctl restart tinyloop.target"
        yield warning("services", f"not as the configuration gives them: {', '.join(stale)}", remedy)
    else:
        yield ok("services", "the installed units are those of the configuration")
    yield from _environment(root)
    try:
        pwd.getpwnam(fleet.user)
    except KeyError:
        yield fault("services", f"no user {fleet.user}", "systemd-sysusers")
    if root == Path("/") and shutil.which("systemctl"):
        yield from _states([*UNITS, *(f"tinyloop-replica@{n}.service" for n in range(fleet.replicas))])


def _environment(root: Path) -> Iterator[Finding]:
    for path in sorted((root / "etc/tinyloop").glob("*.env")):
        lines = (line.strip() for line in _text(path).splitlines())
        given = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith(("#", ";")))
        for name, text in environment.faults(given):
            yield fault("environment", f"{name} in {path}: {text}", f"edit {path}")


def _states(units: list[str]) -> Iterator[Finding]:
    asked = subprocess.run(["systemctl", "is-active", *units], capture_output=True, text=True, check=False)
    for unit, state in zip(units, asked.stdout.split(), strict=False):
        if state == "failed":
            yield fault(
                "services", f"{unit} has failed", f"journalctl -u {unit}, then systemctl restart {unit}"
            )
        elif state != "active":
            yield warning("services", f"{unit} is {state}", f"systemctl start {unit}")
        else:
            yield ok("services", f"{unit} is active")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8") if os.path.isfile(path) else ""
    except OSError:
        return ""
