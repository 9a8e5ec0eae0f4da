"""The client's decisions, without sockets and with a clock of our own."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_serve.protocol import errors, messages
from tinyloop_serve.protocol.answers import Question
from tinyloop_serve.protocol.calls import Chunk, Completion, Options, prepare
from tinyloop_serve.protocol.codec import TO_CLIENT, TO_DISPATCHER, tokens_from_bytes
from tinyloop_serve.protocol.messages import (
    VERSION,
    CreateHandle,
    Done,
    Failed,
    Generate,
    GetStatus,
    HandleInfo,
    Pong,
    Recipe,
    Stats,
    ToClient,
    ToDispatcher,
    Tokens,
)
from tinyloop_serve.protocol.session import MAX_FRUITLESS, Events, Session

GONE = errors.ConnectFailed("it closed the connection")


class Driver:
    """A session, its clock and what it sent."""

    def __init__(self, resume_s: float = 0.0) -> None:
        self.session = Session("ipc://x", connect_timeout_s=5.0, lease_s=8.0, resume_s=resume_s)
        self.now = 1000.0

    def put(self, question: Question, timeout_s: float | None = None) -> None:
        self.session.open(question, TO_DISPATCHER.encode(question), self.now, timeout_s)

    def hear_all(self, *said: ToClient) -> Events:
        return self.session.receive([VERSION, *map(TO_CLIENT.encode_body, said)], self.now)

    def lose(self) -> Events:
        return self.session.lost(GONE, self.now)

    def reconnect(self) -> list[ToDispatcher]:
        """What a driver does when the session is broken; returns what it sends first."""
        assert self.session.broken
        self.session.broken = False
        return self.messages()

    def messages(self) -> list[ToDispatcher]:
        sent = [TO_DISPATCHER.decode(frames) for frames in self.session.outbox]
        self.session.outbox.clear()
        return sent

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
    driver.put(GetStatus(id="s"))
    ((_, wrong),) = driver.hear(Done(id="s", stop_reason="eos"))
    assert isinstance(wrong, errors.ProtocolError)


def test_cancel_of_an_unknown_id_sends_nothing() -> None:
    driver = Driver()
    driver.session.cancel("nobody")
    assert driver.sent() == []


def test_losing_an_idle_connection_is_nobodys_error() -> None:
    for resume_s in (0.0, 15.0):
        driver = Driver(resume_s)
        assert driver.lose() == [] and driver.session.wake_at() is None
        assert driver.reconnect() == []
        driver.tick(100.0)
        driver.ask("a")  # and begins anew
        assert driver.tick(4.9) == []
        ((_, error),) = driver.tick(0.1)
        assert "nobody answers" in str(error)


# ------------------------------------------------------------------ a dispatcher is lost


def start(driver: Driver, id: str, **options: Any) -> None:
    """A request of which two tokens have come."""
    driver.ask(id, **options)
    driver.hear(Tokens(id=id, seq=0, tokens=b"\1\0\0\0\2\0\0\0", text="ab", model="f00d"))


def test_open_requests_go_on_from_the_next_token_at_the_next_dispatcher() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a", max_tokens=4, seed=7)
    driver.ask("b")
    driver.messages()
    assert driver.lose() == []
    again = {message.id: message for message in driver.reconnect() if isinstance(message, Generate)}
    assert tokens_from_bytes(again["a"].done) == [1, 2] and again["b"].done == b""
    assert (again["a"].seed, again["a"].max_tokens) == (7, 4)
    assert (again["a"].model, again["b"].model) == ("f00d", ""), "only that model can go on with its tokens"
    driver.tick()
    assert driver.sent() == ["Ping"]
    assert driver.hear(Tokens(id="a", seq=2, tokens=b"\3\0\0\0", text="c")) == [("a", Chunk("c", (3,), 2))]
    end, driver.now = Done(id="a", stop_reason="eos", stats=Stats(failovers=1)), driver.now + 100
    assert driver.hear(end) == [("a", Completion("abc", (1, 2, 3), "eos", Stats(failovers=2)))]


def test_an_outage_lasts_resume_s_and_no_longer() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    driver.lose()
    assert driver.session.wake_at() == driver.now  # the first ping
    driver.tick()
    assert driver.session.wake_at() is not None
    for _ in range(14):
        assert driver.tick(1.0) == []
    driver.lose()  # one more does not prolong it
    ((id, error),) = driver.tick(1.0)
    assert id == "a" and isinstance(error, errors.ConnectFailed)
    assert "closed the connection" in str(error) and "15 s" in str(error)


def test_a_loss_after_an_answer_is_a_new_outage() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    for n in range(2, 6):
        driver.lose()
        driver.tick(14.0)
        (again,) = [message for message in driver.reconnect() if isinstance(message, Generate)]
        assert len(again.done) == 4 * n
        driver.hear(Tokens(id="a", seq=n, tokens=bytes(4)))


def test_silence_is_a_loss_too_and_so_is_having_been_stopped() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    for _ in range(4):
        driver.tick(1.9)
    assert not driver.session.broken
    driver.tick(0.5)
    assert driver.session.broken  # the dispatcher hangs
    assert "Generate" in [type(message).__name__ for message in driver.reconnect()]
    driver.hear(Pong(n=1))
    driver.tick()
    driver.now += 8.0  # SIGSTOP
    driver.hear(Pong(n=2))
    assert driver.tick() == [] and driver.session.broken
    assert [type(message).__name__ for message in driver.reconnect()] == ["Generate"]


def test_what_is_no_request_fails_at_once_and_a_cancelled_one_is_over() -> None:
    driver = Driver(resume_s=15.0)
    driver.put(GetStatus(id="s"))
    driver.put(CreateHandle("c", Recipe("prefix", "x")))
    start(driver, "a")
    driver.session.cancel("a")
    events = dict(driver.lose())
    assert isinstance(events["s"], errors.ConnectFailed) and isinstance(events["c"], errors.ConnectFailed)
    assert events["a"] == Completion("ab", (1, 2), "cancelled", Stats(generated_tokens=2))
    assert driver.reconnect() == []


def test_errors_that_a_new_connection_would_not_mend_end_everything() -> None:
    for error in (errors.AuthError("x"), errors.ProtocolError("x"), errors.TransportError("x")):
        driver = Driver(resume_s=15.0)
        start(driver, "a")
        ((_, end),) = driver.session.lost(error, driver.now)
        assert type(end) is type(error)
    driver = Driver(resume_s=15.0)
    driver.ask("never answered")
    ((_, end),) = driver.tick(5.0)
    assert isinstance(end, errors.ConnectFailed)


def test_the_deadline_goes_on_across_an_outage() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a", deadline_s=10.0)
    driver.now += 4.0
    driver.lose()
    (again,) = driver.reconnect()
    assert isinstance(again, Generate) and again.deadline_ms == 6000
    driver.tick(6.0)
    ((_, error),) = driver.tick(1.0)
    assert isinstance(error, errors.DeadlineExceeded)


def test_a_dispatcher_that_leaves_says_so_without_an_id() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    leaving = Failed("", "unavailable", "the dispatcher was stopped")
    assert driver.hear_all(Pong(n=1), leaving, Tokens(id="a", seq=2, tokens=bytes(4))) == []
    (again,) = driver.reconnect()
    assert isinstance(again, Generate) and len(again.done) == 8  # nothing after the goodbye counts
    plain = Driver()
    start(plain, "a")
    ((_, error),) = plain.hear(leaving)
    assert isinstance(error, errors.Unavailable)


def test_no_room_at_a_dispatcher_that_came_back_is_not_the_end() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    driver.lose()
    driver.reconnect()
    assert driver.hear(Failed("a", "overloaded", "full", retry_after_ms=2000)) == []
    driver.tick()
    driver.messages()
    driver.hear(Pong(n=1))
    driver.tick(1.9)
    assert not [message for message in driver.messages() if isinstance(message, Generate)]
    driver.tick(0.1)
    (again,) = [message for message in driver.messages() if isinstance(message, Generate)]
    assert len(again.done) == 8
    driver.hear(Failed("a", "unavailable", "no replica yet"))
    driver.session.cancel("a")  # the dispatcher does not have it: it would ignore a Cancel
    ((_, end),) = driver.tick()
    assert isinstance(end, Completion) and end.stop_reason == "cancelled"
    assert not [message for message in driver.messages() if isinstance(message, Generate)]


def test_a_new_loss_forgets_what_was_to_be_asked_again() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    driver.lose()
    driver.hear(Failed("a", "overloaded", "full", retry_after_ms=2000))
    driver.lose()
    assert len(driver.reconnect()) == 1
    for _ in range(8):
        driver.tick(1.0)
    assert set(driver.sent()) == {"Ping"}


def test_no_room_in_the_ordinary_course_is_an_error_and_so_it_is_long_after_a_loss() -> None:
    driver = Driver(resume_s=15.0)
    driver.ask("a")
    ((_, error),) = driver.hear(Failed("a", "overloaded", "full"))
    assert isinstance(error, errors.Overloaded)
    start(driver, "b")
    driver.lose()
    driver.now += 31.0
    ((_, error),) = driver.hear(Failed("b", "overloaded", "full"))
    assert isinstance(error, errors.Overloaded)


def test_a_request_that_kills_dispatchers_is_not_asked_for_ever() -> None:
    driver = Driver(resume_s=15.0)
    start(driver, "a")
    for _ in range(MAX_FRUITLESS):
        assert driver.lose() == []
        driver.hear(Pong(n=1))
    ((_, error),) = driver.lose()
    assert isinstance(error, errors.ConnectFailed) and "without a token" in str(error)


# ------------------------------------------------------------------ handles


def info(name: str = "h1", lease_ms: int = 6000) -> HandleInfo:
    return HandleInfo(name, "prefix", 3, 4, lease_ms=lease_ms)


def holding(resume_s: float = 0.0) -> Driver:
    driver = Driver(resume_s)
    driver.put(CreateHandle("c", Recipe("prefix", "x")))
    made = messages.Handle("c", info())
    assert driver.hear(made) == [("c", made)]
    driver.tick()
    driver.messages()
    return driver


def test_a_handle_is_renewed_and_the_connection_kept_alive_until_it_is_dropped() -> None:
    driver = holding()
    sent = []
    for _ in range(6):
        driver.hear(Pong(n=1))
        driver.tick(1.0)
        sent += driver.messages()
    assert [type(message).__name__ for message in sent].count("Ping") == 3
    renewals = [message for message in sent if isinstance(message, messages.RenewHandle)]
    assert len(renewals) == 3 and {each.handle for each in renewals} == {"h1"}
    assert driver.hear(messages.Handle(renewals[-1].id, info())) == []
    driver.session.drop("h1")
    (drop,) = driver.messages()
    assert isinstance(drop, messages.DropHandle) and drop.handle == "h1"
    assert driver.session.wake_at() is None
    assert driver.hear(messages.Handle(drop.id, info())) == [] and driver.messages() == []


def test_a_handle_that_is_gone_is_left_alone_until_it_is_used() -> None:
    driver = holding()
    driver.tick(2.0)
    (renewal,) = [each for each in driver.messages() if isinstance(each, messages.RenewHandle)]
    assert driver.hear(Failed(renewal.id, "handle_lost", "evicted")) == []
    for _ in range(10):
        driver.hear(Pong(n=1))
        driver.tick(1.0)
    assert "RenewHandle" not in driver.sent()
    driver.ask("a", handle="h1")
    driver.hear(Done(id="a", stop_reason="eos"))
    driver.tick(2.0)
    assert "RenewHandle" in driver.sent()


def test_handles_are_renewed_at_once_on_a_new_connection_and_given_up_with_it() -> None:
    driver = holding(resume_s=15.0)
    assert driver.lose() == []
    driver.tick()
    assert [type(message).__name__ for message in driver.reconnect()] == ["RenewHandle", "Ping"]
    assert driver.tick(15.0) == [] and driver.session.wake_at() is None


def test_a_handle_made_for_somebody_who_left_is_dropped() -> None:
    driver = Driver()
    driver.put(CreateHandle("c", Recipe("prefix", "x")))
    driver.session.cancel("c")
    driver.messages()
    assert driver.hear(messages.Handle("c", info())) == []
    (drop,) = driver.messages()
    assert isinstance(drop, messages.DropHandle) and drop.handle == "h1"


def test_other_calls_have_the_callers_time_limit() -> None:
    driver = Driver()
    driver.put(GetStatus(id="s"), timeout_s=2.0)
    driver.hear(Pong(n=1))
    assert driver.tick(2.0) == []
    ((_, error),) = driver.tick(1.0)
    assert isinstance(error, errors.DeadlineExceeded)


# ------------------------------------------------------------------ whatever arrives


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
        lambda body: [VERSION, msgpack.packb(body)], st.dictionaries(st.just("type"), st.text(max_size=4))
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
    events += driver.session.fail(errors.TransportError("over"))
    check(events)


def check(events: Events) -> None:
    for id in "ab":
        mine = [event for whose, event in events if whose == id]
        assert not isinstance(mine[-1], Chunk) and all(isinstance(event, Chunk) for event in mine[:-1])
        chunks = [event for event in mine if isinstance(event, Chunk)]
        assert [c.seq for c in chunks] == [sum(len(d.tokens) for d in chunks[:n]) for n in range(len(chunks))]
        assert sum(len(c.tokens) for c in chunks) <= 4


LOSSES = st.one_of(
    st.sampled_from(["lost", "tick", "wait", "cancel a"]),
    st.builds(Tokens, id=st.sampled_from("ab"), seq=st.integers(0, 3), tokens=st.just(bytes(4))),
    st.builds(Done, id=st.sampled_from("ab"), stop_reason=st.just("eos")),
    st.builds(
        Failed, st.sampled_from(["", "a"]), st.sampled_from(["unavailable", "overloaded"]), st.just("m")
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LOSSES, max_size=25))
def test_through_any_losses_every_request_ends_once_and_no_token_comes_twice(steps: list[Any]) -> None:
    driver = Driver(resume_s=15.0)
    driver.ask("a", max_tokens=4)
    driver.ask("b", max_tokens=4)
    driver.messages()
    events: Events = []
    for step in steps:
        match step:
            case "lost":
                events += driver.lose()
            case "tick" | "wait":
                events += driver.tick(0.5 if step == "tick" else 4.0)
            case "cancel a":
                driver.session.cancel("a")
            case message:
                events += driver.hear(message)
        have = {id: sum(len(e.tokens) for i, e in events if i == id and isinstance(e, Chunk)) for id in "ab"}
        for message in driver.messages():
            if isinstance(message, Generate):
                assert len(message.done) == 4 * have[message.id]
        driver.session.broken = False
    events += driver.session.fail(errors.TransportError("over"))
    check(events)


def test_unknown_options_are_type_errors_and_generate_is_the_request() -> None:
    with pytest.raises(TypeError, match="unknown option 'top'"):
        Driver().ask("a", top=1)
    request, _ = prepare("a", [1], {}, stream=False, timeout_s=2.0)
    assert request == Generate(id="a", prompt_tokens=b"\1\0\0\0", stream=False, deadline_ms=2000)


def test_a_dispatcher_that_is_being_restarted_is_asked_again_for_a_while() -> None:
    driver = Driver(resume_s=3.0)
    driver.ask("a")
    driver.messages()
    for _ in range(5):
        assert driver.hear(Failed("a", "unavailable", "shutting down", retry_after_ms=500)) == []
        driver.tick(0.5)
        assert [type(message) for message in driver.messages() if isinstance(message, Generate)] == [Generate]
    driver.tick(0.6)
    ((_, error),) = driver.hear(Failed("a", "unavailable", "shutting down", retry_after_ms=500))
    assert isinstance(error, errors.Unavailable)
    plain = Driver()
    plain.ask("a")
    ((_, error),) = plain.hear(Failed("a", "unavailable", "shutting down", retry_after_ms=500))
    assert isinstance(error, errors.Unavailable)


def test_a_handle_that_meets_a_restart_is_ordered_again_too() -> None:
    driver = Driver(resume_s=3.0)
    driver.put(CreateHandle("c", Recipe("prefix", "x")))
    driver.messages()
    assert driver.hear(Failed("c", "unavailable", "shutting down", retry_after_ms=500)) == []
    driver.tick(0.5)
    assert CreateHandle("c", Recipe("prefix", "x")) in driver.messages()
    ((_, made),) = driver.hear(messages.Handle("c", info()))
    assert isinstance(made, messages.Handle)
