"""The mode matrix, cell by cell: what is supported runs and equals its plain equivalent in every token; what
is refused is refused before any work, naming both modes. `-s` prints the matrix that was proved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.native import models, reference
from tests.native.device import sized
from tinyloop_serve.native import (
    GenerateConfig,
    ModeError,
    Model,
    PrefixPool,
    SpeculativeConfig,
    artifact,
)
from tinyloop_serve.protocol import modes

PROMPT = [(7 * k * k + 3 * k + 5) % 61 for k in range(30)]
LOOPS, DRAFT = 6, 2
MAX_TOKENS = sized(24, 8)
SPECULATIVE = SpeculativeConfig(draft_loops=DRAFT, draft_ahead=4, branches=2)


class EveryOtherToken:
    """A grammar that allows only even token ids, the end (0) included."""

    vocab_size = 61

    def start(self) -> EveryOtherToken:
        return self

    def allowed(self, words: memoryview) -> None:
        view = words.cast("B").cast("I")
        for word in range(len(view)):
            view[word] = 0x55555555

    def accept(self, token: int) -> None:
        assert token % 2 == 0

    def finished(self) -> bool:
        return False


FIELDS: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": EveryOtherToken()},
    "cache_window": {"cache_window": 11},
    "beam": {"beam_size": 3},
    "exit_threshold": {"exit_threshold": 0.4},
} | {mode: {"cache_mode": mode} for mode in modes.CACHE_MODES}
NAME_OF_FIELD = {"beam": "beam_size"} | {mode: "cache_mode" for mode in modes.CACHE_MODES}


@pytest.fixture(scope="module", params=["everything", "post", "llama", "everything int8", "huginn int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("modes") / "model.tinyloop"
    name, _, weights = request.param.partition(" ")
    config = models.FAMILY[name]
    artifact.write(path, config, reference.random_model(config, seed=4, dtype="fp16"))
    with Model(path, prefill_chunk=16, threads=2, weights=weights or "auto") as model:
        yield model


def run(model: Model, column: str, config: GenerateConfig, row: dict[str, Any]) -> list[int]:
    """The prompt's answer, generated in the way of the column."""
    mode = row.get("cache_mode", "fp16")
    match column:
        case "single":
            return model.generate(PROMPT, config).tokens
        case "batch":
            return model.generate_batch([PROMPT[:7], PROMPT, PROMPT[3:]], config)[1].tokens
        case "speculative":
            found = model.generate_speculative(PROMPT, SPECULATIVE, config)
            assert found.stats.drafted > 0
            return found.tokens
        case "tree_speculative":
            found = model.generate_tree_speculative(PROMPT, SPECULATIVE, config)
            assert found.stats.drafted > 0
            return found.tokens
        case "prefix":
            prefix = model.create_prefix_cache(PROMPT[:17], LOOPS, mode, row.get("exit_threshold", 0.0))
            found = model.generate_from_prefix_cache(prefix, PROMPT[17:], config)
            assert found.stats.prefix_tokens == 17
            return found.tokens
        case "resume":
            handle = model.create_resume_handle(PROMPT, DRAFT, mode, row.get("cache_window", 0))
            first = model.resume_generate(handle, LOOPS, config).tokens
            assert model.resume_generate(handle, LOOPS, config).tokens == first  # the handle is unchanged
            return first
    raise AssertionError(column)


@pytest.mark.parametrize("column", ["single", "batch", "speculative", "tree_speculative", "prefix", "resume"])
@pytest.mark.parametrize("row", FIELDS)
def test_the_matrix(model: Model, row: str, column: str) -> None:
    fields = FIELDS[row]
    temperatures = (0.0,) if row == "beam" else (0.0, 0.9)
    for temperature in temperatures:
        config = GenerateConfig(
            loops=LOOPS, max_tokens=MAX_TOKENS, temperature=temperature, seed=3, ignore_eos=True, **fields
        )
        if modes.supported(row, column):
            assert run(model, column, config, fields) == model.generate(PROMPT, config).tokens
            continue
        before = model.step_counter
        build = {} if column in ("prefix", "resume") else fields  # the handle itself is a legal one
        with pytest.raises(ModeError) as refused:
            run(model, column, config, build)
        assert refused.value.field == NAME_OF_FIELD.get(row, row)
        assert row in str(refused.value) and column in str(refused.value)
        if column not in ("prefix", "resume"):
            assert model.step_counter == before


def test_the_data_covers_every_mode_and_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(modes.matrix()) == set(FIELDS)
    with capsys.disabled():
        print("\n" + modes.markdown())


def test_a_grammar_is_obeyed(model: Model) -> None:
    config = GenerateConfig(
        max_tokens=30, temperature=1.5, seed=1, ignore_eos=True, grammar=EveryOtherToken()
    )
    found = model.generate(PROMPT, config)
    assert len(found.tokens) == 30 and all(token % 2 == 0 for token in found.tokens)
    assert found.stats.grammar_ms > 0
    free = GenerateConfig(max_tokens=30, temperature=1.5, seed=1, ignore_eos=True)
    lanes = model.generate_batch([PROMPT, PROMPT], [config, free])
    assert [lane.tokens for lane in lanes] == [found.tokens, model.generate(PROMPT, free).tokens]


def test_a_window_forgets_what_is_outside_it_far_past_the_wrap(model: Model) -> None:
    """Two prompts that agree only in their last tokens: with enough layers a window's reach is layers x
    window, so the test compares prompts that agree over that reach."""
    config = GenerateConfig(loops=1, max_tokens=12, cache_window=4, ignore_eos=True)
    layers = model.config["n_prelude"] + model.config["n_core"] + model.config["n_coda"]
    tail = [(5 * k + 1) % 61 for k in range(4 * layers + 1)]
    long = [(k * k) % 61 for k in range(200)] + tail
    other = [(k * k + 7) % 61 for k in range(200)] + tail
    assert model.generate(long, config).tokens == model.generate(other, config).tokens
    whole = GenerateConfig(loops=1, max_tokens=12, cache_window=240, ignore_eos=True)
    unbounded = GenerateConfig(loops=1, max_tokens=12, ignore_eos=True)
    assert model.generate(long, whole).tokens == model.generate(long, unbounded).tokens


def test_the_ring_is_smaller_and_its_bits_do_not_depend_on_its_size(model: Model) -> None:
    assert model.cache_bytes(400, cache_window=16) < model.cache_bytes(400) / 5


def test_pool_prefers_the_longest_prefix_evicts_by_use_and_misses_cleanly(model: Model) -> None:
    config = GenerateConfig(loops=3, max_tokens=8, temperature=0.7, seed=2, ignore_eos=True)
    expected = model.generate(PROMPT, config).tokens
    pool = PrefixPool(2)

    def reused() -> int:
        found = model.generate_with_pool(pool, PROMPT, config)
        assert found.tokens == expected
        return found.stats.prefix_tokens

    assert reused() == 0  # empty
    pool.register_prefix(model, PROMPT[:5], 3)
    assert reused() == 5
    pool.register_prefix(model, PROMPT[:20], 3)
    assert reused() == 20
    pool.register_prefix(model, PROMPT[:5], 2)  # other loops: no match; evicts the least recently used
    assert len(pool) == 2 and reused() == 20
    pool.register_prefix(model, [1, 2, 3], 3)
    assert len(pool) == 2 and reused() == 20  # used last, so it stays
    pool.register_prefix(model, PROMPT[:20], 3)  # again: refreshed, not doubled
    assert len(pool) == 2
    pool.register_prefix(model, PROMPT, 3)
    assert reused() == len(PROMPT) - 1  # the whole prompt: its last token's logits are still needed
    assert pool.bytes > 0


def test_resume_at_any_loops_from_one_handle(model: Model) -> None:
    handle = model.create_resume_handle(PROMPT, 3)
    assert handle.loops_used == 3 and handle.bytes > 0
    for loops in (3, 4, 9, 16):
        config = GenerateConfig(loops=loops, max_tokens=10, temperature=0.8, seed=6, ignore_eos=True)
        found = model.resume_generate(handle, loops, config)
        assert found.tokens == model.generate(PROMPT, config).tokens
        assert found.stats.loops_skipped == 3 and found.stats.loops == loops
    with pytest.raises(ModeError, match="loops"):
        model.resume_generate(handle, 2, GenerateConfig())


def test_speculation_runs_no_loop_twice(model: Model) -> None:
    """Accepted drafts cost draft loops once and the remaining loops once: with all drafts accepted, the layer
    visits are those of plain decoding, in fewer passes."""
    config = GenerateConfig(loops=LOOPS, max_tokens=16, ignore_eos=True)
    full = SpeculativeConfig(draft_loops=LOOPS, draft_ahead=4)  # drafts at full depth: all are accepted
    found = model.generate_speculative(PROMPT, full, config)
    assert found.tokens == model.generate(PROMPT, config).tokens
    assert found.stats.accepted == found.stats.drafted > 0


def test_beams_rank_by_penalised_log_probability(model: Model) -> None:
    greedy = model.generate(PROMPT, GenerateConfig(max_tokens=6, ignore_eos=True)).tokens
    found = model.generate(PROMPT, GenerateConfig(max_tokens=6, beam_size=4, ignore_eos=True))
    scores = [score for _, score in found.beams]
    assert len(found.beams) == 4 and scores == sorted(scores, reverse=True)
    assert found.tokens == found.beams[0][0]

    def score(tokens: list[int]) -> float:
        logits = model.logits(PROMPT + tokens).astype("float64")[len(PROMPT) - 1 : -1]
        peak = logits.max(axis=1, keepdims=True)
        logprobs = logits - peak - np.log(np.exp(logits - peak).sum(1, keepdims=True))
        return float(sum(logprobs[i, token] for i, token in enumerate(tokens)) / len(tokens))

    for tokens, claimed in found.beams:
        assert abs(score(tokens) - claimed) < 1e-4
    assert score(found.tokens) >= score(greedy) - 1e-6
    assert model.generate(PROMPT, GenerateConfig(max_tokens=6, beam_size=1, ignore_eos=True)).tokens == greedy


def test_adaptive_depth_saves_loops_and_says_how_many(model: Model) -> None:
    def at(threshold: float) -> Any:
        config = GenerateConfig(loops=16, max_tokens=20, exit_threshold=threshold, ignore_eos=True)
        return model.generate(PROMPT, config)

    assert at(0.0).stats.mean_loops == 16
    assert at(1.0).stats.mean_loops < 16
    assert at(1e-6).tokens == at(0.0).tokens
