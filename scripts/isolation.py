"""Isolation: one client that reads a token a second and one that stops reading do not slow their neighbours.

    .venv/bin/python scripts/isolation.py [--cycles 20]

A round is one batch of ten streams: those of eight neighbours, and of two readers for whom the dispatcher has
first sent more than the system's buffers hold. In a "calm" round the readers read all of it as it comes; in a
"slow" one the first reads a message a second and the other none, so that the dispatcher queues for both all
the time. All else is the same: who is connected, what is asked and how much the engine has to do. A cycle is
two calm rounds and a slow one, in turns; the second calm one is a control that shows what chance does.

The last line is one JSON object: the 99th percentile of the neighbours' inter-token times of each kind, over
all rounds, the ratios to the calm one, and between which values 95 % of the ratios lie when the cycles are
drawn anew from themselves (bootstrap). Exit status 0 if p99_ratio < 1.1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.faults.fleet import fleet_of
from scripts.load.asked import percentile
from tinyloop_serve.protocol.codec import TO_CLIENT, TO_DISPATCHER, tokens_to_bytes
from tinyloop_serve.protocol.messages import VERSION, Done, Failed, Generate, GetStatus, Sampling, Tokens

NEIGHBOURS = 8
TOKENS = 300
STATUSES, EACH_S = 500, 0.0005  # that each reader is sent first, apart, so that each is a message
PATIENCE_S = 60.0  # for a round
KINDS = ("calm", "control", "slow")
DRAWS = 1000
CONFIG = f"""
[dispatcher]
client_stall_ms = 600000
batch_sizes = [16]
min_batch_size = {NEIGHBOURS + 2}
max_wait_ms = 60000
[replica]
speculation = "off"
"""

Gaps = dict[str, list[list[float]]]  # of each kind's rounds, seconds


class Stream:
    """One client and its answer, on a raw socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, small: bool = False
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if small:
            self.socket.set(zmq.RCVHWM, 1)
        self.socket.connect(endpoint)
        self.times: list[float] = []  # of each message with tokens
        self.ended = False
        self.error = ""

    def say(self, message: Generate | GetStatus) -> None:
        self.socket.send_multipart(TO_DISPATCHER.encode(message))

    def read(self, now: float) -> None:
        """One message, with one body or more."""
        for body in self.socket.recv_multipart(zmq.DONTWAIT)[1:]:
            message = TO_CLIENT.decode([VERSION, body])
            if isinstance(message, Tokens):
                self.times.append(now)
            elif isinstance(message, Done | Failed):
                self.ended = True
                self.error = message.message if isinstance(message, Failed) else ""

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def play(endpoint: str, number: int, *, slow: bool) -> list[float]:
    """One round; returns the neighbours' inter-token times."""
    ours, theirs = zmq.Context(), zmq.Context()
    try:
        neighbours = [Stream(ours, endpoint) for _ in range(NEIGHBOURS)]
        readers = [Stream(theirs, endpoint, small=True) for _ in range(2)]
        for each in range(STATUSES):
            for reader in readers:
                reader.say(GetStatus(f"s{each}"))
            time.sleep(EACH_S)
        for lane, stream in enumerate([*readers, *neighbours]):
            stream.say(question(number, lane))
        watch(neighbours, readers, slow=slow)
    finally:
        for context in (ours, theirs):
            context.destroy(linger=0)
    if wrong := [stream for stream in neighbours if stream.error or len(stream.times) < TOKENS / 2]:
        raise RuntimeError(f"a neighbour's stream came to nothing: {wrong[0].error or len(wrong[0].times)}")
    return [gap for stream in neighbours for gap in stream.gaps]


def question(number: int, lane: int) -> Generate:
    return Generate(
        f"q{number}-{lane}",
        prompt_tokens=tokens_to_bytes(range(10, 26)),
        sampling=Sampling(loops=4),
        max_tokens=TOKENS,
        seed=lane,
        ignore_eos=True,
    )


def watch(neighbours: Sequence[Stream], readers: Sequence[Stream], *, slow: bool) -> None:
    """Reads until the neighbours' answers have ended: theirs at once, the readers' as they would."""
    poller, streams = zmq.Poller(), {stream.socket: stream for stream in [*readers, *neighbours]}
    for socket, stream in streams.items():
        if not (slow and stream in readers):
            poller.register(socket, zmq.POLLIN)
    begin = time.monotonic()
    next_read = begin + 1.0
    while not all(stream.ended for stream in neighbours):
        ready = poller.poll(100)
        if (now := time.monotonic()) > begin + PATIENCE_S:
            raise RuntimeError(f"a round did not end within {PATIENCE_S:g} s")
        for socket, _ in ready:
            streams[socket].read(now)
        if slow and now >= next_read:
            next_read += 1.0
            if readers[0].socket.poll(0):
                readers[0].read(now)


def measure(cycles: int) -> dict[str, float | list[float]]:
    gaps: Gaps = {kind: [] for kind in KINDS}
    with fleet_of(CONFIG, "--replicas", "1", "--threads", "1") as fleet:
        fleet.wait_ready(1)
        play(fleet.endpoint, 0, slow=False)  # warm up
        for cycle in range(cycles):
            for turn in range(len(KINDS)):
                kind = KINDS[(cycle + turn) % len(KINDS)]
                gaps[kind].append(play(fleet.endpoint, 1 + cycle * len(KINDS) + turn, slow=kind == "slow"))
            shown = (f"{kind} {1000 * percentile(rounds[-1], 0.99):.2f}" for kind, rounds in gaps.items())
            print("p99, ms:", *shown, file=sys.stderr)
    report: dict[str, float | list[float]] = {"cycles": cycles, "tokens": sum(map(len, gaps["slow"]))}
    for kind in KINDS:
        report[f"{kind}_p99_ms"] = round(1000 * pooled(gaps[kind], 0.99), 3)
    for name, kind in (("p99_ratio", "slow"), ("control_ratio", "control")):
        report[name] = round(pooled(gaps[kind], 0.99) / pooled(gaps["calm"], 0.99), 3)
        report[f"{name}_95"] = [round(bound, 3) for bound in interval(gaps, kind)]
    report["p50_ratio"] = round(pooled(gaps["slow"], 0.5) / pooled(gaps["calm"], 0.5), 3)
    return report


def pooled(rounds: Sequence[Sequence[float]], share: float) -> float:
    return percentile([gap for each in rounds for gap in each], share)


def interval(gaps: Gaps, kind: str) -> tuple[float, float]:
    """Of the ratio of the 99th percentiles of `kind` and of calm rounds."""
    draw, ratios, cycles = random.Random(0), [], range(len(gaps[kind]))
    # Of a round, every eighth: the neighbours' streams go in step, so more say nothing new and take time.
    thin = {name: [sorted(each)[::NEIGHBOURS] for each in gaps[name]] for name in ("calm", kind)}
    for _ in range(DRAWS):
        chosen = draw.choices(cycles, k=len(cycles))
        high, low = (pooled([thin[name][cycle] for cycle in chosen], 0.99) for name in (kind, "calm"))
        ratios.append(high / low)
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=20)
    options = parser.parse_args()
    report = measure(options.cycles)
    print(json.dumps(report))
    return 0 if float(str(report["p99_ratio"])) < 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
