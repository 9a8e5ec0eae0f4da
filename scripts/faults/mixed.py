"""Requests of mixed shapes, each with a seed of its own, for the scripts that do harm while they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from scripts.load.arrivals import poisson
from scripts.load.asked import Asked
from scripts.load.mix import Mix


def mixed(
    count: int, *, seed: int, vocabulary: int, tokens: tuple[int, int], loops: Sequence[int]
) -> list[Asked]:
    mix = Mix(
        prompt_tokens=(4, 64),
        max_tokens=tokens,
        loops=tuple(loops),
        temperature=(0.0, 0.0, 0.8, 1.2),
        repetition_penalty=(1.0, 1.0, 1.0, 1.0, 1.1),
        cache_mode=("fp16", "fp16", "fp16", "int8"),
    )
    return list(islice(mix.requests(seed, vocabulary), count))


def arrive(asked: Iterable[Asked], rate: float, seed: int) -> None:
    """`rate` per second, at independent times."""
    for each, at in zip(asked, poisson(rate, seed), strict=False):
        each.at = at
