"""What the operating system knows about this process: its memory and its age. Linux; no
third-party modules.

This file must not know models or messages.
"""

from __future__ import annotations

import os
import time


def resident_bytes() -> int:
    """Memory of this process that is in RAM, pages of the mapped model file included."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def age_ms() -> float:
    """Time since this process was started (execve of the interpreter included), to 10 ms."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()  # the name in parentheses may hold anything
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, field 22
    return (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s) * 1000
