"""What a caller says and gets: prompts and options in, chunks and completions out; both clients share it.

`prepare` turns a call into a checked `Generate`, in the caller's thread, so that mistakes are raised where
they are made. This file must not know sockets or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec

from tinyloop_serve.protocol.codec import TO_DISPATCHER, tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest, bad_field
from tinyloop_serve.protocol.limits import validate
from tinyloop_serve.protocol.messages import Generate, Sampling, Stats, StopReason

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


class Chunk(msgspec.Struct, frozen=True):
    """A piece of an answer. Text may lag behind the tokens: a character or a stop string can span
    several, and the rest of the text may come alone, without tokens."""

    text: str
    tokens: tuple[int, ...]
    seq: int  # index of the first token here in the answer


class Completion(msgspec.Struct, frozen=True):
    """A whole answer."""

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
    given: dict[str, Any] = {"id": id, "stream": stream, **_prompt(prompt)}
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
    if deadline_s is not None:
        given["deadline_ms"] = _milliseconds(deadline_s)
    if sampling:
        given["sampling"] = Sampling(**sampling)
    frames = TO_DISPATCHER.encode(Generate(**given))
    request = TO_DISPATCHER.decode(frames)  # the dispatcher's own check of every field's type
    if not isinstance(request, Generate):
        raise InvalidRequest("not a Generate")
    validate(request)
    return request, frames


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt_text": prompt}
    if isinstance(prompt, bytes | bytearray | memoryview):  # a sequence of ints, but never meant as one
        raise bad_field("prompt", type(prompt).__name__, "text, or a sequence of token ids")
    return {"prompt_tokens": tokens_to_bytes(prompt, "prompt")}


def _milliseconds(deadline_s: Any) -> int:
    try:
        seconds = math.nan if isinstance(deadline_s, str) else float(deadline_s)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise bad_field("deadline_s", deadline_s, "a number of seconds above 0")
    return math.ceil(seconds * 1000)
