"""Which replica serves what, and when. Catches: a bucket that takes another's turn, a replica that comes back
as it was not, one that is out and still counted on, a model that changes by halves."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.test_dispatcher_core import ALICE, BOB, MODEL, R0, R1, Bench, announce, ask, deliver, said
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.messages import (
    Build,
    Built,
    Control,
    Controlled,
    CreateHandle,
    Drop,
    Failed,
    GetStatus,
    Goodbye,
    Handles,
    Hello,
    ListHandles,
    Ping,
    Pong,
    Recipe,
    Run,
    Sampling,
    Status,
)

OTHER = replace(MODEL, fingerprint="e" * 64)
WISH = CreateHandle("make", Recipe("prefix", prompt_tokens=tokens_to_bytes([1, 2])))


def test_a_bucket_whose_run_ended_queues_behind_all_that_came_meanwhile() -> None:
    bench = Bench(replicas=(R0,))
    hot = Sampling(temperature=0.5)
    bench.client(ALICE, ask("first", sampling=hot))
    bench.wait(0.5)
    bench.client(ALICE, ask("hot", sampling=hot))
    bench.wait(0.5)
    bench.client(ALICE, ask("rare"))
    bench.wait(1.0)
    bench.finish()
    assert [lane.id for lane in bench.run().lanes] == ["rare"]


def test_the_replica_that_has_been_idle_longest_is_next() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, ask("1"))
    bench.client(ALICE, ask("2"))
    for endpoint in (R1, R0):
        bench.wait(0.1)
        bench.finish(endpoint)
    assert said(bench.client(ALICE, ask("3")), R1, Run)


def test_without_patience_what_nobody_can_serve_is_refused_and_the_rest_is_served() -> None:
    bench = Bench(ready=0, replica_wait_ms=0)
    for wish in (ask("early"), WISH):
        (failed,) = said(bench.client(ALICE, wish), ALICE, Failed)
        assert failed.code == "unavailable" and R0 in failed.message
    bench.replica(R0, announce(R0))
    assert said(bench.client(ALICE, ask("q")), R0, Run)
    bench.gone(R0)
    assert said(bench.client(ALICE, ask("late")), ALICE, Failed)[0].code == "unavailable"


def test_what_runs_is_left_in_peace_where_nothing_new_may_begin() -> None:
    for how in ("drains", "is ill"):
        bench = Bench(replicas=(R0,), replica_wait_ms=1000)
        bench.client(ALICE, ask("q"))
        if how == "drains":
            bench.client(BOB, Control("c", "drain", R0, within_ms=60_000))
        for second in range(5):
            bench.steps += 1
            bench.replica(R0, Pong(1, step_counter=bench.steps, health="ok" if how == "drains" else "ill"))
            bench.mute = {R0}
            assert said(bench.wait(0.9), ALICE, Failed) == [], f"{second} s after it {how}"
        assert bench.core.requests.find(ALICE, "q") is not None


def test_a_process_that_was_drained_comes_back_and_its_successor_serves() -> None:
    bench = Bench(replicas=(R0,))
    bench.client(BOB, Control("c", "drain", R0))
    bench.gone(R0)
    bench.replica(R0, announce(R0))
    assert bench.client(ALICE, ask("q")) == [], "the same process"
    bench.gone(R0)
    assert said(bench.replica(R0, announce(R0, pid=8)), R0, Run), "another one"
    bench.client(BOB, Control("c", "detach", R0, within_ms=60_000))
    bench.gone(R0)
    sends = bench.replica(R0, announce(R0, pid=9))
    assert not said(sends, R0, Run), "it is to leave, whoever serves there"


def test_a_replica_that_is_detached_takes_its_handles_along() -> None:
    bench = Bench()
    bench.client(ALICE, WISH)
    (build,) = said(bench.sent, R0, Build)
    bench.replica(R0, Built(build.handle, 10))
    bench.client(BOB, Control("c", "detach", R0))
    assert said(bench.client(ALICE, ListHandles("l")), ALICE, Handles)[0].handles == ()
    bench.replica(R1, announce(R1))
    (lost,) = said(bench.client(ALICE, ask("q", handle=build.handle)), ALICE, Failed)
    assert lost.code == "handle_lost" and "it was detached" in lost.message


def test_a_refused_model_is_asked_again_once_it_is_accepted_and_then_it_is_the_fleets() -> None:
    bench = Bench(ready=1)
    bench.client(ALICE, WISH)
    (build,) = said(bench.sent, R0, Build)
    bench.replica(R0, Built(build.handle, 10))
    bench.replica(R1, announce(R1, OTHER))
    (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
    assert status.replicas[1].state == "lost" and status.model == MODEL
    sends = bench.client(ALICE, Control("c", "accept", OTHER.fingerprint))
    assert said(sends, R1, Hello) and "r1 is asked again" in said(sends, ALICE, Controlled)[0].message
    sends = bench.replica(R1, announce(R1, OTHER))
    assert said(sends, R0, Drop) == [Drop((build.handle,))], "handles belong to a model"
    (status,) = said(bench.client(ALICE, GetStatus("s")), ALICE, Status)
    assert status.model == OTHER
    assert said(bench.client(ALICE, ask("q")), R1, Run), "new requests take the fleet's"


def test_nothing_is_taken_while_the_dispatcher_leaves_and_what_is_built_is_dropped() -> None:
    bench = Bench()
    bench.client(ALICE, WISH)
    (build,) = said(bench.sent, R0, Build)
    sends = bench._after(bench.core.stop(bench.now))
    assert said(sends, R0, Drop) == [Drop((build.handle,))] and said(sends, ALICE, Failed)[0].id == "make"
    for wish in (ask("late"), WISH):
        assert said(bench.client(ALICE, wish), ALICE, Failed)[0].code == "unavailable"


def test_a_connection_that_changes_its_tenant_can_promise_to_stay_in_touch() -> None:
    bench = Bench()
    bench.client(ALICE, Ping(1))
    bench._after(bench.core.client_says(ALICE, "guest", Ping(2, lease_ms=1000), bench.now))
    assert said(bench.wait(1.5), ALICE, Failed)[0].code == "unavailable", "and is held to it"


def test_clients_that_are_long_silent_and_have_nothing_open_are_forgotten() -> None:
    bench = Bench(replicas=(R0,), max_lease_ms=3_600_000)
    bench.client(ALICE, replace(WISH, lease_ms=3_600_000))
    bench.replica(R0, Built(said(bench.sent, R0, Build)[0].handle, 10))
    bench.client(BOB, Ping(1))
    bench.client(b"held", Ping(1, lease_ms=3_000_000))
    bench.wait(599.0)
    assert bench.core.clients.known() == {ALICE, BOB, b"held"}
    bench.wait(2.0)
    assert bench.core.clients.known() == {ALICE, b"held"}, "one has a handle, one a lease"


def test_a_lease_has_an_upper_end() -> None:
    bench = Bench(replicas=(R0,))
    bench.client(BOB, Ping(1, lease_ms=2_000_000_000))
    bench.now += 3000.0
    bench.tick()
    assert BOB in bench.core.clients.known()
    bench.wait(3700.0)
    assert BOB not in bench.core.clients.known()


def test_one_that_comes_back_ill_gets_nothing_until_it_is_well() -> None:
    bench = Bench(replicas=(R0,))
    bench.gone(R0)
    bench.replica(R0, replace(announce(R0, pid=8), health="out of memory"))
    assert not said(bench.client(ALICE, ask("q")), R0, Run)
    assert said(bench.replica(R0, Pong(1)), R0, Run)


def test_who_was_to_leave_and_is_resumed_stays() -> None:
    bench = Bench(replicas=(R0,))
    bench.client(ALICE, ask("q"))
    bench.client(BOB, Control("c", "detach", R0, within_ms=60_000))
    bench.client(BOB, Control("c", "resume", R0))
    bench.finish()
    bench.client(BOB, Control("c", "drain", R0, within_ms=60_000))
    bench.wait(1.0)
    assert R0 in bench.core.replicas


def test_patience_ends_though_replicas_that_serve_nothing_come_and_go() -> None:
    bench = Bench(replica_wait_ms=3000)
    bench.gone(R0)
    bench.client(ALICE, ask("q"))
    sends = []
    for _ in range(7):
        bench.gone(R1, "what answers there is no replica")
        sends += bench.wait(0.5)
    assert [failed.id for failed in said(sends, ALICE, Failed)] == ["q"]


def test_an_answer_waits_for_one_that_may_yet_announce_its_model() -> None:
    bench = Bench(ready=1)
    bench.client(BOB, Control("c", "accept", OTHER.fingerprint))
    bench.client(ALICE, ask("begun"))
    deliver(bench, R0, 0, 91)
    bench.gone(R0)
    assert not said(bench.replica(R0, announce(R0, OTHER, pid=8)), R0, Run)
    assert said(bench.wait(1.0), ALICE, Failed) == []
    assert [lane.id for lane in said(bench.replica(R1, announce(R1)), R1, Run)[0].lanes] == ["begun"]


def test_who_builds_a_handle_is_the_last_to_get_a_run() -> None:
    bench = Bench(ready=1)
    bench.client(BOB, WISH)
    assert said(bench.sent, R0, Build)
    bench.now += 1.0
    bench.replica(R1, announce(R1))
    assert said(bench.client(ALICE, ask("q")), R1, Run), "though it has been idle for less long"
    assert said(bench.client(ALICE, ask("q2")), R0, Run)


def test_any_other_model_is_accepted_once() -> None:
    bench = Bench(ready=1)
    bench.client(BOB, Control("c", "accept", ""))
    bench.replica(R1, announce(R1, OTHER))
    assert bench.core.replicas.model == OTHER
    bench.gone(R0)
    assert said(bench.replica(R0, announce(R0, replace(MODEL, fingerprint="d" * 64), pid=8)), R0, Goodbye)
    assert bench.core.replicas.model == OTHER


def test_an_answer_of_which_nothing_came_is_begun_with_the_fleets_model() -> None:
    bench = Bench(ready=1)
    assert said(bench.client(ALICE, ask("q", model=OTHER.identity)), R0, Run), (
        "it has no tokens to go on after"
    )


def test_a_replica_that_never_served_is_not_counted_as_lost() -> None:
    bench = Bench(ready=1)
    bench.gone(R1)
    assert bench.core.replicas.lost == 0
    bench.gone(R0)
    bench.gone(R0)
    assert bench.core.replicas.lost == 1


def test_who_gives_tokens_has_not_stalled_whatever_its_answers_to_pings_say() -> None:
    bench = Bench(ready=2, stall_ms=2000)
    bench.client(ALICE, ask("q"))
    for position in range(6):
        deliver(bench, R0, position, 91)
        bench.wait(1.0)
    assert bench.core.failovers == 0
    bench.wait(2.0)
    assert bench.core.failovers == 1


def test_on_an_idle_fleet_nobody_is_refused_for_waits_that_others_had() -> None:
    bench = Bench(batch_sizes=[1], min_batch_size=1, stall_ms=60_000)
    for turn in range(4):
        bench.client(ALICE, ask(f"{turn}"))
    for _ in range(4):
        bench.wait(5.0)
        bench.finish()
    bench.client(ALICE, ask("now", max_tokens=1, deadline_ms=4000))  # it would run for two seconds
    assert bench.run().lanes[0].id == "now"
