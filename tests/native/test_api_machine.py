"""Random sequences over the whole API on one model: prefixes, pools, handles, batches, speculation, cancels
and refusals in any order. Invariant: every answer is what a cold model gives, which has never seen anything
else.

The cold model runs the portable kernels one row at a time, so the two share as little as they can.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.native import models, reference
from tests.native.device import sized
from tinyloop_serve.native import (
    GenerateConfig,
    ModeError,
    Model,
    PrefixCache,
    PrefixPool,
    ResumeHandle,
    SpeculativeConfig,
    artifact,
)
from tinyloop_serve.protocol.modes import CACHE_MODES

CONFIG = models.config(n_prelude=1, n_core=1, n_coda=1, loops=3, max_loops=6, injection="add", max_seq_len=64)
# A small vocabulary of prompts, so that prefixes of one another are common.
PROMPTS = [[(3 * i + j * (i % 4)) % 7 + 1 for i in range(n)] for j in range(3) for n in (1, 2, 5, 16, 17, 33)]
prompts = st.sampled_from(PROMPTS)


@functools.cache
def files() -> Path:
    path = Path(tempfile.mkdtemp(prefix="tinyloop-machine-")) / "model.tinyloop"
    artifact.write(path, CONFIG, reference.random_model(CONFIG, seed=9, dtype="fp16"))
    return path


@functools.cache
def cold() -> Model:
    return Model(files(), threads=1, simd="portable", prefill_chunk=1)


@functools.lru_cache(maxsize=4096)
def expected(prompt: tuple[int, ...], fields: tuple[tuple[str, object], ...]) -> list[int]:
    return cold().generate(prompt, GenerateConfig(**dict(fields))).tokens  # type: ignore[arg-type]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    return {
        "loops": draw(st.sampled_from([1, 2, 3, 6])),
        "max_tokens": draw(st.sampled_from([1, 2, 7, 20])),
        "temperature": draw(st.sampled_from([0.0, 0.9])),
        "seed": draw(st.integers(0, 2)),
        "cache_mode": draw(st.sampled_from(CACHE_MODES)),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "ignore_eos": draw(st.booleans()),
    }


class Api(RuleBasedStateMachine):
    prefixes: Bundle[PrefixCache] = Bundle("prefixes")
    handles: Bundle[tuple[ResumeHandle, list[int], str]] = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(files(), threads=2, prefill_chunk=16)
        self.pool = PrefixPool(2)
        self.loops_of: dict[int, tuple[int, str]] = {}

    def teardown(self) -> None:
        self.model.close()

    def check(self, tokens: list[int], prompt: list[int], request: dict[str, object]) -> None:
        assert tokens == expected(tuple(prompt), tuple(sorted(request.items())))

    @rule(prompt=prompts, request=requests())
    def plain(self, prompt: list[int], request: dict[str, object]) -> None:
        self.check(self.model.generate(prompt, GenerateConfig(**request)).tokens, prompt, request)  # type: ignore[arg-type]

    @rule(lanes=st.lists(prompts, min_size=1, max_size=5), request=requests(), seeds=st.integers(0, 3))
    def batch(self, lanes: list[list[int]], request: dict[str, object], seeds: int) -> None:
        each = [
            request | {"seed": seeds + i, "max_tokens": 1 + (seeds + 3 * i) % 9} for i in range(len(lanes))
        ]
        found = self.model.generate_batch(lanes, [GenerateConfig(**r) for r in each])  # type: ignore[arg-type]
        for lane, prompt, one in zip(found, lanes, each, strict=True):
            self.check(lane.tokens, prompt, one)

    @rule(prompt=prompts, request=requests(), after=st.integers(1, 5))
    def cancelled(self, prompt: list[int], request: dict[str, object], after: int) -> None:
        seen: list[int] = []

        def stop(token: int, position: int) -> bool:
            seen.append(token)
            return len(seen) < after

        self.model.generate_stream(prompt, GenerateConfig(**request), stop)  # type: ignore[arg-type]
        assert seen == expected(tuple(prompt), tuple(sorted(request.items())))[:after]

    @rule(
        target=prefixes, prompt=prompts, loops=st.sampled_from([1, 3, 6]), mode=st.sampled_from(CACHE_MODES)
    )
    def build_prefix(self, prompt: list[int], loops: int, mode: str) -> PrefixCache:
        prefix = self.model.create_prefix_cache(prompt, loops, mode)
        self.loops_of[id(prefix)] = (loops, mode)
        return prefix

    @rule(prefix=prefixes, suffix=st.one_of(st.just([]), prompts), request=requests())
    def use_prefix(self, prefix: PrefixCache, suffix: list[int], request: dict[str, object]) -> None:
        loops, mode = self.loops_of[id(prefix)]
        prompt = prefix.tokens + suffix
        if len(prompt) + int(str(request["max_tokens"])) > 64:
            return
        if (request["loops"], request["cache_mode"]) != (loops, mode):
            try:
                self.model.generate_from_prefix_cache(prefix, suffix, GenerateConfig(**request))  # type: ignore[arg-type]
            except ModeError:
                request = request | {"loops": loops, "cache_mode": mode}
            else:
                raise AssertionError("another shape was not refused")
        found = self.model.generate_from_prefix_cache(prefix, suffix, GenerateConfig(**request))  # type: ignore[arg-type]
        self.check(found.tokens, prompt, request)

    @rule(prefix=consumes(prefixes))
    def drop_prefix(self, prefix: PrefixCache) -> None:
        prefix.close()

    @rule(prompt=prompts, loops=st.sampled_from([1, 3, 6]), mode=st.sampled_from(CACHE_MODES))
    def register(self, prompt: list[int], loops: int, mode: str) -> None:
        self.pool.register_prefix(self.model, prompt, loops, mode)

    @rule(prompt=prompts, request=requests())
    def pooled(self, prompt: list[int], request: dict[str, object]) -> None:
        found = self.model.generate_with_pool(self.pool, prompt, GenerateConfig(**request))  # type: ignore[arg-type]
        self.check(found.tokens, prompt, request)

    @rule(target=handles, prompt=prompts, loops=st.sampled_from([1, 2, 4]), mode=st.sampled_from(CACHE_MODES))
    def build_handle(self, prompt: list[int], loops: int, mode: str) -> tuple[ResumeHandle, list[int], str]:
        return self.model.create_resume_handle(prompt, loops, mode), prompt, mode

    @rule(handle=handles, request=requests(), more=st.integers(0, 2))
    def resume(
        self, handle: tuple[ResumeHandle, list[int], str], request: dict[str, object], more: int
    ) -> None:
        resumed, prompt, mode = handle
        request = request | {"loops": resumed.loops_used + more, "cache_mode": mode}
        found = self.model.resume_generate(resumed, resumed.loops_used + more, GenerateConfig(**request))  # type: ignore[arg-type]
        self.check(found.tokens, prompt, request)

    @rule(handle=consumes(handles))
    def drop_handle(self, handle: tuple[ResumeHandle, list[int], str]) -> None:
        handle[0].close()

    @rule(
        prompt=prompts,
        request=requests(),
        draft=st.integers(1, 3),
        ahead=st.integers(1, 6),
        branches=st.integers(0, 3),
    )
    def speculate(
        self, prompt: list[int], request: dict[str, object], draft: int, ahead: int, branches: int
    ) -> None:
        request = request | {"loops": max(draft, int(str(request["loops"])))}
        config = GenerateConfig(**request)  # type: ignore[arg-type]
        if branches:
            ahead = min(ahead, 5)
            speculative = SpeculativeConfig(draft_loops=draft, draft_ahead=ahead, branches=branches)
            found = self.model.generate_tree_speculative(prompt, speculative, config)
        else:
            speculative = SpeculativeConfig(draft_loops=draft, draft_ahead=ahead)
            found = self.model.generate_speculative(prompt, speculative, config)
        self.check(found.tokens, prompt, request)

    @invariant()
    def the_pool_keeps_its_cap(self) -> None:
        assert len(self.pool) <= 2


TestApi = Api.TestCase
TestApi.settings = settings(max_examples=sized(30, 8), stateful_step_count=sized(25, 15), deadline=None)
