"""The signals of a fleet's own process: what was asked for, and that the loop wakes for each, also
for those of children that ended. This file must not know what the fleet does about them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    def __init__(self) -> None:
        self.stops: list[signal.Signals] = []  # received
        self._reload_wanted = False

    def wanted_reload(self) -> bool:
        """Whether one was asked for since this was asked."""
        wanted, self._reload_wanted = self._reload_wanted, False
        return wanted

    @contextlib.contextmanager
    def heard_by(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Meanwhile a descriptor that is registered there, without data, is readable after each."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        selector.register(wake_read, selectors.EVENT_READ)
        before = {
            number: signal.signal(number, lambda n, _: self.stops.append(signal.Signals(n)))
            for number in STOP_SIGNALS
        }
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._want_reload)
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)

    def _want_reload(self, *_: object) -> None:
        self._reload_wanted = True
