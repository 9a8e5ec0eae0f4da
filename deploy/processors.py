"""Which processors each replica of one host gets: disjoint ones where there are enough, else all share.

Only this process's mask counts, which a container, a service manager or taskset may have narrowed. Knows no
replica: it answers in the words of their `--affinity` flag.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def core_of(cpu: int) -> tuple[int, int]:
    """(package, core): processors of one core share its arithmetic. Unknown: a core of its own."""
    try:
        package, core = (
            int((TOPOLOGY / f"cpu{cpu}" / "topology" / name).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return (0, cpu)
    return (package, core)


def named_cpus(affinity: str) -> list[int]:
    """The processors to divide: "auto" is all of this process's, "none" is none, else a list such as "0,2-5".

    Raises `ValueError` for text that is no such list, a repeat, or a processor that is not this process's.
    """
    ours = sorted(os.sched_getaffinity(0))
    if affinity in ("auto", "none"):
        return ours if affinity == "auto" else []
    cpus: list[int] = []
    for part in affinity.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        cpus += range(int(ends[0]), int(ends[1]) + 1) if all(map(_is_number, ends)) else [-1]
        if not set(cpus) <= set(ours) or len(set(cpus)) < len(cpus) or not cpus:
            raise ValueError(
                f"{affinity!r} is not accepted; expected auto, none, or a list such as 0,2-5 without repeats,"
                f" of the processors of this process: {','.join(map(str, ours))}"
            )
    return cpus


def divide(
    affinity: str, replicas: int, threads: int, core: Callable[[int], tuple[int, int]] = core_of
) -> list[str]:
    """The `--affinity` of each replica, `threads` processors each.

    A core each comes first; where cores are too few, the processors of a core go to one replica.
    """
    cpus = named_cpus(affinity)
    needed = replicas * threads
    if needed > len(cpus):
        return ["none"] * replicas
    if affinity == "auto":
        cpus.sort(key=lambda cpu: (core(cpu), cpu))
        first_of_core = [cpu for n, cpu in enumerate(cpus) if n == 0 or core(cpus[n - 1]) != core(cpu)]
        if needed <= len(first_of_core):
            cpus = first_of_core
    return [",".join(map(str, cpus[n : n + threads])) for n in range(0, needed, threads)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4
