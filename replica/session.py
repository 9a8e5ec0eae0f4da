"""Who the replica works for, and what it answers; no sockets, no engine calls.

A replica works for the dispatcher whose `Hello` came last. Every Hello starts afresh: what was running
before it is cancelled and its frames go nowhere, for the dispatcher that said Hello again has given those
requests up. Messages of anybody else are ignored. A `Run` that comes while another is at work (the credit
is not kept, or the former run is still being cancelled) waits its turn. Where the engine does not come back
from what was given up, the next dispatcher is told that this replica is not well, and gives it nothing to do.
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

Reply = tuple[bytes, FromReplica]

STUCK_S = 1.0  # what was given up ends with its next step, which takes milliseconds


class LifeSigns(NamedTuple):
    step_counter: int  # the engine's
    memory_bytes: int  # resident
    health: str  # "ok", or what is wrong


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
        self.health = WELL  # or what was wrong when it was last looked
        self._counter = -1  # the engine's steps, when it was last looked
        self._moved_at = 0.0  # when it was last seen to move, or had nothing to do
        self._stalled_s = 0.0  # how long ago that was, when it was last looked
        self._live: list[Job | Building] = []  # at work or waiting, the dispatcher's and those it gave up
        self._wanted: set[Job | Building] = set()  # of these, those whose outcome the dispatcher waits for

    @property
    def busy(self) -> bool:
        """Somebody still waits for a run to end."""
        return any(isinstance(work, Job) for work in self._wanted)

    def stalled_s(self, now: float) -> float:
        """For how long the engine has made no step in the middle of its work; 0 without any."""
        signs = self._life_signs()
        if signs.step_counter != self._counter or not self._live:
            self._counter, self._moved_at = signs.step_counter, now
        self._stalled_s = now - self._moved_at
        self.health = self._judged(signs.health)
        return self._stalled_s

    def _judged(self, health: str) -> str:
        """What the engine's own thread says, unless that is past saying anything."""
        stuck = self._stalled_s >= STUCK_S and not self._wanted.issuperset(self._live)
        return "the engine does not come back from work that was given up" if stuck else health

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
                building = self._jobs.build(message)
                self._live.append(building)
                self._wanted.add(building)
            case Drop():
                self._jobs.drop(message)
            case Ping():
                return [(peer, self._pong(message))]
            case Goodbye():
                self.abandon()
        return []

    def relay(self, outcome: Outcome) -> bytes | None:
        """Where the frames of `outcome` go; None: nobody waits for them."""
        work = outcome.work
        if work is None:
            return self._peer
        wanted = work in self._wanted
        if not isinstance(outcome.message, Step) or outcome.message.idle:
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
        for work in self._live:
            if isinstance(work, Job):
                work.cancel()

    def leave(self) -> list[Reply]:
        """Says goodbye; what is still running is given up, and the dispatcher will see to its clients."""
        farewell: list[Reply] = [(self._peer, Goodbye())] if self._peer is not None else []
        self.abandon()
        return farewell

    def _start_afresh(self, peer: bytes) -> list[Reply]:
        farewell = self.leave() if self._peer != peer else []
        self.abandon()
        self._peer = peer
        ready = self._announce()
        return [*farewell, (peer, replace(ready, health=self._judged(ready.health)))]

    def _pong(self, ping: Ping) -> Pong:
        signs = self._life_signs()
        running = sum(work.live for work in self._live if isinstance(work, Job))
        health = self._judged(signs.health)
        return Pong(ping.n, signs.step_counter, running, signs.memory_bytes, health)
