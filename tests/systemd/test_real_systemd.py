"""A fleet under a real systemd, booted in namespaces of its own. Catches: what unit files promise and systemd
does not keep: a replica that is not restarted, a watchdog that does not bite, a stop that takes too long."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinyloop_serve.deploy
from tinyloop_serve.deploy import systemd
from tinyloop_serve.native import GenerateConfig, Model, demo_model_path
from tinyloop_serve.protocol.client import Client

UNSHARE = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child"]
SYSTEMD = "/lib/systemd/systemd"
PATIENCE_S = 90.0
WATCHDOG_S = 3.0
CONFIG = """
[fleet]
model = "{model}"
python = "{python}"
replicas = 2
watchdog_s = {watchdog}
[dispatcher]
loss_ms = 1000
[replica]
threads = 1
speculation = "off"
memory_mib = 1000
"""


def why_not() -> str:
    """The reason why a systemd cannot be booted here, or ""."""
    if os.geteuid() != 0:
        return "booting a systemd in namespaces needs root"
    for path in (SYSTEMD, shutil.which("unshare"), shutil.which("nsenter"), shutil.which("systemd-sysusers")):
        if not path or not os.path.exists(path):
            return "systemd, unshare, nsenter or systemd-sysusers is not installed here"
    overlay = "d=$(mktemp -d) && mount -t tmpfs t $d && mkdir $d/u $d/w $d/m && mount -t overlay o -o"
    overlay += " lowerdir=/,upperdir=$d/u,workdir=$d/w $d/m && mount -t cgroup2 none /sys/fs/cgroup"
    tried = subprocess.run([*UNSHARE, "bash", "-c", overlay], capture_output=True, text=True)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """The booted systemd."""

    def __init__(self, tmp_path: Path) -> None:
        config = tmp_path / "fleet.toml"
        config.write_text(
            CONFIG.format(model=demo_model_path().resolve(), python=sys.executable, watchdog=WATCHDOG_S)
        )
        tree = tmp_path / "tree"
        systemd.render(str(config), tree)
        if python_path := os.environ.get("PYTHONPATH"):
            absolute = ":".join(os.path.abspath(part) for part in python_path.split(":"))
            with (tree / "etc/tinyloop/tinyloop.env").open("a") as file:
                file.write(f"PYTHONPATH={absolute}\n")
        package = Path(tinyloop_serve.deploy.__file__).resolve().parent.parent
        places = (package, demo_model_path().parent, Path(sys.prefix), Path(sys.executable).resolve().parent)
        reachable = " ".join(str(place.resolve()) for place in places)
        self._log = tmp_path / "boot.log"
        self.pid = 0
        with self._log.open("w") as log:
            self._shell = subprocess.Popen(
                [*UNSHARE, "bash", str(Path(__file__).parent / "boot.sh")],
                env={**os.environ, "TREE": str(tree), "REACHABLE": reachable},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = wait_until(self._find_systemd, self.log)
        wait_until(lambda: self.systemctl("is-system-running", check=False) == "running", self.log)
        self.endpoint = f"ipc:///proc/{self.pid}/root/run/tinyloop/front/front.sock"

    def _find_systemd(self) -> int:
        assert self._shell.poll() is None, self.log()
        children = Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split()
        for child in map(int, children):
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return child
        return 0

    def log(self) -> str:
        """What it said while booting, and how its units are."""
        told = self._log.read_text()[-4000:]
        if self.pid:
            told += self.systemctl("status", "--no-pager", "--full", "tinyloop*", check=False)
        return told

    def systemctl(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-p", "-r", "-w", "systemctl", *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout.strip()

    def property(self, unit: str, name: str) -> str:
        return self.systemctl("show", unit, f"--property={name}", "--value")

    def main_pid(self, unit: str) -> int:
        """As we see it from outside the namespace."""
        inside = self.property(unit, "MainPID")
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    status = (entry / "status").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                found = next(line.split() for line in status.splitlines() if line.startswith("NSpid:"))
                if len(found) == 3 and found[2] == inside:
                    return int(entry.name)
        return 0

    def close(self) -> None:
        """SIGTERM does not end it; its namespace dies with it."""
        os.kill(self.pid, signal.SIGKILL)
        self._shell.wait(30)


def wait_until(what: Callable[[], Any], explain: Callable[[], str], patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen:\n" + explain()
        time.sleep(0.05)
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if reason := why_not():
        pytest.skip(reason)
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        machine.close()


@pytest.mark.timeout(300)
def test_a_fleet_under_a_real_systemd(machine: Machine) -> None:
    with Model(demo_model_path(), threads=1) as model:
        prompt = list(range(10, 26))
        alone = model.generate(prompt, GenerateConfig(loops=8, max_tokens=500, ignore_eos=True)).tokens
    replicas = ["tinyloop-replica@0.service", "tinyloop-replica@1.service"]
    machine.systemctl("start", "tinyloop.target")
    for unit in ["tinyloop-dispatcher.service", *replicas]:
        wait_until(lambda unit=unit: machine.property(unit, "ActiveState") == "active", machine.log)
    user = Path(f"/proc/{machine.main_pid(replicas[0])}/status").read_text().split("Uid:")[1].split()[0]
    assert user != "0", "the services run as a user of their own"

    with Client(machine.endpoint, connect_timeout_s=30) as client:

        def serving(count: int) -> bool:
            return sum(r.state in ("ready", "busy") for r in client.status().replicas) == count

        wait_until(lambda: serving(2), machine.log)
        results: list[list[int]] = []

        def stream() -> None:
            results.append(list(client.generate(prompt, loops=8, max_tokens=500, ignore_eos=True).tokens))

        streams = [threading.Thread(target=stream) for _ in range(6)]
        for thread in streams:
            thread.start()
        wait_until(lambda: client.status().running >= 2, machine.log)

        killed = machine.main_pid(replicas[0])
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: machine.property(replicas[0], "NRestarts") == "1", machine.log)
        for thread in streams:
            thread.join(PATIENCE_S)
        assert results == [alone] * 6, "kill -9 under load costs no token"
        wait_until(lambda: serving(2), machine.log)

        os.kill(machine.main_pid(replicas[1]), signal.SIGSTOP)
        wait_until(lambda: machine.property(replicas[1], "NRestarts") == "1", machine.log)
        wait_until(lambda: serving(2), machine.log)
        assert list(client.generate(prompt, loops=8, max_tokens=500, ignore_eos=True).tokens) == alone

    begin = time.monotonic()
    machine.systemctl("stop", "tinyloop.target")
    for unit in ["tinyloop-dispatcher.service", *replicas]:
        wait_until(lambda unit=unit: machine.property(unit, "ActiveState") == "inactive", machine.log)
        assert machine.property(unit, "Result") == "success"
    assert time.monotonic() - begin < 30
    assert machine.systemctl("list-units", "--failed", "--no-legend", "tinyloop*") == ""
