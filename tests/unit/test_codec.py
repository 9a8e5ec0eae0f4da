"""Frames: what we write is what the independent `msgpack` package reads and the other way round, and no bytes
whatsoever do more than raise one of three typed errors."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_serve.protocol import codec, errors, limits, messages
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_CLIENT, TO_DISPATCHER, TO_REPLICA, Direction
from tinyloop_serve.protocol.messages import VERSION, Generate, Lane, ModelInfo, Recipe, Sampling, Stats

MODEL = ModelInfo("demo", "ab12", 8192, 8, 16, 512, 4_000_000, True, "{{x}}", "int8")
HELD = messages.HandleInfo("h1", "prefix", 9, 4, "int8", 0, 1 << 20, "r0", True, False, 3, 20, 5000)
BUILD = messages.Build("h1", "resume", b"\1\0\0\0", 4, "int8", 32, "acme", True, True, 5000)
BUDGET = messages.Budget(9, 8, 7, 6, 5, {"fp16": messages.CacheCost(1, 2)}, 64)
CALIBRATION = messages.Calibration(True, 1.5, 1.4, 2, 4, 8)
EXAMPLES: list[tuple[Direction[Any], messages.Message]] = [
    (TO_DISPATCHER, Generate(id="a", prompt_text="grüße 🙂")),
    (
        TO_DISPATCHER,
        Generate(
            id="b",
            prompt_tokens=b"\1\0\0\0",
            sampling=Sampling(4, 0.5, 40, 0.9, 0.05, 1.1, "int8", 32, 2),
            max_tokens=7,
            seed=2**64 - 1,
            stop=("end", "\n"),
            stop_tokens=((1, 2), (3,)),
            ignore_eos=True,
            stream=False,
            deadline_ms=1500,
            priority=-3,
            method="speculative",
            handle="h1",
            recipe=Recipe("prefix", prompt_text="a", loops=4, cache_mode="int8"),
            done=b"\7\0\0\0",
        ),
    ),
    (TO_DISPATCHER, messages.CreateHandle("c", Recipe("resume", None, b"\1\0\0\0", 4, "int8", 32))),
    (TO_DISPATCHER, messages.CreateHandle("c", Recipe("scaffold", "x"), True, True, 5000)),
    (TO_DISPATCHER, messages.RenewHandle(id="n", handle="h1")),
    (TO_DISPATCHER, messages.DropHandle(id="d", handle="h1")),
    (TO_DISPATCHER, messages.ListHandles(id="l")),
    (TO_DISPATCHER, messages.Control("o", "drain", "r0", 0)),
    (TO_DISPATCHER, messages.Cancel(id="a")),
    (TO_DISPATCHER, messages.Ping(n=3, lease_ms=10_000)),
    (TO_DISPATCHER, messages.GetStatus(id="s")),
    (TO_DISPATCHER, messages.Goodbye()),
    (TO_CLIENT, messages.Tokens(id="a", seq=2, tokens=b"\1\0\0\0", text="x")),
    (TO_CLIENT, messages.Done(id="a", stop_reason="eos", text="y", stats=Stats(3, 4, 8, 1.5, replica="r0"))),
    (TO_CLIENT, messages.Failed("a", "limit", "too long", "max_tokens", "9", "8", 250)),
    (
        TO_CLIENT,
        messages.Status(
            id="s",
            version="1",
            uptime_ms=5,
            model=MODEL,
            replicas=(messages.ReplicaStatus("r0", "ipc://r0", "busy", 7, 1, 2, 3, 4, 5, "e"),),
            buckets=(messages.BucketStatus("loops 8", 1, 20),),
            waiting=1,
            running=1,
            finished=2,
            failed=0,
            clients=1,
        ),
    ),
    (TO_CLIENT, messages.Pong(n=3)),
    (TO_CLIENT, messages.Handle("c", HELD)),
    (TO_CLIENT, messages.Handles("l", (HELD, HELD))),
    (TO_CLIENT, messages.Controlled("o", "draining")),
    (TO_REPLICA, messages.Hello(dispatcher="d")),
    (
        TO_REPLICA,
        messages.Run(
            run=1,
            sampling=Sampling(loops=8),
            lanes=(
                Lane(1, "a", b"\1\0\0\0", 8),
                Lane(2, "b", b"\2\0\0\0", 9, 5, ("x",), ((1,),), True, False, 1.5),
            ),
            batch_size=4,
        ),
    ),
    (TO_REPLICA, messages.CancelLanes(keys=(1, 2))),
    (TO_REPLICA, BUILD),
    (TO_REPLICA, messages.Drop(handles=("h1", "h2"))),
    (TO_REPLICA, messages.Ping(n=1)),
    (TO_REPLICA, messages.Goodbye()),
    (FROM_REPLICA, messages.Ready("r0", 7, "cpu", MODEL, "{}", 1, 99)),
    (
        FROM_REPLICA,
        messages.Ready(
            *("r0", 7, "cpu", MODEL),
            budget=BUDGET,
            calibration=CALIBRATION,
            handles=(messages.HeldHandle(BUILD, 99),),
        ),
    ),
    (FROM_REPLICA, messages.Calibrated(CALIBRATION)),
    (FROM_REPLICA, messages.Built("h1", 99, ("h0",))),
    (FROM_REPLICA, messages.Built("h1", code="engine", message="out of memory")),
    (FROM_REPLICA, messages.Step(run=1, keys=(1, 2), tokens=(1, 0), final=(False, True), idle=True)),
    (FROM_REPLICA, messages.Pong(n=1, step_counter=9, running=1, memory_bytes=5)),
    (FROM_REPLICA, messages.Goodbye()),
]
IDS = [f"{type(message).__name__}-{n}" for n, (_, message) in enumerate(EXAMPLES)]
DIRECTIONS = [TO_DISPATCHER, TO_CLIENT, TO_REPLICA, FROM_REPLICA]
REFUSALS = (errors.ProtocolError, errors.InvalidRequest, errors.LimitExceeded)


def payloads_of(message: Any) -> list[bytes]:
    return [b"payload"] * len(message.keys) if isinstance(message, messages.Step) else []


# ------------------------------------------------------------------ both ways


@pytest.mark.parametrize(("direction", "message"), EXAMPLES, ids=IDS)
def test_round_trip(direction: Direction[Any], message: messages.Message) -> None:
    frames = direction.encode(message, payloads_of(message))
    assert frames[0] == b"TL2"
    assert direction.decode(frames) == message


@pytest.mark.parametrize(("direction", "message"), EXAMPLES, ids=IDS)
def test_round_trip_through_the_independent_package(
    direction: Direction[Any], message: messages.Message
) -> None:
    body = msgpack.unpackb(direction.encode_body(message))
    assert body == {"type": type(message).__name__} | {
        name: plain(getattr(message, name)) for name in message.__struct_fields__ if name in body
    }
    spelt_out = plain(message)  # defaults written, as other clients may
    for form in (body, spelt_out):
        assert direction.decode([VERSION, msgpack.packb(form), *payloads_of(message)]) == message


def plain(value: Any) -> Any:
    """What msgpack gives for `value`: maps without the fields that have their default, lists."""
    if isinstance(value, msgspec.Struct):
        omit = not isinstance(value, messages.Message) and type(value).__struct_config__.omit_defaults
        defaults = dict(
            zip(reversed(value.__struct_fields__), reversed(value.__struct_defaults__), strict=False)
        )
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        tag = {"type": type(value).__name__} if isinstance(value, messages.Message) else {}
        kept = {k: plain(v) for k, v in fields.items() if not (omit and k in defaults and defaults[k] == v)}
        return tag | kept
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return value


def test_every_message_of_every_direction_has_an_example() -> None:
    for direction, union in zip(
        DIRECTIONS,
        (messages.ToDispatcher, messages.ToClient, messages.ToReplica, messages.FromReplica),
        strict=True,
    ):
        assert isinstance(union, types.UnionType)
        assert {type(m) for d, m in EXAMPLES if d is direction} == set(typing.get_args(union))


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        TO_DISPATCHER.decode(TO_CLIENT.encode(messages.Tokens(id="a", seq=0, tokens=b"")))
    assert caught.value.field == "type"


def test_numbers_of_numpy_travel_as_plain_numbers() -> None:
    np = pytest.importorskip("numpy")
    sampling = Sampling(loops=np.int64(4), temperature=np.float32(0.5), top_p=np.float64(0.25))
    frames = TO_DISPATCHER.encode(Generate(id="a", prompt_text="x", sampling=sampling))
    assert TO_DISPATCHER.decode(frames).sampling == Sampling(loops=4, temperature=0.5, top_p=0.25)  # type: ignore[union-attr]
    assert codec.tokens_to_bytes(np.array([1, 2])) == codec.tokens_to_bytes([1, 2])


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "field", "accepted"),
    [
        ({"max_tokens": "x"}, "max_tokens", "int"),
        ({"max_tokens": True}, "max_tokens", "int"),
        ({"sampling": {"top_p": []}}, "sampling.top_p", "float"),
        ({"sampling": {"topp": 1}}, "sampling.topp", ""),
        ({"stop": ["a", 2]}, "stop[1]", "str"),
        ({"stop_tokens": [[1], [2, None]]}, "stop_tokens[1][1]", "int"),
        ({"colour": 1}, "colour", ""),
        ({"type": "Generat"}, "type", ""),
        ({"id": None}, "id", "str"),
    ],
)
def test_a_malformed_request_names_the_field(change: dict[str, Any], field: str, accepted: str) -> None:
    body = msgpack.packb({"type": "Generate", "id": "a", "prompt_text": "x"} | change)
    with pytest.raises(errors.InvalidRequest) as caught:
        TO_DISPATCHER.decode([VERSION, body])
    assert (caught.value.field, caught.value.accepted) == (field, accepted)
    assert codec.salvage_id(body) == ("a" if change.get("id", "a") else "")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        TO_DISPATCHER.decode([VERSION, msgpack.packb({"type": "Cancel"})])
    assert caught.value.field == "id"


@pytest.mark.parametrize("theirs", [b"TL1", b"", b"\xff" * 100, b"GET / HTTP/1.1"])
def test_another_version_names_both(theirs: bytes) -> None:
    for direction in DIRECTIONS:
        with pytest.raises(errors.ProtocolError, match="version") as caught:
            direction.decode([theirs, b"\x80"])
        assert ascii(theirs[:16])[1:] in caught.value.message and "'TL2'" in caught.value.message
        assert caught.value.accepted == "'TL2'"


@pytest.mark.parametrize("frames", [[], [b"TL2"], [b"", b"TL2", b"\x80"], [b"TL2", b"\x80"] + [b""] * 2000])
def test_another_number_of_frames_is_a_protocol_error(frames: list[bytes]) -> None:
    for direction in DIRECTIONS:
        with pytest.raises(errors.ProtocolError):
            direction.decode(frames)


def test_payloads_come_with_a_step_and_only_with_a_step() -> None:
    ping = TO_DISPATCHER.encode(messages.Ping(n=1))
    with pytest.raises(errors.ProtocolError, match="Ping: 1 payloads, expected 0"):
        TO_DISPATCHER.decode([*ping, b"x"])
    step = messages.Step(run=1, keys=(1, 2), tokens=(1, 1), final=(False, False))
    with pytest.raises(errors.ProtocolError, match="1 payloads, expected 2"):
        FROM_REPLICA.decode(FROM_REPLICA.encode(step, [b"x"]))
    for bad in (msgspec.structs.replace(step, tokens=(1,)), msgspec.structs.replace(step, final=())):
        with pytest.raises(errors.ProtocolError, match="of one length"):
            FROM_REPLICA.decode(FROM_REPLICA.encode(bad, [b"x", b"y"]))
    with pytest.raises(errors.LimitExceeded, match="payload"):
        FROM_REPLICA.decode(FROM_REPLICA.encode(step, [b"x", bytes(limits.MAX_BODY_BYTES + 1)]))


def test_a_client_takes_several_bodies_and_keeps_those_before_a_bad_one() -> None:
    tokens = [messages.Tokens(id="a", seq=n, tokens=bytes(4)) for n in range(limits.MAX_BODIES)]
    bodies = [TO_CLIENT.encode_body(each) for each in tokens]
    assert list(TO_CLIENT.decode_each([VERSION, *bodies])) == tokens
    with pytest.raises(errors.ProtocolError, match="frames"):
        list(TO_CLIENT.decode_each([VERSION, *bodies, bodies[0]]))
    with pytest.raises(errors.ProtocolError, match="frames"):
        list(TO_CLIENT.decode_each([VERSION]))
    with pytest.raises(errors.ProtocolError, match="version"):
        list(TO_CLIENT.decode_each([b"TL1", *bodies]))
    some = TO_CLIENT.decode_each([VERSION, bodies[0], b"\xc1", bodies[1]])
    assert next(some) == tokens[0]
    with pytest.raises(errors.ProtocolError, match="malformed"):
        next(some)


def test_many_bodies_are_small_and_a_large_one_travels_alone() -> None:
    large = TO_CLIENT.encode_body(messages.Failed("a", "engine", "x" * limits.MAX_BODIES_BYTES))
    small = TO_CLIENT.encode_body(messages.Pong(n=1))
    assert len(list(TO_CLIENT.decode_each([VERSION, large]))) == 1
    with pytest.raises(errors.LimitExceeded, match="several bodies"):
        list(TO_CLIENT.decode_each([VERSION, small, large]))


@given(st.lists(st.integers(0, 3 * limits.MAX_BODIES_BYTES // 2), max_size=6), st.integers(0, 600))
def test_parcels_hold_everything_in_order_and_within_the_bounds(sizes: list[int], more: int) -> None:
    bodies = [bytes(size) for size in sizes] + [bytes([n % 256]) for n in range(more)]
    messages_ = list(codec.parcels(bodies))
    assert [body for frames in messages_ for body in frames[1:]] == bodies
    for frames in messages_:
        assert frames[0] == VERSION and 2 <= len(frames) <= 1 + limits.MAX_BODIES
        assert len(frames) == 2 or sum(map(len, frames[1:])) <= limits.MAX_BODIES_BYTES
    for one, two in zip(messages_, messages_[1:], strict=False):  # as few as possible
        full = len(one) == 1 + limits.MAX_BODIES
        assert full or sum(map(len, one[1:])) + len(two[1]) > limits.MAX_BODIES_BYTES


def test_size_is_checked_on_both_sides() -> None:
    big = "x" * limits.MAX_BODY_BYTES
    with pytest.raises(errors.LimitExceeded, match=r"at most 4194304") as caught:
        TO_DISPATCHER.encode(Generate(id="a", prompt_text=big))
    assert caught.value.field == "body"
    body = msgpack.packb({"type": "Generate", "id": "a", "prompt_text": big})
    with pytest.raises(errors.LimitExceeded):
        TO_DISPATCHER.decode([VERSION, body])
    assert codec.salvage_id(body) == "a"
    TO_REPLICA.decode(
        TO_REPLICA.encode(messages.Hello(dispatcher=big))
    )  # the back conversation has more room


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, object(), "\ud800", [[[]]] * 3])
def test_what_messagepack_cannot_hold_is_an_invalid_request(seed: Any) -> None:
    if isinstance(seed, list):
        for _ in range(100_000):
            seed = [seed]
    with pytest.raises(errors.InvalidRequest, match="cannot be encoded"):
        TO_DISPATCHER.encode(Generate(id="a", prompt_text="x", seed=seed))


# ------------------------------------------------------------------ hostile bytes


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=64), st.just(VERSION)), max_size=5))
def test_random_frames_raise_only_typed_errors(frames: list[bytes]) -> None:
    refuse_or_accept(frames)
    refuse_or_accept([VERSION, *frames])


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_mutated_messages_raise_only_typed_errors(data: st.DataObject) -> None:
    direction, message = data.draw(st.sampled_from(EXAMPLES))
    body = bytearray(direction.encode_body(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    refuse_or_accept([VERSION, bytes(body), *payloads_of(message)])


JSONISH: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_any_value_in_any_field_raises_only_typed_errors(
    example: tuple[Direction[Any], messages.Message], data: st.DataObject
) -> None:
    direction, message = example
    body = msgpack.unpackb(direction.encode_body(message))
    name = data.draw(st.sampled_from(["type", *message.__struct_fields__]))
    refuse_or_accept([VERSION, msgpack.packb(body | {name: data.draw(JSONISH)}), *payloads_of(message)])


def refuse_or_accept(frames: Sequence[bytes]) -> None:
    for direction in DIRECTIONS:
        try:
            message = direction.decode(frames)
            if direction is TO_DISPATCHER:
                limits.validate(message)
            elif isinstance(message, messages.Ready | messages.Built):
                limits.check_announced(message)
        except REFUSALS as error:
            assert type(error) in REFUSALS and error.message
        except Exception as error:
            raise AssertionError(f"{error!r} for {frames!r}") from error
    try:
        list(TO_CLIENT.decode_each(frames))
    except REFUSALS as error:
        assert type(error) in REFUSALS and error.message
    for frame in frames:
        assert len(codec.salvage_id(frame)) <= 64


HEAD = b"\x83\xa4type\xa8Generate\xa2id\xa1a"
BOMBS = {
    "arrays": b"\x91" * (4 << 20),
    "maps": b"\x81\xa1a" * (1 << 20),
    "arrays before the type": b"\x82\xa3bad" + b"\x91" * (3 << 20),
    "arrays in a field": HEAD + b"\xabstop_tokens" + b"\x91" * (3 << 20),
    "a huge array header": HEAD + b"\xa4stop\xdd\xff\xff\xff\xff\xa1a",
    "huge nested array headers": HEAD + b"\xabstop_tokens" + b"\xdd\xff\xff\xff\xff" * 1000,
    "a huge map header": b"\xdf\xff\xff\xff\xff\xa1a",
    "huge bytes": HEAD + b"\xadprompt_tokens\xc6\xff\xff\xff\xff\1",
    "huge text": HEAD + b"\xabprompt_text\xdb\xff\xff\xff\xffx",
    "a huge extension": HEAD + b"\xaamax_tokens\xc9\xff\xff\xff\xff\5x",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_cheap(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(errors.InvalidRequest):
        TO_DISPATCHER.decode([VERSION, BOMBS[name]])
    assert codec.salvage_id(BOMBS[name]) == ""
    assert time.process_time() - start < 1.0  # CPU seconds; it takes microseconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


# ------------------------------------------------------------------ token ids, errors, ids


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_little_endian_u32(ids: list[int]) -> None:
    data = codec.tokens_to_bytes(ids)
    assert data == b"".join(token.to_bytes(4, "little") for token in ids)
    assert codec.tokens_from_bytes(data) == ids


@pytest.mark.parametrize("bad", [[-1], [2**32], [0.5], ["1"], [None], 5, None])
def test_what_is_no_token_id_is_refused(bad: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        codec.tokens_to_bytes(bad, "prompt")
    assert caught.value.field == "prompt"


def test_a_torn_token_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="multiple of 4"):
        codec.tokens_from_bytes(b"\1\0\0")


@pytest.mark.parametrize("kind", errors.BY_CODE.values())
def test_errors_survive_the_wire(kind: type[errors.TinyLoopError]) -> None:
    error = kind("m" * 9000, field="f", value="v", accepted="a", retry_after_s=0.25)
    sent = TO_CLIENT.decode(TO_CLIENT.encode(codec.failed_from(error, "id")))
    assert isinstance(sent, messages.Failed)
    back = codec.error_from(sent)
    assert type(back) is kind and back.message == "m" * limits.MAX_ERROR_CHARS
    assert (back.field, back.value, back.accepted, back.request_id) == ("f", "v", "a", "id")
    assert back.retry_after_s == 0.25


@pytest.mark.parametrize(
    ("body", "id"),
    [
        ({"id": "a", "junk": [1, {"deep": [2]}]}, "a"),
        ({"id": "x" * 65}, ""),
        ({"id": "a\n"}, ""),
        ({"id": 5}, ""),
        ({}, ""),
        ([], ""),
        (b"", ""),
    ],
)
def test_salvage(body: Any, id: str) -> None:
    assert codec.salvage_id(msgpack.packb(body)) == id
    assert codec.salvage_id(msgpack.packb(body)[:-1]) == ""


# ------------------------------------------------------------------ the package


def test_importing_the_package_is_cheap() -> None:
    script = """
import sys
import tinyloop_serve.protocol as p
assert "zmq" not in sys.modules and "msgspec" not in sys.modules
import tinyloop_serve.protocol.codec
assert "zmq" not in sys.modules
p.Client, p.AsyncClient
for name in p.__all__: assert getattr(p, name) is not None
heavy = {"numpy", "torch", "msgpack", "tokenizers", "psutil"} & set(sys.modules)
assert not heavy, heavy
try: p.Nothing
except AttributeError as error: assert "Nothing" in str(error)
else: raise SystemExit("no AttributeError")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
