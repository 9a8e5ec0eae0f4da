"""The decoding thread: engine calls, one at a time, each step's frames handed on as they come.

The thread owns the engine and the answers of the run it works on. The message loop hands it a `Job` and may
mark lanes cancelled; it gets `Outcome`s back through `post`, which must not block. Whatever happens in a
run, every lane gets exactly one final part, and its last outcome, and no other, is `idle`. This file must
not know sockets.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tinyloop_serve.native import GenerateConfig, errors
from tinyloop_serve.protocol.codec import tokens_from_bytes
from tinyloop_serve.protocol.errors import (
    EngineFailed,
    InvalidRequest,
    LimitExceeded,
    ModeRefused,
    TinyLoopError,
)
from tinyloop_serve.protocol.messages import Lane, Run, Sampling, Stats, Step, StopReason
from tinyloop_serve.replica.answer import Answer, Part, step_of
from tinyloop_serve.replica.text import Vocabulary


class Engine(Protocol):
    """What is used of `native.Model`; not re-entrant, but `step_counter` may be read from any thread."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def step_counter(self) -> int: ...
    def cache_bytes(self, tokens: int, cache_mode: str, loops: int) -> int: ...
    def generate_stream(
        self, prompt: Sequence[int], config: GenerateConfig, on_token: Callable[[int, int], bool | None]
    ) -> Any: ...
    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        config: list[GenerateConfig],
        on_step: Callable[[list[int | None]], list[int] | bool | None],
    ) -> list[Any]: ...


class Job:
    """A `Run` and its answers. `cancel` may be called from any thread."""

    def __init__(self, run: Run, vocabulary: Vocabulary | None, eos_ids: frozenset[int]) -> None:
        self.run = run
        self.answers = [Answer(lane, vocabulary, eos_ids) for lane in run.lanes]

    @property
    def live(self) -> int:
        return sum(not answer.ended for answer in self.answers)

    def cancel(self, keys: Sequence[int] | None = None) -> None:
        """Marks these lanes (None: all); each ends at its next step."""
        for answer in self.answers:
            if keys is None or answer.lane.key in keys:
                answer.cancelled = True


class Outcome(NamedTuple):
    job: Job
    step: Step
    payloads: list[bytes]


class Executor:
    def __init__(
        self, engine: Engine, vocabulary: Vocabulary | None, name: str, post: Callable[[Outcome], None]
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(engine.config["eos_ids"])
        self._name = name  # of the replica, for the stats
        self._post = post
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self._thread.start()

    def submit(self, run: Run) -> Job:
        job = Job(run, self._vocabulary, self._eos_ids)
        self._jobs.put(job)
        return job

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the jobs it has; False when it is still inside the engine after
        `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            parts = self._carry_out(job)
            self._hand_on(job, parts, idle=True)

    def _carry_out(self, job: Job) -> list[Part]:
        """Runs the job; returns the parts that end it."""
        parts = [part for answer in job.answers if answer.cancelled for part in self._never_ran(answer)]
        answers = [answer for answer in job.answers if not answer.ended]
        try:
            if len(answers) > 1:
                try:
                    return parts + self._batch(job, answers)
                except (errors.ConfigError, errors.LimitError, errors.ModeError):
                    # Refused before any work, for one lane's sake: the others must not pay for it.
                    if any(answer.count for answer in answers):
                        raise
            for answer in answers:
                self._hand_on(job, parts)
                try:
                    parts = self._stream(job, answer)
                except (errors.ConfigError, errors.LimitError, errors.ModeError) as error:
                    parts = answer.fail(_refusal(error))
        except Exception as error:
            with contextlib.suppress(OSError):  # nobody may be left to read it
                traceback.print_exc(file=sys.stderr)
            failed = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
            parts += [part for answer in answers if not answer.ended for part in answer.fail(failed)]
        return parts

    def _stream(self, job: Job, answer: Answer) -> list[Part]:
        def on_token(token: int, position: int) -> bool:
            self._hand_on(job, answer.take(token))
            return answer.wants_more()

        lane = answer.lane
        prompt = tokens_from_bytes(lane.prompt)
        generation = self._engine.generate_stream(prompt, _config(job.run.sampling, lane), on_token)
        return _end(answer, generation.stats.stop_reason, self._stats(generation.stats, lane, 1))

    def _batch(self, job: Job, answers: list[Answer]) -> list[Part]:
        started = time.monotonic()
        first_token_ms = 0.0

        def on_step(tokens: list[int | None]) -> list[int] | None:
            nonlocal first_token_ms
            now_ms = (time.monotonic() - started) * 1000
            first_token_ms = first_token_ms or now_ms
            parts: list[Part] = []
            stopping: list[int] = []
            try:
                for index, token in enumerate(tokens):
                    answer = answers[index]
                    if token is None or not answer.wants_more():
                        continue
                    parts += answer.take(token)
                    if not answer.wants_more():
                        stopping.append(index)
                if any(answer.wants_more() for answer in answers):  # the others go on: no waiting for them
                    for index in stopping:
                        parts += self._end_early(job, answers[index], len(answers), first_token_ms, now_ms)
            finally:
                self._hand_on(job, parts)
            return stopping or None

        prompts = [tokens_from_bytes(answer.lane.prompt) for answer in answers]
        configs = [_config(job.run.sampling, answer.lane) for answer in answers]
        generations = self._engine.generate_batch(prompts, configs, on_step)
        return [
            part
            for answer, generation in zip(answers, generations, strict=True)
            if not answer.ended
            for part in _end(
                answer,
                generation.stats.stop_reason,
                self._stats(generation.stats, answer.lane, len(answers)),
            )
        ]

    def _end_early(
        self, job: Job, answer: Answer, batch_size: int, first_token_ms: float, now_ms: float
    ) -> list[Part]:
        """Ends a lane before its batch: the engine's stats come later, so its times are those seen here."""
        lane, sampling = answer.lane, job.run.sampling
        prompt_tokens = len(lane.prompt) // 4
        stats = Stats(
            prompt_tokens=prompt_tokens,
            generated_tokens=answer.count,
            loops=sampling.loops,
            prefill_ms=first_token_ms,
            first_token_ms=first_token_ms,
            decode_ms=now_ms - first_token_ms,
            cache_bytes=self._engine.cache_bytes(
                prompt_tokens + lane.max_tokens, sampling.cache_mode, sampling.loops
            ),
            queue_ms=lane.queue_ms,
            batch_size=batch_size,
            replica=self._name,
        )
        return _end(answer, "cancelled", stats)

    def _never_ran(self, answer: Answer) -> list[Part]:
        """Ends a lane that was cancelled before its run began."""
        lane = answer.lane
        stats = Stats(prompt_tokens=len(lane.prompt) // 4, queue_ms=lane.queue_ms, replica=self._name)
        return _end(answer, "cancelled", stats)

    def _stats(self, engine: Any, lane: Lane, batch_size: int) -> Stats:
        return Stats(
            prompt_tokens=engine.prompt_tokens,
            generated_tokens=engine.generated_tokens,
            loops=engine.loops,
            prefill_ms=engine.prefill_ms,
            first_token_ms=engine.first_token_ms,
            decode_ms=engine.decode_ms,
            cache_bytes=engine.cache_bytes,
            queue_ms=lane.queue_ms,
            batch_size=batch_size,
            replica=self._name,
        )

    def _hand_on(self, job: Job, parts: list[Part], *, idle: bool = False) -> None:
        if parts or idle:
            self._post(Outcome(job, *step_of(job.run.run, parts, idle=idle)))


def _end(answer: Answer, reason: StopReason, stats: Stats) -> list[Part]:
    try:
        return answer.finish(reason, stats)
    except TinyLoopError as error:  # too large for one message: this lane's fault alone
        return answer.fail(error)


def _config(sampling: Sampling, lane: Lane) -> GenerateConfig:
    return GenerateConfig(
        loops=sampling.loops,
        max_tokens=lane.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=lane.seed,
        stop_sequences=[list(stop) for stop in lane.stop_tokens],
        cache_mode=sampling.cache_mode,
        cache_window=sampling.cache_window,
        beam_size=sampling.beam_size,
        ignore_eos=lane.ignore_eos,
    )


def _refusal(error: errors.TinyLoopError) -> TinyLoopError:
    """The engine's refusal as the client sees it, in the protocol's terms."""
    kinds = {errors.LimitError: LimitExceeded, errors.ModeError: ModeRefused}
    kind = kinds.get(type(error), InvalidRequest)
    message, field = (
        text.replace("stop_sequences", "stop_tokens") for text in (str(error), error.field or "")
    )
    value = "" if error.value is None else str(error.value)
    return kind(message, field=field, value=value, accepted=error.accepted or "")
