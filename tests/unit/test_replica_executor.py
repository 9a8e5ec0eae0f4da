"""A run's lanes, decoded: every lane gets its tokens in order and exactly one final part, whatever the
engine does."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tinyloop_serve.native import GenerateConfig, errors
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_CLIENT, tokens_from_bytes, tokens_to_bytes
from tinyloop_serve.protocol.messages import (
    VERSION,
    Done,
    Failed,
    Lane,
    Run,
    Sampling,
    Step,
    ToClient,
    Tokens,
)
from tinyloop_serve.replica.executor import Executor, Job, Outcome
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.health import Health
from tinyloop_serve.replica.speculation import Speculation
from tinyloop_serve.replica.text import Vocabulary

EOS = 256
Script = Mapping[int, Sequence[int]]


@functools.cache
def vocabulary() -> Vocabulary:
    """Token n is the byte n; EOS is a special token."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's byte alphabet
    moved = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(moved)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Vocabulary(tokenizer.to_str(), hidden=[EOS])


class ScriptedEngine:
    """Does what `native.Model` does, with tokens from a script: lane n of a call gets `script[prompt[0]]`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.config: dict[str, Any] = {"eos_ids": [EOS]}
        self.step_counter = 0
        self.cpus: list[int] = []
        self.calls: list[str] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.refuse: dict[int, Exception] = {}  # by the lane's first prompt token, before any work

    def cache_bytes(self, tokens: int, cache_mode: str, loops: int) -> int:
        return 10 * tokens

    def generate_stream(self, prompt: Sequence[int], config: Any, on_token: Any) -> Any:
        self.calls.append("stream")
        self._check([prompt])
        tokens: list[int] = []
        why = ""
        while not why:
            self.before_step(len(tokens))
            self.step_counter += 1
            tokens.append(self.script[prompt[0]][len(tokens)])
            go_on = on_token(tokens[-1], len(prompt) + len(tokens) - 1)
            why = self._why(tokens, config) or ("cancelled" if go_on is False else "")
        return self._generation(prompt, tokens, config, why)

    def generate_batch(self, prompts: Sequence[Sequence[int]], config: list[Any], on_step: Any) -> list[Any]:
        self.calls.append(f"batch{len(prompts)}")
        self._check(prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        why = ["" for _ in prompts]
        step = 0
        while not all(why):
            self.before_step(step)
            self.step_counter += 1
            row: list[int | None] = [None] * len(prompts)
            for lane, prompt in enumerate(prompts):
                if not why[lane]:
                    row[lane] = self.script[prompt[0]][step]
                    tokens[lane].append(row[lane])  # type: ignore[arg-type]
            cancel = on_step(row)
            for lane in range(len(prompts)):
                if not why[lane]:
                    stopped = cancel is False or (cancel is not None and lane in cancel)
                    why[lane] = self._why(tokens[lane], config[lane]) or ("cancelled" if stopped else "")
            step += 1
        return [self._generation(*each) for each in zip(prompts, tokens, config, why, strict=True)]

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            if prompt[0] in self.refuse:
                raise self.refuse[prompt[0]]

    def _why(self, tokens: list[int], config: Any) -> str:
        if tokens[-1] == EOS and not config.ignore_eos:
            return "eos"
        if any(tokens[-len(stop) :] == stop for stop in config.stop_sequences):
            return "stop_sequence"
        return "max_tokens" if len(tokens) >= config.max_tokens else ""

    def _generation(self, prompt: Sequence[int], tokens: list[int], config: Any, why: str) -> Any:
        stats = SimpleNamespace(
            prefill_ms=1.0,
            first_token_ms=2.0,
            decode_ms=3.0,
            stop_reason=why,
            prompt_tokens=len(prompt),
            generated_tokens=len(tokens),
            loops=config.loops,
            cache_bytes=7,
            prefix_tokens=0,
            loops_skipped=0,
            drafted=0,
            accepted=0,
            mean_loops=float(config.loops),
        )
        return SimpleNamespace(tokens=tokens, stats=stats)


class Bench:
    """An executor over a scripted engine, and what it posted."""

    def __init__(self, script: Script, with_text: bool = True) -> None:
        self.engine = ScriptedEngine(script)
        self.posted: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.given_up = threading.Event()
        self.said: list[str] = []
        self.health = Health()
        self.handles = HandleStore(self.engine, max_handles=2)
        self.executor = Executor(
            self.engine,  # type: ignore[arg-type]
            vocabulary() if with_text else None,
            "r0",
            self.posted.put,
            identity="f00d",
            handles=self.handles,
            speculation=Speculation([], loops=4, threshold=1.3),
            health=self.health,
            give_up=lambda why: self.given_up.set(),
            say=self.said.append,
        )

    def run(self, *lanes: Lane, before: Callable[[Job], None] | None = None) -> dict[int, list[ToClient]]:
        """The messages of each lane's client. Checks what holds for every run."""
        job = self.executor.submit(Run(run=7, sampling=Sampling(loops=4), lanes=lanes, batch_size=len(lanes)))
        if before:
            before(job)
        return self.answers(lanes)

    def answers(self, lanes: Iterable[Lane]) -> dict[int, list[ToClient]]:
        heard: dict[int, list[ToClient]] = {lane.key: [] for lane in lanes}
        finals: list[int] = []
        while True:
            outcome = self.posted.get(timeout=10)
            step = outcome.message
            assert isinstance(step, Step)
            frames = FROM_REPLICA.encode(step, outcome.payloads)
            assert FROM_REPLICA.decode(frames) == step
            assert step.run == 7
            for key, count, final, payload in zip(
                step.keys, step.tokens, step.final, outcome.payloads, strict=True
            ):
                assert key not in finals, "something came after the final part"
                message = TO_CLIENT.decode([VERSION, payload])
                heard[key].append(message)
                if isinstance(message, Tokens):
                    first = not any(isinstance(each, Tokens) for each in heard[key][:-1])
                    assert message.model == ("f00d" if first else "")
                assert final == isinstance(message, Done | Failed)
                assert count == (len(message.tokens) // 4 if isinstance(message, Tokens) else 0)
                finals += [key] if final else []
            if step.idle:
                break
        assert sorted(finals) == sorted(heard)
        assert self.posted.empty(), "idle was not the last"
        return heard


def expect(happened: bool) -> None:
    assert happened


def lane(key: int, **fields: Any) -> Lane:
    """A lane whose script is number `key`."""
    prompt = tokens_to_bytes([key, 2, 3])
    return msgspec.structs.replace(Lane(key=key, id=f"id{key}", prompt=prompt, max_tokens=100), **fields)


def tokens_of(messages: list[ToClient]) -> list[int]:
    tokens: list[int] = []
    for message in messages:
        if isinstance(message, Tokens):
            assert message.seq == len(tokens)
            tokens += tokens_from_bytes(message.tokens)
    return tokens


def text_of(messages: list[ToClient]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Tokens | Done))


def done_of(messages: list[ToClient]) -> Done:
    assert isinstance(messages[-1], Done), messages[-1]
    return messages[-1]


def failed_of(messages: list[ToClient]) -> Failed:
    assert isinstance(messages[-1], Failed), messages[-1]
    return messages[-1]


HELLO = [*b"Hello,world!", EOS]


def test_one_lane_is_streamed_token_by_token() -> None:
    bench = Bench({1: HELLO})
    heard = bench.run(lane(1, queue_ms=5.0))[1]
    assert bench.engine.calls == ["stream"]
    assert [type(message) for message in heard] == [Tokens] * 13 + [Done]
    assert tokens_of(heard) == HELLO and text_of(heard) == "Hello,world!"
    done = done_of(heard)
    assert done.stop_reason == "eos" and done.id == "id1"
    assert msgspec.structs.asdict(done.stats) == {
        "prompt_tokens": 3,
        "generated_tokens": 13,
        "loops": 4,
        "prefill_ms": 1.0,
        "first_token_ms": 2.0,
        "decode_ms": 3.0,
        "cache_bytes": 7,
        "queue_ms": 5.0,
        "batch_size": 1,
        "replica": "r0",
        "prefix_tokens": 0,
        "loops_skipped": 0,
        "drafted": 0,
        "accepted": 0,
        "mean_loops": 4.0,
        "method": "plain",
        "method_reason": "",
        "failovers": 0,
    }


def test_the_engine_gets_every_field() -> None:
    seen: list[GenerateConfig] = []
    bench = Bench({1: HELLO})
    stream = bench.engine.generate_stream

    def spy(prompt: Sequence[int], config: Any, on_token: Any) -> Any:
        seen.append(config)
        return stream(prompt, config, on_token)

    bench.engine.generate_stream = spy  # type: ignore[method-assign]
    sampling = Sampling(3, 0.5, 4, 0.6, 0.1, 1.2, "fp16", 16, 1)
    asked = lane(1, max_tokens=9, seed=2**64 - 1, stop_tokens=((5, 6), (7,)), ignore_eos=True)
    bench.executor.submit(Run(run=7, sampling=sampling, lanes=(asked,)))
    bench.answers([asked])
    wanted = {name: getattr(sampling, name) for name in Sampling.__struct_fields__} | {
        "max_tokens": 9,
        "seed": 2**64 - 1,
        "stop_sequences": [[5, 6], [7]],
        "ignore_eos": True,
    }
    assert {name: getattr(seen[0], name) for name in wanted} == wanted


def test_an_answer_that_is_not_streamed_comes_in_one_piece() -> None:
    heard = Bench({1: HELLO}).run(lane(1, stream=False))[1]
    assert [type(message) for message in heard] == [Tokens, Done]
    assert tokens_of(heard) == HELLO and text_of(heard) == "Hello,world!"


def test_lanes_of_a_batch_share_their_steps_and_end_each_in_its_own_time() -> None:
    bench = Bench({1: HELLO, 2: [*b"ab", EOS], 3: list(b"x" * 50)})
    lanes = [lane(1), lane(2), lane(3, max_tokens=20)]
    job = bench.executor.submit(Run(run=7, sampling=Sampling(loops=4), lanes=tuple(lanes), batch_size=4))
    first = bench.posted.get(timeout=10)
    assert isinstance(first.message, Step)
    assert first.message.keys == (1, 2, 3) and first.message.tokens == (1, 1, 1)
    second, (_, third, payloads) = bench.posted.get(timeout=10).message, bench.posted.get(timeout=10)
    assert isinstance(second, Step) and isinstance(third, Step)
    assert second.final == (False,) * 3
    assert third.keys == (1, 2, 3, 2) and third.final == (False, False, False, True)
    early = TO_CLIENT.decode([VERSION, payloads[3]])
    assert isinstance(early, Done) and early.stop_reason == "eos"
    assert early.stats.generated_tokens == 3 and early.stats.batch_size == 3
    assert early.stats.cache_bytes == 1030 and early.stats.loops == 4
    while not bench.posted.get(timeout=10).message.idle:  # type: ignore[union-attr]
        pass
    assert job.live == 0 and bench.engine.calls == ["batch3"]


def test_a_batch_gives_each_lane_what_it_would_get_alone() -> None:
    script = {1: HELLO, 2: [*b"ab", EOS], 3: list(b"x" * 50), 4: list(b"stop here and no further....")}
    lanes = [lane(1), lane(2, stream=False), lane(3, max_tokens=20), lane(4, stop=("re a",))]
    together = Bench(script).run(*lanes)
    for each in lanes:
        alone = Bench(script).run(each)[each.key]
        assert tokens_of(together[each.key]) == tokens_of(alone)
        assert text_of(together[each.key]) == text_of(alone)
        assert done_of(together[each.key]).stop_reason == done_of(alone).stop_reason


def test_a_stop_string_ends_the_lane_and_its_text_before_the_string() -> None:
    script = {1: list(b"one two END three"), 2: list(b"....." * 20)}
    for others in ([], [lane(2, max_tokens=30)]):
        heard = Bench(script).run(lane(1, stop=(" END",)), *others)[1]
        assert text_of(heard) == "one two"
        assert tokens_of(heard) == list(b"one two END")  # none is decoded after the string is complete
        assert done_of(heard).stop_reason == "stop_sequence"


def test_stop_tokens_end_the_lane_after_them() -> None:
    heard = Bench({1: list(b"abcdef")}).run(lane(1, stop_tokens=((100, 101), tuple(b"cd"))))[1]
    assert tokens_of(heard) == list(b"abcd") and done_of(heard).stop_reason == "stop_sequence"


def test_ignored_eos_goes_on_and_has_no_text() -> None:
    heard = Bench({1: [*b"a", EOS, *b"b", EOS, EOS]}).run(lane(1, ignore_eos=True, max_tokens=4))[1]
    assert tokens_of(heard) == [97, EOS, 98, EOS] and text_of(heard) == "ab"
    assert done_of(heard).stop_reason == "max_tokens"


def test_without_a_tokenizer_tokens_travel_without_text() -> None:
    heard = Bench({1: HELLO}, with_text=False).run(lane(1))[1]
    assert tokens_of(heard) == HELLO and text_of(heard) == ""


@pytest.mark.parametrize("count", [1, 3])
def test_a_cancelled_lane_ends_at_its_next_step(count: int) -> None:
    bench = Bench({key: list(b"." * 100) for key in (1, 2, 3)})
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def cancel_at_five(step: int) -> None:
        if step == 5:
            jobs.get(timeout=5).cancel([1])

    bench.engine.before_step = cancel_at_five
    heard = bench.run(*(lane(key, max_tokens=20) for key in range(1, count + 1)), before=jobs.put)
    assert len(tokens_of(heard[1])) == 6 and done_of(heard[1]).stop_reason == "cancelled"
    for key in range(2, count + 1):
        assert len(tokens_of(heard[key])) == 20 and done_of(heard[key]).stop_reason == "max_tokens"


def test_a_lane_cancelled_before_its_run_never_reaches_the_engine() -> None:
    bench = Bench({1: HELLO, 2: HELLO, 3: HELLO})
    hold = threading.Event()
    bench.engine.before_step = lambda step: expect(hold.wait(5))
    blocker = bench.executor.submit(Run(run=7, sampling=Sampling(), lanes=(lane(3),)))
    lanes = (lane(1), lane(2, stream=False))
    waiting = bench.executor.submit(Run(run=7, sampling=Sampling(), lanes=lanes))
    waiting.cancel()
    hold.set()
    while not bench.posted.get(timeout=10).message.idle:  # type: ignore[union-attr]
        pass
    assert blocker.live == 0
    heard = bench.answers(lanes)
    assert bench.engine.calls == ["stream"]
    assert [message.stop_reason for message in (done_of(heard[1]), done_of(heard[2]))] == ["cancelled"] * 2


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.ConfigError("top_k: -1", field="top_k", value=-1, accepted="0 or more"), "invalid"),
        (errors.LimitError("too long", field="max_tokens", value=9, accepted="1 to 5"), "limit"),
        (errors.ModeError("no window in a batch", field="cache_window"), "mode"),
        (errors.OutOfMemoryError("no memory for the cache"), "engine"),
        (RuntimeError("something broke"), "engine"),
    ],
)
def test_engine_errors_become_the_clients_and_the_replica_lives_on(raised: Exception, code: str) -> None:
    bench = Bench({1: HELLO, 2: HELLO})
    bench.engine.refuse = {1: raised}
    failed = failed_of(bench.run(lane(1))[1])
    assert failed.code == code and failed.id == "id1" and str(raised) in failed.message
    assert len(bench.said) == (code == "engine") and all("Traceback" in text for text in bench.said)
    if code in ("invalid", "limit"):
        assert failed.field and failed.value and failed.accepted
    assert done_of(bench.run(lane(2))[2]).stop_reason == "eos"


def test_a_lane_that_the_engine_refuses_does_not_take_its_batch_with_it() -> None:
    bench = Bench({1: HELLO, 2: HELLO, 3: HELLO})
    bench.engine.refuse = {2: errors.ConfigError("stop_sequences", field="stop_sequences")}
    heard = bench.run(lane(1), lane(2), lane(3))
    assert failed_of(heard[2]).code == "invalid"
    assert tokens_of(heard[1]) == tokens_of(heard[3]) == HELLO


def test_a_batch_that_breaks_midway_fails_its_unfinished_lanes() -> None:
    bench = Bench({1: HELLO, 2: [EOS], 3: HELLO})

    def break_at_four(step: int) -> None:
        if step == 4:
            raise errors.TinyLoopError("the device is gone")

    bench.engine.before_step = break_at_four
    heard = bench.run(lane(1), lane(2), lane(3, stream=False))
    assert failed_of(heard[1]).code == failed_of(heard[3]).code == "engine"
    assert tokens_of(heard[1]) == HELLO[:4]
    assert done_of(heard[2]).stop_reason == "eos"
    bench.engine.before_step = lambda step: None
    assert done_of(bench.run(lane(1))[1]).stop_reason == "eos"


def test_a_lane_that_ended_in_the_step_that_broke_keeps_its_done() -> None:
    bench = Bench({1: [97, EOS], 2: HELLO, 3: HELLO})
    bench.engine.cache_bytes = no_cache_bytes  # type: ignore[method-assign]
    heard = bench.run(lane(1), lane(2))
    assert failed_of(heard[1]).code == failed_of(heard[2]).code == "engine"
    assert tokens_of(heard[1]) == [97, EOS] and tokens_of(heard[2]) == HELLO[:2]


def no_cache_bytes(tokens: int, cache_mode: str, loops: int) -> int:
    raise RuntimeError("broke between a lane's last token and its Done")


def test_an_answer_too_large_for_a_message_fails_and_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TO_CLIENT, "max_body_bytes", 300)
    bench = Bench({1: list(b"x" * 100), 2: [*b"ab", EOS]})
    heard = bench.run(lane(1, stream=False), lane(2))
    assert failed_of(heard[1]).code == "limit" and "300" in failed_of(heard[1]).message
    assert done_of(heard[2]).stop_reason == "eos"
    alone = bench.run(lane(1, stream=False))
    assert failed_of(alone[1]).code == "limit"


def test_stop_says_whether_the_engine_let_go() -> None:
    bench = Bench({1: HELLO})
    hold = threading.Event()
    bench.engine.before_step = lambda step: expect(hold.wait(5))
    bench.executor.submit(Run(run=7, sampling=Sampling(), lanes=(lane(1),)))
    assert not bench.executor.stop(0.05)
    hold.set()
    deadline = time.monotonic() + 5
    while not bench.executor.stop(0.1):
        assert time.monotonic() < deadline


SCRIPTS = st.lists(st.sampled_from([*b"abc <>", EOS, 240, 300]), min_size=12, max_size=12)
LANES: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    max_tokens=st.integers(1, 12),
    stream=st.booleans(),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text("abc <>", min_size=1, max_size=3), max_size=2).map(tuple),
    stop_tokens=st.lists(
        st.lists(st.sampled_from(list(b"abc")), min_size=1, max_size=2).map(tuple), max_size=2
    ).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SCRIPTS, LANES), min_size=1, max_size=4), st.data())
def test_every_lane_ends_once_with_the_same_tokens_in_any_company(
    cases: list[tuple[list[int], dict[str, Any]]], data: st.DataObject
) -> None:
    script = {key: tokens for key, (tokens, _) in enumerate(cases)}
    lanes = [lane(key, **fields) for key, (_, fields) in enumerate(cases)]
    bench = Bench(script)
    together = bench.run(*lanes)
    for each in lanes:
        heard = together[each.key]
        alone = Bench(script).run(each)[each.key]
        assert (tokens_of(heard), text_of(heard)) == (tokens_of(alone), text_of(alone))
        assert done_of(heard).stop_reason == done_of(alone).stop_reason
        assert done_of(heard).stats.generated_tokens == len(tokens_of(heard)) <= each.max_tokens
        assert vocabulary().decode(tokens_of(heard)).startswith(text_of(heard))
        bench.executor.stop(0)
