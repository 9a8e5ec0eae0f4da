"""`tinyloop reload`: a changed model file comes into a running fleet, one replica after the other.

A fleet of `tinyloop up` does it by itself when it gets SIGUSR1; here it is told, and waited for. Where the
replicas are systemd's units, the steps of reload.py are gone through here, and systemd restarts the replicas.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tinyloop_serve.deploy import local, systemd
from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.deploy.outcome import FAILED, CommandFault
from tinyloop_serve.deploy.reload import LOOK_S, Reload, Verdict
from tinyloop_serve.protocol.errors import ConnectFailed

UNIT_NAME = "replica-"  # of a replica; what follows is the instance of its unit


def of_local_fleet(endpoint: str, *, as_json: bool) -> int:
    """Tells `tinyloop up`, and waits. Raises `ConnectFailed` where this user runs no fleet at `endpoint`."""
    if (record := local.read(endpoint)) is None:
        connect(endpoint).close()  # nobody there: says so itself
        raise CommandFault(
            f"the fleet at {endpoint} was not started by `tinyloop up` of this user;"
            " for the systemd units: tinyloop reload --systemd"
        )
    wanted = record.reloads + (2 if record.reloading else 1)  # one that is on its way saw an older file
    os.kill(record.pid, signal.SIGUSR1)
    while (now := local.read(endpoint)) is not None and now.reloads < wanted:
        time.sleep(LOOK_S)
    if now is None:
        raise ConnectFailed(f"the fleet at {endpoint} ended during the reload")
    return _report(Verdict(now.verdict, now.reloaded), record.model, as_json)


def of_units(config: str, endpoint: str, *, as_json: bool) -> int:
    """Raises `BadConfig`, `ConnectFailed`, or `CommandFault` when systemd refuses."""
    fleet = systemd.fleet_of(config)
    endpoint = endpoint or fleet.front
    with connect(endpoint) as client:
        names = [replica.name or replica.endpoint for replica in client.status().replicas]
    if strangers := [name for name in names if not name.startswith(UNIT_NAME)]:
        raise CommandFault(f"{', '.join(strangers)}: not of a unit tinyloop-replica@; expected {UNIT_NAME}N")
    reload = Reload(endpoint, fleet.model, names)
    while (verdict := reload.verdict()) is None:
        if (name := reload.next_to_restart()) is None:
            time.sleep(LOOK_S)
        elif refused := _restart_unit(name):
            with connect(endpoint) as client:
                client.control("resume", name)  # with the old file, as before
            raise CommandFault(f"{refused}; {name} goes on with the model that it has")
    return _report(verdict, fleet.model, as_json)


def _restart_unit(name: str) -> str:
    """Returns "" or why systemd did not."""
    unit = f"tinyloop-replica@{name.removeprefix(UNIT_NAME)}.service"
    try:
        done = subprocess.run(
            ["systemctl", "restart", "--no-block", unit], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"systemctl restart {unit}: {error.strerror}"
    return "" if done.returncode == 0 else f"systemctl restart {unit}: {done.stderr.strip()}"


def _report(verdict: Verdict, model: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"reloaded": verdict.good, "model": str(Path(model)), "message": verdict.text}))
    else:
        print(verdict.text, file=sys.stdout if verdict.good else sys.stderr)
    return 0 if verdict.good else FAILED
