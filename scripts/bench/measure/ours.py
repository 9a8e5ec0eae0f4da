"""Our engine: a model with the wanted weights, and its rates by its own clock, in tokens per second."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from measure import models
from tinyloop_serve.native import GenerateConfig, Model, PrefixCache


class Case(NamedTuple):
    """What is compared with a peer: `lanes` sequences decode, or (0) one prompt of `prompt` tokens is
    prefilled."""

    weights: str  # ours
    theirs: str
    lanes: int = 0
    prompt: int = 0
    only: str = ""  # the one model that gets this case; "" = each does


def rate(model: Model, case: Case, context: int, steps: int) -> float:
    return prefill(model, case.prompt) if case.prompt else decode(model, case.lanes, context, steps)


def load(name: str, folder: Path, weights: str, threads: int) -> Model:
    path = models.write(name, folder, "bf16" if weights == "bf16" else "fp16")
    return Model(path, threads=threads, weights=weights)


def prefill(model: Model, tokens: int, loops: int = 0) -> float:
    """Until the first token is there."""
    stats = model.generate(models.prompt(tokens), GenerateConfig(loops=loops, max_tokens=1)).stats
    return tokens / stats.first_token_ms * 1000


def decode(model: Model, lanes: int, context: int, steps: int, loops: int = 0) -> float:
    """Over all lanes, from `context` positions on; the prefill is not counted."""
    config = GenerateConfig(loops=loops, max_tokens=steps + 1, ignore_eos=True)
    batch = model.generate_batch([models.prompt(context, lane) for lane in range(lanes)], config)
    return lanes * steps / max(lane.stats.decode_ms for lane in batch) * 1000


def decode_after(model: Model, prefix: PrefixCache, steps: int, cache_mode: str) -> float:
    """One lane, after the positions of the prefix; copying them is not counted."""
    config = GenerateConfig(max_tokens=steps + 1, ignore_eos=True, cache_mode=cache_mode)
    return steps / model.generate_from_prefix_cache(prefix, [], config).stats.decode_ms * 1000
