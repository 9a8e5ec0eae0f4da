"""The ledger and its arithmetic. Catches: a budget that is overdrawn, a refusal without its sum."""

from __future__ import annotations

import pytest

from tinyloop_serve.dispatcher.ledger import Ledger, lane_bytes, refuse_what_never_fits
from tinyloop_serve.protocol.errors import LimitExceeded
from tinyloop_serve.protocol.messages import Budget, CacheCost, Sampling

COSTS = {"fp16": CacheCost(fixed=100, per_loop=50), "int8": CacheCost(fixed=50, per_loop=25)}
BUDGET = Budget(
    memory_bytes=1 << 20,
    weight_bytes=1000,
    cache_bytes=50_000,
    handle_bytes=5000,
    max_handles=2,
    costs=COSTS,
    window_rows=8,
)


def test_the_arithmetic_of_a_cache() -> None:
    assert lane_bytes(BUDGET, Sampling(loops=4), 17) == 32 * (100 + 4 * 50)
    assert lane_bytes(BUDGET, Sampling(loops=2, cache_mode="int8"), 16) == 16 * (50 + 2 * 25)
    assert lane_bytes(BUDGET, Sampling(loops=1, cache_window=40), 4000) == 48 * 150
    assert lane_bytes(BUDGET, Sampling(loops=1, beam_size=3), 16) == 2 * 3 * 16 * 150
    assert lane_bytes(None, Sampling(loops=1), 16) == 0


def test_what_never_fits_is_refused_with_the_sum() -> None:
    refuse_what_never_fits([BUDGET], Sampling(loops=4), 160)
    small = Budget(1 << 20, 1000, cache_bytes=1000, handle_bytes=0, max_handles=0, costs=COSTS)
    refuse_what_never_fits([small, BUDGET], Sampling(loops=4), 160)
    refuse_what_never_fits([small, None], Sampling(loops=4), 1 << 20)
    refuse_what_never_fits([], Sampling(loops=4), 1 << 20)
    with pytest.raises(LimitExceeded) as caught:
        refuse_what_never_fits([small, BUDGET], Sampling(loops=4), 161)
    assert "176 positions x (100 + 4 loops x 50) bytes = 52800 bytes > 50000 bytes" in str(caught.value)
    assert caught.value.field == "max_tokens" and "positions" in caught.value.accepted


def test_reserve_and_release() -> None:
    ledger = Ledger(BUDGET)
    ledger.reserve(1, 30_000)
    assert not ledger.can_hold(20_001) and ledger.can_hold(20_000)
    ledger.reserve(2, 20_000)
    ledger.release(1)
    ledger.release(7)
    assert ledger.cache_bytes == 20_000
    ledger.reserve_handle("a", 0)
    ledger.reserve_handle("a", 900)
    ledger.reserve_handle("b", 100)
    assert (ledger.handle_bytes, ledger.handles) == (1000, 2)
    ledger.check()
    ledger.release_handle("a")
    ledger.release_handle("unknown")
    assert (ledger.handle_bytes, ledger.handles) == (100, 1)
    with pytest.raises(AssertionError):
        ledger.reserve(3, 30_001)
    ledger.reserve_handle("c", 1)
    ledger.reserve_handle("d", 1)
    with pytest.raises(AssertionError, match="handles"):
        ledger.check()
