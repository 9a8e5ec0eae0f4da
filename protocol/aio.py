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
from typing import Literal, TypeVar, Unpack

from tinyloop_serve.protocol import messages
from tinyloop_serve.protocol.answers import Event, Question, Reply
from tinyloop_serve.protocol.calls import (
    Chunk,
    Completion,
    HandleOptions,
    Options,
    Prompt,
    checked,
    draft_options,
    drafted,
    prepare,
    prepare_control,
    prepare_handle,
)
from tinyloop_serve.protocol.errors import ProtocolError, TransportError
from tinyloop_serve.protocol.handles import Handle
from tinyloop_serve.protocol.keys import encryption
from tinyloop_serve.protocol.link import Link

R = TypeVar("R", bound=Reply)


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
        resume_s: float = 15.0,
        key: str | os.PathLike[str] | None = None,
        server_key: str | os.PathLike[str] | None = None,
    ) -> None:
        self._link = Link(
            endpoint,
            connect_timeout_s=connect_timeout_s,
            lease_s=lease_s,
            resume_s=resume_s,
            encryption=encryption(endpoint, key, server_key),
        )
        self._timeout_s = timeout_s
        self._ids = map(f"{os.urandom(6).hex()}-{{}}".format, itertools.count())
        self._finalizer = weakref.finalize(self, self._link.close)

    # -------------------------------------------------------------- answers

    async def generate(self, prompt: Prompt = "", **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        async with self._start(prompt, options, stream=False) as stream:
            return await stream.result()

    def stream(self, prompt: Prompt = "", **options: Unpack[Options]) -> AsyncStream:
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

    async def draft(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncDraft:
        """A quick answer with few `loops`, and the means to refine it: see `client.Draft`."""
        handle = await self.create_resume(prompt, **draft_options(options))
        try:
            completion = await self.generate(**drafted(handle, options))
            return AsyncDraft(self, handle, completion, options)
        except BaseException:
            handle.drop()
            raise

    def cancel(self, id: str) -> None:
        """Ends the request of the stream with this `id`; it gets a stop_reason of "cancelled"."""
        self._link.cancel(id)

    # -------------------------------------------------------------- handles

    async def create_prefix(self, prompt: Prompt, **options: Unpack[HandleOptions]) -> Handle:
        """Computes `prompt` once; each request that names the handle goes on from its end."""
        return await self._create("prefix", prompt, options)

    async def create_scaffold(self, prompt: Prompt, **options: Unpack[HandleOptions]) -> Handle:
        """The same, for any request whose prompt begins with this one: it need not name it."""
        return await self._create("scaffold", prompt, options)

    async def create_resume(self, prompt: Prompt, **options: Unpack[HandleOptions]) -> Handle:
        """Computes `prompt` at `loops`; answers to it at more loops start from there."""
        return await self._create("resume", prompt, options)

    async def handles(self) -> tuple[messages.HandleInfo, ...]:
        """This tenant's handles and the shared ones."""
        return (await self._ask(messages.ListHandles(next(self._ids)), messages.Handles)).handles

    async def drop_handle(self, name: str) -> messages.HandleInfo:
        """Frees the handle of this name, and waits until that is certain; returns what it was."""
        return (await self._ask(messages.DropHandle(next(self._ids), name), messages.Handle)).info

    # -------------------------------------------------------------- the fleet

    async def status(self) -> messages.Status:
        """The dispatcher's view of its replicas and queues."""
        return await self._ask(messages.GetStatus(next(self._ids)), messages.Status)

    async def control(
        self,
        action: Literal["attach", "drain", "detach", "resume", "accept"],
        target: str = "",
        *,
        within_s: float = 30.0,
    ) -> str:
        """An operator's order, as `messages.Control` lists them; returns what the dispatcher says to it."""
        order = prepare_control(next(self._ids), action, target, within_s)
        return (await self._ask(order, messages.Controlled)).message

    async def close(self) -> None:
        """Cancels what is open, drops handles that are not detached and says goodbye. Calls that still
        wait raise `TransportError`."""
        await asyncio.to_thread(self._finalizer)

    # -------------------------------------------------------------- inside

    def _start(self, prompt: Prompt, options: Options, *, stream: bool) -> AsyncStream:
        id = next(self._ids)
        request, frames = prepare(id, prompt, options, stream=stream, timeout_s=self._timeout_s)
        answer = AsyncStream(self, id)
        self._link.open(request, frames, _into(answer._inbox))
        return answer

    async def _create(self, kind: messages.HandleKind, prompt: Prompt, options: HandleOptions) -> Handle:
        order = prepare_handle(next(self._ids), kind, prompt, options)
        info = (await self._ask(order, messages.Handle)).info
        return Handle(info, order.recipe, self._link, self, detached=order.detached)

    async def _ask(self, question: Question, expected: type[R]) -> R:
        question, frames = checked(question)
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._link.open(question, frames, _into(inbox), self._timeout_s)
        try:
            event = await inbox.get()
        except BaseException:  # the task was cancelled
            self._link.abandon(question.id)
            raise
        if isinstance(event, expected):
            return event
        raise event if isinstance(event, Exception) else ProtocolError("not a reply")

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
            self._end = event if isinstance(event, Completion | Exception) else ProtocolError("not an answer")
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


class AsyncDraft:
    """`client.Draft` for asyncio."""

    def __init__(self, client: AsyncClient, handle: Handle, completion: Completion, options: Options) -> None:
        self.handle = handle
        self.completion = completion
        self._client = client
        self._options = options

    async def refine(self, **options: Unpack[Options]) -> Completion:
        """The answer at more `loops`, without computing the draft's again for the prompt. Options that are
        left out are the draft's."""
        return await self._client.generate(**drafted(self.handle, self._options, options))

    async def __aenter__(self) -> AsyncDraft:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.drop()


def _into(inbox: asyncio.Queue[Event]) -> Callable[[Event], None]:
    """A sink for the link's thread that puts events into `inbox` in the running loop."""
    loop = asyncio.get_running_loop()

    def sink(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(inbox.put_nowait, event)

    return sink
