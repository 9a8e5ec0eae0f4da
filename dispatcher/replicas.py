"""The replicas as the dispatcher knows them: announcement, the one credit, life signs.

    state     meaning                                        left by
    starting  no Ready yet                                   ready, lost
    ready     its credit is here: it may be given a Run      busy, lost
    busy      a Run is out                                   ready (Step.idle), lost
    lost      gone, silent, stalled or refused; `error` why  ready (it answered Hello again)

This file must not know sockets, requests' contents or the batching policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinyloop_serve.dispatcher.buckets import Shape
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.protocol.messages import ModelInfo, Pong, Ready, ReplicaState

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.requests import Request

NEVER = float("inf")


@dataclass(slots=True)
class Replica:
    endpoint: str
    state: ReplicaState = "starting"
    ready: Ready | None = None
    error: str = ""
    run: int = 0  # number of the Run that is out; 0 = none
    shape: Shape | None = None  # of that Run
    lanes: set[int] = field(default_factory=set)  # keys whose final payload is still to come
    served: int = 0
    idle_since: float = 0.0
    last_seen: float = 0.0
    silent_since: float = NEVER  # the first ping that nothing has answered
    pings: int = 0
    step_counter: int = 0
    moved_at: float = 0.0  # when the counter last grew, or when there was no work
    memory_bytes: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ("ready", "busy")

    @property
    def name(self) -> str:
        return self.ready.name if self.ready else ""


class Replicas:
    def __init__(self, config: Config, now: float) -> None:
        self._loss_s = config.loss_ms / 1000
        self._stall_s = config.stall_ms / 1000
        self._all = {endpoint: Replica(endpoint) for endpoint in config.replicas}
        self._next_run = 1
        self.model: ModelInfo | None = None  # the fleet's: what the first replica announced
        self.none_since: float | None = now  # since when no replica is alive; None while one is

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all.values())

    def __getitem__(self, endpoint: str) -> Replica:
        return self._all[endpoint]

    def alive(self) -> bool:
        return self.none_since is None

    def why_none(self) -> str:
        each = "; ".join(f"{replica.endpoint}: {replica.error or replica.state}" for replica in self)
        return f"no replica is alive ({each})"

    def join(self, endpoint: str, ready: Ready, now: float) -> str:
        """Takes the announcement; returns "" or why the replica must not serve."""
        replica = self._all[endpoint]
        replica.ready, replica.memory_bytes = ready, ready.memory_bytes
        self.model = self.model or ready.model
        if ready.model.fingerprint != self.model.fingerprint:
            return f"it serves {_title(ready.model)}, the fleet serves {_title(self.model)}"
        replica.state, replica.error, replica.step_counter = "ready", "", 0
        replica.idle_since = replica.moved_at = now
        self.none_since = None
        return ""

    def lose(self, endpoint: str, why: str, now: float) -> set[int]:
        """The replica is out; returns the keys of the lanes that die with it."""
        replica = self._all[endpoint]
        lanes, replica.lanes = replica.lanes, set()
        replica.state, replica.error, replica.run, replica.shape = "lost", why, 0, None
        if self.none_since is None and not any(replica.alive for replica in self):
            self.none_since = now
        return lanes

    # -- the one credit

    def idle(self) -> Replica | None:
        """The one with the least outstanding work: with one credit that is none, so the longest idle."""
        idle = [replica for replica in self if replica.state == "ready"]
        return min(idle, key=lambda replica: replica.idle_since, default=None)

    def spend(self, replica: Replica, shape: Shape, keys: set[int], now: float) -> int:
        """The credit goes out with a Run; returns the run's number."""
        run, self._next_run = self._next_run, self._next_run + 1
        replica.state, replica.run, replica.shape, replica.lanes = "busy", run, shape, keys
        replica.moved_at = now
        return run

    def restore(self, endpoint: str, now: float) -> tuple[Shape, set[int]]:
        """The credit is back; returns the run's shape, and the keys that it left unanswered."""
        replica = self._all[endpoint]
        shape, unanswered = replica.shape, replica.lanes
        assert shape is not None
        replica.state, replica.run, replica.shape, replica.lanes = "ready", 0, None, set()
        replica.idle_since = replica.moved_at = now
        return shape, unanswered

    def answered(self, endpoint: str, key: int) -> None:
        """The lane's final payload came."""
        replica = self._all[endpoint]
        replica.served += key in replica.lanes
        replica.lanes.discard(key)

    def lanes_of(self, requests: list[Request]) -> list[tuple[str, tuple[int, ...]]]:
        """Per replica, the keys of those requests that it still decodes."""
        wanted = {request.key for request in requests}
        found = ((replica.endpoint, tuple(sorted(replica.lanes & wanted))) for replica in self)
        return [(endpoint, keys) for endpoint, keys in found if keys]

    # -- life signs

    def saw(self, endpoint: str, now: float) -> None:
        replica = self._all[endpoint]
        replica.last_seen, replica.silent_since = now, NEVER

    def stepped(self, endpoint: str, run: int, now: float) -> bool:
        """Notes progress; False when the frame is of no run that is out."""
        replica = self._all[endpoint]
        replica.moved_at = now
        return replica.run == run != 0

    def pong(self, endpoint: str, pong: Pong, now: float) -> None:
        replica = self._all[endpoint]
        if pong.step_counter != replica.step_counter or not replica.run:
            replica.moved_at = now
        replica.step_counter, replica.memory_bytes = pong.step_counter, pong.memory_bytes

    def ping(self, now: float) -> Iterator[tuple[str, int]]:
        """Endpoints and ping numbers; silence counts from a ping on."""
        for replica in self:
            if replica.alive:
                replica.pings += 1
                replica.silent_since = min(replica.silent_since, now)
                yield replica.endpoint, replica.pings

    def expired(self, now: float) -> list[tuple[str, str]]:
        """Endpoints that must be given up, and why."""
        return [(replica.endpoint, why) for replica in self if (why := self._verdict(replica, now))]

    def _verdict(self, replica: Replica, now: float) -> str:
        if replica.alive and now - replica.silent_since > self._loss_s:
            return f"no answer to heartbeats for {now - replica.silent_since:.1f} s"
        stalled_s = replica.last_seen - replica.moved_at  # by its own word, so our pauses convict nobody
        if replica.run and stalled_s > self._stall_s:
            return f"its engine made no step for {stalled_s:.1f} s"
        return ""

    def check(self) -> None:
        """Raises AssertionError unless credits and lanes agree."""
        for replica in self:
            assert (replica.state == "busy") == bool(replica.run), f"credit of {replica.endpoint}"
            assert bool(replica.run) == (replica.shape is not None), f"shape of {replica.endpoint}"
            assert replica.run or not replica.lanes, f"lanes of {replica.endpoint}"
            assert replica.ready is not None or not replica.alive, f"announcement of {replica.endpoint}"
        assert (self.none_since is None) == any(replica.alive for replica in self), "none_since"


def _title(model: ModelInfo) -> str:
    return f"{model.name} ({model.fingerprint[:12]})"
