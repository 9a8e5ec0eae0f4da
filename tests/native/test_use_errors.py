"""Use errors are detected, not undefined: handles of another model, closed ones, overlapping calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.native import models, reference
from tinyloop_serve.native import (
    ClosedError,
    ConfigError,
    GenerateConfig,
    LimitError,
    LockedModel,
    ModeError,
    Model,
    ModelBusyError,
    PrefixPool,
    SpeculativeConfig,
    artifact,
    calibrate_speculation,
)

PROMPT = [1, 2, 3, 4, 5]
CONFIG = GenerateConfig(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("use") / "model.tinyloop"
    config = models.FAMILY["add"]
    artifact.write(path, config, reference.random_model(config, seed=2, dtype="fp16"))
    return path


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model(path) as model:
        yield model


def test_a_handle_of_another_model_is_refused(path: Path, model: Model) -> None:
    with Model(path) as other:
        prefix, handle, pool = (
            other.create_prefix_cache(PROMPT),
            other.create_resume_handle(PROMPT, 2),
            PrefixPool(2),
        )
        pool.register_prefix(other, PROMPT)
        with pytest.raises(ModeError, match="prefix"):
            model.generate_from_prefix_cache(prefix, [7], CONFIG)
        with pytest.raises(ModeError, match="handle"):
            model.resume_generate(handle, 4, CONFIG)
        with pytest.raises(ModeError, match="pool"):
            model.generate_with_pool(pool, PROMPT, CONFIG)
        with pytest.raises(ModeError, match="pool"):
            pool.register_prefix(model, PROMPT)
    assert len(model.generate(PROMPT, CONFIG).tokens) == 6  # and the model is free


def test_a_closed_handle_is_refused_and_an_open_one_outlives_its_model(path: Path) -> None:
    model = Model(path)
    prefix, handle, pool = (
        model.create_prefix_cache(PROMPT),
        model.create_resume_handle(PROMPT, 2),
        PrefixPool(1),
    )
    pool.register_prefix(model, PROMPT)
    kept = model.create_prefix_cache(PROMPT)
    for closed in (prefix, handle, pool):
        closed.close()
        closed.close()  # twice does no harm
    uses: list[Callable[[], object]] = [
        lambda: model.generate_from_prefix_cache(prefix, [7], CONFIG),
        lambda: model.resume_generate(handle, 4, CONFIG),
        lambda: model.generate_with_pool(pool, PROMPT, CONFIG),
        lambda: prefix.tokens,
        lambda: handle.bytes,
        lambda: len(pool),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    model.close()
    with pytest.raises(ClosedError):
        model.generate_from_prefix_cache(kept, [7], CONFIG)
    assert kept.tokens == PROMPT
    kept.close()


def test_building_while_decoding_is_refused(model: Model) -> None:
    inside, go_on = threading.Event(), threading.Event()
    prefix = model.create_prefix_cache(PROMPT)
    pool = PrefixPool(1)
    results: list[list[int]] = []

    def wait(token: int, position: int) -> None:
        inside.set()
        assert go_on.wait(60)

    def decode() -> None:
        results.append(model.generate_from_prefix_cache(prefix, [7], CONFIG, wait).tokens)

    worker = threading.Thread(target=decode)
    worker.start()
    assert inside.wait(60)
    overlapping: list[Callable[[], object]] = [
        lambda: model.create_prefix_cache(PROMPT),
        lambda: model.create_resume_handle(PROMPT, 2),
        lambda: pool.register_prefix(model, PROMPT),
        lambda: model.generate_from_prefix_cache(prefix, [7], CONFIG),
        lambda: model.generate_speculative(PROMPT, SpeculativeConfig(), CONFIG),
    ]
    for call in overlapping:
        with pytest.raises(ModelBusyError):
            call()
    go_on.set()
    worker.join(60)
    assert results == [model.generate([*PROMPT, 7], CONFIG).tokens]


def test_bad_arguments_of_handles_are_named(model: Model) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        PrefixPool(0)
    with pytest.raises(ConfigError, match="tokens"):
        model.create_prefix_cache([])
    with pytest.raises(LimitError, match="loops"):
        model.create_prefix_cache(PROMPT, 99)
    with pytest.raises(ConfigError, match="cache_mode"):
        model.create_prefix_cache(PROMPT, 2, "fp8")
    with pytest.raises(ConfigError, match="draft_loops"):
        model.generate_speculative(PROMPT, SpeculativeConfig(draft_loops=9, verify_loops=4), CONFIG)
    with pytest.raises(ConfigError, match="draft_ahead"):
        model.generate_speculative(PROMPT, SpeculativeConfig(draft_ahead=0), CONFIG)
    with pytest.raises(ConfigError, match="branches"):
        model.generate_tree_speculative(PROMPT, SpeculativeConfig(branches=99), CONFIG)
    with pytest.raises(ModeError, match="temperature"):
        model.generate(PROMPT, GenerateConfig(beam_size=2, temperature=0.5))
    with pytest.raises(ConfigError, match="grammar"):
        GenerateConfig(grammar="a+")  # type: ignore[arg-type]


def test_a_locked_model_may_be_shared(path: Path) -> None:
    with LockedModel(path) as shared:
        expected = [shared.generate([i, i + 1], CONFIG).tokens for i in range(4)]
        found: dict[int, list[list[int]]] = {i: [] for i in range(4)}

        def work(i: int) -> None:
            for _ in range(10):
                found[i].append(shared.generate([i, i + 1], CONFIG).tokens)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert found == {i: [expected[i]] * 10 for i in range(4)}


def test_calibration_measures_speed_and_acceptance(model: Model) -> None:
    candidates = [SpeculativeConfig(draft_loops=n, draft_ahead=3) for n in (1, 2)]
    found = calibrate_speculation(model, [PROMPT, [9, 8, 7]], candidates, max_tokens=12)
    assert found.best in candidates
    assert found.speedup > 0 and 0 <= found.acceptance <= 1 and found.prompts == 2
    assert found.worthwhile == (found.speedup > 1.3)
    with pytest.raises(ValueError, match="prompts"):
        calibrate_speculation(model, [])
