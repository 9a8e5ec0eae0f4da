"""Soak: the fleet at 80 % load for a long time, with cancels; memory and latency must not grow.

    .venv/bin/python scripts/soak.py [--minutes 20]

The last line is one JSON object: per process the slope of its resident memory (KiB per minute, least squares
over the second half), the slope of the latency per token, and what became of the requests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.faults.fleet import Fleet, fleet_of, resident_bytes
from scripts.faults.mixed import arrive, mixed
from scripts.load.asked import Asked, percentile
from scripts.load.drive import Door, closed, offer
from scripts.load.verify import wrong
from tinyloop_serve.native import Model, demo_model_path

SAMPLE_S = 5.0
CONFIG = '[dispatcher]\nmax_waiting = 4096\n[replica]\nspeculation = "off"\n'


class Memory:
    """Resident bytes of every process of the fleet, and of this one, over time."""

    def __init__(self, fleet: Fleet) -> None:
        replicas = fleet.pids("replica")
        self.pids = {"fleet": fleet.process.pid, "dispatcher": fleet.pids("dispatcher")[0]}
        self.pids |= {f"replica-{n}": pid for n, pid in enumerate(replicas)}
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in self.pids}
        self._start = time.monotonic()
        self._next = 0.0

    def tick(self) -> None:
        now = time.monotonic() - self._start
        if now >= self._next:
            self._next = now + SAMPLE_S
            for name, pid in self.pids.items():
                self.samples[name].append((now, resident_bytes(pid)))
            if int(now / SAMPLE_S) % 12 == 0:
                sizes = {name: f"{series[-1][1] / 2**20:.1f}" for name, series in self.samples.items()}
                print(f"{now:6.0f} s  MiB {sizes}", file=sys.stderr)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares, per second."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    report = soak(60 * parser.parse_args().minutes)
    print(json.dumps(report))
    return 1 if report["wrong"] or report["errors"] else 0


def soak(seconds: float) -> dict[str, object]:
    draw = random.Random(7)
    with Model(demo_model_path(), threads=1) as model:
        vocabulary = model.config["vocab_size"]

    def requests(count: int, seed: int) -> list[Asked]:
        return mixed(count, seed=seed, vocabulary=vocabulary, tokens=(16, 160), loops=(2, 4, 8))

    with fleet_of(CONFIG, "--replicas", "2", "--threads", "1") as fleet:
        fleet.wait_ready(2)
        door = Door(fleet.endpoint)
        sample = requests(int(min(seconds / 8, 20) * 12), 1)
        rate = 0.8 * len(sample) / closed(door, sample, at_once=16).seconds
        asked = requests(int(rate * seconds), 2)
        arrive(asked, rate, 3)
        for each in asked:
            if draw.random() < 0.2:
                each.cancel_after = draw.randint(1, 100)
        print(f"{rate:.1f} requests/s for {seconds:.0f} s", file=sys.stderr)
        memory = Memory(fleet)
        offer(door, asked, memory.tick)
        status = fleet.status()
    finished = [each for each in asked if each.completion]
    gaps = [
        (each.started, (each.times[-1] - each.times[0]) / (len(each.times) - 1))
        for each in finished
        if len(each.times) > 8
    ]
    checked = random.Random(5).sample(finished, min(300, len(finished)))
    with Model(demo_model_path(), threads=1) as model:
        mistaken = wrong(checked, model)
    half = seconds / 2
    return {
        "minutes": round(seconds / 60, 1),
        "requests": len(asked),
        "finished": len(finished),
        "cancelled": sum(each.completion.stop_reason == "cancelled" for each in finished),
        "errors": sum(each.error is not None for each in asked),
        "of_type": dict(Counter(type(each.error).__name__ for each in asked if each.error)),
        "compared": len(checked),
        "wrong": len(mistaken),
        "rss_mib": {name: round(series[-1][1] / 2**20, 1) for name, series in memory.samples.items()},
        "rss_slope_kib_per_minute": {
            name: round(60 * slope([p for p in series if p[0] > half]) / 1024, 2)
            for name, series in memory.samples.items()
        },
        "gap_ms_p50": round(1000 * percentile([gap for _, gap in gaps], 0.5), 3),
        "gap_slope_percent_per_minute": round(
            100 * 60 * slope(gaps) / max(percentile([gap for _, gap in gaps], 0.5), 1e-9), 3
        ),
        "waiting_left": status.waiting,
        "running_left": status.running,
    }


if __name__ == "__main__":
    sys.exit(main())
