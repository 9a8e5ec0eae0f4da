"""The books of one replica's memory: bytes of decode caches and handles, reserved before and released after.

The replica's announcement (`Budget`) says what there is; the arithmetic here is what the engine allocates.
A replica without a budget is not limited. `check` is the invariant; tests call it after every event.
"""

from __future__ import annotations

from collections.abc import Iterable

from tinyloop_serve.protocol.errors import LimitExceeded
from tinyloop_serve.protocol.messages import Budget, Sampling


class Ledger:
    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget
        self._caches: dict[int, int] = {}  # request key -> bytes
        self._handles: dict[str, int] = {}  # handle -> bytes

    @property
    def cache_bytes(self) -> int:
        return sum(self._caches.values())

    @property
    def handle_bytes(self) -> int:
        return sum(self._handles.values())

    @property
    def handles(self) -> int:
        return len(self._handles)

    def can_hold(self, cache_bytes: int) -> bool:
        """Whether decode caches of so many bytes fit beside those that are reserved."""
        return self.budget is None or self.cache_bytes + cache_bytes <= self.budget.cache_bytes

    def reserve(self, key: int, cache_bytes: int) -> None:
        """For the decode cache of request `key`; `can_hold` has said that it fits."""
        assert key not in self._caches and self.can_hold(cache_bytes)
        self._caches[key] = cache_bytes

    def release(self, key: int) -> None:
        """The cache of request `key` is free; it may have none."""
        self._caches.pop(key, None)

    def reserve_handle(self, handle: str, handle_bytes: int) -> None:
        """The replica holds it (it has made room itself); again: its size is known better now."""
        self._handles[handle] = handle_bytes

    def release_handle(self, handle: str) -> None:
        """It is gone; the replica may never have held it."""
        self._handles.pop(handle, None)

    def check(self) -> None:
        """Raises AssertionError unless nothing is negative and nothing is over the budget."""
        assert all(size >= 0 for size in [*self._caches.values(), *self._handles.values()])
        if self.budget is not None:
            assert self.cache_bytes <= self.budget.cache_bytes, "decode caches are over the budget"
            assert len(self._handles) <= self.budget.max_handles, "more handles than the cap"


def lane_bytes(budget: Budget | None, sampling: Sampling, positions: int) -> int:
    """What the decode cache of one request takes; `positions` = prompt + max_tokens, loops resolved."""
    return int(_arithmetic(budget, sampling, positions)[0]) if budget is not None else 0


def refuse_what_never_fits(budgets: Iterable[Budget | None], sampling: Sampling, positions: int) -> None:
    """Raises `LimitExceeded`, with the arithmetic, when no replica could hold the request even alone."""
    limits = list(budgets)
    if not limits or any(b is None or lane_bytes(b, sampling, positions) <= b.cache_bytes for b in limits):
        return
    largest = max((b for b in limits if b is not None), key=lambda b: b.cache_bytes)
    need, how = _arithmetic(largest, sampling, positions)
    cost = need / max(positions, 1)
    raise LimitExceeded(
        f"its decode cache needs {how} = {need} bytes > {largest.cache_bytes} bytes of the largest replica",
        field="max_tokens",
        value=f"{positions} positions with the prompt",
        accepted=f"about {int(largest.cache_bytes / cost)} positions at these loops and this cache_mode",
    )


def _arithmetic(budget: Budget, sampling: Sampling, positions: int) -> tuple[int, str]:
    cost = budget.costs[sampling.cache_mode]
    if sampling.cache_window:
        positions = min(positions, sampling.cache_window + budget.window_rows)
    rounded = -(-positions // cost.round_to) * cost.round_to
    each = cost.fixed + sampling.loops * cost.per_loop
    how = f"{rounded} positions x ({cost.fixed} + {sampling.loops} loops x {cost.per_loop}) bytes"
    if sampling.beam_size == 1:
        return rounded * each, how
    # Two sets of caches, so that beams can take over each other's.
    return rounded * each * 2 * sampling.beam_size, f"{how} x 2 x {sampling.beam_size} beams"
