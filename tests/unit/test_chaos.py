"""The harm of scripts/chaos.py. Catches: harm that was never done, and passes as proof."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from scripts.chaos import Chaos, amiss

GOOD: dict[str, Any] = {
    **dict.fromkeys(("lost", "duplicated", "wrong", "orphans", "handles_left", "bytes_left"), 0),
    **{"fleet_exit_status": 0, "harm_error": "", "deeds_planned": 8, "dispatcher_restarts": 2},
    "deeds": {"kill": 1, "stop": 1, "hang": 0},
}


def chaos(pids: Callable[[str], list[int]]) -> Chaos:
    fleet: Any = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()), pids=pids)
    return Chaos(fleet, 0.01, [0.0], seed=1)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def test_a_restart_of_a_dispatcher_that_has_just_gone_is_done_later() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    there = subprocess.Popen(["sleep", "60"])
    looks: list[str] = []

    def pids(part: str) -> list[int]:
        looks.append(part)
        return [] if len(looks) < 3 else [gone.pid if len(looks) < 6 else there.pid]

    harm = chaos(pids)
    try:
        wait_until(lambda: harm.restarts or harm.error)
        assert (harm.restarts, harm.error) == (1, "") and looks[:6] == ["dispatcher"] * 6
        assert there.wait(30) == -15
    finally:
        harm.close()
        there.kill()
        there.wait()


def test_what_ends_the_harm_is_known() -> None:
    def pids(part: str) -> list[int]:
        raise PermissionError(1, "not ours")

    harm = chaos(pids)
    wait_until(lambda: harm.error)
    harm.close()
    assert harm.error == "PermissionError: [Errno 1] not ours"


def test_too_little_harm_proves_nothing() -> None:
    assert amiss(GOOD) == []
    assert amiss(GOOD | {"deeds": {"kill": 1}}) == ["deeds"]
    assert amiss(GOOD | {"harm_error": "OSError: gone"}) == ["harm_error"]
    assert amiss(GOOD | {"lost": 1, "fleet_exit_status": 1}) == ["lost", "fleet_exit_status"]
