"""How much of the machine others used meanwhile: a measurement beside a busy neighbour is none."""

from __future__ import annotations

import os
import time
from pathlib import Path

WORTH_A_WARNING = 0.1  # cores


class Neighbours:
    """Counts from its making on. Linux only; elsewhere it sees nobody."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _others_s()

    def cores(self) -> float:
        """Cores that other processes, and the hypervisor's other guests (steal), used on average."""
        begin, used = self._begin
        return max(0.0, _others_s() - used) / (time.perf_counter() - begin)


def busy_s() -> float:
    """CPU seconds of everybody since the machine started; 0 where that cannot be known."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, soft_irq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def _others_s() -> float:
    mine = os.times()
    return busy_s() - (mine.user + mine.system + mine.children_user + mine.children_system)
