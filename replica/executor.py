"""The decoding thread: what it does next, one thing at a time, and what it has to say.

The thread owns the engine, the handles and the answers of the run it works on. The message loop hands it a
`Job`, a `Building` or a `Drop` and may mark lanes cancelled; it gets `Outcome`s back through `post`, which
must not block. Whatever happens in a run, every lane gets exactly one final part, and its last outcome, and
no other, is `idle`. This file must not know sockets.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tinyloop_serve.native import GenerateConfig, Model
from tinyloop_serve.native.errors import OutOfMemoryError
from tinyloop_serve.protocol.codec import tokens_from_bytes
from tinyloop_serve.protocol.errors import EngineFailed
from tinyloop_serve.protocol.messages import Build, Built, Calibrated, Drop, Run, Step
from tinyloop_serve.replica.answer import Answer, Part, step_of
from tinyloop_serve.replica.decoder import REFUSALS, Decoder, refusal_of
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.health import PROBE_S, Health
from tinyloop_serve.replica.speculation import Speculation
from tinyloop_serve.replica.text import Vocabulary


class Job:
    """A `Run` and its answers. `cancel` may be called from any thread."""

    def __init__(
        self, run: Run, vocabulary: Vocabulary | None, eos_ids: frozenset[int], model: str = ""
    ) -> None:
        self.run = run
        self.answers = [Answer(lane, vocabulary, eos_ids, model) for lane in run.lanes]

    @property
    def live(self) -> int:
        return sum(not answer.ended for answer in self.answers)

    def cancel(self, keys: Sequence[int] | None = None) -> None:
        """Marks these lanes (None: all); each ends at its next step."""
        for answer in self.answers:
            if keys is None or answer.lane.key in keys:
                answer.cancelled = True


class Building:
    """A `Build` on its way. `give_up` may be called from any thread: then the handle is not kept."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self._given_up = threading.Event()
        self.give_up = self._given_up.set
        self.given_up = self._given_up.is_set


class Outcome(NamedTuple):
    """What the thread has to say: a `Step` of a job, `Built` of a building, or news of its own."""

    work: Job | Building | None
    message: Step | Built | Calibrated
    payloads: list[bytes]


class Executor:
    def __init__(
        self,
        engine: Model,
        vocabulary: Vocabulary | None,
        name: str,
        post: Callable[[Outcome], None],
        *,
        identity: str,
        handles: HandleStore,
        speculation: Speculation,
        health: Health,
        give_up: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """`identity`: the model's. `give_up` is called when the engine is past hope, `say` with lines for
        people; like `post` they must not block."""
        self._engine = engine
        self._identity = identity
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(engine.config["eos_ids"])
        self._post = post
        self._handles = handles
        self._speculation = speculation
        self._health = health
        self._give_up = give_up
        self._say = say
        self._at_work = False
        self._decoder = Decoder(engine, handles, speculation, name, self._hand_on)
        self._todo: queue.SimpleQueue[Job | Building | Drop | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self._thread.start()

    @property
    def working(self) -> bool:
        """The thread has something to do, its own trials included, whether or not it does it."""
        return self._at_work or not self._todo.empty()

    def submit(self, run: Run) -> Job:
        job = Job(run, self._vocabulary, self._eos_ids, self._identity)
        self._todo.put(job)
        return job

    def build(self, build: Build) -> Building:
        building = Building(build)
        self._todo.put(building)
        return building

    def drop(self, drop: Drop) -> None:
        self._todo.put(drop)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the jobs it has; False when it is still inside the engine after
        `timeout_s`."""
        self._todo.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        if cpus := self._engine.cpus:
            os.sched_setaffinity(0, cpus[:1])  # of this thread: the engine leaves the first to its caller
        while (work := self._next()) is not None:
            if isinstance(work, Job):
                parts = self._carry_out(work)
                self._hand_on(work, parts, idle=True)
            elif isinstance(work, Building):
                self._build(work)
            else:
                self._handles.drop(work.handles)

    def _next(self) -> Job | Building | Drop | None:
        """The next thing to do; while there is none, speculation is measured and an ill engine tried."""
        while True:
            self._at_work = False
            try:
                wait_s = PROBE_S if self._health.ill else None
                return self._todo.get(block=not self._speculation.pending, timeout=wait_s)
            except queue.Empty:
                pass
            finally:
                self._at_work = True
            if self._speculation.pending:
                self._calibrate()
            else:
                self._probe()

    def _calibrate(self) -> None:
        try:
            self._speculation.measure_some(self._engine)
            self._health.succeeded()
        except Exception as error:
            self._engine_failed(error)
        if self._speculation.calibration:
            self._post(Outcome(None, Calibrated(self._speculation.calibration), []))

    def _probe(self) -> None:
        try:
            self._engine.generate([0], GenerateConfig(max_tokens=1))
        except Exception as error:
            self._engine_failed(error, trial=True)
            if self._health.hopeless:
                self._give_up(self._health.text)
        else:
            self._health.succeeded()

    def _build(self, building: Building) -> None:
        if building.given_up():
            return
        handle = building.build.handle
        evicted = self._handles.make_room(handle)  # these are gone, whatever comes of it
        try:
            built = Built(handle, bytes=self._handles.build(building.build), evicted=evicted)
            self._health.succeeded()
        except REFUSALS as error:
            refusal = refusal_of(error)
            built = Built(handle, evicted=evicted, code=refusal.code, message=str(refusal))
        except Exception as error:
            self._engine_failed(error, now=isinstance(error, OutOfMemoryError | MemoryError))
            why = f"{type(error).__name__}: {error}"
            built = Built(handle, evicted=evicted, code=EngineFailed.code, message=why)
        if building.given_up():
            self._handles.drop([handle])
        self._post(Outcome(building, built, []))

    def _engine_failed(self, error: Exception, *, now: bool = False, trial: bool = False) -> None:
        """`now`: it is ill with this one already. The budget had room for a handle, so the machine has not
        what it was said to have."""
        self._say("".join(traceback.format_exception(error)).rstrip())
        self._health.failed(f"{type(error).__name__}: {error}", now=now, trial=trial)

    def _carry_out(self, job: Job) -> list[Part]:
        """Runs the job; returns the parts that end it."""
        decoder = self._decoder
        parts = [part for answer in job.answers if answer.cancelled for part in decoder.never_ran(answer)]
        for answer in job.answers:
            if not answer.ended:
                answer.prime(tokens_from_bytes(answer.lane.done))
                parts += [] if answer.wants_more() else decoder.had_ended(answer)
        answers = [answer for answer in job.answers if not answer.ended]
        try:
            if len(answers) > 1:
                try:
                    parts += decoder.batch(job, answers)
                    self._health.succeeded()
                    return parts
                except REFUSALS:
                    # Refused before any work, for one lane's sake: the others must not pay for it.
                    if any(answer.count > len(answer.lane.done) // 4 for answer in answers):
                        raise
            for answer in answers:
                self._hand_on(job, parts)
                parts = []
                try:
                    parts = decoder.single(job, answer)
                    self._health.succeeded()
                except REFUSALS as error:
                    parts = answer.fail(refusal_of(error))
        except Exception as error:
            self._engine_failed(error)
            failed = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
            parts += [part for answer in answers if not answer.ended for part in answer.fail(failed)]
        return parts

    def _hand_on(self, job: Job, parts: list[Part], *, idle: bool = False) -> None:
        if parts or idle:
            self._post(Outcome(job, *step_of(job.run.run, parts, idle=idle)))
