"""One child process of a fleet: started as production starts it, watched through its output and its signs of
life.

`Restarts` decides, without clocks or processes, when a
dead child is started again. This file must not know which children there are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

EXIT_CONFIG = 78
FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 10.0
STEADY_S = 10.0  # ready for this long: the next death counts as the first
ATTEMPTS = 5  # starts in a row that never became ready: the breaker opens
BREAKER_S = 60.0  # that it stays open, before one more attempt
WATCHDOG_S = 10.0  # a child that was ready and gives no sign of life for so long is killed
START_S = 600.0  # and one that takes so long to become ready; TimeoutStartSec of the replicas' unit
EXIT_OSERR = 71  # what stands for the status of one that could not even be started
READ_BYTES = 1 << 20  # of one child's output at a time: the others must be looked after, too
LONGEST_LINE = 1 << 16
NEVER = float("inf")


@dataclass
class Restarts:
    """The back-off and the breaker of one child. `died` returns the delay in seconds, or None: what is wrong
    with it no restart can mend."""

    failures: int = 0  # deaths in a row
    never_ready: int = 0  # of these, those before READY

    @property
    def broken(self) -> bool:
        """The breaker is open: it never became ready for `ATTEMPTS` times in a row."""
        return self.never_ready >= ATTEMPTS

    def died(self, status: int, ready_for_s: float | None) -> float | None:
        """`status` as subprocess gives it; `ready_for_s` is None when it died before READY."""
        if status == EXIT_CONFIG:
            return None
        if ready_for_s is not None and ready_for_s >= STEADY_S:
            self.failures = 0
        self.never_ready = 0 if ready_for_s is not None else self.never_ready + 1
        if self.broken:
            return BREAKER_S
        self.failures += 1
        doublings = min(self.failures - 1, 16)  # deaths in a row have no bound, numbers do
        return min(FIRST_DELAY_S * 2.0**doublings, LONGEST_DELAY_S)


class Child:
    """`name` is for people, `arguments` follow `python -m`; its signs of life come to the datagram socket
    `signs`, which `listen` binds to `signs_path`, as they would come to systemd."""

    def __init__(self, name: str, arguments: Sequence[str], signs_path: str) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.signs = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._signed_at: float | None = None  # its last sign of life, or its start; None: it owes none
        self._signs_path = signs_path
        self.restarts = Restarts()
        self.ready_line = ""  # what followed READY; "" until then
        self.ready_at = 0.0
        self.start_at: float | None = 0.0  # when to start it; None while it runs, or when it is given up
        self.status: int | None = None  # of its last death
        self._process: subprocess.Popen[bytes] | None = None
        self._unfinished = b""

    def listen(self) -> None:
        """Before the first start: binds `signs`, whose directory is there now. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._signs_path)
        self.signs.bind(self._signs_path)

    def close(self) -> None:
        """After the last of it: `signs` leave no trace."""
        self.signs.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._signs_path)

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self, now: float) -> int:
        """Starts it; returns the descriptor of its output. Only from the main thread: it dies with that
        thread. Raises OSError; then `start_at` says when to try again.

        It gets a session of its own, so that Ctrl-C reaches the fleet alone and children stop in the
        right order.
        """
        signs = {"NOTIFY_SOCKET": self._signs_path, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self.arguments],
                env={**os.environ, **signs},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError:
            self._ended(EXIT_OSERR, now)
            raise
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.start_at, self._unfinished, self._signed_at = None, b"", now
        return self._process.stdout.fileno()

    def read(self, now: float) -> tuple[list[str], bool]:
        """What it has printed since, for the operator, and whether that was all; notices READY."""
        assert self._process is not None and self._process.stdout is not None
        data, ended = self._unfinished, False
        with contextlib.suppress(BlockingIOError):
            while not ended and len(data) < READ_BYTES:
                more = os.read(self._process.stdout.fileno(), 65536)
                data, ended = data + more, not more
        *lines, self._unfinished = data.split(b"\n")
        if self._unfinished and (ended or len(self._unfinished) > LONGEST_LINE):
            lines.append(self._unfinished)
            self._unfinished = b""
        shown = []
        for line in (line.decode(errors="replace") for line in lines):
            if line.startswith("READY") and not self.ready_line:
                self.ready_line, self.ready_at = line, now
                self._signed_at = now  # from here on it owes signs of life
            else:
                shown.append(line)
        return shown, ended

    def read_signs(self, now: float) -> None:
        """Takes what came to `signs`."""
        with contextlib.suppress(BlockingIOError):
            while message := self.signs.recv(4096):
                if b"WATCHDOG=1" in message.split(b"\n") and self._signed_at is not None:
                    self._signed_at = now

    @property
    def silent_until(self) -> float:
        """When it has given no sign of life, or has not become ready, for too long."""
        if not self.running or self._signed_at is None:
            return NEVER
        return self._signed_at + (WATCHDOG_S if self.ready_line else START_S)

    def excuse(self, now: float) -> None:
        """We were not running, and may have been deaf: its time begins anew."""
        if self._signed_at is not None:
            self._signed_at = now

    def condemn(self, now: float) -> float:
        """Kills it for its silence, and expects nothing more of it; returns how long that lasted."""
        assert self._signed_at is not None
        silent_s, self._signed_at = now - self._signed_at, None
        self.signal(signal.SIGKILL)
        return silent_s

    def ready_field(self, name: str) -> str:
        """A `name=value` of the READY line."""
        fields = (word.partition("=") for word in self.ready_line.split())
        return next((value for key, _, value in fields if key == name), "")

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def output(self) -> int:
        """The descriptor of its output; -1: it does not run."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else -1

    @property
    def has_ended(self) -> bool:
        """Since it was started, and was not reaped yet."""
        return self._process is not None and self._process.poll() is not None

    def reap(self, now: float) -> bool:
        """Whether it has ended since it was started; then `status` says how and `start_at` when it goes
        on, and its output is closed."""
        if self._process is None or (status := self._process.poll()) is None:
            return False
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        self._ended(status, now)
        return True

    def _ended(self, status: int, now: float) -> None:
        self.status = status
        delay = self.restarts.died(status, now - self.ready_at if self.ready_line else None)
        self.start_at = None if delay is None else now + delay
        self.ready_line = ""

    def how_it_ended(self) -> str:
        if self.status is None:
            return "has not ended"
        if self.status < 0:
            named = -self.status in {each.value for each in signal.Signals}  # real-time ones have no name
            by = signal.Signals(-self.status).name if named else f"signal {-self.status}"
            return f"was killed by {by}"
        return f"ended with status {self.status}"
