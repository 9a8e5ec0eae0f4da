"""How many may wait. Catches: a queue without bound, a refusal that names no time, a fleet that was idle and
refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tinyloop_serve.dispatcher.admission import Admission
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.tenants import Tenant
from tinyloop_serve.protocol.errors import Overloaded

LOCAL = Tenant("local")


def admission(**options: Any) -> Admission:
    raw = {"front": "ipc:///x/f", "replicas": ["ipc:///x/r"], "max_queue_ms": 2000}
    return Admission(load(raw | options))


def enter(to: Admission, count: int, now: float, tenant: Tenant = LOCAL, deadline_ms: int = 0) -> int:
    """How many of `count` got in, each of one unit of work."""
    for entered in range(count):
        try:
            to.enter(tenant, 1.0, deadline_ms, now)
        except Overloaded:
            return entered
    return count


def serve(it: Admission, count: int, begin: float, rate: float) -> float:
    """One after the other at `rate` per second; returns when."""
    now = begin
    for _ in range(count):
        it.started("local")
        now += 1 / rate
        it.ended("local", 1.0, 1.0, running=True, now=now)
        it.check()
    return now


def test_the_number_of_those_that_wait_is_bounded() -> None:
    it = admission(max_waiting=3)
    assert enter(it, 5, 0.0) == 3
    it.started("local")
    assert enter(it, 5, 0.0) == 1 and (it.waiting, it.running) == (3, 1)
    with pytest.raises(Overloaded) as caught:
        it.enter(LOCAL, 1.0, 0, 0.0)
    assert caught.value.retry_after_s > 0 and "try again in" in str(caught.value)


def test_a_tenant_has_its_own_bound() -> None:
    it = admission()
    assert enter(it, 5, 0.0, Tenant("small", max_waiting=2)) == 2
    assert enter(it, 5, 0.0) == 5


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    """10 units of work a second and at most 2 s: about 20 may wait."""
    it = admission()
    assert enter(it, 60, 0.0) == 60  # the rate is not known yet
    now = serve(it, 50, 0.0, rate=10.0)
    assert 8 <= enter(it, 100, now) <= 12  # 10 wait already
    serve(it, 20, now, rate=10.0)
    with pytest.raises(Overloaded, match="longer than its deadline allows"):
        for _ in range(100):
            it.enter(LOCAL, 1.0, 500, now)


def test_light_load_is_not_taken_for_a_slow_fleet() -> None:
    it = admission()
    enter(it, 20, 0.0)
    now = serve(it, 20, 0.0, rate=10.0)
    for _ in range(20):  # one a second, each done in a tenth of a second
        now += 1.0
        assert enter(it, 1, now) == 1
        serve(it, 1, now, rate=10.0)
    assert enter(it, 15, now + 1) == 15


def test_an_idle_fleet_refuses_nobody() -> None:
    it = admission(max_queue_ms=1)
    enter(it, 10, 0.0)
    now = serve(it, 10, 0.0, rate=1.0)
    assert enter(it, 1, now, deadline_ms=1) == 1


def test_a_request_that_comes_back_is_not_counted_twice() -> None:
    it = admission()
    enter(it, 1, 0.0)
    it.started("local")
    it.came_back("local")
    assert (it.waiting, it.running) == (1, 0)
    it.started("local")
    assert not it.may_run(Tenant("local", max_running=1)) and it.may_run(LOCAL)
    it.ended("local", 1.0, 0.0, running=True, now=1.0)
    it.check()
    assert (it.waiting, it.running, it.wait_s()) == (0, 0, 0.0)
