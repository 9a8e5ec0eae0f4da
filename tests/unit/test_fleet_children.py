"""A fleet's own children, real processes. Catches: one that dies at an unlucky moment, or in an unlucky way,
and ends the fleet or is not started again; one that hangs before it is ready; a pause of ours that is laid at
their door; a dispatcher that comes back where nobody looks for it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinyloop_serve.deploy import children, fleet
from tinyloop_serve.deploy.children import Child
from tinyloop_serve.deploy.fleet import Fleet
from tinyloop_serve.deploy.plan import Plan
from tinyloop_serve.dispatcher.config import read_flags


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """That prints and ends."""
    child = Child("talker", ["this"], str(tmp_path / "signs"))
    yield child
    child.signal(signal.SIGKILL)
    if child.running:
        wait_for_its_end(child)
        child.reap(0.0)
    child.close()


@pytest.fixture
def supervisor(tmp_path: Path, child: Child) -> Iterator[Fleet]:
    """With that child alone."""
    made = Fleet(Plan("m", f"ipc://{tmp_path}/front.sock", replicas=1))
    for each in made._children:
        each.close()
    made._children = [child]
    with made._selector:
        yield made


@pytest.fixture
def said(supervisor: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By the supervisor, for people."""
    lines: list[str] = []
    monkeypatch.setattr(supervisor._voice._said, "write", lines.append)
    return lines


def wait_for_its_end(child: Child) -> None:
    end = time.monotonic() + 60
    while not child.has_ended and time.monotonic() < end:
        time.sleep(0.01)


def test_a_child_that_ends_before_its_output_was_read_can_start_again(
    supervisor: Fleet, child: Child, said: list[str]
) -> None:
    for _ in range(2):  # the second one's output gets the number of the first's
        supervisor._start_due(child.start_at or 0.0)
        wait_for_its_end(child)
        supervisor._look_after(time.monotonic(), late_s=0.0)
        assert not child.running and child.start_at is not None
        assert not supervisor._selector.get_map(), "a closed descriptor is still watched"
    assert sum(line.startswith("talker: Namespaces") for line in said) == 2, "its last words"


def test_a_child_that_cannot_be_started_is_tried_again(
    supervisor: Fleet, child: Child, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    supervisor._start_due(5.0)
    assert not child.running and child.start_at == 5.25
    assert said[0].startswith("tinyloop: talker cannot be started: [Errno 2]")


def test_a_signal_without_a_name_ends_a_child_and_no_more(supervisor: Fleet, child: Child) -> None:
    child.arguments = ["http.server", "--bind", "127.0.0.1", "0"]  # goes on
    supervisor._start_due(1.0)
    child.signal(signal.Signals.SIGRTMIN + 3)  # type: ignore[arg-type]
    wait_for_its_end(child)
    supervisor._look_after(2.0, late_s=0.0)
    assert child.how_it_ended() == f"was killed by signal {signal.SIGRTMIN + 3}" and child.start_at == 2.25


def test_a_child_that_hangs_before_it_is_ready_is_killed(supervisor: Fleet, child: Child) -> None:
    child.arguments = ["http.server", "--bind", "127.0.0.1", "0"]
    supervisor._start_due(1.0)
    child.signal(signal.SIGSTOP)
    supervisor._look_after(1.0 + children.START_S - 0.1, late_s=0.0)
    assert not child.has_ended and supervisor._next_start(1.0) == children.START_S
    supervisor._look_after(2.0 + children.START_S, late_s=2.0)  # we slept
    assert child.silent_until == 2.0 + 2 * children.START_S
    supervisor._look_after(2.0 + 2 * children.START_S, late_s=0.5)
    if child.running:  # not seen to end yet
        wait_for_its_end(child)
        supervisor._look_after(3.0 + 2 * children.START_S, late_s=0.0)
    assert child.how_it_ended() == "was killed by SIGKILL" and child.start_at is not None


def test_output_without_end_or_without_lines_is_read_in_parts(child: Child) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    child.arguments = ["timeit", "-n", "1", code]
    child.start(0.0)
    end, shown = time.monotonic() + 60, 0
    while shown < 2 * children.READ_BYTES:
        assert time.monotonic() < end
        lines, ended = child.read(1.0)
        assert not ended and sum(map(len, lines)) <= children.READ_BYTES + 65536 + children.LONGEST_LINE
        shown += sum(map(len, lines))


def test_a_fleet_that_was_stopped_for_long_excuses_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between the waking that was planned and the one that came is nobody's silence."""
    late = []
    made = Fleet(Plan("m", "ipc:///nowhere/front.sock", replicas=1))
    clock = iter([100.0, 130.0])
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(made, "_start_due", lambda now: None)
    monkeypatch.setattr(made, "_next_start", lambda now: 2.5)
    monkeypatch.setattr(made, "_listen", lambda timeout_s: None)
    monkeypatch.setattr(made, "_look_after", lambda now, late_s: late.append(late_s))
    made._turn()
    assert late == [27.5]
    for each in made._children:
        each.close()


def test_a_dispatcher_is_started_again_at_its_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Fleet(Plan("m", "tcp://127.0.0.1:0", replicas=1))
    for each in made._children:
        each.ready_line = "READY"
    made._dispatcher.ready_line = "READY endpoint=tcp://127.0.0.1:4711 http=127.0.0.1:4712"
    monkeypatch.setattr(made._voice._shown, "write", lambda line: None)
    made._announce(1.0)
    flags = read_flags(made._dispatcher.arguments[1:])
    assert (flags["front"], flags["http"]) == ("tcp://127.0.0.1:4711", "127.0.0.1:4712")
    for each in made._children:
        each.close()
