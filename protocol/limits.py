"""What a message may hold: sizes and ranges. Client and dispatcher call the same `validate`, so a request
that its own client accepts is not refused for its form later. This file must not know sockets, models or
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinyloop_serve.protocol.errors import LimitExceeded, bad_field
from tinyloop_serve.protocol.messages import Generate
from tinyloop_serve.protocol.modes import CACHE_MODES

MAX_BODY_BYTES = 4 << 20  # client <-> dispatcher; also each payload of a Step, which goes on to a client
MAX_BACK_BODY_BYTES = 64 << 20  # dispatcher <-> replica: a Run holds many prompts, a Ready a tokenizer
MAX_PAYLOADS = 1024  # lanes of one Step
MAX_FRAMES = 2 + MAX_PAYLOADS
MAX_ID_CHARS = 64
MAX_PROMPT_TOKENS = 1 << 18
MAX_TOKENS = 1 << 18
MAX_LOOPS = 1024
MAX_STOPS = 64  # strings, and as many token sequences
MAX_STOP_LENGTH = 256  # characters of a string, tokens of a sequence
MAX_ERROR_CHARS = 4096
MAX_INT = (1 << 31) - 1  # for fields that only the engine bounds


def validate(request: Generate) -> None:
    """Refuses values that no fleet would serve, with the field, the value and what is accepted.

    Raises `InvalidRequest` or `LimitExceeded`. What depends on the model or the mode matrix is not
    known here.
    """
    if not valid_id(request.id):
        raise bad_field("id", request.id, f"1 to {MAX_ID_CHARS} printable characters")
    _check_prompt(request)
    for field, value_of, low, high, accepted in _RANGES:
        value = value_of(request)
        if not low <= value <= high:  # NaN is in no range
            raise bad_field(field, value, accepted)
    if request.sampling.cache_mode not in CACHE_MODES:
        raise bad_field(
            "sampling.cache_mode", request.sampling.cache_mode, f"one of {', '.join(CACHE_MODES)}"
        )
    _check_stops("stop", request.stop, "characters")
    _check_stops("stop_tokens", request.stop_tokens, "tokens")
    for sequence in request.stop_tokens:
        if not all(0 <= token < 1 << 32 for token in sequence):
            raise bad_field("stop_tokens", sequence, "token ids of 0 to 2**32-1")


def valid_id(id: str) -> bool:
    return 1 <= len(id) <= MAX_ID_CHARS and id.isprintable()


def _check_prompt(request: Generate) -> None:
    text, tokens = request.prompt_text, request.prompt_tokens
    if (text is None) == (tokens is None):
        given = "neither" if text is None else "both"
        raise bad_field("prompt_text", given, "exactly one of prompt_text, prompt_tokens")
    if text is not None and not text:
        raise bad_field("prompt_text", text, "at least one character")
    if tokens is not None and (not tokens or len(tokens) % 4):
        raise bad_field(
            "prompt_tokens", f"{len(tokens)} bytes", "u32 little-endian ids: 4 bytes each, at least one"
        )
    if tokens is not None and len(tokens) > 4 * MAX_PROMPT_TOKENS:
        raise bad_field(
            "prompt_tokens",
            f"{len(tokens) // 4} tokens",
            f"at most {MAX_PROMPT_TOKENS} tokens",
            LimitExceeded,
        )


def _check_stops(field: str, stops: Sequence[Sequence[object]], unit: str) -> None:
    if len(stops) > MAX_STOPS:
        raise bad_field(field, f"{len(stops)} entries", f"at most {MAX_STOPS}", LimitExceeded)
    for stop in stops:
        if not stop:
            raise bad_field(field, stop, f"entries of at least one of its {unit}")
        if len(stop) > MAX_STOP_LENGTH:
            raise bad_field(
                field, f"{len(stop)} {unit}", f"entries of at most {MAX_STOP_LENGTH} {unit}", LimitExceeded
            )


_ABOVE_0 = 2.0**-126  # the least normal float32, which is what engines compute in
_RANGES: tuple[tuple[str, Callable[[Generate], float], float, float, str], ...] = (
    ("max_tokens", lambda r: r.max_tokens, 1, MAX_TOKENS, f"1 to {MAX_TOKENS}"),
    ("seed", lambda r: r.seed, 0, (1 << 64) - 1, "0 to 2**64-1"),
    ("deadline_ms", lambda r: r.deadline_ms, 0, MAX_INT, f"0 (none) to {MAX_INT}"),
    ("sampling.loops", lambda r: r.sampling.loops, 0, MAX_LOOPS, f"0 (the model's default) to {MAX_LOOPS}"),
    ("sampling.temperature", lambda r: r.sampling.temperature, 0.0, 100.0, "0 (greedy) to 100"),
    ("sampling.top_k", lambda r: r.sampling.top_k, 0, MAX_INT, f"0 (off) to {MAX_INT}"),
    ("sampling.top_p", lambda r: r.sampling.top_p, _ABOVE_0, 1.0, "above 0, up to 1 (off)"),
    ("sampling.min_p", lambda r: r.sampling.min_p, 0.0, 1.0, "0 (off) to 1"),
    (
        "sampling.repetition_penalty",
        lambda r: r.sampling.repetition_penalty,
        _ABOVE_0,
        100.0,
        "above 0, up to 100; 1 is off",
    ),
    (
        "sampling.cache_window",
        lambda r: r.sampling.cache_window,
        0,
        MAX_INT,
        f"0 (whole context) to {MAX_INT}",
    ),
    ("sampling.beam_size", lambda r: r.sampling.beam_size, 1, MAX_PAYLOADS, f"1 to {MAX_PAYLOADS}"),
)
