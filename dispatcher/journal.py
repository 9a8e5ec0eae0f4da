"""The dispatcher's log: one JSON object per line, for every finished request and every event of a replica.

A request's line has what the pool knows of it and, where a replica answered, the engine's GenerateStats as
`stats`. Prompts and texts are never logged.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tinyloop_serve.protocol.messages import Stats

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.requests import Request


def to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to read it
        print(line, file=sys.stderr, flush=True)


class Journal:
    def __init__(self, write: Callable[[str], None] = to_stderr) -> None:
        self._write = write

    def event(self, name: str, **fields: object) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write(json.dumps({"time": stamp, "event": name, **fields}))

    def request(self, request: Request, outcome: str, now: float, stats: Stats | None = None) -> None:
        started = request.started or now
        made = {} if stats is None else {"stats": msgspec.to_builtins(stats)}
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
            failovers=request.failovers,
            prompt_tokens=len(request.prompt) // 4,
            max_tokens=request.asked.max_tokens,
            seed=request.asked.seed,
            delivered=request.delivered,
            queue_ms=round((started - request.arrived) * 1000, 1),
            total_ms=round((now - request.arrived) * 1000, 1),
            **made,
        )
