"""Whether one more request may wait: bounds of number and of time, for all and per tenant.

The time that a request would wait is the work before it over the rate at which work was done lately. Refusing
at once what would wait too long keeps an overloaded fleet useful: what is taken is still in time. Work is
counted as `cost` (core iterations over all tokens); times are seconds. Knows no messages and no replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.tenants import Tenant
from tinyloop_serve.protocol.errors import Overloaded

WINDOW_S = 0.5  # of one measurement of the rate
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.1, 10.0


@dataclass(slots=True)
class _Counts:
    waiting: int = 0
    running: int = 0


class Admission:
    def __init__(self, config: Config) -> None:
        self._max_waiting = config.max_waiting
        self._max_queue_s = config.max_queue_ms / 1000
        self._all = _Counts()
        self._tenants: dict[str, _Counts] = {}
        self._backlog = 0.0  # cost of all that waits or runs
        self._rate = 0.0  # cost per second while there was work; 0 = not known yet
        self._done = 0.0  # in the window of measurement
        self._since = 0.0  # when that window began
        self._saturated = False  # something has waited all through it: what was done is all that can be

    @property
    def waiting(self) -> int:
        return self._all.waiting

    @property
    def running(self) -> int:
        return self._all.running

    def counts(self, tenant: str) -> tuple[int, int]:
        """How many of the tenant's requests wait, and how many run."""
        mine = self._tenants.get(tenant, _Counts())
        return mine.waiting, mine.running

    def wait_s(self) -> float:
        """How long a request that comes now will wait, as far as the rate is known."""
        return self._backlog / self._rate if self._rate else 0.0

    def enter(self, tenant: Tenant, cost: float, deadline_ms: int, now: float) -> None:
        """Counts one more that waits. Raises `Overloaded` instead when there is no place for it."""
        mine = self._tenants.setdefault(tenant.name, _Counts())
        wait_s = self.wait_s()
        limit_s = min(self._max_queue_s or 1e9, deadline_ms / 1000 or 1e9)
        if self._all.waiting >= self._max_waiting:
            self._refuse(f"{self._all.waiting} requests wait and no more are queued", wait_s / 4)
        if tenant.max_waiting and mine.waiting >= tenant.max_waiting:
            self._refuse(
                f"{mine.waiting} requests of tenant {tenant.name!r} wait and no more are queued", wait_s / 4
            )
        if self._all.waiting and wait_s > limit_s:
            what = "its deadline allows" if deadline_ms and limit_s == deadline_ms / 1000 else "is allowed"
            self._refuse(
                f"it would wait about {wait_s:.1f} s, longer than {what} ({limit_s:g} s)", wait_s - limit_s
            )
        if not self._all.waiting and not self._all.running:
            self._since, self._done, self._saturated = now, 0.0, False
        mine.waiting += 1
        self._all.waiting += 1
        self._backlog += cost

    def _refuse(self, why: str, retry_s: float) -> None:
        retry_s = min(max(retry_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
        raise Overloaded(f"{why}; try again in {retry_s:.1f} s", retry_after_s=retry_s)

    def may_run(self, tenant: Tenant, beside: int = 0) -> bool:
        """Whether the tenant's own limit lets one more of its requests run, beside those about to."""
        mine = self._tenants.get(tenant.name)
        return not tenant.max_running or mine is None or mine.running + beside < tenant.max_running

    def started(self, tenant: str) -> None:
        for counts in (self._all, self._tenants[tenant]):
            counts.waiting -= 1
            counts.running += 1
        self._saturated = self._saturated and self._all.waiting > 0

    def came_back(self, tenant: str) -> None:
        """Its replica was lost: it waits again."""
        for counts in (self._all, self._tenants[tenant]):
            counts.waiting += 1
            counts.running -= 1

    def ended(self, tenant: str, cost: float, share_done: float, *, running: bool, now: float) -> None:
        """It left. `share_done`: how much of its cost was work that was done, 0 to 1."""
        mine = self._tenants[tenant]
        for counts in (self._all, mine):
            counts.running -= running
            counts.waiting -= not running
        if not mine.waiting and not mine.running:
            del self._tenants[tenant]
        self._backlog = max(0.0, self._backlog - cost) if self._all.waiting or self._all.running else 0.0
        self._done += cost * share_done
        self._measure(now)

    def _measure(self, now: float) -> None:
        if (elapsed := now - self._since) < WINDOW_S:
            return
        latest = self._done / elapsed
        if self._saturated and self._rate:
            self._rate = 0.7 * self._rate + 0.3 * latest
        else:  # it could do more than it had to
            self._rate = max(self._rate, latest)
        self._since, self._done, self._saturated = now, 0.0, self._all.waiting > 0

    def check(self) -> None:
        """Raises AssertionError unless the tenants' counts add up."""
        for name in ("waiting", "running"):
            total = sum(getattr(counts, name) for counts in self._tenants.values())
            assert total == getattr(self._all, name) >= 0, f"{name} of the tenants"
        assert self._backlog >= 0
