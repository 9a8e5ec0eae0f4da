"""Which shapes are rare: those whose runs left a replica free for others nearly all of the time of late.

A rare shape may go before a hot one's backlog (`buckets.py`). What that costs the others is bounded here:
once a run of it is over, it is not rare until `OTHERS` times as long has passed. By the clock, not by work,
so that after an idle time nobody waits for what was before. Knows neither requests nor who goes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

OTHERS = 4.0


@dataclass(slots=True)
class _Runs:
    out: int = 0  # in progress
    until: float = 0.0  # from when on it is rare again, seconds


class Rare:
    def __init__(self) -> None:
        self._runs: dict[Hashable, _Runs] = {}  # of shapes that are not rare, and a few that are again
        self._most = 16  # entries, before those are looked for

    def began(self, shape: Hashable) -> None:
        """A run of this shape goes out."""
        self._runs.setdefault(shape, _Runs()).out += 1

    def ended(self, shape: Hashable, seconds: float, now: float) -> None:
        """It has come back, after so long."""
        runs = self._runs[shape]
        runs.out -= 1
        runs.until = max(runs.until, now + OTHERS * seconds)
        if len(self._runs) > self._most:
            self._runs = {shape: runs for shape, runs in self._runs.items() if runs.out or runs.until > now}
            self._most = 16 + 2 * len(self._runs)

    def holds(self, shape: Hashable, now: float) -> bool:
        runs = self._runs.get(shape)
        return runs is None or not runs.out and runs.until <= now

    def check(self, running: Iterable[Hashable]) -> None:
        """Raises AssertionError unless these are the shapes of the runs in progress."""
        assert Counter(running) == +Counter({shape: runs.out for shape, runs in self._runs.items()}), (
            "runs out"
        )
