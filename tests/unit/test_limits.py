"""Every range of a request, at its edges: the last value that is accepted and the first that is not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tinyloop_serve.protocol import errors, limits, messages
from tinyloop_serve.protocol.calls import Options
from tinyloop_serve.protocol.messages import Generate, Sampling

GOOD = Generate(id="a", prompt_text="x")
PREFIX = messages.Recipe("prefix", prompt_text="x")
RESUME = messages.Recipe("resume", prompt_text="x", cache_window=8)
HANDLE = messages.CreateHandle("a", PREFIX)
ORDER = messages.Control("a", "drain", "r0")
replace = msgspec.structs.replace
NUMBERS = [
    # field, accepted, refused
    ("max_tokens", [1, limits.MAX_TOKENS], [0, -1, limits.MAX_TOKENS + 1]),
    ("seed", [0, 2**64 - 1], [-1, 2**64]),
    ("deadline_ms", [0, 2**31 - 1], [-1, 2**31]),
    ("priority", [-10, 0, 10], [-11, 11]),
    ("handle", ["", "a", "x" * 64], ["x" * 65, "a\0"]),
    ("sampling.loops", [0, limits.MAX_LOOPS], [-1, limits.MAX_LOOPS + 1]),
    ("sampling.temperature", [0.0, 1, 100.0], [-0.1, 100.1]),
    ("sampling.top_k", [0, 2**31 - 1], [-1, 2**31]),
    ("sampling.top_p", [2.0**-126, 0.5, 1.0], [0.0, 1e-300, -1.0, 1.1]),
    ("sampling.min_p", [0.0, 1.0], [-0.1, 1.1]),
    ("sampling.repetition_penalty", [2.0**-126, 1.0, 100.0], [0.0, -1.0, 100.1]),
    ("sampling.cache_window", [0, 2**31 - 1], [-1, 2**31]),
    ("sampling.beam_size", [1, limits.MAX_BEAMS], [0, -1, limits.MAX_BEAMS + 1]),
    ("sampling.cache_mode", list(limits.CACHE_MODES), ["", "fp8", "FP16"]),
    ("id", ["a", "x" * 64, "grüße 1"], ["", "x" * 65, "a\0", "a\n", "\ud800"]),
]
OTHERS = [
    ("prompt_text", {"prompt_text": None}),
    ("prompt_text", {"prompt_text": "x", "prompt_tokens": b"\0\0\0\0"}),
    ("prompt_text", {"prompt_text": ""}),
    ("prompt_tokens", {"prompt_text": None, "prompt_tokens": b""}),
    ("prompt_tokens", {"prompt_text": None, "prompt_tokens": b"\0\0\0"}),
    ("stop", {"stop": ("a", "")}),
    ("stop_tokens", {"stop_tokens": ((),)}),
    ("stop_tokens", {"stop_tokens": ((1, -1),)}),
    ("stop_tokens", {"stop_tokens": ((2**32,),)}),
    ("done", {"done": b"\0\0\0"}),
    ("done", {"done": bytes(12), "max_tokens": 2}),
    ("recipe", {"recipe": PREFIX}),
    ("prompt_text", {"handle": "h", "prompt_tokens": b"\0\0\0\0"}),
    ("prompt_text", {"handle": "h", "prompt_text": ""}),
    ("prompt_text", {"handle": "h", "recipe": RESUME}),
    ("prompt_tokens", {"handle": "h", "recipe": RESUME, "prompt_text": None, "prompt_tokens": bytes(4)}),
    ("recipe.prompt_text", {"handle": "h", "recipe": replace(PREFIX, prompt_text=None)}),
    ("recipe.prompt_text", {"handle": "h", "recipe": replace(PREFIX, prompt_tokens=bytes(4))}),
]
HANDLES = [
    ("id", {"id": ""}),
    ("lease_ms", {"lease_ms": 0}),
    ("lease_ms", {"lease_ms": 2**31}),
    ("recipe.prompt_text", {"recipe": replace(PREFIX, prompt_text="")}),
    ("recipe.prompt_tokens", {"recipe": replace(PREFIX, prompt_text=None, prompt_tokens=b"\0")}),
    ("recipe.loops", {"recipe": replace(PREFIX, loops=-1)}),
    ("recipe.loops", {"recipe": replace(PREFIX, loops=limits.MAX_LOOPS + 1)}),
    ("recipe.cache_mode", {"recipe": replace(PREFIX, cache_mode="fp8")}),
    ("recipe.cache_window", {"recipe": replace(PREFIX, cache_window=1)}),
    ("recipe.cache_window", {"recipe": replace(RESUME, cache_window=-1)}),
    ("recipe.cache_window", {"recipe": replace(RESUME, cache_window=2**31)}),
]
ORDERS = [
    ("id", {"id": "a\n"}),
    ("target", {"target": ""}),
    ("target", {"action": "attach", "target": ""}),
    ("target", {"target": "x" * 257}),
    ("target", {"target": "a\x1b"}),
    ("within_ms", {"within_ms": -1}),
    ("within_ms", {"within_ms": 2**31}),
]
TOO_MUCH = [
    ("prompt_tokens", {"prompt_text": None, "prompt_tokens": bytes(4 * limits.MAX_PROMPT_TOKENS + 4)}),
    ("stop", {"stop": ("x",) * (limits.MAX_STOPS + 1)}),
    ("stop", {"stop": ("x" * (limits.MAX_STOP_LENGTH + 1),)}),
    ("stop_tokens", {"stop_tokens": ((1,),) * (limits.MAX_STOPS + 1)}),
    ("stop_tokens", {"stop_tokens": ((1,) * (limits.MAX_STOP_LENGTH + 1),)}),
]


def request(field: str, value: Any) -> Generate:
    group, _, name = field.rpartition(".")
    if group:
        return msgspec.structs.replace(GOOD, sampling=Sampling(**{name: value}))
    return msgspec.structs.replace(GOOD, **{name: value})


@pytest.mark.parametrize(("field", "accepted", "refused"), NUMBERS, ids=[row[0] for row in NUMBERS])
def test_edges(field: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        limits.validate(request(field, value))
    if isinstance(accepted[0], float):
        refused = [*refused, math.nan, math.inf, -math.inf]
    for value in refused:
        with pytest.raises(errors.InvalidRequest) as caught:
            limits.validate(request(field, value))
        error = caught.value
        assert (
            error.field == field
            and error.accepted
            and error.value == repr(value)[:77] + "..." * (len(repr(value)) > 80)
        )
        assert all(part in error.message for part in (field, error.value, error.accepted))


@pytest.mark.parametrize(("field", "change"), OTHERS)
def test_prompts_and_stops(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        limits.validate(msgspec.structs.replace(GOOD, **change))
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "change"), TOO_MUCH)
def test_too_much_is_a_limit(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(errors.LimitExceeded, match="at most") as caught:
        limits.validate(msgspec.structs.replace(GOOD, **change))
    assert caught.value.field == field


def test_as_much_as_allowed_is_accepted() -> None:
    stops = ("x" * limits.MAX_STOP_LENGTH,) * limits.MAX_STOPS
    sequences = ((2**32 - 1,) * limits.MAX_STOP_LENGTH,) * limits.MAX_STOPS
    prompt = bytes(4 * limits.MAX_PROMPT_TOKENS)
    limits.validate(Generate(id="a", prompt_tokens=prompt, stop=stops, stop_tokens=sequences))


GOOD_USES: list[messages.ToDispatcher] = [
    replace(GOOD, handle="h"),
    replace(GOOD, handle="h", recipe=PREFIX),
    Generate(id="a", handle="h"),  # all of the prompt is in the handle
    Generate(id="a", handle="h", recipe=RESUME),
    replace(GOOD, max_tokens=2, done=bytes(8)),  # only its end is missing
    HANDLE,
    replace(HANDLE, recipe=RESUME, lease_ms=1, shared=True, detached=True),
    messages.RenewHandle("a", "h"),
    messages.DropHandle("a", "h"),
    messages.ListHandles("a"),
    messages.GetStatus("a"),
    ORDER,
    replace(ORDER, action="accept", target="", within_ms=0),
    messages.Ping(1, 2**31 - 1),
    messages.Cancel("\n an id that never was"),
    messages.Goodbye(),
]


@pytest.mark.parametrize("message", GOOD_USES, ids=lambda message: type(message).__name__)
def test_good_messages(message: messages.ToDispatcher) -> None:
    limits.validate(message)


@pytest.mark.parametrize(
    ("good", "field", "change"),
    [(HANDLE, *case) for case in HANDLES]
    + [(ORDER, *case) for case in ORDERS]
    + [
        (messages.RenewHandle("a", "h"), "handle", {"handle": ""}),
        (messages.DropHandle("a", "h"), "handle", {"handle": "x" * 65}),
        (messages.DropHandle("a", "h"), "id", {"id": ""}),
        (messages.ListHandles("a"), "id", {"id": ""}),
        (messages.GetStatus("a"), "id", {"id": "x" * 65}),
        (messages.Ping(1), "lease_ms", {"lease_ms": -1}),
    ],
)
def test_the_other_messages_name_the_field_too(good: Any, field: str, change: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        limits.validate(replace(good, **change))
    assert caught.value.field == field and caught.value.accepted


MODEL = messages.ModelInfo("m", "ab", 9, 4, 8, 64)
COSTS = dict.fromkeys(limits.CACHE_MODES, messages.CacheCost(1, 2))
BUDGET = messages.Budget(9, 8, 7, 6, 5, COSTS)
BUILD = messages.Build("h", "prefix", bytes(4), 4)
READY = messages.Ready("r", 1, "cpu", MODEL, budget=BUDGET, handles=(messages.HeldHandle(BUILD, 9),))


@pytest.mark.parametrize(
    "announced",
    [
        messages.Built("h", -1),
        *(
            replace(READY, budget=replace(BUDGET, **{name: -1}))
            for name in ("memory_bytes", "weight_bytes", "cache_bytes", "handle_bytes", "max_handles")
        ),
        replace(READY, budget=replace(BUDGET, window_rows=-1)),
        replace(READY, budget=replace(BUDGET, costs=COSTS | {"fp16": messages.CacheCost(1, -1)})),
        replace(READY, budget=replace(BUDGET, costs=COSTS | {"fp16": messages.CacheCost(1, 1, 0)})),
        replace(READY, budget=replace(BUDGET, costs={"fp16": messages.CacheCost(1, 2)})),
        replace(READY, handles=(messages.HeldHandle(BUILD, -1),)),
        replace(READY, handles=(messages.HeldHandle(replace(BUILD, handle="")),)),
        replace(READY, handles=(messages.HeldHandle(replace(BUILD, prompt=bytes(3))),)),
        replace(READY, handles=(messages.HeldHandle(replace(BUILD, lease_ms=-1)),)),
    ],
)
def test_an_announcement_that_makes_no_sense_is_a_protocol_error(announced: Any) -> None:
    limits.check_announced(READY)
    with pytest.raises(errors.ProtocolError, match="makes no sense") as caught:
        limits.check_announced(announced)
    assert caught.value.field


def test_every_field_of_the_contract_is_bounded_and_has_an_option() -> None:
    bounded = {field.rpartition(".")[2] for field, _, _ in NUMBERS}
    others = {"prompt_text", "prompt_tokens", "stop", "stop_tokens", "ignore_eos", "stream", "sampling"}
    others |= {"method", "recipe", "done", "model"}
    assert bounded | others == set(Generate.__struct_fields__) | set(Sampling.__struct_fields__)
    internal = {"id", "stream", "sampling", "prompt_text", "prompt_tokens", "deadline_ms", "recipe"}
    internal |= {"done", "model"}
    assert set(Options.__annotations__) == (bounded | others) - internal | {"deadline_s", "rebuild"}
