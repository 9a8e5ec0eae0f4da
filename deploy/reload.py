"""Bringing a changed model file into a running fleet, one replica after the other, without a lost token.

For each replica: nothing new goes to it, its requests end (or, after `PATIENCE_S`, go on at another), it ends
and starts with the new file, and serves again before the next one's turn. The steps are calls to the
dispatcher that wait, so they run in a thread of their own; the fleet asks `next_to_restart` and does the
restarting.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.messages import ReplicaStatus

PATIENCE_S = 60.0  # for one replica to end its requests, and for it to come back
LOOK_S = 0.1


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
        """The name of a replica to end and start again, each once; None: not now."""
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
        except (TinyLoopError, OSError, RuntimeError) as error:
            self._verdict = Verdict(f"reload failed: {error}; what serves goes on serving", good=False)

    def _reload(self) -> Verdict:
        from tinyloop_serve.native import errors, inspect_artifact  # not before it is needed

        try:
            fingerprint = inspect_artifact(self._model)["fingerprint"]
        except errors.TinyLoopError as error:
            why = f"reload refused: {self._model}: {error}; what serves goes on serving"
            return Verdict(why, good=False)
        with connect(self._endpoint) as client:
            if all(replica.fingerprint == fingerprint for replica in client.status().replicas):
                same = f"reload: all replicas serve {self._model} ({fingerprint[:12]}) already"
                return Verdict(same, good=True)
            client.control("accept", fingerprint)
            for name in self._names:
                old = self._replica(client, name)
                if old.state in ("ready", "busy", "draining"):
                    client.control("drain", name, within_s=PATIENCE_S)
                    self._await(client, name, lambda replica: not replica.running)
                self._restarts.put(name)
                self._await(
                    client, name, lambda r: r.fingerprint == fingerprint and r.state in ("ready", "busy")
                )
        done = f"reloaded: {len(self._names)} replicas serve {self._model} ({fingerprint[:12]})"
        return Verdict(done, good=True)

    def _replica(self, client: Client, name: str) -> ReplicaStatus:
        return next(replica for replica in client.status().replicas if replica.name == name)

    def _await(self, client: Client, name: str, done: Callable[[ReplicaStatus], bool]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not done(self._replica(client, name)):
            if time.monotonic() > deadline:
                why = self._replica(client, name).error
                raise RuntimeError(f"{name} did not get there: {why or 'no reason given'}")
            time.sleep(LOOK_S)
