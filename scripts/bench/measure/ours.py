"""Rates of our engine, by its own clock: tokens per second of a prefill, and of decoding in lockstep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import models
from tinyloop_serve.native import GenerateConfig, Model


@contextmanager
def load(artifact: Path, weights: str, threads: int) -> Iterator[Model | None]:
    """None where the engine does not have these weights."""
    try:
        model = Model(artifact, threads=threads, **({} if weights == "fp16" else {"weights": weights}))
    except TypeError:
        yield None
        return
    with model:
        yield model


def prefill(model: Model, tokens: int, loops: int = 0) -> float:
    """Prompt tokens per second, until the first token is there."""
    stats = model.generate(models.prompt(tokens), GenerateConfig(loops=loops, max_tokens=1)).stats
    return tokens / stats.first_token_ms * 1000


def decode(
    model: Model, lanes: int, context: int, steps: int, loops: int = 0, cache_mode: str = "fp16"
) -> float:
    """Tokens per second over all lanes, from `context` positions on; the prefill is not counted."""
    config = GenerateConfig(loops=loops, max_tokens=steps + 1, ignore_eos=True, cache_mode=cache_mode)
    batch = model.generate_batch([models.prompt(context, lane) for lane in range(lanes)], config)
    return lanes * steps / max(lane.stats.decode_ms for lane in batch) * 1000
