"""One request while it is decoded: tokens in, the frames that its client will read out.

An answer ends for one reason, decided by its own tokens in this order: the end of the sequence, a stop
token sequence, a stop string, `max_tokens`, a cancel. The engine knows all but the stop strings and decides
alike; deciding here too lets a short lane's client have its `Done` while longer lanes of the batch go on.
This file must not know threads, sockets or the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tinyloop_serve.protocol.codec import TO_CLIENT, failed_from, tokens_to_bytes
from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.messages import Done, Lane, Stats, Step, StopReason, Tokens
from tinyloop_serve.replica.text import RequestText, Vocabulary


class Part(NamedTuple):
    """One payload of a `Step`."""

    key: int
    tokens: int  # in the payload
    final: bool
    payload: bytes  # an encoded Tokens, Done or Failed


class Answer:
    """Owned by the thread that decodes; only `cancelled` may be set from elsewhere. `model`: its
    identity, told with the first tokens."""

    def __init__(
        self, lane: Lane, vocabulary: Vocabulary | None, eos_ids: Collection[int], model: str = ""
    ) -> None:
        self.lane = lane
        self.cancelled = False  # asked for; takes effect with the next token
        self.stop_reason: StopReason | None = None  # set: no more tokens are wanted
        self.ended = False  # its final part is out
        self.count = 0  # tokens so far, those that the client had before included
        self._model = model
        self._first = 0  # index of the first token that we send
        self._eos_ids = () if lane.ignore_eos else eos_ids
        self._text = RequestText(vocabulary, lane.stop)
        self._recent: deque[int] = deque(maxlen=max(map(len, lane.stop_tokens), default=0))
        self._unsent: list[int] = []  # of an answer that is not streamed
        self._unsent_text = ""

    def prime(self, tokens: Iterable[int]) -> None:
        """The answer's first tokens, which the client has already: text and stops go on after them."""
        for token in tokens:
            self._text.push(token)
            self._count(token)
        self._first = self.count

    def wants_more(self) -> bool:
        """Whether the engine should go on with it."""
        return self.stop_reason is None

    def take(self, token: int) -> list[Part]:
        """The next token. Decides whether the answer stops with it."""
        seq, text = self.count, self._text.push(token)
        self._count(token)
        if self.lane.stream:
            return [self._tokens(seq, [token], text)]
        self._unsent.append(token)
        self._unsent_text += text
        return []

    def finish(self, reason: StopReason, stats: Stats) -> list[Part]:
        """The terminal frame, after the tokens of an answer that is not streamed. `stop_reason` wins over
        `reason`. Raises `LimitExceeded` when they are too large for a message."""
        rest, parts = self._text.flush(), []
        if self._unsent:
            parts, rest = [self._tokens(self._first, self._unsent, self._unsent_text + rest)], ""
        done = Done(id=self.lane.id, stop_reason=self.stop_reason or reason, text=rest, stats=stats)
        parts.append(Part(self.lane.key, 0, True, TO_CLIENT.encode_body(done)))
        self.ended = True  # last: what cannot be encoded has not ended
        return parts

    def fail(self, error: TinyLoopError) -> list[Part]:
        """The terminal frame of an answer that broke."""
        part = Part(self.lane.key, 0, True, TO_CLIENT.encode_body(failed_from(error, self.lane.id)))
        self.ended = True
        return [part]

    def _count(self, token: int) -> None:
        self.count += 1
        self._recent.append(token)
        self.stop_reason = self._why_stop(token)

    def _why_stop(self, token: int) -> StopReason | None:
        if token in self._eos_ids:
            return "eos"
        if any(token == stop[-1] and self._ends_with(stop) for stop in self.lane.stop_tokens):
            return "stop_sequence"
        if self._text.stopped:
            return "stop_sequence"
        if self.count >= self.lane.max_tokens:
            return "max_tokens"
        return "cancelled" if self.cancelled else None

    def _ends_with(self, stop: tuple[int, ...]) -> bool:
        return tuple(self._recent)[-len(stop) :] == stop

    def _tokens(self, seq: int, tokens: list[int], text: str) -> Part:
        model = self._model if seq == self._first else ""
        message = Tokens(id=self.lane.id, seq=seq, tokens=tokens_to_bytes(tokens), text=text, model=model)
        return Part(self.lane.key, len(tokens), False, TO_CLIENT.encode_body(message))


def step_of(run: int, parts: Iterable[Part], *, idle: bool = False) -> tuple[Step, list[bytes]]:
    """The `Step` that carries `parts`, and its payload frames."""
    columns = list(zip(*parts, strict=True)) or [(), (), (), ()]
    keys, tokens, final, payloads = columns
    return Step(run=run, keys=keys, tokens=tokens, final=final, idle=idle), list(payloads)
