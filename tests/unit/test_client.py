"""The blocking client against a scripted dispatcher: what a caller sees of each thing that can happen."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.protocol import errors, session
from tinyloop_serve.protocol.client import Client

spec = importlib.util.spec_from_file_location(
    "fake_dispatcher", Path(__file__).with_name("fake_dispatcher.py")
)
assert spec and spec.loader
fake = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
spec.loader.exec_module(fake)
done, echo, failed, tokens = fake.done, fake.echo, fake.failed, fake.tokens

LONG_S = 600.0  # a limit that a test must never reach


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts scripted dispatchers and closes them after the test."""
    running = []

    def begin(*args: Any, **kwargs: Any) -> Any:
        running.append(fake.FakeDispatcher(*args, **kwargs))
        return running[-1]

    yield begin
    for each in running:
        each.close()


def connect(dispatcher: Any, **kwargs: Any) -> Client:
    return Client(dispatcher.endpoint, **{"connect_timeout_s": LONG_S, "lease_s": LONG_S, **kwargs})


# ------------------------------------------------------------------ answers


def test_a_stream_gives_chunks_in_order_and_then_the_whole(start: Any) -> None:
    with connect(start(answer=echo)) as client, client.stream("to be or") as stream:
        chunks = [(c.seq, c.tokens, c.text) for c in stream]
        whole = stream.result()
    assert chunks == [(0, (2,), "to "), (1, (2,), "be "), (2, (2,), "or "), (3, (), "END")]
    assert (whole.text, whole.tokens, whole.stop_reason) == ("to be or END", (2, 2, 2), "max_tokens")
    assert whole.stats.generated_tokens == 3


def test_generate_asks_for_one_answer_in_one_piece(start: Any) -> None:
    dispatcher = start(answer=echo)
    with connect(dispatcher) as client:
        assert client.generate("hello world").text == "hello world END"
    (_, body), *rest = dispatcher.wait_for("Generate")
    assert body == {"type": "Generate", "id": body["id"], "prompt_text": "hello world", "stream": False}
    assert not rest


def test_every_option_arrives_in_its_field(start: Any) -> None:
    dispatcher = start(answer=lambda body: [done(body["id"])] if body["type"] == "Generate" else [])
    with connect(dispatcher) as client:
        client.stream(
            [1, 2**32 - 1],
            loops=4,
            max_tokens=7,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            stop="end",
            stop_tokens=[[5, 6]],
            ignore_eos=True,
            cache_mode="int8",
            cache_window=32,
            beam_size=2,
            deadline_s=1.5,
        ).result()
    ((_, body),) = dispatcher.wait_for("Generate")
    sampling = dict(loops=4, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    sampling |= dict(cache_mode="int8", cache_window=32, beam_size=2)
    assert body == {
        "type": "Generate",
        "id": body["id"],
        "prompt_tokens": b"\1\0\0\0\xff\xff\xff\xff",
        "sampling": sampling,
        "max_tokens": 7,
        "seed": 2**64 - 1,
        "stop": ["end"],
        "stop_tokens": [[5, 6]],
        "ignore_eos": True,
        "deadline_ms": 1500,
    }


def test_a_batch_is_asked_at_once_and_answered_in_order(start: Any) -> None:
    waiting: list[Any] = []

    def all_in_reverse(body: Any) -> list[Any]:
        waiting.extend([body] if body["type"] == "Generate" else [])
        return [piece for each in reversed(waiting) for piece in echo(each)] if len(waiting) == 3 else []

    with connect(start(answer=all_in_reverse)) as client:
        texts = [completion.text for completion in client.batch(["a", "b b", "c"], max_tokens=5)]
    assert texts == ["a END", "b b END", "c END"]


def test_one_failure_in_a_batch_is_raised_and_cancels_the_rest(start: Any) -> None:
    def fail_two(body: Any) -> list[Any]:
        return [failed(body["id"], "engine")] if body.get("prompt_text") == "two" else []

    dispatcher = start(answer=fail_two)
    with connect(dispatcher) as client:
        with pytest.raises(errors.EngineFailed):
            client.batch(["two", "three", "four"])
        ids = {body["id"] for _, body in dispatcher.wait_for("Generate", 3) if body["prompt_text"] != "two"}
        assert {body["id"] for _, body in dispatcher.wait_for("Cancel", 2)} == ids


def test_status_is_typed(start: Any) -> None:
    with connect(start(answer=echo)) as client:
        status = client.status()
    assert status.model is not None and status.model.max_loops == 8
    assert [(r.name, r.state) for r in status.replicas] == [("r0", "ready")]
    assert status.buckets[0].waiting == 1


def test_a_slow_reader_loses_nothing(start: Any) -> None:
    n = 5000  # more than every ZeroMQ queue on the way holds

    def flood(body: Any) -> list[Any]:
        if body["type"] != "Generate":
            return []
        return [*(tokens(body["id"], k, [k], "x") for k in range(n)), done(body["id"])]

    with connect(start(answer=flood)) as client:
        slow = client.stream("slow", max_tokens=n)
        assert len(client.stream("quick", max_tokens=n).result().tokens) == n  # overtakes the unread one
        assert [chunk.tokens[0] for chunk in slow] == list(range(n))


def test_threads_share_a_client(start: Any) -> None:
    with connect(start(answer=echo)) as client, ThreadPoolExecutor(16) as pool:
        prompts = [f"thread {n} " + "w " * (n % 7) for n in range(160)]
        answers = list(pool.map(lambda prompt: client.generate(prompt).text, prompts))
    assert answers == [" ".join(prompt.split()) + " END" for prompt in prompts]


# ------------------------------------------------------------------ cancel, leave, interrupt


def test_cancel_ends_a_stream_with_what_it_had(start: Any) -> None:
    dispatcher = start()
    with connect(dispatcher) as client:
        stream = client.stream("x")
        ((peer, body),) = dispatcher.wait_for("Generate")
        dispatcher.say(peer, tokens(body["id"], 0, [4], "four"))
        assert next(stream).text == "four"
        stream.cancel()
        ((_, cancel),) = dispatcher.wait_for("Cancel")
        assert cancel["id"] == body["id"] == stream.id
        dispatcher.say(peer, tokens(body["id"], 1, [5], "five"), done(body["id"], "cancelled"))
        result = stream.result()
    assert (result.stop_reason, result.text) == ("cancelled", "fourfive")


def test_leaving_the_block_or_dropping_the_stream_cancels(start: Any) -> None:
    dispatcher = start()
    with connect(dispatcher) as client:
        with client.stream("left") as left:
            pass
        dispatcher.wait_for("Cancel", 1)
        with pytest.raises(errors.TransportError, match="left"):
            next(left)
        client.stream("dropped")
        gc.collect()
        dispatcher.wait_for("Cancel", 2)
        (peer, first), (_, second) = dispatcher.wait_for("Generate", 2)
        for late in (first, second):  # what was on its way when the cancel left
            dispatcher.say(peer, tokens(late["id"], 0, [1]), done(late["id"], "cancelled"))
        third = client.stream("still fine")
        (*_, (_, body)) = dispatcher.wait_for("Generate", 3)
        dispatcher.say(peer, done(body["id"], text="ok"))
        assert third.result().text == "ok"


def test_control_c_cancels_and_leaves_the_client_usable(start: Any) -> None:
    def interrupt(body: Any) -> list[Any]:
        if body.get("prompt_text") == "long":
            os.kill(os.getpid(), signal.SIGINT)
            return []
        return echo(body)

    dispatcher = start(answer=interrupt)
    with connect(dispatcher) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate("long")
        ((_, cancel),) = dispatcher.wait_for("Cancel")
        assert cancel["id"] == dispatcher.wait_for("Generate")[0][1]["id"]
        assert client.generate("next").text == "next END"


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_each_code_is_raised_as_its_class(start: Any, code: str) -> None:
    more = dict(field="seed", value="-1", accepted="0 to 9", retry_after_ms=1500)
    dispatcher = start(answer=lambda b: [failed(b["id"], code, "why", **more)] if "id" in b else [])
    with connect(dispatcher, resume_s=0) as client, pytest.raises(errors.TinyLoopError) as caught:
        client.generate("x")
    error = caught.value
    assert type(error) is errors.BY_CODE[code]
    assert (error.message, error.field, error.value, error.accepted) == ("why", "seed", "-1", "0 to 9")
    assert error.retry_after_s == 1.5 and error.request_id


def test_a_code_of_the_future_is_still_a_typed_error(start: Any) -> None:
    dispatcher = start(answer=lambda b: [failed(b["id"], "quota", "too much")] if "id" in b else [])
    with connect(dispatcher) as client, pytest.raises(errors.TinyLoopError, match="quota: too much"):
        client.status()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"seed": 2**64}, ""),
        ({"stop": [""]}, "stop"),
        ({"stop": ["\ud800"]}, ""),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": "1"}, "deadline_s"),
        ({"stop_tokens": [[-1]]}, "stop_tokens"),
        ({"cache_mode": "int3"}, "sampling.cache_mode"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(start: Any, options: Any, field: str) -> None:
    dispatcher = start(answer=echo)
    with connect(dispatcher) as client:
        with pytest.raises(errors.InvalidRequest) as caught:
            client.generate("x", **options)
        assert caught.value.field == field
        client.generate("good")
    assert len(dispatcher.wait_for("Generate")) == 1


@pytest.mark.parametrize("prompt", ["", [], b"bytes", [-1], [2**32], [0.5], ["a"], None])
def test_bad_prompts_are_refused(start: Any, prompt: Any) -> None:
    with connect(start(answer=echo)) as client, pytest.raises(errors.InvalidRequest):
        client.generate(prompt)


def test_an_oversize_prompt_names_the_limit(start: Any) -> None:
    with connect(start(answer=echo)) as client, pytest.raises(errors.LimitExceeded, match="at most"):
        client.generate("x" * (5 << 20))


def test_a_misspelt_option_is_a_type_error(start: Any) -> None:
    with connect(start(answer=echo)) as client, pytest.raises(TypeError, match="max_token'.*known: loops"):
        client.generate("x", max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "ipc://" + "x" * 200, "", "foo://bar"])
def test_a_bad_endpoint_is_refused_by_the_constructor(endpoint: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="endpoint"):
        Client(endpoint)


@pytest.mark.parametrize(
    ("second", "words"),
    [(2, "gap"), (0, "repetition"), (None, "more tokens than the 2")],
)
def test_tokens_out_of_sequence_end_only_their_own_stream(start: Any, second: int | None, words: str) -> None:
    dispatcher = start()
    with connect(dispatcher) as client:
        bad, good = client.stream("bad", max_tokens=2), client.stream("good")
        (peer, _), (_, other) = dispatcher.wait_for("Generate", 2)
        dispatcher.say(peer, tokens(bad.id, 0, [7], "a"))
        if second is None:
            dispatcher.say(peer, tokens(bad.id, 1, [8, 9], "b"))
        else:
            dispatcher.say(peer, tokens(bad.id, second, [7], "b"))
        dispatcher.say(peer, tokens(other["id"], 0, [1], "fine"), done(other["id"]))
        assert next(bad).tokens == (7,)
        with pytest.raises(errors.ProtocolError, match=words):
            next(bad)
        with pytest.raises(errors.ProtocolError, match=words):
            bad.result()
        assert good.result().text == "fine"
        assert dispatcher.wait_for("Cancel")[0][1]["id"] == bad.id


@pytest.mark.parametrize(
    "frames",
    [
        [b"TL9", b"\x80"],
        [b"TL2"],
        [b"TL2", b"\xc1"],
        [b"TL2", b"\x80", b"more"],
        [b""],
        [b"TL2", b"\x91" * 99],
    ],
)
def test_a_dispatcher_that_makes_no_sense_is_a_protocol_error(start: Any, frames: list[bytes]) -> None:
    dispatcher = start()
    with connect(dispatcher) as client:
        streams = [client.stream("a"), client.stream("b")]
        peer = dispatcher.wait_for("Generate", 2)[0][0]
        dispatcher.say_raw(peer, frames)
        for stream in streams:
            with pytest.raises(errors.ProtocolError) as caught:
                stream.result()
            assert caught.value.request_id == stream.id
        if frames[0] == b"TL9":
            assert "'TL9'" in caught.value.message and "'TL2'" in caught.value.message


def test_a_refusal_without_an_id_ends_everything(start: Any) -> None:
    dispatcher = start(answer=lambda body: [failed("", "auth", "who are you")] if "id" in body else [])
    with connect(dispatcher) as client, pytest.raises(errors.AuthError, match="who are you"):
        client.generate("x")


# ------------------------------------------------------------------ time and loss


def test_nobody_there_says_how_to_start_a_fleet_and_leaves_nothing_behind(start: Any, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    with Client(endpoint, connect_timeout_s=0.5, lease_s=LONG_S) as client:
        with pytest.raises(errors.ConnectFailed, match="tinyloop up") as caught:
            client.generate("stale")
        assert endpoint in caught.value.message
        dispatcher = start(endpoint, echo)
        fake.wait_until(lambda: _reaches(client))
    dispatcher.wait_for("Goodbye")
    assert {body["type"] for _, body in dispatcher.seen} == {"GetStatus", "Goodbye"}


def _reaches(client: Client) -> bool:
    try:
        client.status()
    except errors.ConnectFailed:
        return False
    return True


def test_without_resuming_a_dispatcher_that_dies_is_noticed_at_once_and_its_successor_is_used(
    start: Any, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    first = start(endpoint)
    with Client(endpoint, connect_timeout_s=LONG_S, lease_s=LONG_S, resume_s=0) as client:
        streams = [client.stream("a"), client.stream("b")]
        peer = first.wait_for("Generate", 2)[0][0]
        first.say(peer, tokens(streams[0].id, 0, [3], "abc"))
        assert next(streams[0]).text == "abc"
        first.close()
        for stream in streams:
            with pytest.raises(errors.ConnectFailed, match="closed the connection"):
                stream.result()
        second = start(endpoint, echo)
        assert client.generate("again").text == "again END"
    assert len(second.wait_for("Generate")) == 1


def test_a_silent_dispatcher_is_given_up_after_the_lease(start: Any) -> None:
    dispatcher = start()
    with connect(dispatcher, lease_s=1.5, resume_s=0) as client:
        streams = [client.stream("a"), client.stream("b")]
        dispatcher.wait_for_pings(2)  # it did answer for a while
        dispatcher.mute = True
        for stream in streams:
            with pytest.raises(errors.ConnectFailed, match="hangs"):
                stream.result()


def test_pings_carry_the_lease_and_stop_with_the_last_request(start: Any) -> None:
    dispatcher = start()
    with connect(dispatcher, lease_s=2.0) as client:
        stream = client.stream("x")
        peer = dispatcher.wait_for("Generate")[0][0]
        pings = dispatcher.wait_for_pings(3)
        assert [ping["n"] for ping in pings[:3]] == [1, 2, 3] and pings[0]["lease_ms"] == 2000
        dispatcher.say(peer, done(stream.id))
        stream.result()
        assert client._link._session.wake_at() is None


def test_a_deadline_is_sent_and_kept_even_if_the_dispatcher_forgets(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "DEADLINE_GRACE_S", 0.05)
    dispatcher = start()
    with connect(dispatcher, timeout_s=7.0) as client:
        with pytest.raises(errors.DeadlineExceeded):
            client.generate("x", deadline_s=0.05)
        dispatcher.wait_for("Cancel")
        with client.stream("y"), client.stream("z", deadline_s=None):
            bodies = [body for _, body in dispatcher.wait_for("Generate", 3)]
    assert [body["deadline_ms"] for body in bodies] == [50, 7000, 7000]


def test_close_says_goodbye_and_wakes_those_who_wait(start: Any) -> None:
    dispatcher = start()
    client = connect(dispatcher)
    stream = client.stream("x")
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            stream.result()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    dispatcher.wait_for("Generate")
    client.close()
    client.close()
    thread.join(fake.CAP_S)
    assert [type(error) for error in caught] == [errors.TransportError]
    dispatcher.wait_for("Goodbye")
    client.cancel("anything")  # harmless
    with pytest.raises(errors.TransportError, match="closed"):
        client.generate("x")


def test_a_forgotten_client_says_goodbye(start: Any) -> None:
    dispatcher = start(answer=echo)
    assert connect(dispatcher).generate("x").text == "x END"
    gc.collect()
    dispatcher.wait_for("Goodbye")


def test_a_fault_in_the_thread_fails_the_callers_instead_of_hanging(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    dispatcher = start()
    with connect(dispatcher) as client:
        stream = client.stream("x")
        peer = dispatcher.wait_for("Generate")[0][0]
        monkeypatch.setattr(session.Session, "receive", lambda self, frames, now: 1 / 0)
        dispatcher.say(peer, done(stream.id))
        with pytest.raises(errors.TransportError, match="ZeroDivisionError"):
            stream.result()
