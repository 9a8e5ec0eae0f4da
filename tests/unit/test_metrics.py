"""What the dispatcher counts, with no socket and no clock. Catches: an event that is not counted or counted
twice, a time that is measured from the wrong moment, a label with values that clients make up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.core import Metric

from tests.unit.test_dispatcher_core import ALICE, R0, R1, Bench, announce, ask, deliver
from tests.unit.test_dispatcher_handles import made, recipe
from tinyloop_serve.dispatcher.catalogue import CATALOGUE
from tinyloop_serve.dispatcher.metrics import Distribution
from tinyloop_serve.dispatcher.pages import metrics
from tinyloop_serve.protocol.codec import TO_CLIENT, tokens_to_bytes
from tinyloop_serve.protocol.messages import (
    Build,
    Built,
    Calibrated,
    Calibration,
    Control,
    CreateHandle,
    Done,
    Failed,
    Pong,
    Sampling,
    Stats,
    Step,
    Tokens,
)


def exported(bench: Bench) -> dict[str, Metric]:
    return {family.name: family for family in metrics(bench.core, bench.now)}


def value(bench: Bench, name: str, **labels: str) -> float:
    """Of the one sample of this name that has (at least) these labels."""
    (found,) = [
        sample.value
        for family in exported(bench).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)


def finish(bench: Bench, stats: Stats | None = None, endpoint: str = R0) -> None:
    """Every lane of the run ends well."""
    run = bench.run(endpoint)
    keys = tuple(lane.key for lane in run.lanes)
    bodies = [TO_CLIENT.encode_body(Done(lane.id, "eos", stats=stats or Stats())) for lane in run.lanes]
    bench.replica(
        endpoint, Step(run.run, keys, (0,) * len(keys), (True,) * len(keys), idle=True), tuple(bodies)
    )


def test_a_distribution_counts_what_is_at_most_each_bound() -> None:
    distribution = Distribution((1.0, 2.0, 4.0))
    for number, times in ((0.5, 1), (2.0, 3), (9.0, 1)):
        distribution.add(number, times)
    assert distribution.at_most() == [1, 4, 4, 5]
    assert distribution.count == 5 and distribution.sum == 15.5


def test_times_are_of_what_the_client_sees() -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, ask("first", max_tokens=3))
    bench.client(ALICE, ask("second", stream=False))  # waits for the credit; its tokens come all at once
    bench.now += 0.3
    deliver(bench, R0, 0, 11)
    bench.now += 0.04
    deliver(bench, R0, 1, 12)
    bench.now += 0.07
    deliver(bench, R0, 2, 13)
    finish(bench)
    deliver(bench, R0, 0, 21, 22, 23)
    assert value(bench, "tinyloop_time_to_first_token_seconds_sum") == pytest.approx(0.3)
    assert value(bench, "tinyloop_time_to_first_token_seconds_count") == 1
    assert value(bench, "tinyloop_inter_token_seconds_sum") == pytest.approx(0.11)
    assert value(bench, "tinyloop_inter_token_seconds_bucket", le="0.05") == 1
    assert value(bench, "tinyloop_inter_token_seconds_count") == 2
    assert value(bench, "tinyloop_queue_seconds_sum") == pytest.approx(0.41)  # of the second alone
    assert value(bench, "tinyloop_queue_seconds_count") == 2
    assert value(bench, "tinyloop_request_seconds_sum") == pytest.approx(0.41)
    assert value(bench, "tinyloop_tokens_total") == 6
    assert value(bench, "tinyloop_tenant_tokens_total", tenant="local") == 3


def test_a_batch_is_one_run_of_several_lanes_and_each_stream_counts() -> None:
    bench = Bench(ready=1, min_batch_size=2)
    bench.client(ALICE, ask("busy"))
    for number in range(3):
        bench.client(ALICE, ask(f"q{number}"))
    assert value(bench, "tinyloop_bucket_waiting", loops="4", cache_mode="fp16", batch="yes") == 3
    bench.now += 2.0
    assert value(bench, "tinyloop_bucket_oldest_seconds") == pytest.approx(2.0)
    finish(bench)
    assert value(bench, "tinyloop_batch_lanes_sum") == 4 and value(bench, "tinyloop_batch_lanes_count") == 2
    assert value(bench, "tinyloop_requests_running", tenant="local") == 3
    run = bench.run()
    for _ in range(2):
        bench.now += 0.02
        bodies = tuple(TO_CLIENT.encode_body(Tokens(lane.id, 0, tokens_to_bytes([1]))) for lane in run.lanes)
        keys = tuple(lane.key for lane in run.lanes)
        bench.replica(R0, Step(run.run, keys, (1,) * 3, (False,) * 3), bodies)
    assert value(bench, "tinyloop_inter_token_seconds_count") == 3  # of one gap


def test_what_clients_choose_freely_makes_no_new_series() -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, ask("busy"))
    for number in range(20):
        bench.client(ALICE, ask(f"q{number}", sampling=Sampling(temperature=0.5 + number / 100)))
    assert len(list(bench.core.buckets)) == 20
    assert value(bench, "tinyloop_bucket_waiting") == 20


@pytest.mark.parametrize("outcome", ["answered", "cancelled", "engine", "client_gone", "deadline"])
def test_every_admitted_request_counts_once_by_its_outcome(outcome: str) -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, ask("q", deadline_ms=1000))
    run = bench.run()
    key = run.lanes[0].key
    if outcome == "client_gone":
        bench._after(bench.core.client_gone(ALICE, bench.now))
    elif outcome == "deadline":
        bench.wait(1.5)
    elif outcome == "engine":
        failed = TO_CLIENT.encode_body(Failed("q", "engine", "the engine failed"))
        bench.replica(R0, Step(run.run, (key,), (0,), (True,), idle=True), (failed,))
    else:
        reason: Any = {"answered": "max_tokens"}.get(outcome, outcome)
        done = TO_CLIENT.encode_body(Done("q", reason))
        bench.replica(R0, Step(run.run, (key,), (0,), (True,), idle=True), (done,))
    counts = {
        sample.labels["outcome"]: sample.value
        for sample in exported(bench)["tinyloop_requests"].samples
        if sample.value
    }
    assert counts == {outcome: 1}
    assert value(bench, "tinyloop_replica_engine_failures_total", endpoint=R0) == (outcome == "engine")


def test_refusals_count_by_code() -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, ask("q", max_tokens=0))
    bench.client(ALICE, ask("q", prompt=60, max_tokens=60))  # admitted first, then found too long
    assert value(bench, "tinyloop_refused_total", code="invalid") == 1
    assert value(bench, "tinyloop_refused_total", code="limit") == 0
    assert value(bench, "tinyloop_requests_total", outcome="limit") == 1


def test_a_lost_replica_is_counted_and_its_request_waits_once() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    bench.now += 5.0
    bench.gone(R0)
    assert value(bench, "tinyloop_replica_losses_total", endpoint=R0) == 1
    assert value(bench, "tinyloop_replica_losses_total", endpoint=R1) == 0
    assert value(bench, "tinyloop_failovers_total") == 1
    assert (
        value(bench, "tinyloop_queue_seconds_count") == 1 and value(bench, "tinyloop_queue_seconds_sum") == 0
    )
    assert value(bench, "tinyloop_replica_state", endpoint=R0, state="lost") == 1
    assert value(bench, "tinyloop_replica_serving", endpoint=R0) == 0 and value(bench, "tinyloop_ready") == 1
    bench.gone(R0)  # it was lost already
    assert value(bench, "tinyloop_replica_losses_total", endpoint=R0) == 1
    bench.gone(R1)
    assert value(bench, "tinyloop_ready") == 0


def test_a_replica_that_is_drained_or_ill_shows() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, Control("c", "drain", R0))
    bench.replica(R1, Pong(1, health="3 calls failed"))
    assert value(bench, "tinyloop_replica_state", endpoint=R0, state="draining") == 1
    assert [value(bench, "tinyloop_replica_ill", endpoint=each) for each in (R0, R1)] == [0, 1]
    bench.gone(R1)
    assert value(bench, "tinyloop_replica_ill", endpoint=R1) == 0  # it says nothing any more: it is lost


def test_what_alerts_are_about_begins_at_0_and_not_with_its_first_event() -> None:
    bench = Bench(ready=1)
    for outcome in ("answered", "engine", "poison", "replica_lost", "transport", "unavailable"):
        assert value(bench, "tinyloop_requests_total", tenant="local", outcome=outcome) == 0
    assert value(bench, "tinyloop_refused_total", code="overloaded") == 0
    assert [value(bench, "tinyloop_handle_builds_total", outcome=each) for each in ("built", "engine")] == [
        0,
        0,
    ]
    assert value(bench, "tinyloop_replica_engine_failures_total", endpoint=R0) == 0
    assert value(bench, "tinyloop_replica_losses_total", endpoint=R0) == 0


def test_only_answers_have_a_time_and_only_new_streams_a_first_token() -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, ask("resumed", prompt=5, max_tokens=3, done=tokens_to_bytes([11])))
    deliver(bench, R0, 1, 12, 13)
    finish(bench)
    assert value(bench, "tinyloop_time_to_first_token_seconds_count") == 0  # its client had one before
    assert value(bench, "tinyloop_request_seconds_count") == 1
    bench.client(ALICE, ask("late", prompt=4, deadline_ms=1000))
    bench.wait(1.5)
    assert value(bench, "tinyloop_request_seconds_count") == 1
    assert value(bench, "tinyloop_prompt_tokens_total") == 5 + 4
    assert value(bench, "tinyloop_handle_uses_total") == 0


def test_requests_wait_or_run_and_the_oldest_of_a_shape_counts() -> None:
    bench = Bench(ready=1, min_batch_size=8)
    bench.client(ALICE, ask("runs"))
    for number in range(2):  # two buckets of one kind, the older one first
        bench.now += 1.0
        bench.client(ALICE, ask(f"q{number}", sampling=Sampling(temperature=0.5 + number / 10)))
    bench.now += 0.5
    assert value(bench, "tinyloop_requests_waiting", tenant="local") == 2
    assert value(bench, "tinyloop_requests_running", tenant="local") == 1
    assert value(bench, "tinyloop_bucket_oldest_seconds") == pytest.approx(1.5)


def test_one_that_was_never_heard_of_was_not_seen_long_ago() -> None:
    bench = Bench(ready=1)
    bench.now += 0.125
    samples = exported(bench)["tinyloop_replica_last_seen_seconds"].samples
    assert [(each.labels["endpoint"], each.value) for each in samples] == [(R0, pytest.approx(0.125))]


def test_a_replica_that_is_greeted_again_has_not_begun_anew() -> None:
    bench = Bench(ready=1)
    bench.replica(R0, Pong(1, step_counter=500))
    bench.gone(R0)
    bench.replica(R0, announce(R0))  # scraped here, a 0 would be a restart, and the next 500 all new
    assert value(bench, "tinyloop_replica_steps_total", endpoint=R0) == 500
    bench.replica(R0, Pong(2, step_counter=3))  # by its own count: now it has
    assert value(bench, "tinyloop_replica_steps_total", endpoint=R0) == 3


def test_handles_are_counted_from_their_making_to_their_end() -> None:
    bench = Bench(ready=1)
    name = made(bench)
    made(bench)
    bench.client(ALICE, ask("q", handle=name))
    finish(bench, Stats(prefix_tokens=2))
    assert value(bench, "tinyloop_handle_builds_total", outcome="built") == 2
    assert value(bench, "tinyloop_handles", kind="prefix") == 2
    assert value(bench, "tinyloop_handle_uses_total") == 1
    assert value(bench, "tinyloop_prefix_tokens_total") == 2
    sends = bench.client(ALICE, CreateHandle("again", recipe()))
    (build,) = [send.message for send in sends if isinstance(send.message, Build)]
    bench.replica(R0, Built(build.handle, code="engine", message="out of memory", evicted=(name,)))
    assert value(bench, "tinyloop_handle_evictions_total") == 1
    assert value(bench, "tinyloop_handle_builds_total", outcome="engine") == 1
    assert value(bench, "tinyloop_replica_engine_failures_total", endpoint=R0) == 1
    events = {json.loads(line)["event"] for line in bench.lines}
    assert {"handle_evicted", "build_failed"} <= events


def test_speculation_shows_what_was_drafted_accepted_and_declined() -> None:
    bench = Bench(ready=1)
    assert exported(bench)["tinyloop_replica_speculation_enabled"].samples == []  # not measured yet
    bench.replica(R0, Calibrated(Calibration(enabled=True, speedup=1.5)))
    bench.client(ALICE, ask("q1", method="speculative"))
    finish(bench, Stats(drafted=10, accepted=7, method="speculative"))
    bench.client(ALICE, ask("q2", method="speculative"))
    finish(bench, Stats(method_reason="not measured yet"))
    assert value(bench, "tinyloop_drafted_tokens_total") == 10
    assert value(bench, "tinyloop_accepted_tokens_total") == 7
    assert value(bench, "tinyloop_speculation_declined_total") == 1
    assert value(bench, "tinyloop_replica_speculation_speedup", replica="r0") == 1.5


def test_a_loop_that_comes_late_shows() -> None:
    bench = Bench(ready=1)
    bench.wait(0.5)
    before = value(bench, "tinyloop_loop_late_seconds_sum")
    bench.now += 3.25
    bench.tick()
    assert value(bench, "tinyloop_loop_late_seconds_sum") - before == pytest.approx(3.0, abs=0.26)


def test_the_catalogue_is_in_order() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("tinyloop_") and metric.help
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name


def test_two_replicas_of_one_name_are_two_series() -> None:
    bench = Bench(ready=0)
    for endpoint in (R0, R1):
        bench.replica(endpoint, announce("ipc:///x/same"))
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in exported(bench).values()
        for sample in family.samples
    ]
    assert len(series) == len(set(series))
