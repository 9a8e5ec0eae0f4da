"""The engine against the float64 reference at every loop count, and against itself on bits, along every
axis.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native import models, reference
from tests.native.device import sized
from tinyloop_serve.native import GenerateConfig, Model, artifact, simd_levels

Make = Callable[..., Model]

TOKENS = [(7 * k * k + 3 * k + 5) % 61 for k in range(70)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Writes a random model of a config and loads it; closes all at the end."""
    opened: list[Model] = []

    def make(name: str, dtype: str = "fp32", **options: Any) -> Model:
        path = tmp_path / f"{name}-{dtype}.tinyloop"
        if not path.exists():
            config = models.FAMILY[name]
            artifact.write(path, config, reference.random_model(config, seed=11, dtype=dtype))
        opened.append(Model(path, **options))
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.mark.parametrize("name", models.FAMILY)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "mixed"])
def test_logits_equal_the_reference_at_every_loop_count(make: Make, name: str, dtype: str) -> None:
    config = models.FAMILY[name]
    tensors = reference.random_model(config, seed=11, dtype=dtype)
    model = make(name, dtype, threads=1)
    for loops in (1, 2, 3, 4, 8, 16) if dtype == "fp16" else (1, config["loops"]):
        expected = reference.logits(config, tensors, TOKENS[:24], loops)
        found = model.logits(TOKENS[:24], loops)
        # Keys and values are rounded to fp16 (2^-11): one at a rounding boundary may fall on the other side.
        assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max(), (name, dtype, loops)


@pytest.mark.parametrize("name", models.FAMILY)
def test_greedy_tokens_equal_the_reference(make: Make, name: str) -> None:
    config = models.FAMILY[name]
    tensors = reference.random_model(config, seed=11)
    found = make(name).generate(TOKENS[:9], GenerateConfig(max_tokens=12, ignore_eos=True)).tokens
    assert found == reference.greedy(config, tensors, TOKENS[:9], None, 12)


@pytest.mark.parametrize("name", models.FAMILY)
@pytest.mark.parametrize("weights", ["fp16", "int8", "int4"])
def test_bits_do_not_depend_on_threads_chunks_or_simd(make: Make, name: str, weights: str) -> None:
    first = make(name, "fp16", threads=1, weights=weights).logits(TOKENS, 3)
    for simd in simd_levels():
        for threads, chunk in ((1, 64), (2, 7), (4, 1), (3, 33)):
            options = {"threads": threads, "prefill_chunk": chunk, "simd": simd, "weights": weights}
            found = make(name, "fp16", **options).logits(TOKENS, 3)
            assert np.array_equal(found.view(np.uint32), first.view(np.uint32)), options


@pytest.mark.parametrize("name", ["everything", "huginn", "llama"])
@pytest.mark.parametrize("weights", ["fp16", "int8", "int4"])
def test_tokens_do_not_depend_on_the_batch_its_size_or_its_order(make: Make, name: str, weights: str) -> None:
    model = make(name, "fp16", prefill_chunk=16, weights=weights)
    prompts = [TOKENS[i : i + 2 + 5 * i] for i in range(8)]
    more = sized(4, 1)
    configs = [
        GenerateConfig(temperature=1.2, top_p=0.9, seed=i, max_tokens=3 + more * i, repetition_penalty=1.2)
        for i in range(8)
    ]
    alone = [model.generate(p, c).tokens for p, c in zip(prompts, configs, strict=True)]
    for order in (list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]):
        for size in (1, 2, 3, 8):
            for begin in range(0, 8, size):
                lanes = order[begin : begin + size]
                together = model.generate_batch([prompts[i] for i in lanes], [configs[i] for i in lanes])
                assert [g.tokens for g in together] == [alone[i] for i in lanes]


def test_streaming_gives_the_tokens_of_generate_with_their_positions(make: Make) -> None:
    model = make("everything")
    config = GenerateConfig(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True)
    seen: list[tuple[int, int]] = []
    streamed = model.generate_stream(
        TOKENS[:6], config, lambda token, position: seen.append((token, position))
    )
    assert streamed.tokens == model.generate(TOKENS[:6], config).tokens == [token for token, _ in seen]
    assert [position for _, position in seen] == list(range(6, 16))


def test_a_seed_gives_the_same_draw_at_a_position_whatever_came_before(make: Make) -> None:
    """What fail-over relies on: continuing from a prefix of the answer gives the rest of the answer."""
    model = make("everything")
    whole = model.generate(
        TOKENS[:6], GenerateConfig(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    ).tokens
    for done in (1, 7, 19):
        config = GenerateConfig(temperature=1.0, seed=5, max_tokens=20 - done, ignore_eos=True)
        assert model.generate(TOKENS[:6] + whole[:done], config).tokens == whole[done:]
