"""The replica's one socket and its loop. It never blocks: decoding is in the executor's thread, decisions
in Session.

A request on this side: frames from the dispatcher -> `Session.handle` -> `Executor` -> the engine; each
step's tokens come back as an `Outcome` -> `Session.relay` -> frames to the dispatcher. This file must not
know the model.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_REPLICA
from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.host import Supervisor, lock
from tinyloop_serve.protocol.keys import KeyPair
from tinyloop_serve.protocol.messages import FromReplica
from tinyloop_serve.protocol.sockets import prepare
from tinyloop_serve.protocol.zap import Gate
from tinyloop_serve.replica.executor import Outcome
from tinyloop_serve.replica.health import WELL
from tinyloop_serve.replica.session import Session

FRAMES_PER_TURN = 64  # messages read before outcomes are looked at again
FAREWELL_MS = 500  # for the last frames to leave
REFUSALS_S = 1.0  # between two lines on keys that were refused
LOOK_S = 1.0  # how often it is looked whether the engine still moves
FOREVER = float("inf")


class Mailbox:
    """What other threads and signal handlers leave for the loop; `fd` is readable when there is something."""

    def __init__(self) -> None:
        self.fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.stop_requested = False
        self.given_up = ""  # why the engine is past hope: end, and let the supervisor start afresh
        self._outcomes: deque[Outcome] = deque()

    def post(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._wake()

    def request_stop(self, *_: object) -> None:
        self.stop_requested = True
        self._wake()

    def give_up(self, why: str) -> None:
        self.given_up = why
        self._wake()

    def collect(self) -> list[Outcome]:
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _wake(self) -> None:
        try:
            os.write(self._wake_fd, b"\0")
        except BlockingIOError:
            pass  # full: the loop is awake anyway


class Server:
    """Binds in the constructor: a dispatcher may connect from then on. Raises `EndpointTaken`,
    `zmq.ZMQError`."""

    def __init__(
        self,
        endpoint: str,
        mailbox: Mailbox,
        say: Callable[[str], None],
        pair: KeyPair | None = None,
        dispatchers: Sequence[str] = (),
    ) -> None:
        """`say` is given lines for people, and must not wait. With `pair`, over tcp, only the holders of
        these public keys may connect, encrypted."""
        self._mailbox = mailbox
        self._say = say
        self._path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""
        self._lock = lock(self._path) if self._path else os.open(os.devnull, os.O_RDONLY)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # a dispatcher that is gone is an error, not a silence
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the credit bounds it: one run's frames
        prepare(self._socket, endpoint, TO_REPLICA.max_body_bytes)
        self._socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        self._gate: Gate | None = None
        self._denied_at = -REFUSALS_S
        if pair and endpoint.startswith("tcp://"):
            self._gate = Gate(self._context, dict.fromkeys(dispatchers, "dispatcher"), self._denied)
            keys.bind(self._socket, pair)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where a dispatcher connects, the port filled in."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def run(self, session: Session, drain_s: float, stall_s: float = FOREVER) -> None:
        """Serves until a stop is requested and, for `drain_s` at most, the run in progress has ended.

        The supervisor gets signs of life while the engine moves. When it has not for `stall_s` though it has
        work, `mailbox.given_up` is set and this returns: only a fresh process can help. Then no goodbye is
        said: what it was given may be why.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._mailbox.fd, zmq.POLLIN)
        if self._gate:
            poller.register(self._gate.socket, zmq.POLLIN)
        leave_at = FOREVER
        supervisor, told = Supervisor(), session.health
        while True:
            outcomes = self._mailbox.collect()
            stalled_s = session.stalled_s(time.monotonic())
            for peer, message in session.news():
                self._send(session, peer, message)
            for outcome in outcomes:
                if (to := session.relay(outcome)) is not None:
                    self._send(session, to, outcome.message, outcome.payloads)
            if session.health != told:
                told = session.health
                supervisor.status(told if told != WELL else "well again")
            sign_at = FOREVER
            if stalled_s < max(supervisor.watchdog_s, 1.0):
                supervisor.alive(time.monotonic())
                sign_at = supervisor.wake_at()
            if stalled_s > stall_s:
                self._mailbox.given_up = f"the engine made no step for {stalled_s:.1f} s"
            if self._mailbox.given_up:
                return
            if self._mailbox.stop_requested:
                if leave_at == FOREVER:
                    supervisor.stopping()
                    leave_at = time.monotonic() + drain_s
                if not session.busy or time.monotonic() >= leave_at:
                    break
            soon = time.monotonic() + LOOK_S if session.busy or session.working else FOREVER
            poller.poll(_milliseconds_until(min(leave_at, sign_at, soon)))
            if self._gate:
                self._gate.serve()
            self._receive(session)
        for peer, message in session.leave():
            self._send(session, peer, message)

    def close(self) -> None:
        """Frames already said still leave, for `FAREWELL_MS` at most."""
        self._context.destroy()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        os.close(self._lock)

    def _denied(self, key: str, address: str) -> None:
        """A flood of strangers must not become one of log lines."""
        if (now := time.monotonic()) >= self._denied_at + REFUSALS_S:
            self._denied_at = now
            self._say(f"refused a connection from {address}: key {key} is not a dispatcher's")

    def _receive(self, session: Session) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                message = TO_REPLICA.decode(frames)
            except TinyLoopError as error:
                self._say(f"refused a message: {error}")
                continue
            for to, reply in session.handle(peer, message):
                self._send(session, to, reply)

    def _send(
        self, session: Session, peer: bytes, message: FromReplica, payloads: Sequence[bytes] = ()
    ) -> None:
        try:
            self._socket.send_multipart([peer, *FROM_REPLICA.encode(message, payloads)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            session.lost(peer)


def _milliseconds_until(when: float) -> int | None:
    return None if when == FOREVER else max(0, math.ceil((when - time.monotonic()) * 1000))
