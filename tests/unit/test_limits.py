"""Every range of a request, at its edges: the last value that is accepted and the first that is not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tinyloop_serve.protocol import errors, limits
from tinyloop_serve.protocol.calls import Options
from tinyloop_serve.protocol.messages import Generate, Sampling

GOOD = Generate(id="a", prompt_text="x")
NUMBERS = [
    # field, accepted, refused
    ("max_tokens", [1, limits.MAX_TOKENS], [0, -1, limits.MAX_TOKENS + 1]),
    ("seed", [0, 2**64 - 1], [-1, 2**64]),
    ("deadline_ms", [0, 2**31 - 1], [-1, 2**31]),
    ("sampling.loops", [0, limits.MAX_LOOPS], [-1, limits.MAX_LOOPS + 1]),
    ("sampling.temperature", [0.0, 1, 100.0], [-0.1, 100.1]),
    ("sampling.top_k", [0, 2**31 - 1], [-1, 2**31]),
    ("sampling.top_p", [2.0**-126, 0.5, 1.0], [0.0, 1e-300, -1.0, 1.1]),
    ("sampling.min_p", [0.0, 1.0], [-0.1, 1.1]),
    ("sampling.repetition_penalty", [2.0**-126, 1.0, 100.0], [0.0, -1.0, 100.1]),
    ("sampling.cache_window", [0, 2**31 - 1], [-1, 2**31]),
    ("sampling.beam_size", [1, limits.MAX_PAYLOADS], [0, -1, limits.MAX_PAYLOADS + 1]),
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


def test_every_field_of_the_contract_is_bounded_and_has_an_option() -> None:
    bounded = {field.rpartition(".")[2] for field, _, _ in NUMBERS}
    others = {"prompt_text", "prompt_tokens", "stop", "stop_tokens", "ignore_eos", "stream", "sampling"}
    assert bounded | others == set(Generate.__struct_fields__) | set(Sampling.__struct_fields__)
    internal = {"id", "stream", "sampling", "prompt_text", "prompt_tokens", "deadline_ms"}
    assert set(Options.__annotations__) == (bounded | others) - internal | {"deadline_s"}
