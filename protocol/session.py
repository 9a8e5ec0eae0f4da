"""The client's side of the front conversation, without I/O: calls and frames in, frames and events out.

A driver owns the socket and the clock. It passes every call and every received message here with the
time, sends what lies in `outbox`, and hands each event to the caller whose request it names. A request
gets `Chunk`s and then exactly one other event: a `Completion`, a `Status` or an error. Times are seconds
of any clock that never goes back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinyloop_serve.protocol.calls import Chunk, Completion
from tinyloop_serve.protocol.codec import TO_CLIENT, TO_DISPATCHER, error_from, tokens_from_bytes
from tinyloop_serve.protocol.errors import ConnectFailed, DeadlineExceeded, ProtocolError, TinyLoopError
from tinyloop_serve.protocol.messages import (
    Cancel,
    Done,
    Failed,
    Generate,
    GetStatus,
    Goodbye,
    Ping,
    Status,
    ToClient,
    Tokens,
)

Event = Chunk | Completion | Status | TinyLoopError
Events = list[tuple[str, Event]]

PINGS_PER_LEASE = 4
DEADLINE_GRACE_S = 1.0  # the dispatcher enforces a deadline; this much later we do it ourselves


@dataclass(slots=True)
class _Live:
    """An open request and what has arrived of its answer."""

    max_tokens: int  # 0 for a status
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Session:
    """`lease_s`: how long either side may be silent, while requests are open, before the other gives it up.

    `broken` asks the driver to reconnect under a new identity, so that nothing of the past can arrive
    later; the driver clears it.
    """

    def __init__(self, endpoint: str, *, connect_timeout_s: float, lease_s: float) -> None:
        self.outbox: deque[list[bytes]] = deque()
        self.broken = False
        self._endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._lease_s = lease_s
        self._live: dict[str, _Live] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; ids that are not live any more are skipped
        self._heard = 0.0  # when the last message came, or when the first of the open requests was opened
        self._answered = False  # whether any message came since then
        self._next_ping = 0.0
        self._pings = 0

    # -------------------------------------------------------------- what the caller does

    def open(self, request: Generate | GetStatus, frames: list[bytes], now: float) -> None:
        if not self._live:
            self._heard, self._answered, self._next_ping = now, False, now
        self._live[request.id] = _Live(request.max_tokens if isinstance(request, Generate) else 0)
        if isinstance(request, Generate) and request.deadline_ms:
            expires = now + request.deadline_ms / 1000 + DEADLINE_GRACE_S
            heapq.heappush(self._deadlines, (expires, request.id))
        self.outbox.append(frames)

    def cancel(self, id: str) -> None:
        """The request still ends with its terminal event."""
        if id in self._live:
            self.outbox.append(TO_DISPATCHER.encode(Cancel(id=id)))

    def leave(self) -> None:
        """Says goodbye; the driver sends what it can of the outbox and closes."""
        self.outbox.append(TO_DISPATCHER.encode(Goodbye()))

    # -------------------------------------------------------------- what the driver saw

    def receive(self, frames: Sequence[bytes], now: float) -> Events:
        self._heard, self._answered = now, True
        try:
            message = TO_CLIENT.decode(frames)
        except TinyLoopError as error:  # no telling whose it was
            return self.lost(ProtocolError(f"{self._endpoint}: {error}"))
        if isinstance(message, Failed) and not message.id:
            return self.lost(error_from(message))
        id = getattr(message, "id", "")
        live = self._live.get(id)
        if live is None:  # a Pong, or late news of a request that is over
            return []
        try:
            events = _advance(live, message)
        except TinyLoopError as error:
            error.request_id = id
            self.cancel(id)
            events = [error]
        if not isinstance(events[-1], Chunk):
            del self._live[id]
        return [(id, event) for event in events]

    def tick(self, now: float) -> Events:
        """What the passing of time brings. Call it after everything that has arrived was received."""
        if self._live and now >= self._heard + self._patience_s:
            silence = f"{self._endpoint}: nothing was heard for {self._patience_s:g} s"
            advice = (
                "the dispatcher hangs" if self._answered else "nobody answers; `tinyloop up` starts a fleet"
            )
            return self.lost(ConnectFailed(f"{silence}: {advice}"))
        if self._live and now >= self._next_ping + self._lease_s * (1 - 1 / PINGS_PER_LEASE):
            stopped = "this process was stopped for longer than its lease, so the dispatcher gave it up"
            return self.lost(ConnectFailed(f"{self._endpoint}: {stopped}"))
        events: Events = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._live):
            _, id = heapq.heappop(self._deadlines)
            if id in self._live:
                self.cancel(id)
                del self._live[id]
                events.append((id, DeadlineExceeded("the deadline of the request passed", request_id=id)))
        if self._live and now >= self._next_ping:
            self._pings += 1
            self._next_ping = now + self._lease_s / PINGS_PER_LEASE
            self.outbox.append(TO_DISPATCHER.encode(Ping(n=self._pings, lease_ms=int(self._lease_s * 1000))))
        return events

    def lost(self, error: TinyLoopError) -> Events:
        """The connection is useless: every open request fails with its own copy of `error`."""
        events: Events = [(id, _copy(error, id)) for id in self._live]
        self.broken = bool(events)
        self._live.clear()
        self._deadlines.clear()
        self.outbox.clear()
        return events

    def wake_at(self) -> float | None:
        """When `tick` must be called next; None: not before something happens."""
        if not self._live:
            return None
        soonest = min(self._next_ping, self._heard + self._patience_s)
        return min(soonest, self._deadlines[0][0]) if self._deadlines else soonest

    @property
    def _patience_s(self) -> float:
        return self._lease_s if self._answered else self._connect_timeout_s


def _advance(live: _Live, message: ToClient) -> list[Event]:
    match message:
        case Failed():
            return [error_from(message)]
        case Status() if not live.max_tokens:
            return [message]
        case Tokens() if live.max_tokens:
            return [_extend(live, message)]
        case Done() if live.max_tokens:
            rest = [Chunk(message.text, (), len(live.tokens))] if message.text else []
            text = "".join(live.text) + message.text
            return [*rest, Completion(text, tuple(live.tokens), message.stop_reason, message.stats)]
    raise ProtocolError(f"{type(message).__name__} does not answer what was asked")


def _extend(live: _Live, message: Tokens) -> Chunk:
    if len(message.tokens) % 4:
        raise ProtocolError(
            f"Tokens.tokens has {len(message.tokens)} bytes, not a multiple of 4", field="tokens"
        )
    tokens = tokens_from_bytes(message.tokens)
    have = len(live.tokens)
    if message.seq != have:
        what = "a gap" if message.seq > have else "a repetition"
        raise ProtocolError(
            f"{what} in the answer: Tokens.seq {message.seq} after {have} tokens", field="seq"
        )
    if have + len(tokens) > live.max_tokens:
        raise ProtocolError(f"more tokens than the {live.max_tokens} asked for", field="tokens")
    live.tokens += tokens
    live.text.append(message.text)
    return Chunk(message.text, tuple(tokens), message.seq)


def _copy(error: TinyLoopError, id: str) -> TinyLoopError:
    return type(error)(
        error.message,
        field=error.field,
        value=error.value,
        accepted=error.accepted,
        request_id=id,
        retry_after_s=error.retry_after_s,
    )
