"""Malformed, mutated, oversized and out-of-order frames against the front and the back socket of a
dispatcher, while a well-formed client is served.

    .venv/bin/python scripts/fuzz_wire.py [--frames 1000000]

The front gets them from several raw clients, the back from a peer that pretends to be a replica (the
dispatcher connects to it). The last line is one JSON object: frames sent, the well-formed client's requests
and errors, the dispatcher's resident memory on the way and at the end, whether it still lives.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.faults.fleet import resident_bytes, state_of
from tinyloop_serve.native import GenerateConfig, Model, demo_model_path
from tinyloop_serve.protocol import messages as m
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_CLIENT, TO_DISPATCHER, TO_REPLICA, tokens_to_bytes
from tinyloop_serve.protocol.errors import TinyLoopError

PROMPT = list(range(10, 26))
RAW_CLIENTS = 4
NEW_CONNECTION = 2000  # messages until a raw client connects anew


def good_messages(draw: random.Random) -> list[list[bytes]]:
    """Well-formed ones of every kind and direction, so that mutants come near to what is accepted."""
    ids = [draw.choice(("a", "b", "c", "x" * 64)) for _ in range(8)]
    tokens = tokens_to_bytes(draw.randrange(4000) for _ in range(draw.randrange(1, 40)))
    recipe = m.Recipe("prefix", prompt_tokens=tokens, loops=4)
    sampling = m.Sampling(loops=draw.randrange(9), temperature=draw.random())
    model = m.ModelInfo("m", "f" * 32, 4096, 8, 16, 576)
    front: list[m.ToDispatcher] = [
        m.Generate(ids[0], prompt_tokens=tokens, sampling=sampling, max_tokens=draw.randrange(1, 20)),
        m.Generate(ids[1], prompt_text="In the beginning", deadline_ms=draw.randrange(100)),
        m.Cancel(ids[2]),
        m.Ping(draw.randrange(99), lease_ms=draw.choice((0, 1, 5000))),
        m.GetStatus(ids[3]),
        m.CreateHandle(ids[4], recipe, lease_ms=draw.randrange(1, 2000)),
        m.RenewHandle(ids[5], "0" * 32),
        m.DropHandle(ids[5], "0" * 32),
        m.ListHandles(ids[6]),
        m.Goodbye(),
    ]
    payload = TO_CLIENT.encode_body(m.Tokens(ids[0], 0, tokens))
    back: list[tuple[m.FromReplica, list[bytes]]] = [
        (m.Ready("r9", 1, "cpu", model), []),
        (m.Step(draw.randrange(50), (draw.randrange(50),), (1,), (draw.random() < 0.5,)), [payload]),
        (m.Step(draw.randrange(50), idle=True), []),
        (m.Pong(draw.randrange(99), draw.randrange(99)), []),
        (m.Built("0" * 32, bytes=draw.randrange(99)), []),
        (m.Calibrated(m.Calibration()), []),
        (m.Goodbye(), []),
    ]
    found = [TO_DISPATCHER.encode(message) for message in front]
    found += [FROM_REPLICA.encode(message, payloads) for message, payloads in back]
    found.append(TO_REPLICA.encode(m.Run(1, sampling, (m.Lane(1, "a", tokens, 5),))))
    return found


def mutant(draw: random.Random, pool: list[list[bytes]]) -> list[bytes]:
    frames = list(draw.choice(pool))
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(frames))
        frame = bytearray(frames[at])
        kind = draw.randrange(8)
        if kind == 0 and frame:
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        elif kind == 1 and frame:
            del frame[draw.randrange(len(frame)) :]
        elif kind == 2:
            frame[draw.randrange(len(frame) + 1) : 0] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 3:
            frame = bytearray(draw.randbytes(draw.randrange(64)))
        elif kind == 4:
            frames.insert(at, draw.choice(draw.choice(pool)))
        elif kind == 5 and len(frames) > 1:
            del frames[at]
            continue
        elif kind == 6:
            frame = bytearray(b"\x91" * draw.choice((10, 1000, 20_000)))  # a nested bomb
        elif draw.random() < 0.001:
            frame = bytearray(5 << 20)  # more than any message may have
        frames[min(at, len(frames) - 1)] = bytes(frame)
    return frames


class Attack(threading.Thread):
    """Sends `count` messages to the front; reads and forgets the answers."""

    def __init__(self, endpoint: str, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self._endpoint, self._count, self._draw = endpoint, count, random.Random(seed)

    def run(self) -> None:
        context = zmq.Context()
        pool = good_messages(self._draw)
        while self.sent < self._count:
            socket = context.socket(zmq.DEALER)
            socket.connect(self._endpoint)
            for _ in range(min(NEW_CONNECTION, self._count - self.sent)):
                socket.send_multipart(mutant(self._draw, pool))
                self.sent += 1
                if self.sent % 50 == 0:
                    drain(socket)
                    pool = good_messages(self._draw)
            socket.close(linger=200)
        context.destroy(linger=200)


class FalseReplica(threading.Thread):
    """Binds where the dispatcher looks for a replica, and answers whatever it hears with mutants."""

    def __init__(self, endpoint: str, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self.over = threading.Event()
        self._endpoint, self._count, self._draw = endpoint, count, random.Random(seed)

    def run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(self._endpoint)
        peers: list[bytes] = []
        pool = good_messages(self._draw)
        while self.sent < self._count and not self.over.is_set():
            if socket.poll(20):
                peers = [*peers[-1:], socket.recv_multipart()[0]]
                pool = good_messages(self._draw)
            for peer in peers[-1:]:  # the dispatcher drops the line at the first malformed message
                for _ in range(20):
                    socket.send_multipart([peer, *mutant(self._draw, pool)])
                    self.sent += 1
        context.destroy(linger=0)


def drain(socket: zmq.Socket[bytes]) -> None:
    try:
        while True:
            socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        pass


def start(*arguments: str) -> subprocess.Popen[str]:
    """A server process, ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--die-with-parent", str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline().startswith("READY"):
        raise RuntimeError(f"{arguments[0]} did not start")
    return process


def attack(frames: int, seed: int = 1) -> dict[str, object]:
    with Model(demo_model_path(), threads=1) as model:
        expected = model.generate(PROMPT, GenerateConfig(loops=2, max_tokens=8)).tokens
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        front, real, false = (f"ipc://{directory}/{name}.sock" for name in ("front", "real", "false"))
        replica = start(
            *("tinyloop_serve.replica", "--model", str(demo_model_path()), "--endpoint", real),
            *("--threads", "1", "--speculation", "off"),
        )
        replicas = ("--replica", real, "--replica", false)
        dispatcher = start("tinyloop_serve.dispatcher", "--front", front, *replicas)
        back = FalseReplica(false, frames // 10, seed)
        back.start()
        attackers = [Attack(front, frames // RAW_CLIENTS, seed + n) for n in range(RAW_CLIENTS)]
        memory, served, failed, slowest = [], 0, 0, 0.0
        try:
            with Client(front, connect_timeout_s=60) as client:
                assert list(client.generate(PROMPT, loops=2, max_tokens=8).tokens) == expected
                for attacker in attackers:
                    attacker.start()
                while any(attacker.is_alive() for attacker in attackers):
                    begin = time.monotonic()
                    try:
                        tokens = list(client.generate(PROMPT, loops=2, max_tokens=8).tokens)
                        served += tokens == expected
                        failed += tokens != expected
                    except TinyLoopError as error:
                        failed += 1
                        print(f"the well-formed client got {type(error).__name__}: {error}", file=sys.stderr)
                    slowest = max(slowest, time.monotonic() - begin)
                    sent = sum(attacker.sent for attacker in attackers)
                    memory.append((sent, resident_bytes(dispatcher.pid)))
                    if len(memory) % 50 == 1:
                        print(f"{sent:>9} frames, {memory[-1][1] / 2**20:.1f} MiB", file=sys.stderr)
                    time.sleep(0.1)
            alive = state_of(dispatcher.pid) not in ("X", "Z") and state_of(replica.pid) not in ("X", "Z")
        finally:
            back.over.set()
            for process in (dispatcher, replica):
                process.terminate()
            statuses = [process.wait(20) for process in (dispatcher, replica)]
    quarter = [size for sent, size in memory if sent > frames / 4] or [memory[-1][1]]
    return {
        "front_messages": sum(attacker.sent for attacker in attackers),
        "back_messages": back.sent,
        "served": served,
        "failed": failed,
        "slowest_s": round(slowest, 2),
        "alive": alive,
        "exit_statuses": statuses,
        "rss_mib_after_a_quarter": round(quarter[0] / 2**20, 1),
        "rss_mib_at_the_end": round(quarter[-1] / 2**20, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    report = attack(parser.parse_args().frames)
    print(json.dumps(report))
    return 0 if report["alive"] and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
