"""The one file of a client that touches a socket: a thread that owns the DEALER and drives a `Session`.

Callers leave calls in a deque and wake the thread through a socket pair; the thread hands every event to
the callable that the caller gave with its question. It never waits for a caller, so neither side can block
the other: a slow reader costs memory, at most `max_tokens` of its own request, and a busy event loop
misses no ping.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from tinyloop_serve.protocol.answers import Event, Question
from tinyloop_serve.protocol.calls import Chunk
from tinyloop_serve.protocol.errors import (
    AuthError,
    ConnectFailed,
    ProtocolError,
    TinyLoopError,
    TransportError,
    bad_field,
)
from tinyloop_serve.protocol.keys import Encryption
from tinyloop_serve.protocol.limits import MAX_BODY_BYTES
from tinyloop_serve.protocol.session import Events, Session
from tinyloop_serve.protocol.sockets import prepare

PACE_S = 0.1  # between one connection and the next
LINGER_MS = 200  # how long `close` may wait for the goodbye to leave
MESSAGES_PER_TURN = 1000  # read before calls and pings get their turn
STRIKES = 2  # handshakes that end without a word before the server's key is to blame

_EVENT = struct.Struct("=HI")  # head of a monitor message; pyzmq's own parser loads zmq.asyncio, 0.1 s
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MECHANISM_MISMATCH = 0x11000002  # zmq.h: ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class Link:
    """A connection to one dispatcher. Every method may be called from any thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        connect_timeout_s: float,
        lease_s: float,
        resume_s: float = 0.0,
        encryption: Encryption | None = None,
    ) -> None:
        for name, seconds in (("connect_timeout_s", connect_timeout_s), ("lease_s", lease_s)):
            if not 0.001 <= seconds < math.inf:
                raise bad_field(name, seconds, "a number of seconds of at least 0.001")
        if not 0 <= resume_s < math.inf:
            raise bad_field("resume_s", resume_s, "a number of seconds; 0: never resume")
        self._endpoint = endpoint
        self._encryption = encryption
        self._session = Session(
            endpoint, connect_timeout_s=connect_timeout_s, lease_s=lease_s, resume_s=resume_s
        )
        self._connection: _Connection | None = None
        self._connect_at = 0.0  # not before
        self._context = zmq.Context()
        try:
            self._connect()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise bad_field("endpoint", endpoint, f"ipc://PATH or tcp://HOST:PORT ({error})") from None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._calls: deque[Callable[[float], None]] = deque()
        self._sinks: dict[str, Callable[[Event], None]] = {}
        self._lock = threading.RLock()  # re-entrant: a garbage-collected stream may cancel inside a call
        self._closed = False
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="tinyloop-client", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- from any thread

    def open(
        self,
        question: Question,
        frames: list[bytes],
        sink: Callable[[Event], None],
        timeout_s: float | None = None,
    ) -> None:
        """Sends `question`; `sink` gets its events, in the link's thread. Raises `TransportError` once
        closed."""

        def call(now: float) -> None:
            self._sinks[question.id] = sink
            self._session.open(question, frames, now, timeout_s)

        if not self._submit(call):
            raise TransportError("the client is closed")

    def cancel(self, id: str) -> None:
        """Asks for the end of a request; its terminal event still comes. Unknown ids are ignored."""
        self._submit(lambda now: self._session.cancel(id))

    def abandon(self, id: str) -> None:
        """`cancel` by a caller who will not look at any further event."""

        def call(now: float) -> None:
            self._sinks.pop(id, None)
            self._session.cancel(id)

        self._submit(call)

    def release(self, handle: str) -> None:
        """Stops renewing a handle's lease."""
        self._submit(lambda now: self._session.release(handle))

    def drop(self, handle: str) -> None:
        """Frees a handle; nobody waits for the answer."""
        self._submit(lambda now: self._session.drop(handle))

    def close(self) -> None:
        """Says goodbye, fails what is open and waits for the thread. May be called again."""

        def call(now: float) -> None:
            self._leaving = True

        self._submit(call)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, call: Callable[[float], None]) -> bool:
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                try:
                    self._wake_out.send(b"\0")
                except BlockingIOError:  # so many wake-ups are waiting that one more changes nothing
                    pass
            return not self._closed

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        end = "the client was closed"
        try:
            while not self._leaving:
                self._turn()
        except BaseException as error:
            end = f"the client's thread failed: {error!r}"
            raise
        finally:
            self._finish(TransportError(end))

    def _turn(self) -> None:
        self._flush()
        self._wait()
        now = time.monotonic()
        self._read(now)
        self._run_calls(now)
        self._deliver(self._session.tick(now))
        self._drop_if_broken()

    def _wait(self) -> None:
        wake_at = self._session.wake_at()
        if self._connection is None and self._session.outbox:
            wake_at = min(self._connect_at, wake_at or math.inf)
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        if self._connection is not None:
            poller.register(self._connection.monitor, zmq.POLLIN)
            writable = zmq.POLLOUT if self._session.outbox else 0
            poller.register(self._connection.socket, zmq.POLLIN | writable)
        poller.poll(None if wake_at is None else max(0, math.ceil((wake_at - time.monotonic()) * 1000)))

    def _read(self, now: float) -> None:
        if (connection := self._connection) is None:
            return
        lost = connection.news()  # before the socket: what came before the loss is still read
        for _ in range(MESSAGES_PER_TURN if lost is None else 1 << 30):
            try:
                frames = connection.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._deliver(self._session.receive(frames, now))
            if self._session.broken:  # the rest is of a conversation that is over
                break
        if lost is not None and not self._session.broken:
            self._deliver(self._session.lost(lost, now))
        self._drop_if_broken()

    def _flush(self) -> None:
        outbox = self._session.outbox
        if outbox and self._connection is None and time.monotonic() >= self._connect_at:
            self._connect()
        try:
            while outbox and self._connection is not None:
                self._connection.socket.send_multipart(outbox[0], zmq.DONTWAIT)
                outbox.popleft()
        except zmq.Again:
            pass

    def _run_calls(self, now: float) -> None:
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()(now)

    def _deliver(self, events: Events) -> None:
        for id, event in events:
            sink = self._sinks.get(id) if isinstance(event, Chunk) else self._sinks.pop(id, None)
            if sink is not None:
                sink(event)

    def _drop_if_broken(self) -> None:
        if self._session.broken:
            self._session.broken = False
            self._disconnect(0)

    def _finish(self, error: TransportError) -> None:
        with self._lock:
            self._closed = True
        self._run_calls(time.monotonic())
        self._deliver(self._session.fail(error))
        if self._connection is not None:
            self._session.leave()
            self._flush()
            self._disconnect(LINGER_MS)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def _connect(self) -> None:
        self._connect_at = time.monotonic() + PACE_S
        self._connection = _Connection(self._context, self._endpoint, self._encryption)

    def _disconnect(self, linger_ms: int) -> None:
        if self._connection is not None:
            self._connection.close(linger_ms)
            self._connection = None


class _Connection:
    """One socket, and what its monitor has told of it. ZeroMQ itself tries again until the first handshake;
    a connection that was lost after that is not used again."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, encryption: Encryption | None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self._endpoint = endpoint
        self._encrypted = encryption is not None
        self._established = False
        self._strikes = 0
        self._retried = False  # ZeroMQ itself will try again
        self.socket.set(zmq.LINGER, 0)
        prepare(self.socket, endpoint, MAX_BODY_BYTES)
        self.socket.set(zmq.RECONNECT_IVL, 100)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        if encryption is not None:
            encryption.connect(self.socket)
        self.monitor = self.socket.get_monitor_socket(_WATCHED)
        self.socket.connect(endpoint)

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

    def news(self) -> TinyLoopError | None:
        """How it was lost, if it was."""
        lost = None
        while self.monitor.poll(0):
            event, value = _EVENT.unpack_from(self.monitor.recv_multipart()[0])
            lost = lost or self._judge(event, value)
        return lost

    def _judge(self, event: int, value: int) -> TinyLoopError | None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._established = True
        elif event == zmq.EVENT_DISCONNECTED and self._established:
            advice = "`tinyloop up` starts a fleet if none is running"
            return ConnectFailed(f"{self._endpoint}: the dispatcher closed the connection; {advice}")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return AuthError(f"{self._endpoint}: the dispatcher does not know this key", field="key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._retried = True
            self._strikes += self._encrypted and not self._established
            if self._strikes == STRIKES:
                why = "it has another key than server_key, or uses none"
                return AuthError(f"{self._endpoint}: it breaks off the handshake: {why}", field="server_key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            advice = "it uses no keys" if self._encrypted else "it asks for keys: give key and server_key"
            return AuthError(f"{self._endpoint}: {advice}", field="key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or (
            event == zmq.EVENT_DISCONNECTED and not self._retried
        ):  # the second may be all that ZeroMQ says of a peer that it will never try again
            return ProtocolError(f"{self._endpoint}: the peer does not speak this kind of ZeroMQ connection")
        elif event == zmq.EVENT_DISCONNECTED:
            self._retried = False
        return None
