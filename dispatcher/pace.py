"""How long a request will run, by those that ran: seconds per unit of its work.

Kept apart for each number of loops and each size of batch, as a lane of a large batch is slower than one that
runs alone. An estimate is the mean and the mean deviation of what was measured, both smoothed, as TCP keeps
its round trips (Jacobson, 1988). The work is what was asked for, `cost`, so that answers which end before
`max_tokens` count as the shorter ones that they are. Knows no requests and no queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tinyloop_serve.protocol.errors import DeadlineExceeded

GAIN = 1 / 8  # of one measurement
DEVIATIONS = 1.0  # above the mean
SURE, SURE_DEVIATIONS = 8, 3.0  # measurements, and margin, from which on "never in time" may be said
FRESH_S, FRESH_RUNS = 1.0, 10.0  # how long a measurement holds: this, or so many times what was measured


@dataclass(slots=True)
class _Measured:
    """Seconds per unit of cost."""

    mean: float
    deviation: float
    count: int = 1
    until: float = 0.0  # when it holds no more: what is refused for it would never be measured again

    def add(self, pace: float) -> None:
        gain = max(GAIN, 1 / (self.count + 1))  # the first few count alike
        self.deviation += gain * (abs(pace - self.mean) - self.deviation)
        self.mean += gain * (pace - self.mean)
        self.count += 1


class Pace:
    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` of batches."""
        self._sizes = sorted({1, *sizes})
        self._measured: dict[tuple[int, int], _Measured] = {}  # by loops and size

    def ran(self, loops: int, size: int, cost: float, seconds: float, now: float, *, whole: bool) -> None:
        """A request has left its lane. Not `whole`: it was stopped, so that it would have taken at least
        this long, which says something only where less was expected."""
        pace = seconds / cost
        measured = self._measured.get((loops, size))
        if measured is None:
            if not whole:
                return
            measured = self._measured[loops, size] = _Measured(pace, pace / 2)
        elif whole or pace > measured.mean:
            measured.add(pace)
        measured.until = now + max(FRESH_S, FRESH_RUNS * seconds)

    def likely_s(self, loops: int, company: int, cost: float, now: float) -> float:
        """What a request needs, mostly, when so many are ready to run together; 0: not known."""
        for size in self._sizes[bisect_left(self._sizes, company) :: -1]:  # a smaller one: no slower
            if (measured := self._measured.get((loops, size))) and now <= measured.until:
                return cost * (measured.mean + DEVIATIONS * measured.deviation)
        return 0.0

    def least_s(self, loops: int, cost: float, now: float) -> float:
        """What a request needs alone, if all goes well; 0: that is not known for certain."""
        measured = self._measured.get((loops, 1))
        if measured is None or measured.count < SURE or now > measured.until:
            return 0.0
        return cost * max(0.0, measured.mean - SURE_DEVIATIONS * measured.deviation)

    def refuse_never(self, deadline_ms: int, loops: int, cost: float, now: float) -> None:
        """Raises `DeadlineExceeded` when even an idle fleet would be too slow for it."""
        least_ms = 1000 * self.least_s(loops, cost, now)
        if deadline_ms and least_ms > deadline_ms:
            accepted = f"at least {least_ms:.0f}"
            message = f"even an idle fleet needs about {least_ms:.0f} ms; its deadline is {deadline_ms} ms"
            raise DeadlineExceeded(message, field="deadline_ms", value=str(deadline_ms), accepted=accepted)
