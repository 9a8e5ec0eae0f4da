"""Who may open an encrypted connection: the ZAP handler (ZeroMQ RFC 27) of one context.

ZeroMQ asks it at every CURVE handshake, through an inproc socket that the owner's poll loop watches; it
answers from a table, so it never blocks. `user_of` then tells whose key a message came with. Connections
without encryption are not asked about: whoever binds decides whether those may exist at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
PER_TURN = 32  # handshakes answered before the loop turns to its messages again
OK, DENIED = (b"200", b"OK"), (b"400", b"this key is not allowed")


class Gate:
    """`users`: public key (Z85) -> the name that its messages carry. `denied` is told each refused key."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        users: Mapping[str, str],
        denied: Callable[[str, str], None] = lambda key, address: None,
    ) -> None:
        self._users = {z85.decode(key.encode()): name.encode() for key, name in users.items()}
        self._denied = denied
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def serve(self) -> None:
        """Answers what waits; call it when `socket` is readable."""
        for _ in range(PER_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            at = frames.index(b"") + 1
            self.socket.send_multipart([*frames[:at], *self.answer(frames[at:])], zmq.DONTWAIT)

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Version, request id, status, its text, user id, metadata."""
        version, request_id, _, address, _, mechanism, *credentials = request
        user = self._users.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if user is None:
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
            self._denied(key, address.decode(errors="replace"))
            return [version, request_id, *DENIED, b"", b""]
        return [version, request_id, *OK, user, b""]


def user_of(frame: zmq.Frame) -> str:
    """The name that `Gate` gave to the sender's key; "" for a connection without encryption."""
    try:
        return str(frame.get("User-Id"))
    except (zmq.ZMQError, KeyError):
        return ""
