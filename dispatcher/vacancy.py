"""What may run on the replica at hand, which has its credit: the policy (`buckets.py`) asks while it looks
for that replica's next call.

What waits and can no longer end in time must not take a lane from what still can. It is noticed here, when
its turn has come, so that nobody need walk through all that waits. Changes nothing but `late`.
"""

from __future__ import annotations

from collections import Counter

from tinyloop_serve.dispatcher.admission import Admission
from tinyloop_serve.dispatcher.buckets import Buckets, Shape
from tinyloop_serve.dispatcher.ledger import lane_bytes
from tinyloop_serve.dispatcher.pace import Pace
from tinyloop_serve.dispatcher.replicas import Replica
from tinyloop_serve.dispatcher.requests import Request
from tinyloop_serve.dispatcher.tenants import Tenants


class Vacancy:
    def __init__(
        self,
        replica: Replica,
        tenants: Tenants,
        admission: Admission,
        buckets: Buckets[Request],
        pace: Pace,
        now: float,
    ) -> None:
        self.late: dict[int, tuple[Request, float]] = {}  # by key: too late for a lane, and seconds it needs
        self._replica = replica
        self._tenants = tenants
        self._admission = admission
        self._buckets = buckets
        self._pace = pace
        self._now = now
        self._paces: dict[Shape, float] = {}  # seconds per unit of cost

    def admits(self, tenant: str) -> bool:
        return self._admission.may_run(self._tenants.of(tenant))

    def fits(self, request: Request) -> bool:
        return self.room([request]) == 1 and not self._too_late(request)

    def room(self, lanes: list[Request]) -> int:
        replica, needed, running = self._replica, 0, Counter[str]()
        for count, request in enumerate(lanes):
            assert request.shape is not None
            needed += lane_bytes(replica.ledger.budget, request.shape.sampling, request.positions)
            fits = replica.ledger.can_hold(needed) and request.model == replica.fingerprint
            wanted = not request.sticky or request.sticky == replica.endpoint
            rights = self._tenants.of(request.tenant)
            if not (fits and wanted and self._admission.may_run(rights, running[request.tenant])):
                return count
            running[request.tenant] += 1
        return len(lanes)

    def _too_late(self, request: Request) -> bool:
        if request.key in self.late:
            return True
        if not request.asked.deadline_ms or request.begun:
            return False
        needed_s = self._pace_of(request) * request.cost
        ends_at = self._now + needed_s
        alone = self._admission.waiting - len(self.late) == 1  # the lane would stay empty
        if ends_at <= request.arrived + request.asked.deadline_ms / 1000 or alone:
            return False
        self.late[request.key] = request, needed_s
        return True

    def _pace_of(self, request: Request) -> float:
        shape = request.shape
        assert shape is not None
        if shape not in self._paces:
            company = self._buckets.company(shape, coming=0)
            self._paces[shape] = self._pace.likely_s(shape.sampling.loops, company, 1.0, self._now)
        return self._paces[shape]
