"""What a message may hold: sizes and ranges. Client and dispatcher call the same `validate`, so a message
that its own client accepts is not refused for its form later. This file must not know sockets, models or
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinyloop_serve.protocol.errors import LimitExceeded, ProtocolError, bad_field
from tinyloop_serve.protocol.messages import (
    Built,
    Cancel,
    Control,
    CreateHandle,
    DropHandle,
    Generate,
    Goodbye,
    Ping,
    Ready,
    Recipe,
    RenewHandle,
    ToDispatcher,
)
from tinyloop_serve.protocol.modes import CACHE_MODES

MAX_BODY_BYTES = 4 << 20  # client <-> dispatcher; also each payload of a Step, which goes on to a client
MAX_BACK_BODY_BYTES = 64 << 20  # dispatcher <-> replica: a Run holds many prompts, a Ready a tokenizer
MAX_PAYLOADS = 1024  # lanes of one Step
MAX_FRAMES = 2 + MAX_PAYLOADS
MAX_BODIES = 256  # in one message to a client
MAX_BODIES_BYTES = 256 << 10  # of a message with more than one
MAX_ID_CHARS = 64  # also of a handle's name
MAX_PROMPT_TOKENS = 1 << 18
MAX_TOKENS = 1 << 18
MAX_LOOPS = 1024
MAX_BEAMS = 64  # as the engine
MAX_STOPS = 64  # strings, and as many token sequences
MAX_STOP_LENGTH = 256  # characters of a string, tokens of a sequence
MAX_PRIORITY = 10  # and -10 is the least
MAX_TARGET_CHARS = 256  # of an operator's order: an endpoint, a name, a fingerprint
MAX_ERROR_CHARS = 4096
IPC_PATH_BYTES = 107  # sockaddr_un.sun_path
MAX_INT = (1 << 31) - 1  # for fields that only the engine bounds


def validate(message: ToDispatcher) -> None:
    """Refuses values that no fleet would serve, with the field, the value and what is accepted.

    Raises `InvalidRequest` or `LimitExceeded`. What depends on the model, the mode matrix or the handles
    that exist is not known here.
    """
    match message:
        case Goodbye() | Cancel():  # an id that cannot be is an unknown one, and those are ignored
            return
        case Ping():
            _check_range("lease_ms", message.lease_ms, 0, MAX_INT, f"0 (none) to {MAX_INT}")
            return
    _check_id("id", message.id)
    match message:
        case Generate():
            _check_generate(message)
        case CreateHandle():
            _check_recipe(message.recipe)
            _check_range("lease_ms", message.lease_ms, 1, MAX_INT, f"1 to {MAX_INT}")
        case RenewHandle() | DropHandle():
            _check_id("handle", message.handle)
        case Control():
            _check_control(message)


def valid_id(id: str) -> bool:
    return 1 <= len(id) <= MAX_ID_CHARS and id.isprintable()


# ------------------------------------------------------------------ Generate


def _check_generate(request: Generate) -> None:
    _check_handle(request)
    for field, value_of, low, high, accepted in _RANGES:
        _check_range(field, value_of(request), low, high, accepted)
    _check_cache_mode("sampling.cache_mode", request.sampling.cache_mode)
    _check_stops("stop", request.stop, "characters")
    _check_stops("stop_tokens", request.stop_tokens, "tokens")
    for sequence in request.stop_tokens:
        if not all(0 <= token < 1 << 32 for token in sequence):
            raise bad_field("stop_tokens", sequence, "token ids of 0 to 2**32-1")
    if len(request.done) % 4:
        raise bad_field("done", f"{len(request.done)} bytes", "u32 little-endian ids: 4 bytes each")
    if len(request.model) > MAX_TARGET_CHARS or not request.model.isprintable():
        raise bad_field("model", request.model, f"a fingerprint: at most {MAX_TARGET_CHARS} characters")
    if len(request.done) > 4 * request.max_tokens:
        accepted = f"no more than max_tokens {request.max_tokens}"
        raise bad_field("done", f"{len(request.done) // 4} tokens", accepted)


def _check_handle(request: Generate) -> None:
    """The handle, its recipe, and the prompt, which depends on them."""
    recipe = request.recipe
    if not request.handle:
        if recipe is not None:
            raise bad_field("recipe", recipe.kind, "none: it needs the name of its handle in `handle`")
        _check_prompt("", request.prompt_text, request.prompt_tokens)
        return
    _check_id("handle", request.handle)
    if recipe is not None:
        _check_recipe(recipe)
    if request.prompt_text is None and request.prompt_tokens is None:
        return  # a resume handle holds the whole prompt, and a prefix may be all of it
    if recipe is not None and recipe.kind == "resume":
        field = "prompt_tokens" if request.prompt_text is None else "prompt_text"
        raise bad_field(field, "given", "none: a resume handle holds the whole prompt")
    _check_prompt("", request.prompt_text, request.prompt_tokens)


def _check_prompt(place: str, text: str | None, tokens: bytes | None) -> None:
    field = f"{place}prompt_text"
    if (text is None) == (tokens is None):
        given = "neither" if text is None else "both"
        raise bad_field(field, given, f"exactly one of {field}, {place}prompt_tokens")
    if text is not None and not text:
        raise bad_field(field, text, "at least one character")
    if tokens is None:
        return
    field = f"{place}prompt_tokens"
    if not tokens or len(tokens) % 4:
        accepted = "u32 little-endian ids: 4 bytes each, at least one"
        raise bad_field(field, f"{len(tokens)} bytes", accepted)
    if len(tokens) > 4 * MAX_PROMPT_TOKENS:
        accepted = f"at most {MAX_PROMPT_TOKENS} tokens"
        raise bad_field(field, f"{len(tokens) // 4} tokens", accepted, LimitExceeded)


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
_LOOPS = (0, MAX_LOOPS, f"0 (the model's default) to {MAX_LOOPS}")
_WINDOW = (0, MAX_INT, f"0 (whole context) to {MAX_INT}")
_RANGES: tuple[tuple[str, Callable[[Generate], float], float, float, str], ...] = (
    ("max_tokens", lambda r: r.max_tokens, 1, MAX_TOKENS, f"1 to {MAX_TOKENS}"),
    ("seed", lambda r: r.seed, 0, (1 << 64) - 1, "0 to 2**64-1"),
    ("deadline_ms", lambda r: r.deadline_ms, 0, MAX_INT, f"0 (none) to {MAX_INT}"),
    ("priority", lambda r: r.priority, -MAX_PRIORITY, MAX_PRIORITY, f"{-MAX_PRIORITY} to {MAX_PRIORITY}"),
    ("sampling.loops", lambda r: r.sampling.loops, *_LOOPS),
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
    ("sampling.cache_window", lambda r: r.sampling.cache_window, *_WINDOW),
    ("sampling.beam_size", lambda r: r.sampling.beam_size, 1, MAX_BEAMS, f"1 to {MAX_BEAMS}"),
)


# ------------------------------------------------------------------ the other messages


def _check_recipe(recipe: Recipe) -> None:
    _check_prompt("recipe.", recipe.prompt_text, recipe.prompt_tokens)
    _check_range("recipe.loops", recipe.loops, *_LOOPS)
    _check_cache_mode("recipe.cache_mode", recipe.cache_mode)
    if recipe.kind != "resume" and recipe.cache_window:
        raise bad_field("recipe.cache_window", recipe.cache_window, f"0: no window in a {recipe.kind}")
    _check_range("recipe.cache_window", recipe.cache_window, *_WINDOW)


def _check_control(order: Control) -> None:
    target = order.target
    if len(target) > MAX_TARGET_CHARS or not target.isprintable():
        raise bad_field("target", target, f"at most {MAX_TARGET_CHARS} printable characters")
    if not target and order.action != "accept":
        names = "an endpoint" if order.action == "attach" else "the name or the endpoint of a replica"
        raise bad_field("target", target, f"{names} to {order.action}")
    _check_range("within_ms", order.within_ms, 0, MAX_INT, f"0 (at once) to {MAX_INT}")


def _check_id(field: str, id: str) -> None:
    if not valid_id(id):
        raise bad_field(field, id, f"1 to {MAX_ID_CHARS} printable characters")


def _check_cache_mode(field: str, mode: str) -> None:
    if mode not in CACHE_MODES:
        raise bad_field(field, mode, f"one of {', '.join(CACHE_MODES)}")


def _check_range(field: str, value: float, low: float, high: float, accepted: str) -> None:
    if not low <= value <= high:  # NaN is in no range
        raise bad_field(field, value, accepted)


# ------------------------------------------------------------------ what a replica announces


def check_announced(message: Ready | Built) -> None:
    """Refuses numbers and names that would upset the dispatcher's books. Raises `ProtocolError`."""
    if isinstance(message, Built):
        _sane("Built.bytes", message.bytes >= 0, message.bytes)
        return
    for held in message.handles:
        build = held.build
        _sane("Ready.handles[].build.handle", valid_id(build.handle), build.handle)
        _sane("Ready.handles[].build.prompt", len(build.prompt) % 4 == 0, f"{len(build.prompt)} bytes")
        _sane("Ready.handles[].build.lease_ms", 0 <= build.lease_ms <= MAX_INT, build.lease_ms)
        _sane("Ready.handles[].bytes", held.bytes >= 0, held.bytes)
    if (budget := message.budget) is not None:
        for name in ("memory_bytes", "weight_bytes", "cache_bytes", "handle_bytes", "max_handles"):
            _sane(f"Ready.budget.{name}", getattr(budget, name) >= 0, getattr(budget, name))
        _sane("Ready.budget.window_rows", budget.window_rows >= 0, budget.window_rows)
        unpriced = [mode for mode in CACHE_MODES if mode not in budget.costs]
        _sane("Ready.budget.costs", not unpriced, f"none for {', '.join(unpriced)}")
        for mode, cost in budget.costs.items():
            least = min(cost.fixed, cost.per_loop, cost.round_to - 1)
            _sane(f"Ready.budget.costs.{mode}", least >= 0, cost)


def _sane(field: str, fine: bool, value: object) -> None:
    if not fine:
        raise ProtocolError(f"{field}: {value!r} makes no sense", field=field, value=repr(value))
