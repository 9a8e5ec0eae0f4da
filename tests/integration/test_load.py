"""scripts/loadtest.py as it is run by hand, in seconds. Catches: a load that is not what was asked for, a
token that differs under it, a profile that does not start or does not do what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.deploy import profiles
from tinyloop_serve.native import demo_model_path

SCRIPT = Path(__file__).parents[2] / "scripts" / "loadtest.py"
SHORT = ("--seconds", "0.8", "--warm-up", "0.2", "--verify", "--threads", "1")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def loaded(out: Path, *flags: str) -> dict[str, Any]:
    """Its last line."""
    command = [sys.executable, str(SCRIPT), *SHORT, "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [] and found["verified"] >= found["finished"] > 0, found
    return found


@pytest.mark.parametrize("profile", profiles.names())
def test_each_profile_serves_its_load(profile: str, out: Path) -> None:
    found = loaded(out, "--profile", profile, "--closed", "5", "--slo", "ttft=60000", "--no-plots")
    assert not found["errors"] and found["goodput_share"] == 1
    batched = set(found["batch_sizes"]) - {"1"}
    if profile in ("single", "bucketed"):
        assert bool(batched) == (profile == "bucketed"), found["batch_sizes"]
    assert (found["prefix_share"] > 0) == (profile == "scaffold")
    assert (found["loops_skipped"] > 0) == (profile == "tiers")
    assert ("refined" in found["by_part"]) == (profile == "tiers")
    if profile == "speculative":  # on or off, as it was measured here
        on = found["fleet"]["speculation"][0].startswith("on")
        assert set(found["methods"]) == {"speculative" if on else "plain"}


def test_a_trace_is_asked_as_it_says_and_recorded(tmp_path: Path, out: Path) -> None:
    lines = [
        {"at": 0.9, "prompt": "The definition of", "loops": 2, "max_tokens": 8, "tenant": 1},
        {"at": 0.5, "prompt_tokens": 20, "loops": 4, "max_tokens": 9, "seed": 3, "temperature": 0.7},
        {"at": 1.0, "prompt_tokens": 20, "max_tokens": 100_000},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "fleet.toml"
    config.write_text(Path(profiles.path("bucketed")).read_text() + "tenants = 2\n")
    where = ["--config", str(config), "--trace", str(tmp_path / "in.jsonl")]
    found = loaded(out, *where, "--record", str(tmp_path / "out.jsonl"), "--no-plots")
    assert found["requests"] == 3 and found["errors"] == {"LimitExceeded": 1}
    assert set(found["by_tenant"]) == {"0", "1"}
    recorded = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {(each["at"], each["max_tokens"]) for each in recorded} == {(0.9, 8), (0.5, 9), (1.0, 100_000)}


def test_a_sweep_finds_a_rate_and_draws_it(out: Path) -> None:
    limits = ["--slo", "ttft=2000", "--precision", "7"]
    found = loaded(out, "--profile", "bucketed", "--sweep", *limits)
    points = {point["rate"]: point["goodput_share"] for point in found["sweep"]["points"]}
    assert points[found["sweep"]["highest_rps"]] >= 0.95 and len(points) >= 2
    for name in ("latency", "throughput", "curve"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "cdf" in json.loads((out / "report.json").read_text())


def test_a_fleet_that_runs_is_loaded_at_a_rate(shared_fleet: Any, out: Path) -> None:
    served = shared_fleet.status().finished
    where = ["--endpoint", shared_fleet.endpoint, "--model", str(demo_model_path())]
    found = loaded(out, *where, "--rate", "12", "--burst", "3", "--slo", "ttft=60000", "--no-plots")
    assert shared_fleet.status().finished - served == found["verified"] >= found["requests"] > 0
    assert found["requests"] % 3 == 0 and not found["errors"]
