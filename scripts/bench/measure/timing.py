"""Interleaved timing: every round runs every case once, and medians over rounds are compared.

A drift of the machine's speed then touches all cases alike. Knows nothing of what it times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from measure.neighbours import WORTH_A_WARNING, Neighbours

SILENCE_S = 10.0  # at most, between lines of progress, where one call is not longer
SETTLE_S = 0.03  # between cases: another engine's threads, still spinning at a barrier, go to sleep


class Rate(NamedTuple):
    """Work per second over the rounds."""

    median: float
    low: float
    high: float


def say(text: str) -> None:
    """Progress, on stderr: stdout belongs to the report."""
    print(text, file=sys.stderr, flush=True)


def interleave(
    cases: Mapping[str, Callable[[], float]], rounds: int, budget_s: float = 30
) -> dict[str, Rate]:
    """Calls every case once per round; a call returns the rate it measured. The first round warms up.

    When the budget is used up there are no more rounds, but at least two.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    begin = spoke = time.perf_counter()
    neighbours = Neighbours()
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - begin > budget_s:
            break
        for name, run in cases.items():
            if time.perf_counter() - spoke > SILENCE_S:
                spoke = time.perf_counter()
                say(f"  round {number} of {rounds}, after {spoke - begin:.0f} s")
            time.sleep(SETTLE_S)
            rate = run()
            if number:
                found[name].append(rate)
    if (busy := neighbours.cores()) > WORTH_A_WARNING:
        say(f"  others used {busy:.2f} cores meanwhile: measure again on an idle machine")
    return {name: Rate(statistics.median(rates), min(rates), max(rates)) for name, rates in found.items()}
