"""The GPU's kernels, emulated on the processor, under the Python engine: what of `make test-emulated` is
quick enough for every run. Left out where the C++ tests were not built before."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.native import models, reference
from tinyloop_serve.native import GenerateConfig, Model, SpeculativeConfig, artifact

BUILT = Path(__file__).parents[2] / "build" / "native"
PROMPT = [(7 * k * k + 3 * k + 5) % 61 for k in range(12)]
LOOPS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulated") / "model.tinyloop"
    config = models.FAMILY["everything"]
    artifact.write(path, config, reference.random_model(config, seed=4, dtype="fp16"))
    return path


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (BUILT / "libtinyloop_emulated.so").exists():
        pytest.skip("build/native has no libtinyloop_emulated.so: scripts/cpp-tests builds it")
    monkeypatch.setenv("TINYLOOP_BACKEND_PATH", str(BUILT))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model(path, device="emulated") as model:
        yield model


def test_logits_are_the_references(model: Model) -> None:
    assert model.device.startswith("emulated:0/")
    config = models.FAMILY["everything"]
    tensors = reference.random_model(config, seed=4, dtype="fp16")
    expected = reference.logits(config, tensors, PROMPT, LOOPS)
    found = model.logits(PROMPT, LOOPS)
    # Keys and values are rounded to fp16 (2^-11): one at a rounding boundary may fall on the other side.
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_bits_do_not_depend_on_chunks_or_the_batch(path: Path, model: Model) -> None:
    with Model(path, device="emulated", prefill_chunk=5) as other:
        assert np.array_equal(other.logits(PROMPT, LOOPS), model.logits(PROMPT, LOOPS))
    prompts = [PROMPT[: 3 + 2 * lane] for lane in range(4)]
    configs = [GenerateConfig(loops=LOOPS, max_tokens=4, temperature=1.0, seed=lane) for lane in range(4)]
    alone = [model.generate(prompt, own).tokens for prompt, own in zip(prompts, configs, strict=True)]
    assert [lane.tokens for lane in model.generate_batch(prompts, configs)] == alone


def bytes_to_host() -> int:
    """That the emulated device has sent so far (native/src/cuda/emulator/controls.h)."""
    emulator = ctypes.CDLL(str(BUILT / "libtinyloop_emulated.so")).tinyloop_emulator
    emulator.restype = ctypes.POINTER(ctypes.c_uint64)
    return int(emulator()[6])


def test_what_crosses_is_what_sampling_needs(model: Model) -> None:
    tokens, vocab = 5, models.FAMILY["everything"]["vocab_size"]

    def crossing(temperature: float = 0, top_k: int = 0, repetition_penalty: float = 1) -> int:
        config = GenerateConfig(
            loops=LOOPS,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
        )
        before = bytes_to_host()
        model.generate(PROMPT, config)
        return bytes_to_host() - before

    assert 0 < crossing() <= tokens * (8 + 4)  # a token with its logit; how many loops were run
    assert crossing(temperature=1, top_k=8) <= tokens * (8 * 8 + 4)
    assert crossing(temperature=1) >= tokens * vocab * 4
    assert crossing(repetition_penalty=1.2) >= tokens * vocab * 4


def test_the_first_in_rank_give_the_tokens_that_all_logits_give(model: Model) -> None:
    found = model.generate(PROMPT, GenerateConfig(loops=LOOPS, max_tokens=6, ignore_eos=True)).tokens
    rows = model.logits(PROMPT + found, LOOPS)[len(PROMPT) - 1 : -1]
    assert found == [int(row.argmax()) for row in rows]
    for seed in range(4):
        some, every = (  # 100 of 61 tokens are all of them
            GenerateConfig(loops=LOOPS, max_tokens=6, temperature=1.5, top_p=0.95, seed=seed, top_k=top_k)
            for top_k in (100, 0)
        )
        assert model.generate(PROMPT, some).tokens == model.generate(PROMPT, every).tokens


@pytest.mark.parametrize("mode", ["fp16", "int8", "h_fp16", "h_int8", "int4"])
def test_reuse_and_speculation_change_no_token(model: Model, mode: str) -> None:
    config = GenerateConfig(loops=LOOPS, max_tokens=5, cache_mode=mode, ignore_eos=True)
    expected = model.generate(PROMPT, config).tokens
    prefix = model.create_prefix_cache(PROMPT[:7], LOOPS, mode)
    assert model.generate_from_prefix_cache(prefix, PROMPT[7:], config).tokens == expected
    resumed = model.create_resume_handle(PROMPT, 2, mode)
    assert model.resume_generate(resumed, LOOPS, config).tokens == expected
    drafts = SpeculativeConfig(draft_loops=1, draft_ahead=3)
    assert model.generate_tree_speculative(PROMPT, drafts, config).tokens == expected


def test_the_account_of_a_cache_is_exact(model: Model) -> None:
    config = GenerateConfig(loops=LOOPS, max_tokens=3, ignore_eos=True)
    before = model.weight_bytes
    expected = model.generate(PROMPT, config)
    assert expected.stats.cache_bytes == model.cache_bytes(len(PROMPT) + 3, "fp16", LOOPS)
    assert model.weight_bytes >= before and model.device_free_bytes == -1
    assert model.generate(PROMPT, config).tokens == expected.tokens
