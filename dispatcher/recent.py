"""How long requests took of late: the last ones that were answered.

For the status alone; no decision reads it. Costs nothing per token, and a sort when somebody asks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from tinyloop_serve.protocol.messages import Latency, Stats

KEPT = 500
WINDOW_S = 60.0
QUANTILES = (0.5, 0.9, 0.99)


class Recent:
    def __init__(self) -> None:
        # (when it ended, milliseconds: to the first token, per token after it, whole)
        self._answered: deque[tuple[float, float, float, float]] = deque(maxlen=KEPT)

    def answered(self, arrived: float, streamed_at: float, stats: Stats, now: float) -> None:
        """`streamed_at`: when its first token went out; 0 = all went at once, at the end."""
        first = (streamed_at - arrived) * 1000 if streamed_at else stats.queue_ms + stats.first_token_ms
        each = stats.decode_ms / max(1, stats.generated_tokens - 1)
        self._answered.append((now, first, each, (now - arrived) * 1000))

    def latency(self, now: float) -> Latency:
        """Of those that ended in the last `WINDOW_S`."""
        late = [each[1:] for each in self._answered if each[0] > now - WINDOW_S]
        if not late:
            return Latency()
        first, each, whole = (_quantiles(column) for column in zip(*late, strict=True))
        return Latency(requests=len(late), first_token_ms=first, token_ms=each, whole_ms=whole)


def _quantiles(values: Iterable[float]) -> tuple[float, float, float]:
    """By nearest rank: each is a value that occurred."""
    ranked = sorted(values)
    p50, p90, p99 = (round(ranked[math.ceil(q * len(ranked)) - 1], 2) for q in QUANTILES)
    return p50, p90, p99
