"""A client for a command: refused at once, not after a timeout, where nobody can be listening."""

from __future__ import annotations

import os
import socket

from tinyloop_serve.deploy import endpoints
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import ConnectFailed

TRY_S = 2.0


def connect(endpoint: str) -> Client:
    """Raises `ConnectFailed` when nothing is bound at `endpoint`, `UnsafeDirectory` when the default one
    is not ours.

    A plain connection is made and closed first: ZeroMQ itself would keep trying in silence.
    """
    if endpoint.startswith(f"ipc://{endpoints.runtime_directory()}/"):
        endpoints.check_private(endpoints.runtime_directory())
    try:
        _knock(endpoint)
    except OSError as error:
        raise ConnectFailed(f"no fleet answers at {endpoint} ({os.strerror(error.errno or 0)})") from None
    key, server_key = (os.environ.get(name) or None for name in ("TINYLOOP_KEY", "TINYLOOP_SERVER_KEY"))
    if not endpoint.startswith("tcp://"):  # a local fleet has no use for them
        return Client(endpoint)
    return Client(endpoint, key=key, server_key=server_key)


def _knock(endpoint: str) -> None:
    """Raises OSError when nobody listens; other schemes than ipc and tcp are for the client to judge."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(TRY_S)
            probe.connect(address)
    elif scheme == "tcp" and address.rpartition(":")[2].isdecimal():
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), TRY_S).close()
