"""Ways to harm a process of ours: kill it, stop it, or hang its engine alone. Linux, and only processes that
this one may trace (its own descendants).

A hang stops one thread with ptrace(2), as a core that never comes back from a kernel would: the rest of the
process goes on answering. If the thread holds the interpreter's lock at that moment, the whole process hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PTRACE_CONT, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 0x4206, 0x4207  # linux/ptrace.h
WALL = 0x40000000  # linux/wait.h: of all threads
WAYS = ("kill", "stop", "hang")

_libc = ctypes.CDLL(None, use_errno=True)


class Harm:
    """Belongs to one thread: the kernel knows the tracer as a thread, and lets go of the traced with it."""

    def __init__(self) -> None:
        self._hung: set[int] = set()  # thread ids
        self.done = dict.fromkeys(WAYS, 0)

    def do(self, way: str, pid: int) -> bool:
        """False: the process has gone before."""
        try:
            if way == "hang":
                self._hang(decoding_thread(pid))
            else:
                os.kill(pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
        except (ProcessLookupError, FileNotFoundError):
            return False
        self.done[way] += 1
        return True

    def _hang(self, thread: int) -> None:
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            if _libc.ptrace(request, thread, None, None) != 0:
                raise ProcessLookupError(ctypes.get_errno(), f"ptrace({request}, {thread})")
        self._hung.add(thread)

    def reap(self) -> None:
        """Takes note of traced threads that have ended; without it their process would stay a zombie."""
        for thread in list(self._hung):
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(thread, os.WNOHANG | WALL)
                if not ended or os.WIFSTOPPED(status):
                    continue
            self._hung.discard(thread)


def decoding_thread(pid: int) -> int:
    """The thread that runs the engine: neither the main one nor one of ZeroMQ's."""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name)):
        if int(task.name) != pid and not (task / "comm").read_text().startswith("ZMQ"):
            return int(task.name)
    raise ProcessLookupError(f"{pid} has no decoding thread")
