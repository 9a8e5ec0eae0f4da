"""The dispatcher's log: one JSON object per line, for every finished request and every event of a replica.

A request's line has what the pool knows of it and, where a replica answered, the engine's GenerateStats as
`stats`. Prompts and texts are never logged. docs/operations.md lists the events and their fields.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tinyloop_serve.protocol.messages import Done, Failed, Ready

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.requests import Request


class Journal:
    def __init__(self, write: Callable[[str], None]) -> None:
        """`write` is called by the message loop: it must not wait."""
        self._write = write

    def event(self, name: str, **fields: object) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write(json.dumps({"time": stamp, "event": name, **fields}))

    def announced(self, endpoint: str, ready: Ready) -> None:
        """A replica joined, with this much memory."""
        budget = None if ready.budget is None else msgspec.to_builtins(ready.budget)
        if budget is not None:
            del budget["costs"]
        self.event(
            "replica_ready",
            endpoint=endpoint,
            replica=ready.name,
            model=ready.model.fingerprint,
            pid=ready.pid,
            budget=budget,
            handles=len(ready.handles),
            health=ready.health,
        )

    def request(self, request: Request, outcome: str, verdict: Done | Failed | None, now: float) -> None:
        """`verdict`: what its client was sent at the end, as far as it is known."""
        started, first_at = request.started or now, request.first_at
        ended: dict[str, object] = {}
        if isinstance(verdict, Done):
            ended = {"stop_reason": verdict.stop_reason, "stats": msgspec.to_builtins(verdict.stats)}
        elif isinstance(verdict, Failed):
            ended = {"error": verdict.message}
        self.event(
            "request",
            id=request.id,
            client=request.client.hex(),
            tenant=request.tenant,
            outcome=outcome,
            shape=str(request.shape or ""),
            replica=request.replica,
            method=request.asked.method,
            handle=bool(request.asked.handle),
            handle_used=bool(request.uses),
            failovers=request.failovers,
            prompt_tokens=len(request.prompt) // 4,
            max_tokens=request.asked.max_tokens,
            seed=request.asked.seed,
            delivered=request.delivered,
            queue_ms=round((started - request.arrived) * 1000, 1),
            ttft_ms=round((first_at - request.arrived) * 1000, 1) if first_at else None,
            total_ms=round((now - request.arrived) * 1000, 1),
            **ended,
        )
