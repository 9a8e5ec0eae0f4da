"""What the serial line of the emulated machine says of each test.

It must not know where the lines come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Run:
    level: bool = False  # the test said that it compares AVX-512
    checks: int = 0
    status: int | None = None  # as wait(2) gives it


def judge(tests: Iterable[str], lines: Iterable[str]) -> tuple[int, list[str]]:
    """-> (checks done, what is wrong). Reads no further than the end of the machine's work."""
    runs = {name: Run() for name in tests}
    running, faults = Run(), []
    for line in lines:
        if start := re.search(r"init: start /(\w+)", line):
            running = runs[start[1]]
        elif end := re.search(r"init: end /(\w+) (-?\d+)", line):
            runs[end[1]].status = int(end[2])
        elif line == "level avx512":
            running.level = True
        elif counted := re.match(r"(\d+) checks, 0 failed", line):
            running.checks = int(counted[1])
        elif line == "init: done":
            break
    else:
        faults.append("the machine did not come to the end of its work")
    for name, run in runs.items():
        if run.status is None:
            faults.append(f"{name} did not end")
        elif run.status:
            faults.append(f"{name} ended with wait status {run.status}")
        elif not run.level or not run.checks:
            faults.append(f"{name} checked nothing of AVX-512")
    return sum(run.checks for run in runs.values()), faults
