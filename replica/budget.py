"""The replica's memory: what it may take, what it needs at most, and the arithmetic when that does not fit.

    budget >= weights and work space + max_handles x largest handle + one decode cache of the largest shape

The largest handle is a resume handle, which keeps the states of its prompt beside a cache; the work space has
what a draft takes beside the cache of its request. What is left is for the decode caches of a run; the
dispatcher's ledger gives it out. The memory is the device's own where it has some, of which replicas that
share it take equal parts, else the host's. This file must not know sockets or messages other than `Budget`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from tinyloop_serve.native import devices
from tinyloop_serve.protocol.messages import Budget, CacheCost
from tinyloop_serve.protocol.modes import CACHE_MODES
from tinyloop_serve.replica.config import Config, ConfigFault
from tinyloop_serve.replica.speculation import MOST_DRAFTED

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
    def states_bytes(self, tokens: int) -> int: ...


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
    handle = largest + model.states_bytes(model.max_seq_len)
    handles = config.max_handles * handle
    free = model.device_free_bytes
    limit = _limit(config, model.weight_bytes + (_available() if free < 0 else free))
    draft = model.cache_bytes(MOST_DRAFTED, mode, max_loops) + model.states_bytes(1 + MOST_DRAFTED)
    weights = model.weight_bytes + draft
    caches = limit - weights - handles
    if caches < largest:
        shape = f"{model.max_seq_len} positions at {max_loops} loops in {mode}"
        raise ConfigFault(
            f"the memory budget of {_mib(limit)} < {_mib(weights)} of weights and work space"
            f" + {config.max_handles} handles x {_mib(handle)} + {_mib(largest)} for one decode cache"
            f" ({shape}) = {_mib(weights + handles + largest)};"
            " lower --max-handles or --max-seq-len, or raise --memory-mib"
        )
    return Budget(
        memory_bytes=limit,
        weight_bytes=weights,
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


def _available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """What is free of the host's memory, or of the least that a control group around us allows: a container's
    or a service unit's. Files that are kept for later reads count as free, as the kernel has it."""
    free = _fields(proc / "meminfo")["MemAvailable:"] << 10
    with contextlib.suppress(OSError):
        ours = (proc / "self/cgroup").read_text().rpartition("0::/")[2].strip()
        inner = groups / ours
        for group in (inner, *inner.parents):
            if group.is_relative_to(groups):
                free = min(free, _left(group, free))
    return free


def _left(group: Path, free: int) -> int:
    """Of its limit; `free` where it has none."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        files = _fields(group / "memory.stat")
    except OSError:
        return free
    if limit == "max":
        return free
    return max(0, int(limit) - int(used) + files["active_file"] + files["inactive_file"])


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
