"""Messages <-> frames. This file must not know sockets, models or policy; ranges of values are in limits.py.

There is one `Direction` for each way a message can travel. Whatever the bytes are, `decode` raises
nothing but `ProtocolError` (framing, version, a malformed message of a server), `InvalidRequest` (a
malformed message of a client) and `LimitExceeded` (size).
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from tinyloop_serve.protocol.errors import (
    BY_CODE,
    InvalidRequest,
    LimitExceeded,
    ProtocolError,
    TinyLoopError,
    bad_field,
)
from tinyloop_serve.protocol.limits import (
    MAX_BACK_BODY_BYTES,
    MAX_BODIES,
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    MAX_ERROR_CHARS,
    MAX_FRAMES,
    MAX_PAYLOADS,
    valid_id,
)
from tinyloop_serve.protocol.messages import (
    VERSION,
    Failed,
    FromReplica,
    Message,
    Step,
    ToClient,
    ToDispatcher,
    ToReplica,
)

T = TypeVar("T", bound=Message)


class Direction(Generic[T]):
    """One way of one conversation: the messages that may travel there, and their size limits."""

    def __init__(self, union: Any, max_body_bytes: int, malformed: type[TinyLoopError]) -> None:
        self.max_body_bytes = max_body_bytes
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._malformed = malformed  # whose fault a malformed body is

    def encode(self, message: T, payloads: Sequence[bytes] = ()) -> list[bytes]:
        """The frames. Raises `LimitExceeded`, or `InvalidRequest` for what MessagePack cannot hold."""
        return [VERSION, self.encode_body(message), *payloads]

    def encode_body(self, message: T) -> bytes:
        """The body alone, as a replica ships it in a payload of `Step`."""
        try:
            body = _ENCODER.encode(message)
        except (
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:  # lone surrogates are ValueErrors
            raise InvalidRequest(f"{type(message).__name__} cannot be encoded: {error}") from None
        self._check_size("body", body, self.max_body_bytes)
        return body

    def decode(self, frames: Sequence[bytes]) -> T:
        """The message in `frames`. A `Step` has its payloads in `frames[2:]`, checked for number and size."""
        if not 2 <= len(frames) <= MAX_FRAMES:
            raise ProtocolError(f"{len(frames)} frames received; expected 2 to {MAX_FRAMES}: version, body")
        check_version(frames[0])
        message = self.decode_body(frames[1])
        payloads = len(message.keys) if isinstance(message, Step) else 0
        if len(frames) != 2 + payloads:
            raise ProtocolError(f"{type(message).__name__}: {len(frames) - 2} payloads, expected {payloads}")
        for payload in frames[2:]:
            self._check_size("payload", payload, MAX_BODY_BYTES)
        return message

    def decode_each(self, frames: Sequence[bytes]) -> Iterator[T]:
        """The messages in `frames`, which may hold several bodies: each as soon as it is read, so that what
        came before a malformed one is not lost with it."""
        if not 2 <= len(frames) <= 1 + MAX_BODIES:
            expected = f"2 to {1 + MAX_BODIES}: version, bodies"
            raise ProtocolError(f"{len(frames)} frames received; expected {expected}")
        check_version(frames[0])
        if len(frames) > 2 and sum(map(len, frames)) - len(VERSION) > MAX_BODIES_BYTES:
            accepted = f"at most {MAX_BODIES_BYTES} bytes where a message has several bodies"
            raise LimitExceeded(f"body: {accepted} are accepted", field="body", accepted=accepted)
        yield from map(self.decode_body, frames[1:])

    def decode_body(self, body: bytes) -> T:
        """The message in a body alone."""
        self._check_size("body", body, self.max_body_bytes)
        try:
            message = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._blame(str(error)) from None
        if isinstance(message, Step) and not (
            len(message.keys) == len(message.tokens) == len(message.final) <= MAX_PAYLOADS
        ):
            accepted = f"three lists of one length, at most {MAX_PAYLOADS}"
            raise self._malformed(f"Step: keys, tokens and final are not {accepted}", field="keys")
        return message

    def _check_size(self, field: str, frame: bytes, limit: int) -> None:
        if len(frame) > limit:
            raise LimitExceeded(
                f"{field}: {len(frame)} bytes; at most {limit} are accepted",
                field=field,
                value=f"{len(frame)} bytes",
                accepted=f"at most {limit} bytes",
            )

    def _blame(self, text: str) -> TinyLoopError:
        """Turns msgspec's text into fields: "Expected `int`, got `str` - at `$.max_tokens`"."""
        path = _PATH.search(text)
        name = _NAME.search(text)
        types = _TYPES.search(text)
        parts = [path.group(1)] if path else []
        parts += [name.group(1)] if name else []
        return self._malformed(
            f"malformed message: {text[:MAX_ERROR_CHARS]}",
            field=".".join(part for part in parts if part),
            value=types.group(2) if types else "",
            accepted=types.group(1) if types else "",
        )


def check_version(theirs: bytes) -> None:
    """Of frame 0. Raises `ProtocolError`, which names both."""
    if theirs != VERSION:
        shown, ours = ascii(theirs[:16])[1:], ascii(VERSION)[1:]
        raise ProtocolError(
            f"the peer speaks protocol version {shown}, this side speaks {ours}",
            field="version",
            value=shown,
            accepted=ours,
        )


def parcels(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Encoded bodies for one client, in order, as the frames of as few messages as may hold them."""
    if len(bodies) == 1:
        yield [VERSION, bodies[0]]
        return
    start, size = 0, 0
    for n, body in enumerate(bodies):
        size += len(body)
        if n > start and (size > MAX_BODIES_BYTES or n - start == MAX_BODIES):
            yield [VERSION, *bodies[start:n]]
            start, size = n, len(body)
    if start < len(bodies):
        yield [VERSION, *bodies[start:]]


def _plain(value: Any) -> Any:
    """Numbers of other libraries (numpy scalars) travel as the plain numbers that they stand for."""
    for convert in (getattr(value, "__index__", None), getattr(value, "__float__", None)):
        if convert is not None:
            return convert()
    raise TypeError(f"{type(value).__name__} is not a number, text or bytes")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_NAME = re.compile(r"(?:unknown|required) field `([^`]*)`")
_TYPES = re.compile(r"Expected `(.*)`, got `([^`]*)`")

TO_DISPATCHER: Direction[ToDispatcher] = Direction(ToDispatcher, MAX_BODY_BYTES, InvalidRequest)
TO_CLIENT: Direction[ToClient] = Direction(ToClient, MAX_BODY_BYTES, ProtocolError)
TO_REPLICA: Direction[ToReplica] = Direction(ToReplica, MAX_BACK_BODY_BYTES, ProtocolError)
FROM_REPLICA: Direction[FromReplica] = Direction(FromReplica, MAX_BACK_BODY_BYTES, ProtocolError)


def tokens_to_bytes(tokens: Iterable[int], field: str = "tokens") -> bytes:
    """u32 little-endian. Raises `InvalidRequest` naming `field` for what is not a token id."""
    try:
        ids = array("I", list(tokens))
    except (TypeError, OverflowError):
        raise bad_field(field, tokens, "token ids of 0 to 2**32-1") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def tokens_from_bytes(data: bytes, field: str = "tokens") -> list[int]:
    """The inverse. Raises `InvalidRequest` when `data` is not a whole number of ids."""
    if len(data) % 4:
        raise bad_field(field, f"{len(data)} bytes", "a multiple of 4")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def failed_from(error: TinyLoopError, id: str) -> Failed:
    """The wire form of `error`, for the request `id`."""
    return Failed(
        id=id,
        code=error.code,
        message=error.message[:MAX_ERROR_CHARS],
        field=error.field[:MAX_ERROR_CHARS],
        value=error.value[:MAX_ERROR_CHARS],
        accepted=error.accepted[:MAX_ERROR_CHARS],
        retry_after_ms=round(error.retry_after_s * 1000),
    )


def error_from(failed: Failed) -> TinyLoopError:
    """The error to raise for `failed`; an unknown code becomes a plain `TinyLoopError` that names it."""
    known = BY_CODE.get(failed.code)
    return (known or TinyLoopError)(
        failed.message if known else f"{failed.code}: {failed.message}",
        field=failed.field,
        value=failed.value,
        accepted=failed.accepted,
        request_id=failed.id,
        retry_after_s=failed.retry_after_ms / 1000,
    )


class _OnlyId(msgspec.Struct):
    id: str = ""


_ONLY_ID = msgspec.msgpack.Decoder(_OnlyId)


def salvage_id(body: bytes) -> str:
    """The `id` of a body that `decode` refused, so that the refusal reaches its request; "" if none."""
    if len(body) > MAX_BACK_BODY_BYTES:
        return ""
    try:
        id = _ONLY_ID.decode(body).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return id if valid_id(id) else ""
