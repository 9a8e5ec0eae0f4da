"""Short versions of the scripts that prove what the pool survives. Catches: a token that is lost, doubled or
wrong when replicas are killed, stopped or hung and the dispatcher is restarted; a frame that crashes the
dispatcher or makes it grow; a slow reader that slows its neighbours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def report(script: str, *arguments: str) -> dict[str, Any]:
    """The last line of a script, as it is run by hand."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, f"{found}\n{done.stderr[-4000:]}"
    return found


@pytest.mark.timeout(300)
def test_chaos_costs_no_token() -> None:
    found = report("chaos.py", "--requests", "48", "--seconds", "16", "--every", "2")
    assert found["finished"] == found["requests"] == 48
    for name in ("lost", "duplicated", "wrong", "orphans", "handles_left", "bytes_left"):
        assert found[name] == 0, found
    assert found["dispatcher_restarts"] == 2 and sum(found["deeds"].values()) >= 4


@pytest.mark.timeout(300)
def test_frames_of_all_kinds_harm_nobody() -> None:
    found = report("fuzz_wire.py", "--frames", "40000")
    assert found["alive"] and not found["failed"] and found["served"] >= 5
    assert found["exit_statuses"] == [0, 0]
    assert found["rss_mib_at_the_end"] - found["rss_mib_after_a_quarter"] < 16
