"""Memory as the dispatcher gives it out. Catches: a run that a replica's budget cannot hold, memory that is
not free again after some way out, a request that is refused though a replica could hold it, or waits though
none ever will."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.test_dispatcher_core import ALICE, BOB, MODEL, R0, R1, Bench, announce, ask, said
from tinyloop_serve.protocol.messages import (
    Budget,
    Build,
    CacheCost,
    Cancel,
    Control,
    CreateHandle,
    Failed,
    Generate,
    GetStatus,
    Pong,
    Recipe,
    Run,
    Sampling,
    Status,
    Step,
)

SMALL, LARGE = 64, 192  # bytes: 16 positions at the model's 4 loops; 48


def having(endpoint: str, size: int, max_handles: int = 0) -> Any:
    """Its announcement."""
    budget = Budget(1000, 0, size, 0, max_handles, {"fp16": CacheCost(fixed=0, per_loop=1)})
    return replace(announce(endpoint), budget=budget)


def large(id: str, max_tokens: int = 45, **fields: Any) -> Generate:
    """48 positions."""
    return ask(id, max_tokens=max_tokens, **fields)


def reserved(bench: Bench) -> list[int]:
    (status,) = said(bench.client(BOB, GetStatus("s")), BOB, Status)
    return [replica.reserved_bytes for replica in status.replicas]


def test_a_batch_is_cut_to_the_budget_and_what_is_left_goes_next() -> None:
    bench = Bench(ready=0, batch_sizes=[2, 4, 8])
    for id in "123456":
        bench.client(ALICE, ask(id, max_tokens=9))  # 12 positions, which take 16: three fit
    bench.replica(R0, having(R0, LARGE))
    assert [lane.id for lane in bench.run().lanes] == ["1", "2", "3"] and bench.run().batch_size == 4
    assert reserved(bench) == [LARGE, 0]
    bench.finish()
    assert [lane.id for lane in bench.run().lanes] == ["4", "5", "6"]


def test_two_sets_of_caches_are_reserved_for_beams() -> None:
    bench = Bench(ready=0, replicas=(R0,))
    bench.replica(R0, having(R0, 4 * SMALL))
    sends = bench.client(ALICE, ask("q", sampling=Sampling(beam_size=2)))
    assert reserved(bench) == [4 * SMALL] and said(sends, R0, Run)
    sends = bench.client(ALICE, ask("q3", sampling=Sampling(beam_size=3)))
    (failed,) = said(sends, ALICE, Failed)
    assert "16 positions x (0 + 4 loops x 1) bytes x 2 x 3 beams = 384" in failed.message


def answer(bench: Bench) -> None:
    bench.finish()


def lose(bench: Bench) -> None:
    bench.gone(R0)
    assert reserved(bench)[0] == 0, "nothing of a dead one is counted"
    bench.replica(R0, having(R0, LARGE))
    bench.finish()


def announce_anew(bench: Bench) -> None:
    bench.replica(R0, having(R0, LARGE))
    bench.finish()


def cancel(bench: Bench) -> None:
    bench.client(ALICE, Cancel("q"))
    assert reserved(bench) == [LARGE, 0], "its memory is taken until the replica says otherwise"
    bench.finish()


def leave(bench: Bench) -> None:
    bench._after(bench.core.client_gone(ALICE, bench.now))
    assert reserved(bench) == [LARGE, 0]
    run = bench.run()
    bench.replica(R0, Step(run.run, (run.lanes[0].key,), (0,), (True,), idle=True), (b"x",))


def drain(bench: Bench) -> None:
    bench.client(ALICE, Control("c", "drain", R0, within_ms=0))
    assert reserved(bench) == [LARGE, 0], "what was moved away is still in its memory"
    run = bench.run()
    bench.replica(R0, Step(run.run, (run.lanes[0].key,), (0,), (True,), idle=True), (b"x",))
    bench.client(ALICE, Control("c", "resume", R0))
    bench.finish()


def give_up(bench: Bench) -> None:
    bench.replica(R0, Step(bench.run().run, (), (), (), idle=True))


@pytest.mark.parametrize("end", [answer, lose, announce_anew, cancel, leave, drain, give_up])
def test_whatever_ends_a_run_its_memory_is_free_again(end: Callable[[Bench], None]) -> None:
    bench = Bench(ready=0, replicas=(R0, R1))
    bench.replica(R0, having(R0, LARGE))
    bench.client(ALICE, large("q"))
    assert reserved(bench) == [LARGE, 0]
    end(bench)
    assert reserved(bench) == [0, 0]
    bench.client(BOB, large("again"))
    assert reserved(bench) == [LARGE, 0]


def test_what_does_not_fit_now_does_not_stand_before_what_does() -> None:
    """The largest one is away, and may come back; until then its request keeps its place."""
    bench = Bench(ready=0)
    bench.replica(R0, having(R0, SMALL))
    bench.replica(R1, having(R1, LARGE))
    bench.gone(R1)
    assert bench.client(ALICE, large("large")) == []
    for id in ("1", "2"):
        assert said(bench.client(ALICE, ask(id)), R0, Run)
        bench.finish()
    assert [lane.id for lane in said(bench.replica(R1, having(R1, LARGE)), R1, Run)[0].lanes] == ["large"]


def test_one_that_will_not_come_back_is_not_waited_for_for_ever() -> None:
    bench = Bench(ready=0, replica_wait_ms=3000)
    bench.replica(R0, having(R0, SMALL))
    bench.replica(R1, having(R1, LARGE))
    bench.gone(R1, "killed")
    bench.client(ALICE, large("large"))
    assert said(bench.wait(2.9), ALICE, Failed) == []
    (failed,) = said(bench.wait(3.5), ALICE, Failed)
    assert (failed.code, failed.id) == ("unavailable", "large") and f"{R1}: killed" in failed.message
    bench.client(ALICE, Control("c", "detach", R1))
    (failed,) = said(bench.client(ALICE, large("next")), ALICE, Failed)
    assert failed.code == "limit" and "192 bytes > 64 bytes" in failed.message


def test_while_a_dispatcher_gets_to_know_its_replicas_the_largest_may_be_yet_to_come() -> None:
    bench = Bench(ready=0, replica_wait_ms=3000)
    bench.replica(R0, having(R0, SMALL))
    bench.client(ALICE, large("goes on", done=bytes(4)))
    bench.client(ALICE, large("never", max_tokens=60))
    assert said(bench.sent, ALICE, Failed) == []
    sends = bench.replica(R1, having(R1, LARGE))
    assert [lane.id for lane in said(sends, R1, Run)[0].lanes] == ["goes on"]
    assert [(f.id, f.code) for f in said(sends, ALICE, Failed)] == [("never", "limit")]
    bench = Bench(ready=0, replica_wait_ms=3000)
    bench.replica(R0, having(R0, SMALL))
    bench.client(ALICE, large("large"))
    (failed,) = said(bench.wait(3.5), ALICE, Failed)
    assert (failed.id, failed.code) == ("large", "limit"), "nobody came"


def test_one_that_is_ill_or_drains_is_waited_for_too() -> None:
    bench = Bench(ready=0, replica_wait_ms=3000)
    bench.replica(R0, having(R0, SMALL))
    bench.replica(R1, having(R1, LARGE))
    bench.replica(R1, Pong(1, health="out of memory"))
    assert bench.client(ALICE, large("1")) == []
    assert said(bench.replica(R1, Pong(2)), R1, Run)


def test_handles_are_built_where_they_may_be_held_or_refused() -> None:
    bench = Bench(ready=0)
    bench.replica(R0, having(R0, SMALL))
    wish = CreateHandle("h", Recipe("prefix", prompt_tokens=bytes(4)))
    (refused,) = said(bench.client(ALICE, wish), ALICE, Failed)
    assert (refused.code, refused.field) == ("limit", "recipe") and "max_handles is 0" in refused.message
    bench.replica(R1, having(R1, SMALL, max_handles=2))
    bench.client(ALICE, wish)
    assert said(bench.sent, R1, Build) and not said(bench.sent, R0, Build)


def test_an_answer_that_lost_the_only_replica_with_room_for_it_waits_for_its_successor() -> None:
    """However long it has run before, and though a smaller one is there."""
    bench = Bench(ready=0, replica_wait_ms=3000)
    bench.replica(R0, having(R0, SMALL))
    bench.replica(R1, having(R1, LARGE))
    bench.client(ALICE, large("large"))
    for _ in range(20):  # its engine moves on
        bench.steps += 1
        bench.wait(0.5)
    bench.gone(R1, "killed")
    assert said(bench.wait(2.9), ALICE, Failed) == []
    assert [lane.id for lane in said(bench.replica(R1, having(R1, LARGE)), R1, Run)[0].lanes] == ["large"]


def test_whether_one_has_room_is_asked_once_for_all_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ready=0, max_waiting=1000)
    bench.replica(R0, having(R0, LARGE))
    for number in range(300):
        bench.client(ALICE, ask(str(number), prompt=3 + number % 2))
    asked: list[Any] = []
    may_hold = bench.core.replicas.may_hold
    monkeypatch.setattr(
        bench.core.replicas, "may_hold", lambda request: asked.append(request) or may_hold(request)
    )
    bench.core.check = lambda now: None  # type: ignore[method-assign]
    bench.now += 11.0  # longer than `replica_wait_ms`: a walk through all of them
    bench.core.tick(bench.now)
    assert len(asked) == 2


def test_those_that_are_refused_or_leave_are_not_waited_for() -> None:
    for how in ("refused", "leaves"):
        bench = Bench(ready=0)
        bench.replica(R0, having(R0, SMALL))
        if how == "refused":
            heavier = replace(MODEL, weights="fp32")
            bench.replica(R1, replace(having(R1, LARGE), model=heavier))
        else:
            bench.replica(R1, having(R1, LARGE))
            bench.client(BOB, large("last"))
            bench.client(BOB, Control("c", "detach", R1, within_ms=60_000))
        (failed,) = said(bench.client(ALICE, large("q")), ALICE, Failed)
        assert failed.code == "limit", how


def test_one_that_is_just_large_enough_is_waited_for_for_ever() -> None:
    bench = Bench(ready=0, replica_wait_ms=1000, replicas=(R0,))
    bench.replica(R0, having(R0, LARGE))
    bench.client(BOB, large("runs"))
    bench.client(ALICE, large("waits"))
    for _ in range(8):
        bench.steps += 1
        assert said(bench.wait(0.5), ALICE, Failed) == []
    bench.finish()
    assert [lane.id for lane in bench.run().lanes] == ["waits"]
