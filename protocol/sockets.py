"""What each of our ZeroMQ sockets is told before it binds or connects. Keys are keys.py's business.

A machine that vanishes says nothing on its tcp connections: without keep-alive probes the other end would
hold each of them, and its descriptor, for ever.
"""

from __future__ import annotations

import zmq

IDLE_S, PROBE_S, PROBES = 60, 10, 3  # silence before the first probe; between probes; unanswered, it is gone


def prepare(socket: zmq.Socket[bytes], endpoint: str, max_frame_bytes: int) -> None:
    """`max_frame_bytes`: a peer that sends more in one frame is cut off."""
    socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.set(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, PROBES)
