"""The client's side of the front conversation, without I/O: calls and frames in, frames and events out.

A driver owns the socket and the clock. It passes every call and every received message here with the
time, sends what lies in `outbox`, and hands each event to the caller whose question it names. A question
gets `Chunk`s and then exactly one other event: a `Completion`, a reply or an error. Times are seconds of
any clock that never goes back.

A connection that is lost is replaced, and each open `Generate` is asked again with the tokens that it has
(`answers.Open.asked_again`): the same request gives the same tokens, so the caller sees one stream. From
the loss until somebody answers again there is an *outage*, which may last `resume_s`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from tinyloop_serve.protocol.answers import Event, Open, Question
from tinyloop_serve.protocol.calls import Chunk
from tinyloop_serve.protocol.codec import TO_CLIENT, TO_DISPATCHER, error_from
from tinyloop_serve.protocol.errors import (
    ConnectFailed,
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    TinyLoopError,
    Unavailable,
)
from tinyloop_serve.protocol.leases import Leases
from tinyloop_serve.protocol.limits import MAX_ID_CHARS
from tinyloop_serve.protocol.messages import (
    Cancel,
    CreateHandle,
    DropHandle,
    Failed,
    Generate,
    Goodbye,
    Handle,
    Ping,
    ToClient,
    ToDispatcher,
)

Events = list[tuple[str, Event]]

PINGS_PER_LEASE = 4
DEADLINE_GRACE_S = 1.0  # the dispatcher enforces a deadline; this much later we do it ourselves
MAX_FRUITLESS = 6  # losses in a row without a token: the request itself may be what kills dispatchers
DROP = "drop-"  # begins the ids of messages whose answer nobody awaits
RETRY_S = 0.25  # the least, when a dispatcher that came back has no room yet


class Session:
    """`lease_s`: how long either side may be silent, while something is open, before the other gives it up.

    `resume_s`: how long an outage may last; 0: every loss fails what is open. `broken` asks the driver to
    drop the connection, so that nothing of the past can arrive later; the driver clears it, and connects
    again, under a new identity, when there is something to send.
    """

    def __init__(
        self, endpoint: str, *, connect_timeout_s: float, lease_s: float, resume_s: float = 0.0
    ) -> None:
        self.outbox: deque[list[bytes]] = deque()
        self.broken = False
        self._endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._lease_s = lease_s
        self._resume_s = resume_s
        self._open: dict[str, Open] = {}
        self._handles = Leases()  # that callers hold
        self._deadlines: list[tuple[float, str]] = []  # a heap; ids that are not open any more are skipped
        self._retries: list[tuple[float, str]] = []  # likewise: asked again then
        self._heard = 0.0  # when the last message came, or when the first of what is open was opened
        self._answered = False  # whether any message came since then
        self._outage: tuple[float, str] | None = None  # until when, and how it began
        self._next_ping = 0.0
        self._pings = 0

    # -------------------------------------------------------------- what the caller does

    def open(
        self, question: Question, frames: list[bytes], now: float, timeout_s: float | None = None
    ) -> None:
        """`timeout_s` ends other questions than `Generate`, which has a `deadline_ms` of its own."""
        self._wake_up(now)
        entry = self._open[question.id] = Open(question)
        if isinstance(question, Generate):
            timeout_s = question.deadline_ms / 1000 or None
            self._handles.used(question.handle, now)
        elif isinstance(question, DropHandle):
            self._handles.release(question.handle)
        if timeout_s is not None:
            entry.deadline = now + timeout_s
            heapq.heappush(self._deadlines, (entry.deadline + DEADLINE_GRACE_S, question.id))
        self.outbox.append(frames)

    def cancel(self, id: str) -> None:
        """A request still ends with its terminal event; of other questions nobody wants to hear any more."""
        if (entry := self._open.get(id)) is None:
            return
        if not isinstance(entry.question, Generate):
            del self._open[id]
        elif entry.refused:  # the dispatcher does not have it now
            heapq.heappush(self._retries, (0.0, id))
        else:
            self._send(Cancel(id=id))
        entry.cancelled = True

    def release(self, handle: str) -> None:
        """Its lease is renewed no more."""
        self._handles.release(handle)

    def drop(self, handle: str) -> None:
        """Frees it; nobody waits for the answer."""
        self._handles.release(handle)
        self._send(DropHandle(id=f"{DROP}{handle}"[:MAX_ID_CHARS], handle=handle))

    def leave(self) -> None:
        """Says goodbye; the driver sends what it can of the outbox and closes."""
        self._send(Goodbye())

    # -------------------------------------------------------------- what the driver saw

    def receive(self, frames: Sequence[bytes], now: float) -> Events:
        self._heard, self._answered, self._outage = now, True, None
        events: Events = []
        try:
            for message in TO_CLIENT.decode_each(frames):
                events += self._take(message, now)
                if self.broken:
                    break  # the rest is of a conversation that is over
        except TinyLoopError as error:  # no telling whose it was
            events += self.fail(ProtocolError(f"{self._endpoint}: {error}"))
        return events

    def tick(self, now: float) -> Events:
        """What the passing of time brings. Call it after everything that has arrived was received."""
        if not self._active:
            return []
        if now >= self._heard_by:
            return self._silence(now)
        if now >= self._next_ping + self._lease_s * (1 - 1 / PINGS_PER_LEASE):
            stopped = "this process was stopped for longer than its lease, so the dispatcher gave it up"
            return self.lost(ConnectFailed(f"{self._endpoint}: {stopped}"), now)
        events = self._expire(now)
        while self._retries and self._retries[0][0] <= now:
            self._ask_again(heapq.heappop(self._retries)[1], now, events)
        for renewal in self._handles.due(now):
            self._send(renewal)
        if self._active and now >= self._next_ping:
            self._pings += 1
            self._next_ping = now + self._lease_s / PINGS_PER_LEASE
            self._send(Ping(n=self._pings, lease_ms=int(self._lease_s * 1000)))
        return events

    def lost(self, error: TinyLoopError, now: float) -> Events:
        """The connection is useless. What can be resumed is asked again on the next one, the rest fails."""
        if self._resume_s <= 0 or not isinstance(error, ConnectFailed | Unavailable):
            return self.fail(error)
        if self._outage is None:
            self._outage = (now + self._resume_s, error.message)
        if now >= self._outage[0]:
            return self.fail(self._given_up())
        self.broken = True
        self.outbox.clear()
        self._retries.clear()
        self._heard, self._answered, self._next_ping = now, False, now
        events: Events = []
        for id, entry in list(self._open.items()):
            if not isinstance(entry.question, Generate):
                del self._open[id]
                events.append((id, _copy(error, id)))
                continue
            if not entry.cancelled:
                entry.resumed += 1
                entry.fruitless += 1
                entry.patient_until = now + 2 * self._resume_s  # the outage, and as much again
            self._ask_again(id, now, events)
        self._handles.renew_all(now)
        return events

    def fail(self, error: TinyLoopError) -> Events:
        """The connection is useless for good: every open question fails with its own copy of `error`."""
        events: Events = [(id, _copy(error, id)) for id in self._open]
        self.broken, self._outage = True, None
        for each in (self._open, self._deadlines, self._retries, self.outbox):
            each.clear()
        self._handles.clear()
        return events

    def wake_at(self) -> float | None:
        """When `tick` must be called next; None: not before something happens."""
        if not self._active:
            return None
        timers = [heap[0][0] for heap in (self._deadlines, self._retries) if heap]
        return min(self._next_ping, self._heard_by, self._handles.next_at, *timers)

    # -------------------------------------------------------------- inside

    @property
    def _active(self) -> bool:
        """Whether the dispatcher must be there."""
        return bool(self._open) or bool(self._handles)

    @property
    def _heard_by(self) -> float:
        """When silence has lasted too long."""
        if self._outage is not None:
            return self._outage[0]
        return self._heard + (self._lease_s if self._answered else self._connect_timeout_s)

    def _wake_up(self, now: float) -> None:
        if not self._active:
            self._heard, self._answered, self._next_ping, self._outage = now, False, now, None

    def _send(self, message: ToDispatcher) -> None:
        self.outbox.append(TO_DISPATCHER.encode(message))

    def _take(self, message: ToClient, now: float) -> Events:
        if isinstance(message, Failed) and not message.id:  # it cannot say whose: all of them
            return self.lost(error_from(message), now)
        id = getattr(message, "id", "")
        if self._handles.answered(id, message):
            return []
        entry = self._open.get(id)
        if entry is None:  # a Pong, or late news of a question that is over
            if isinstance(message, Handle) and not id.startswith(DROP):
                self.drop(message.info.handle)  # it was made for somebody who has left
            return []
        try:
            events = entry.advance(message)
        except TinyLoopError as error:
            error.request_id = id
            self.cancel(id)
            events = [error]
        last = events[-1]
        if isinstance(last, Unavailable) and last.retry_after_s and not entry.patient_until:
            entry.patient_until = now + self._resume_s  # it is being restarted, and says so
        if isinstance(last, Overloaded | Unavailable) and now < entry.patient_until:
            entry.refused = True
            heapq.heappush(self._retries, (now + max(RETRY_S, last.retry_after_s), id))
            return []
        if not isinstance(last, Chunk):
            self._open.pop(id, None)
            if isinstance(last, Handle) and isinstance(entry.question, CreateHandle):
                self._handles.hold(last.info.handle, last.info.lease_ms / 1000, now)
        return [(id, event) for event in events]

    def _ask_again(self, id: str, now: float, events: Events) -> None:
        entry = self._open.get(id)
        if entry is None:
            return
        if entry.cancelled:
            del self._open[id]
            events.append((id, entry.stopped()))
            return
        entry.refused = False
        try:
            if entry.fruitless > MAX_FRUITLESS:
                again = f"lost {entry.fruitless} times in a row without a token; it is not asked again"
                raise ConnectFailed(f"{self._endpoint}: the connection was {again}", request_id=id)
            self.outbox.append(TO_DISPATCHER.encode(entry.asked_again(now)))
        except TinyLoopError as error:  # or, with its tokens, it is too large by now
            del self._open[id]
            events.append((id, error))

    def _silence(self, now: float) -> Events:
        if self._outage is not None:
            return self.fail(self._given_up())
        silence = f"{self._endpoint}: nothing was heard for {now - self._heard:.3g} s"
        if not self._answered:
            return self.fail(ConnectFailed(f"{silence}: nobody answers; `tinyloop up` starts a fleet"))
        return self.lost(ConnectFailed(f"{silence}: the dispatcher hangs"), now)

    def _given_up(self) -> ConnectFailed:
        assert self._outage is not None
        return ConnectFailed(f"{self._outage[1]}; nobody has answered in the {self._resume_s:g} s since")

    def _expire(self, now: float) -> Events:
        events: Events = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._open):
            _, id = heapq.heappop(self._deadlines)
            if id in self._open:
                self.cancel(id)
                self._open.pop(id, None)
                events.append((id, DeadlineExceeded("the deadline of the request passed", request_id=id)))
        return events


def _copy(error: TinyLoopError, id: str) -> TinyLoopError:
    return type(error)(
        error.message,
        field=error.field,
        value=error.value,
        accepted=error.accepted,
        request_id=id,
        retry_after_s=error.retry_after_s,
    )
