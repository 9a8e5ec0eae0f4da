"""Weighted fair sharing between tenants, by virtual time (start-time fair queueing: Goyal, Vin, Cheng, 1996).

A tenant's virtual time grows with the work it was given, divided by its weight; whoever is furthest behind
goes next. A tenant that comes back from idleness starts at the time of the others, so it neither is owed
anything nor pays for the past. Knows nothing of requests, shapes or clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Share:
    time: float  # work given, over the weight
    waiting: int = 0  # requests


class Shares:
    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._now = 0.0  # virtual time at which the last work was given
        self._shares: dict[str, _Share] = {}  # of the tenants that wait, or that are ahead of the others

    def waits(self, tenant: str) -> None:
        """One more request of this tenant waits."""
        share = self._shares.setdefault(tenant, _Share(self._now))
        if not share.waiting:
            share.time = max(share.time, self._now)
        share.waiting += 1

    def waits_no_more(self, tenant: str) -> None:
        """One of its requests has left, with or without work."""
        share = self._shares[tenant]
        share.waiting -= 1
        if not share.waiting and share.time <= self._now:
            del self._shares[tenant]  # as if it had never been here

    def time(self, tenant: str) -> float:
        """The lower, the sooner it is its turn."""
        share = self._shares.get(tenant)
        return share.time if share else self._now

    def charge(self, tenant: str, work: float) -> None:
        """It was given work; negative: it did not use all of what it was charged for."""
        share = self._shares.setdefault(tenant, _Share(self._now))
        if work > 0:
            self._now = max(self._now, min(share.time, self._least_waiting()))
        share.time = max(share.time + work / self._weight_of(tenant), 0.0)

    def after(self, tenant: str, work: float) -> float:
        """What `time` would be after `charge`."""
        return self.time(tenant) + work / self._weight_of(tenant)

    def _least_waiting(self) -> float:
        return min((s.time for s in self._shares.values() if s.waiting), default=float("inf"))
