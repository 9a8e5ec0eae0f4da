"""The batching policy alone: sizes, waiting, order, starvation. Catches: a wrong batch size, a bucket that
starves, a lane that shares a batch with another shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tinyloop_serve.dispatcher.buckets import Buckets, Call, Hand, Shape
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.rare import Rare
from tinyloop_serve.protocol.messages import Sampling

WAIT_S = 0.010


@dataclass(eq=False)
class Request:
    key: int
    arrived: float
    shape: Shape | None = None
    tenant: str = "local"
    priority: int = 0
    cost: float = 1.0
    begun: bool = False


class Anything:
    """A replica that takes whatever comes."""

    def admits(self, tenant: str) -> bool:
        return True

    def fits(self, request: Request) -> bool:
        return self.room([request]) == 1

    def room(self, lanes: list[Request]) -> int:
        return len(lanes)


class Queue:
    """Buckets with a short way to put requests in; keys count the arrivals."""

    def __init__(self, **options: Any) -> None:
        raw = {"front": "ipc:///x/f", "replicas": ["ipc:///x/r"], "max_wait_ms": 1000 * WAIT_S}
        self.buckets: Buckets[Request] = Buckets(load(raw | options))
        self.key = 0

    def put(
        self,
        count: int = 1,
        *,
        now: float = 0.0,
        max_tokens: int = 10,
        tenant: str = "local",
        priority: int = 0,
        cost: float = 1.0,
        single: bool = False,
        begun: bool = False,
        **sampling: Any,
    ) -> list[Request]:
        added = []
        for _ in range(count):
            self.key += 1
            shape = self.buckets.shape_of(Sampling(**{"loops": 4} | sampling), max_tokens, single=single)
            request = Request(self.key, now, shape, tenant, priority, cost, begun)
            self.buckets.put(request)
            added.append(request)
        return added

    def call(self, now: float, hand: Hand[Request] | None = None) -> Call[Request] | None:
        return self.buckets.take(now, hand or Anything())

    def take(self, now: float) -> tuple[int, int] | None:
        """(lanes, batch size) of the next call."""
        call = self.call(now)
        return (len(call.lanes), call.batch_size) if call else None


@pytest.mark.parametrize(
    "ready, expected", [(2, (2, 2)), (3, (3, 4)), (4, (4, 4)), (5, (5, 8)), (8, (8, 8)), (9, (8, 8))]
)
def test_the_smallest_batch_size_that_holds_the_ready_requests(ready: int, expected: tuple[int, int]) -> None:
    queue = Queue(batch_sizes=[2, 4, 8])
    queue.put(ready)
    assert queue.take(0.0) == expected


def test_a_lone_request_waits_for_company_and_then_runs_alone() -> None:
    queue = Queue()
    queue.put(now=1.0)
    assert queue.take(1.0) is None
    assert queue.buckets.ripe_at() == 1.0 + WAIT_S
    assert queue.take(1.0 + WAIT_S) == (1, 1)
    assert queue.buckets.ripe_at() == float("inf")


def test_below_min_batch_size_each_runs_alone_and_from_it_on_together() -> None:
    queue = Queue(min_batch_size=4)
    queue.put(3)
    assert queue.take(0.0) is None
    assert queue.take(WAIT_S) == (1, 1)
    queue.put(2, now=WAIT_S)
    assert queue.take(WAIT_S) == (4, 4)


def test_min_batch_size_one_does_not_wait() -> None:
    queue = Queue(min_batch_size=1)
    queue.put()
    assert queue.take(0.0) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"loops": 8},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"cache_mode": "int8"},
    ],
)
def test_what_a_batch_must_share_keeps_requests_apart(other: dict[str, Any]) -> None:
    queue = Queue()
    shape = queue.buckets.shape_of(Sampling(loops=4), 10)
    different = queue.buckets.shape_of(Sampling(**({"loops": 4} | other)), 10)
    assert shape != different


def test_bands_of_max_tokens() -> None:
    queue = Queue(max_tokens_bands=[32, 128])
    bands = [queue.buckets.shape_of(Sampling(), n).band for n in (1, 32, 33, 128, 129, 5000)]
    assert bands == [32, 32, 128, 128, 0, 0]


@pytest.mark.parametrize("sampling", [{"cache_window": 64}, {"beam_size": 2}])
def test_shapes_that_cannot_be_batched_run_alone_at_once(sampling: dict[str, Any]) -> None:
    queue = Queue()
    queue.put(3, **sampling)
    assert [queue.take(0.0) for _ in range(4)] == [(1, 1), (1, 1), (1, 1), None]


def test_first_come_first_served_in_a_bucket_even_after_slow_tokenising() -> None:
    queue = Queue()
    first, second, third = queue.put(3)
    queue.buckets.remove(first)
    queue.buckets.put(first)  # its text took longer to become tokens
    call = queue.call(0.0)
    assert call and call.lanes == [first, second, third]


def test_a_rare_bucket_beside_a_hot_one_waits_for_one_run_at_most() -> None:
    queue = Queue(batch_sizes=[2, 4])
    run_s, now = 0.1, 0.0
    (hot,) = queue.put(max_tokens=10, now=now)
    assert hot.shape
    rare: Request | None = None
    for turn in range(50):
        queue.put(8, now=now)  # the hot backlog only grows, and its head is ever older
        if turn == 10:
            (rare,) = queue.put(now=now + run_s / 2, temperature=1.0)
        call = queue.call(now)
        assert call
        if rare in call.lanes:
            assert rare and now - rare.arrived <= WAIT_S + run_s
            return
        now += run_s
        queue.buckets.ended(call.shape, run_s, now)
    raise AssertionError("starved")


def test_a_shape_that_takes_its_part_of_the_time_queues_by_age() -> None:
    """It is rare once, and not again until the others have had their time: it fills batches meanwhile."""
    queue = Queue(batch_sizes=[2, 4, 8])
    queue.put(200, now=0.0)
    now, turns, lanes = 0.0, [], []
    for _ in range(10):
        queue.put(now=now, temperature=1.0)
        call = queue.call(now + WAIT_S)
        assert call
        turns.append(call.shape.sampling.temperature)
        lanes.append(len(call.lanes))
        now += 0.1
        queue.buckets.ended(call.shape, 0.1, now)
    assert turns == 2 * [1.0, 0.0, 0.0, 0.0, 0.0] and lanes == [1, 8, 8, 8, 8, 5, 8, 8, 8, 8]


def test_after_a_long_idle_time_a_shape_is_rare_whatever_ran_last() -> None:
    queue = Queue(batch_sizes=[2, 4])
    queue.put(now=0.0, temperature=1.0)
    call = queue.call(1.0)
    assert call
    queue.buckets.ended(call.shape, 1.0, 2.0)
    queue.put(200, now=100.0)
    queue.put(now=100.0, temperature=1.0)
    call = queue.call(100.0 + WAIT_S)
    assert call and call.shape.sampling.temperature == 1.0


def test_a_shape_is_not_rare_while_it_runs() -> None:
    queue = Queue(batch_sizes=[2, 4])
    queue.put(100, now=0.0)
    for expected in (1.0, 0.0, 0.0, 0.0):  # four replicas, and nothing has ended
        queue.put(now=1.0, temperature=1.0)
        call = queue.call(2.0)
        assert call and call.shape.sampling.temperature == expected


def test_a_rare_shape_takes_nothing_from_a_higher_priority_nor_from_what_has_begun() -> None:
    queue = Queue(batch_sizes=[2], tenants={"other": {}})
    queue.put(100, now=0.0, priority=1)
    assert queue.call(0.0)  # it is hot from here on
    (rare,) = queue.put(now=0.0, temperature=1.0, single=True)
    (begun,) = queue.put(now=1.0, temperature=2.0, single=True, begun=True)
    order = [call.lanes[0] for _ in range(3) if (call := queue.call(1.0))]
    assert order[0] is begun and rare not in order
    (urgent,) = queue.put(now=1.0, temperature=3.0, single=True, priority=1)
    call = queue.call(1.0)
    assert call and call.lanes == [urgent]


def test_every_other_call_of_a_tenant_is_for_its_oldest() -> None:
    queue = Queue(batch_sizes=[2], tenants={"other": {}})
    queue.put(100, now=0.0)
    assert queue.call(0.0)
    for number in range(10):
        queue.put(now=1.0, temperature=1.0 + number, single=True)
    shapes = [call.shape.single for _ in range(10) if (call := queue.call(2.0))]
    assert shapes == 5 * [True, False]


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    rare = Rare()
    rare.began("long")
    for number in range(10_000):
        rare.began(number)
        rare.ended(number, 0.01, 0.1 * number)
    assert len(rare._runs) < 50
    rare.ended("long", 1000.0, 1000.0)
    assert not rare.holds("long", 4999.0) and rare.holds("long", 5001.0)


def test_of_two_runs_of_a_shape_both_count() -> None:
    rare = Rare()
    for _ in range(2):
        rare.began("a")
    rare.ended("a", 1.0, 1.0)
    assert not rare.holds("a", 100.0), "the other one is still out"
    rare.ended("a", 0.1, 1.1)
    assert not rare.holds("a", 4.9) and rare.holds("a", 5.1), "the longer one's time"


def test_a_batch_is_filled_by_work_not_by_number() -> None:
    queue = Queue(batch_sizes=[2, 4, 8], tenants={"a": {}, "b": {}})
    queue.put(20, tenant="a", cost=3.0)
    queue.put(20, tenant="b", cost=1.0)
    call = queue.call(0.0)
    assert call and [lane.tenant for lane in call.lanes].count("b") == 6


def test_only_what_may_go_is_looked_at() -> None:
    """Thousands wait: of a tenant that may run no more, of others, of many shapes."""
    asked = []

    class Counting(Anything):
        def admits(self, tenant: str) -> bool:
            return tenant != "full"

        def room(self, lanes: list[Request]) -> int:
            asked.append(lanes)
            return 0 if any(lane.tenant == "full" for lane in lanes) else len(lanes)

    queue = Queue(batch_sizes=[2, 4, 8], tenants={name: {} for name in ("full", "a", "b")})
    for tenant in ("full", "a", "b"):
        queue.put(1000, tenant=tenant)
        for shape in range(20):
            queue.put(10, tenant=tenant, temperature=1.0 + shape)
    for _ in range(20):
        asked.clear()
        call = queue.call(1.0, Counting())
        assert call and len(call.lanes) == 8 and len(asked) < 2 + 8 + 4


def test_a_flood_of_new_shapes_does_not_starve_an_old_one() -> None:
    queue = Queue()
    old = queue.put(2, now=0.0)
    for turn in range(50):
        now = 0.1 * turn
        for fresh in range(3):
            queue.put(2, now=now, temperature=1 + turn + fresh / 10)
        call = queue.call(now)
        assert call
        if old[0] in call.lanes:
            return
        queue.buckets.ended(call.shape, 0.1, now + 0.1)
    raise AssertionError("starved")


def test_removing_the_last_request_removes_the_bucket() -> None:
    queue = Queue()
    (request,) = queue.put()
    queue.buckets.remove(request)
    assert list(queue.buckets) == []
    assert queue.take(1.0) is None


def test_tenants_share_by_weight_whatever_they_ask_for() -> None:
    """The heavy one floods many shapes with large requests; the light one's weight is twice its own."""
    queue = Queue(tenants={"heavy": {}, "light": {"weight": 2.0}}, min_batch_size=1, batch_sizes=[2])
    served = {"heavy": 0.0, "light": 0.0}
    for turn in range(300):
        now = 0.1 * turn
        for flavour in range(3):
            queue.put(2, now=now, tenant="heavy", cost=8.0, temperature=1.0 + flavour)
        queue.put(4, now=now, tenant="light", cost=3.0)
        call = queue.call(now)
        assert call
        for lane in call.lanes:
            served[lane.tenant] += lane.cost
        queue.buckets.ended(call.shape, 0.1, now)
    assert served["light"] / served["heavy"] == pytest.approx(2.0, rel=0.1)


def test_a_batch_is_filled_by_shares_and_the_idle_share_is_lent() -> None:
    queue = Queue(tenants={"a": {}, "b": {}}, batch_sizes=[2, 4, 8])
    queue.put(20, tenant="a")
    queue.put(2, tenant="b")
    call = queue.call(0.0)
    assert call and sorted(lane.tenant for lane in call.lanes) == ["a"] * 6 + ["b"] * 2


def test_a_tenant_back_from_idleness_is_owed_nothing_and_owes_nothing() -> None:
    queue = Queue(tenants={"a": {}, "b": {}}, batch_sizes=[2], min_batch_size=1)
    for turn in range(100):
        queue.put(2, tenant="a", now=turn)
        assert queue.call(turn)
    queue.put(8, tenant="a", now=100.0)
    queue.put(8, tenant="b", now=100.0)
    calls = [queue.call(100.0) for _ in range(4)]
    first_half = [lane.tenant for call in calls if call for lane in call.lanes]
    assert first_half.count("a") == first_half.count("b") == 4


def test_one_that_had_its_turns_and_left_does_not_save_up_for_its_return() -> None:
    queue = Queue(tenants={"a": {}, "b": {}}, batch_sizes=[2], min_batch_size=1)
    queue.put(2, tenant="a")
    for turn in range(100):
        queue.put(2, tenant="b", now=turn)
        assert queue.call(turn)
    queue.put(8, tenant="a", now=100.0)
    queue.put(10, tenant="b", now=100.0)
    calls = [queue.call(100.0) for _ in range(5)]
    lanes = [lane.tenant for call in calls if call for lane in call.lanes]
    assert 4 <= lanes.count("a") <= 6


def test_a_refund_gives_back_the_turn() -> None:
    queue = Queue(tenants={"a": {}, "b": {}}, batch_sizes=[2], min_batch_size=1)
    queue.put(1, tenant="a", cost=100.0)
    assert queue.take(0.0)
    queue.buckets.refund("a", 100.0)  # it ended at once
    queue.put(1, tenant="b", cost=1.0, single=True)
    queue.put(1, tenant="a", cost=1.0, single=True)
    call = queue.call(0.0)
    assert call and call.lanes[0].tenant == "a"  # neither is ahead: by name


def test_priority_orders_a_tenant_alone_and_ages() -> None:
    queue = Queue(min_batch_size=1, batch_sizes=[2], priority_ms=1000, tenants={"other": {}})
    (low,) = queue.put(now=0.0, single=True)
    (high,) = queue.put(now=0.5, priority=1, single=True)
    (late,) = queue.put(now=2.0, priority=1, single=True)
    order = [queue.call(3.0) for _ in range(3)]
    assert [call.lanes[0] for call in order if call] == [high, low, late]

    queue.put(now=0.0, priority=10, single=True, cost=5.0)
    queue.put(now=0.0, priority=10, single=True, cost=5.0)
    queue.put(now=0.0, tenant="other", single=True, cost=5.0)
    tenants = [call.lanes[0].tenant for _ in range(3) if (call := queue.call(3.0))]
    assert tenants.index("other") < 2, "another tenant's priority takes nothing from it"


def test_an_answer_that_has_begun_comes_before_its_tenants_others() -> None:
    queue = Queue(min_batch_size=1, batch_sizes=[2], tenants={"other": {}})
    queue.put(now=0.0, priority=10, single=True)
    (begun,) = queue.put(now=2.0, loops=2, single=True, begun=True)
    (another,) = queue.put(now=1.0, loops=2, single=True, begun=True)
    queue.put(now=0.0, tenant="other", single=True)
    order = [call.lanes[0] for _ in range(4) if (call := queue.call(3.0))]
    assert [each for each in order if each.tenant == "local"][:2] == [another, begun]
    assert "other" in [each.tenant for each in order[:2]], "it takes nothing from other tenants"


def test_what_the_replica_cannot_hold_is_passed_over_and_keeps_its_place() -> None:
    queue = Queue(min_batch_size=1)
    big, *small = queue.put(4)

    class Little(Anything):
        def room(self, lanes: list[Request]) -> int:
            return 0 if lanes[0] is big else min(len(lanes), 2)

    calls = [queue.call(0.0, Little()) for _ in range(3)]
    assert [call.lanes for call in calls if call] == [small[:2], small[2:]] and calls[2] is None
    call = queue.call(0.0)
    assert call and call.lanes == [big]


def test_a_single_is_ripe_at_once_and_never_shares() -> None:
    queue = Queue(batch_sizes=[2, 4])
    queue.put(3, single=True)
    assert [queue.take(0.0) for _ in range(4)] == [(1, 1), (1, 1), (1, 1), None]


def test_when_something_ripens_later() -> None:
    queue = Queue()
    queue.put(2, now=1.0)
    queue.put(1, now=1.0, temperature=1.0)
    assert queue.buckets.ripe_at() == 0.0
    assert queue.buckets.ripe_at(after=1.0) == 1.0 + WAIT_S
    assert queue.buckets.ripe_at(after=1.0 + WAIT_S) == float("inf"), "what is ripe and has no room waits"


def test_one_tenants_flood_does_not_lengthen_anothers_wait() -> None:
    queue = Queue(batch_sizes=[2, 4, 8], tenants={"big": {"weight": 3}})
    queue.put(64, tenant="big")
    (shape,) = [bucket.shape for bucket in queue.buckets]
    for turn in range(1, 5):
        assert queue.take(0.5 * turn) == (8, 8)
    alone = queue.buckets.wait_s(shape, "big")
    assert 2.0 < alone < 2.5, "32 are before it, 8 go every half second"
    queue.put(1, tenant="local")
    assert queue.buckets.wait_s(shape, "local") < 0.8 < alone < queue.buckets.wait_s(shape, "big") < 3.5
    other = shape._replace(band=0)
    assert queue.buckets.wait_s(other, "local") == pytest.approx(0.5), "a new bucket's turn comes as others'"
