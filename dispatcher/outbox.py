"""Frames for clients that cannot take them yet: bounded in bytes and in time, one queue per client.

ZeroMQ's own queues must never be the queue: they drop silently and grow in the kernel. At `max_bytes`, or
when a client has read nothing for `stall_s`, it is SLOW: its requests are to be failed, which adds their
short terminal messages and stops the flow. At twice either bound it is GONE: a farewell takes the place of
its queue, for it may be alive, and wait. No client ever delays another: nothing here waits. This file must
not know messages or sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

OVERHEAD_BYTES = 100  # of a queued message, roughly
RETRY_S = 0.01  # between two attempts: one at each turn of a busy loop would cost everybody else


class Verdict(Enum):
    FINE = "fine"
    SLOW = "slow"
    GONE = "gone"  # or given up


Attempt = Callable[[bytes, list[bytes]], Verdict]  # sends now: FINE, SLOW (its pipe is full), GONE


@dataclass(slots=True)
class _Backlog:
    moved_at: float  # when the client last took something
    frames: deque[tuple[list[bytes], int]] = field(default_factory=deque)  # a message, its size
    size: int = 0

    def add(self, frames: list[bytes]) -> None:
        size = sum(map(len, frames)) + OVERHEAD_BYTES
        self.frames.append((frames, size))
        self.size += size


class Outbox:
    def __init__(self, attempt: Attempt, max_bytes: int, stall_s: float, farewell: list[bytes]) -> None:
        """`farewell` is a message that says: nothing of what you asked for will come."""
        self._attempt = attempt
        self._farewell = farewell
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._backlogs: dict[bytes, _Backlog] = {}
        self._retry_at = 0.0

    def __len__(self) -> int:
        """Clients that have frames waiting."""
        return len(self._backlogs)

    def post(self, client: bytes, frames: list[bytes], now: float) -> Verdict:
        """Sends or queues one message, in order. After GONE nothing that was said to the client is left."""
        backlog = self._backlogs.get(client)
        if backlog is None:
            first = self._attempt(client, frames)
            if first is not Verdict.SLOW:
                return first
            backlog = self._backlogs[client] = _Backlog(now)
        backlog.add(frames)
        return self._judge(backlog, now)

    def wake_at(self) -> float:
        """When the next `flush` is due, seconds; infinity: nothing waits."""
        return self._retry_at if self._backlogs else float("inf")

    def flush(self, now: float) -> list[tuple[bytes, Verdict]]:
        """Tries again, if that is due; returns the clients that are not FINE."""
        if now < self._retry_at:
            return []
        self._retry_at = now + RETRY_S
        verdicts = [(client, self._push(client, now)) for client in list(self._backlogs)]
        return [(client, verdict) for client, verdict in verdicts if verdict is not Verdict.FINE]

    def _push(self, client: bytes, now: float) -> Verdict:
        backlog = self._backlogs[client]
        while backlog.frames:
            frames, size = backlog.frames[0]
            attempt = self._attempt(client, frames)
            if attempt is Verdict.SLOW:
                return self._judge(backlog, now)
            if attempt is Verdict.GONE:
                break
            backlog.frames.popleft()
            backlog.size -= size
            backlog.moved_at = now
        del self._backlogs[client]
        return Verdict.GONE if backlog.frames else Verdict.FINE

    def _judge(self, backlog: _Backlog, now: float) -> Verdict:
        excess = max(backlog.size / self._max_bytes, (now - backlog.moved_at) / self._stall_s)
        if excess > 2:
            backlog.frames.clear()
            backlog.size, backlog.moved_at = 0, now
            backlog.add(self._farewell)
            return Verdict.GONE
        return Verdict.SLOW if excess > 1 else Verdict.FINE
