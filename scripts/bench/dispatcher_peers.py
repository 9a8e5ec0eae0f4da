"""The processes around the one that scripts/bench/dispatcher.py measures: who asks, who answers, who else
could forward. Plain pyzmq with as little work per frame as it can do, so that they are not what is measured.

    asks       DEALERs with open requests; counts the token frames, or how long each was under way
    replicas   answers the dispatcher's Runs with Steps of frames that were encoded beforehand
    answers    the same without a dispatcher's protocol, for what forwards blindly
    bare       a poll loop around recv_multipart and send_multipart, without any logic
    proxy      zmq.proxy, which is C
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

VERSION = b"TL2"
TOKENS = 512  # of each answer; then the same stream asks again
WARM_S = 0.7
LAST, MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
STAMP = struct.Struct("=q")
TOKEN = msgpack.packb({"type": "Tokens", "id": "0a1b2c-17", "seq": 93, "tokens": bytes(4), "text": " word"})
DONE = msgpack.packb({"type": "Done", "id": "0a1b2c-17", "stop_reason": "max_tokens"})


def sender(socket: zmq.Socket[bytes]) -> Callable[[list[bytes]], None]:
    """Sends a whole message without pyzmq's wrapping. Raises zmq.Again before the first frame."""
    send = super(zmq.Socket, socket).send

    def whole(frames: list[bytes]) -> None:
        for frame in frames[:-1]:
            send(frame, MORE)
        send(frames[-1], LAST)

    return whole


# ------------------------------------------------------------------ who asks


def asks(front: str, clients: int, streams: int, seconds: float, stamped: bool) -> None:
    """Prints START and STOP around the time that counts; the last line is what was seen in it."""
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(clients)]
    poller = zmq.Poller()
    for socket in sockets:
        socket.rcvhwm = 0
        socket.connect(front)
        poller.register(socket, zmq.POLLIN)
    asked = 0

    def ask(socket: zmq.Socket[bytes]) -> None:
        nonlocal asked
        asked += 1
        body = {"type": "Generate", "id": f"s-{asked}", "prompt_tokens": bytes(4), "max_tokens": TOKENS}
        socket.send_multipart([VERSION, msgpack.packb(body)])

    for n in range(streams):
        ask(sockets[n % clients])
    frames, messages = 0, 0
    delays: list[int] = []
    begin = end = 0.0
    while True:
        ready = poller.poll(1000)
        now = time.perf_counter()
        if not begin and frames:
            begin = now + WARM_S
            end = begin + seconds
        if end and now >= end:
            break
        if begin and now >= begin and begin > 0:
            print("START", flush=True)
            frames, messages, begin = 0, 0, -1.0
            delays.clear()
        for socket, _ in ready:
            receive = socket.recv
            for _ in range(50):
                try:
                    frame = receive(LAST, False)
                except zmq.Again:
                    break
                messages += 1
                while frame.more:
                    frame = receive(LAST, False)
                    frames += 1
                    if stamped:
                        (sent,) = STAMP.unpack_from(frame.buffer, len(frame) - STAMP.size)
                        delays.append(time.monotonic_ns() - sent)
                    elif len(frame) == len(DONE):
                        ask(socket)
    print("STOP", flush=True)
    delays.sort()
    found = {"frames": frames, "messages": messages, "seconds": seconds}
    if delays:
        found |= {
            name: delays[min(len(delays) - 1, int(len(delays) * part))] / 1000
            for name, part in (("p50_us", 0.5), ("p99_us", 0.99))
        }
    print(json.dumps(found), flush=True)


# ------------------------------------------------------------------ who answers


class Pace:
    """When the next of `rate` events per second is due; 0: always."""

    def __init__(self, rate: float) -> None:
        self._every = 1 / rate if rate else 0.0
        self._next = time.perf_counter()

    def due(self) -> bool:
        now = time.perf_counter()
        if now < self._next:
            return False
        self._next = max(self._next + self._every, now - 5 * self._every)
        return True

    def wait_ms(self) -> int:
        return max(0, int(1000 * (self._next - time.perf_counter())))


def frame_of_now() -> bytes:
    return TOKEN + STAMP.pack(time.monotonic_ns())


class FakeReplica:
    """Speaks enough of the back conversation; its engine makes a token per lane in no time."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)  # it has one peer
        self.socket.bind(endpoint)
        self.send = sender(self.socket)
        self.name = name
        self.keys: list[int] = []
        self.made = 0
        self.at = 0

    def hear(self) -> None:
        while self.socket.poll(0):
            message = msgpack.unpackb(self.socket.recv_multipart()[1])
            if message["type"] == "Hello":
                model = {"name": "m", "fingerprint": "f", "vocab_size": 9, "loops": 4, "max_loops": 8}
                model |= {"max_seq_len": 1 << 20}
                self.say({"type": "Ready", "name": self.name, "pid": 1, "device": "none", "model": model})
            elif message["type"] == "Ping":
                self.say({"type": "Pong", "n": message["n"], "step_counter": self.made})
            elif message["type"] == "Run":
                self.begin(message)

    def say(self, body: dict[str, Any]) -> None:
        self.socket.send_multipart([VERSION, msgpack.packb(body)])

    def begin(self, run: dict[str, Any]) -> None:
        self.keys, self.made, self.run = [lane["key"] for lane in run["lanes"]], 0, run["run"]
        self.whole = self.head(self.keys, final=False, idle=False)
        self.single = [self.head([key], final=False, idle=False) for key in self.keys]
        self.last = self.head(self.keys, final=True, idle=True)

    def head(self, keys: list[int], *, final: bool, idle: bool) -> bytes:
        body = {"type": "Step", "run": self.run, "keys": keys, "tokens": [1 - final] * len(keys)}
        return msgpack.packb(body | {"final": [final] * len(keys), "idle": idle})

    def step(self, single: bool, stamped: bool) -> None:
        """One token for every lane, or for the next one. Raises zmq.Again when the dispatcher is behind."""
        frame = frame_of_now() if stamped else TOKEN
        if single:
            self.send([VERSION, self.single[self.at % len(self.keys)], frame])
            self.at += 1
            self.made += self.at % len(self.keys) == 0
        else:
            self.send([VERSION, self.whole, *[frame] * len(self.keys)])
            self.made += 1
        if self.made >= TOKENS and not stamped:
            self.send([VERSION, self.last, *[DONE] * len(self.keys)])
            self.keys = []


def replicas(back: list[str], rate: float, single: bool, stamped: bool) -> None:
    context = zmq.Context()
    fakes = [FakeReplica(context, endpoint, f"r{n}") for n, endpoint in enumerate(back)]
    poller = zmq.Poller()
    for fake in fakes:
        poller.register(fake.socket, zmq.POLLIN)
    pace = Pace(rate)
    turn = 0
    while True:
        busy = [fake for fake in fakes if fake.keys]
        wait_ms = 100 if not busy else pace.wait_ms() if rate else 0
        for socket, _ in poller.poll(wait_ms):
            next(fake for fake in fakes if fake.socket is socket).hear()
        for _ in range(20 if busy else 0):
            if rate and not pace.due():
                break
            turn += 1
            fake = busy[turn % len(busy)]
            try:
                if fake.keys:
                    fake.step(single, stamped)
            except zmq.Again:
                time.sleep(0.0002)  # the one that is measured is the one who is late
                break


def answers(endpoint: str, rate: float, stamped: bool, direct: bool) -> None:
    """Behind a blind forwarder every message begins with the asking client's routing id; `direct`: clients
    connect to this process itself."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER if direct else zmq.DEALER)
    socket.bind(endpoint)
    send = sender(socket)
    streams: list[list[Any]] = []  # client, tokens made
    pace = Pace(rate)
    at = 0
    while True:
        wait_ms = 100 if not streams else pace.wait_ms() if rate else 0
        while socket.poll(wait_ms):
            streams.append([socket.recv_multipart()[0], 0])
            wait_ms = 0
        for _ in range(100 if streams else 0):
            if rate and not pace.due():
                break
            at = (at + 1) % len(streams)
            stream = streams[at]
            try:
                send([stream[0], VERSION, frame_of_now() if stamped else TOKEN])
                stream[1] += 1
                if stream[1] >= TOKENS and not stamped:
                    send([stream[0], VERSION, DONE])
                    del streams[at]
                    break
            except zmq.Again:
                time.sleep(0.0002)
                break


# ------------------------------------------------------------------ who else could forward


def ends(front: str, back: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(front)
    dealer.connect(back)
    print("READY", flush=True)
    return router, dealer


def bare(front: str, back: str) -> None:
    router, dealer = ends(front, back)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(dealer, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        for source, target in ((dealer, router), (router, dealer)):
            if source in ready:
                for _ in range(200):
                    try:
                        target.send_multipart(source.recv_multipart(zmq.DONTWAIT))
                    except zmq.Again:
                        break


def proxy(front: str, back: str) -> None:
    zmq.proxy(*ends(front, back))


ROLES: dict[str, Callable[..., None]] = {
    "asks": asks, "replicas": replicas, "answers": answers, "bare": bare, "proxy": proxy,
}  # fmt: skip

if __name__ == "__main__":
    ROLES[sys.argv[1]](*json.loads(sys.argv[2]))
