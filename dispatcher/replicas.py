"""The replicas as the dispatcher knows them: announcement, the one credit, what they hold, life signs.

    state     meaning                                        left by
    starting  no Ready yet                                   ready, lost
    ready     its credit is here                             busy, lost
    busy      a Run is out                                   ready (Step.idle), lost
    lost      gone, silent, stalled or refused; `error` why  ready (it answered Hello again)

One that is ready or busy is alive. It is in rotation, which means that it may be given a Run, while it is
alive, says that it is well, and no operator drains it. This file must not know sockets, requests' contents
or the batching policy; which models may join is in `models.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinyloop_serve.dispatcher.buckets import Shape
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.ledger import Ledger, lane_bytes
from tinyloop_serve.dispatcher.models import Models
from tinyloop_serve.protocol.messages import Budget, Calibration, ModelInfo, Pong, Ready, ReplicaState

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.requests import Request

NEVER = float("inf")
WELL = "ok"


@dataclass(slots=True)
class Replica:
    endpoint: str
    state: ReplicaState = "starting"
    ready: Ready | None = None  # its last announcement
    calibration: Calibration | None = None  # None: not measured yet
    error: str = ""
    refused: bool = False  # lost for its model alone
    health: str = WELL  # or what it says is wrong
    ledger: Ledger = field(default_factory=lambda: Ledger(None))
    run: int = 0  # number of the Run that is out; 0 = none
    shape: Shape | None = None  # of that Run
    began: float = 0.0  # when a Run last went out
    caches: tuple[int, ...] = ()  # keys of that Run, whose memory is taken until it ends
    lanes: set[int] = field(default_factory=set)  # those of them whose final payload is still to come
    building: str = ""  # the handle that it is to build, one at a time
    draining: bool = False
    drained_at: float = NEVER  # when its requests are moved
    leaving: bool = False  # it is to be forgotten when it has drained
    served: int = 0
    tokens: int = 0  # that it gave
    idle_since: float = 0.0
    last_seen: float = 0.0
    silent_since: float = NEVER  # the first ping that nothing has answered
    pings: int = 0
    step_counter: int = 0
    moved_at: float = 0.0  # when the counter last grew, or when there was no work
    stepped_at: float = 0.0  # when its run last gave tokens; 0 = not yet
    memory_bytes: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ("ready", "busy")

    @property
    def in_rotation(self) -> bool:
        return self.alive and self.health == WELL and not self.draining

    @property
    def name(self) -> str:
        return self.ready.name if self.ready else ""

    @property
    def model(self) -> ModelInfo | None:
        """That it announced last."""
        return self.ready.model if self.ready else None

    @property
    def fingerprint(self) -> str:
        """Of the model that it announced last."""
        return self.ready.model.fingerprint if self.ready else ""

    @property
    def why_out(self) -> str:
        """Why it is not in rotation."""
        return self.error or ("draining" if self.draining else self.health if self.alive else self.state)


class Replicas:
    def __init__(self, config: Config, now: float) -> None:
        self._loss_s = config.loss_ms / 1000
        self._stall_s = config.stall_ms / 1000
        self._all = {endpoint: Replica(endpoint) for endpoint in config.replicas}
        self._next_run = 1
        self._began = now
        self._absent: dict[str, float] = {}  # fingerprint -> since when nobody in rotation serves it
        self.models = Models()
        self.lost = 0  # how often one was lost
        self.unwell = 0  # how often one said that it is not well

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all.values())

    def __getitem__(self, endpoint: str) -> Replica:
        return self._all[endpoint]

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._all

    @property
    def model(self) -> ModelInfo | None:
        """The fleet's; None until a replica has announced it."""
        return self.models.current

    # -- who is there

    def add(self, endpoint: str) -> None:
        self._all[endpoint] = Replica(endpoint)

    def remove(self, endpoint: str) -> None:
        del self._all[endpoint]

    def named(self, target: str) -> Replica | None:
        """By endpoint or by name."""
        named = (replica for replica in self if replica.name == target != "")
        return self._all.get(target) or next(named, None)

    def join(self, endpoint: str, ready: Ready, now: float) -> str:
        """Takes the announcement; returns "" or why the replica must not serve."""
        replica = self._all[endpoint]
        restarted = replica.ready is None or replica.ready.pid != ready.pid
        replica.ready, replica.memory_bytes, replica.calibration = (
            ready,
            ready.memory_bytes,
            ready.calibration,
        )
        why = self.models.admit(ready.model)
        replica.refused = bool(why)
        if why:
            return why
        replica.state, replica.error, replica.health = "ready", "", ready.health
        replica.ledger = Ledger(ready.budget)
        replica.idle_since = replica.moved_at = now
        if restarted and not replica.leaving:
            replica.draining, replica.drained_at = False, NEVER
        self._note(now)
        return ""

    def lose(self, endpoint: str, why: str, now: float) -> set[int]:
        """The replica is out; returns the keys of the lanes that die with it."""
        replica = self._all[endpoint]
        self.lost += replica.alive
        lanes, replica.lanes, replica.caches = replica.lanes, set(), ()
        replica.state, replica.error, replica.run, replica.shape = "lost", why, 0, None
        replica.ledger, replica.building, replica.silent_since = Ledger(None), "", NEVER
        self._note(now)
        return lanes

    def drain(self, replica: Replica, until: float, now: float) -> None:
        replica.draining, replica.drained_at = True, until
        self._note(now)

    def resume(self, replica: Replica, now: float) -> None:
        replica.draining, replica.leaving, replica.drained_at = False, False, NEVER
        self._note(now)

    def _note(self, now: float) -> None:
        """Rotation may have changed: since when is nobody there for a model?"""
        serving = {replica.fingerprint for replica in self if replica.in_rotation}
        for fingerprint in serving:
            self._absent.pop(fingerprint, None)
        for fingerprint in {replica.fingerprint for replica in self} - serving:
            self._absent.setdefault(fingerprint, now)

    def absent_since(self, fingerprint: str) -> float | None:
        """Since when no replica in rotation serves this model; None while one does. "": the fleet's."""
        wanted = fingerprint or (self.model.fingerprint if self.model else "")
        if any(replica.in_rotation and replica.fingerprint == wanted for replica in self):
            return None
        return self._absent.get(wanted, self._began)

    def may_return(self, fingerprint: str) -> bool:
        """Whether one may still come (back) with this model, by what it announced last."""
        return any(replica.fingerprint in (fingerprint, "") and not replica.leaving for replica in self)

    def alive(self) -> bool:
        """Whether requests to the fleet's model have somewhere to go."""
        return self.absent_since("") is None

    def why_none(self) -> str:
        each = "; ".join(f"{replica.endpoint}: {replica.why_out}" for replica in self)
        return f"no replica can serve it ({each})" if each else "no replica is attached"

    # -- the one credit

    def idle(self) -> list[Replica]:
        """Those that may be given a Run, the least outstanding work first: with one credit that is none, so
        the longest idle, and those that build a handle last."""
        idle = [replica for replica in self if replica.state == "ready" and replica.in_rotation]
        return sorted(idle, key=lambda replica: (bool(replica.building), replica.idle_since))

    def spend(self, replica: Replica, shape: Shape, caches: dict[int, int], now: float) -> int:
        """The credit goes out with a Run of these keys and their bytes; returns the run's number."""
        run, self._next_run = self._next_run, self._next_run + 1
        for key, size in caches.items():
            replica.ledger.reserve(key, size)
        replica.state, replica.run, replica.shape = "busy", run, shape
        replica.caches, replica.lanes = tuple(caches), set(caches)
        replica.began, replica.moved_at, replica.stepped_at = now, now, 0.0
        return run

    def restore(self, replica: Replica, now: float) -> tuple[Shape, set[int]]:
        """The credit is back; returns the run's shape, and the keys that it left unanswered."""
        shape, unanswered = replica.shape, replica.lanes
        assert shape is not None
        for key in replica.caches:
            replica.ledger.release(key)
        replica.state, replica.run, replica.shape = "ready", 0, None
        replica.caches, replica.lanes = (), set()
        replica.idle_since = replica.moved_at = now
        return shape, unanswered

    def budgets(self, fingerprint: str) -> list[Budget | None]:
        """Of those that serve this model, or may come back with it, as each announced it last."""
        return [
            each.ready.budget
            for each in self
            if each.ready and each.fingerprint == fingerprint and not (each.refused or each.leaving)
        ]

    def may_hold(self, request: Request) -> bool:
        """Whether one in rotation serves its model and has the memory for it."""
        assert request.shape is not None
        for replica in self:
            if replica.in_rotation and replica.fingerprint == request.model:
                budget = replica.ledger.budget
                needed = lane_bytes(budget, request.shape.sampling, request.positions)
                if budget is None or needed <= budget.cache_bytes:
                    return True
        return False

    def build(self, replica: Replica, handle: str) -> None:
        """It is to make this handle, after its run; the credit is not touched."""
        if not replica.run:
            replica.moved_at = replica.last_seen
        replica.building = handle

    # -- life signs

    def saw(self, endpoint: str, now: float) -> None:
        replica = self._all[endpoint]
        replica.last_seen, replica.silent_since = now, NEVER

    def pong(self, replica: Replica, pong: Pong, now: float) -> bool:
        """Its life signs; True when it says for the first time that it is not, or is again, well."""
        if pong.step_counter != replica.step_counter or not (replica.run or replica.building):
            replica.moved_at = now
        replica.step_counter, replica.memory_bytes = pong.step_counter, pong.memory_bytes
        if pong.health == replica.health or not replica.alive:
            return False
        self.unwell += replica.health == WELL
        replica.health = pong.health
        self._note(now)
        return True

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
        if (replica.run or replica.building) and stalled_s > self._stall_s:
            return f"its engine made no step for {stalled_s:.1f} s"
        return ""

    def check(self) -> None:
        """Raises AssertionError unless credits, lanes and memory agree."""
        for replica in self:
            where = replica.endpoint
            assert (replica.state == "busy") == bool(replica.run), f"credit of {where}"
            assert bool(replica.run) == (replica.shape is not None), f"shape of {where}"
            assert replica.run or not replica.caches, f"caches of {where}"
            assert replica.lanes <= set(replica.caches), f"lanes of {where}"
            assert replica.ready is not None or not replica.alive, f"announcement of {where}"
            assert replica.alive or not replica.building, f"build of {where}"
            assert replica.draining or not replica.leaving, f"drain of {where}"
            replica.ledger.check()
            assert bool(replica.ledger.cache_bytes) <= bool(replica.run), f"memory of {where}"
            serving = replica.in_rotation
            assert not serving or replica.fingerprint not in self._absent, f"rotation of {where}"
