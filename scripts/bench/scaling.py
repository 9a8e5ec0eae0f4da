"""Two replicas of one thread each against one: tokens per second of the fleet; the last line is one JSON
object.

    .venv/bin/python scripts/bench/scaling.py [--rounds 7] [--requests 48] [--model FILE]

Both fleets stand side by side and are asked in turn, `--requests` per replica at once, all of one shape, so
that full batches of eight run from the first to the last. Answers come whole, not token by token: what is
measured is the work of the replicas, on a machine with at least two cores and nobody else.

two_over_one   tokens per second with two replicas over those with one, median of the rounds' ratios
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from measure.neighbours import WORTH_A_WARNING, busy_s

from scripts.faults.fleet import Fleet, cpu_s, descendants, fleet_of
from tinyloop_serve.native import demo_model_path
from tinyloop_serve.protocol.client import Client

LANES = 8
CONFIG = f"""
[dispatcher]
batch_sizes = [{LANES}]
min_batch_size = {LANES}
max_wait_ms = 60000
max_queue_ms = 0
[replica]
speculation = "off"
"""


def rate(client: Client, requests: int, tokens: int) -> float:
    """Tokens per second of so many requests, asked at once."""
    prompts = [[3 + (7 * i + n) % 4000 for i in range(16)] for n in range(requests)]
    begin = time.perf_counter()
    answers = client.batch(prompts, max_tokens=tokens, ignore_eos=True)
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - begin)


def used_s(fleets: list[Fleet]) -> float:
    """CPU seconds of the fleets and of this process."""
    mine = os.times()
    pids = [pid for fleet in fleets for pid, _ in descendants(fleet.process.pid)]
    return mine.user + mine.system + sum(map(cpu_s, pids))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=48, help=f"per replica; a multiple of {LANES}")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--model", type=Path, default=demo_model_path())
    flags = parser.parse_args()
    if flags.requests < LANES or flags.requests % LANES:
        parser.error(f"--requests: {flags.requests} is not accepted; expected a multiple of {LANES}")
    with contextlib.ExitStack() as stack:
        fleets, clients = [], []
        for replicas in (1, 2):
            words = ["--model", str(flags.model), "--replicas", str(replicas), "--threads", "1"]
            fleets.append(stack.enter_context(fleet_of(CONFIG, *words)))
            fleets[-1].wait_ready(replicas)
            clients.append(stack.enter_context(Client(fleets[-1].endpoint)))
        found: dict[int, list[float]] = {1: [], 2: []}
        begin, busy, used = time.perf_counter(), 0.0, 0.0
        for number in range(flags.rounds + 1):
            for replicas, client in zip(found, clients, strict=True):
                found[replicas].append(rate(client, replicas * flags.requests, flags.tokens))
            if not number:  # it warmed up
                found = {1: [], 2: []}
                begin, busy, used = time.perf_counter(), busy_s(), used_s(fleets)
            elif number <= flags.rounds:
                one, two = (rates[-1] for rates in found.values())
                print(f"  round {number}: {one:.0f} and {two:.0f} tokens/s", file=sys.stderr)
        others = max(0.0, busy_s() - busy - used_s(fleets) + used) / (time.perf_counter() - begin)
    if others > WORTH_A_WARNING:
        print(f"  others used {others:.2f} cores: measure again on an idle machine", file=sys.stderr)
    report = {
        "two_over_one": round(statistics.median(b / a for a, b in zip(*found.values(), strict=True)), 3),
        "one_tokens_per_s": round(statistics.median(found[1])),
        "two_tokens_per_s": round(statistics.median(found[2])),
        "others_cores": round(others, 2),
    }
    for name, value in report.items():
        print(f"{name:20} {value}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
