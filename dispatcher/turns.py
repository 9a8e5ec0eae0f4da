"""How long a request will wait for its turn, by how often its bucket had one while it waited.

Measured, not derived: how many buckets, tenants and replicas there are, and how long their runs take, is all
in the time from one turn to the next. Knows neither requests nor the policy that gives the turns.
"""

from __future__ import annotations

from dataclasses import dataclass

GAIN = 0.25  # of one turn
RESIDUE = 0.75  # of the time between two turns, until the next one: half on average; by the clock it would be
# least just before a turn, and all would be let in then


@dataclass(slots=True)
class Turns:
    since: float  # when the last one was, or its first request came, seconds
    every_s: float  # from one to the next, smoothed; 0 = not known
    lanes: float  # that go in one turn, smoothed
    had: bool = False  # one; else what it knows are others' turns

    def take(self, lanes: int, now: float, *, more: bool) -> None:
        """It has its turn. `more` would have gone, but had no room in it."""
        waited = now - self.since
        self.every_s += (waited - self.every_s) * (GAIN if self.had else 1.0)
        if more:
            self.lanes += (lanes - self.lanes) * GAIN
        self.since, self.had = now, True

    def wait_s(self, ahead: int, share: float) -> float:
        """Of one with so many before it, whose tenant has this share of the lanes."""
        return (RESIDUE + ahead / max(1.0, self.lanes * share)) * self.every_s
