"""Isolation: one client that reads a token a second and one that stops reading do not slow their neighbours.

    .venv/bin/python scripts/isolation.py [--rounds 4] [--seconds 8]

Rounds alternate: in "calm" ones ten streams are read as they come; in "slow" ones eight are, one is read at
1 token/s by a client whose buffers are as small as the system lets them be, and one is not read at all. The
last line is one JSON object with the 99th percentile of the neighbours' inter-token times of both, and their
ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import uuid
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.faults.fleet import fleet_of
from scripts.load.asked import percentile
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.codec import TO_DISPATCHER, tokens_to_bytes
from tinyloop_serve.protocol.messages import Generate, Goodbye, Ping, Sampling

NEIGHBOURS = 8
TOKENS = 400
CONFIG = """
[dispatcher]
client_bytes = 65536
batch_sizes = [2, 4, 8, 16]
[replica]
speculation = "off"
"""


class Reader(threading.Thread):
    """A raw client with small buffers that reads `per_s` messages a second; 0: none at all."""

    def __init__(self, endpoint: str, per_s: float, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._endpoint, self._per_s, self._stop_reading = endpoint, per_s, stop

    def run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.RCVHWM, 1)
        socket.set(zmq.RCVBUF, 1024)
        socket.connect(self._endpoint)
        while not self._stop_reading.is_set():
            request = generate(random.randrange(1 << 30))
            socket.send_multipart(TO_DISPATCHER.encode(request))
            socket.send_multipart(TO_DISPATCHER.encode(Ping(1, lease_ms=600_000)))
            for _ in range(TOKENS):
                if self._stop_reading.wait(1 / self._per_s if self._per_s else 1e6):
                    break
                socket.poll(100) and socket.recv_multipart(zmq.DONTWAIT)
        socket.send_multipart(TO_DISPATCHER.encode(Goodbye()), zmq.DONTWAIT)
        context.destroy(linger=100)


def generate(seed: int) -> Generate:
    prompt = tokens_to_bytes(range(10, 26))
    return Generate(
        uuid.uuid4().hex,
        prompt_tokens=prompt,
        sampling=Sampling(loops=4),
        max_tokens=TOKENS,
        seed=seed,
        ignore_eos=True,
    )


def neighbours(endpoint: str, seconds: float) -> list[float]:
    """Their inter-token times, seconds."""
    gaps: list[float] = []
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def stream(client: Client) -> None:
        mine: list[float] = []
        while time.monotonic() < end:
            last = None
            for chunk in client.stream(list(range(10, 26)), loops=4, max_tokens=TOKENS, ignore_eos=True):
                now = time.monotonic()
                if last is not None and chunk.tokens:
                    mine.append(now - last)
                last = now
        with lock:
            gaps.extend(mine)

    clients = [Client(endpoint) for _ in range(NEIGHBOURS)]
    threads = [threading.Thread(target=stream, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    return gaps


def measure(rounds: int, seconds: float) -> dict[str, float]:
    gaps: dict[str, list[list[float]]] = {"calm": [], "slow": []}
    with fleet_of(CONFIG, "--replicas", "1", "--threads", "1") as fleet:
        fleet.wait_ready(1)
        neighbours(fleet.endpoint, 2.0)  # warm up
        for number in range(rounds):
            for name in ("calm", "slow") if number % 2 else ("slow", "calm"):
                stop = threading.Event()
                speeds = (1.0, 0.0) if name == "slow" else (1e5, 1e5)
                readers = [Reader(fleet.endpoint, speed, stop) for speed in speeds]
                for reader in readers:
                    reader.start()
                gaps[name].append(neighbours(fleet.endpoint, seconds))
                stop.set()
                for reader in readers:
                    reader.join(10)
                print(f"{name}: p99 {1000 * percentile(gaps[name][-1], 0.99):.2f} ms", file=sys.stderr)
        status = fleet.status()
    p99 = {name: percentile([percentile(each, 0.99) for each in found], 0.5) for name, found in gaps.items()}
    p50 = {name: percentile([gap for each in found for gap in each], 0.5) for name, found in gaps.items()}
    return {
        "calm_p99_ms": round(1000 * p99["calm"], 3),
        "slow_p99_ms": round(1000 * p99["slow"], 3),
        "p99_ratio": round(p99["slow"] / p99["calm"], 3),
        "p50_ratio": round(p50["slow"] / p50["calm"], 3),
        "tokens": sum(len(each) for found in gaps.values() for each in found),
        "failed_slow_requests": status.failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    report = measure(options.rounds, options.seconds)
    print(json.dumps(report))
    return 0 if report["p99_ratio"] < 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
