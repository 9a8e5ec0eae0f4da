"""When the requests of an open-loop load come: seconds after its start. Knows no requests and no clock."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Independent of each other, `rate` per second: exponential gaps. Without end."""
    draw, now = random.Random(seed), 0.0
    while True:
        now += draw.expovariate(rate)
        yield now


def bursts(rate: float, size: int, seed: int) -> Iterator[float]:
    """`size` at the same moment; the moments as in `poisson`, for `rate` requests per second."""
    for moment in poisson(rate / size, seed):
        yield from [moment] * size
