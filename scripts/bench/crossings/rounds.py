"""Seconds of several cases that are measured in turn, and ratios of them.

A drift of the machine's speed touches all cases of a round alike, so a ratio is taken within each round, and
the median over the rounds counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from measure.timing import say


class Times:
    def __init__(self, found: dict[str, list[float]]) -> None:
        self._found = found

    def ratio(self, over: str | tuple[str, ...], under: str | tuple[str, ...]) -> float:
        """Median over rounds of one case's seconds over another's; several of a name are added up."""
        above, below = (self._summed(case) for case in (over, under))
        return statistics.median(a / b for a, b in zip(above, below, strict=True))

    def median(self, case: str) -> float:
        return statistics.median(self._found[case])

    def _summed(self, case: str | tuple[str, ...]) -> list[float]:
        names = (case,) if isinstance(case, str) else case
        return [sum(parts) for parts in zip(*(self._found[name] for name in names), strict=True)]


def seconds_of(call: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return timed


def interleaved(what: str, cases: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Each case tells the seconds it took; a first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    begin = time.perf_counter()
    for number in range(rounds + 1):
        for name, case in cases.items():
            taken = case()
            if number:
                found[name].append(taken)
        say(f"  {what}: round {number} of {rounds}, after {time.perf_counter() - begin:.0f} s")
    return Times(found)
