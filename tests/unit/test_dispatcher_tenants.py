"""What tenants learn of each other's handles: nothing. Catches: a reply, a list or a build that tells a guest
what another tenant has or had, a name that a guest can take, replicas that disagree on whose a handle is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.test_dispatcher_core import ALICE, BOB, R0, R1, Bench, announce, ask, said
from tests.unit.test_dispatcher_handles import HEAD, NEVER_WAS, as_guest, holding, made, recipe
from tinyloop_serve.dispatcher.effects import Send
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.messages import (
    Build,
    Built,
    CreateHandle,
    Drop,
    DropHandle,
    Failed,
    Goodbye,
    Handles,
    ListHandles,
    Recipe,
    RenewHandle,
    Run,
)

OTHER = Recipe("prefix", prompt_tokens=tokens_to_bytes([9]))


def unnamed(sends: list[Send], name: str) -> str:
    """As it would read if it were about a handle that never was."""
    return repr(sends).replace(name, NEVER_WAS)


@pytest.mark.parametrize("has", ["lives", "being made", "dropped", "evicted", "lost"])
def test_a_recipe_does_not_tell_a_guest_what_another_tenant_has_or_had(has: str) -> None:
    heard = []
    for name in ("", NEVER_WAS):
        bench = Bench(replicas=(R0,))
        if name:
            pass
        elif has == "being made":
            bench.client(ALICE, CreateHandle("make", recipe()))
            name = said(bench.sent, R0, Build)[0].handle
        else:
            name = made(bench)
            if has == "dropped":
                bench.client(ALICE, DropHandle("d", name))
            elif has == "evicted":
                bench.replica(R0, Built("another", 10, evicted=(name,)))
            elif has == "lost":
                bench.gone(R0)
        if has == "lost":
            bench.replica(R0, announce(R0))
        told = unnamed(as_guest(bench, ask("q", handle=name, recipe=OTHER)), name)
        told += unnamed(bench.finish(), name)
        for message in (ListHandles("l"), RenewHandle("r", name), DropHandle("d", name)):
            told += unnamed(as_guest(bench, message), name)
        told += unnamed(as_guest(bench, ask("q", handle=name)), name)
        assert "Build" not in told and "there is no such handle" in told
        heard.append(told)
    assert heard[0] == heard[1]


@pytest.mark.parametrize("known", [True, False])
def test_a_guest_cannot_take_the_name_of_a_handle_that_is_gone(known: bool) -> None:
    bench = Bench()
    name = NEVER_WAS  # as it is to a dispatcher that was restarted
    if known:
        name = made(bench, shared=True, detached=True)
        bench.client(ALICE, DropHandle("d", name))
    as_guest(bench, ask("q", handle=name, recipe=OTHER))
    bench.finish()
    assert not bench.core.handles.orders
    sends = bench.client(ALICE, ask("q", handle=name, recipe=recipe()))
    (build,) = said(sends, R0, Build)
    assert (build.handle, build.tenant, build.prompt) == (name, "local", HEAD)
    assert (build.shared, build.detached) == (known, known)  # what it was is not forgotten
    bench.finish()
    bench.replica(R0, Built(name, 10))
    assert said(bench.client(ALICE, ask("q", handle=name)), R0, Run)[0].lanes[0].handle == name


def test_nobody_takes_the_name_of_an_operators_scaffold_before_its_replica_comes() -> None:
    bench = Bench(ready=1)
    build = Build("scaffold-1", "scaffold", HEAD, loops=4, shared=True, detached=True, lease_ms=0)
    as_guest(bench, ask("q", handle=build.handle, recipe=OTHER))
    assert not said(bench.sent, R0, Build)
    assert not said(bench.replica(R1, holding(R1, build)), R1, Drop)
    (lane,) = said(bench.client(ALICE, ask("q")), R1, Run)[0].lanes
    assert lane.handle == build.handle


def test_how_it_ended_is_told_to_its_tenant_alone() -> None:
    bench = Bench(ready=2)
    name = made(bench)
    bench.client(ALICE, DropHandle("d", name))
    (own,) = said(bench.client(ALICE, RenewHandle("r", name)), ALICE, Failed)
    (guests,) = said(as_guest(bench, RenewHandle("r", name)), BOB, Failed)
    assert "it was dropped" in own.message and guests.message == f"handle {name!r}: there is no such handle"


# ------------------------------------------------------------------ what replicas hold from before


@pytest.mark.parametrize(
    "fields", [{"tenant": "guest"}, {"shared": True}, {"prompt": HEAD * 2}, {"loops": 2}]
)
def test_two_replicas_that_disagree_on_a_handle_are_not_both_believed(fields: Any) -> None:
    bench = Bench(ready=0)
    build = Build("h", "prefix", HEAD, loops=4, tenant="local")
    bench.replica(R0, holding(R0, build))
    assert said(bench.replica(R1, holding(R1, replace(build, **fields))), R1, Drop) == [Drop(("h",))]
    assert said(bench.replica(R1, holding(R1, build)), R1, Drop) == []
    (listed,) = said(bench.client(ALICE, ListHandles("l")), ALICE, Handles)
    assert [(info.handle, info.mine, info.shared) for info in listed.handles] == [("h", True, False)]
    assert said(as_guest(bench, ListHandles("l")), BOB, Handles) == [Handles("l", ())]


def test_a_replica_that_comes_back_with_what_is_being_built_again_drops_it() -> None:
    bench = Bench(ready=2)
    name = made(bench)
    (build,) = said(bench.sent, R0, Build)
    bench.gone(R0)
    assert said(bench.client(ALICE, ask("q", handle=name, recipe=recipe())), R1, Build)
    assert said(bench.replica(R0, holding(R0, build)), R0, Drop) == [Drop((name,))]
    bench.replica(R1, Built(name, 10))
    (held,) = bench.core.handles
    assert list(held.holders) == [R1]


def test_a_client_that_left_is_not_answered_when_its_handle_is_learned_of() -> None:
    bench = Bench(ready=0)
    bench.replica(R1, announce(R1))
    assert bench.client(ALICE, DropHandle("d", "h")) == []
    bench.client(ALICE, Goodbye())
    sends = bench.replica(R0, holding(R0, Build("h", "prefix", HEAD, loops=4, tenant="local")))
    assert not said(sends, R0, Drop) and not [send for send in sends if send.peer == ALICE]
    assert [held.name for held in bench.core.handles] == ["h"]
