"""Fleets for tests: started as a user starts them, each in a runtime directory of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer

from scripts.faults.fleet import Fleet as StartedFleet
from scripts.faults.fleet import alive
from tinyloop_serve.native import GenerateConfig, Model, demo_model_path
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.messages import ReplicaStatus
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


class Fleet(StartedFleet):
    """With the commands that talk to it."""

    def client(self, **options: Any) -> Client:
        return Client(self.endpoint, **options)

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

    def replica(self, name: str) -> ReplicaStatus:
        """By name, as the dispatcher sees it."""
        return next(replica for replica in self.status().replicas if replica.name == name)

    def wait_all_ready(self) -> None:
        wait_until(lambda: all(replica.state in ("ready", "busy") for replica in self.status().replicas))

    def freeze_busy(self) -> ReplicaStatus:
        """Holds the one replica that decodes, in the middle of its stream, for as long as a test likes."""
        replicas = self.pids("replica")
        for pid in replicas:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)  # what they have sent arrives
        (busy,) = [replica for replica in self.status().replicas if replica.state == "busy"]
        for pid in replicas:
            if pid != busy.pid:
                os.kill(pid, signal.SIGCONT)
        return busy

    @staticmethod
    def all_gone(pids: Iterable[int]) -> bool:
        return not any(alive(pid) for pid in pids)

    def close(self) -> None:
        for pid in [*self.children(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self.listener.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def fleet_of(*flags: str) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tl-", ignore_cleanup_errors=True) as directory:
        fleet = Fleet(directory, *flags)
        try:
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
