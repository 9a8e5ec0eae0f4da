"""Handles through the dispatcher's decisions, with no socket. Catches: a handle that another tenant can use
or tell that it exists, one that outlives its lease or its client, a request that fails because a handle is
gone though it need not, a replica and the books that disagree on what is held."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.test_dispatcher_core import ALICE, BOB, R0, R1, Bench, announce, ask, said
from tinyloop_serve.dispatcher import names
from tinyloop_serve.dispatcher.effects import TOKENIZER, Send, Tokenize
from tinyloop_serve.dispatcher.handles import REMEMBERED, Held
from tinyloop_serve.dispatcher.handles import Handles as Book
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest
from tinyloop_serve.protocol.messages import (
    Build,
    Built,
    CreateHandle,
    Drop,
    DropHandle,
    Failed,
    Generate,
    Goodbye,
    Handle,
    HandleKind,
    Handles,
    HeldHandle,
    ListHandles,
    Pong,
    Ready,
    Recipe,
    RenewHandle,
    Run,
    Sampling,
)

HEAD = tokens_to_bytes([1, 2])
NEVER_WAS = names.name("0" * 28, "local")


def recipe(kind: HandleKind = "prefix", **fields: Any) -> Recipe:
    return Recipe(kind, prompt_tokens=HEAD, **fields)


def made(bench: Bench, client: bytes = ALICE, kind: HandleKind = "prefix", **fields: Any) -> str:
    """A handle, from the wish to the answer; returns its name."""
    sends = bench.client(client, CreateHandle("make", recipe(kind), **fields))
    (build,) = [send for send in sends if isinstance(send.message, Build)]
    assert isinstance(build.peer, str) and isinstance(build.message, Build)
    answers = bench.replica(build.peer, Built(build.message.handle, 10))
    (answer,) = said(answers, client, Handle)
    assert (answer.id, answer.info.bytes, answer.info.tokens, answer.info.loops) == ("make", 10, 2, 4)
    return str(answer.info.handle)


def as_guest(bench: Bench, message: Any) -> list[Send]:
    return bench._after(bench.core.client_says(BOB, "guest", message, bench.now))


def holding(endpoint: str, *builds: Build) -> Ready:
    held = tuple(HeldHandle(build, 10) for build in builds)
    return replace(announce(endpoint), handles=held)


def test_a_request_with_a_handle_goes_where_it_is_with_the_whole_prompt() -> None:
    bench = Bench(ready=2)
    name = made(bench)
    (lane,) = said(bench.client(ALICE, ask("q", handle=name)), R0, Run)[0].lanes
    assert lane.handle == name and lane.prompt == HEAD + tokens_to_bytes([1, 2, 3])
    bench.finish(R0)
    (lane,) = said(bench.client(ALICE, Generate("p", handle=name, max_tokens=8)), R0, Run)[0].lanes
    assert lane.prompt == HEAD


def test_it_waits_for_that_replica_only_so_long_and_then_does_without() -> None:
    bench = Bench(ready=2, sticky_wait_ms=50)
    name = made(bench)
    bench.client(BOB, ask("busy", handle=name))
    assert bench.client(ALICE, ask("q", handle=name)) == []  # though the other one is idle
    (run,) = said(bench.wait(0.06), R1, Run)
    assert run.lanes[0].handle == "" and run.lanes[0].prompt.startswith(HEAD)


def test_text_that_goes_on_after_a_handle_has_no_begin_token() -> None:
    bench = Bench()
    name = made(bench)
    sends = bench.client(ALICE, Generate("q", prompt_text="x", handle=name, max_tokens=8))
    assert said(sends, TOKENIZER, Tokenize) == [Tokenize(1, "x", bos=False)]


def test_the_longest_scaffold_is_used_without_being_named() -> None:
    bench = Bench()
    name = made(bench, kind="scaffold")
    assert said(bench.client(ALICE, ask("q")), R0, Run)[0].lanes[0].handle == name  # its prompt is 1 2 3
    bench.finish()
    run = said(bench.client(ALICE, ask("o", sampling=Sampling(loops=2))), R0, Run)[0]
    assert run.lanes[0].handle == ""  # it was made at other loops
    bench.finish()
    assert said(as_guest(bench, ask("q")), R0, Run)[0].lanes[0].handle == ""  # it is not the guest's


def test_to_another_tenant_a_handle_does_not_exist() -> None:
    bench = Bench(ready=2)
    name = made(bench)
    for message in (ask("q", handle=name), RenewHandle("q", name), DropHandle("q", name)):
        (failed,) = said(as_guest(bench, message), BOB, Failed)
        other = type(message)("q", handle="no-such")
        if isinstance(message, Generate):
            other = ask("q", handle="no-such")
        (unknown,) = said(as_guest(bench, other), BOB, Failed)
        assert failed.code == "handle_lost" and failed.value == name
        assert failed.message.replace(name, "no-such") == unknown.message
    assert said(as_guest(bench, ListHandles("l")), BOB, Handles) == [Handles("l", ())]


def test_a_shared_one_is_used_by_all_and_dropped_by_its_own_tenant() -> None:
    bench = Bench()
    name = made(bench, shared=True)
    assert said(as_guest(bench, ask("q", handle=name)), R0, Run)[0].lanes[0].handle == name
    assert [failed.code for failed in said(as_guest(bench, DropHandle("d", name)), BOB, Failed)] == [
        "forbidden"
    ]
    assert Send(R0, Drop((name,))) in bench.client(ALICE, DropHandle("d", name))


@pytest.mark.parametrize("how", ["lease", "client", "evicted", "dropped", "replica"])
def test_a_lost_handle_is_an_error_that_says_how_or_is_built_again(how: str) -> None:
    bench = Bench(ready=2)
    name = made(bench, detached=how != "client", lease_ms=1000)
    if how == "lease":
        assert said(bench.wait(1.5), R0, Drop) == [Drop((name,))]
    elif how == "client":
        assert said(bench.client(ALICE, Goodbye()), R0, Drop) == [Drop((name,))]
    elif how == "evicted":
        bench.client(ALICE, CreateHandle("2", recipe(), detached=True))
        bench.client(ALICE, CreateHandle("3", recipe(), detached=True))
        third = said(bench.sent, R0, Build)[-1].handle
        bench.replica(R0, Built(third, 10, evicted=(name,)))
    elif how == "dropped":
        bench.client(ALICE, DropHandle("d", name))
    else:
        bench.gone(R0)
    words = {"lease": "lease of 1 s", "client": "has left", "evicted": "evicted", "dropped": "dropped"}
    (failed,) = said(bench.client(ALICE, ask("q", handle=name)), ALICE, Failed)
    assert (failed.code, failed.field, failed.value) == ("handle_lost", "handle", name)
    assert words.get(how, "r0, which held it, was lost") in failed.message
    sends = bench.client(ALICE, ask("q", handle=name, recipe=recipe()))
    (run,) = [send.message for send in sends if isinstance(send.message, Run)]
    assert run.lanes[0].prompt == HEAD + tokens_to_bytes([1, 2, 3]) and run.lanes[0].handle == ""
    assert [s.message.handle for s in bench.sent if isinstance(s.message, Build)][
        -1
    ] == name or how == "evicted"


def test_a_waiting_request_survives_the_loss_of_its_handle() -> None:
    bench = Bench()
    name = made(bench)
    bench.client(BOB, ask("busy"))
    bench.client(ALICE, ask("q", handle=name))
    bench.client(ALICE, DropHandle("d", name))
    (lane,) = said(bench.finish(), R0, Run)[0].lanes
    assert lane.handle == "" and lane.prompt.startswith(HEAD)


def test_renewing_and_using_keep_it() -> None:
    bench = Bench()
    name = made(bench, lease_ms=1000)
    for n in range(3):
        bench.wait(0.8)
        assert said(bench.client(ALICE, RenewHandle(f"r{n}", name)), ALICE, Handle)
    bench.wait(0.8)
    bench.client(ALICE, ask("q", handle=name))
    bench.wait(0.8)
    (listed,) = said(bench.client(ALICE, ListHandles("l")), ALICE, Handles)
    assert [(info.handle, info.uses, info.replica) for info in listed.handles] == [(name, 1, "r0")]


WRONG = [
    ("prefix", {"sampling": Sampling(loops=2)}, "sampling.loops"),
    ("prefix", {"sampling": Sampling(beam_size=2)}, "sampling.beam_size"),
    ("resume", {}, "prompt_text"),
]


@pytest.mark.parametrize("kind, fields, field", WRONG)
def test_a_handle_that_does_not_fit_the_request(kind: HandleKind, fields: Any, field: str) -> None:
    bench = Bench()
    (failed,) = said(bench.client(ALICE, ask("q", handle=made(bench, kind=kind), **fields)), ALICE, Failed)
    assert failed.field == field and failed.accepted


def test_a_tenant_has_so_many_and_no_more() -> None:
    bench = Bench(tenants={"guest": {"max_handles": 1}})
    as_guest(bench, CreateHandle("1", recipe()))
    (failed,) = said(as_guest(bench, CreateHandle("2", recipe())), BOB, Failed)
    assert failed.code == "limit" and "1 handles of at most 1" in failed.message


def test_a_new_dispatcher_learns_what_the_replicas_hold_and_waits_for_them_to_say_so() -> None:
    bench = Bench(ready=0)
    build = Build("h", "prefix", HEAD, loops=4, tenant="local")
    ready = announce(R0)
    bench.replica(R1, announce(R1))
    assert bench.client(ALICE, ask("q", handle="h")) == []  # the other one may hold it
    assert bench.client(ALICE, RenewHandle("r", "h")) == []
    sends = bench.replica(R0, Ready(ready.name, 7, "cpu", ready.model, handles=(HeldHandle(build, 9),)))
    assert said(sends, ALICE, Handle)[0].info.bytes == 9
    assert said(sends, R0, Run)[0].lanes[0].handle == "h"


def test_what_ended_while_a_replica_was_away_is_dropped_when_it_comes_back() -> None:
    bench = Bench(ready=1)
    name = made(bench)
    (build,) = said(bench.sent, R0, Build)
    bench.gone(R0)
    bench.client(ALICE, Goodbye())
    ready = announce(R0)
    sends = bench.replica(R0, Ready(ready.name, 7, "cpu", ready.model, handles=(HeldHandle(build, 9),)))
    assert said(sends, R0, Drop) == [Drop((name,))]


def test_a_replica_that_dies_building_is_replaced_and_two_are_enough() -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, CreateHandle("1", recipe()))
    assert said(bench.gone(R0), R1, Build)
    (failed,) = said(bench.gone(R1), ALICE, Failed)
    assert (failed.id, failed.code) == ("1", "poison")


def test_who_waits_for_the_holder_of_a_handle_goes_elsewhere_when_it_falls_ill() -> None:
    bench = Bench(ready=2, sticky_wait_ms=60_000)
    name = made(bench)
    (holder,) = bench.core.handles.get(name).holders  # type: ignore[union-attr]
    other = R1 if holder == R0 else R0
    assert said(bench.client(ALICE, ask("busy", handle=name)), holder, Run)
    assert not said(bench.client(ALICE, ask("waits", handle=name)), other, Run)
    (run,) = said(bench.replica(holder, Pong(1, health="failing")), other, Run)
    assert [lane.id for lane in run.lanes] == ["waits"]


def test_an_engine_that_hangs_while_it_builds_is_lost_with_it() -> None:
    bench = Bench(ready=2, stall_ms=3000)
    bench.client(ALICE, CreateHandle("1", recipe()))
    bench.steps = 1
    bench.wait(1.0)
    assert said(bench.wait(3.5), R1, Build) and bench.core.replicas[R0].state == "lost"
    assert "no step" in bench.core.replicas[R0].error


def test_a_client_that_leaves_takes_what_is_still_being_built_with_it() -> None:
    bench = Bench()
    bench.client(ALICE, CreateHandle("1", recipe()))
    (build,) = said(bench.sent, R0, Build)
    assert said(bench.client(ALICE, Goodbye()), R0, Drop) == [Drop((build.handle,))]
    bench.replica(R0, Built(build.handle, 10))
    assert len(bench.core.handles) == 0 and bench.core.replicas[R0].ledger.handles == 0


def test_what_waits_for_replicas_that_never_come_is_told_that_its_handle_is_lost() -> None:
    bench = Bench(ready=1, replica_wait_ms=3000)
    bench.client(ALICE, ask("q", handle="unknown"))
    bench.client(ALICE, RenewHandle("r", "unknown"))
    assert said(bench.wait(2.9), ALICE, Failed) == []
    failed = said(bench.wait(0.5), ALICE, Failed)
    assert {(each.id, each.code) for each in failed} == {("q", "handle_lost"), ("r", "handle_lost")}
    (refused,) = said(bench.client(ALICE, ask("late", handle="unknown")), ALICE, Failed)
    assert refused.code == "handle_lost"


# ------------------------------------------------------------------ leases and owners


def test_a_lease_does_not_pay_for_the_dispatchers_own_pause() -> None:
    bench = Bench()
    name = made(bench, lease_ms=1000)
    bench.now += 5
    assert said(bench.tick(), R0, Drop) == []
    assert said(bench.wait(1.5), R0, Drop) == [Drop((name,))]


def test_a_handle_without_a_lease_stays() -> None:
    bench = Bench(ready=0)
    bench.replica(R0, holding(R0, Build("h", "scaffold", HEAD, loops=4, shared=True, lease_ms=0)))
    assert said(bench.wait(5), R0, Drop) == [] and len(bench.core.handles) == 1


def test_a_client_that_connected_anew_takes_its_handles_along() -> None:
    bench = Bench()
    name = made(bench)
    bench.client(BOB, RenewHandle("r", name))  # its new connection
    assert said(bench.client(ALICE, Goodbye()), R0, Drop) == []
    assert said(bench.client(BOB, Goodbye()), R0, Drop) == [Drop((name,))]


# ------------------------------------------------------------------ building


def test_a_replica_builds_one_at_a_time() -> None:
    bench = Bench()
    assert len(said(bench.client(ALICE, CreateHandle("1", recipe())), R0, Build)) == 1
    assert said(bench.client(ALICE, CreateHandle("2", recipe())), R0, Build) == []
    first = said(bench.sent, R0, Build)[0].handle
    assert len(said(bench.replica(R0, Built(first, 10)), R0, Build)) == 1


@pytest.mark.parametrize("code", ["", "engine"])
def test_the_late_answer_of_a_former_builder_is_not_the_handle(code: str) -> None:
    bench = Bench(ready=2)
    bench.client(ALICE, CreateHandle("1", recipe()))
    (build,) = said(bench.sent, R0, Build)
    assert said(bench.gone(R0), R1, Build) == [build]
    sends = bench.replica(R0, Built(build.handle, 10, code=code))
    assert sends == ([] if code else [Send(R0, Drop((build.handle,)))])
    (answer,) = said(bench.replica(R1, Built(build.handle, 10)), ALICE, Handle)
    assert (answer.id, answer.info.replica) == ("1", "r1")


@pytest.mark.parametrize("spelled", [True, False])
def test_a_text_waits_for_a_replica_and_its_tokenizer(spelled: bool) -> None:
    bench = Bench(ready=0)
    assert bench.client(ALICE, CreateHandle("1", Recipe("prefix", prompt_text="head"))) == []
    (send,) = [s for s in bench.replica(R0, announce(R0)) if isinstance(s.message, Tokenize)]
    assert (send.message.text, send.message.bos) == ("head", True)
    result = HEAD if spelled else InvalidRequest("no tokenizer", field="prompt_text")
    sends = bench._after(bench.core.tokenized(send.message.key, result, bench.now))
    if spelled:
        assert [build.prompt for build in said(sends, R0, Build)] == [HEAD]
    else:
        (failed,) = said(sends, ALICE, Failed)
        assert (failed.id, failed.code, failed.field) == ("1", "invalid", "prompt_text")
        assert not bench.core.handles.orders


def test_a_recipe_of_text_is_tokenized_before_the_request_and_is_its_prompts_beginning() -> None:
    bench = Bench()
    head = Recipe("prefix", prompt_text="head")
    sends = bench.client(
        ALICE, Generate("q", prompt_text=" tail", handle=NEVER_WAS, recipe=head, max_tokens=8)
    )
    assert said(sends, TOKENIZER, Tokenize) == [Tokenize(1, "head", bos=True)]
    sends = bench._after(bench.core.tokenized(1, HEAD, bench.now))
    assert said(sends, TOKENIZER, Tokenize) == [Tokenize(2, " tail", bos=False)]
    sends = bench._after(bench.core.tokenized(2, tokens_to_bytes([7]), bench.now))
    assert said(sends, R0, Run)[0].lanes[0].prompt == tokens_to_bytes([1, 2, 7])
    assert [(build.handle, build.prompt) for build in said(sends, R0, Build)] == [(NEVER_WAS, HEAD)]


# ------------------------------------------------------------------ scaffolds


@pytest.mark.parametrize("lengths", [(1, 2), (2, 1)])
def test_the_longest_scaffold_goes_first_whichever_was_made_first(lengths: tuple[int, ...]) -> None:
    bench = Bench()
    called = {}
    for length in lengths:
        head = Recipe("scaffold", prompt_tokens=tokens_to_bytes(range(1, 1 + length)))
        (build,) = said(bench.client(ALICE, CreateHandle("make", head)), R0, Build)
        bench.replica(R0, Built(build.handle, 10))
        called[length] = build.handle
    assert said(bench.client(ALICE, ask("q")), R0, Run)[0].lanes[0].handle == called[2]


PLAIN_ONLY = [
    {"method": "speculative"},
    {"method": "tree_speculative"},
    {"sampling": Sampling(beam_size=2)},
    {"sampling": Sampling(cache_window=8)},
]


@pytest.mark.parametrize("fields", PLAIN_ONLY)
def test_a_request_that_no_handle_can_serve_takes_no_scaffold(fields: Any) -> None:
    bench = Bench()
    made(bench, kind="scaffold")
    assert said(bench.client(ALICE, ask("q", **fields)), R0, Run)[0].lanes[0].handle == ""


def test_what_is_built_again_has_the_lease_that_it_had() -> None:
    bench = Bench(ready=2)
    name = made(bench, lease_ms=1234)
    bench.gone(R0)
    sends = bench.client(ALICE, ask("q", handle=name, recipe=recipe()))
    assert [build.lease_ms for build in said(sends, R1, Build)] == [1234]


def test_a_tenant_at_its_limit_is_served_without_a_handle_and_nothing_is_built() -> None:
    bench = Bench(tenants={"guest": {"max_handles": 1}})
    as_guest(bench, CreateHandle("1", recipe()))
    (build,) = said(bench.sent, R0, Build)
    bench.replica(R0, Built(build.handle, 10))
    gone = names.name("1" * 28, "guest")
    sends = as_guest(bench, ask("q", handle=gone, recipe=recipe()))
    assert said(sends, R0, Run) and not said(sends, R0, Build) and not bench.core.handles.orders


def test_two_requests_with_the_recipe_of_a_lost_handle_build_it_once() -> None:
    bench = Bench(ready=2)
    name = NEVER_WAS
    for id in ("1", "2"):
        bench.client(ALICE, ask(id, handle=name, recipe=recipe()))
    assert len([send for send in bench.sent if isinstance(send.message, Run)]) == 2
    assert len([send for send in bench.sent if isinstance(send.message, Build)]) == 1


def test_a_build_that_took_longer_than_the_lease_is_there_for_its_whole_lease() -> None:
    bench = Bench()
    bench.client(ALICE, CreateHandle("1", recipe(), lease_ms=1000))
    (build,) = said(bench.sent, R0, Build)
    bench.wait(3)
    bench.replica(R0, Built(build.handle, 10))
    assert said(bench.wait(0.8), R0, Drop) == []


@pytest.mark.parametrize("detached", [True, False])
def test_a_detached_handle_outlives_its_client_in_the_making_and_on_a_lost_replica(detached: bool) -> None:
    bench = Bench()
    bench.client(ALICE, CreateHandle("1", recipe(), detached=detached))
    (build,) = said(bench.sent, R0, Build)
    sends = bench.client(ALICE, Goodbye())
    assert said(sends, R0, Drop) == ([] if detached else [Drop((build.handle,))])
    assert not [send for send in bench.replica(R0, Built(build.handle, 10)) if send.peer == ALICE]
    assert len(bench.core.handles) == detached
    name = made(bench, client=BOB, detached=detached)
    (build,) = [each for each in said(bench.sent, R0, Build) if each.handle == name]
    bench.gone(R0)
    bench.client(BOB, Goodbye())
    sends = bench.replica(R0, holding(R0, build))
    assert said(sends, R0, Drop) == ([] if detached else [Drop((name,))])


def test_an_answer_that_goes_on_after_a_loss_does_so_without_a_handle() -> None:
    bench = Bench()
    name = made(bench, kind="scaffold")
    sends = bench.client(ALICE, ask("q", done=tokens_to_bytes([5])))
    assert said(sends, R0, Run)[0].lanes[0].handle == ""
    bench.finish()
    assert said(bench.client(ALICE, ask("q")), R0, Run)[0].lanes[0].handle == name


def test_the_fate_of_so_many_is_remembered_and_no_more() -> None:
    book = Book()
    for n in range(REMEMBERED + 1):
        held = Held(str(n), "local", recipe(), False, True, 0.0, None, 0.0)
        book.keep(held, R0, 1)
        book.end(held, "it was dropped")
    assert "no such handle" in str(book.lost("0", "local"))
    assert "it was dropped" in str(book.lost("1", "local"))
