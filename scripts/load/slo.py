"""What was in time, and the highest rate at which enough is. Knows no fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from scripts.load.asked import Asked
from scripts.load.mix import LoadFault

MOST_STEPS = 16


@dataclass(frozen=True)
class Slo:
    """Limits of one request, milliseconds; 0 = none."""

    ttft: float = 0.0  # to the first token
    token: float = 0.0  # mean time of each token after it
    e2e: float = 0.0  # to the end

    def met(self, each: Asked) -> bool:
        """Whether it ended well, and in time. Counted from when it was due."""
        if each.completion is None or not each.times:
            return False
        found = {"ttft": each.first_s, "token": each.per_token_s, "e2e": each.seconds}
        return all(not (limit := getattr(self, name)) or 1000 * s <= limit for name, s in found.items())


def parse(text: str) -> Slo:
    """`ttft=300,token=50,e2e=3000`. Raises `LoadFault`."""
    limits = {}
    known = [field.name for field in fields(Slo)]
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in known or not 0 < limits[name] < float("inf"):
            accepted = f"NAME=MILLISECONDS with a name of {', '.join(known)}"
            raise LoadFault(f"slo: {part!r} is not accepted; expected {accepted}")
    return Slo(**limits)


def highest_rate(meets: Callable[[float], bool], start: float, precision: float = 0.05) -> float:
    """The highest rate that `meets`, to `precision` of itself; 0 if not even a 32nd of `start` does.

    Doubles or halves from `start` until one meets and one does not, then bisects."""
    good, bad = 0.0, 0.0
    rate = start
    for _ in range(MOST_STEPS):
        if meets(rate):
            good = max(good, rate)
        else:
            bad = min(bad, rate) if bad else rate
        if not good and bad <= start / 32:
            return 0.0
        if good and bad and bad / good <= 1 + precision:
            break
        rate = (good * bad) ** 0.5 if good and bad else 2 * good if good else bad / 2
    return good
