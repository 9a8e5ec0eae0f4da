"""The queue for slow clients. Catches: unbounded memory, reordering, one client that delays another."""

from __future__ import annotations

from tinyloop_serve.dispatcher.outbox import OVERHEAD_BYTES, RETRY_S, Outbox, Verdict

ALICE, BOB = b"alice", b"bob"
SIZE = 900 + OVERHEAD_BYTES


class Wire:
    """Takes frames for the clients that read."""

    def __init__(self) -> None:
        self.stuck: set[bytes] = set()
        self.closed: set[bytes] = set()
        self.room = 1000  # messages that are taken before everybody is stuck
        self.taken: list[tuple[bytes, bytes]] = []
        self.outbox = Outbox(self.attempt, max_bytes=3 * SIZE, stall_s=10.0, farewell=[b"farewell"])

    def attempt(self, client: bytes, frames: list[bytes]) -> Verdict:
        if client in self.closed:
            return Verdict.GONE
        if client in self.stuck or not self.room:
            return Verdict.SLOW
        self.room -= 1
        self.taken.append((client, frames[0][:1]))
        return Verdict.FINE

    def post(self, client: bytes, mark: bytes, now: float = 0.0) -> Verdict:
        return self.outbox.post(client, [mark.ljust(900)], now)


def test_a_reading_client_is_served_at_once_and_a_stuck_one_delays_nobody() -> None:
    wire = Wire()
    wire.stuck.add(ALICE)
    assert wire.post(ALICE, b"1") is Verdict.FINE
    assert wire.post(BOB, b"2") is Verdict.FINE
    assert wire.taken == [(BOB, b"2")] and len(wire.outbox) == 1


def test_order_is_kept_when_it_reads_again() -> None:
    wire = Wire()
    wire.stuck.add(ALICE)
    wire.post(ALICE, b"1")
    wire.stuck.clear()
    wire.post(ALICE, b"2")  # not past the first
    assert wire.outbox.flush(1.0) == []
    assert wire.taken == [(ALICE, b"1"), (ALICE, b"2")] and len(wire.outbox) == 0


def test_a_stuck_client_is_not_tried_at_every_turn_of_the_loop() -> None:
    wire = Wire()
    assert wire.outbox.wake_at() == float("inf")
    wire.stuck.add(ALICE)
    wire.post(ALICE, b"1", now=5.0)
    wire.outbox.flush(5.0)
    wire.stuck.clear()
    wire.outbox.flush(5.0 + 0.9 * RETRY_S)
    assert not wire.taken and wire.outbox.wake_at() == 5.0 + RETRY_S
    wire.outbox.flush(wire.outbox.wake_at())
    assert wire.taken == [(ALICE, b"1")]


def test_over_its_bytes_it_is_slow_and_at_twice_gone() -> None:
    wire = Wire()
    wire.stuck.add(ALICE)
    verdicts = [wire.post(ALICE, b"x") for _ in range(7)]
    assert verdicts == [Verdict.FINE] * 3 + [Verdict.SLOW] * 3 + [Verdict.GONE]
    assert wire.post(ALICE, b"y") is Verdict.FINE  # its queue begins anew
    wire.stuck.clear()
    wire.outbox.flush(1.0)
    assert wire.taken == [(ALICE, b"f"), (ALICE, b"y")], "it is told that the rest will not come"
    assert len(wire.outbox) == 0


def test_reading_nothing_for_too_long_is_slow_then_gone() -> None:
    wire = Wire()
    wire.stuck.add(ALICE)
    wire.post(ALICE, b"x", now=0.0)
    assert wire.outbox.flush(10.0) == []
    assert wire.outbox.flush(10.5) == [(ALICE, Verdict.SLOW)]
    assert wire.outbox.flush(20.5) == [(ALICE, Verdict.GONE)]
    assert wire.outbox.flush(30.0) == []
    assert wire.outbox.flush(41.0) == [(ALICE, Verdict.GONE)], "and the farewell waits no longer than others"
    wire.stuck.clear()
    wire.outbox.flush(42.0)
    assert wire.taken == [(ALICE, b"f")] and len(wire.outbox) == 0


def test_any_progress_restarts_the_stall_clock() -> None:
    wire = Wire()
    wire.stuck.add(ALICE)
    wire.post(ALICE, b"1", now=0.0)
    wire.stuck.clear()
    wire.outbox.flush(9.0)
    wire.stuck.add(ALICE)
    wire.post(ALICE, b"2", now=9.5)
    assert wire.outbox.flush(15.0) == []


def test_a_slow_reader_is_judged_by_what_still_waits_and_since_it_last_read() -> None:
    wire = Wire()
    wire.room = 0
    for mark in (b"1", b"2", b"3"):
        wire.post(ALICE, mark, now=0.0)
    wire.room = 1
    assert wire.outbox.flush(9.0) == [] and wire.taken == [(ALICE, b"1")]
    assert wire.post(ALICE, b"4", now=9.5) is Verdict.FINE
    assert wire.outbox.flush(19.0) == []
    assert wire.outbox.flush(19.5) == [(ALICE, Verdict.SLOW)]


def test_a_closed_client_is_gone_at_once_and_later() -> None:
    wire = Wire()
    wire.closed.add(ALICE)
    assert wire.post(ALICE, b"1") is Verdict.GONE
    wire.stuck.add(BOB)
    wire.post(BOB, b"1")
    wire.closed.add(BOB)
    assert wire.outbox.flush(0.0) == [(BOB, Verdict.GONE)]
    assert len(wire.outbox) == 0
