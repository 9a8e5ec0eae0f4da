"""Contexts of several attention spans (256 slots each): what short prompts cannot reach. Spans shared out
among threads, draft trees and rings across a span's border, lanes of very different lengths.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.native import models, reference
from tests.native.device import sized
from tinyloop_serve.native import GenerateConfig, Model, SpeculativeConfig, artifact
from tinyloop_serve.protocol.modes import CACHE_MODES

CONFIG = models.config(loops=2, n_heads=6, n_kv_heads=2, head_dim=10, max_seq_len=700)
TENSORS = reference.random_model(CONFIG, seed=5, dtype="fp16")
# Emulated: past one border between spans, and two between the splits of 128 that a GPU takes.
TOKENS = [(7 * k * k + 3 * k + 5) % 61 for k in range(sized(600, 300))]
MAX_TOKENS = sized(24, 8)
WIDE = {"threads": 1, "prefill_chunk": 256}
VARIANTS: list[dict[str, object]] = [
    {"threads": 2, "prefill_chunk": 7},  # few rows, so that the spans of one key head are shared out
    {"threads": 3, "prefill_chunk": 100},
    {"threads": 1, "prefill_chunk": 64, "simd": "portable"},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "model.tinyloop"
    artifact.write(path, CONFIG, TENSORS)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path, threads=2, prefill_chunk=64) as model:
        yield model


def test_logits_equal_the_reference(model: Model) -> None:
    expected = reference.logits(CONFIG, TENSORS, TOKENS, 2)
    assert np.abs(model.logits(TOKENS, 2) - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("mode", CACHE_MODES)
@pytest.mark.parametrize("window", [0, 40, sized(300, 200)])
def test_bits_do_not_depend_on_threads_chunks_or_simd(path: Path, mode: str, window: int) -> None:
    with Model(path, **WIDE) as wide:
        expected = wide.logits(TOKENS, 0, mode, window)
    for variant in sized(VARIANTS, VARIANTS[:1]):
        with Model(path, **variant) as other:  # type: ignore[arg-type]
            found = other.logits(TOKENS, 0, mode, window)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), variant


@pytest.mark.parametrize("mode", CACHE_MODES)
@pytest.mark.parametrize("length", sized([248, 505], [252]))
def test_a_draft_tree_across_a_spans_border_changes_nothing(model: Model, mode: str, length: int) -> None:
    config = GenerateConfig(max_tokens=MAX_TOKENS, cache_mode=mode, ignore_eos=True)
    prompt = TOKENS[:length]
    expected = model.generate(prompt, config).tokens
    for branches in sized((2, 3), (3,)):
        drafts = SpeculativeConfig(draft_loops=1, draft_ahead=5, branches=branches)
        assert model.generate_tree_speculative(prompt, drafts, config).tokens == expected
    assert model.generate_speculative(prompt, SpeculativeConfig(draft_loops=1), config).tokens == expected


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_lanes_and_prefixes_change_nothing(model: Model, mode: str) -> None:
    config = GenerateConfig(max_tokens=8, cache_mode=mode, ignore_eos=True)
    longest, middle = sized((530, 300), (270, 130))
    prompts = [TOKENS[:length] for length in sized((250, 3, longest, 256, 257), (256, 3, longest))]
    alone = [model.generate(prompt, config).tokens for prompt in prompts]
    assert [lane.tokens for lane in model.generate_batch(prompts, config)] == alone
    prefix = model.create_prefix_cache(TOKENS[:middle], cache_mode=mode)
    assert model.generate_from_prefix_cache(prefix, TOKENS[middle:longest], config).tokens == alone[2]
