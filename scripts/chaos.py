"""The chaos test: streams go on, bit for bit, while replicas are killed, stopped and hung and the dispatcher
is restarted. Every stream is compared with the engine run alone.

    .venv/bin/python scripts/chaos.py [--requests 1000] [--seconds 180] [--every 5] [--replicas 3]

Its last line is one JSON object: requests, finished, lost, duplicated, wrong, failovers, orphans,
handles_left, bytes_left, and more. Exit status 0 if nothing was lost, duplicated, wrong or left, and the harm
was done: at least half of the deeds that there was time for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.faults.fleet import Fleet, age_s, alive, descendants, fleet_of, state_of
from scripts.faults.harm import WAYS, Harm
from scripts.faults.mixed import arrive, mixed
from scripts.load.asked import Asked, percentile
from scripts.load.drive import Door, closed, offer
from scripts.load.verify import wrong
from tinyloop_serve.native import Model, demo_model_path
from tinyloop_serve.protocol.messages import Status

# Deaths here come from outside, so a request may meet several by chance: with 2 (the default), one in some
# thousand would be taken for the cause of them.
CONFIG = """
[dispatcher]
loss_ms = 1000
stall_ms = 2000
poison_losses = 5
max_waiting = 4096
max_queue_ms = 0
replica_wait_ms = 60000

[replica]
stall_s = 3
speculation = "off"
"""
LOOPS = (2, 4, 8)
STARTED_S = 2.0  # a replica is ready by then


class Chaos:
    """Harm at regular intervals, by a thread of its own, until `calm`; the thread goes on to `close`, because
    processes that it traces cannot end without it."""

    def __init__(self, fleet: Fleet, every_s: float, restarts_at: list[float], seed: int) -> None:
        self.deeds: dict[str, int] = {}
        self.restarts = 0  # of the dispatcher
        self.error = ""  # that ended the harm too early
        self._fleet = fleet
        self._every_s = every_s
        self._restarts_at = restarts_at  # seconds after the start
        self._draw = random.Random(seed)
        self._start = time.monotonic()
        self._next = self._start + every_s
        self.seen: set[int] = set()  # every process of the fleet
        self._calm, self._over = threading.Event(), threading.Event()
        self.calm = self._calm.set
        self._thread = threading.Thread(target=self._run, name="chaos")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        harm = Harm()
        self.deeds = harm.done
        try:
            while not self._over.wait(0.02):
                harm.reap()
                if not self._calm.is_set() and time.monotonic() >= self._next:
                    self._next = time.monotonic() + self._every_s
                    self._act(harm)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _act(self, harm: Harm) -> None:
        now = time.monotonic()
        self.seen |= {pid for pid, _ in descendants(self._fleet.process.pid)}
        if self._restarts_at and now - self._start >= self._restarts_at[0]:
            how = signal.SIGKILL if self.restarts % 2 else signal.SIGTERM
            for pid in self._fleet.pids("dispatcher"):
                with contextlib.suppress(ProcessLookupError):  # then it is the next turn's deed
                    os.kill(pid, how)
                    self._restarts_at.pop(0)
                    self.restarts += 1
                    print(f"{now - self._start:6.1f} s  dispatcher: {how.name}", file=sys.stderr)
                    break
            return
        victims = [pid for pid in self._fleet.pids("replica") if state_of(pid) not in ("T", "t")]
        victims = [pid for pid in victims if age_s(pid) > STARTED_S]  # nobody watches over those that start
        if victims:
            way, pid = self._draw.choice(WAYS), self._draw.choice(victims)
            if harm.do(way, pid):
                print(f"{now - self._start:6.1f} s  replica {pid}: {way}", file=sys.stderr)


def capacity(door: Door, seconds: float, seed: int, vocabulary: int) -> float:
    """Tokens per second of the unharmed fleet under full load."""
    asked = mixed(10_000, seed=seed, vocabulary=vocabulary, tokens=(32, 96), loops=LOOPS)
    rounds, tokens, took = 0, 0, 0.0
    while took < seconds:
        part = asked[rounds * 24 : rounds * 24 + 24]
        took += closed(door, part, at_once=24).seconds
        tokens += sum(len(each.tokens) for each in part)
        rounds += 1
    return tokens / took


def settle(fleet: Fleet, patience_s: float = 60.0) -> Status:
    """When the dust has: nothing waits or runs, nothing is reserved."""
    deadline = time.monotonic() + patience_s
    while True:
        status = fleet.status()
        busy = status.waiting or status.running or sum(r.reserved_bytes for r in status.replicas)
        if not busy or time.monotonic() > deadline:
            return status
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=180.0, help="that the load lasts")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two deeds")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.8, help="of the measured capacity")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    with Model(demo_model_path(), threads=1) as model:
        vocabulary, longest = model.config["vocab_size"], model.max_seq_len - 65
    with fleet_of(CONFIG, "--replicas", str(options.replicas), "--threads", "1") as fleet:
        fleet.wait_ready(options.replicas)
        door = Door(fleet.endpoint, ({"resume_s": 60.0},))
        rate_tokens = capacity(door, min(10.0, options.seconds / 4), options.seed, vocabulary)
        rate = options.requests / options.seconds
        mean = min(max(options.load * rate_tokens / rate, 16), longest / 1.5)
        asked = mixed(
            options.requests,
            seed=options.seed,
            vocabulary=vocabulary,
            tokens=(int(mean / 2), int(mean * 1.5)),
            loops=LOOPS,
        )
        arrive(asked, rate, options.seed)
        print(
            f"capacity {rate_tokens:.0f} tok/s; {rate:.1f} requests/s of about {mean:.0f} tokens"
            f" = {rate * mean / rate_tokens:.0%} of it, for {options.seconds:g} s",
            file=sys.stderr,
        )
        thirds = [options.seconds / 3, 2 * options.seconds / 3]
        chaos = Chaos(fleet, options.every, thirds, options.seed)
        try:
            took = offer(door, asked).seconds
            chaos.calm()
            failovers = sum(each.completion.stats.failovers for each in asked if each.completion)
            fleet.wait_ready(options.replicas)
            status = settle(fleet)
            chaos.seen |= {pid for pid, _ in descendants(fleet.process.pid)}
            exit_status = fleet.stop()
        finally:
            chaos.close()
        said = fleet.said
    orphans = [pid for pid in chaos.seen if alive(pid)]
    report = judge(asked, failovers, orphans, status) | {
        "seconds": round(took, 1),
        "capacity_tokens_per_s": round(rate_tokens),
        "load": round(rate * mean / rate_tokens, 2),
        "deeds": chaos.deeds,
        "dispatcher_restarts": chaos.restarts,
        "deeds_planned": int(options.seconds / options.every),
        "harm_error": chaos.error,
        "fleet_exit_status": exit_status,
    }
    if bad := amiss(report):
        sys.stderr.writelines(said[-40:])
        print("amiss:", *bad, file=sys.stderr)
    print(json.dumps(report))
    return 1 if bad else 0


def amiss(report: dict[str, Any]) -> list[str]:
    """The fields that are not as they should be."""
    at_zero = ("lost", "duplicated", "wrong", "orphans", "handles_left", "bytes_left", "fleet_exit_status")
    bad = [name for name in (*at_zero, "harm_error") if report[name]]
    done = sum(report["deeds"].values()) + report["dispatcher_restarts"]
    return [*bad, "deeds"] if done < report["deeds_planned"] / 2 else bad


def judge(asked: list[Asked], failovers: int, orphans: list[int], status: Status) -> dict[str, object]:
    """What became of the requests, compared with the engine alone."""
    for each in asked:
        if each.error:
            print(f"request {each.number}: {type(each.error).__name__}: {each.error}", file=sys.stderr)
    with Model(demo_model_path(), threads=1) as model:
        print("comparing every stream with the engine alone", file=sys.stderr)
        mistaken = wrong(asked, model)
    finished = [each for each in asked if each.completion]
    too_many = [each.number for each in finished if len(each.tokens) > each.options["max_tokens"]]
    gaps = [gap for each in finished for gap in each.gaps]
    return {
        "requests": len(asked),
        "finished": len(finished),
        "lost": len(asked) - len(finished),
        "duplicated": len(too_many) + sum(each.terminals != 1 for each in asked),
        "wrong": len(mistaken),
        "failovers": failovers,
        "orphans": len(orphans),
        "handles_left": sum(replica.handles for replica in status.replicas),
        "bytes_left": sum(replica.reserved_bytes for replica in status.replicas),
        "gap_p50_ms": round(1000 * percentile(gaps, 0.5), 2),
        "gap_p99_ms": round(1000 * percentile(gaps, 0.99), 2),
        "gap_max_s": round(max(gaps, default=0.0), 2),
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
