"""A fleet as a user starts it, in a runtime directory of its own, for those who load or harm it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tinyloop_serve.native import demo_model_path
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.messages import Status

STOP_S = 30.0


class Fleet:
    """`tinyloop up` and what it says, from its READY line on."""

    def __init__(self, directory: str, *flags: str) -> None:
        self.directory = Path(directory)
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": directory, "PYTHONUNBUFFERED": "1"}
        self.environment.pop("TINYLOOP_ENDPOINT", None)
        self.said: list[str] = []  # on its standard error
        self.process = subprocess.Popen(
            self.command("up", *flags, "--die-with-parent", str(os.getpid())),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        if not self.ready.startswith("READY "):
            self.process.kill()
            self.listener.join(5.0)
            raise RuntimeError("the fleet did not start:\n" + "".join(self.said))
        self.endpoint = self.ready.partition("endpoint=")[2].split()[0]

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "tinyloop_serve.deploy.cli", *arguments]

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def pids(self, part: str) -> list[int]:
        """Of its living `dispatcher`, or of its living `replica`s."""
        return sorted(pid for pid, line in self.children().items() if f"tinyloop_serve.{part}" in line)

    def children(self) -> dict[int, str]:
        """Process ids of all that is alive and came from it, with their command lines."""
        return {pid: line for pid, line in descendants(self.process.pid) if alive(pid)}

    def status(self, patience_s: float = 30.0) -> Status:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with Client(self.endpoint, connect_timeout_s=2) as client:
                    return client.status()
            except TinyLoopError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def wait_ready(self, replicas: int, patience_s: float = 60.0) -> Status:
        """Until so many replicas serve."""
        deadline = time.monotonic() + patience_s
        while True:
            status = self.status()
            if sum(replica.state in ("ready", "busy") for replica in status.replicas) >= replicas:
                return status
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {status.replicas} are ready")
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to stop; returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def fleet_of(config: str, *flags: str) -> Iterator[Fleet]:
    """`config` is the text of its TOML file, `flags` are those of `tinyloop up`; the model is the demo's
    unless a flag says otherwise. If what is done with it fails, the last that the fleet said is printed."""
    with tempfile.TemporaryDirectory(prefix="tl-", ignore_cleanup_errors=True) as directory:
        file = Path(directory) / "fleet.toml"
        file.write_text(config)
        model = () if "--model" in flags else ("--model", str(demo_model_path()))
        fleet = Fleet(directory, "--config", str(file), *model, *flags)
        try:
            yield fleet
        except Exception:
            ended = fleet.process.poll()
            state = "lives" if ended is None else f"has ended with status {ended}"
            print(f"the fleet {state}; the last that it said:", file=sys.stderr)
            sys.stderr.writelines(fleet.said[-60:])
            raise
        finally:
            if fleet.process.poll() is None:
                fleet.stop()


def descendants(pid: int) -> list[tuple[int, str]]:
    """Process ids and command lines of all that came from `pid`."""
    parents: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
                commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    found, todo = [], [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            todo.append(child)
            found.append((child, commands.get(child, "")))
    return found


def state_of(pid: int) -> str:
    """The letter of proc(5); X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not reaped yet does not."""
    return state_of(pid) not in ("Z", "X")


def age_s(pid: int) -> float:
    """Since it was started; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """That it has used; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0
