"""Step 1 of a request's life: the caller's end. `Client` checks the request, sends it to the dispatcher
(step 2, dispatcher/server.py) and gives back text and tokens as they arrive.

    with Client("ipc:///run/tinyloop/front.sock") as client:
        print(client.generate("The definition of", loops=4, max_tokens=40).text)
        with client.stream("In the beginning", seed=7, temperature=0.8) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)

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
from typing import Unpack

from tinyloop_serve.protocol.calls import Chunk, Completion, Options, Prompt, prepare
from tinyloop_serve.protocol.codec import TO_DISPATCHER
from tinyloop_serve.protocol.errors import ProtocolError, TransportError
from tinyloop_serve.protocol.link import Link
from tinyloop_serve.protocol.messages import GetStatus, Status
from tinyloop_serve.protocol.session import Event


class Client:
    """A connection to one dispatcher; threads may share it.

    `timeout_s` is the deadline of calls without a `deadline_s` of their own (None: no deadline). A call
    fails with `ConnectFailed` when nobody answers for `connect_timeout_s`, or a dispatcher that did
    answer is silent for `lease_s`; a dispatcher that hears nothing for `lease_s` cancels what this client
    had asked for. Nothing is sent, and nobody needs to be there, before the first call.

    Every call may raise any error of errors.py. A client must not be carried over a fork.
    """

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

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. Interrupted (Ctrl-C), it cancels the request."""
        with self._start(prompt, options, stream=False) as stream:
            return stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer as it is made."""
        return self._start(prompt, options, stream=True)

    def batch(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """Answers to many prompts, all asked at once, in the order of `prompts`. If one fails, its error
        is raised and the others are cancelled."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(self._start(each, options, stream=False)) for each in prompts]
            return [stream.result() for stream in streams]

    def status(self) -> Status:
        """The dispatcher's view of its replicas and queues."""
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = GetStatus(id=next(self._ids))
        self._link.open(request, TO_DISPATCHER.encode(request), inbox.put)
        event = inbox.get()
        if isinstance(event, Status):
            return event
        raise event if isinstance(event, Exception) else ProtocolError("no status")

    def cancel(self, id: str) -> None:
        """Ends the request of the stream with this `id`; it gets a stop_reason of "cancelled"."""
        self._link.cancel(id)

    def close(self) -> None:
        """Cancels what is open and says goodbye. Calls that still wait raise `TransportError`."""
        self._finalizer()

    def _start(self, prompt: Prompt, options: Options, *, stream: bool) -> Stream:
        id = next(self._ids)
        request, frames = prepare(id, prompt, options, stream=stream, timeout_s=self._timeout_s)
        answer = Stream(self, id)
        self._link.open(request, frames, answer._inbox.put)
        return answer

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
            self._end = ProtocolError("not an answer") if isinstance(event, Status) else event
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
