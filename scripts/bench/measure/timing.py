"""Interleaved timing: every round runs every case once, and medians over rounds are compared.

A drift of the machine's speed then touches all cases alike. Knows nothing of what it times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

BUDGET_S = 30.0  # of one set of cases
SETTLE_S = 0.03  # between cases: another engine's threads, still spinning at a barrier, go to sleep


class Rate(NamedTuple):
    """Work per second over the rounds."""

    median: float
    low: float
    high: float


def say(text: str) -> None:
    """Progress, on stderr: stdout belongs to the report."""
    print(text, file=sys.stderr, flush=True)


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Rate]:
    """Calls every case once per round; a call returns the rate it measured. The first round warms up.

    Slow cases get fewer rounds, but two.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    begin = time.perf_counter()
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - begin > BUDGET_S:
            break
        for name, run in cases.items():
            time.sleep(SETTLE_S)
            rate = run()
            if number:
                found[name].append(rate)
    return {name: Rate(statistics.median(rates), min(rates), max(rates)) for name, rates in found.items()}
