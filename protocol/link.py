"""The one file of a client that touches a socket: a thread that owns the DEALER and drives a `Session`.

Callers leave calls in a deque and wake the thread through a socket pair; the thread hands every event to
the callable that the caller gave with its request. It never waits for a caller, so neither side can block
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

from tinyloop_serve.protocol.calls import Chunk
from tinyloop_serve.protocol.errors import (
    AuthError,
    ConnectFailed,
    ProtocolError,
    TinyLoopError,
    TransportError,
    bad_field,
)
from tinyloop_serve.protocol.limits import MAX_BODY_BYTES
from tinyloop_serve.protocol.messages import Generate, GetStatus
from tinyloop_serve.protocol.session import Event, Events, Session

LINGER_MS = 200  # how long `close` may wait for the goodbye to leave
MESSAGES_PER_TURN = 1000  # read before calls and pings get their turn

_EVENT = struct.Struct("=H")  # head of a monitor message; pyzmq's own parser loads zmq.asyncio, 0.1 s
_LOST: dict[int, tuple[type[TinyLoopError], str]] = {
    zmq.EVENT_DISCONNECTED: (
        ConnectFailed,
        "the dispatcher closed the connection; `tinyloop up` starts a fleet if none is running",
    ),
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (AuthError, "the key was refused"),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (
        ProtocolError,
        "the peer does not speak this kind of ZeroMQ connection",
    ),
}


class Link:
    """A connection to one dispatcher. Every method may be called from any thread."""

    def __init__(self, endpoint: str, *, connect_timeout_s: float, lease_s: float) -> None:
        for name, seconds in (("connect_timeout_s", connect_timeout_s), ("lease_s", lease_s)):
            if not 0.001 <= seconds < math.inf:
                raise bad_field(name, seconds, "a number of seconds of at least 0.001")
        self._endpoint = endpoint
        self._session = Session(endpoint, connect_timeout_s=connect_timeout_s, lease_s=lease_s)
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

    def open(self, request: Generate | GetStatus, frames: list[bytes], sink: Callable[[Event], None]) -> None:
        """Sends `request`; `sink` gets its events, in the link's thread. Raises `TransportError` once
        closed."""

        def call(now: float) -> None:
            self._sinks[request.id] = sink
            self._session.open(request, frames, now)

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
        wake_at = self._session.wake_at()
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._session.outbox else 0))
        poller.poll(None if wake_at is None else max(0, math.ceil((wake_at - time.monotonic()) * 1000)))
        lost = self._read_monitor()  # before the socket: what came before the loss is still read
        now = time.monotonic()
        for _ in range(MESSAGES_PER_TURN if lost is None else 1 << 30):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._deliver(self._session.receive(frames, now))
        if lost is not None:
            self._deliver(self._session.lost(lost))
        self._reconnect_if_broken()
        self._run_calls(now)
        self._deliver(self._session.tick(now))
        self._reconnect_if_broken()

    def _flush(self) -> None:
        outbox = self._session.outbox
        try:
            while outbox:
                self._socket.send_multipart(outbox[0], zmq.DONTWAIT)
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

    def _finish(self, error: TransportError) -> None:
        with self._lock:
            self._closed = True
        self._run_calls(time.monotonic())
        self._deliver(self._session.lost(error))
        self._session.leave()
        self._flush()
        self._disconnect(LINGER_MS)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # -------------------------------------------------------------- the socket

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        self._socket.set(zmq.RECONNECT_IVL, 100)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(sum(_LOST))
        self._socket.connect(self._endpoint)

    def _disconnect(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _reconnect_if_broken(self) -> None:
        if self._session.broken:
            self._session.broken = False
            self._disconnect(0)
            self._connect()

    def _read_monitor(self) -> TinyLoopError | None:
        lost = None
        while self._monitor.poll(0):
            (event,) = _EVENT.unpack_from(self._monitor.recv_multipart()[0])
            if event in _LOST:
                kind, why = _LOST[event]
                lost = kind(f"{self._endpoint}: {why}")
        return lost
