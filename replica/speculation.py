"""Speculation on this replica: measured one short answer at a time while nothing else waits, then on or off.

Until the measurement is complete, and where it says that speculation does not pay, a request that asks for
it is decoded plainly, with the same tokens, and its stats say why. Belongs to the decoding thread;
`calibration` may be read from any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinyloop_serve.native import Model, SpeculationBench, SpeculativeConfig
from tinyloop_serve.protocol.messages import Calibration

CANDIDATES = tuple(
    SpeculativeConfig(draft_loops=loops, draft_ahead=ahead, draft_margin=margin)
    for loops, ahead, margin in ((1, 4, 0.5), (1, 6, 0.5), (1, 4, 0.0), (2, 4, 0.0), (2, 6, 0.5))
)
NEW_TOKENS = 24  # decoded per prompt and candidate, where the context has room for them
MOST_DRAFTED = max(each.draft_ahead * each.branches for each in CANDIDATES)  # rows that are not the request's


class Speculation:
    """`prompts`: none means that speculation is off."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, loops: int, threshold: float) -> None:
        self.calibration: Calibration | None = None
        self.settings = SpeculativeConfig()
        self._threshold = threshold
        self._todo = list(prompts)
        self._bench: SpeculationBench | None = None
        self._runs: Iterator[None] | None = None  # of the first prompt to do
        self._why_off = "speculation is switched off on this replica"
        if self._todo and loops < 2:
            self._todo, self._why_off = [], "a model of one loop has nothing to draft with"
        if not self._todo:
            self.calibration = Calibration(threshold=threshold)

    @property
    def pending(self) -> bool:
        return bool(self._todo)

    def measure_some(self, model: Model) -> None:
        """One call of the engine; after the last, `calibration` is there. Raises what the engine raises: then
        it is off."""
        try:
            if self._bench is None:
                most = min(NEW_TOKENS, model.max_seq_len // 2)
                self._bench = SpeculationBench(model, CANDIDATES, max_tokens=most)
            self._runs = self._runs or self._bench.runs(self._todo[0])
            for _ in self._runs:
                return
            self._runs = None
            del self._todo[0]
        except Exception as error:
            self._todo, self._why_off = [], f"speculation could not be measured: {error}"
            self.calibration = Calibration(threshold=self._threshold)
            raise
        if not self._todo:
            self._conclude(self._bench)

    def _conclude(self, bench: SpeculationBench) -> None:
        found = bench.verdict()
        self.settings = found.best
        self.calibration = Calibration(
            enabled=found.speedup > self._threshold,
            speedup=round(found.speedup, 3),
            threshold=self._threshold,
            draft_loops=found.best.draft_loops,
            draft_ahead=found.best.draft_ahead,
            prompts=found.prompts,
        )
        measured = f"measured {found.speedup:.2f} times as fast, not more than {self._threshold:g}"
        self._why_off = "" if self.calibration.enabled else measured

    def why_not(self, loops: int) -> str:
        """ "" where a request of so many loops that asks for it gets it, else the reason for its stats."""
        if self.calibration is None:
            return "not measured yet"
        if self.calibration.enabled and loops <= self.settings.draft_loops:
            return f"loops={loops} is not more than the {self.settings.draft_loops} of a draft"
        return self._why_off
