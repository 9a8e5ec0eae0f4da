"""What the servers tell their supervisor. Catches: READY before a client can connect, signs of life that come
from something else than the working loop, an unannounced stop."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tinyloop_serve.native import demo_model_path
from tinyloop_serve.protocol import host

PATIENCE_S = 30.0
WATCHDOG_S = 0.4


class Supervisor:
    """Listens as systemd does."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)

    def hear(self, wanted: str, patience_s: float = PATIENCE_S) -> str:
        """The first message with a line that begins with `wanted`; "" if none came."""
        deadline = time.monotonic() + patience_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                message = self._socket.recv(4096).decode()
                if any(line.startswith(wanted) for line in message.split("\n")):
                    return message
        return ""

    def close(self) -> None:
        self._socket.close()

    def forget(self) -> None:
        while select.select([self._socket], [], [], 0)[0]:
            self._socket.recv(4096)

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={
                **os.environ,
                "NOTIFY_SOCKET": self.path,
                "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def supervisor(short_tmp: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(short_tmp)
    yield supervisor
    supervisor.close()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        yield Path(directory)


def arguments_of(what: str, directory: Path) -> list[str]:
    if what == "replica":
        socket_path = f"ipc://{directory}/replica.sock"
        return ["tinyloop_serve.replica", "--model", str(demo_model_path()), "--endpoint", socket_path]
    front, replica = f"ipc://{directory}/front.sock", f"ipc://{directory}/replica.sock"
    return ["tinyloop_serve.dispatcher", "--front", front, "--replica", replica]


@pytest.mark.parametrize("what", ["dispatcher", "replica"])
def test_ready_alive_and_stopping(supervisor: Supervisor, short_tmp: Path, what: str) -> None:
    with supervisor.start(*arguments_of(what, short_tmp)) as process:
        ready = supervisor.hear("READY=1")
        assert "STATUS=serving" in ready
        name = "front" if what == "dispatcher" else "replica"
        assert (short_tmp / f"{name}.sock").is_socket(), "ready means that one can connect"
        for _ in range(3):
            assert supervisor.hear("WATCHDOG=1", 10 * WATCHDOG_S)
        process.send_signal(signal.SIGSTOP)
        supervisor.forget()
        assert not supervisor.hear("WATCHDOG=1", 3 * WATCHDOG_S), "a stopped process owes signs of life"
        process.send_signal(signal.SIGCONT)
        assert supervisor.hear("WATCHDOG=1", PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        assert supervisor.hear("STOPPING=1")
        assert process.wait(PATIENCE_S) == 0


def test_the_status_line_says_what_is_wrong(supervisor: Supervisor, short_tmp: Path) -> None:
    with supervisor.start(*arguments_of("dispatcher", short_tmp)):
        assert "STATUS=0 of 1 replicas serve" in supervisor.hear("STATUS=0 of 1")
        with supervisor.start(*arguments_of("replica", short_tmp)) as replica:
            assert supervisor.hear("STATUS=1 of 1 replicas serve")
            replica.kill()
            lost = supervisor.hear("STATUS=0 of 1 replicas serve")
            assert "replica.sock" in lost and "connection" in lost


def test_the_status_line_says_why_a_model_cannot_be_loaded(supervisor: Supervisor, short_tmp: Path) -> None:
    arguments = arguments_of("replica", short_tmp)
    arguments[arguments.index("--model") + 1] = "/nowhere.tinyloop"
    with supervisor.start(*arguments) as process:
        assert "/nowhere.tinyloop" in supervisor.hear("STATUS=")
        assert process.wait(PATIENCE_S) == 78


def test_no_text_makes_a_second_statement(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.path)
    host.Supervisor().status("the engine failed:\nREADY=1")
    assert supervisor.hear("STATUS=") == "STATUS=the engine failed: READY=1"
