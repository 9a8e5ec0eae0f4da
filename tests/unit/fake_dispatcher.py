"""A scripted dispatcher for client tests: a ROUTER in a thread that speaks through the independent `msgpack`
package, so that a mistake which our own codec makes in both directions does not go unnoticed."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import zmq

from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.keys import KeyPair
from tinyloop_serve.protocol.zap import Gate, user_of

Body = dict[str, Any]
Answer = Callable[[Body], Iterable[Body]]
CAP_S = 30.0  # the longest that a test waits for anything; never the time that it takes


class FakeDispatcher:
    """Answers pings unless `mute`; what else it says is `answer`'s choice, or comes from `say`."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        answer: Answer | None = None,
        pair: KeyPair | None = None,
        users: dict[str, str] | None = None,
    ) -> None:
        self.mute = False
        self.pings: list[Body] = []
        self.users: set[str] = set()  # as the gate named those who spoke
        self.seen: list[tuple[bytes, Body]] = []  # everything but pings
        self._answer = answer
        self._news = threading.Condition()
        self._orders: deque[list[bytes]] = deque()
        self._stop = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self._gate = Gate(self._context, users or {}) if pair else None
        if pair:
            keys.bind(self._socket, pair)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.last_endpoint.decode()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, peer: bytes, *bodies: Body) -> None:
        for body in bodies:
            self.say_raw(peer, [b"TL2", msgpack.packb(body)])

    def say_together(self, peer: bytes, *bodies: Body) -> None:
        """All of them in one message."""
        self.say_raw(peer, [b"TL2", *map(msgpack.packb, bodies)])

    def say_raw(self, peer: bytes, frames: list[bytes]) -> None:
        self._orders.append([peer, *frames])

    def wait_for(self, type: str, n: int = 1) -> list[tuple[bytes, Body]]:
        """The messages of one type, as soon as there are `n` of them."""

        def found() -> list[tuple[bytes, Body]]:
            return [(peer, body) for peer, body in self.seen if body["type"] == type]

        with self._news:
            assert self._news.wait_for(lambda: len(found()) >= n, CAP_S), f"no {n} {type}; seen: {self.seen}"
            return found()

    def wait_for_pings(self, n: int) -> list[Body]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.pings) >= n, CAP_S), f"only {len(self.pings)} pings"
            return self.pings

    def close(self) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            if self._gate:
                self._gate.serve()
            if self._socket.poll(5):
                self._receive()
            while self._orders:
                self._socket.send_multipart(self._orders.popleft())
        self._socket.close()
        if self._gate:
            self._gate.socket.close()
        self._context.term()

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        self.users.add(user_of(frames[0]))
        peer, version, packed = (frame.bytes for frame in frames)
        assert version == b"TL2"
        body = msgpack.unpackb(packed)
        with self._news:
            if body["type"] == "Ping":
                self.pings.append(body)
                if not self.mute:
                    self.say(peer, {"type": "Pong", "n": body["n"]})
            else:
                self.seen.append((peer, body))
                if self._answer is not None:
                    self.say(peer, *self._answer(body))
            self._news.notify_all()


def tokens(id: str, seq: int, ids: Iterable[int], text: str = "") -> Body:
    ids = list(ids)
    return {
        "type": "Tokens",
        "id": id,
        "seq": seq,
        "tokens": struct.pack(f"<{len(ids)}I", *ids),
        "text": text,
    }


def done(id: str, stop_reason: str = "max_tokens", text: str = "", **stats: Any) -> Body:
    return {"type": "Done", "id": id, "stop_reason": stop_reason, "text": text, "stats": stats}


def failed(id: str, code: str, message: str = "no", **more: Any) -> Body:
    return {"type": "Failed", "id": id, "code": code, "message": message, **more}


def echo(body: Body) -> list[Body]:
    """Answers a text prompt with its words, one token each (the token is the word's length)."""
    if body["type"] == "GetStatus":
        return [status(body["id"])]
    if body["type"] != "Generate":
        return []
    words = body["prompt_text"].split()
    pieces = [tokens(body["id"], n, [len(word)], word + " ") for n, word in enumerate(words)]
    if not body.get("stream", True):
        pieces = [tokens(body["id"], 0, map(len, words), "".join(word + " " for word in words))]
    return [*pieces, done(body["id"], text="END", generated_tokens=len(words))]


def pool(body: Body) -> list[Body]:
    """`echo`, and handles: one named h1, which every request may use."""
    if body["type"] == "CreateHandle":
        recipe = body["recipe"]
        held = {"handle": "h1", "kind": recipe["kind"], "tokens": 3, "loops": recipe.get("loops", 8)}
        held |= {name: recipe[name] for name in ("cache_mode", "cache_window") if name in recipe}
        held |= {"lease_ms": body.get("lease_ms", 600_000), "shared": body.get("shared", False)}
        return [{"type": "Handle", "id": body["id"], "info": held}]
    if body["type"] in ("DropHandle", "RenewHandle"):
        held = {"handle": body["handle"], "kind": "prefix", "tokens": 3, "loops": 8}
        return [{"type": "Handle", "id": body["id"], "info": held}]
    if body["type"] == "ListHandles":
        held = {"handle": "h1", "kind": "prefix", "tokens": 3, "loops": 8, "mine": False}
        return [{"type": "Handles", "id": body["id"], "handles": [held]}]
    if body["type"] == "Control":
        return [{"type": "Controlled", "id": body["id"], "message": f"{body['action']} {body['target']}"}]
    return echo({"prompt_text": "", **body})


def status(id: str) -> Body:
    model = dict(name="m", fingerprint="ab", vocab_size=9, loops=4, max_loops=8, max_seq_len=64)
    replica = dict(name="r0", endpoint="ipc://r0", state="ready", pid=7)
    bucket = dict(shape="loops 4", waiting=1, oldest_ms=5)
    counts = dict(waiting=1, running=0, finished=3, failed=0, clients=1, uptime_ms=5, version="1")
    return {"type": "Status", "id": id, "model": model, "replicas": [replica], "buckets": [bucket], **counts}


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + CAP_S
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        time.sleep(0.005)
