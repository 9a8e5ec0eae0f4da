"""What the server processes share of the operating system: the parent that they die with, the files that they
may open, the lock of a socket path, and what they tell their supervisor (systemd's protocol, sd_notify(3)).
Linux; no third-party modules.

This file must not know messages, models or which process it is in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MANY_FILES = 1 << 20  # more cost the kernel something, where it lets us


class EndpointTaken(Exception):
    """Another process has bound the endpoint."""


def die_with_parent(parent: int) -> None:
    """Asks the kernel for a SIGTERM when the process that started us, `parent`, is gone; exits if it
    already is.

    The kernel watches the *thread* that started us: a supervisor starts its children from its main thread.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request reached the kernel
        raise SystemExit(0)


def allow_many_files() -> None:
    """As many open files as we may have. Each connection is one, and where none is left libzmq ends the
    process at the next one to an ipc path."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MANY_FILES)), hard))


def lock(path: str) -> int:
    """Holds `<path>.lock` for the life of the process; returns its descriptor. Raises `EndpointTaken`.

    A second bind of an ipc path silently steals it, so the lock comes first. The file stays: removing it
    would race with the next owner.
    """
    fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise EndpointTaken(f"another process serves {path}") from None
    return fd


class Supervisor:
    """The one that started us, if it listens ($NOTIFY_SOCKET); otherwise nothing is said to anybody.

    `watchdog_s` is how long it waits for a sign of life before it kills us; 0: for ever.
    """

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 if mine and self._address else 0.0
        self._next_sign = 0.0

    def ready(self, status: str = "") -> None:
        self._tell(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        self._tell(f"STATUS={_line(text)}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def alive(self, now: float) -> None:
        """A sign of life; call it as often as you like."""
        if self.watchdog_s and now >= self._next_sign:
            self._next_sign = now + self.watchdog_s / 4
            self._tell("WATCHDOG=1")

    def wake_at(self) -> float:
        """When the next sign of life is due, on the clock that `alive` is given; infinity: never."""
        return self._next_sign if self.watchdog_s else float("inf")

    def _tell(self, message: str) -> None:
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)  # a deaf supervisor must not stop us
                sender.sendto(message.encode(), self._address)


def _line(text: str) -> str:
    """A line end in it, of some error's text, would begin another assignment."""
    return " ".join(text.split())
