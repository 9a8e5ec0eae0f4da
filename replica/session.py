"""Who the replica works for, and what it answers; no sockets, no engine calls.

A replica works for the dispatcher whose `Hello` came last. Every Hello starts afresh: what was running
before it is cancelled and its frames go nowhere, for the dispatcher that said Hello again has given those
requests up. Messages of anybody else are ignored. A `Run` that comes while another is at work (the credit
is not kept, or the former run is still being cancelled) waits its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from tinyloop_serve.protocol.messages import (
    Build,
    CancelLanes,
    Drop,
    FromReplica,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Ready,
    Run,
    Step,
    ToReplica,
)
from tinyloop_serve.replica.executor import Building, Job, Outcome
from tinyloop_serve.replica.health import WELL

STUCK_S = 1.0  # without a step, in work that nobody waits for
STUCK = "its engine does not come back from what it was given before"
Reply = tuple[bytes, FromReplica]


class LifeSigns(NamedTuple):
    step_counter: int  # the engine's
    memory_bytes: int  # resident
    health: str  # "ok", or what is wrong
    working: bool = False  # the decoding thread has something to do


class Jobs(Protocol):
    def submit(self, run: Run) -> Job: ...
    def build(self, build: Build) -> Building: ...
    def drop(self, drop: Drop) -> None: ...


class Session:
    """`announce` describes this replica now, the handles it holds included."""

    def __init__(
        self, jobs: Jobs, announce: Callable[[], Ready], life_signs: Callable[[], LifeSigns]
    ) -> None:
        self._jobs = jobs
        self._announce = announce
        self._life_signs = life_signs
        self._peer: bytes | None = None  # routing id of the dispatcher
        self._told = WELL  # of our health, to the dispatcher
        self._signs = LifeSigns(0, 0, WELL)  # when it was last looked
        self._counter = -1  # the engine's steps, when it was last looked
        self._moved_at = 0.0  # when it was last seen to move, or had no work
        self._stalled_s = 0.0  # since then
        self._live: list[Job] = []  # running or waiting, the dispatcher's and those it gave up
        self._wanted: set[Job | Building] = set()  # of the live ones, and of handles being built: those
        # whose outcome the dispatcher waits for

    @property
    def busy(self) -> bool:
        """Somebody still waits for a run to end."""
        return any(isinstance(work, Job) for work in self._wanted)

    @property
    def working(self) -> bool:
        """When last looked; also for those who have given it up, and for itself."""
        return self._signs.working

    @property
    def health(self) -> str:
        """When last looked. Whoever lost its dispatcher to a run that hangs must not get another."""
        stuck = self._stalled_s > STUCK_S and not self._wanted
        return STUCK if stuck and self._signs.health == WELL else self._signs.health

    def stalled_s(self, now: float) -> float:
        """Looks. For how long the engine has had work and made no step; 0 without any."""
        signs = self._signs = self._life_signs()
        if signs.step_counter != self._counter or not signs.working:
            self._counter, self._moved_at = signs.step_counter, now
        self._stalled_s = now - self._moved_at
        return self._stalled_s

    def handle(self, peer: bytes, message: ToReplica) -> list[Reply]:
        """The answers to `message`, each with the routing id it goes to."""
        if isinstance(message, Hello):
            return self._start_afresh(peer)
        if peer != self._peer:
            return []
        match message:
            case Run():
                job = self._jobs.submit(message)
                self._live.append(job)
                self._wanted.add(job)
            case CancelLanes():
                for work in self._wanted:
                    if isinstance(work, Job):
                        work.cancel(message.keys)
            case Build():
                self._wanted.add(self._jobs.build(message))
            case Drop():
                self._jobs.drop(message)
            case Ping():
                return [(peer, self._pong(message.n))]
            case Goodbye():
                self.abandon()
        return []

    def news(self) -> list[Reply]:
        """Its health when last looked, if that is not what the dispatcher knows. Said before the frames of a
        run that failed: they bring its credit back, and the next run must not come to fail as well."""
        if self._peer is None or self.health == self._told:
            return []
        return [(self._peer, self._pong(0))]

    def relay(self, outcome: Outcome) -> bytes | None:
        """Where the frames of `outcome` go; None: nobody waits for them."""
        work = outcome.work
        if work is None:
            return self._peer
        wanted = work in self._wanted
        if isinstance(work, Building):
            self._wanted.discard(work)
        elif isinstance(outcome.message, Step) and outcome.message.idle:
            self._live.remove(work)
            self._wanted.discard(work)
        return self._peer if wanted else None

    def lost(self, peer: bytes) -> None:
        """Frames to `peer` can no longer be delivered."""
        if peer == self._peer:
            self.abandon()

    def abandon(self) -> None:
        """Nobody is left to work for. Handles stay: the next dispatcher learns of them by `Ready`; those
        that are still being built it could not know, so they are not kept."""
        self._peer = None
        for work in self._wanted:
            if isinstance(work, Building):
                work.give_up()
        self._wanted.clear()
        for job in self._live:
            job.cancel()

    def leave(self) -> list[Reply]:
        """Says goodbye; what is still running is given up, and the dispatcher will see to its clients."""
        farewell: list[Reply] = [(self._peer, Goodbye())] if self._peer is not None else []
        self.abandon()
        return farewell

    def _start_afresh(self, peer: bytes) -> list[Reply]:
        farewell = self.leave() if self._peer != peer else []
        self.abandon()
        self._peer = peer
        self._signs = self._life_signs()
        self._told = self.health
        ready = replace(self._announce(), health=self._told)
        return [*farewell, (peer, ready)]

    def _pong(self, n: int) -> Pong:
        signs = self._signs = self._life_signs()
        self._told = self.health
        running = sum(job.live for job in self._live)
        return Pong(n, signs.step_counter, running, signs.memory_bytes, self._told)
