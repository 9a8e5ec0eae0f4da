"""The dispatcher's sockets and clock, and nothing else: frames in, `core.py` decides, frames out.

One thread, one poll loop, a bounded number of messages from each socket per turn, and no call that waits
but the poll. `_read_front` is where a request arrives. Tokens come in through `link.py`, one link per
replica; all that one turn has for a client leaves in one message (`_deliver`), because a message costs far
more than its bodies.
"""

from __future__ import annotations

import os
import secrets
import time

import zmq

from tinyloop_serve.dispatcher import status
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.core import Core
from tinyloop_serve.dispatcher.effects import Attach, Detach, Load, Reset, Send, Tokenize
from tinyloop_serve.dispatcher.encryption import Keyring
from tinyloop_serve.dispatcher.endpoints import Place
from tinyloop_serve.dispatcher.http import CannotListen, Http
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.link import LINGER_MS, Link
from tinyloop_serve.dispatcher.outbox import Outbox, Verdict
from tinyloop_serve.dispatcher.poller import Poller
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.dispatcher.tenants import LOCAL
from tinyloop_serve.dispatcher.tokenize import Tokenizer
from tinyloop_serve.dispatcher.wake import Wake
from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.codec import (
    TO_CLIENT,
    TO_DISPATCHER,
    TO_REPLICA,
    failed_from,
    parcels,
    salvage_id,
)
from tinyloop_serve.protocol.errors import LimitExceeded, TinyLoopError, TransportError
from tinyloop_serve.protocol.host import Supervisor
from tinyloop_serve.protocol.limits import MAX_BODY_BYTES, check_announced
from tinyloop_serve.protocol.messages import VERSION, Built, Message, Ready, ToDispatcher
from tinyloop_serve.protocol.sockets import prepare
from tinyloop_serve.protocol.zap import Gate, user_of

MESSAGES_PER_TURN = 200  # from one socket
FRAMES_KEPT = 4  # of one message: a well-formed one has three
TELL_S = 0.5  # between two looks at what the supervisor should know
GOODBYE_S = 0.5  # for the last frames to leave
QUEUED_PER_CLIENT = 100  # messages inside ZeroMQ; more wait in our own outbox, where they are counted
REFUSALS_S = 1.0  # between two log lines on keys that were refused
LAST, MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


class Server:
    def __init__(self, config: Config, journal: Journal, version: str = "") -> None:
        """Binds the front and the pages. Raises `EndpointTaken`, `ConfigError`, `CannotListen`, `OSError` or
        `zmq.ZMQError`."""
        self._config = config
        self._journal = journal
        self._keyring = Keyring(config)
        self._place = Place(config.front)
        self._context = zmq.Context()
        encrypted = self._keyring.front is not None
        self._gate = Gate(self._context, self._keyring.users, self._denied) if encrypted else None
        self._wake = Wake()
        try:
            self._front = self._bind()
            self._http = self._listen()
        except (zmq.ZMQError, CannotListen):
            self._context.destroy(linger=0)
            self._place.close()
            raise
        # pyzmq's own `send` checks and wraps, which takes four times as long as the sending.
        self._send = super(zmq.Socket, self._front).send
        self._poller = Poller()
        self._poller.register(self._front)
        self._poller.register(self._wake.fd)
        if self._gate is not None:
            self._poller.register(self._gate.socket)
        self._links = {e: self._link(e) for e in config.replicas}
        stall_s = config.client_stall_ms / 1000
        self._outbox = Outbox(self._attempt, config.client_bytes, stall_s, _farewell())
        self._mail: dict[bytes, list[bytes]] = {}  # bodies that this turn has for a client
        self._tokenizer = Tokenizer(self._wake)
        self._supervisor = Supervisor()
        name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._core = Core(config, journal, time.monotonic(), name=name, version=version)
        self._summary = ""  # that our supervisor was told last
        self._tell_at = 0.0  # when it is looked for another one
        self._stops = 0  # how often `stop` was called
        self._refused = 0  # keys, since the last log line on them
        self._refused_at = -REFUSALS_S

    @property
    def endpoint(self) -> str:
        """Where clients connect, the port filled in."""
        return self._front.get_string(zmq.LAST_ENDPOINT)

    @property
    def http(self) -> str:
        """HOST:PORT of the pages for monitoring, the port filled in; "" = there are none."""
        return self._http.address if self._http else ""

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
                self._supervisor.stopping()
                leave_at = now + self._config.drain_ms / 1000
            if self._stops > 1 or (self._stops and not self._core.requests.live()):
                break
            self._turn(min(self._core.wake_at(), leave_at))
        self._close()

    def _turn(self, wake_at: float) -> None:
        until = min(wake_at, self._supervisor.wake_at(), self._outbox.wake_at())
        for link in self._links.values():
            if not link.open and link.open_at < until:
                until = link.open_at
        ready = self._poller.poll(until - time.monotonic())
        now = time.monotonic()
        self._supervisor.alive(now)
        if self._wake.fd in ready:
            self._wake.clear()
        if self._gate is not None and self._gate.socket in ready:
            self._gate.serve()
        for link in list(self._links.values()):
            if link.due(ready, now):
                self._read_replica(link, *link.news(ready), now)
                self._deliver(now)
        if self._front in ready:
            self._read_front(now)
        if self._http is not None:
            self._http.answer(self._core, now)
        for key, result in self._tokenizer.results():
            self._say(self._core.tokenized(key, result, now), now)
        for client, verdict in self._outbox.flush(now):
            self._say(self._verdict(client, verdict, now), now)
        if now >= wake_at:
            self._say(self._core.tick(now), now)
            self._tell_supervisor(now)
        self._deliver(now)

    def _tell_supervisor(self, now: float) -> None:
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_S
        if (summary := status.summary(self._core)) != self._summary:
            self._summary = summary
            self._supervisor.status(summary)

    # ------------------------------------------------------------------ in

    def _read_front(self, now: float) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = [frame := self._front.recv(zmq.DONTWAIT, copy=False)]
            except zmq.Again:
                return
            while frame.more:  # the rest of a message that has too many is of no interest, but must go
                frame = self._front.recv(zmq.DONTWAIT, copy=False)
                if len(frames) < FRAMES_KEPT:
                    frames.append(frame)
            tenant = LOCAL if self._gate is None else user_of(frames[0])
            self._hear(tenant, [frame.bytes for frame in frames], now)

    def _hear(self, tenant: str, frames: list[bytes], now: float) -> None:
        client, *rest = frames
        try:
            message = self._decode(rest)
        except TinyLoopError as error:
            request_id = salvage_id(rest[1]) if len(rest) > 1 else ""
            self._say(self._core.client_garbled(client, request_id, error, now), now)
        else:
            self._say(self._core.client_says(client, tenant, message, now), now)

    def _decode(self, frames: list[bytes]) -> ToDispatcher:
        size, limit = sum(map(len, frames)), self._config.max_body + len(VERSION)
        if size > limit:
            accepted = f"at most {self._config.max_body} bytes"
            raise LimitExceeded(f"a message of {size} bytes; {accepted} are accepted", accepted=accepted)
        return TO_DISPATCHER.decode(frames)

    def _read_replica(self, link: Link, connected: bool, lost: str, now: float) -> None:
        if connected:
            self._say(self._core.replica_connected(link.endpoint), now)
        last_words = 1 << 30  # what it said before it went still counts
        for count in range(last_words if lost else MESSAGES_PER_TURN):
            if count == 1 and not lost and not link.has_more():
                break
            try:
                if (received := link.receive()) is None:
                    break
                message, payloads = received
                if isinstance(message, Ready | Built):
                    check_announced(message)
            except TinyLoopError as error:
                lost = f"it sent something malformed: {error}"
                break
            self._say(self._core.replica_says(link.endpoint, message, tuple(payloads), now), now)
            if not link.open:
                return
        if lost:
            self._say(self._core.replica_gone(link.endpoint, lost, now), now)

    # ------------------------------------------------------------------ out

    def _say(self, sends: list[Send], now: float) -> None:
        for peer, message, payloads in sends:  # which grows while it is said
            if message is None:
                assert isinstance(peer, bytes)
                self._mail.setdefault(peer, []).extend(payloads)
            elif isinstance(peer, bytes):
                assert isinstance(message, Message)
                self._mail.setdefault(peer, []).append(_encoded(message))
            elif isinstance(message, Load | Tokenize):
                self._tokenizer.take(message)
            else:
                sends += self._tell_replica(peer, message, now)

    def _tell_replica(self, endpoint: str, message: object, now: float) -> list[Send]:
        if isinstance(message, Attach):
            return self._attach(endpoint, now)
        if (link := self._links.get(endpoint)) is None:
            return []
        if isinstance(message, Detach):
            link.close(now, LINGER_MS)
            del self._links[endpoint]
        elif isinstance(message, Reset):
            link.close(now)
        else:
            try:
                sent = link.send(TO_REPLICA.encode(message))  # type: ignore[arg-type]
            except LimitExceeded as error:
                return self._core.replica_gone(endpoint, f"it cannot be told what to do: {error}", now)
            if not sent:
                return self._core.replica_gone(endpoint, "it cannot be reached", now)
        return []

    def _deliver(self, now: float) -> None:
        """What has gathered for each client, in as few messages as hold it."""
        while self._mail:
            mail, self._mail = self._mail, {}
            for client, bodies in mail.items():
                for frames in parcels(bodies):
                    verdict = self._outbox.post(client, frames, now)
                    if verdict is not Verdict.FINE:
                        self._say(self._verdict(client, verdict, now), now)
                    if verdict is Verdict.GONE:
                        break

    def _verdict(self, client: bytes, verdict: Verdict, now: float) -> list[Send]:
        if verdict is Verdict.SLOW:
            return self._core.client_slow(client, now)
        return self._core.client_gone(client, now) if verdict is Verdict.GONE else []

    def _attempt(self, client: bytes, frames: list[bytes]) -> Verdict:
        send = self._send
        self._poller.used(self._front)
        try:
            send(client, MORE)  # ZeroMQ takes or refuses a whole message here
        except zmq.Again:
            return Verdict.SLOW
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Verdict.GONE
        for frame in frames[:-1]:
            send(frame, MORE)
        send(frames[-1], LAST)
        return Verdict.FINE

    # ------------------------------------------------------------------ sockets come and go

    def _bind(self) -> zmq.Socket[bytes]:
        front = self._context.socket(zmq.ROUTER)  # without HANDOVER: a routing id stays with who had it first
        front.set(zmq.ROUTER_MANDATORY, 1)
        prepare(front, self._config.front, MAX_BODY_BYTES)
        front.set(zmq.SNDHWM, QUEUED_PER_CLIENT)
        front.set(zmq.RCVHWM, QUEUED_PER_CLIENT)
        if self._keyring.front is not None:
            keys.bind(front, self._keyring.front)
        mask = os.umask(0o117)
        try:
            front.bind(self._config.front)
            self._place.opened()
        finally:
            os.umask(mask)
        return front

    def _listen(self) -> Http | None:
        if not self._config.http:
            return None
        from tinyloop_serve.dispatcher.pages import ROUTES  # brings in the metrics' text formats

        return Http(self._config.http, self._wake, ROUTES)

    def _denied(self, key: str, address: str) -> None:
        """A peer whose key is on no list; a flood of them must not become one of log lines."""
        self._refused += 1
        self._core.metrics.keys_refused += 1
        if (now := time.monotonic()) >= self._refused_at + REFUSALS_S:
            self._journal.event("key_refused", key=key, address=address, count=self._refused)
            self._refused, self._refused_at = 0, now

    def _link(self, endpoint: str) -> Link:
        return Link(endpoint, self._context, self._poller, self._keyring.of(endpoint))

    def _attach(self, endpoint: str, now: float) -> list[Send]:
        try:
            self._links[endpoint] = self._link(endpoint)
        except ConfigError as error:
            return self._core.replica_gone(endpoint, error.message, now)
        return []

    def _close(self) -> None:
        now = time.monotonic()
        self._say(self._core.stop(now), now)
        self._deliver(now)
        while self._outbox and time.monotonic() < now + GOODBYE_S:
            self._poller.poll(self._outbox.wake_at() - time.monotonic())
            self._outbox.flush(time.monotonic())
        self._tokenizer.close()
        self._poller.close()
        if self._http is not None:
            self._http.close()
        self._context.destroy(linger=int(1000 * GOODBYE_S))
        self._place.close()


def _farewell() -> list[bytes]:
    given_up = TransportError("the client read too slowly for too long; what was open has ended")
    return TO_CLIENT.encode(failed_from(given_up, ""))


def _encoded(message: Message) -> bytes:
    """For a client; what is too large for one message is refused in its place."""
    try:
        return TO_CLIENT.encode_body(message)  # type: ignore[arg-type]
    except TinyLoopError as error:
        return TO_CLIENT.encode_body(failed_from(error, getattr(message, "id", "")))
