"""What a fleet writes down of itself. Catches: a signal to a process that is not the fleet any more, a fleet
that is not found because the clock was set."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from tinyloop_serve.deploy import endpoints, local


@pytest.fixture
def papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> local.Papers:
    monkeypatch.setattr(endpoints, "replica_directory", lambda endpoint: str(tmp_path))
    papers = local.Papers("ipc:///front", "model")
    papers.write()
    return papers


def test_a_fleet_is_found_though_the_clock_was_set(
    papers: local.Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = itertools.count(1.0, 86_400.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: next(days))
    record = local.read("ipc:///front")
    assert record and (record.pid, record.model) == (os.getpid(), os.path.abspath("model"))
    papers.reload_ended(False, "no")
    again = local.read("ipc:///front")
    assert again and (again.reloads, again.reloaded, again.verdict) == (1, False, "no")
    papers.remove()
    assert local.read("ipc:///front") is None


def test_another_process_of_the_same_id_is_not_the_fleet(papers: local.Papers, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        written = tmp_path / "fleet.json"
        written.write_text(written.read_text().replace(f'"pid": {os.getpid()},', f'"pid": {other.pid},'))
        assert local.read("ipc:///front") is None
        other.kill()
    assert local.read("ipc:///front") is None, "and one that has ended neither"
