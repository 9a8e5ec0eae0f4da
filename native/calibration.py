"""Is speculation worth it on this checkpoint? Measured, because it depends on how well few loops predict
many.

Knows the engine's calls and nothing of who acts on the answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinyloop_serve.native._core import GenerateConfig, Model, SpeculativeConfig

REQUIRED_SPEEDUP = 1.3


@dataclass(frozen=True)
class Calibration:
    """`speedup`: plain time over speculative time, the median over the prompts. `acceptance`: accepted drafts
    over drafted ones. `worthwhile`: speedup > REQUIRED_SPEEDUP."""

    speedup: float
    acceptance: float
    prompts: int
    worthwhile: bool


def calibrate_speculation(
    model: Model,
    prompts: Sequence[Sequence[int]],
    speculative: SpeculativeConfig | None = None,
    *,
    loops: int = 0,
    max_tokens: int = 32,
) -> Calibration:
    """Times `generate` against `generate_speculative`, greedy, on each prompt in turn, after one warm-up of
    both.

    The order of the two alternates, so that a drift of the machine's speed favours neither. Raises
    ConfigError or LimitError for prompts that the model cannot run, ValueError without prompts.
    """
    if not prompts:
        raise ValueError("prompts: empty; expected 5 to 10 representative prompts")
    speculative = speculative or SpeculativeConfig()
    config = GenerateConfig(loops=loops, max_tokens=max_tokens, ignore_eos=True)
    ratios: list[float] = []
    drafted = accepted = 0

    def plain(prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        model.generate(prompt, config)
        return time.perf_counter() - begin

    def drafting(prompt: Sequence[int]) -> float:
        nonlocal drafted, accepted
        begin = time.perf_counter()
        stats = model.generate_speculative(prompt, speculative, config).stats
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
        return time.perf_counter() - begin

    plain(prompts[0]), drafting(prompts[0])
    drafted = accepted = 0
    for number, prompt in enumerate(prompts):
        if number % 2:
            fast, slow = drafting(prompt), plain(prompt)
        else:
            slow, fast = plain(prompt), drafting(prompt)
        ratios.append(slow / fast)
    speedup = statistics.median(ratios)
    return Calibration(speedup, accepted / max(drafted, 1), len(prompts), speedup > REQUIRED_SPEEDUP)
