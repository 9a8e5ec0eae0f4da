"""One open question of a client, and what has arrived of its answer. No I/O, no clock, no other question."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from tinyloop_serve.protocol.calls import Chunk, Completion
from tinyloop_serve.protocol.codec import error_from, tokens_from_bytes, tokens_to_bytes
from tinyloop_serve.protocol.errors import ProtocolError, TinyLoopError
from tinyloop_serve.protocol.messages import (
    Control,
    Controlled,
    CreateHandle,
    Done,
    DropHandle,
    Failed,
    Generate,
    GetStatus,
    Handle,
    Handles,
    ListHandles,
    RenewHandle,
    Stats,
    Status,
    ToClient,
    Tokens,
)

Question = Generate | GetStatus | CreateHandle | RenewHandle | DropHandle | ListHandles | Control
Reply = Status | Handle | Handles | Controlled
Event = Chunk | Completion | Reply | TinyLoopError

_REPLIES: dict[type[Question], type[Reply]] = {
    GetStatus: Status,
    CreateHandle: Handle,
    RenewHandle: Handle,
    DropHandle: Handle,
    ListHandles: Handles,
    Control: Controlled,
}
NEVER = math.inf


@dataclass(slots=True)
class Open:
    """A question that has not ended. Times are the session's."""

    question: Question
    deadline: float = NEVER  # the caller's own
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    model: str = ""  # identity of the model that they came from
    cancelled: bool = False
    refused: bool = False  # for want of room, after a loss; it will be asked again
    resumed: int = 0  # how often it was asked again
    fruitless: int = 0  # of these, since the last token
    patient_until: float = 0.0  # until then "no room" is not the end: it was admitted once already

    def advance(self, message: ToClient) -> list[Event]:
        """What `message` brings; the last event is the end unless it is a `Chunk`. Raises `ProtocolError`."""
        if isinstance(message, Failed):
            return [error_from(message)]
        if isinstance(self.question, Generate):
            if isinstance(message, Tokens):
                return [self._extend(message, self.question.max_tokens)]
            if isinstance(message, Done):
                rest: list[Event] = [Chunk(message.text, (), len(self.tokens))] if message.text else []
                return [*rest, self._completion(message)]
        elif isinstance(message, _REPLIES[type(self.question)]):
            assert isinstance(message, Reply)
            return [message]
        raise ProtocolError(f"{type(message).__name__} does not answer what was asked")

    def asked_again(self, now: float) -> Question:
        """The same; a request is to go on after the tokens that have arrived, in the time that is left."""
        if not isinstance(self.question, Generate):
            return self.question
        changes: dict[str, object] = {"done": tokens_to_bytes(self.tokens), "model": self.model}
        if self.question.deadline_ms:
            changes["deadline_ms"] = max(1, math.ceil((self.deadline - now) * 1000))
        return msgspec.structs.replace(self.question, **changes)

    def stopped(self) -> Completion:
        """The end of a cancelled request that nobody will answer any more."""
        return self._completion(Done("", "cancelled", stats=Stats(generated_tokens=len(self.tokens))))

    def _completion(self, done: Done) -> Completion:
        stats = done.stats
        if self.resumed:
            stats = msgspec.structs.replace(stats, failovers=stats.failovers + self.resumed)
        return Completion("".join(self.text) + done.text, tuple(self.tokens), done.stop_reason, stats)

    def _extend(self, message: Tokens, max_tokens: int) -> Chunk:
        if len(message.tokens) % 4:
            raise ProtocolError(
                f"Tokens.tokens has {len(message.tokens)} bytes, not a multiple of 4", field="tokens"
            )
        tokens = tokens_from_bytes(message.tokens)
        have = len(self.tokens)
        if message.seq != have:
            what = "a gap" if message.seq > have else "a repetition"
            raise ProtocolError(
                f"{what} in the answer: Tokens.seq {message.seq} after {have} tokens", field="seq"
            )
        if have + len(tokens) > max_tokens:
            raise ProtocolError(f"more tokens than the {max_tokens} asked for", field="tokens")
        self.tokens += tokens
        self.model = message.model or self.model
        self.text.append(message.text)
        self.fruitless = 0
        return Chunk(message.text, tuple(tokens), message.seq)
