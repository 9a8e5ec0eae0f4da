"""How many may wait, and for how long. Catches: a queue without bound, a refusal that names no time, an
estimate of wait or run that is not what was measured, a fleet that was idle and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tinyloop_serve.dispatcher.admission import Admission
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.pace import FRESH_S, SURE, Pace
from tinyloop_serve.dispatcher.tenants import Tenant
from tinyloop_serve.dispatcher.turns import RESIDUE, Turns
from tinyloop_serve.protocol.errors import DeadlineExceeded, Overloaded

LOCAL = Tenant("local")


def admission(**options: Any) -> Admission:
    raw = {"front": "ipc:///x/f", "replicas": ["ipc:///x/r"], "max_queue_ms": 2000}
    return Admission(load(raw | options))


def enter(to: Admission, count: int, tenant: Tenant = LOCAL) -> int:
    """How many of `count` got in."""
    for entered in range(count):
        try:
            to.enter(tenant, 0.0, 0.0, 0)
        except Overloaded:
            return entered
    return count


def test_the_number_of_those_that_wait_is_bounded() -> None:
    it = admission(max_waiting=3)
    assert enter(it, 5) == 3
    it.started("local")
    assert enter(it, 5) == 1 and (it.waiting, it.running) == (3, 1)
    with pytest.raises(Overloaded) as caught:
        it.enter(LOCAL, 0.0, 0.0, 0)
    assert caught.value.retry_after_s > 0 and "try again in" in str(caught.value)


def test_a_tenant_has_its_own_bound() -> None:
    it = admission()
    assert enter(it, 5, Tenant("small", max_waiting=2)) == 2
    assert enter(it, 5) == 5


@pytest.mark.parametrize(
    "wait_s, run_s, deadline_ms, retry_s, why",
    [
        (2.5, 9.0, 0, 0.5, "longer than is allowed .2 s."),
        (1.0, 1.0, 1500, 0.5, "wait about 1.0 s and run for 1.0 s, longer than its deadline allows .1.5 s."),
        (0.0, 1.51, 1500, 0.1, "longer than its deadline allows"),
    ],
)
def test_who_would_end_too_late_is_refused_and_told_when_to_come_back(
    wait_s: float, run_s: float, deadline_ms: int, retry_s: float, why: str
) -> None:
    it = admission()
    with pytest.raises(Overloaded, match=why) as caught:
        it.enter(LOCAL, wait_s, run_s, deadline_ms)
    assert caught.value.retry_after_s == pytest.approx(retry_s) and it.waiting == 0


def test_who_would_just_be_in_time_may_wait() -> None:
    it = admission()
    it.enter(LOCAL, 2.0, 9.0, 0)
    it.enter(LOCAL, 0.5, 1.0, 1500)
    assert it.waiting == 2


def test_a_request_that_comes_back_is_not_counted_twice() -> None:
    it = admission()
    enter(it, 1)
    it.started("local")
    it.came_back("local")
    assert (it.waiting, it.running) == (1, 0)
    it.started("local")
    assert not it.may_run(Tenant("local", max_running=1)) and it.may_run(LOCAL)
    it.ended("local", running=True)
    it.check()
    assert (it.waiting, it.running) == (0, 0)


def test_a_wait_is_as_many_turns_as_the_bucket_needs() -> None:
    turns = Turns(since=0.0, every_s=0.0, lanes=8)
    assert turns.wait_s(100, 1.0) == 0.0, "nothing is known yet"
    turns.take(8, 0.4, more=True)
    turns.take(8, 0.8, more=True)
    assert turns.wait_s(0, 1.0) == pytest.approx(RESIDUE * 0.4)
    assert turns.wait_s(16, 1.0) == pytest.approx((RESIDUE + 2) * 0.4)
    assert turns.wait_s(16, 0.5) == pytest.approx((RESIDUE + 4) * 0.4), "of a tenant with half of the lanes"
    turns.take(3, 1.2, more=False)
    assert turns.lanes == 8, "few went because few were there"
    turns.take(4, 2.0, more=True)
    assert turns.lanes == 7 and turns.every_s == pytest.approx(0.5), "a quarter of the way to 4 and to 0.8"


def test_a_run_takes_what_such_runs_took() -> None:
    pace = Pace((2, 8))
    assert pace.likely_s(4, 1, 100.0, 0.0) == 0.0, "nothing is known yet"
    for _ in range(100):
        pace.ran(4, 1, 100.0, 0.2, 0.0, whole=True)
        pace.ran(4, 8, 100.0, 0.5, 0.0, whole=True)
    assert pace.likely_s(4, 1, 200.0, 1.0) == pytest.approx(0.4, rel=0.01)
    assert pace.likely_s(4, 3, 200.0, 1.0) == pytest.approx(1.0, rel=0.01), "a batch of eight"
    assert pace.likely_s(4, 99, 200.0, 1.0) == pytest.approx(1.0, rel=0.01)
    assert pace.likely_s(4, 2, 200.0, 1.0) == pytest.approx(0.4, rel=0.01), "two are no faster than one"
    assert pace.likely_s(8, 1, 100.0, 1.0) == 0.0, "other loops"
    pace.ran(4, 1, 100.0, 0.1, 0.0, whole=False)
    assert pace.likely_s(4, 1, 200.0, 1.0) == pytest.approx(0.4, rel=0.01), "stopped early: no news"
    pace.ran(4, 1, 100.0, 0.9, 0.0, whole=False)
    assert pace.likely_s(4, 1, 200.0, 1.0) > 0.5, "stopped late: it is slower than was thought"


def test_an_old_measurement_holds_no_more() -> None:
    pace = Pace((2,))
    pace.ran(4, 1, 100.0, 0.01, 0.0, whole=True)
    assert pace.likely_s(4, 1, 100.0, FRESH_S) > 0.0
    assert pace.likely_s(4, 1, 100.0, FRESH_S + 0.01) == 0.0
    pace.ran(4, 1, 100.0, 60.0, 2.0, whole=True)
    assert pace.likely_s(4, 1, 100.0, 600.0) > 0.0, "of a run that takes a minute it does"


def test_what_could_never_be_in_time_is_told_which_deadline_could() -> None:
    pace = Pace((2,))
    for _ in range(SURE):
        pace.refuse_never(1000, 4, 400.0, 0.0)
        pace.ran(4, 1, 100.0, 0.5, 0.0, whole=True)
    with pytest.raises(DeadlineExceeded) as caught:
        pace.refuse_never(1000, 4, 400.0, 0.0)
    error = caught.value
    assert (error.field, error.value) == ("deadline_ms", "1000")
    least_ms = int(error.accepted.removeprefix("at least "))
    assert 1000 < least_ms <= 2000, "with a margin below the 2 s that it takes"
    pace.refuse_never(least_ms, 4, 400.0, 0.0)
    pace.refuse_never(0, 4, 400.0, 0.0)
    pace.refuse_never(1000, 4, 400.0, 60.0)  # it may have become faster


def test_the_time_to_come_back_is_neither_too_short_nor_too_long() -> None:
    it = admission(max_waiting=1)
    with pytest.raises(Overloaded) as caught:
        it.enter(LOCAL, 100.0, 0.0, 0)
    assert caught.value.retry_after_s == 10.0
    enter(it, 1)
    with pytest.raises(Overloaded) as caught:
        it.enter(LOCAL, 2.0, 0.0, 0)
    assert caught.value.retry_after_s == 0.5, "places become free before the last one's turn"


def test_without_a_bound_of_time_any_wait_is_let_in() -> None:
    it = admission(max_queue_ms=0)
    it.enter(LOCAL, 1e6, 0.0, 0)
    assert it.waiting == 1


def test_those_that_are_about_to_run_count_against_the_tenants_bound() -> None:
    it, two = admission(), Tenant("local", max_running=2)
    enter(it, 3)
    assert it.may_run(two, 1) and not it.may_run(two, 2)
    it.started("local")
    assert it.may_run(two) and not it.may_run(two, 1)
