"""`tinyloop top` in a real terminal, and without one, while requests run."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import Fleet
from tests.integration.terminal import Screen, Terminal

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def load_on(fleet: Fleet) -> Iterator[None]:
    """Streams that come one after the other, two at a time."""
    over = threading.Event()

    def ask(seed: int) -> None:
        with fleet.client() as client:
            while not over.is_set():
                client.generate("the", max_tokens=40, loops=2, ignore_eos=True, seed=seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def top(fleet: Fleet, rows: int = 24, columns: int = 100) -> Terminal:
    return Terminal(fleet.command("top", "--interval", "0.1"), fleet.environment, rows, columns)


def number(screen: Screen, pattern: str) -> float:
    found = re.search(pattern, screen.text)
    return float(found[1]) if found else 0.0


def test_the_screen_lives_follows_the_window_and_leaves_no_trace(shared_fleet: Fleet) -> None:
    with load_on(shared_fleet), top(shared_fleet) as terminal:
        terminal.until(lambda screen: number(screen, r"rates +(\d+) tokens/s"))
        assert terminal.screen.alternate
        finished = terminal.until(lambda screen: number(screen, r"so far +(\d+) finished"))
        terminal.until(lambda screen: number(screen, r"so far +(\d+) finished") > finished)
        terminal.until(lambda screen: number(screen, r"first token +\S+ +\S+ +(\S+)") > 0)
        for name in ("replica-0", "replica-1"):
            terminal.until(lambda screen, name=name: number(screen, rf"{name} +\w+ +\d+ +(\d+)") > 0)

        terminal.resize(8, 40)
        terminal.until(lambda screen: "more lines" in screen.lines[7])
        assert terminal.screen.lines[0].startswith("tinyloop")
        terminal.resize(40, 160)
        terminal.until(lambda screen: re.search(r"HEALTH\n.* ok\n.* ok\n", screen.text))
        assert "more lines" not in terminal.screen.text

        terminal.press(b"q")
        assert terminal.ended() == 0
        assert terminal.restored


@pytest.mark.parametrize("end", [b"\x03", signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_however_it_ends_the_terminal_is_as_before(shared_fleet: Fleet, end: bytes | signal.Signals) -> None:
    with top(shared_fleet) as terminal:
        terminal.until(lambda screen: "replica-1" in screen.text)
        assert not terminal.restored
        if isinstance(end, bytes):
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        assert terminal.ended() == 0
        assert terminal.restored


def test_a_fleet_that_goes_is_missed_and_keys_still_work(fleet: Fleet) -> None:
    with top(fleet) as terminal:
        terminal.until(lambda screen: "replica-1" in screen.text)
        assert fleet.stop() == 0
        terminal.until(lambda screen: "NO ANSWER" in screen.text)
        assert "replica-1" in terminal.screen.text, "what was known stays"
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert terminal.restored


def test_an_unknown_terminal_gets_lines(shared_fleet: Fleet) -> None:
    command = shared_fleet.command("top", "--interval", "0.1")
    with Terminal(command, shared_fleet.environment, 24, 160, term="dumb") as terminal:
        terminal.until(lambda screen: "replicas=2/2 running=" in screen.text)
        assert not terminal.screen.alternate
        terminal.press(b"\x03")
        assert terminal.ended() == 0


def test_without_a_terminal_it_prints_lines_until_it_is_stopped(shared_fleet: Fleet) -> None:
    command = shared_fleet.command("top", "--interval", "0.1")
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=shared_fleet.environment
    ) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(2)]
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
    assert all(re.match(r"\d\d:\d\d:\d\d replicas=2/2 running=0 ", line) for line in lines)
    assert "\x1b" not in "".join(lines)


def test_one_look_for_people_and_for_programs(shared_fleet: Fleet) -> None:
    with load_on(shared_fleet):
        shown = shared_fleet.run("top", "--once", "--interval", "0.5")
        found: dict[str, Any] = json.loads(shared_fleet.run("top", "--json", "--interval", "0.5").stdout)
    assert shown.returncode == 0 and "LATENCY, ms" in shown.stdout and "\x1b" not in shown.stdout
    assert found["tokens_per_s"] > 0 and found["over_s"] >= 0.5
    assert sum(each["tokens_per_s"] for each in found["replicas"]) == pytest.approx(
        found["tokens_per_s"], abs=0.1
    )
    assert found["tokens"] == sum(each["tokens"] for each in found["replicas"])
    p50, p90, p99 = found["latency"]["first_token_ms"]
    assert 0 < p50 <= p90 <= p99 <= max(found["latency"]["whole_ms"])


def test_nobody_there_is_said_at_once(shared_fleet: Fleet) -> None:
    done = shared_fleet.run("top", "--endpoint", f"ipc://{shared_fleet.directory}/nobody.sock")
    assert done.returncode == 69 and "tinyloop up" in done.stderr
