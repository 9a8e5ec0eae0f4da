"""A client whose dispatcher goes away: what its caller notices, over real sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit import fake_dispatcher as fake
from tinyloop_serve.protocol import errors
from tinyloop_serve.protocol.aio import AsyncClient
from tinyloop_serve.protocol.client import Client

LONG_S = 600.0  # a limit that a test must never reach
TEXT = "the quick brown fox jumps over the lazy dog"


class Generations:
    """Dispatchers at one endpoint, one after the other. Each says at most `per_life` tokens of an answer."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/front"
        self.per_life = 3
        self.now: fake.FakeDispatcher | None = None
        self.before: list[fake.FakeDispatcher] = []

    def begin(self, answer: Any = None) -> fake.FakeDispatcher:
        self.now = fake.FakeDispatcher(self.endpoint, answer or self.go_on)
        return self.now

    def end(self) -> None:
        assert self.now is not None
        self.now.close()
        self.before.append(self.now)
        self.now = None

    def go_on(self, body: Any) -> list[Any]:
        """The words from where the client is, and the end only when none is missing."""
        if body["type"] != "Generate":
            return []
        words = [word + " " for word in body["prompt_text"].split()]
        have = len(struct.unpack(f"<{len(body.get('done', b'')) // 4}I", body.get("done", b"")))
        said = [
            fake.tokens(body["id"], n, [len(words[n])], words[n])
            for n in range(have, min(len(words), have + self.per_life))
        ]
        return said + [fake.done(body["id"], text="END")] * (have + self.per_life > len(words))


@pytest.fixture
def generations(tmp_path: Path) -> Iterator[Generations]:
    generations = Generations(tmp_path)
    yield generations
    if generations.now is not None:
        generations.end()


def connect(generations: Generations, **options: Any) -> Client:
    return Client(
        generations.endpoint,
        **{"connect_timeout_s": LONG_S, "lease_s": LONG_S, "resume_s": LONG_S, **options},
    )


def test_the_caller_sees_one_stream_across_three_deaths(generations: Generations) -> None:
    generations.begin()
    with connect(generations) as client, client.stream(TEXT) as stream:
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) in (3, 6, 9):
                generations.end()
                generations.begin()
        whole = stream.result()
    assert whole.text == TEXT + " END" and whole.text == "".join(chunk.text for chunk in chunks)
    assert [chunk.seq for chunk in chunks] == [*range(9), 9]
    assert whole.stats.failovers == 3
    assert generations.now is not None
    asked = [each.wait_for("Generate")[0] for each in (*generations.before, generations.now)]
    assert len({body["id"] for _, body in asked}) == 1, "the same request"
    assert len({peer for peer, _ in asked}) == 4, "under a new identity each time"


def test_a_hundred_streams_survive_a_restart(generations: Generations) -> None:
    generations.per_life = 4
    generations.begin()
    with connect(generations) as client:
        streams = [client.stream(f"{n} {TEXT}") for n in range(100)]
        for stream in streams:
            next(stream)
        for _ in range(2):
            generations.end()
            generations.begin()
            assert generations.now is not None
            generations.now.wait_for("Generate", 100)
        assert [stream.result().text for stream in streams] == [f"{n} {TEXT} END" for n in range(100)]


def test_a_whole_answer_is_asked_again_from_its_beginning(generations: Generations) -> None:
    generations.begin(answer=lambda body: [])
    with connect(generations) as client:
        stream = client._start("a b", {}, stream=False)
        assert generations.now is not None
        generations.now.wait_for("Generate")
        generations.end()
        generations.begin()
        assert stream.result().text == "a b END"


def test_a_dispatcher_that_hangs_is_left_for_one_that_does_not(generations: Generations) -> None:
    hanging = generations.begin()
    with connect(generations, lease_s=1.0) as client, client.stream(TEXT) as stream:
        assert [next(stream).text for _ in range(3)]
        hanging.mute = True
        hanging.wait_for("Generate", 2)  # asked again, at the same place
        assert stream.result().text == TEXT + " END"


def test_nobody_comes_back(generations: Generations) -> None:
    generations.begin()
    with connect(generations, resume_s=0.3) as client, client.stream(TEXT) as stream:
        next(stream)
        generations.end()
        with pytest.raises(errors.ConnectFailed, match=r"closed the connection.*0.3 s"):
            stream.result()
        generations.begin()
        assert client.generate("a b").text == "a b END"  # and the client is usable


def test_what_is_not_a_request_fails_at_once(generations: Generations) -> None:
    generations.begin(answer=lambda body: [])
    with connect(generations) as client:
        stream = client.stream("a")
        caught: list[BaseException] = []

        async def ask() -> None:
            async with AsyncClient(generations.endpoint, connect_timeout_s=LONG_S, lease_s=LONG_S) as other:
                calls = [asyncio.ensure_future(call) for call in (other.status(), other.create_prefix("x"))]
                assert generations.now is not None
                await asyncio.to_thread(generations.now.wait_for, "CreateHandle")
                await asyncio.to_thread(generations.end)
                caught.extend(await asyncio.gather(*calls, return_exceptions=True))  # type: ignore[arg-type]

        asyncio.run(ask())
        assert [type(error) for error in caught] == [errors.ConnectFailed] * 2
        generations.begin()
        assert stream.result().text == "a END"


def test_asyncio_callers_see_one_stream_too(generations: Generations) -> None:
    generations.begin()

    async def main() -> None:
        async with AsyncClient(generations.endpoint, connect_timeout_s=LONG_S, resume_s=LONG_S) as client:
            async with client.stream(TEXT) as stream:
                text = ""
                async for chunk in stream:
                    text += chunk.text
                    if len(text.split()) % 3 == 0:
                        await asyncio.to_thread(generations.end)
                        generations.begin()
            assert text == TEXT + " END"
            assert (await stream.result()).stats.failovers == 3

    asyncio.run(main())


def test_several_bodies_of_one_message_reach_their_streams(generations: Generations) -> None:
    dispatcher = generations.begin(answer=lambda body: [])
    with connect(generations) as client:
        one, two = client.stream("a"), client.stream("b")
        peer = dispatcher.wait_for("Generate", 2)[0][0]
        dispatcher.say_together(
            peer,
            fake.tokens(one.id, 0, [1], "x"),
            fake.tokens(two.id, 0, [2], "y"),
            fake.tokens(one.id, 1, [3], "z"),
            fake.done(one.id),
            fake.done(two.id),
        )
        assert (one.result().text, two.result().text) == ("xz", "y")
