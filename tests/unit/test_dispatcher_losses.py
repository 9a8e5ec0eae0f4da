"""What the loss of a replica, or an operator's drain, does to the requests in it. Catches: work that is
charged twice, an innocent request taken for poison, tokens that are not there, a drain that ends too early,
a request bound to a model for nothing, patience that is lost too soon, more runs than a tenant may have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.test_dispatcher_core import (
    ALICE,
    BOB,
    MODEL,
    R0,
    R1,
    Bench,
    announce,
    ask,
    said,
)
from tinyloop_serve.dispatcher.effects import Detach
from tinyloop_serve.protocol.codec import TO_CLIENT, tokens_to_bytes
from tinyloop_serve.protocol.messages import (
    CancelLanes,
    Control,
    Failed,
    Goodbye,
    Run,
    Sampling,
    Step,
    Tokens,
)

OTHER = replace(MODEL, fingerprint="e" * 64)


def test_a_tenant_does_not_pay_for_the_run_that_was_lost() -> None:
    bench = Bench(replicas=(R0,), tenants={"a": {}, "b": {}})
    for client, tenant, id in ((ALICE, "a", "lost"), (BOB, "b", "behind")):
        bench._after(bench.core.client_says(client, tenant, ask(id), bench.now))
    bench.gone(R0)
    bench.replica(R0, announce(R0, pid=8))
    assert [lane.id for lane in bench.run().lanes] == ["lost"], "as if it had never run"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(beam_size=2), Sampling(cache_window=16)])
def test_it_goes_on_as_it_was_asked(sampling: Sampling) -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q", sampling=sampling, seed=7))
    before = bench.run(R0)
    bench.wait(0.5)  # it has run that long, which is no wait
    (after,) = said(bench.gone(R0), R1, Run)
    assert after.sampling == before.sampling == replace(sampling, loops=4) and after.batch_size == 1
    assert after.lanes == (replace(before.lanes[0], failovers=1),)


@pytest.mark.parametrize("claimed", [1, 3])
def test_nothing_goes_on_after_tokens_that_did_not_come(claimed: int) -> None:
    """The replica counts others than it sends."""
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    (lane,) = bench.run().lanes
    body = TO_CLIENT.encode_body(Tokens("q", 0, tokens_to_bytes([91, 92])))
    bench.replica(R0, Step(bench.run().run, (lane.key,), (claimed,), (False,)), (body,))
    (failed,) = said(bench.gone(R0), ALICE, Failed)
    assert failed.code == "replica_lost" and "cannot be read" in failed.message


def test_what_has_no_token_yet_goes_on_with_another_model_and_alone() -> None:
    bench = Bench(ready=2, max_wait_ms=10)
    bench.client(BOB, Control("c", "accept", OTHER.fingerprint))
    for id in ("1", "2"):
        bench.client(ALICE, ask(id))
    assert len(bench.run(R0).lanes) == 2
    bench.gone(R1)
    bench.replica(R1, announce(R1, OTHER, pid=8))
    assert [lane.id for lane in said(bench.gone(R0) + bench.wait(0.1), R1, Run)[0].lanes] == ["1"]


def test_a_drain_that_is_over_at_once_moves_what_runs_at_once_and_blames_nobody() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    key = bench.run().lanes[0].key
    for here, there in ((R0, R1), (R1, R0), (R0, R1)):
        sends = bench.client(BOB, Control("c", "drain", here, within_ms=0))
        assert said(sends, here, CancelLanes) == [CancelLanes((key,))]
        assert [lane.id for lane in said(sends, there, Run)[0].lanes] == ["q"], "no poison"
        ended = Step(bench.run(here).run, (key,), (0,), (True,), idle=True)
        assert bench.replica(here, ended, (b"x",)) == [], "its client hears nothing of that"
        bench.client(BOB, Control("c", "resume", here))


def test_a_resumed_replica_keeps_what_it_runs_when_its_drain_would_have_ended() -> None:
    bench = Bench(ready=2)
    bench.client(BOB, Control("c", "drain", R0, within_ms=1000))
    bench.client(BOB, Control("c", "resume", R0))
    bench.client(ALICE, ask("1"))
    bench.client(ALICE, ask("2"))
    bench.steps = 1
    assert not said(bench.wait(2.0), R0, CancelLanes) and bench.core.failovers == 0


def test_a_replica_that_is_to_leave_ends_first_what_it_runs() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    bench.client(BOB, Control("c", "detach", R0, within_ms=60_000))
    assert not said(bench.wait(1.0), R0, Goodbye) and R0 in bench.core.replicas
    assert said(bench.finish(R0), R0, Run) == [] and bench.core.requests.finished == 1
    assert said(bench.wait(0.3), R0, Detach) == [Detach()] and R0 not in bench.core.replicas


def test_a_batch_is_cut_to_what_its_tenant_may_run_and_others_fill_it() -> None:
    bench = Bench(ready=0, max_wait_ms=10, tenants={"a": {"max_running": 2}, "b": {}})
    for id in ("a1", "a2", "a3", "a4"):
        bench._after(bench.core.client_says(ALICE, "a", ask(id), bench.now))
    bench.wait(0.1)
    bench.replica(R0, announce(R0))
    bench.replica(R1, announce(R1))
    assert [lane.id for lane in bench.run(R0).lanes] == ["a1", "a2"] and not said(bench.sent, R1, Run)
    sends = bench._after(bench.core.client_says(BOB, "b", ask("b1"), bench.now)) + bench.wait(0.1)
    assert [lane.id for run in said(sends, R1, Run) for lane in run.lanes] == ["b1"]
    bench.finish(R0)
    assert [lane.id for lane in bench.run(R0).lanes] == ["a3", "a4"]


def test_patience_is_counted_from_the_later_of_the_arrival_and_the_loss() -> None:
    bench = Bench(replicas=(R0,), replica_wait_ms=3000)
    bench.client(ALICE, ask("runs"))
    bench.client(ALICE, ask("early"))
    for _ in range(10):  # its engine moves on
        bench.steps += 1
        bench.wait(0.5)
    bench.gone(R0)
    assert said(bench.wait(2.0), ALICE, Failed) == [], "they wait since 7 s, but for a replica since 2 s"
    bench.client(ALICE, ask("late"))
    assert {failed.id for failed in said(bench.wait(1.3), ALICE, Failed)} == {"runs", "early"}
    assert said(bench.wait(1.5), ALICE, Failed) == []
    assert [failed.id for failed in said(bench.wait(0.5), ALICE, Failed)] == ["late"]
