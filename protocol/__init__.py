"""The language between the processes, and the client library. Imports none of our other folders.

Names are loaded when they are first used, so that a process which only needs the messages loads no sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyloop_serve.protocol.aio import AsyncClient, AsyncStream
    from tinyloop_serve.protocol.calls import Chunk, Completion, Options, Prompt
    from tinyloop_serve.protocol.client import Client, Stream
    from tinyloop_serve.protocol.errors import (
        AuthError,
        ConnectFailed,
        DeadlineExceeded,
        EngineFailed,
        InvalidRequest,
        LimitExceeded,
        ModeRefused,
        Overloaded,
        ProtocolError,
        ReplicaLost,
        RequestError,
        ServiceError,
        TinyLoopError,
        TransportError,
        Unavailable,
        UnknownRequest,
    )
    from tinyloop_serve.protocol.messages import Stats, Status

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "AuthError",
    "Chunk",
    "Client",
    "Completion",
    "ConnectFailed",
    "DeadlineExceeded",
    "EngineFailed",
    "InvalidRequest",
    "LimitExceeded",
    "ModeRefused",
    "Options",
    "Overloaded",
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

_FILES = ("errors", "messages", "calls", "client", "aio")  # searched in this order, the cheapest first


def __getattr__(name: str) -> Any:
    if name in __all__:
        for file in _FILES:
            module = import_module(f"{__name__}.{file}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
