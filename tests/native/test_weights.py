"""Integer weights: near the model they were made from, as near as their definition says, and as small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.native import models, reference
from tinyloop_serve.native import Model, artifact, demo_model_path, simd_levels
from tinyloop_serve.protocol import modes

Floats = npt.NDArray[np.float32]

TOKENS = [(7 * k * k + 3 * k + 5) % 61 for k in range(40)]
CONFIG = models.config(
    n_prelude=1, n_coda=1, loops=3, injection="concat", d_model=96, n_heads=4, head_dim=16, d_ffn=160
)


def as_int8(w: Floats) -> Floats:
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(w / scale) * scale


def as_int4(w: Floats) -> Floats:
    groups = w.reshape(w.shape[0], -1, 32)
    at = np.abs(groups).argmax(axis=2, keepdims=True)
    scale = (np.take_along_axis(groups, at, axis=2) / np.float32(-8)).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint(groups / scale), -8, 7) * scale).reshape(w.shape)


def written(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    artifact.write(path, config, tensors)
    return path


def error(found: Floats, expected: Floats) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_are_those_of_the_weights_that_the_definition_gives(tmp_path: Path, weights: str) -> None:
    tensors = reference.random_model(CONFIG, seed=3)
    ends = {"embed.weight", "head.weight"}
    rounded = {
        name: w if w.ndim == 1 else as_int8(w) if weights == "int8" or name in ends else as_int4(w)
        for name, w in tensors.items()
    }
    with (
        Model(written(tmp_path / "a.tinyloop", CONFIG, tensors), weights=weights) as model,
        Model(written(tmp_path / "b.tinyloop", CONFIG, rounded)) as definition,
    ):
        expected = definition.logits(TOKENS)
        # What is left is the rounding of rows to int8.
        assert 0 < error(model.logits(TOKENS), expected) < 0.03


def test_the_demo_model_loses_little() -> None:
    with Model(demo_model_path()) as whole:
        expected = whole.logits(TOKENS)
    for weights, bound, same in (("int8", 0.03, 0.9), ("int4", 0.25, 0.6)):
        with Model(demo_model_path(), weights=weights) as model:
            found = model.logits(TOKENS)
        assert error(found, expected) < bound, weights
        assert (found.argmax(1) == expected.argmax(1)).mean() > same, weights


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_caches_that_hold_inputs_give_the_same_bits_on_every_level(tmp_path: Path, weights: str) -> None:
    config = models.FAMILY["everything"]  # 24 inputs: the padding to a group matters
    path = written(tmp_path / "a.tinyloop", config, reference.random_model(config, seed=3, dtype="fp16"))
    for mode in modes.CACHE_MODES:
        found = []
        for simd in simd_levels():
            for threads, chunk in ((1, 64), (3, 5)):
                with Model(path, weights=weights, simd=simd, threads=threads, prefill_chunk=chunk) as model:
                    found.append(model.logits(TOKENS, cache_mode=mode).tobytes())
        assert len(set(found)) == 1, mode


def test_memory_shrinks_as_the_layouts_say(tmp_path: Path) -> None:
    config = models.config(d_model=192, n_heads=4, n_kv_heads=4, head_dim=48, d_ffn=512, vocab_size=1000)
    tensors = reference.random_model(config, seed=1, dtype="fp16")
    path = written(tmp_path / "a.tinyloop", config, tensors)
    matrices = {name: w.size for name, w in tensors.items() if w.ndim == 2}
    ends = sum(size for name, size in matrices.items() if name in ("embed.weight", "head.weight"))
    layers = sum(matrices.values()) - ends
    held = {}
    for weights in ("fp16", "int8", "int4"):
        with Model(path, weights=weights, threads=1, prefill_chunk=1) as model:
            held[weights] = model.weight_bytes
    # Beside the matrices: int8 has 4 bytes per output, and rows are quantised into work space of their own.
    assert abs(held["fp16"] - held["int8"] - (ends + layers)) < 120_000
    assert abs(held["int8"] - held["int4"] - layers * (1 - 18 / 32)) < 30_000
