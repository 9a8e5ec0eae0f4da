"""The asyncio client against a scripted dispatcher: the rules of test_client.py, in a running event loop."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.protocol import errors, session
from tinyloop_serve.protocol.aio import AsyncClient
from tinyloop_serve.protocol.client import Client

spec = importlib.util.spec_from_file_location(
    "fake_dispatcher", Path(__file__).with_name("fake_dispatcher.py")
)
assert spec and spec.loader
fake = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
spec.loader.exec_module(fake)
done, echo, failed, tokens = fake.done, fake.echo, fake.failed, fake.tokens

LONG_S = 600.0  # a limit that a test must never reach


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts scripted dispatchers and closes them after the test."""
    running = []

    def begin(*args: Any, **kwargs: Any) -> Any:
        running.append(fake.FakeDispatcher(*args, **kwargs))
        return running[-1]

    yield begin
    for each in running:
        each.close()


def connect(dispatcher: Any, **kwargs: Any) -> AsyncClient:
    return AsyncClient(dispatcher.endpoint, **{"connect_timeout_s": LONG_S, "lease_s": LONG_S, **kwargs})


async def seen(dispatcher: Any, type: str, n: int = 1) -> Any:
    return await asyncio.to_thread(dispatcher.wait_for, type, n)


def test_both_clients_offer_the_same_names() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(AsyncClient) == public(Client)


def test_streams_generate_batch_and_status(start: Any) -> None:
    dispatcher = start(answer=echo)

    async def main() -> None:
        async with connect(dispatcher) as client:
            async with client.stream("to be or") as stream:
                chunks = [(c.seq, c.tokens, c.text) async for c in stream]
                whole = await stream.result()
            assert chunks == [(0, (2,), "to "), (1, (2,), "be "), (2, (2,), "or "), (3, (), "END")]
            assert (whole.text, whole.tokens) == ("to be or END", (2, 2, 2))
            assert (await client.generate("hello", max_tokens=3)).text == "hello END"
            assert [c.text for c in await client.batch(["a", "b b"])] == ["a END", "b b END"]
            status = await client.status()
            assert status.replicas[0].name == "r0"

    asyncio.run(main())
    dispatcher.wait_for("Goodbye")


def test_many_streams_at_once(start: Any) -> None:
    dispatcher = start(answer=echo)

    async def main() -> list[str]:
        async with connect(dispatcher) as client:
            prompts = [f"task {n} " + "w " * (n % 7) for n in range(200)]
            return [c.text for c in await asyncio.gather(*(client.generate(p) for p in prompts))]

    expected = [" ".join(f"task {n} {'w ' * (n % 7)}".split()) + " END" for n in range(200)]
    assert asyncio.run(main()) == expected


def test_cancel_ends_a_stream_with_what_it_had(start: Any) -> None:
    dispatcher = start()

    async def main() -> None:
        async with connect(dispatcher) as client:
            stream = client.stream("x")
            ((peer, body),) = await seen(dispatcher, "Generate")
            dispatcher.say(peer, tokens(body["id"], 0, [4], "four"))
            assert (await anext(aiter(stream))).text == "four"
            stream.cancel()
            ((_, cancel),) = await seen(dispatcher, "Cancel")
            dispatcher.say(peer, done(cancel["id"], "cancelled"))
            assert (await stream.result()).stop_reason == "cancelled"

    asyncio.run(main())


def test_leaving_dropping_and_task_cancellation_cancel_the_request(start: Any) -> None:
    dispatcher = start()

    async def main() -> None:
        async with connect(dispatcher) as client:
            async with client.stream("left"):
                pass
            await seen(dispatcher, "Cancel", 1)
            client.stream("dropped")
            gc.collect()
            await seen(dispatcher, "Cancel", 2)
            task = asyncio.create_task(client.generate("task"))
            await seen(dispatcher, "Generate", 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await seen(dispatcher, "Cancel", 3)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate("wait_for"), 0.05)
            await seen(dispatcher, "Cancel", 4)

    asyncio.run(main())
    cancelled = [body["id"] for _, body in dispatcher.wait_for("Cancel", 4)]
    assert cancelled == [body["id"] for _, body in dispatcher.wait_for("Generate", 4)]


def test_errors_are_typed(start: Any) -> None:
    dispatcher = start(
        answer=lambda b: [failed(b["id"], "overloaded", retry_after_ms=250)] if "id" in b else []
    )

    async def main() -> None:
        async with connect(dispatcher) as client:
            with pytest.raises(errors.Overloaded) as caught:
                await client.generate("x")
            assert caught.value.retry_after_s == 0.25
            with pytest.raises(errors.Overloaded):
                await client.status()
            with pytest.raises(errors.Overloaded):
                await client.batch(["a", "b"])
            with pytest.raises(errors.InvalidRequest, match="top_p"):
                await client.generate("x", top_p=0.0)

    asyncio.run(main())


def test_a_repetition_or_a_gap_is_a_protocol_error(start: Any) -> None:
    dispatcher = start()

    async def main() -> None:
        async with connect(dispatcher) as client:
            for n, second in enumerate((0, 2)):
                stream = client.stream("x")
                peer = (await seen(dispatcher, "Generate", n + 1))[-1][0]
                dispatcher.say(peer, tokens(stream.id, 0, [7], "a"), tokens(stream.id, second, [7], "b"))
                got = []
                with pytest.raises(errors.ProtocolError):
                    async for chunk in stream:
                        got += chunk.tokens
                assert got == [7]

    asyncio.run(main())


def test_nobody_there_and_a_dispatcher_that_dies(start: Any, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"

    async def main() -> None:
        async with AsyncClient(endpoint, connect_timeout_s=0.1) as client:
            with pytest.raises(errors.ConnectFailed, match="tinyloop up"):
                await client.generate("x")
        first = start(endpoint)
        async with AsyncClient(endpoint, connect_timeout_s=LONG_S, lease_s=LONG_S, resume_s=0) as client:
            stream = client.stream("x")
            await seen(first, "Generate")
            first.close()
            with pytest.raises(errors.ConnectFailed, match="closed the connection"):
                await stream.result()
            start(endpoint, echo)
            assert (await client.generate("again")).text == "again END"

    asyncio.run(main())


def test_a_deadline_is_kept_even_if_the_dispatcher_forgets(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "DEADLINE_GRACE_S", 0.05)
    dispatcher = start()

    async def main() -> None:
        async with connect(dispatcher) as client:
            with pytest.raises(errors.DeadlineExceeded):
                await client.generate("x", deadline_s=0.05)

    asyncio.run(main())
    assert dispatcher.wait_for("Generate")[0][1]["deadline_ms"] == 50


def test_a_busy_event_loop_misses_no_ping(start: Any) -> None:
    dispatcher = start()

    async def main() -> None:
        async with connect(dispatcher, lease_s=2.0) as client:
            stream = client.stream("x")
            peer = (await seen(dispatcher, "Generate"))[0][0]
            before = len(dispatcher.pings)
            end = time.monotonic() + fake.CAP_S
            while len(dispatcher.pings) < before + 5 and time.monotonic() < end:
                time.sleep(0.01)  # blocks the loop for longer than a lease
            dispatcher.say(peer, done(stream.id, text="alive"))
            assert (await stream.result()).text == "alive"

    asyncio.run(main())


def test_close_wakes_those_who_wait_and_a_closed_loop_harms_nobody(start: Any) -> None:
    dispatcher = start()
    clients = []

    async def main() -> None:
        client = connect(dispatcher)
        waiting = asyncio.create_task(client.generate("x"))
        await seen(dispatcher, "Generate")
        await client.close()
        with pytest.raises(errors.TransportError):
            await waiting
        clients.append(connect(dispatcher))
        clients.append(clients[0].stream("outlives its loop"))
        await seen(dispatcher, "Generate", 2)

    asyncio.run(main())
    peer = dispatcher.wait_for("Generate", 2)[-1][0]
    dispatcher.say(peer, done(clients[1].id))
    asyncio.run(clients[0].close())
    assert len(dispatcher.wait_for("Goodbye", 2)) == 2
