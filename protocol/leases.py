"""The handles that a client holds, and when each lease is renewed. No I/O, no clock.

A handle that the dispatcher does not know any more is left alone until a request uses it again, with the
recipe that builds it anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinyloop_serve.protocol.messages import Failed, RenewHandle, ToClient

RENEWALS_PER_LEASE = 3


@dataclass(slots=True)
class _Lease:
    interval_s: float
    renew_at: float


class Leases:
    def __init__(self) -> None:
        self.next_at = math.inf  # when the next renewal is due
        self._held: dict[str, _Lease] = {}
        self._asked: dict[str, str] = {}  # id of a renewal -> its handle
        self._count = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: str, lease_s: float, now: float) -> None:
        interval_s = lease_s / RENEWALS_PER_LEASE
        self._held[handle] = _Lease(interval_s, now + interval_s)
        self._plan()

    def release(self, handle: str) -> None:
        if self._held.pop(handle, None):
            self._plan()

    def used(self, handle: str, now: float) -> None:
        """A request names it: that renews it, or builds it anew."""
        if lease := self._held.get(handle):
            lease.renew_at = now + lease.interval_s
            self._plan()

    def renew_all(self, now: float) -> None:
        """On a new connection: the dispatcher must learn whose they are."""
        self._asked.clear()
        for lease in self._held.values():
            lease.renew_at = now
        self._plan()

    def due(self, now: float) -> list[RenewHandle]:
        if now < self.next_at:
            return []
        renewals = []
        for handle, lease in self._held.items():
            if lease.renew_at <= now:
                self._count += 1
                lease.renew_at = now + lease.interval_s
                renewals.append(RenewHandle(id=f"renew-{self._count}", handle=handle))
                self._asked[renewals[-1].id] = handle
        self._plan()
        return renewals

    def answered(self, id: str, message: ToClient) -> bool:
        """Whether `message` answers a renewal."""
        handle = self._asked.pop(id, None)
        if handle is None:
            return False
        if isinstance(message, Failed) and (lease := self._held.get(handle)):
            lease.renew_at = math.inf  # it is gone
            self._plan()
        return True

    def clear(self) -> None:
        self._held.clear()
        self._asked.clear()
        self._plan()

    def _plan(self) -> None:
        self.next_at = min((lease.renew_at for lease in self._held.values()), default=math.inf)
