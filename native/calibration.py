"""Is speculation worth it on this checkpoint, and with which settings? Measured, because it depends on how
well few loops predict many.

Knows the engine's calls and nothing of who acts on the answer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinyloop_serve.native._core import GenerateConfig, Model, SpeculativeConfig

REQUIRED_SPEEDUP = 1.3
CANDIDATES = tuple(
    SpeculativeConfig(draft_loops=loops, draft_ahead=ahead, draft_margin=margin)
    for loops, ahead, margin in itertools.product((1, 2), (3, 4, 6, 8), (0.0, 0.5))
)


@dataclass(frozen=True)
class Calibration:
    """What was measured. `best` is the fastest candidate; the rest is about it: `speedup` is plain time over
    speculative time, the median over the prompts; `acceptance` is accepted over drafted tokens; `worthwhile`
    says whether speedup > REQUIRED_SPEEDUP."""

    best: SpeculativeConfig
    speedup: float
    acceptance: float
    prompts: int
    worthwhile: bool


def calibrate_speculation(
    model: Model,
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[SpeculativeConfig] = CANDIDATES,
    *,
    loops: int = 0,
    max_tokens: int = 32,
) -> Calibration:
    """Times `generate` against `generate_speculative`, greedy, on every prompt in turn with every candidate.

    All of them run on one prompt before the next, so that a drift of the machine's speed touches them alike.
    Candidates that draft with as many loops as the request has are left out. Raises ConfigError or LimitError
    for prompts that the model cannot run, ValueError without prompts or candidates.
    """
    if not prompts:
        raise ValueError("prompts: empty; expected 5 to 10 representative prompts")
    depth = model.generate(prompts[0], GenerateConfig(loops=loops, max_tokens=1)).stats.loops
    candidates = [c for c in candidates if c.draft_loops < depth] or list(candidates[:1])
    if not candidates:
        raise ValueError("candidates: empty; expected at least one SpeculativeConfig")
    config = GenerateConfig(loops=loops, max_tokens=max_tokens, ignore_eos=True)
    speedups: list[list[float]] = [[] for _ in candidates]
    drafted, accepted = [0] * len(candidates), [0] * len(candidates)
    model.generate(prompts[0], config)  # warm up
    for prompt in prompts:
        begin = time.perf_counter()
        model.generate(prompt, config)
        plain = time.perf_counter() - begin
        for i, candidate in enumerate(candidates):
            begin = time.perf_counter()
            stats = model.generate_speculative(prompt, candidate, config).stats
            speedups[i].append(plain / (time.perf_counter() - begin))
            drafted[i], accepted[i] = drafted[i] + stats.drafted, accepted[i] + stats.accepted
    medians = [statistics.median(values) for values in speedups]
    best = max(range(len(candidates)), key=medians.__getitem__)
    return Calibration(
        best=candidates[best],
        speedup=medians[best],
        acceptance=accepted[best] / max(drafted[best], 1),
        prompts=len(prompts),
        worthwhile=medians[best] > REQUIRED_SPEEDUP,
    )
