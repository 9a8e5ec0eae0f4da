"""What a caller says and gets: prompts and options in, chunks and completions out; both clients share it.

The `prepare` functions turn a call into a checked message, in the caller's thread, so that mistakes are
raised where they are made. This file must not know sockets or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar

import msgspec

from tinyloop_serve.protocol.codec import TO_DISPATCHER, tokens_to_bytes
from tinyloop_serve.protocol.errors import bad_field
from tinyloop_serve.protocol.handles import Handle
from tinyloop_serve.protocol.limits import validate
from tinyloop_serve.protocol.messages import (
    Control,
    CreateHandle,
    Generate,
    HandleKind,
    Method,
    Recipe,
    Sampling,
    Stats,
    StopReason,
    ToDispatcher,
)

Prompt = str | Sequence[int]
"""Text, or token ids (a list, a tuple, an integer array)."""


class Options(TypedDict, total=False):
    """Keywords of `generate`, `stream` and `batch`; what is left out has the default of
    `messages.Generate`."""

    loops: int  # core iterations per token; 0 = the model's own default
    max_tokens: int
    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]  # the text ends before the first that appears
    stop_tokens: Sequence[Sequence[int]]
    ignore_eos: bool
    cache_mode: str
    cache_window: int
    beam_size: int
    deadline_s: float | None  # the answer must be complete this many seconds after it was asked for
    priority: int  # -10 to 10, among this tenant's own requests; higher first
    method: Method  # "speculative": the same tokens, faster where that was measured to pay
    handle: Handle | str  # go on from it; loops and cache_mode are then its own unless given
    rebuild: bool  # a lost `Handle` is built again (True), or the request fails with HandleLost


class HandleOptions(TypedDict, total=False):
    """Keywords of `create_prefix`, `create_scaffold` and `create_resume`."""

    loops: int  # 0 = the model's own default
    cache_mode: str
    cache_window: int  # `create_resume` only
    shared: bool  # other tenants may use it too
    detached: bool  # it outlives this connection, for its lease
    lease_s: float  # of neither use nor renewal, after which it goes; default 600


class Chunk(msgspec.Struct, frozen=True):
    """A piece of an answer. Text may lag behind the tokens: a character or a stop string can span
    several, and the rest of the text may come alone, without tokens."""

    text: str
    tokens: tuple[int, ...]
    seq: int  # index of the first token here in the answer


class Completion(msgspec.Struct, frozen=True):
    """A whole answer. `stats.failovers`: the replicas and dispatchers that were lost under it."""

    text: str
    tokens: tuple[int, ...]
    stop_reason: StopReason
    stats: Stats


def prepare(
    id: str, prompt: Prompt, options: Options, *, stream: bool, timeout_s: float | None
) -> tuple[Generate, list[bytes]]:
    """The request and its frames. `timeout_s` is the deadline of calls that name none.

    Raises `InvalidRequest` or `LimitExceeded`; TypeError for an unknown option, as Python does for a keyword.
    """
    given: dict[str, Any] = {"id": id, "stream": stream}
    sampling: dict[str, Any] = {}
    deadline_s = timeout_s
    for name, value in options.items():
        if name == "deadline_s":
            deadline_s = timeout_s if value is None else value  # type: ignore[assignment]
        elif name == "stop":
            given[name] = (value,) if isinstance(value, str) else value
        elif name in Sampling.__struct_fields__:
            sampling[name] = value
        elif name in Options.__annotations__:
            given[name] = value
        else:
            raise TypeError(f"unknown option {name!r}; known: {', '.join(Options.__annotations__)}")
    _use_handle(given, sampling)
    if "handle" not in given or _length(prompt):
        given |= _prompt(prompt)
    if deadline_s is not None:
        given["deadline_ms"] = milliseconds("deadline_s", deadline_s)
    if sampling:
        given["sampling"] = Sampling(**sampling)
    return checked(Generate(**given))


def prepare_handle(id: str, kind: HandleKind, prompt: Prompt, options: HandleOptions) -> CreateHandle:
    """The order for a handle, for `checked`. Raises `InvalidRequest`, or TypeError for an unknown option."""
    made: dict[str, Any] = {"kind": kind, **_prompt(prompt)}
    given: dict[str, Any] = {"id": id}
    for name, value in options.items():
        if name == "lease_s":
            given["lease_ms"] = milliseconds(name, value)
        elif name not in HandleOptions.__annotations__:
            raise TypeError(f"unknown option {name!r}; known: {', '.join(HandleOptions.__annotations__)}")
        elif name in Recipe.__struct_fields__:
            made[name] = value
        else:
            given[name] = value
    return CreateHandle(recipe=Recipe(**made), **given)


def draft_options(options: Options) -> HandleOptions:
    """Of a draft's options, those that its resume handle shares."""
    shared: HandleOptions = {}
    if "loops" in options:
        shared["loops"] = options["loops"]
    if "cache_mode" in options:
        shared["cache_mode"] = options["cache_mode"]
    if "cache_window" in options:
        shared["cache_window"] = options["cache_window"]
    return shared


def drafted(handle: Handle, options: Options, more: Options | None = None) -> Options:
    """The options of a draft's answers: its own, those of a refinement over them, and its handle."""
    merged = options.copy()
    merged.update(more or {})
    merged["handle"] = handle
    return merged


def prepare_control(id: str, action: Any, target: str, within_s: float) -> Control:
    """An operator's order, for `checked`. Raises `InvalidRequest`."""
    within_ms = 0 if within_s == 0 else milliseconds("within_s", within_s)
    return Control(id, action, target, within_ms)


M = TypeVar("M", bound=ToDispatcher)


def checked(message: M) -> tuple[M, list[bytes]]:
    """`message` as the dispatcher will see it, and its frames. Raises `InvalidRequest` or `LimitExceeded`."""
    frames = TO_DISPATCHER.encode(message)
    seen = TO_DISPATCHER.decode(frames)  # the dispatcher's own check of every field's type
    validate(seen)
    assert isinstance(seen, type(message))
    return seen, frames


def milliseconds(field: str, given_s: Any) -> int:
    """Raises `InvalidRequest` naming `field` for what is not a number of seconds above 0."""
    try:
        seconds = math.nan if isinstance(given_s, str) else float(given_s)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise bad_field(field, given_s, "a number of seconds above 0")
    return math.ceil(seconds * 1000)


def _use_handle(given: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Turns `handle` and `rebuild` into the message's fields; the handle's shape is the default."""
    handle, rebuild = given.pop("handle", None), given.pop("rebuild", True)
    if handle is None:
        return
    if not isinstance(handle, Handle):
        given["handle"] = handle
        return
    given["handle"] = handle.name
    if rebuild:
        given["recipe"] = handle.recipe
    for name in ("loops", "cache_mode", "cache_window"):
        sampling.setdefault(name, getattr(handle.info, name))


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt_text": prompt}
    if isinstance(prompt, bytes | bytearray | memoryview):  # a sequence of ints, but never meant as one
        raise bad_field("prompt", type(prompt).__name__, "text, or a sequence of token ids")
    return {"prompt_tokens": tokens_to_bytes(prompt, "prompt")}


def _length(prompt: Prompt) -> int:
    try:
        return len(prompt)
    except TypeError:
        raise bad_field("prompt", prompt, "text, or a sequence of token ids") from None
