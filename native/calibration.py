"""Is speculation worth it on this checkpoint, and with which settings? Measured, because it depends on how
well few loops predict many.

Knows the engine's calls and nothing of who acts on the answer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
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


class SpeculationBench:
    """Times `generate` against `generate_speculative`, greedy, one prompt at a time.

    All candidates run on one prompt before the next, so that a drift of the machine's speed touches them
    alike. Candidates that draft with as many loops as the request has are left out. Raises ValueError
    without candidates.
    """

    def __init__(
        self,
        model: Model,
        candidates: Sequence[SpeculativeConfig] = CANDIDATES,
        *,
        loops: int = 0,
        max_tokens: int = 32,
    ) -> None:
        if not candidates:
            raise ValueError("candidates: empty; expected at least one SpeculativeConfig")
        self._model = model
        self._config = GenerateConfig(
            loops=loops, max_tokens=max_tokens, ignore_eos=True, exit_threshold=0.0, speculative=False
        )
        self._candidates = list(candidates)
        self._speedups: list[list[float]] = [[] for _ in candidates]
        self._drafted, self._accepted = [0] * len(candidates), [0] * len(candidates)
        self._prompts = 0

    def measure(self, prompt: Sequence[int]) -> None:
        """One prompt more. Raises ConfigError or LimitError for a prompt that the model cannot run."""
        for _ in self.runs(prompt):
            pass

    def runs(self, prompt: Sequence[int]) -> Iterator[None]:
        """The same, a call of the model at a time, for those who have other things to do between them."""
        model, config = self._model, self._config
        if not self._prompts:
            depth = model.generate(prompt, config).stats.loops  # and warms up
            yield
            fewer = [c for c in self._candidates if c.draft_loops < depth]
            self._candidates = fewer or self._candidates[:1]
        begin = time.perf_counter()
        model.generate(prompt, config)
        plain = time.perf_counter() - begin
        yield
        for i, candidate in enumerate(self._candidates):
            begin = time.perf_counter()
            stats = model.generate_speculative(prompt, candidate, config).stats
            self._speedups[i].append(plain / (time.perf_counter() - begin))
            self._drafted[i] += stats.drafted
            self._accepted[i] += stats.accepted
            yield
        self._prompts += 1

    def verdict(self) -> Calibration:
        """Of the prompts so far. Raises ValueError without any."""
        if not self._prompts:
            raise ValueError("prompts: empty; expected 5 to 10 representative prompts")
        medians = [statistics.median(values) for values in self._speedups[: len(self._candidates)]]
        best = max(range(len(medians)), key=medians.__getitem__)
        return Calibration(
            best=self._candidates[best],
            speedup=medians[best],
            acceptance=self._accepted[best] / max(self._drafted[best], 1),
            prompts=self._prompts,
            worthwhile=medians[best] > REQUIRED_SPEEDUP,
        )


def calibrate_speculation(
    model: Model,
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[SpeculativeConfig] = CANDIDATES,
    *,
    loops: int = 0,
    max_tokens: int = 32,
) -> Calibration:
    """`SpeculationBench` over all of `prompts`; raises what it raises."""
    bench = SpeculationBench(model, candidates, loops=loops, max_tokens=max_tokens)
    for prompt in prompts:
        bench.measure(prompt)
    return bench.verdict()
