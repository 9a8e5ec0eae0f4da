"""The client's decisions, without sockets and with a clock of our own."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_serve.protocol import errors
from tinyloop_serve.protocol.calls import Chunk, Completion, Options, prepare
from tinyloop_serve.protocol.codec import TO_CLIENT, TO_DISPATCHER
from tinyloop_serve.protocol.messages import Done, Failed, Generate, GetStatus, Pong, Stats, ToClient, Tokens
from tinyloop_serve.protocol.session import Events, Session


class Driver:
    """A session, its clock and what it sent."""

    def __init__(self) -> None:
        self.session = Session("ipc://x", connect_timeout_s=5.0, lease_s=8.0)
        self.now = 1000.0

    def ask(self, id: str, **options: Any) -> None:
        request, frames = prepare(id, "x", Options(**options), stream=True, timeout_s=None)
        self.session.open(request, frames, self.now)

    def hear(self, message: ToClient) -> Events:
        return self.session.receive(TO_CLIENT.encode(message), self.now)

    def tick(self, later_s: float = 0.0) -> Events:
        self.now += later_s
        return self.session.tick(self.now)

    def sent(self) -> list[str]:
        sent = [type(TO_DISPATCHER.decode(frames)).__name__ for frames in self.session.outbox]
        self.session.outbox.clear()
        return sent


def test_an_idle_session_sends_nothing_and_never_wakes() -> None:
    driver = Driver()
    assert driver.tick(1e6) == [] and driver.sent() == [] and driver.session.wake_at() is None


def test_pings_go_out_four_times_per_lease_while_requests_are_open() -> None:
    driver = Driver()
    driver.ask("a")
    assert driver.session.wake_at() == driver.now
    driver.tick()
    assert driver.sent() == ["Generate", "Ping"]
    for _ in range(10):
        assert driver.session.wake_at() == driver.now + 2.0
        driver.tick(1.9)
        assert driver.sent() == []
        driver.hear(Pong(n=1))
        driver.tick(0.1)
        assert driver.sent() == ["Ping"]
    driver.hear(Done(id="a", stop_reason="eos"))
    assert driver.tick(100) == [] and driver.sent() == []


def test_nobody_answers() -> None:
    driver = Driver()
    driver.ask("a")
    assert driver.tick(4.9) == []
    driver.ask("b")  # does not restart the wait
    ((first, error), (second, other)) = driver.tick(0.1)
    assert (first, second) == ("a", "b") and isinstance(error, errors.ConnectFailed)
    assert "tinyloop up" in str(error) and "5 s" in str(error)
    assert isinstance(other, errors.ConnectFailed) and other is not error and other.request_id == "b"
    assert driver.session.broken and driver.sent() == []


def test_silence_is_counted_from_the_last_message_or_the_first_request() -> None:
    driver = Driver()
    driver.ask("a")
    driver.hear(Done(id="a", stop_reason="eos"))
    driver.tick(1000)
    driver.ask("b")  # a long idle time is not silence
    assert driver.tick(4.9) == []
    driver.hear(Pong(n=1))
    assert driver.tick(7.9) == []
    ((_, error),) = driver.tick(0.1)
    assert isinstance(error, errors.ConnectFailed) and "8 s" in str(error)


def test_a_client_that_slept_through_its_own_lease_does_not_wait_for_an_answer_that_was_cancelled() -> None:
    driver = Driver()
    driver.ask("a")
    driver.ask("b")
    driver.tick()
    driver.now += 8.0  # SIGSTOP, or a laptop that was closed
    assert driver.hear(Done(id="a", stop_reason="eos"))[0][0] == "a"  # came in time
    ((id, error),) = driver.tick()
    assert id == "b" and isinstance(error, errors.ConnectFailed) and "stopped" in str(error)


def test_deadlines_in_any_order_each_end_their_own_request() -> None:
    driver = Driver()
    for id, deadline_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("gone", 0.5)):
        driver.ask(id, deadline_s=deadline_s)
    driver.hear(Done(id="gone", stop_reason="eos"))
    driver.sent()
    ends = []
    for _ in range(5):
        ends += [(id, type(error), driver.now) for id, error in driver.tick(1.0)]
    grace = 1.0
    kind = errors.DeadlineExceeded
    assert ends == [(id, kind, 1000.0 + n + grace) for id, n in (("a", 1), ("b", 2), ("c", 3))]
    assert driver.sent().count("Cancel") == 3
    assert driver.hear(Tokens(id="a", seq=0, tokens=b"\0\0\0\0")) == []  # too late


def test_an_answer_is_assembled() -> None:
    driver = Driver()
    driver.ask("a")
    assert driver.hear(Tokens(id="a", seq=0, tokens=b"\1\0\0\0\2\0\0\0", text="on")) == [
        ("a", Chunk("on", (1, 2), 0))
    ]
    assert driver.hear(Tokens(id="a", seq=2, tokens=b"\3\0\0\0")) == [("a", Chunk("", (3,), 2))]
    assert driver.hear(Done(id="a", stop_reason="eos", text="ce", stats=Stats(loops=4))) == [
        ("a", Chunk("ce", (), 3)),
        ("a", Completion("once", (1, 2, 3), "eos", Stats(loops=4))),
    ]
    assert driver.hear(Done(id="a", stop_reason="eos")) == []


def test_torn_tokens_and_wrong_kinds_of_answer_are_refused() -> None:
    driver = Driver()
    driver.ask("a")
    ((_, torn),) = driver.hear(Tokens(id="a", seq=0, tokens=b"\1"))
    assert isinstance(torn, errors.ProtocolError) and torn.request_id == "a"
    request = GetStatus(id="s")
    driver.session.open(request, TO_DISPATCHER.encode(request), driver.now)
    ((_, wrong),) = driver.hear(Done(id="s", stop_reason="eos"))
    assert isinstance(wrong, errors.ProtocolError)


def test_cancel_of_an_unknown_id_sends_nothing() -> None:
    driver = Driver()
    driver.session.cancel("nobody")
    assert driver.sent() == []


def test_losing_an_idle_connection_breaks_nothing() -> None:
    driver = Driver()
    assert driver.session.lost(errors.ConnectFailed("x")) == [] and not driver.session.broken


FRAMES = st.one_of(
    st.lists(st.binary(max_size=30), max_size=3),
    st.builds(
        lambda id, seq, n: TO_CLIENT.encode(Tokens(id=id, seq=seq, tokens=bytes(n))),
        st.sampled_from("ab"),
        st.integers(-1, 4),
        st.integers(0, 9),
    ),
    st.builds(lambda id: TO_CLIENT.encode(Done(id=id, stop_reason="eos", text="z")), st.sampled_from("abc")),
    st.builds(lambda id: TO_CLIENT.encode(Failed(id, "engine", "m")), st.sampled_from(["", "a"])),
    st.builds(
        lambda body: [b"TL1", msgpack.packb(body)], st.dictionaries(st.just("type"), st.text(max_size=4))
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAMES, max_size=12))
def test_whatever_arrives_every_request_ends_once_and_no_token_twice(messages: list[list[bytes]]) -> None:
    driver = Driver()
    driver.ask("a", max_tokens=4)
    driver.ask("b", max_tokens=4)
    events: Events = []
    for frames in messages:
        events += driver.session.receive(frames, driver.now)
    events += driver.session.lost(errors.TransportError("over"))
    for id in "ab":
        mine = [event for whose, event in events if whose == id]
        assert not isinstance(mine[-1], Chunk) and all(isinstance(event, Chunk) for event in mine[:-1])
        chunks = [event for event in mine if isinstance(event, Chunk)]
        assert [c.seq for c in chunks] == [sum(len(d.tokens) for d in chunks[:n]) for n in range(len(chunks))]
        assert sum(len(c.tokens) for c in chunks) <= 4


def test_unknown_options_are_type_errors_and_generate_is_the_request() -> None:
    with pytest.raises(TypeError, match="unknown option 'top'"):
        Driver().ask("a", top=1)
    request, _ = prepare("a", [1], {}, stream=False, timeout_s=2.0)
    assert request == Generate(id="a", prompt_tokens=b"\1\0\0\0", stream=False, deadline_ms=2000)
