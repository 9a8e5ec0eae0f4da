"""The dispatcher's decisions, event by event, with no socket and no clock. Catches: a request with no answer
or two, a refusal without its arithmetic, lanes left running for nobody, a lost replica that takes others
along."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tinyloop_serve.dispatcher.clients import IDLE_S
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.core import Core
from tinyloop_serve.dispatcher.effects import (
    TOKENIZER,
    Attach,
    Detach,
    Load,
    Peer,
    Reset,
    Send,
    Tokenize,
)
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.requests import Request
from tinyloop_serve.dispatcher.vacancy import Vacancy
from tinyloop_serve.protocol.codec import TO_CLIENT, tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest, LimitExceeded
from tinyloop_serve.protocol.messages import (
    Budget,
    CacheCost,
    Calibrated,
    Calibration,
    Cancel,
    CancelLanes,
    Control,
    Done,
    Failed,
    Generate,
    GetStatus,
    Goodbye,
    Hello,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    RenewHandle,
    Run,
    Sampling,
    Stats,
    Status,
    Step,
    Tokens,
)

R0, R1 = "ipc:///x/r0", "ipc:///x/r1"
ALICE, BOB = b"alice", b"bob"
MODEL = ModelInfo("demo", "f" * 64, vocab_size=100, loops=4, max_loops=8, max_seq_len=64)


class Bench:
    """A core and a clock; every event is followed by the invariant check."""

    def __init__(self, *, ready: int = 1, replicas: tuple[str, ...] = (R0, R1), **options: Any) -> None:
        raw = {"front": "ipc:///x/f", "replicas": list(replicas), "max_wait_ms": 0.0, "heartbeat_ms": 250}
        self.lines: list[str] = []
        self.now = 100.0
        self.core = Core(load(raw | options), Journal(self.lines.append), self.now, name="d1")
        self.sent: list[Send] = []
        self.mute: set[Peer] = set()  # replicas that answer no ping
        self.steps = 0  # what the others say of their engines
        for endpoint in replicas[:ready]:
            self.replica(endpoint, announce(endpoint))
        self.sent.clear()

    def client(self, client: bytes, message: Any) -> list[Send]:
        return self._after(self.core.client_says(client, "local", message, self.now))

    def replica(self, endpoint: str, message: Any, payloads: tuple[bytes, ...] = ()) -> list[Send]:
        return self._after(self.core.replica_says(endpoint, message, payloads, self.now))

    def gone(self, endpoint: str, why: str = "the connection was closed") -> list[Send]:
        return self._after(self.core.replica_gone(endpoint, why, self.now))

    def wait(self, seconds: float) -> list[Send]:
        """Time passes; ticks happen when they are due, as in the server."""
        end, sends = self.now + seconds, []
        while (due := self.core.wake_at()) <= end:
            self.now = max(due, self.now)
            sends += self.tick()
        self.now = end
        return sends + self.tick()

    def tick(self) -> list[Send]:
        sends = self._after(self.core.tick(self.now))
        for peer, message, _ in list(sends):
            if isinstance(message, Ping) and isinstance(peer, str) and peer not in self.mute:
                sends += self.replica(peer, Pong(message.n, step_counter=self.steps))
        return sends

    def _after(self, sends: list[Send]) -> list[Send]:
        self.core.check(self.now)
        self.sent += sends
        return sends

    def run(self, endpoint: str = R0) -> Run:
        """The last Run that this replica got."""
        return next(
            s.message for s in reversed(self.sent) if s.peer == endpoint and isinstance(s.message, Run)
        )

    def finish(self, endpoint: str = R0) -> list[Send]:
        """The replica answers every lane of its run."""
        run = self.run(endpoint)
        keys = tuple(lane.key for lane in run.lanes)
        step = Step(run.run, keys, (1,) * len(keys), (True,) * len(keys), idle=True)
        return self.replica(endpoint, step, tuple(b"final %d" % key for key in keys))


def announce(endpoint: str, model: ModelInfo = MODEL, tokenizer: str = "{}", pid: int = 7) -> Ready:
    return Ready(endpoint[-2:], pid, "cpu", model, tokenizer)


def ask(id: str, prompt: int = 3, **fields: Any) -> Generate:
    return Generate(
        id=id, prompt_tokens=tokens_to_bytes(range(1, 1 + prompt)), **({"max_tokens": 8} | fields)
    )


def said(sends: list[Send], peer: Peer, kind: type) -> list[Any]:
    return [send.message for send in sends if send.peer == peer and isinstance(send.message, kind)]


# ------------------------------------------------------------------ the main road


def test_a_request_goes_down_and_its_tokens_come_up_undecoded() -> None:
    bench = Bench()
    (send,) = bench.client(ALICE, ask("q", prompt=3, seed=5, sampling=Sampling(temperature=0.5)))
    run = send.message
    assert send.peer == R0 and isinstance(run, Run)
    assert run.sampling == Sampling(loops=4, temperature=0.5) and run.batch_size == 1  # the model's loops
    assert (run.lanes[0].id, run.lanes[0].prompt, run.lanes[0].seed) == ("q", tokens_to_bytes([1, 2, 3]), 5)
    key = run.lanes[0].key
    assert bench.replica(R0, Step(run.run, (key,), (1,), (False,)), (b"\xffgarbage",)) == [
        Send(ALICE, None, (b"\xffgarbage",))
    ]
    assert bench.replica(R0, Step(run.run, (key,), (0,), (True,), idle=True), (b"end",)) == [
        Send(ALICE, None, (b"end",))
    ]
    assert (bench.core.requests.finished, bench.core.requests.failed) == (1, 0)
    assert bench.core.replicas[R0].served == 1
    assert '"outcome": "answered"' in bench.lines[-1] and '"delivered": 1' in bench.lines[-1]


def test_the_log_has_the_engines_statistics_and_tells_done_from_failed() -> None:
    ends = {
        "answered": Done("q", "eos", stats=Stats(generated_tokens=7, decode_ms=1.5)),
        "cancelled": Done("q", "cancelled"),
        "engine": Failed("q", "engine", "it broke"),
    }
    for outcome, end in ends.items():
        bench = Bench()
        (send,) = bench.client(ALICE, ask("q"))
        step = Step(send.message.run, (send.message.lanes[0].key,), (0,), (True,), idle=True)
        bench.replica(R0, step, (TO_CLIENT.encode_body(end),))
        line = json.loads(bench.lines[-1])
        assert line["outcome"] == outcome
        assert bench.core.requests.failed == (outcome == "engine")
        if outcome == "answered":
            assert line["stats"] == {"generated_tokens": 7, "decode_ms": 1.5}


def test_requests_of_one_shape_share_a_run_and_one_step_is_one_send_per_client() -> None:
    bench = Bench(max_wait_ms=10)
    for client, id in ((ALICE, "a1"), (BOB, "b1"), (ALICE, "a2")):
        bench.client(client, ask(id))
    assert [len(s.message.lanes) for s in bench.sent if isinstance(s.message, Run)] == [2]  # min_batch_size
    run = bench.run()
    assert run.batch_size == 2
    bench.finish()
    bench.wait(0.010)
    keys = tuple(lane.key for lane in bench.run().lanes)
    for id in ("a3", "a4"):
        bench.client(ALICE, ask(id))
    bench.finish()
    keys = tuple(lane.key for lane in bench.run().lanes)
    sends = bench.replica(R0, Step(bench.run().run, keys, (1, 1), (False, False)), (b"3", b"4"))
    assert sends == [Send(ALICE, None, (b"3", b"4"))]


def test_work_is_counted_in_loops_over_all_tokens_of_all_beams() -> None:
    bench = Bench()
    for asked, work in (
        (ask("plain"), 11 * 4),
        (ask("deep", sampling=Sampling(loops=8)), 11 * 8),
        (ask("beams", sampling=Sampling(beam_size=3)), 11 * 4 * 3),
        (Generate("text", prompt_text="x" * 40, max_tokens=2), (10 + 2) * 4),
    ):
        bench.client(ALICE, asked)
        request = bench.core.requests.find(ALICE, asked.id)
        assert request is not None and request.cost == work


def test_one_credit_per_replica_and_the_longest_idle_goes_first() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("1"))
    bench.client(ALICE, ask("2"))
    bench.client(ALICE, ask("3"))
    assert [send.peer for send in bench.sent] == [R0, R1]
    bench.now += 1
    assert said(bench.finish(R1), R1, Run)[0].lanes[0].id == "3"


def test_text_is_tokenised_elsewhere_and_keeps_its_place() -> None:
    bench = Bench()
    assert bench.core.replicas.model == MODEL
    (send,) = bench.client(ALICE, Generate(id="t", prompt_text="hello", max_tokens=8))
    assert send.peer == TOKENIZER and send.message == Tokenize(1, "hello")
    (run,) = bench._after(bench.core.tokenized(1, tokens_to_bytes([7, 8]), bench.now))
    assert isinstance(run.message, Run) and run.message.lanes[0].prompt == tokens_to_bytes([7, 8])


def test_a_text_that_cannot_be_tokenised_fails() -> None:
    bench = Bench()
    bench.client(ALICE, Generate(id="t", prompt_text="hello"))
    error = InvalidRequest("no tokenizer", field="prompt_text")
    (failed,) = said(bench._after(bench.core.tokenized(1, error, bench.now)), ALICE, Failed)
    assert (failed.id, failed.code, failed.field) == ("t", "invalid", "prompt_text")


def test_requests_before_the_first_replica_wait_for_it() -> None:
    bench = Bench(ready=0)
    assert bench.client(ALICE, ask("a")) == []
    assert bench.client(ALICE, Generate(id="t", prompt_text="x", max_tokens=8)) == []
    sends = bench.replica(R0, announce(R0))
    assert [type(send.message) for send in sends] == [Load, Tokenize, Run]


def test_connecting_says_hello() -> None:
    assert Bench().core.replica_connected(R0) == [Send(R0, Hello("d1"))]


# ------------------------------------------------------------------ refusals

REFUSALS = [
    (ask("q", max_tokens=62), "limit", "max_tokens", "prompt 3 + max_tokens 62 = 65 > max_seq_len 64"),
    (ask("q", prompt=64, max_tokens=1), "limit", "prompt_tokens", "prompt 64 + max_tokens 1 = 65 > max_seq"),
    (ask("q", sampling=Sampling(loops=9)), "limit", "sampling.loops", "loops 9 > max_loops 8"),
    (
        Generate("q", prompt_tokens=tokens_to_bytes([1, 100]), max_tokens=8),
        "invalid",
        "prompt_tokens[1]",
        "of 100",
    ),
    (ask("q", sampling=Sampling(cache_mode="int8")), "mode", "sampling.cache_mode", "int8"),
    (ask("q", sampling=Sampling(temperature=float("nan"))), "invalid", "sampling.temperature", "nan"),
    (ask("q", max_tokens=0), "invalid", "max_tokens", "0"),
    (Generate("q"), "invalid", "prompt_text", "exactly one"),
]


@pytest.mark.parametrize("asked, code, field, text", REFUSALS)
def test_refused_at_once_with_the_field_and_the_arithmetic(
    asked: Generate, code: str, field: str, text: str
) -> None:
    bench = Bench(cache_modes=["fp16", "int4"])  # the product's allow-list
    (send,) = bench.client(ALICE, asked)
    failed = send.message
    assert isinstance(failed, Failed) and (failed.id, failed.code, failed.field) == ("q", code, field)
    assert text in failed.message and failed.accepted
    assert not bench.core.requests.live()


def test_a_priority_is_cut_to_what_the_tenant_may() -> None:
    bench = Bench(tenants={"low": {"max_priority": 1}}, batch_sizes=[1], min_batch_size=1)
    for id, priority in (("runs", 0), ("1", 0), ("2", 1), ("3", 10)):
        bench._after(bench.core.client_says(ALICE, "low", ask(id, priority=priority), bench.now))
    order = [bench.finish() and bench.run().lanes[0].id for _ in range(3)]
    assert order == ["2", "3", "1"]


def test_a_live_id_cannot_be_used_twice_by_one_client_but_by_two() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    (failed,) = said(bench.client(ALICE, ask("q")), ALICE, Failed)
    assert (failed.id, failed.code, failed.field) == ("", "invalid", "id")  # no end of the first one
    assert said(bench.client(BOB, ask("q")), BOB, Failed) == []
    bench.finish()
    assert said(bench.client(ALICE, ask("q")), ALICE, Failed) == []  # free again


def test_a_full_queue_refuses_and_says_when_to_try_again() -> None:
    bench = Bench(max_waiting=2)
    for id in ("running", "w1", "w2"):
        bench.client(ALICE, ask(id))
    (failed,) = said(bench.client(BOB, ask("late")), BOB, Failed)
    assert failed.code == "overloaded" and 100 <= failed.retry_after_ms <= 10_000
    assert said(bench.finish(), R0, Run)  # room again
    assert said(bench.client(BOB, ask("late")), BOB, Failed) == []


def test_modes_that_cannot_be_batched_run_alone() -> None:
    bench = Bench(ready=0, max_wait_ms=10)
    for id in ("1", "2", "3"):
        bench.client(ALICE, ask(id, sampling=Sampling(beam_size=2)))
    bench.replica(R0, announce(R0))
    assert len(bench.run().lanes) == 1 and bench.run().batch_size == 1


def test_garbled_messages_never_answer_a_live_request() -> None:
    bench = Bench()
    error = LimitExceeded("too large")
    (send,) = bench.core.client_garbled(ALICE, "q", error, bench.now)
    assert send.message == Failed("q", "limit", "too large")
    bench.client(ALICE, ask("q"))
    (send,) = bench.core.client_garbled(ALICE, "q", error, bench.now)
    assert send.message == Failed("", "limit", "too large")
    for other in (ask("q", max_tokens=0), Control("q", "attach"), RenewHandle("q", "")):
        (failed,) = said(bench.client(ALICE, other), ALICE, Failed)
        assert (failed.id, failed.code) == ("", "invalid")


# ------------------------------------------------------------------ cancel, deadlines, clients that leave


def test_cancel_while_waiting_is_answered_at_once() -> None:
    bench = Bench()
    bench.client(ALICE, ask("running"))
    bench.client(ALICE, ask("waiting"))
    (done,) = said(bench.client(ALICE, Cancel("waiting")), ALICE, Done)
    assert (done.id, done.stop_reason, done.stats.prompt_tokens) == ("waiting", "cancelled", 3)
    assert bench.client(ALICE, Cancel("waiting")) == [] and bench.client(BOB, Cancel("running")) == []
    assert said(bench.finish(), R0, Run) == []


def test_cancel_while_tokenising_wins_over_the_result() -> None:
    bench = Bench()
    bench.client(ALICE, Generate(id="t", prompt_text="hello"))
    assert [done.stop_reason for done in said(bench.client(ALICE, Cancel("t")), ALICE, Done)] == ["cancelled"]
    assert bench._after(bench.core.tokenized(1, tokens_to_bytes([1]), bench.now)) == []


def test_cancel_while_running_goes_to_the_replica_whose_done_is_the_answer() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    key = bench.run().lanes[0].key
    assert bench.client(ALICE, Cancel("q")) == [Send(R0, CancelLanes((key,)))]
    assert bench.client(ALICE, Cancel("q")) == []
    assert bench.finish() == [Send(ALICE, None, (b"final %d" % key,))]


def test_a_deadline_while_waiting_and_while_running() -> None:
    bench = Bench()
    bench.client(ALICE, ask("running", deadline_ms=500))
    bench.client(ALICE, ask("waiting", deadline_ms=300))
    key = bench.run().lanes[0].key
    sends = bench.wait(1.0)
    assert [(f.id, f.code) for f in said(sends, ALICE, Failed)] == [
        ("waiting", "deadline"),
        ("running", "deadline"),
    ]
    assert said(sends, R0, CancelLanes) == [CancelLanes((key,))]
    assert bench.finish() == []  # its late answer goes nowhere
    assert bench.core.replicas[R0].state == "ready"


@pytest.mark.parametrize("how", ["goodbye", "unreachable", "lease"])
def test_a_client_that_leaves_stops_its_lanes_and_is_sent_no_answer(how: str) -> None:
    bench = Bench()
    bench.client(ALICE, Ping(1, lease_ms=1000))
    for id in ("running", "waiting"):
        bench.client(ALICE, ask(id))
    bench.client(BOB, ask("other"))
    key = bench.run().lanes[0].key
    before = len(bench.sent)
    if how == "goodbye":
        bench.client(ALICE, Goodbye())
    elif how == "unreachable":
        bench._after(bench.core.client_gone(ALICE, bench.now))
    else:
        bench.wait(1.5)
    assert said(bench.sent, R0, CancelLanes) == [CancelLanes((key,))]
    bench.finish()
    told = [send.message for send in bench.sent[before:] if send.peer == ALICE]
    if how == "lease":  # it may be alive, and wait
        (failed,) = told
        assert isinstance(failed, Failed) and (failed.id, failed.code) == ("", "unavailable")
    else:
        assert told == []
    assert bench.run().lanes[0].id == "other"


def test_a_lease_is_renewed_by_any_message() -> None:
    bench = Bench()
    bench.client(ALICE, Ping(1, lease_ms=1000))
    bench.client(ALICE, ask("q"))
    for n in range(5):
        bench.wait(0.9)
        bench.client(ALICE, Ping(n, lease_ms=1000))
    assert len(bench.core.requests.live()) == 1


def test_who_is_silent_for_long_and_has_nothing_open_is_forgotten() -> None:
    bench = Bench(stall_ms=86_400_000)
    bench.client(ALICE, Ping(1))
    bench.client(BOB, ask("q"))
    bench.wait(IDLE_S + 1)
    assert set(bench.core.clients.known()) == {BOB}


def test_a_slow_client_is_told_so_once_per_request() -> None:
    bench = Bench()
    bench.client(ALICE, ask("running"))
    bench.client(ALICE, ask("waiting"))
    sends = bench._after(bench.core.client_slow(ALICE, bench.now))
    assert [(f.id, f.code) for f in said(sends, ALICE, Failed)] == [
        ("running", "transport"),
        ("waiting", "transport"),
    ]
    assert len(said(sends, R0, CancelLanes)) == 1
    assert bench.core.client_slow(ALICE, bench.now) == []


# ------------------------------------------------------------------ replicas that come and go


def test_the_requests_of_a_dead_replica_go_on_elsewhere_and_others_are_not_disturbed() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("on0"))
    bench.client(BOB, ask("on1"))
    bench.client(ALICE, ask("waits"))
    sends = bench.gone(R0)
    assert Send(R0, Reset()) in sends and said(sends, ALICE, Failed) == said(sends, BOB, Failed) == []
    assert bench.core.replicas[R0].state == "lost"
    assert said(bench.finish(R1), R1, Run)[0].lanes[0].id == "on0"  # which came first
    assert said(bench.finish(R1), R1, Run)[0].lanes[0].id == "waits"
    bench.replica(R0, announce(R0, pid=8))
    assert bench.core.replicas[R0].state == "ready"


def test_a_request_cancelled_on_a_dying_replica_is_cancelled() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    bench.client(ALICE, Cancel("q"))
    assert [done.stop_reason for done in said(bench.gone(R0), ALICE, Done)] == ["cancelled"]


def test_a_silent_replica_is_lost_within_two_and_a_half_seconds() -> None:
    bench = Bench()
    bench.mute.add(R0)
    bench.client(ALICE, ask("q"))
    bench.wait(1.9)
    assert bench.core.replicas[R0].state == "busy"
    bench.wait(0.6)
    assert bench.core.replicas[R0].state == "lost" and bench.core.failovers == 1
    assert "heartbeats" in bench.core.replicas[R0].error


def test_a_replica_that_answers_pings_but_makes_no_step_is_lost() -> None:
    bench = Bench(stall_ms=3000)
    bench.client(ALICE, ask("q"))
    for _ in range(10):
        bench.steps += 1  # prefill: no frame, but the core moves
        bench.wait(1.0)
    assert bench.core.replicas[R0].state == "busy"
    bench.wait(3.5)
    assert bench.core.replicas[R0].state == "lost" and "no step" in bench.core.replicas[R0].error


def test_our_own_pause_convicts_neither_replica_nor_client() -> None:
    bench = Bench()
    bench.client(ALICE, Ping(1, lease_ms=1000))
    bench.client(ALICE, ask("q"))
    bench.now += 3600  # the machine slept
    bench.tick()
    assert bench.core.replicas[R0].state == "busy" and len(bench.core.requests.live()) == 1


def test_an_idle_replica_needs_no_steps() -> None:
    bench = Bench(stall_ms=1000)
    bench.wait(5.0)
    bench.client(ALICE, ask("q"))
    bench.wait(0.5)
    assert bench.core.replicas[R0].state == "busy"


def test_another_model_is_refused_and_the_status_says_why() -> None:
    bench = Bench()
    other = msgspec.structs.replace(MODEL, fingerprint="e" * 64)
    sends = bench.replica(R1, announce(R1, other))
    assert sends == [Send(R1, Goodbye())]  # and no Reset: it would only announce itself again
    (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
    assert status.replicas[1].state == "lost" and "eeee" in status.replicas[1].error


@pytest.mark.parametrize("other", [{"weights": "int8"}, {"backend": "cuda"}])
def test_other_weights_or_another_backend_would_give_other_tokens(other: dict[str, str]) -> None:
    bench = Bench()
    bench.replica(R1, announce(R1, msgspec.structs.replace(MODEL, **other)))
    assert bench.core.replicas[R1].state == "lost"
    assert next(iter(other.values())) in bench.core.replicas[R1].error


def test_a_replica_that_starts_anew_on_the_same_connection_has_lost_its_work() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    sends = bench.replica(R0, announce(R0, pid=8))
    assert said(sends, R0, Run)[0].lanes[0].failovers == 1


def test_a_run_that_ends_without_an_answer_fails_what_is_open() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    sends = bench.replica(R0, Step(bench.run().run, idle=True))
    assert [f.code for f in said(sends, ALICE, Failed)] == ["engine"]


def test_frames_of_an_old_run_are_dropped() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    key = bench.run().lanes[0].key
    assert bench.replica(R0, Step(99, (key,), (1,), (True,), idle=True), (b"x",)) == []
    assert len(bench.core.requests.live()) == 1
    bench.finish()
    assert bench.replica(R0, Step(0, (key,), (1,), (False,)), (b"x",)) == []  # the number of no run
    assert bench.core.metrics.tokens == 1
    assert bench.core.replicas[R0].served == 1
    assert bench.replica(R0, Step(0, idle=True)) == []


def test_a_replica_cannot_answer_what_another_decodes() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q0"))
    bench.client(BOB, ask("q1"))
    stolen = bench.run(R0).lanes[0].key
    run = bench.run(R1).run
    assert bench.replica(R1, Step(run, (stolen,), (1,), (True,)), (b"x",)) == []
    assert len(bench.core.requests.live()) == 2


def test_without_any_replica_requests_wait_for_a_while_and_then_fail() -> None:
    bench = Bench(replica_wait_ms=1000)
    bench.client(ALICE, ask("q1"))
    bench.gone(R0)
    bench.client(ALICE, ask("q2"))
    assert said(bench.wait(0.9), ALICE, Failed) == []
    lost, never_ran = said(bench.wait(0.4), ALICE, Failed)
    assert (lost.id, lost.code) == ("q1", "replica_lost") and "after token 0" in lost.message
    assert (never_ran.id, never_ran.code) == ("q2", "unavailable")
    assert "connection was closed" in never_ran.message


def test_without_any_replica_and_no_patience_the_refusal_is_immediate() -> None:
    bench = Bench(ready=0, replica_wait_ms=0)
    (failed,) = said(bench.client(ALICE, ask("q")), ALICE, Failed)
    assert failed.code == "unavailable"


# ------------------------------------------------------------------ an answer goes on after a loss


def deliver(bench: Bench, endpoint: str, first: int, *tokens: int) -> list[Send]:
    """The replica's only lane gets these tokens, from position `first` on."""
    run = bench.run(endpoint)
    (lane,) = run.lanes
    body = TO_CLIENT.encode_body(Tokens(lane.id, first, tokens_to_bytes(tokens)))
    return bench.replica(endpoint, Step(run.run, (lane.key,), (len(tokens),), (False,)), (body,))


def test_it_goes_on_after_the_last_token_that_was_forwarded() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q", seed=5, done=tokens_to_bytes([90])))
    deliver(bench, R0, 1, 91, 92)
    deliver(bench, R0, 3, 93)
    (lane,) = said(bench.gone(R0), R1, Run)[0].lanes
    assert lane.done == tokens_to_bytes([90, 91, 92, 93]) and lane.seed == 5 and lane.failovers == 1
    deliver(bench, R1, 4, 94)
    bench.replica(R0, announce(R0, pid=8))
    assert said(bench.gone(R1), R0, Run)[0].lanes[0].done == tokens_to_bytes([90, 91, 92, 93, 94])


def test_what_a_replica_sent_out_of_turn_is_not_gone_on_from() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    deliver(bench, R0, 7, 91)
    assert [f.code for f in said(bench.gone(R0), ALICE, Failed)] == ["replica_lost"]


def test_lanes_of_a_lost_batch_run_alone_and_who_kills_two_in_a_row_is_refused() -> None:
    bench = Bench(ready=0, max_wait_ms=10)
    for id in ("good", "bad"):
        bench.client(ALICE, ask(id))
    bench.replica(R0, announce(R0))
    assert len(bench.run(R0).lanes) == 2
    bench.gone(R0)
    bench.replica(R1, announce(R1))
    assert [lane.id for lane in bench.run(R1).lanes] == ["good"] and bench.run(R1).batch_size == 1
    bench.finish(R1)
    assert [lane.id for lane in bench.run(R1).lanes] == ["bad"]
    (failed,) = said(bench.gone(R1), ALICE, Failed)
    assert (failed.id, failed.code) == ("bad", "poison") and "2 replicas in a row" in failed.message


def test_a_token_between_two_losses_clears_the_suspicion_and_orderly_losses_raise_none() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    bench.gone(R0)
    deliver(bench, R1, 0, 91)
    bench.replica(R0, announce(R0, pid=8))
    bench.gone(R1)
    for endpoint in (R0, R1, R0):
        bench.replica(R1 if endpoint == R0 else R0, announce(R1 if endpoint == R0 else R0, pid=9))
        assert said(bench.replica(endpoint, Goodbye()), ALICE, Failed) == []
    assert bench.core.failovers == 5 and len(bench.core.requests.live()) == 1


def test_tokens_of_one_model_go_on_only_with_the_same_model() -> None:
    bench = Bench(ready=2)
    other = msgspec.structs.replace(MODEL, fingerprint="e" * 64)
    bench.client(ALICE, ask("begun"))
    bench.client(BOB, ask("fresh"))
    deliver(bench, R0, 0, 91)
    bench.client(ALICE, Control("c", "accept", "e" * 64))
    bench.gone(R1)
    sends = bench.replica(R1, announce(R1, other, pid=8))
    assert [run.lanes[0].id for run in said(sends, R1, Run)] == ["fresh"]  # it had no token
    bench.gone(R0)
    bench.finish(R1)
    assert [request.id for request in bench.core.requests.live()] == ["begun"]
    sends = bench.replica(R0, announce(R0, other, pid=8))
    (failed,) = said(sends + bench.wait(0.3), ALICE, Failed)
    assert failed.code == "replica_lost" and "no replica is left that serves the same model" in failed.message


def test_an_answer_that_a_client_goes_on_with_goes_on_with_its_model() -> None:
    other = msgspec.structs.replace(MODEL, fingerprint="e" * 64)
    have: dict[str, Any] = {"done": tokens_to_bytes([1, 2])}
    bench = Bench(ready=2)
    (failed,) = said(bench.client(ALICE, ask("q", **have, model="e" * 64)), ALICE, Failed)
    assert (failed.code, failed.field, failed.value) == ("replica_lost", "model", "e" * 64)
    bench.client(BOB, Control("c", "accept", "e" * 64))
    bench.gone(R1)
    bench.replica(R1, announce(R1, other, pid=8))
    bench.client(ALICE, ask("former", **have, model=MODEL.identity))
    bench.client(ALICE, ask("current", **have, model="e" * 64))
    assert [bench.run(each).lanes[0].id for each in (R0, R1)] == ["former", "current"]


# ------------------------------------------------------------------ operators, health, budgets


def test_a_drain_lets_the_run_end_and_moves_what_is_left() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("q"))
    key = bench.run(R0).lanes[0].key
    bench.client(ALICE, Control("c", "drain", "r0", within_ms=1000))
    bench.client(BOB, ask("1"))
    bench.client(BOB, ask("2"))
    assert [lane.id for lane in bench.run(R1).lanes] == ["1"] and said(bench.finish(R1), R1, Run)
    bench.finish(R1)
    sends = bench.wait(1.3)
    assert said(sends, R0, CancelLanes) == [CancelLanes((key,))]
    assert said(sends, R1, Run)[0].lanes[0].id == "q"
    assert bench.replica(R0, Step(bench.run(R0).run, (key,), (0,), (True,), True), (b"x",)) == []
    (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
    assert [replica.state for replica in status.replicas] == ["draining", "busy"]
    bench.client(ALICE, Control("c", "resume", R0))
    assert said(bench.client(BOB, ask("3")), R0, Run)


def test_attach_and_detach() -> None:
    bench = Bench(ready=1)
    new = "ipc:///x/new"
    assert Send(new, Attach()) in bench.client(ALICE, Control("c", "attach", new))
    bench.replica(new, announce(new))
    (refused,) = said(bench.client(ALICE, Control("c", "attach", new)), ALICE, Failed)
    assert (refused.code, refused.field) == ("invalid", "target")
    sends = bench.client(ALICE, Control("c", "detach", new))
    assert [send.message for send in sends if send.peer == new] == [Goodbye(), Detach()]
    assert new not in bench.core.replicas and bench.replica(new, Pong(1)) == []


def test_only_tenants_with_the_right_give_orders() -> None:
    bench = Bench()
    sends = bench._after(bench.core.client_says(BOB, "guest", Control("c", "detach", R0), bench.now))
    assert [failed.code for failed in said(sends, BOB, Failed)] == ["forbidden"]


def test_a_replica_that_is_not_well_gets_nothing_new_until_it_is() -> None:
    bench = Bench()
    bench.replica(R0, Pong(1, health="3 runs in a row failed: out of memory"))
    assert bench.client(ALICE, ask("q")) == []
    (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
    assert "out of memory" in status.replicas[0].health and "out of memory" in bench.lines[-1]
    assert bench.core.replicas.unwell == 1
    assert said(bench.replica(R0, Pong(2)), R0, Run)


def test_a_request_waits_for_memory_or_is_refused_with_the_arithmetic() -> None:
    def budget(cache_bytes: int) -> Budget:
        return Budget(0, 0, cache_bytes, 0, 0, {"fp16": CacheCost(fixed=0, per_loop=1)})

    bench = Bench(ready=0)
    for endpoint, size in ((R0, 64), (R1, 128)):  # 16 positions at 4 loops; 32
        bench.replica(endpoint, msgspec.structs.replace(announce(endpoint), budget=budget(size)))
    (failed,) = said(bench.client(ALICE, ask("never", max_tokens=40)), ALICE, Failed)
    assert failed.code == "limit" and "48 positions x (0 + 4 loops x 1) bytes = 192 bytes" in failed.message
    assert said(bench.client(ALICE, ask("big", max_tokens=20)), R1, Run)
    assert bench.client(ALICE, ask("big2", max_tokens=20)) == []  # though the other one is idle
    assert said(bench.client(ALICE, ask("small")), R0, Run)


def test_a_routing_id_that_changes_its_tenant_is_another_client() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    sends = bench._after(bench.core.client_says(ALICE, "guest", ask("q"), bench.now))
    assert said(sends, ALICE, Failed) == [] and said(sends, R0, CancelLanes)
    assert [request.tenant for request in bench.core.requests.live()] == ["guest"]


def test_speculation_as_the_status_tells_it() -> None:
    bench = Bench()
    for told in ("pending", "on 1.42x"):
        (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
        assert status.replicas[0].speculation == told
        bench.replica(R0, Calibrated(Calibration(enabled=True, speedup=1.42)))
    assert said(bench.client(ALICE, ask("q", method="speculative")), R0, Run)[0].lanes[0].method != "plain"


# ------------------------------------------------------------------ the end, the status


def test_draining_refuses_new_requests_and_stopping_fails_the_rest() -> None:
    bench = Bench()
    bench.client(ALICE, ask("q"))
    bench.core.draining = True
    assert [f.code for f in said(bench.client(BOB, ask("n")), BOB, Failed)] == ["unavailable"]
    sends = bench._after(bench.core.stop(bench.now))
    assert [f.id for f in said(sends, ALICE, Failed)] == ["q"]
    assert said(sends, R0, CancelLanes) and said(sends, R0, Goodbye)


def test_the_status_counts() -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, ask("1"))
    bench.client(BOB, ask("2"))
    bench.client(BOB, ask("3", max_tokens=0))
    bench.now += 1
    bench.replica(R0, Pong(1, step_counter=5, running=1, memory_bytes=99))
    (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
    assert (status.id, status.model, status.uptime_ms) == ("s", MODEL, 1000)
    assert (status.waiting, status.running, status.finished, status.failed, status.clients) == (1, 1, 0, 0, 2)
    assert status.refused == 1
    assert [(r.state, r.running, r.step_counter, r.memory_bytes) for r in status.replicas] == [
        ("busy", 1, 5, 99),
        ("starting", 0, 0, 0),
    ]
    (bucket,) = status.buckets
    assert "loops=4" in bucket.shape and (bucket.waiting, bucket.oldest_ms) == (1, 1000)


# ------------------------------------------------------------------ deadlines that cannot be kept


def test_deadlines_of_what_has_ended_are_forgotten() -> None:
    """A client may give days; they are no reason to remember its requests for days."""
    bench = Bench()
    bench.client(BOB, ask("keeps", deadline_ms=1000))
    for number in range(1000):
        bench.client(ALICE, ask(f"q{number}", deadline_ms=86_400_000))
        bench.client(ALICE, Cancel(f"q{number}"))
    assert len(bench.core.requests._deadlines) < 100
    assert [failed.code for failed in said(bench.wait(1.1), BOB, Failed)] == ["deadline"]


def measured(bench: Bench, seconds: float) -> None:
    """The fleet has learned how long a request runs alone."""
    for number in range(8):
        bench.client(ALICE, ask(f"m{number}"))
        bench.wait(seconds)
        bench.finish()


def test_what_can_no_longer_end_in_time_takes_no_lane() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1)
    measured(bench, 0.5)
    bench.client(ALICE, ask("first"))
    bench.client(ALICE, ask("late", deadline_ms=1300))
    bench.client(ALICE, ask("in time", deadline_ms=3000))
    bench.wait(0.9)
    sends = bench.finish()
    (failed,) = said(sends, ALICE, Failed)
    assert (failed.id, failed.code, failed.field) == ("late", "deadline", "deadline_ms")
    assert "it has waited 900 ms and would run for about" in failed.message
    assert [lane.id for lane in bench.run().lanes] == ["in time"]


def test_it_keeps_its_lane_where_nobody_else_wants_it() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1)
    measured(bench, 0.5)
    bench.client(ALICE, ask("first"))
    bench.client(ALICE, ask("late", deadline_ms=1300))
    bench.wait(0.9)
    bench.finish()
    assert [lane.id for lane in bench.run().lanes] == ["late"]


def test_of_those_that_are_too_late_one_keeps_the_lane_that_nobody_else_wants() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1)
    measured(bench, 0.5)
    for id in ("first", "late", "later"):
        bench.client(ALICE, ask(id, deadline_ms=0 if id == "first" else 1300))
    bench.wait(0.9)
    assert [failed.id for failed in said(bench.finish(), ALICE, Failed)] == ["late"]
    assert [lane.id for lane in bench.run().lanes] == ["later"]


def test_an_answer_that_has_begun_goes_on_however_late() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1)
    measured(bench, 0.5)
    bench.client(ALICE, ask("begun", deadline_ms=1300))
    run = bench.run()
    token = TO_CLIENT.encode_body(Tokens("begun", 0, tokens_to_bytes([5])))
    bench.replica(R0, Step(run.run, (run.lanes[0].key,), (1,), (False,)), (token,))
    bench.gone(R0)
    bench.client(ALICE, ask("other"))
    bench.wait(1.0)
    bench.replica(R0, announce(R0, pid=8))
    assert [lane.id for lane in bench.run().lanes] == ["begun"]


def test_what_is_too_late_is_found_without_a_walk_through_all_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[list[Request]] = []
    room = Vacancy.room
    monkeypatch.setattr(Vacancy, "room", lambda self, lanes: looked.append(lanes) or room(self, lanes))
    bench = Bench(max_waiting=5000, max_queue_ms=0)
    monkeypatch.setattr(bench.core, "check", lambda now: None)
    for number in range(2000):
        bench.client(ALICE, ask(f"q{number}", deadline_ms=3_600_000, max_tokens=8 + number % 40))
    for _ in range(5):
        looked.clear()
        assert said(bench.finish(), R0, Run) and len(looked) < 30


def test_work_that_was_not_done_is_given_back_to_the_tenant() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1, tenants={"a": {}, "b": {}})
    ask_as = bench.core.client_says
    bench._after(ask_as(ALICE, "a", ask("long", max_tokens=50), bench.now))
    bench._after(ask_as(ALICE, "a", Cancel("long"), bench.now))
    bench._after(ask_as(BOB, "b", ask("b1"), bench.now))
    bench._after(ask_as(ALICE, "a", ask("a1"), bench.now))
    bench._after(ask_as(ALICE, "a", ask("a2"), bench.now))
    run, done = bench.run(), TO_CLIENT.encode_body(Done("long", "cancelled"))
    step = Step(run.run, (run.lanes[0].key,), (0,), (True,), idle=True)
    bench.replica(R0, step, (done,))
    order = [bench.run().lanes[0].id]
    for _ in range(2):
        bench.finish()
        order.append(bench.run().lanes[0].id)
    assert order == ["a1", "b1", "a2"], "as if it had never run"


def test_what_could_never_end_in_time_is_refused_at_once() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1)
    measured(bench, 0.5)
    (failed,) = said(bench.client(ALICE, ask("hasty", deadline_ms=20)), ALICE, Failed)
    assert (failed.code, failed.value) == ("deadline", "20") and failed.accepted.startswith("at least ")
    assert '"event": "refused"' in bench.lines[-1] and bench.core.metrics.refused["deadline"] == 1


def test_a_wait_that_is_too_long_is_refused_before_it_begins() -> None:
    """One lane, half a second each: of twenty that have two seconds, four or five can be in time."""
    bench = Bench(batch_sizes=[1], min_batch_size=1)
    measured(bench, 0.5)
    bench.client(ALICE, ask("m"))
    for turn in range(3):  # its bucket's turns are known
        bench.client(ALICE, ask(f"n{turn}"))
        bench.wait(0.5)
        bench.finish()
    refused = []
    for number in range(20):
        refused += said(bench.client(ALICE, ask(f"q{number}", deadline_ms=2000)), ALICE, Failed)
    assert {failed.code for failed in refused} == {"overloaded"}
    assert 15 <= len(refused) <= 18 and all(failed.retry_after_ms > 0 for failed in refused)
