"""The asyncio client: the names and rules of client.py, with `await` where that one blocks.

    async with AsyncClient("ipc:///run/tinyloop/front.sock") as client:
        async with client.stream("In the beginning") as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

The same link.py thread does the I/O and hands events to the event loop, so a loop that is busy for a
while misses no ping. Cancelling a task that waits for an answer cancels the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Unpack

from tinyloop_serve.protocol.calls import Chunk, Completion, Options, Prompt, prepare
from tinyloop_serve.protocol.codec import TO_DISPATCHER
from tinyloop_serve.protocol.errors import ProtocolError, TransportError
from tinyloop_serve.protocol.link import Link
from tinyloop_serve.protocol.messages import GetStatus, Status
from tinyloop_serve.protocol.session import Event


class AsyncClient:
    """`Client` for asyncio; the arguments and the errors are the same. Tasks, and even loops, may share
    it."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float | None = None,
        connect_timeout_s: float = 5.0,
        lease_s: float = 10.0,
    ) -> None:
        self._link = Link(endpoint, connect_timeout_s=connect_timeout_s, lease_s=lease_s)
        self._timeout_s = timeout_s
        self._ids = map(f"{os.urandom(6).hex()}-{{}}".format, itertools.count())
        self._finalizer = weakref.finalize(self, self._link.close)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        async with self._start(prompt, options, stream=False) as stream:
            return await stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it is made. Sends the request at once; a running event loop is needed."""
        return self._start(prompt, options, stream=True)

    async def batch(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """Answers to many prompts, all asked at once, in the order of `prompts`. If one fails, its error is
        raised and the others are cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(self._start(prompt, options, stream=False))
                for prompt in prompts
            ]
            return [await stream.result() for stream in streams]

    async def status(self) -> Status:
        """The dispatcher's view of its replicas and queues."""
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        request = GetStatus(id=next(self._ids))
        self._link.open(request, TO_DISPATCHER.encode(request), _into(inbox))
        event = await inbox.get()
        if isinstance(event, Status):
            return event
        raise event if isinstance(event, Exception) else ProtocolError("no status")

    def cancel(self, id: str) -> None:
        """Ends the request of the stream with this `id`; it gets a stop_reason of "cancelled"."""
        self._link.cancel(id)

    async def close(self) -> None:
        """Cancels what is open and says goodbye. Calls that still wait raise `TransportError`."""
        await asyncio.to_thread(self._finalizer)

    def _start(self, prompt: Prompt, options: Options, *, stream: bool) -> AsyncStream:
        id = next(self._ids)
        request, frames = prepare(id, prompt, options, stream=stream, timeout_s=self._timeout_s)
        answer = AsyncStream(self, id)
        self._link.open(request, frames, _into(answer._inbox))
        return answer

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """An answer on its way: iterate over its chunks, then await `result()`. For one task at a time.

    Leaving the `async with` block, or dropping the stream, before the end cancels the request.
    """

    def __init__(self, client: AsyncClient, id: str) -> None:
        self.id = id
        self._client = client  # keeps the link open
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._end: Completion | BaseException | None = None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._end is None:
            event = await self._inbox.get()
            if isinstance(event, Chunk):
                return event
            self._end = ProtocolError("not an answer") if isinstance(event, Status) else event
        if isinstance(self._end, Completion):
            raise StopAsyncIteration
        raise self._end

    def cancel(self) -> None:
        """Asks for an early end; what was made until then still arrives, with a stop_reason of
        "cancelled"."""
        self._client.cancel(self.id)

    async def result(self) -> Completion:
        """The whole answer, chunks already seen included; waits for its end."""
        async for _ in self:
            pass
        if not isinstance(self._end, Completion):
            raise ProtocolError("the answer has no end")
        return self._end

    def _leave(self) -> None:
        if self._end is None:
            self._end = TransportError("the stream was left before its end", request_id=self.id)
            self._client._link.abandon(self.id)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()


def _into(inbox: asyncio.Queue[Event]) -> Callable[[Event], None]:
    """A sink for the link's thread that puts events into `inbox` in the running loop."""
    loop = asyncio.get_running_loop()

    def sink(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(inbox.put_nowait, event)

    return sink
