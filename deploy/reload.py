"""Bringing a changed model file into a running fleet, one replica after the other, without a lost token.

For each replica: nothing new goes to it, its requests end (or, after `PATIENCE_S`, go on at another), it ends
and starts with the new file, and serves again before the next one's turn. The steps are calls to the
dispatcher that wait, so they run in a thread of their own; the fleet asks `next_to_restart` and does the
restarting. A dispatcher that is restarted meanwhile is given its orders again.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import ConnectFailed
from tinyloop_serve.protocol.messages import ReplicaStatus, Status

PATIENCE_S = 60.0  # for one replica to end its requests, and for it to come back
KNOWN_S = 10.0  # for a replica to announce itself to a dispatcher that was just restarted
ATTEMPTS = 5  # at one replica, when the dispatcher is restarted meanwhile
CLOCKS_S = 0.1  # between two clocks, and for rounding; a restart takes longer
LOOK_S = 0.1

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Verdict:
    text: str  # for people
    good: bool  # every replica serves the file as it is now


class Reload:
    """Begins at once. `names` are the replicas, in the order of their turn."""

    def __init__(self, endpoint: str, model: str, names: list[str]) -> None:
        self._endpoint = endpoint
        self._model = model
        self._names = names
        self._restarts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._verdict: Verdict | None = None
        threading.Thread(target=self._run, name="reload", daemon=True).start()

    def next_to_restart(self) -> str | None:
        """The name of a replica to end and start again; None: not now."""
        try:
            return self._restarts.get_nowait()
        except queue.Empty:
            return None

    def verdict(self) -> Verdict | None:
        """How it went; None while it goes on."""
        return self._verdict

    def _run(self) -> None:
        try:
            self._verdict = self._reload()
        except Exception as error:  # whatever it is: somebody waits for a verdict
            self._verdict = Verdict(f"reload failed: {error}; what serves goes on serving", good=False)

    def _reload(self) -> Verdict:
        from tinyloop_serve.native import errors, inspect_artifact  # not before it is needed

        try:
            fingerprint = inspect_artifact(self._model)["fingerprint"]
        except errors.TinyLoopError as error:
            why = f"reload refused: {self._model}: {error}; what serves goes on serving"
            return Verdict(why, good=False)
        with _patiently(lambda: connect(self._endpoint)) as client:
            steps = _Steps(client, fingerprint, self._restarts.put)
            if all(replica.fingerprint == fingerprint for replica in steps.status().replicas):
                same = f"reload: all replicas serve {self._model} ({fingerprint[:12]}) already"
                return Verdict(same, good=True)
            for name in self._names:
                steps.bring_in(name)
        done = f"reloaded: {len(self._names)} replicas serve {self._model} ({fingerprint[:12]})"
        return Verdict(done, good=True)


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """A dispatcher that is gone for a while is waited for. Raises ConnectFailed."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except ConnectFailed:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(LOOK_S)


class _Restarted(Exception):
    """The dispatcher was, and knows nothing of orders that were given before."""


class _Steps:
    """Those of one replica after the other; `restart` has it end and start again."""

    def __init__(self, client: Client, fingerprint: str, restart: Callable[[str], None]) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._restart = restart
        self._begun_by = math.inf  # the dispatcher had begun by then, by this process's clock

    def status(self) -> Status:
        """Raises `_Restarted`, ConnectFailed."""
        asked_at, status = _patiently(lambda: (time.monotonic(), self._client.status()))
        uptime_s, before = status.uptime_ms / 1000, self._begun_by
        self._begun_by = time.monotonic() - uptime_s
        if asked_at - uptime_s > before + CLOCKS_S:
            raise _Restarted
        return status

    def bring_in(self, name: str) -> None:
        """The replica serves the new file when this returns. Raises RuntimeError, TinyLoopError."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_Restarted):
                return self._bring_in(name)
        raise RuntimeError(f"the dispatcher was restarted {ATTEMPTS} times during the turn of {name}")

    def _bring_in(self, name: str) -> None:
        self._order("accept", self._fingerprint)
        known_by = time.monotonic() + KNOWN_S
        while (replica := self._replica(name)) is None and time.monotonic() < known_by:
            time.sleep(LOOK_S)
        if replica is not None and self._serves(replica):
            return  # since before the dispatcher was restarted
        if replica is not None and replica.state in ("ready", "busy", "draining"):
            self._order("drain", name)
            self._await(name, lambda replica: not replica.running)
        self._restart(name)
        self._await(name, self._serves)

    def _serves(self, replica: ReplicaStatus) -> bool:
        return replica.fingerprint == self._fingerprint and replica.state in ("ready", "busy")

    def _order(self, action: Literal["accept", "drain"], target: str) -> None:
        try:
            self._client.control(action, target, within_s=PATIENCE_S)
        except ConnectFailed:
            raise _Restarted from None

    def _replica(self, name: str) -> ReplicaStatus | None:
        """None: it has not announced itself, perhaps not yet to this dispatcher."""
        return next((replica for replica in self.status().replicas if replica.name == name), None)

    def _await(self, name: str, done: Callable[[ReplicaStatus], bool]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while (replica := self._replica(name)) is None or not done(replica):
            if time.monotonic() > deadline:
                why = replica.error if replica else "it never announced itself"
                raise RuntimeError(f"{name} did not get there: {why or 'no reason given'}")
            time.sleep(LOOK_S)
