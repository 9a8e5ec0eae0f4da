"""Lines that a thread of their own writes: who reads them may have stopped, for a while or for good, and a
server must go on.

A terminal that was stopped with Ctrl-S, or a pipe whose reader sleeps, holds up whoever writes to it. Once
one of a process's threads may not be held up, all of its lines to that descriptor go this way: they keep
their order. This file must not know what the lines say.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

MOST_BYTES = 1 << 20  # that wait; later lines are lost
CLOSE_S = 0.5  # for the last ones to be written


class Lines:
    """For one descriptor. `lost` is told, once, when lines begin to be lost: why."""

    def __init__(self, fd: int, lost: Callable[[str], None]) -> None:
        self._fd = fd
        self._lost = lost
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._size = 0  # of those
        self._closed = False
        self._losing = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Never waits."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._changed:
            if full := self._size + len(data) > MOST_BYTES:
                begins, self._losing = not self._losing, True
            else:
                self._waiting.append(data)
                self._size += len(data)
                self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
                self._thread.start()
        if full and begins:
            self._lost("nobody reads them")

    def close(self) -> None:
        """What still waits is written, for `CLOSE_S` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                data, self._waiting, self._size = b"".join(self._waiting), [], 0
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
                self._losing = False
            except OSError as error:
                begins, self._losing = not self._losing, True
                if begins:
                    self._lost(error.strerror or str(error))


def to_stdout() -> Lines:
    """Like those below, lost in silence: there is nobody to be told."""
    return Lines(_descriptor(sys.stdout), lambda why: None)


def to_stderr() -> Lines:
    return Lines(_descriptor(sys.stderr), lambda why: None)


def _descriptor(stream: TextIO | None) -> int:
    """-1: it was closed before we began, and its number may be a file of ours by now."""
    return stream.fileno() if stream else -1
