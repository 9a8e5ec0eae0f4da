"""Batches against streams: tokens per second by lanes and by how much the lengths of the answers differ.

A lane that has ended stays in the kernels' shape, so a batch lasts as long as its longest answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from crossings.rounds import interleaved, seconds_of
from crossings.section import Section, where
from tinyloop_serve.native import GenerateConfig, Model

LANES = (2, 4, 8)
SPREADS = (0.0, 0.25, 0.5, 0.75)
PROMPT = 16
STREAMS = 4


def lengths(lanes: int, spread: float, mean: int) -> list[int]:
    """Evenly from (1 - spread) to (1 + spread) of the mean."""
    return [round(mean * (1 - spread + 2 * spread * lane / (lanes - 1))) for lane in range(lanes)]


def measure(models: dict[str, Path], threads: int, rounds: int, mean: int = 32) -> Section:
    head = ("model", "lanes", *(f"lengths ± {spread:.0%}" for spread in SPREADS), "a token then takes")
    section = Section("batches", head, [])
    for name, path in models.items():
        with Model(path, threads=threads) as model:
            times = interleaved(f"batches, {name}", _cases(model, mean), rounds)
        for lanes in LANES:
            gains = []
            for spread in SPREADS:
                share = sum(lengths(lanes, spread, mean)) / (STREAMS * mean)  # of the tokens of the streams
                gains.append(share * times.ratio("streams", f"{lanes} {spread}"))
            cells = [f"{gain:.2f}x" for gain in gains]
            section.rows.append((name, str(lanes), *cells, f"{lanes / gains[0]:.1f}x as long"))
            points = list(zip(SPREADS, gains, strict=True))
            section.data[f"{name} {lanes}"] = dict(points)
            place = where(points, " %", 100)
            section.crossings.append(f"{name}, {lanes} lanes: the batch loses its gain {place}")
    section.crossings = [line for line in section.crossings if f"{LANES[-1]} lanes" in line]
    return section


def _cases(model: Model, mean: int) -> dict[str, Callable[[], float]]:
    def prompts(count: int) -> list[list[int]]:
        return [[3 + (7 * i + lane) % 4000 for i in range(PROMPT)] for lane in range(count)]

    def config(tokens: int) -> GenerateConfig:
        return GenerateConfig(max_tokens=tokens, ignore_eos=True)

    def streams() -> None:
        for prompt in prompts(STREAMS):
            model.generate_stream(prompt, config(mean), lambda token, position: None)

    def batch(each: Sequence[int]) -> Callable[[], float]:
        configs = [config(tokens) for tokens in each]
        return seconds_of(lambda: model.generate_batch(prompts(len(each)), configs))

    cases = {"streams": seconds_of(streams)}
    for lanes in LANES:
        cases |= {f"{lanes} {spread}": batch(lengths(lanes, spread, mean)) for spread in SPREADS}
    return cases
