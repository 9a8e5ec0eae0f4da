"""How other threads and signal handlers wake the loop: a pipe that its poll watches."""

from __future__ import annotations

import os


class Wake:
    def __init__(self) -> None:
        self.fd, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __call__(self) -> None:
        """From anywhere; never blocks."""
        try:
            os.write(self._write_end, b"\0")
        except BlockingIOError:  # so many wake-ups wait that one more changes nothing
            pass

    def clear(self) -> None:
        """Before looking at what the wakers left."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass
