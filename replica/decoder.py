"""One engine call for a run: which primitive serves which lane, and its tokens as parts of frames.

    one lane    its handle, or speculation, or `generate_stream`; the tokens are the same whichever it is
    several     `generate_batch`

Called by the decoding thread alone. This file must not know sockets, queues or who else is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tinyloop_serve.native import GenerateConfig, Model, errors
from tinyloop_serve.protocol.codec import tokens_from_bytes
from tinyloop_serve.protocol.errors import InvalidRequest, LimitExceeded, ModeRefused, TinyLoopError
from tinyloop_serve.protocol.messages import Lane, Sampling, Stats, StopReason
from tinyloop_serve.replica.answer import Answer, Part
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.speculation import Speculation

if TYPE_CHECKING:
    from tinyloop_serve.replica.executor import Job

REFUSALS = (errors.ConfigError, errors.LimitError, errors.ModeError)  # before any work was done
OnToken = Callable[[int, int], bool]


class Decoder:
    """`hand_on` takes the parts of a step while a call goes on."""

    def __init__(
        self,
        engine: Model,
        handles: HandleStore,
        speculation: Speculation,
        name: str,
        hand_on: Callable[[Job, list[Part]], None],
    ) -> None:
        self._engine = engine
        self._handles = handles
        self._speculation = speculation
        self._name = name  # of the replica, for the stats
        self._hand_on = hand_on

    def single(self, job: Job, answer: Answer) -> list[Part]:
        """One lane to its end; returns the parts that end it."""

        def on_token(token: int, position: int) -> bool:
            self._hand_on(job, answer.take(token))
            return answer.wants_more()

        lane = answer.lane
        generation, method, reason = self._generate(lane, config_of(job.run.sampling, lane), on_token)
        stats = self._stats(generation.stats, answer, 1, method=method, method_reason=reason)
        return _end(answer, generation.stats.stop_reason, stats)

    def _generate(self, lane: Lane, config: GenerateConfig, on_token: OnToken) -> tuple[Any, str, str]:
        """The generation, how it was made, and why not as it was asked for."""
        prompt, done = tokens_from_bytes(lane.prompt), tokens_from_bytes(lane.done)
        sequence = prompt + done
        held = self._handles.use(lane.handle) if lane.handle else None
        if held and held.build.kind == "resume" and not done and held.tokens == prompt:
            return self._engine.resume_generate(held.engine, config.loops, config, on_token), "plain", ""
        if held and held.build.kind != "resume" and sequence[: len(held.tokens)] == held.tokens:
            suffix = sequence[len(held.tokens) :]
            made = self._engine.generate_from_prefix_cache(held.engine, suffix, config, on_token)
            return made, "plain", ""
        reason = "" if lane.method == "plain" else self._speculation.why_not(config.loops)
        if lane.method == "plain" or reason:
            return self._engine.generate_stream(sequence, config, on_token), "plain", reason
        settings = self._speculation.settings
        if lane.method == "speculative":
            made = self._engine.generate_speculative(sequence, settings, config, on_token)
        else:
            made = self._engine.generate_tree_speculative(sequence, settings, config, on_token)
        return made, lane.method, ""

    def batch(self, job: Job, answers: list[Answer]) -> list[Part]:
        """Several lanes in lockstep; returns the parts that end those that have not ended on the way."""
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

        prompts = [tokens_from_bytes(answer.lane.prompt + answer.lane.done) for answer in answers]
        configs = [config_of(job.run.sampling, answer.lane) for answer in answers]
        generations = self._engine.generate_batch(prompts, configs, on_step)
        return [
            part
            for answer, generation in zip(answers, generations, strict=True)
            if not answer.ended
            for part in _end(
                answer,
                generation.stats.stop_reason,
                self._stats(generation.stats, answer, len(answers)),
            )
        ]

    def _end_early(
        self, job: Job, answer: Answer, batch_size: int, first_token_ms: float, now_ms: float
    ) -> list[Part]:
        """Ends a lane before its batch: the engine's stats come later, so its times are those seen here."""
        sampling, positions = job.run.sampling, len(answer.lane.prompt) // 4 + answer.lane.max_tokens
        stats = replace(
            self._known(answer),
            loops=sampling.loops,
            prefill_ms=first_token_ms,
            first_token_ms=first_token_ms,
            decode_ms=now_ms - first_token_ms,
            cache_bytes=self._engine.cache_bytes(positions, sampling.cache_mode, sampling.loops),
            batch_size=batch_size,
        )
        return _end(answer, "cancelled", stats)

    def never_ran(self, answer: Answer) -> list[Part]:
        """Ends a lane that was cancelled before its run began."""
        return _end(answer, "cancelled", self._known(answer))

    def had_ended(self, answer: Answer) -> list[Part]:
        """Ends a lane whose last token the client had already, when its former replica was lost."""
        return _end(answer, "max_tokens", self._known(answer))

    def _known(self, answer: Answer) -> Stats:
        """What is known without the engine's own account."""
        lane = answer.lane
        return Stats(
            prompt_tokens=len(lane.prompt) // 4,
            generated_tokens=answer.count,
            queue_ms=lane.queue_ms,
            replica=self._name,
            failovers=lane.failovers,
        )

    def _stats(
        self, engine: Any, answer: Answer, batch_size: int, *, method: str = "plain", method_reason: str = ""
    ) -> Stats:
        return replace(
            self._known(answer),
            loops=engine.loops,
            prefill_ms=engine.prefill_ms,
            first_token_ms=engine.first_token_ms,
            decode_ms=engine.decode_ms,
            cache_bytes=engine.cache_bytes,
            batch_size=batch_size,
            prefix_tokens=engine.prefix_tokens,
            loops_skipped=engine.loops_skipped,
            drafted=engine.drafted,
            accepted=engine.accepted,
            mean_loops=engine.mean_loops,
            method=method,
            method_reason=method_reason,
        )


def _end(answer: Answer, reason: StopReason, stats: Stats) -> list[Part]:
    try:
        return answer.finish(reason, stats)
    except TinyLoopError as error:  # too large for one message: this lane's fault alone
        return answer.fail(error)


def config_of(sampling: Sampling, lane: Lane) -> GenerateConfig:
    """The engine's terms; what the client has of the answer already is not asked for again."""
    return GenerateConfig(
        loops=sampling.loops,
        max_tokens=lane.max_tokens - len(lane.done) // 4,
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


def refusal_of(error: errors.TinyLoopError) -> TinyLoopError:
    """The engine's refusal as the client sees it, in the protocol's terms."""
    kinds = {errors.LimitError: LimitExceeded, errors.ModeError: ModeRefused}
    kind = kinds.get(type(error), InvalidRequest)
    message, field = (
        text.replace("stop_sequences", "stop_tokens") for text in (str(error), error.field or "")
    )
    value = "" if error.value is None else str(error.value)
    return kind(message, field=field, value=value, accepted=error.accepted or "")
