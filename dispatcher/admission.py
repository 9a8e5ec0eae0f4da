"""Whether one more request may wait: bounds of number and of time, for all and per tenant.

Refusing at once what would end too late keeps an overloaded fleet useful: what is taken is still in time. How
long a request will wait is measured by `turns.py`, how long it will run by `pace.py`. Knows no messages and
no replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.tenants import Tenant
from tinyloop_serve.protocol.errors import Overloaded

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

    def enter(self, tenant: Tenant, wait_s: float, run_s: float, deadline_ms: int) -> None:
        """Counts one more that waits, for about `wait_s`, to run then for `run_s` (0: that is not known).
        Raises `Overloaded` instead when there is no place for it, or it would end too late."""
        mine = self._tenants.setdefault(tenant.name, _Counts())
        deadline_s = deadline_ms / 1000
        if self._all.waiting >= self._max_waiting:
            self._refuse(f"{self._all.waiting} requests wait and no more are queued", wait_s / 4)
        if tenant.max_waiting and mine.waiting >= tenant.max_waiting:
            self._refuse(
                f"{mine.waiting} requests of tenant {tenant.name!r} wait and no more are queued", wait_s / 4
            )
        if self._max_queue_s and wait_s > self._max_queue_s:
            why = f"it would wait about {wait_s:.1f} s, longer than is allowed ({self._max_queue_s:g} s)"
            self._refuse(why, wait_s - self._max_queue_s)
        if deadline_s and wait_s + run_s > deadline_s:
            why = f"it would wait about {wait_s:.1f} s and run for {run_s:.1f} s"
            late_s = wait_s + run_s - deadline_s
            self._refuse(f"{why}, longer than its deadline allows ({deadline_s:g} s)", late_s)
        mine.waiting += 1
        self._all.waiting += 1

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

    def came_back(self, tenant: str) -> None:
        """Its replica was lost: it waits again."""
        for counts in (self._all, self._tenants[tenant]):
            counts.waiting += 1
            counts.running -= 1

    def ended(self, tenant: str, *, running: bool) -> None:
        """It left."""
        mine = self._tenants[tenant]
        for counts in (self._all, mine):
            counts.running -= running
            counts.waiting -= not running
        if not mine.waiting and not mine.running:
            del self._tenants[tenant]

    def check(self) -> None:
        """Raises AssertionError unless the tenants' counts add up."""
        for name in ("waiting", "running"):
            total = sum(getattr(counts, name) for counts in self._tenants.values())
            assert total == getattr(self._all, name) >= 0, f"{name} of the tenants"
