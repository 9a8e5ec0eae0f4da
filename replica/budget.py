"""The replica's memory: what it may take, what it needs at most, and the arithmetic when that does not fit.

    budget >= weights and work space + max_handles x largest handle + one decode cache of the largest shape

What is left after weights and handles is for the decode caches of a run; the dispatcher's ledger gives it
out. The memory is the device's own where it has some, of which replicas that share it take equal parts, else
the host's. This file must not know sockets or messages other than `Budget`.
"""

from __future__ import annotations

import os
from typing import Protocol

from tinyloop_serve.native import devices
from tinyloop_serve.protocol.messages import Budget, CacheCost
from tinyloop_serve.protocol.modes import CACHE_MODES
from tinyloop_serve.replica.config import Config, ConfigFault

POSITIONS = 16  # caches are made in steps of so many


class Sizes(Protocol):
    """What is used of `native.Model`."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def device_free_bytes(self) -> int: ...
    def cache_bytes(self, tokens: int, cache_mode: str, loops: int, cache_window: int = 0) -> int: ...


def check_file(config: Config) -> None:
    """Before anything is loaded: weights alone must fit, where they stay as the file has them. Raises
    `ConfigFault`; a missing file is not ours."""
    if config.weights != "auto":
        return
    try:
        size = os.path.getsize(config.model)
    except OSError:
        return
    limit = _limit(config, _own_memory(config) or _available())
    if size > limit:
        raise ConfigFault(f"{config.model} has {_mib(size)} of weights, the memory budget is {_mib(limit)}")


def of(model: Sizes, config: Config, max_loops: int) -> Budget:
    """The budget of a loaded model. Raises `ConfigFault` with the arithmetic when it does not fit."""
    costs = {mode: _cost(model, mode) for mode in CACHE_MODES}
    mode = max(costs, key=lambda mode: costs[mode].fixed + max_loops * costs[mode].per_loop)
    largest = model.cache_bytes(model.max_seq_len, mode, max_loops)
    handles = config.max_handles * largest
    free = model.device_free_bytes
    limit = _limit(config, model.weight_bytes + (_available() if free < 0 else free))
    caches = limit - model.weight_bytes - handles
    if caches < largest:
        shape = f"{model.max_seq_len} positions at {max_loops} loops in {mode}"
        raise ConfigFault(
            f"the memory budget of {_mib(limit)} < {_mib(model.weight_bytes)} of weights and work space"
            f" + {config.max_handles} handles x {_mib(largest)} + {_mib(largest)} for one decode cache"
            f" ({shape}) = {_mib(model.weight_bytes + handles + largest)};"
            " lower --max-handles or --max-seq-len, or raise --memory-mib"
        )
    return Budget(
        memory_bytes=limit,
        weight_bytes=model.weight_bytes,
        cache_bytes=caches,
        handle_bytes=handles,
        max_handles=config.max_handles,
        costs=costs,
        window_rows=_window_rows(model),
    )


def _cost(model: Sizes, mode: str) -> CacheCost:
    one, two = (model.cache_bytes(POSITIONS, mode, loops) for loops in (1, 2))
    per_loop = (two - one) // POSITIONS
    return CacheCost(fixed=one // POSITIONS - per_loop, per_loop=per_loop, round_to=POSITIONS)


def _window_rows(model: Sizes) -> int:
    """How many positions more than its window a ring holds."""
    per_position = model.cache_bytes(POSITIONS, "fp16", 1) // POSITIONS
    return model.cache_bytes(1 << 20, "fp16", 1, POSITIONS) // per_position - POSITIONS


def _limit(config: Config, free: int) -> int:
    """The configured budget, else all of `free`, but of a device's own memory no more than our part."""
    if config.memory_mib:
        return config.memory_mib << 20
    own = _own_memory(config)
    return min(free, own // config.device_share) if own else free


def _own_memory(config: Config) -> int:
    """Of the configured device; 0: it computes in the host's, or is not there."""
    if config.device == "cpu":  # asking wakes the drivers of all the others
        return 0
    named: dict[str, int] = {device["name"]: device["total_bytes"] for device in devices()}
    return named.get(config.device) or named.get(f"{config.device}:0", 0)


def _available() -> int:
    with open("/proc/meminfo", "rb") as meminfo:
        lines = dict(line.split(b":") for line in meminfo)
    available = int(lines[b"MemAvailable"].split()[0]) << 10
    try:  # of a container or a service unit
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            return available if text == "max" else min(available, max(0, int(text) - int(used.read())))
    except OSError:
        return available


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
