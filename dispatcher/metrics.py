"""What has happened, as numbers that only grow: counts and distributions, for monitoring.

The core and those under it say what happens; no decision reads anything here. What *is*, such as the requests
that wait, is in the core's own books; `catalogue.py` draws on both. Belongs to the loop's thread and does no
I/O. Per decode step of a replica it costs one look-up in a short table, whatever the number of streams.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from tinyloop_serve.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    HandleLost,
    InvalidRequest,
    LimitExceeded,
    ModeRefused,
    Overloaded,
    PoisonRequest,
    ProtocolError,
    ReplicaLost,
    TransportError,
    Unavailable,
)
from tinyloop_serve.protocol.messages import Built, Stats

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.requests import Request

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LANES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

# These begin at 0, not with their first event: for an alert, a counter that appears as 1 has not grown.
OUTCOMES = ("answered", "cancelled", "client_gone", "lease_expired") + tuple(
    error.code
    for error in (
        DeadlineExceeded,
        EngineFailed,
        HandleLost,
        InvalidRequest,
        LimitExceeded,
        ModeRefused,
        PoisonRequest,
        ReplicaLost,
        TransportError,
        Unavailable,
    )
)
REFUSALS = tuple(
    error.code
    for error in (
        DeadlineExceeded,
        Forbidden,
        HandleLost,
        InvalidRequest,
        LimitExceeded,
        ModeRefused,
        Overloaded,
        ProtocolError,
        Unavailable,
    )
)


class Distribution:
    """How many observations were at most each bound (ascending), and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def at_most(self) -> list[int]:
        """Observations up to each bound, then all of them."""
        return list(accumulate(self._counts))


class Metrics:
    def __init__(self, tenants: Iterable[str]) -> None:
        self.tenants = tuple(tenants)
        self.requests: Counter[tuple[str, str]] = Counter()  # by tenant and outcome
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))  # never admitted, by code
        self.tokens = 0  # forwarded
        self.tokens_of: Counter[str] = Counter()  # the same by tenant, once their request has ended
        self.prompt_tokens = 0
        self.prefix_tokens = 0  # of these, not computed again
        self.drafted = 0
        self.accepted = 0
        self.plain_instead = 0  # asked for speculation, decoded plainly
        self.handle_uses = 0
        self.evictions = 0
        self.builds: Counter[str] = Counter({"built": 0, EngineFailed.code: 0})  # by outcome
        self.losses: Counter[str] = Counter()  # by replica: it was lost while it served
        self.engine_failures: Counter[str] = Counter()  # by replica: requests and handles that it broke
        self.keys_refused = 0  # connections with a key that is on no list
        self.queue: dict[str, Distribution] = defaultdict(lambda: Distribution(SECONDS))  # by tenant
        self.first_token: dict[str, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self.whole: dict[str, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self.between = Distribution(STEP_SECONDS)  # of a stream's tokens
        self.lanes = Distribution(LANES)  # of a run
        self.late = Distribution(STEP_SECONDS)  # the loop, for its heartbeat
        for tenant in self.tenants:
            self.requests.update({(tenant, outcome): 0 for outcome in OUTCOMES})
            self.tokens_of[tenant] = 0
            for distributions in (self.queue, self.first_token, self.whole):
                distributions[tenant] = Distribution(SECONDS)

    def ran(self, lanes: Sequence[Request], now: float) -> None:
        """A run went out; `uses` of its requests is known."""
        self.lanes.add(len(lanes))
        for request in lanes:
            self.handle_uses += bool(request.uses)
            if not request.failovers:  # else it waits for the second time
                self.queue[request.tenant].add(now - request.arrived)

    def began(self, request: Request, now: float) -> None:
        """Its first tokens went out."""
        if request.asked.stream and not request.asked.done:  # a client that resumes had its first before
            self.first_token[request.tenant].add(now - request.arrived)

    def stepped(self, tokens: int, streams: int, gap_s: float | None) -> None:
        """So many tokens went out, to so many streams, so long after those before; None: a run's first."""
        self.tokens += tokens
        if gap_s is not None:
            self.between.add(gap_s, streams)

    def ended(self, request: Request, outcome: str, stats: Stats | None, now: float) -> None:
        self.requests[request.tenant, outcome] += 1
        self.tokens_of[request.tenant] += request.delivered
        self.prompt_tokens += len(request.prompt) // 4
        if outcome == "answered":
            self.whole[request.tenant].add(now - request.arrived)
        if outcome == EngineFailed.code:
            self.engine_failures[request.replica] += 1
        if stats is not None:
            self.prefix_tokens += stats.prefix_tokens
            self.drafted += stats.drafted
            self.accepted += stats.accepted
            self.plain_instead += bool(stats.method_reason)

    def built(self, endpoint: str, built: Built) -> None:
        self.evictions += len(built.evicted)
        self.builds[built.code or "built"] += 1
        self.engine_failures[endpoint] += built.code == EngineFailed.code
