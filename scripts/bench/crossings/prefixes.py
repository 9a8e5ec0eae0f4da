"""A pool of prefixes against computing every prompt: by the share of the prompt that is in the pool.

A request that starts from the pool decodes alone. So it is compared with decoding alone, and with a batch of
eight, which computes every prompt but shares the decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossings.rounds import interleaved, seconds_of
from crossings.section import Section, where
from tinyloop_serve.native import GenerateConfig, Model, PrefixPool

PROMPT = 256
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
NEW = (16, 64, 192)
LANES = 8


def measure(path: Path, threads: int, rounds: int, new: tuple[int, ...] = NEW) -> Section:
    shares = (f"{share:.0%} in the pool" for share in SHARES)
    section = Section("prefixes", ("new tokens", "against", *shares), [])
    with Model(path, threads=threads) as model:
        prompt = [3 + 7 * i * i % 4000 for i in range(PROMPT)]
        pools = {share: _pool(model, prompt, share) for share in SHARES}
        cases: dict[str, Callable[[], float]] = {}
        for tokens in new:
            config = GenerateConfig(max_tokens=tokens, ignore_eos=True)
            prompts = [prompt[:-1] + [3 + lane] for lane in range(LANES)]
            cases[f"{tokens} alone"] = seconds_of(lambda c=config: model.generate(prompt, c))
            cases[f"{tokens} batch"] = seconds_of(lambda c=config, p=prompts: model.generate_batch(p, c))
            for share, pool in pools.items():
                cases[f"{tokens} {share}"] = seconds_of(
                    lambda c=config, p=pool: model.generate_with_pool(p, prompt, c)
                )
        times = interleaved("prefixes", cases, rounds)
    for tokens in new:
        for against, scale in (("alone", 1), ("batch", LANES)):
            gains = [times.ratio(f"{tokens} {against}", f"{tokens} {share}") / scale for share in SHARES]
            label = "decoding alone" if against == "alone" else f"a batch of {LANES}"
            section.rows.append((str(tokens), label, *(f"{gain:.2f}x" for gain in gains)))
            points = list(zip(SHARES, gains, strict=True))
            section.data[f"{tokens} {against}"] = dict(points)
            if against == "batch":
                section.crossings.append(
                    f"{tokens} new tokens: the pool overtakes a batch of {LANES} {where(points, ' %', 100)}"
                )
    return section


def _pool(model: Model, prompt: list[int], share: float) -> PrefixPool:
    """Holds that much of the prompt's beginning, or nothing that fits."""
    pool = PrefixPool(1)
    held = prompt[: round(share * len(prompt))] or [prompt[0] + 1]
    pool.register_prefix(model, held)
    return pool
