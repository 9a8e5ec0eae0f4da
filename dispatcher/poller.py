"""Waiting for many ZeroMQ sockets at a cost that does not grow with them: epoll over their descriptors.

zmq_poll asks every socket before and after it sleeps. A socket's descriptor (ZMQ_FD) only says that there is
news since the socket was last used: whether a message waits, ZMQ_EVENTS alone can tell, and using the socket
in any way, sending too, may have taken the news. So every socket that was used since is asked once before
the next sleep: whoever uses one calls `used`.
"""

from __future__ import annotations

import math
import select

import zmq

Socket = zmq.Socket[bytes]
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as plain numbers: arithmetic with enums takes longer


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Socket | int] = {}  # by descriptor
        self._used: set[Socket] = set()

    def register(self, watched: Socket | int) -> None:
        """A socket, or a plain descriptor."""
        descriptor = _descriptor(watched)
        self._watched[descriptor] = watched
        self._epoll.register(descriptor, select.EPOLLIN)
        if not isinstance(watched, int):
            self._used.add(watched)

    def unregister(self, socket: Socket) -> None:
        """Before it is closed."""
        descriptor = _descriptor(socket)
        del self._watched[descriptor]
        self._epoll.unregister(descriptor)
        self._used.discard(socket)

    def used(self, socket: Socket) -> None:
        """It was sent on, or read from without having been in the last `poll`'s answer."""
        self._used.add(socket)

    def readable(self, socket: Socket) -> bool:
        """Whether it can be read right now; cheaper than the exception of a `recv` in vain."""
        if int(socket.get(EVENTS)) & POLLIN:
            return True
        self._used.discard(socket)
        return False

    def poll(self, wait_s: float) -> set[Socket | int]:
        """Those that can be read, waiting at most `wait_s` for the first. Each is taken to be used then. May
        return none before that time: news is not always a message."""
        ready: set[Socket | int] = {socket for socket in list(self._used) if self.readable(socket)}
        wait_ms = 0 if ready else math.ceil(1000 * max(0.0, wait_s))
        for descriptor, _ in self._epoll.poll(wait_ms / 1000):
            watched = self._watched[descriptor]
            if isinstance(watched, int):
                ready.add(watched)
            elif self.readable(watched):
                ready.add(watched)
                self._used.add(watched)
        return ready

    def close(self) -> None:
        self._epoll.close()


def _descriptor(watched: Socket | int) -> int:
    return watched if isinstance(watched, int) else int(watched.get(zmq.FD))
