"""What the dispatcher refuses before the engine sees it. Catches: a cell of the mode matrix, or a feature
that the product does not offer, that goes through; a refusal that names no field."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tinyloop_serve.dispatcher import guards
from tinyloop_serve.dispatcher.config import FEATURES, Config, load
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest, LimitExceeded, ModeRefused, RequestError
from tinyloop_serve.protocol.messages import Generate, HandleKind, ModelInfo, Recipe, Sampling
from tinyloop_serve.protocol.modes import matrix

MODEL = ModelInfo("m", "f" * 32, vocab_size=100, loops=4, max_loops=8, max_seq_len=64)
PROMPT = tokens_to_bytes([1, 2, 3])


def config(**options: Any) -> Config:
    return load({"front": "ipc:///x/f", "replicas": ["ipc:///x/r"]} | options)


def asked(*, max_tokens: int = 8, method: Any = "plain", handle: str = "", **sampling: Any) -> Generate:
    request = Generate("a", prompt_tokens=PROMPT, max_tokens=max_tokens, method=method, handle=handle)
    return Generate(
        **{name: getattr(request, name) for name in request.__struct_fields__}
        | {"sampling": Sampling(**sampling)}
    )


SAMPLING_OF: dict[str, dict[str, Any]] = {"beam": {"beam_size": 2}, "cache_window": {"cache_window": 16}}


@pytest.mark.parametrize("way", ["single", "speculative", "tree_speculative", "prefix", "resume"])
@pytest.mark.parametrize("mode", [m for m in matrix() if m not in ("grammar", "exit_threshold")])
def test_every_cell_of_the_matrix_that_the_wire_can_ask_for(mode: str, way: str) -> None:
    sampling = SAMPLING_OF.get(mode, {"cache_mode": mode})
    method = way if "speculative" in way else "plain"

    def check() -> None:
        request = asked(method=method, handle="h" if way in ("prefix", "resume") else "", **sampling)
        resolved = guards.check(request, PROMPT, MODEL, config())
        if way in ("prefix", "resume"):
            kind: HandleKind = "resume" if way == "resume" else "prefix"
            held = Recipe(kind, loops=4, cache_mode=resolved.cache_mode, cache_window=resolved.cache_window)
            bare = Generate("a", sampling=resolved, handle="h")
            guards.check_handle(bare, kind, held, resolved)

    if matrix()[mode][way]:
        check()
    else:
        with pytest.raises(ModeRefused) as caught:
            check()
        assert caught.value.field.startswith("sampling.") and caught.value.accepted


@pytest.mark.parametrize(
    "request_, field",
    [
        (asked(beam_size=2), "sampling.beam_size"),
        (asked(cache_window=8), "sampling.cache_window"),
        (asked(handle="h"), "handle"),
        (asked(method="speculative"), "method"),
        (asked(method="tree_speculative"), "method"),
    ],
)
def test_features_that_the_product_does_not_offer(request_: Generate, field: str) -> None:
    guards.check(request_, PROMPT, MODEL, config())
    used = {
        "sampling.beam_size": "beam",
        "sampling.cache_window": "cache_window",
        "handle": "handles",
        "method": request_.method,
    }[field]
    others = [feature for feature in FEATURES if feature != used]
    with pytest.raises(ModeRefused, match="not offered") as caught:
        guards.check(request_, PROMPT, MODEL, config(features=others))
    assert caught.value.field == field and caught.value.accepted == ", ".join(others)


def test_a_cache_mode_that_is_not_offered() -> None:
    with pytest.raises(ModeRefused, match="not offered") as caught:
        guards.check(asked(cache_mode="int4"), PROMPT, MODEL, config(cache_modes=["fp16"]))
    assert (caught.value.field, caught.value.value) == ("sampling.cache_mode", "int4")


HELD = Recipe("resume", loops=4, cache_mode="int8", cache_window=0)


@pytest.mark.parametrize(
    "kind, sampling, request_, error, field",
    [
        ("resume", Sampling(loops=3, cache_mode="int8"), {}, InvalidRequest, "sampling.loops"),
        ("prefix", Sampling(loops=8, cache_mode="int8"), {}, InvalidRequest, "sampling.loops"),
        ("scaffold", Sampling(loops=4), {}, InvalidRequest, "sampling.cache_mode"),
        (
            "resume",
            Sampling(loops=4, cache_mode="int8", cache_window=8),
            {},
            InvalidRequest,
            "sampling.cache_window",
        ),
        (
            "resume",
            Sampling(loops=8, cache_mode="int8"),
            {"prompt_tokens": PROMPT},
            InvalidRequest,
            "prompt_text",
        ),
        ("prefix", Sampling(loops=4, cache_mode="int8"), {"method": "speculative"}, ModeRefused, "method"),
    ],
)
def test_a_handle_that_does_not_fit_the_request(
    kind: HandleKind,
    sampling: Sampling,
    request_: dict[str, Any],
    error: type[RequestError],
    field: str,
) -> None:
    with pytest.raises(error) as caught:
        guards.check_handle(Generate("a", handle="h", **request_), kind, HELD, sampling)
    assert caught.value.field == field and caught.value.accepted


def test_a_handle_that_fits() -> None:
    sampling = Sampling(loops=8, cache_mode="int8")
    guards.check_handle(Generate("a", handle="h"), "resume", HELD, sampling)


def test_what_the_engine_would_refuse_never_gets_into_a_batch() -> None:
    with pytest.raises(ModeRefused, match="does not sample") as refused:
        guards.check(asked(beam_size=2, temperature=0.5), PROMPT, MODEL, config())
    assert refused.value.field == "sampling.temperature"
    known, unknown = ((1, MODEL.vocab_size + more) for more in (-1, 0))
    guards.check(replace(asked(), stop_tokens=(known,)), PROMPT, MODEL, config())
    with pytest.raises(InvalidRequest, match="0 to 99") as caught:
        guards.check(replace(asked(), stop_tokens=(known, unknown)), PROMPT, MODEL, config())
    assert (caught.value.field, caught.value.value) == ("stop_tokens", str(unknown))


def test_limits_of_the_model() -> None:
    assert guards.check(asked(), PROMPT, MODEL, config()).loops == 4
    for request, field in ((asked(loops=9), "sampling.loops"), (asked(max_tokens=62), "max_tokens")):
        with pytest.raises(LimitExceeded) as caught:
            guards.check(request, PROMPT, MODEL, config())
        assert caught.value.field == field


def test_what_fits_exactly_is_let_in() -> None:
    for length, max_tokens in ((3, 61), (63, 1)):
        guards.check(asked(max_tokens=max_tokens), tokens_to_bytes([1] * length), MODEL, config())
        with pytest.raises(LimitExceeded) as caught:
            guards.check(asked(max_tokens=max_tokens + 1), tokens_to_bytes([1] * length), MODEL, config())
        assert (caught.value.field, caught.value.accepted) == ("max_tokens", f"1 to {max_tokens}")
    with pytest.raises(LimitExceeded) as caught:
        guards.check(asked(max_tokens=1), tokens_to_bytes([1] * 64), MODEL, config())
    assert (caught.value.field, caught.value.accepted) == ("prompt_tokens", "at most 63 tokens")
    assert guards.check(asked(loops=MODEL.max_loops), PROMPT, MODEL, config()).loops == MODEL.max_loops
    known, unknown = (tokens_to_bytes([MODEL.vocab_size + more]) for more in (-1, 0))
    guards.check(replace(asked(), done=known), known, MODEL, config())
    with pytest.raises(InvalidRequest) as refused:
        guards.check(replace(asked(), done=unknown), known, MODEL, config())
    assert refused.value.field == "done[0]"
    same = Sampling(loops=HELD.loops, cache_mode="int8")
    guards.check_handle(Generate("a", handle="h"), "resume", HELD, same)
