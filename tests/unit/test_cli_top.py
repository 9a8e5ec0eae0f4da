"""What `tinyloop top` makes of two looks at a fleet, and the dispatcher's figures of the last requests."""

from __future__ import annotations

import pytest

from tinyloop_serve.deploy import screen
from tinyloop_serve.deploy.report import describe_status
from tinyloop_serve.deploy.screen import Look, Rates
from tinyloop_serve.dispatcher.recent import KEPT, WINDOW_S, Recent
from tinyloop_serve.protocol.messages import BucketStatus, Latency, ReplicaStatus, Stats, Status


def status(tokens: int, *replicas: ReplicaStatus, finished: int = 0, buckets: int = 0) -> Status:
    waiting = tuple(BucketStatus(f"shape {n}", n + 1, 5) for n in range(buckets))
    latency = Latency(9, (1.0, 2.0, 3.5), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0))
    return Status(
        *("s", "1.0", 5000, None, replicas, waiting, 3, 2, finished, 0, 1), tokens=tokens, latency=latency
    )


def replica(name: str, tokens: int, **fields: object) -> ReplicaStatus:
    return ReplicaStatus(name, f"ipc:///{name}", "ready", tokens=tokens, **fields)  # type: ignore[arg-type]


# ------------------------------------------------------------------ rates


def test_rates_are_what_was_added_between_two_looks() -> None:
    before = Look(10.0, status(100, replica("a", 60), replica("b", 40), finished=5))
    after = Look(12.0, status(400, replica("a", 260), replica("c", 99), finished=9))
    assert screen.between(before, after) == Rates(
        over_s=2.0, tokens=150.0, requests=2.0, replicas={"ipc:///a": 100.0, "ipc:///c": 0.0}
    )
    assert screen.between(after, after).tokens == 0.0


# ------------------------------------------------------------------ the screen


def shown(now: Status, width: int = 200, height: int = 50, trouble: str = "") -> list[str]:
    rates = screen.between(Look(0.0, now), Look(1.0, now))
    return [text for text, _ in screen.lines("ipc:///e", rates, now, trouble, width, height)]


def test_the_screen_has_replicas_budgets_queues_and_latencies() -> None:
    one = replica("a", 7, running=2, budget_bytes=100_000_000, reserved_bytes=25_000_000, max_handles=8)
    lines = shown(status(7, one, buckets=2))
    assert any("2 running, 3 waiting" in line for line in lines)
    assert any(line.split() == ["first", "token", "1.0", "2.0", "3.5"] for line in lines)
    assert any("[##........] 25 % of 100 MB" in line and "0/8" in line for line in lines)
    assert [line.split()[0] for line in lines[-2:]] == ["2", "1"], "the longest queue first"
    assert shown(status(7), trouble="gone")[1].startswith("NO ANSWER: gone")


def test_one_that_is_ill_does_not_serve_and_says_why() -> None:
    now = status(0, replica("a", 0), replica("b", 0, health="3 calls failed"))
    assert "replicas=1/2" in screen.line(screen.between(Look(0.0, now), Look(1.0, now)), now)
    for lines in (shown(now), list(describe_status("ipc:///e", now))):
        rows = [line for line in lines if "ready" in line and "none yet" not in line]
        assert [line.endswith("3 calls failed") for line in rows] == [False, True]


@pytest.mark.parametrize(("width", "height"), [(20, 5), (1, 1), (80, 24)])
def test_nothing_leaves_the_window(width: int, height: int) -> None:
    lines = shown(status(0, *(replica(f"replica-{n}", n) for n in range(30))), width, height)
    assert len(lines) == height and max(map(len, lines)) <= width


def test_text_of_other_processes_does_not_reach_the_terminal_as_it_is() -> None:
    hostile = replica("a\x1b[2J\n", 0, health="ö\x07")
    text = "\n".join(shown(status(0, hostile)))
    assert "\x1b" not in text and "\x07" not in text and "a?[2J?" in text


# ------------------------------------------------------------------ the dispatcher's figures


def stats(first_ms: float) -> Stats:
    return Stats(queue_ms=1.0, first_token_ms=first_ms, decode_ms=30.0, generated_tokens=4)


def test_latencies_are_those_of_the_last_minute() -> None:
    recent = Recent()
    assert recent.latency(0.0) == Latency()
    for n in range(100):
        recent.answered(arrived=n - 0.5, streamed_at=0.0, stats=stats(float(n)), now=float(n))
    found = recent.latency(99.0)
    assert found.requests == WINDOW_S
    assert found.first_token_ms == (70.0, 94.0, 100.0)
    assert found.token_ms == (10.0, 10.0, 10.0) and found.whole_ms == (500.0, 500.0, 500.0)
    assert recent.latency(99.0 + WINDOW_S) == Latency()


def test_a_stream_is_measured_where_it_was_forwarded() -> None:
    recent = Recent()
    recent.answered(arrived=10.0, streamed_at=10.25, stats=stats(1.0), now=11.0)
    assert recent.latency(11.0).first_token_ms[0] == 250.0


def test_a_flood_of_requests_keeps_the_last_ones() -> None:
    recent = Recent()
    for n in range(3 * KEPT):
        recent.answered(arrived=0.0, streamed_at=0.0, stats=stats(float(n)), now=1.0)
    found = recent.latency(1.0)
    assert found.requests == KEPT and found.first_token_ms[0] > 2 * KEPT
