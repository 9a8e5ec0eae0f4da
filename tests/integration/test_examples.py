"""Each example on its profile, as it says itself, and the Python of the documents.

Catches: an example that does not run, or shows nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import PATIENCE_S, fleet_of
from tinyloop_serve.deploy import profiles

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOWS = {
    "single": r"-- [1-9]\d* tokens, the first after \d+ ms",
    "bucketed": r"-- requests by size of their batch: .*\d+ in [2-8]\b",
    "scaffold": r"-- [1-9]\d* of \d+ prompt tokens came from the scaffold(?s:.*)-- 0 of",
    "tiers": r"16 loops: .*\n-- [1-9]\d* loops of the prompt were not computed again",
    "speculative": r"-- (plain: |speculative: [1-9]\d* of )",
}


def test_every_profile_has_an_example() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SHOWS) == profiles.names()


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_an_example_runs_on_its_profile(name: str) -> None:
    with fleet_of("--profile", name, "--threads", "1") as fleet:
        command = [sys.executable, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(
            command, capture_output=True, text=True, env=fleet.environment, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert re.search(SHOWS[name], done.stdout), done.stdout
        assert fleet.stop() == 0


def test_the_python_of_the_documents_runs_as_it_is_printed() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [
        each for path in documents for each in re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
    ]
    assert len(blocks) >= 3
    with fleet_of("--replicas", "1") as fleet:
        for block in blocks:
            command = [sys.executable, "-W", "error", "-c", block]
            done = subprocess.run(
                command, capture_output=True, text=True, env=fleet.environment, timeout=PATIENCE_S
            )
            assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert fleet.stop() == 0
