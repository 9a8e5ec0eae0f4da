"""The dispatcher's sockets and clock, and nothing else: frames in, `core.py` decides, frames out.

One thread, one poll loop, a bounded number of messages from each socket per turn, and no call that waits
but the poll. `_read_front` is where a request arrives; `_say` is where everything leaves. Each replica has
a `Link`: one connection is one conversation, so a lost replica gets a fresh socket, and nothing that was
said before the loss can reach anybody after it.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.core import Core
from tinyloop_serve.dispatcher.effects import Load, Reset, Send, Tokenize
from tinyloop_serve.dispatcher.endpoints import Place
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.outbox import Outbox, Verdict
from tinyloop_serve.dispatcher.tokenize import Tokenizer
from tinyloop_serve.dispatcher.wake import Wake
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_CLIENT, TO_DISPATCHER, TO_REPLICA, salvage_id
from tinyloop_serve.protocol.errors import LimitExceeded, TinyLoopError
from tinyloop_serve.protocol.limits import MAX_BACK_BODY_BYTES, MAX_BODY_BYTES
from tinyloop_serve.protocol.messages import VERSION, ToDispatcher

MESSAGES_PER_TURN = 200  # from one socket
RETRY_S = 0.01  # for frames that a client could not take
RECONNECT_S = 0.1  # before a lost replica is tried again
GOODBYE_S = 0.5  # for the last frames to leave
QUEUED_PER_CLIENT = 100  # messages inside ZeroMQ; more wait in our own outbox, where they are counted


class Server:
    def __init__(self, config: Config, journal: Journal, version: str = "") -> None:
        """Binds the front. Raises `EndpointTaken`, `ConfigError`, `OSError` or `zmq.ZMQError`."""
        self._config = config
        self._place = Place(config.front)
        self._context = zmq.Context()
        try:
            self._front = self._bind()
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            self._place.close()
            raise
        self._wake = Wake()
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._poller.register(self._wake.fd, zmq.POLLIN)
        self._links = {e: Link(e, self._context, self._poller) for e in config.replicas}
        self._outbox = Outbox(self._attempt, config.client_bytes, config.client_stall_ms / 1000)
        self._tokenizer = Tokenizer(self._wake)
        name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._core = Core(config, journal, time.monotonic(), name=name, version=version)
        self._stops = 0  # how often `stop` was called

    @property
    def endpoint(self) -> str:
        """Where clients connect, the port filled in."""
        return self._front.get_string(zmq.LAST_ENDPOINT)

    def stop(self) -> None:
        """From any thread or signal handler: refuse new requests, let the live ones end; twice: end now."""
        self._stops += 1
        self._wake()

    def run(self) -> None:
        """Serves until `stop` and the drain after it; then everything is closed."""
        leave_at = float("inf")
        while (now := time.monotonic()) < leave_at:
            if self._stops and not self._core.draining:
                self._core.draining = True
                leave_at = now + self._config.drain_ms / 1000
            if self._stops > 1 or (self._stops and not self._core.requests.live()):
                break
            self._turn(min(self._core.wake_at(), leave_at))
        self._close()

    def _turn(self, wake_at: float) -> None:
        times = [wake_at, *(link.open_at for link in self._links.values() if not link.open)]
        if self._outbox:
            times.append(time.monotonic() + RETRY_S)
        wait_ms = math.ceil(1000 * (min(times) - time.monotonic()))
        ready = dict(self._poller.poll(max(0, wait_ms)))
        now = time.monotonic()
        self._wake.clear()
        for link in self._links.values():
            if link.due(ready, now):
                self._read_replica(link, now)
        if self._front in ready:
            self._read_front(now)
        for key, result in self._tokenizer.results():
            self._say(self._core.tokenized(key, result, now), now)
        for client, verdict in self._outbox.flush(now):
            self._say(self._verdict(client, verdict, now), now)
        if now >= wake_at:
            self._say(self._core.tick(now), now)

    # ------------------------------------------------------------------ in

    def _read_front(self, now: float) -> None:
        for client, *frames in _received(self._front, MESSAGES_PER_TURN):
            try:
                message = self._decode(frames)
            except TinyLoopError as error:
                request_id = salvage_id(frames[1]) if len(frames) > 1 else ""
                self._say(self._core.client_garbled(client, request_id, error, now), now)
            else:
                self._say(self._core.client_says(client, message, now), now)

    def _decode(self, frames: list[bytes]) -> ToDispatcher:
        size, limit = sum(map(len, frames)), self._config.max_body + len(VERSION)
        if size > limit:
            accepted = f"at most {self._config.max_body} bytes"
            raise LimitExceeded(f"a message of {size} bytes; {accepted} are accepted", accepted=accepted)
        return TO_DISPATCHER.decode(frames)

    def _read_replica(self, link: Link, now: float) -> None:
        connected, lost = link.news()
        if connected:
            self._say(self._core.replica_connected(link.endpoint), now)
        last_words = 1 << 30  # what it said before it went still counts
        for frames in _received(link.socket, last_words if lost else MESSAGES_PER_TURN):
            try:
                message = FROM_REPLICA.decode(frames)
            except TinyLoopError as error:
                lost = f"it sent something malformed: {error}"
                break
            self._say(self._core.replica_says(link.endpoint, message, tuple(frames[2:]), now), now)
            if not link.open:
                return
        if lost:
            self._say(self._core.replica_gone(link.endpoint, lost, now), now)

    # ------------------------------------------------------------------ out

    def _say(self, sends: Iterable[Send], now: float) -> None:
        todo = deque(sends)
        while todo:
            peer, message, payloads = todo.popleft()
            if isinstance(peer, bytes):
                bodies = payloads if message is None else [TO_CLIENT.encode_body(message)]  # type: ignore[arg-type]
                for body in bodies:  # the protocol has one to a message
                    todo += self._verdict(peer, self._outbox.post(peer, [VERSION, body], now), now)
            elif isinstance(message, Load | Tokenize):
                self._tokenizer.take(message)
            elif isinstance(message, Reset):
                self._links[peer].close(now)
            elif not self._links[peer].send(TO_REPLICA.encode(message)):  # type: ignore[arg-type]
                todo += self._core.replica_gone(peer, "it cannot be reached", now)

    def _verdict(self, client: bytes, verdict: Verdict, now: float) -> list[Send]:
        if verdict is Verdict.SLOW:
            return self._core.client_slow(client, now)
        return self._core.client_gone(client, now) if verdict is Verdict.GONE else []

    def _attempt(self, client: bytes, frames: list[bytes]) -> Verdict:
        try:
            self._front.send_multipart([client, *frames], zmq.DONTWAIT)
        except zmq.Again:
            return Verdict.SLOW
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Verdict.GONE
        return Verdict.FINE

    # ------------------------------------------------------------------ sockets come and go

    def _bind(self) -> zmq.Socket[bytes]:
        front = self._context.socket(zmq.ROUTER)
        front.set(zmq.ROUTER_MANDATORY, 1)
        front.set(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        front.set(zmq.SNDHWM, QUEUED_PER_CLIENT)
        front.set(zmq.RCVHWM, QUEUED_PER_CLIENT)
        front.set(zmq.IPV6, int(self._config.front.startswith("tcp://[")))
        mask = os.umask(0o117)
        try:
            front.bind(self._config.front)
            self._place.opened()
        finally:
            os.umask(mask)
        return front

    def _close(self) -> None:
        now = time.monotonic()
        self._say(self._core.stop(now), now)
        while self._outbox and time.monotonic() < now + GOODBYE_S:
            self._poller.poll(int(1000 * RETRY_S))
            self._outbox.flush(time.monotonic())
        self._tokenizer.close()
        self._context.destroy(linger=int(1000 * GOODBYE_S))
        self._place.close()


class Link:
    """The connection to one replica: a DEALER and its monitor. `open` is False for a while after a loss."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self.endpoint = endpoint
        self.open = False
        self.open_at = 0.0
        self._context = context
        self._poller = poller

    def due(self, ready: dict[Any, int], now: float) -> bool:
        """Whether it has something to read; a closed one is opened when its time has come."""
        if not self.open and now >= self.open_at:
            self._connect()
        return self.open and (self.socket in ready or self._monitor in ready)

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)  # IMMEDIATE stays off: it discards received messages
        self.socket.set(zmq.MAXMSGSIZE, MAX_BACK_BODY_BYTES)
        self.socket.set(zmq.RECONNECT_IVL, int(1000 * RECONNECT_S))
        self.socket.set(zmq.IPV6, int(self.endpoint.startswith("tcp://[")))
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(self.endpoint)
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.open = True

    def close(self, now: float) -> None:
        if self.open:
            self._poller.unregister(self.socket)
            self._poller.unregister(self._monitor)
            self.socket.disable_monitor()
            self._monitor.close(0)
            self.socket.close(0)
            self.open, self.open_at = False, now + RECONNECT_S

    def news(self) -> tuple[bool, str]:
        """Whether it connected, and "" or how it was lost."""
        connected = False
        for parts in _received(self._monitor, MESSAGES_PER_TURN):
            if parse_monitor_message(parts)["event"] == zmq.EVENT_DISCONNECTED:
                return connected, "the connection was closed"
            connected = True
        return connected, ""

    def send(self, frames: list[bytes]) -> bool:
        """False: it takes nothing any more. The core speaks only to a replica that connected."""
        try:
            if self.open:
                self.socket.send_multipart(frames, zmq.DONTWAIT)
            return self.open
        except zmq.Again:
            return False


def _received(socket: zmq.Socket[bytes], limit: int) -> Iterator[list[bytes]]:
    for _ in range(limit):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
