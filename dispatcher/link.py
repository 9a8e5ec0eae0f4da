"""The connection to one replica: a DEALER and its monitor.

One connection is one conversation: a replica that was lost gets a fresh socket, so nothing that was said
before the loss can reach anybody after it. This file must not know what the messages mean.
"""

from __future__ import annotations

import errno
from collections.abc import Set

import zmq
from zmq.utils.monitor import parse_monitor_message

from tinyloop_serve.dispatcher.poller import Poller
from tinyloop_serve.protocol.codec import FROM_REPLICA, check_version
from tinyloop_serve.protocol.errors import LimitExceeded, ProtocolError
from tinyloop_serve.protocol.keys import Encryption
from tinyloop_serve.protocol.limits import MAX_BACK_BODY_BYTES, MAX_BODY_BYTES
from tinyloop_serve.protocol.messages import VERSION, FromReplica, Step
from tinyloop_serve.protocol.sockets import prepare

RECONNECT_S = 0.1  # before a lost replica is tried again
REFUSED_S = 5.0  # the same where it was never one of ours: only an operator can change that
STRIKES = 2  # handshakes that end without a word before the keys are to blame
LINGER_MS = 500  # for the last words to one that is left for good
DONTWAIT = int(zmq.DONTWAIT)

_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # of a peer that breaks the protocol ZeroMQ says nothing but that it is gone, and never tries it again


class Link:
    """`open` is False for a while after a loss, until `open_at`."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: Poller,
        encryption: Encryption | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.open = False
        self.open_at = 0.0
        self._context = context
        self._poller = poller
        self._encryption = encryption
        self._established = False
        self._strikes = 0
        self._retried = False  # ZeroMQ itself will try again

    def due(self, ready: Set[object], now: float) -> bool:
        """Whether it has something to read; a closed one is opened when its time has come."""
        if not self.open and now >= self.open_at:
            self._connect(now)
        return self.open and (self.socket in ready or self._monitor in ready)

    def _connect(self, now: float) -> None:
        try:
            self.socket = self._context.socket(zmq.DEALER)  # without IMMEDIATE: it discards what was received
            try:
                self._monitor = self.socket.get_monitor_socket(_WATCHED)
            except zmq.ZMQError:
                self.socket.close(0)
                raise
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.open_at = now + RECONNECT_S  # clients have all our descriptors: as long as they do
            return
        prepare(self.socket, self.endpoint, MAX_BACK_BODY_BYTES)
        self.socket.set(zmq.RECONNECT_IVL, int(1000 * RECONNECT_S))
        if self._encryption is not None:
            self._encryption.connect(self.socket)
        self.socket.connect(self.endpoint)
        self._poller.register(self.socket)
        self._poller.register(self._monitor)
        self.open, self._established, self._strikes, self._retried = True, False, 0, False

    def close(self, now: float, linger_ms: int = 0) -> None:
        if self.open:
            self._poller.unregister(self.socket)
            self._poller.unregister(self._monitor)
            self.socket.disable_monitor()
            self._monitor.close(0)
            self.socket.close(linger_ms)
            self.open, self.open_at = False, now + (RECONNECT_S if self._established else REFUSED_S)

    def news(self, ready: Set[object]) -> tuple[bool, str]:
        """Whether it connected, and "" or how it was lost; before that ZeroMQ tries again where it can."""
        connected, lost = False, ""
        while self._monitor in ready and not lost:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            except zmq.Again:
                break
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected = self._established = True
            elif event == zmq.EVENT_DISCONNECTED and self._established:
                lost = "the connection was closed"
            elif event == zmq.EVENT_DISCONNECTED:
                lost = "" if self._retried else self._misfit()
                self._retried = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                lost = "it does not know our key"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._retried = True
                self._strikes += self._encryption is not None and not self._established
                if self._strikes == STRIKES:
                    lost = "it breaks off the handshake: it has other keys, or none"
        return connected, lost

    def _misfit(self) -> str:
        keys = "it uses no keys" if self._encryption else "it asks for keys"
        return f"what answers there is no replica, or {keys}"

    def has_more(self) -> bool:
        """Whether another message waits."""
        return self._poller.readable(self.socket)

    def receive(self) -> tuple[FromReplica, list[bytes]] | None:
        """The next message and its payloads, if one waits. Raises `ProtocolError` or `LimitExceeded`.

        Every token passes here. Asking ZeroMQ after each part whether there is another costs more than all
        else, so the body's own count of its payloads is relied on: it is checked by the last of them, and
        by the version that a message which began among them would have brought along.
        """
        receive = self.socket.recv
        try:
            version = receive(DONTWAIT)
        except zmq.Again:
            return None
        try:
            body = receive(DONTWAIT, False)
            check_version(version)
            message = FROM_REPLICA.decode_body(body.bytes)
            count = len(message.keys) if isinstance(message, Step) else 0
            last, payloads = body, list[bytes]()
            if count:
                payloads = [receive(DONTWAIT) for _ in range(count - 1)]
                last = receive(DONTWAIT, False)
                payloads.append(last.bytes)
        except zmq.Again:
            raise ProtocolError("a message ended before its time") from None
        if last.more or (count and not body.more) or VERSION in payloads:
            raise ProtocolError(f"{type(message).__name__}: other than the {count} payloads that it names")
        if count and max(map(len, payloads)) > MAX_BODY_BYTES:
            raise LimitExceeded(f"a payload of more than {MAX_BODY_BYTES} bytes", field="payload")
        return message, payloads

    def send(self, frames: list[bytes]) -> bool:
        """False: it takes nothing any more. The core speaks only to a replica that connected."""
        try:
            if self.open:
                self._poller.used(self.socket)
                self.socket.send_multipart(frames, zmq.DONTWAIT)
            return self.open
        except zmq.Again:
            return False
