"""The batching policy, whole: which waiting requests form the next engine call.

A bucket holds waiting requests that may share a batch: the same `Sampling`, and `max_tokens` in the same
band, so that lanes end at about the same step. A bucket is ripe when it has `min_batch_size` requests,
when its oldest has waited `max_wait_ms`, or when its shape can never be batched.

    which tenant   of those with a ripe request, the one furthest behind its share (`shares.py`)
    which bucket   of that tenant's ripe ones, the one with the oldest request: each shape is served as it is
                   asked for, and fills batches meanwhile. But a rare shape (`rare.py`) does not wait behind a
                   hot one's backlog: it goes first, at most every other time, and so waits at most
                   `max_wait_ms` and the run in progress; a flood of new shapes cannot starve an old one
    which lanes    of that bucket, tenant by tenant as their shares say, each tenant's in order of arrival

    An answer that has begun (its replica or dispatcher was lost) comes before the tenant's others: somebody
    is waiting in the middle of a sentence, and there are never more of them than were being decoded.

A priority counts as having arrived `priority_ms` earlier per step: it orders a tenant's own requests, ages,
and takes nothing from other tenants. What the replica at hand cannot run is passed over and keeps its place.
No clocks, no messages, no replicas.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.guards import batchable
from tinyloop_serve.dispatcher.rare import Rare
from tinyloop_serve.dispatcher.shares import Shares
from tinyloop_serve.dispatcher.turns import Turns
from tinyloop_serve.protocol.messages import Sampling

NEVER = float("inf")


class Shape(NamedTuple):
    sampling: Sampling  # loops resolved
    band: int  # upper end of the max_tokens band; 0 = above the last
    single: bool = False  # never in a batch: it uses a handle, speculates, or a replica died under it

    def __str__(self) -> str:
        s = self.sampling
        extra = f" window={s.cache_window} beam={s.beam_size}" if not batchable(s) else ""
        extra += " single" if self.single else ""
        draw = f"T={s.temperature:g} top_k={s.top_k} top_p={s.top_p:g} min_p={s.min_p:g}"
        draw += f" repeat={s.repetition_penalty:g}"
        return f"loops={s.loops} max_tokens<={self.band or 'any'} {s.cache_mode} {draw}{extra}"

    @property
    def batchable(self) -> bool:
        return not self.single and batchable(self.sampling)


class Waiting(Protocol):
    """What the policy knows of a request."""

    @property
    def key(self) -> int: ...  # the order of arrival
    @property
    def arrived(self) -> float: ...  # seconds
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def cost(self) -> float: ...  # of work: core iterations over all its tokens
    @property
    def begun(self) -> bool: ...  # its client has tokens of it
    @property
    def shape(self) -> Shape | None: ...


R = TypeVar("R", bound=Waiting)


@dataclass
class Bucket(Generic[R]):
    shape: Shape
    lanes: int  # of one call, at most
    turns: Turns
    queues: dict[str, list[R]] = field(default_factory=dict)  # per tenant, in order; never an empty one

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[R]:
        for queue in self.queues.values():
            yield from queue

    @property
    def oldest(self) -> float:
        """When the one that has waited longest arrived."""
        return min(request.arrived for request in self)


class Call(NamedTuple, Generic[R]):
    """One engine call: `lanes` run at `batch_size` (1: a single decode; more: `generate_batch`)."""

    shape: Shape
    lanes: list[R]
    batch_size: int


class Hand(Protocol[R]):
    """The replica at hand."""

    def admits(self, tenant: str) -> bool: ...  # False: none of its requests can run now
    def fits(self, request: R) -> bool: ...  # alone
    def room(self, lanes: list[R]) -> int: ...  # how many of these, from the first on, can run together


class Buckets(Generic[R]):
    def __init__(self, config: Config) -> None:
        self._sizes = config.batch_sizes  # ascending
        self._min_batch_size = config.min_batch_size
        self._max_wait_s = config.max_wait_ms / 1000
        self._priority_s = config.priority_ms / 1000
        self._bands = config.max_tokens_bands  # ascending
        self._tenants = config.tenants
        self._shares = Shares(self._weight_of)
        self._every_s = 0.0  # from one turn to the next, of the bucket that had the last one
        self._buckets: dict[Shape, Bucket[R]] = {}  # never an empty one
        self._rare = Rare()
        self._jumped: set[str] = set()  # tenants whose last call was for a rare shape, before an older one

    def take(self, now: float, hand: Hand[R]) -> Call[R] | None:
        """The next engine call for the replica at hand, out of its bucket; None: it has nothing to do."""
        ripe = self.ripe(now)
        waiting = set[str]().union(*(bucket.queues for bucket in ripe))
        tenants = [(self._shares.time(tenant), tenant) for tenant in waiting if hand.admits(tenant)]
        for _, tenant in sorted(tenants):
            mine = [bucket for bucket in ripe if tenant in bucket.queues]
            if turn := self._turn(mine, tenant, hand, now):
                return self._call(turn, self._lanes(turn, tenant, hand), now)
        return None

    def _turn(self, ripe: list[Bucket[R]], tenant: str, hand: Hand[R], now: float) -> Bucket[R] | None:
        """Whose turn it is, of those in which a request of the tenant fits."""
        oldest, turn = next(self._by_age(ripe, tenant, hand), (None, None))
        if oldest is None or turn is None:
            return None
        may_jump = tenant not in self._jumped and not self._is_rare(turn, now)
        self._jumped.discard(tenant)
        if may_jump:
            least = oldest.begun, oldest.priority  # what these order stays as it is
            rare = [bucket for bucket in ripe if self._is_rare(bucket, now)]
            for request, bucket in self._by_age(rare, tenant, hand):
                if (request.begun, request.priority) >= least:
                    self._jumped.add(tenant)
                    return bucket
        return turn

    def _by_age(self, buckets: list[Bucket[R]], tenant: str, hand: Hand[R]) -> Iterator[tuple[R, Bucket[R]]]:
        """The first of the tenant's requests that fits, of each that has one; the oldest first."""
        heap = []
        for bucket in buckets:
            queue = iter(bucket.queues[tenant])
            request = next(queue)
            heap.append((self._place(request), request, bucket, queue))
        heapq.heapify(heap)
        while heap:
            _, request, bucket, queue = heapq.heappop(heap)
            if hand.fits(request):
                yield request, bucket
            elif (behind := next(queue, None)) is not None:
                heapq.heappush(heap, (self._place(behind), behind, bucket, queue))

    def _is_rare(self, bucket: Bucket[R], now: float) -> bool:
        return len(bucket) <= bucket.lanes and self._rare.holds(bucket.shape, now)

    def ripe(self, now: float) -> list[Bucket[R]]:
        """Those whose next call may start."""
        return [bucket for bucket in self._buckets.values() if self._ripe_at(bucket) <= now]

    def _ripe_at(self, bucket: Bucket[R]) -> float:
        """When its next call may start, seconds."""
        if bucket.lanes == 1 or len(bucket) >= self._min_batch_size:
            return 0.0
        return bucket.oldest + self._max_wait_s

    def _lanes(self, bucket: Bucket[R], tenant: str, hand: Hand[R]) -> list[R]:
        """Those that go together, one of `tenant` first, which has one that fits."""
        fitting = {name: filter(hand.fits, queue) for name, queue in bucket.queues.items()}
        times = [(self._shares.time(name), name) for name in fitting if name != tenant and hand.admits(name)]
        heapq.heapify(times)
        heapq.heappush(times, (-1.0, tenant))  # its turn
        lanes: list[R] = []
        given: dict[str, float] = defaultdict(float)  # work
        while times and len(lanes) < bucket.lanes:
            _, name = heapq.heappop(times)
            if (lane := next(fitting[name], None)) is not None:
                lanes.append(lane)
                given[name] += lane.cost
                heapq.heappush(times, (self._shares.after(name, given[name]), name))
        if len(lanes) < self._min_batch_size:
            lanes = lanes[:1]
        return lanes[: hand.room(lanes)]

    def _call(self, bucket: Bucket[R], lanes: list[R], now: float) -> Call[R]:
        for lane in lanes:
            self.remove(lane)
            self._shares.charge(lane.tenant, lane.cost)
        self._rare.began(bucket.shape)
        bucket.turns.take(len(lanes), now, more=bool(bucket.queues))
        self._every_s = bucket.turns.every_s
        smallest = bisect_left(self._sizes, len(lanes))  # that holds them
        return Call(bucket.shape, lanes, 1 if len(lanes) == 1 else self._sizes[smallest])

    def wait_s(self, shape: Shape, tenant: str) -> float:
        """How long a request of this shape will wait for its turn, by the turns of late."""
        bucket = self._buckets.get(shape)
        if bucket is None:
            return self._every_s
        weights = sum(map(self._weight_of, {tenant, *bucket.queues}))
        ahead = len(bucket.queues.get(tenant, ()))
        return bucket.turns.wait_s(ahead, self._weight_of(tenant) / weights)

    def _weight_of(self, tenant: str) -> float:
        return self._tenants.of(tenant).weight

    def company(self, shape: Shape, coming: int = 1) -> int:
        """How many would be ready to run together with those that come."""
        bucket = self._buckets.get(shape)
        return len(bucket or ()) + coming if shape.batchable else 1

    def ended(self, shape: Shape, seconds: float, now: float) -> None:
        """A run of this shape is over, which took so long."""
        self._rare.ended(shape, seconds, now)

    def refund(self, tenant: str, cost: float) -> None:
        """Work that was charged when a request was taken, and not done: it ended early, or comes back."""
        self._shares.charge(tenant, -cost)

    def shape_of(self, sampling: Sampling, max_tokens: int, *, single: bool = False) -> Shape:
        index = bisect_left(self._bands, max_tokens)
        return Shape(sampling, self._bands[index] if index < len(self._bands) else 0, single)

    def put(self, request: R) -> None:
        """Adds a request whose `shape` is set, in its place by arrival (text took longer to get here)."""
        assert request.shape is not None
        bucket = self._buckets.get(request.shape)
        if bucket is None:
            lanes = self._sizes[-1] if request.shape.batchable else 1
            turns = Turns(request.arrived, self._every_s, lanes)
            bucket = self._buckets[request.shape] = Bucket(request.shape, lanes, turns)
        insort(bucket.queues.setdefault(request.tenant, []), request, key=self._place)
        self._shares.waits(request.tenant)

    def _place(self, request: R) -> tuple[bool, float, int]:
        return not request.begun, request.arrived - request.priority * self._priority_s, request.key

    def remove(self, request: R) -> None:
        assert request.shape is not None
        bucket = self._buckets[request.shape]
        queue = bucket.queues[request.tenant]
        del queue[bisect_left(queue, self._place(request), key=self._place)]
        if not queue:
            del bucket.queues[request.tenant]
        if not bucket.queues:
            del self._buckets[request.shape]
        self._shares.waits_no_more(request.tenant)

    def ripe_at(self, after: float = -NEVER) -> float:
        """When the next call may start, seconds, of those that start later than `after`; infinity: none."""
        times = map(self._ripe_at, self._buckets.values())
        return min((time for time in times if time > after), default=NEVER)

    def __iter__(self) -> Iterator[Bucket[R]]:
        return iter(self._buckets.values())

    def check(self, running: list[Shape]) -> None:
        """Raises AssertionError unless these shapes' runs are those that have not ended yet."""
        self._rare.check(running)
