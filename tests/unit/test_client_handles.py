"""Handles, drafts and orders at the caller's end: what is sent, and when it is renewed and dropped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit import fake_dispatcher as fake
from tinyloop_serve.protocol import errors
from tinyloop_serve.protocol.aio import AsyncClient
from tinyloop_serve.protocol.client import Client

LONG_S = 600.0  # a limit that a test must never reach


@pytest.fixture
def dispatcher() -> Iterator[fake.FakeDispatcher]:
    dispatcher = fake.FakeDispatcher(answer=fake.pool)
    yield dispatcher
    dispatcher.close()


@pytest.fixture
def client(dispatcher: fake.FakeDispatcher) -> Iterator[Client]:
    with Client(dispatcher.endpoint, connect_timeout_s=LONG_S, lease_s=LONG_S) as client:
        yield client


def only(dispatcher: fake.FakeDispatcher, kind: str) -> Any:
    ((_, body),) = dispatcher.wait_for(kind)
    return body


def test_a_prefix_is_used_with_its_recipe_and_shape_and_dropped_at_the_end(
    dispatcher: fake.FakeDispatcher, client: Client
) -> None:
    with client.create_prefix("You are helpful.", loops=4, cache_mode="int8", shared=True) as prefix:
        assert (prefix.name, prefix.kind, prefix.info.shared) == ("h1", "prefix", True)
        assert "h1" in repr(prefix)
        client.generate(" Hello", handle=prefix, max_tokens=3)
    recipe = {"kind": "prefix", "prompt_text": "You are helpful.", "loops": 4, "cache_mode": "int8"}
    made = only(dispatcher, "CreateHandle")
    assert made == {"type": "CreateHandle", "id": made["id"], "recipe": recipe, "shared": True}
    asked = only(dispatcher, "Generate")
    assert (asked["handle"], asked["recipe"], asked["prompt_text"]) == ("h1", recipe, " Hello")
    assert asked["sampling"] == {"loops": 4, "cache_mode": "int8"}
    assert only(dispatcher, "DropHandle")["handle"] == "h1"


def test_a_handle_can_be_used_without_its_recipe_by_name_and_as_the_whole_prompt(
    dispatcher: fake.FakeDispatcher, client: Client
) -> None:
    handle = client.create_scaffold([5, 6])
    client.generate(handle=handle, rebuild=False)
    client.generate([7], handle="h1")
    client.generate("", handle=handle)
    asked = [body for _, body in dispatcher.wait_for("Generate", 3)]
    assert [body["handle"] for body in asked] == ["h1"] * 3
    assert [("recipe" in body) for body in asked] == [False, False, True]
    assert [(body.get("prompt_text"), body.get("prompt_tokens")) for body in asked] == [
        (None, None), (None, b"\7\0\0\0"), (None, None),
    ]  # fmt: skip
    handle.drop()
    handle.drop()
    dispatcher.wait_for("DropHandle")
    client.status()
    assert len(dispatcher.wait_for("DropHandle")) == 1


def test_a_forgotten_handle_is_dropped_unless_it_was_detached(
    dispatcher: fake.FakeDispatcher, client: Client
) -> None:
    client.create_resume("x", detached=True, lease_s=2.5)
    gc.collect()
    client.create_prefix("y")
    gc.collect()
    dispatcher.wait_for("DropHandle")
    made = [body for _, body in dispatcher.wait_for("CreateHandle", 2)]
    assert (made[0]["detached"], made[0]["lease_ms"]) == (True, 2500) and "detached" not in made[1]
    client.status()
    assert len(dispatcher.wait_for("DropHandle")) == 1


def test_leases_are_renewed_while_the_client_lives(dispatcher: fake.FakeDispatcher, client: Client) -> None:
    with client.create_prefix("x", lease_s=0.3):
        renewals = dispatcher.wait_for("RenewHandle", 3)
    assert {body["handle"] for _, body in renewals} == {"h1"}


def test_a_draft_is_refined_from_the_same_handle(dispatcher: fake.FakeDispatcher, client: Client) -> None:
    with client.draft("to be", loops=4, cache_window=64, max_tokens=9, seed=3) as draft:
        assert draft.completion.text == "END"
        assert draft.refine(loops=16).stop_reason == "max_tokens"
        draft.refine(loops=8, seed=4)
    made = only(dispatcher, "CreateHandle")
    assert made["recipe"] == {"kind": "resume", "prompt_text": "to be", "loops": 4, "cache_window": 64}
    asked = [body for _, body in dispatcher.wait_for("Generate", 3)]
    assert [(body["sampling"]["loops"], body["seed"], body["max_tokens"]) for body in asked] == [
        (4, 3, 9), (16, 3, 9), (8, 4, 9),
    ]  # fmt: skip
    assert all(body["handle"] == "h1" and body["sampling"]["cache_window"] == 64 for body in asked)
    dispatcher.wait_for("DropHandle")


def test_a_draft_that_fails_leaves_no_handle() -> None:
    def answer(body: Any) -> list[Any]:
        return [fake.failed(body["id"], "mode")] if body["type"] == "Generate" else fake.pool(body)

    dispatcher = fake.FakeDispatcher(answer=answer)
    try:
        with Client(dispatcher.endpoint) as client:
            with pytest.raises(errors.ModeRefused):
                client.draft("x", loops=4)
            dispatcher.wait_for("DropHandle")
    finally:
        dispatcher.close()


def test_handles_are_listed_and_dropped_by_name(dispatcher: fake.FakeDispatcher, client: Client) -> None:
    (held,) = client.handles()
    assert (held.handle, held.mine) == ("h1", False)
    assert client.drop_handle("h1").tokens == 3


def test_a_method_and_a_priority_travel(dispatcher: fake.FakeDispatcher, client: Client) -> None:
    client.generate("x", method="speculative", priority=-2)
    asked = only(dispatcher, "Generate")
    assert (asked["method"], asked["priority"]) == ("speculative", -2)


def test_orders(dispatcher: fake.FakeDispatcher, client: Client) -> None:
    assert client.control("drain", "r0", within_s=1.5) == "drain r0"
    client.control("detach", "r0", within_s=0)
    orders = [body for _, body in dispatcher.wait_for("Control", 2)]
    assert [(body["action"], body["within_ms"]) for body in orders] == [("drain", 1500), ("detach", 0)]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.create_prefix(""), "recipe.prompt_text"),
        (lambda client: client.create_prefix("x", cache_window=5), "recipe.cache_window"),
        (lambda client: client.create_prefix("x", lease_s=0), "lease_s"),
        (lambda client: client.create_prefix("x", loops="four"), "recipe.loops"),
        (lambda client: client.create_prefix("x", shared=1), "shared"),
        (lambda client: client.create_resume(b"x"), "prompt"),
        (lambda client: client.generate("x", method="fast"), "method"),
        (lambda client: client.generate("x", priority=11), "priority"),
        (lambda client: client.generate("x", handle=5), "handle"),
        (lambda client: client.generate("x", handle=""), "prompt_text"),
        (lambda client: client.generate(None, handle="h"), "prompt"),
        (lambda client: client.drop_handle(""), "handle"),
        (lambda client: client.control("drain"), "target"),
        (lambda client: client.control("stop", "r0"), "action"),
        (lambda client: client.control("drain", "r0", within_s=-1), "within_s"),
    ],
)
def test_mistakes_are_named_before_anything_is_sent(
    dispatcher: fake.FakeDispatcher, client: Client, call: Any, field: str
) -> None:
    if field == "prompt_text":  # an empty name is no handle, so the prompt alone counts
        assert call(client).text == "x END"
        return
    with pytest.raises(errors.InvalidRequest) as caught:
        call(client)
    assert caught.value.field == field
    assert not dispatcher.seen


def test_a_misspelt_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="unknown option 'loop'.*known: loops"):
        client.create_prefix("x", loop=3)  # type: ignore[call-arg]


def test_asyncio_has_the_same_calls(dispatcher: fake.FakeDispatcher) -> None:
    async def main() -> None:
        async with AsyncClient(dispatcher.endpoint, connect_timeout_s=LONG_S) as client:
            async with await client.create_prefix("a") as prefix:
                assert (await client.generate("b", handle=prefix)).text == "b END"
            await client.create_scaffold("a")
            await client.create_resume("a")
            async with await client.draft("a", loops=4) as draft:
                assert (await draft.refine(loops=8)).text == draft.completion.text == "END"
            assert len(await client.handles()) == 1
            assert (await client.drop_handle("h1")).handle == "h1"
            assert await client.control("resume", "r0") == "resume r0"

    asyncio.run(main())
    kinds = [body["recipe"]["kind"] for _, body in dispatcher.wait_for("CreateHandle", 4)]
    assert kinds == ["prefix", "scaffold", "resume", "resume"]
