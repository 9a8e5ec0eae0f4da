"""A fleet's own children, real processes. Catches: one that dies at an unlucky moment and ends the fleet."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tinyloop_serve.deploy.children import Child
from tinyloop_serve.deploy.fleet import Fleet, Plan


def test_a_child_that_ends_before_its_output_was_read_can_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(Plan("m", f"ipc://{tmp_path}/front.sock", replicas=1))
    child = Child("talker", ["this"], str(tmp_path / "signs"))  # a module that prints and ends
    for each in fleet._children:
        each.close()
    fleet._children = [child]
    with fleet._selector:
        for _ in range(2):  # the second one's output gets the number of the first's
            fleet._start_due(child.start_at or 0.0)
            end = time.monotonic() + 60
            while not child.has_ended and time.monotonic() < end:
                time.sleep(0.01)
            fleet._look_after(time.monotonic())
            assert not child.running and child.start_at is not None
            assert not fleet._selector.get_map(), "a closed descriptor is still watched"
            assert "talker: Namespaces" in capsys.readouterr().err, "its last words"
    child.close()
