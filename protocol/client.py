"""Step 1 of a request's life: the caller's end. `Client` checks the request, sends it to the dispatcher
(step 2, dispatcher/server.py) and gives back text and tokens as they arrive.

    with Client("ipc:///run/tinyloop/front.sock") as client:
        print(client.generate("The definition of", loops=4, max_tokens=40).text)
        with client.stream("In the beginning", seed=7, temperature=0.8) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)

There is one call for each way to use the pool:

    lowest latency                   stream (or generate)
    most throughput at one shape     batch
    one shared prompt                create_prefix, then generate(rest, handle=...)
    many known prompts               create_scaffold: found by themselves
    draft, then refine               draft(prompt, loops=4), then refine(loops=16); or create_resume
    faster decoding, same tokens     generate(..., method="speculative")

How frames and time become events is in session.py, the socket is in link.py. This file must know neither.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import weakref
from collections.abc import Iterator, Sequence
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


class Client:
    """A connection to one dispatcher; threads may share it.

    `timeout_s` is the deadline of calls without a `deadline_s` of their own (None: no deadline). A call
    fails with `ConnectFailed` when nobody answers for `connect_timeout_s`. When the dispatcher is lost
    later (it closed the connection, or was silent for `lease_s`), open requests go on at its successor
    from the next token, and their callers notice nothing but the pause; only after `resume_s` without
    one (0: at once) do they fail with `ConnectFailed`. Other calls fail at once. A dispatcher that hears
    nothing for `lease_s` cancels what this client had asked for. Nothing is sent, and nobody needs to be
    there, before the first call.

    `key` (a file of `tinyloop keys new`) and `server_key` (40 characters, or a `.pub` file) encrypt the
    connection; they are needed for tcp beyond this machine.

    Every call may raise any error of errors.py. A client must not be carried over a fork.
    """

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

    def generate(self, prompt: Prompt = "", **options: Unpack[Options]) -> Completion:
        """The whole answer at once. Interrupted (Ctrl-C), it cancels the request."""
        with self._start(prompt, options, stream=False) as stream:
            return stream.result()

    def stream(self, prompt: Prompt = "", **options: Unpack[Options]) -> Stream:
        """The answer as it is made."""
        return self._start(prompt, options, stream=True)

    def batch(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """Answers to many prompts, all asked at once, in the order of `prompts`. If one fails, its error
        is raised and the others are cancelled."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(self._start(each, options, stream=False)) for each in prompts]
            return [stream.result() for stream in streams]

    def draft(self, prompt: Prompt, **options: Unpack[Options]) -> Draft:
        """A quick answer with few `loops`, and the means to refine it: see `Draft`."""
        handle = self.create_resume(prompt, **draft_options(options))
        try:
            return Draft(self, handle, self.generate(**drafted(handle, options)), options)
        except BaseException:
            handle.drop()
            raise

    def cancel(self, id: str) -> None:
        """Ends the request of the stream with this `id`; it gets a stop_reason of "cancelled"."""
        self._link.cancel(id)

    # -------------------------------------------------------------- handles

    def create_prefix(self, prompt: Prompt, **options: Unpack[HandleOptions]) -> Handle:
        """Computes `prompt` once; each request that names the handle goes on from its end."""
        return self._create("prefix", prompt, options)

    def create_scaffold(self, prompt: Prompt, **options: Unpack[HandleOptions]) -> Handle:
        """The same, for any request whose prompt begins with this one: it need not name it. The longest
        scaffold that fits is used."""
        return self._create("scaffold", prompt, options)

    def create_resume(self, prompt: Prompt, **options: Unpack[HandleOptions]) -> Handle:
        """Computes `prompt` at `loops`; answers to it at more loops start from there."""
        return self._create("resume", prompt, options)

    def handles(self) -> tuple[messages.HandleInfo, ...]:
        """This tenant's handles and the shared ones."""
        return self._ask(messages.ListHandles(next(self._ids)), messages.Handles).handles

    def drop_handle(self, name: str) -> messages.HandleInfo:
        """Frees the handle of this name, and waits until that is certain; returns what it was."""
        return self._ask(messages.DropHandle(next(self._ids), name), messages.Handle).info

    # -------------------------------------------------------------- the fleet

    def status(self) -> messages.Status:
        """The dispatcher's view of its replicas and queues."""
        return self._ask(messages.GetStatus(next(self._ids)), messages.Status)

    def control(
        self,
        action: Literal["attach", "drain", "detach", "resume", "accept"],
        target: str = "",
        *,
        within_s: float = 30.0,
    ) -> str:
        """An operator's order, as `messages.Control` lists them; returns what the dispatcher says to it."""
        order = prepare_control(next(self._ids), action, target, within_s)
        return self._ask(order, messages.Controlled).message

    def close(self) -> None:
        """Cancels what is open, drops handles that are not detached and says goodbye. Calls that still
        wait raise `TransportError`."""
        self._finalizer()

    # -------------------------------------------------------------- inside

    def _start(self, prompt: Prompt, options: Options, *, stream: bool) -> Stream:
        id = next(self._ids)
        request, frames = prepare(id, prompt, options, stream=stream, timeout_s=self._timeout_s)
        answer = Stream(self, id)
        self._link.open(request, frames, answer._inbox.put)
        return answer

    def _create(self, kind: messages.HandleKind, prompt: Prompt, options: HandleOptions) -> Handle:
        order = prepare_handle(next(self._ids), kind, prompt, options)
        info = self._ask(order, messages.Handle).info
        return Handle(info, order.recipe, self._link, self, detached=order.detached)

    def _ask(self, question: Question, expected: type[R]) -> R:
        question, frames = checked(question)
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link.open(question, frames, inbox.put, self._timeout_s)
        try:
            event = inbox.get()
        except BaseException:  # interrupted
            self._link.abandon(question.id)
            raise
        if isinstance(event, expected):
            return event
        raise event if isinstance(event, Exception) else ProtocolError("not a reply")

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """An answer on its way: iterate over its chunks, then look at `result()`. For one thread at a time.

    Leaving the `with` block, or dropping the stream, before the end cancels the request.
    """

    def __init__(self, client: Client, id: str) -> None:
        self.id = id
        self._client = client  # keeps the link open
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._end: Completion | BaseException | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._end is None:
            event = self._inbox.get()
            if isinstance(event, Chunk):
                return event
            self._end = event if isinstance(event, Completion | Exception) else ProtocolError("not an answer")
        if isinstance(self._end, Completion):
            raise StopIteration
        raise self._end

    def cancel(self) -> None:
        """Asks for an early end; what was made until then still arrives, with a stop_reason of
        "cancelled"."""
        self._client.cancel(self.id)

    def result(self) -> Completion:
        """The whole answer, chunks already seen included; waits for its end."""
        for _ in self:
            pass
        if not isinstance(self._end, Completion):
            raise ProtocolError("the answer has no end")
        return self._end

    def _leave(self) -> None:
        if self._end is None:
            self._end = TransportError("the stream was left before its end", request_id=self.id)
            self._client._link.abandon(self.id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()


class Draft:
    """A quick answer (`completion`), and the prompt's states at its loops (`handle`), from which it is
    refined as often as wanted. Leaving the `with` block drops the handle.

        with client.draft("Why is the sky blue?", loops=4) as draft:
            print(draft.completion.text)
            print(draft.refine(loops=16).text)
    """

    def __init__(self, client: Client, handle: Handle, completion: Completion, options: Options) -> None:
        self.handle = handle
        self.completion = completion
        self._client = client
        self._options = options

    def refine(self, **options: Unpack[Options]) -> Completion:
        """The answer at more `loops`, without computing the draft's again for the prompt. Options that are
        left out are the draft's."""
        return self._client.generate(**drafted(self.handle, self._options, options))

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.drop()
