"""The language between the processes, and the client library. Imports none of our other folders.

Names are loaded when they are first used, so that a process which only needs the messages loads no sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyloop_serve.protocol.aio import AsyncClient, AsyncDraft, AsyncStream
    from tinyloop_serve.protocol.calls import Chunk, Completion, HandleOptions, Options, Prompt
    from tinyloop_serve.protocol.client import Client, Draft, Stream
    from tinyloop_serve.protocol.errors import (
        AuthError,
        ConnectFailed,
        DeadlineExceeded,
        EngineFailed,
        Forbidden,
        HandleLost,
        InvalidRequest,
        LimitExceeded,
        ModeRefused,
        Overloaded,
        PoisonRequest,
        ProtocolError,
        ReplicaLost,
        RequestError,
        ServiceError,
        TinyLoopError,
        TransportError,
        Unavailable,
        UnknownRequest,
    )
    from tinyloop_serve.protocol.handles import Handle
    from tinyloop_serve.protocol.messages import HandleInfo, Stats, Status

__all__ = [
    "AsyncClient",
    "AsyncDraft",
    "AsyncStream",
    "AuthError",
    "Chunk",
    "Client",
    "Completion",
    "ConnectFailed",
    "DeadlineExceeded",
    "Draft",
    "EngineFailed",
    "Forbidden",
    "Handle",
    "HandleInfo",
    "HandleLost",
    "HandleOptions",
    "InvalidRequest",
    "LimitExceeded",
    "ModeRefused",
    "Options",
    "Overloaded",
    "PoisonRequest",
    "Prompt",
    "ProtocolError",
    "ReplicaLost",
    "RequestError",
    "ServiceError",
    "Stats",
    "Status",
    "Stream",
    "TinyLoopError",
    "TransportError",
    "Unavailable",
    "UnknownRequest",
]

_FILES = ("errors", "handles", "messages", "calls", "client", "aio")  # searched in this order


def __getattr__(name: str) -> Any:
    if name in __all__:
        for file in _FILES:
            module = import_module(f"{__name__}.{file}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
