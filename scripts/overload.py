"""Overload: five times what the fleet can do is offered, and what it takes is still in time.

    .venv/bin/python scripts/overload.py [--seconds 15] [--factor 5] [--slo-s 2]

Every request has a deadline, the SLO. Goodput is requests per second that end within it. First the capacity
is measured (as many at once as the fleet batches), then the goodput just below it and at twice it, the better
of which is the peak (deep queues make full batches), then at `factor` times it. Refusals must be typed and
immediate. The last line is one JSON object; exit status 0 if goodput_ratio >= 0.9.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.faults.fleet import fleet_of
from scripts.faults.mixed import arrive, mixed
from scripts.load.asked import Asked, percentile
from scripts.load.drive import Door, closed, offer
from tinyloop_serve.native import Model, demo_model_path
from tinyloop_serve.protocol.errors import DeadlineExceeded, Overloaded

TOKENS = (24, 40)
CONFIG = '[replica]\nspeculation = "off"\n'


def goodput(asked: list[Asked], seconds: float, slo_s: float) -> float:
    """Requests per second that ended within the SLO, counted from the moment they were due."""
    return sum(each.completion is not None and each.seconds <= slo_s for each in asked) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--slo-s", type=float, default=2.0)
    options = parser.parse_args()
    report = measure(options.seconds, options.factor, options.slo_s)
    print(json.dumps(report))
    return 0 if report["goodput_ratio"] >= 0.9 and not report["other_errors"] else 1


def measure(seconds: float, factor: float, slo_s: float) -> dict[str, float]:
    with Model(demo_model_path(), threads=1) as model:
        vocabulary = model.config["vocab_size"]

    def requests(count: int, seed: int) -> list[Asked]:
        asked = mixed(count, seed=seed, vocabulary=vocabulary, tokens=TOKENS, loops=(4, 8))
        for each in asked:
            each.options |= {"deadline_s": slo_s, "temperature": 0.0, "cache_mode": "fp16"}
            each.options.pop("repetition_penalty", None)
        return asked

    with fleet_of(CONFIG, "--replicas", "2", "--threads", "1") as fleet:
        fleet.wait_ready(2)
        door = Door(fleet.endpoint)
        closed(door, requests(64, 1), at_once=32)  # warm up
        sample = requests(int(seconds * 30), 2)
        took = closed(door, sample, at_once=32).seconds
        capacity = sum(each.completion is not None for each in sample) / took
        print(f"capacity {capacity:.1f} requests/s", file=sys.stderr)
        phases = {}
        for name, rate in (("below", 0.9), ("twice", 2.0), ("overload", factor)):
            rate *= capacity
            asked = requests(max(1, int(rate * seconds)), 3)
            arrive(asked, rate, 4)
            offer(door, asked)
            phases[name] = asked
            in_time = goodput(asked, seconds, slo_s)
            print(f"{name}: {in_time:.1f} in time, of {rate:.1f} requests/s", file=sys.stderr)
            time.sleep(slo_s)
    asked = phases["overload"]
    refused = [each for each in asked if isinstance(each.error, Overloaded)]
    late = [each for each in asked if isinstance(each.error, DeadlineExceeded)]
    other = [each for each in asked if each.error and each not in refused and each not in late]
    for each in other[:10]:
        print(f"{type(each.error).__name__}: {each.error}", file=sys.stderr)
    below, twice, over = (goodput(phases[name], seconds, slo_s) for name in ("below", "twice", "overload"))
    peak = max(below, twice)
    return {
        "capacity_rps": round(capacity, 1),
        "goodput_below_rps": round(below, 1),
        "goodput_twice_rps": round(twice, 1),
        "goodput_overload_rps": round(over, 1),
        "goodput_ratio": round(over / peak, 3),
        "offered_rps": round(factor * capacity, 1),
        "refused": len(refused),
        "refusal_p50_ms": round(1000 * percentile([each.ended - each.started for each in refused], 0.5), 2),
        "refusal_p99_ms": round(1000 * percentile([each.ended - each.started for each in refused], 0.99), 2),
        "refusals_without_retry_after": sum(each.error.retry_after_s <= 0 for each in refused if each.error),
        "deadline_exceeded": len(late),
        "other_errors": len(other),
    }


if __name__ == "__main__":
    sys.exit(main())
