"""Fleets for tests: started as a user starts them, each in a runtime directory of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tinyloop_serve.native import GenerateConfig, Model, demo_model_path
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.messages import ReplicaStatus, Status
from tinyloop_serve.replica.text import Vocabulary

PATIENCE_S = 60.0  # for what must happen but may be slow on a busy machine


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return wait_until


def wait_until(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Its first true value."""
    deadline = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> dict[int, str]:
    """Process ids of its children, with their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdecimal()
                and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid
            ):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


class Fleet:
    """`tinyloop up`, its messages, and the commands that talk to it."""

    def __init__(self, directory: str, *flags: str) -> None:
        self.directory = Path(directory)
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": directory, "PYTHONUNBUFFERED": "1"}
        self.environment.pop("TINYLOOP_ENDPOINT", None)
        self.endpoint = f"ipc://{directory}/tinyloop/front.sock"
        command = self.command("up", *flags, "--die-with-parent", str(os.getpid()))
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment
        )
        self.ready = ""  # its READY line
        self.said: list[str] = []  # on standard error
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said += self.process.stderr

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("READY "), self.said
        return line

    def client(self, **options: Any) -> Client:
        return Client(self.endpoint, **options)

    def status(self) -> Status:
        with self.client() as client:
            return client.status()

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "tinyloop_serve.deploy.cli", *arguments]

    def run(self, *arguments: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """A `tinyloop` command, to its end."""
        return subprocess.run(
            self.command(*arguments),
            input=text,
            capture_output=True,
            text=True,
            env=self.environment | variables,
            timeout=PATIENCE_S,
        )

    def children(self) -> dict[int, str]:
        """Process ids of its living children, with their command lines."""
        return {pid: line for pid, line in children_of(self.process.pid).items() if alive(pid)}

    def replica(self, name: str) -> ReplicaStatus:
        """By name, as the dispatcher sees it."""
        return next(replica for replica in self.status().replicas if replica.name == name)

    def wait_all_ready(self) -> None:
        wait_until(lambda: all(replica.state in ("ready", "busy") for replica in self.status().replicas))

    def freeze_busy(self) -> ReplicaStatus:
        """Holds the one replica that decodes, in the middle of its stream, for as long as a test likes."""
        replicas = [pid for pid, line in self.children().items() if "tinyloop_serve.replica" in line]
        for pid in replicas:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)  # what they have sent arrives
        (busy,) = [replica for replica in self.status().replicas if replica.state == "busy"]
        for pid in replicas:
            if pid != busy.pid:
                os.kill(pid, signal.SIGCONT)
        return busy

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to stop; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    @staticmethod
    def all_gone(pids: Iterable[int]) -> bool:
        return not any(alive(pid) for pid in pids)

    def close(self) -> None:
        for pid in [*children_of(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self._listener.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def fleet_of(*flags: str) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tl-", ignore_cleanup_errors=True) as directory:
        fleet = Fleet(directory, *flags)
        try:
            fleet.ready = fleet.wait_ready()
            fleet.wait_all_ready()
            yield fleet
        finally:
            fleet.close()


@pytest.fixture
def fleets() -> Callable[..., Any]:
    """Any fleet, by its flags; a context manager."""
    return fleet_of


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two replicas of the demo model, for a test that does them harm."""
    with fleet_of("--replicas", "2") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[Fleet]:
    """The same for tests that only ask."""
    with fleet_of("--replicas", "2") as fleet:
        yield fleet


class Reference:
    """The demo model in this process: what a request must give, whatever served it."""

    def __init__(self) -> None:
        self.model = Model(demo_model_path(), threads=1)  # two would wait for each other beside a fleet
        self.tokenizer = Tokenizer.from_str(self.model.metadata["tokenizer"])
        self.vocabulary = Vocabulary(self.model.metadata["tokenizer"], self.model.config["eos_ids"])

    def encode(self, text: str) -> list[int]:
        config = self.model.config
        front = [config["bos_id"]] if config.get("add_bos") else []
        return [*front, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def tokens(self, prompt: str | Sequence[int], **config: Any) -> list[int]:
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return self.model.generate(ids, GenerateConfig(**config)).tokens

    def text(self, tokens: Sequence[int]) -> str:
        return self.vocabulary.decode(tokens)


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    reference = Reference()
    yield reference
    reference.model.close()
