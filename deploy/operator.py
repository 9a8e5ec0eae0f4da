"""`tinyloop drain`, `resume`, `attach`, `detach`: an operator's orders to the dispatcher, and their end.

The dispatcher answers an order when it has begun; `wait` looks at its status until the replica is empty.
"""

from __future__ import annotations

import json
import time
from typing import Literal, TypeAlias

from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import DeadlineExceeded
from tinyloop_serve.protocol.messages import ReplicaStatus

Action: TypeAlias = Literal["attach", "drain", "resume", "detach"]

LOOK_S = 0.1
MARGIN_S = 30.0  # beyond `within_s`, when its requests move away


def order(endpoint: str, action: Action, target: str, *, within_s: float, wait: bool, as_json: bool) -> int:
    """Raises `Forbidden`, `InvalidRequest` (no such replica) or `DeadlineExceeded` (it did not get empty)."""
    with connect(endpoint) as client:
        before = _find(client, target)
        name = before.name if before is not None and before.name else target
        did = client.control(action, target, within_s=within_s)
        if wait:
            _await_empty(client, target, within_s + MARGIN_S)
    if as_json:
        print(json.dumps({"action": action, "replica": name, "did": did, "waited": wait}))
    else:
        print(f"{did}; it has none left" if wait else did)
    return 0


def _await_empty(client: Client, target: str, patience_s: float) -> None:
    """Until it runs nothing: also when it was restarted, or is no longer known."""
    give_up_at = time.monotonic() + patience_s
    while (replica := _find(client, target)) is not None and replica.running:
        if replica.state != "draining":
            return  # resumed by somebody, or restarted: it has new work
        if time.monotonic() > give_up_at:
            raise DeadlineExceeded(f"{target} still runs {replica.running} requests after {patience_s:g} s")
        time.sleep(LOOK_S)


def _find(client: Client, target: str) -> ReplicaStatus | None:
    found = client.status().replicas
    return next((replica for replica in found if target in (replica.name, replica.endpoint)), None)
