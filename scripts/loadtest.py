"""Puts load on a fleet and says how it fared; the last line of its output is one JSON object.

    .venv/bin/python scripts/loadtest.py --profile bucketed --rate 20 --verify
    .venv/bin/python scripts/loadtest.py --profile bucketed --sweep --slo ttft=500,token=50
    .venv/bin/python scripts/loadtest.py --endpoint ipc:///run/tinyloop/front/front.sock --closed 8
    .venv/bin/python scripts/loadtest.py --profile tiers --trace requests.jsonl

It starts the fleet of a profile (deploy/profiles) or of any configuration file, whose `[load]` table says
which requests are asked (scripts/load/mix.py), or loads the one at --endpoint. Requests come

    --rate R         open loop: R a second, whatever becomes of them (--burst N: N at the same moment)
    --trace FILE     open loop: as the file says, a JSON line per request (scripts/load/trace.py)
    --closed N       N at any time (default: 8)
    --sweep          open loop, at one rate after the other: finds the highest at which a share of
                     --slo-share of the requests meets --slo, and no queue grows

Latencies count from the moment a request was due. The warm-up does not count. The report and plots of it are
left in --out (plots need matplotlib: the extra bench-plots). Exit status 1: a token was wrong, or nothing
finished.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.load import arrivals, mix, report, slo, target, text, trace, verify
from scripts.load.asked import Asked
from scripts.load.drive import Lag, closed, offer
from tinyloop_serve.deploy import profiles
from tinyloop_serve.native import Model
from tinyloop_serve.protocol.errors import TinyLoopError

OUT = Path(__file__).resolve().parents[1] / "build" / "load"
DEFAULT_CLOSED = 8
SWEEP_CLOSED = 32  # at any time, to see roughly what the fleet can do
STEADY = 0.9  # of what is asked must end meanwhile: else a queue grows that a lax SLO would not show yet
CONVERTED = {"fp16", "bf16", "int8", "int4"}  # that an engine can be asked for; others are the artifact's own
GRACE_S = 60.0  # for what is open when the last request was sent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("the fleet").add_mutually_exclusive_group()
    where.add_argument("--profile", choices=profiles.names(), help="start this one; its [load] is asked")
    where.add_argument("--config", type=Path, metavar="FILE", help="the same with a file of your own")
    parser.add_argument("--endpoint", metavar="E", help="a fleet that runs; only [load] is read of the above")
    parser.add_argument(
        "--key", action="append", default=[], metavar="FILE", help="with --endpoint: a tenant; repeatable"
    )
    parser.add_argument("--server-key", default="", metavar="KEY", help="the dispatcher's, with --key")
    parser.add_argument("--model", type=Path, metavar="FILE", help="to serve, and to --verify against")
    parser.add_argument("--replicas", type=int, default=0, metavar="N", help="instead of the profile's")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of each replica")
    load = parser.add_argument_group("the load")
    how = load.add_mutually_exclusive_group()
    how.add_argument("--rate", type=float, metavar="R", help="requests a second")
    how.add_argument("--trace", type=Path, metavar="FILE", help="a JSON line per request")
    how.add_argument("--closed", type=int, metavar="N", help=f"at any time (default {DEFAULT_CLOSED})")
    how.add_argument("--sweep", action="store_true", help="find the highest rate that meets the SLO")
    load.add_argument("--burst", type=int, default=1, metavar="N", help="with --rate: N at a time")
    load.add_argument("--seconds", type=float, default=20.0, help="that count; of a sweep, at each rate")
    load.add_argument("--warm-up", type=float, default=3.0, metavar="S", help="seconds before that")
    load.add_argument("--seed", type=int, default=1)
    load.add_argument("--slo", type=slo_of, default=slo.Slo(ttft=500.0, token=50.0), metavar="LIMITS")
    load.add_argument("--slo-share", type=float, default=0.95, metavar="X", help="that must meet it (sweep)")
    load.add_argument("--precision", type=float, default=0.05, metavar="X", help="of the rate (sweep)")
    parser.add_argument("--verify", action="store_true", help="compare every token with the engine alone")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the requests as a trace")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help="report.json and PNG plots (default: build/load)"
    )
    parser.add_argument("--no-plots", action="store_true", help="only report.json")
    flags = parser.parse_args(arguments)
    for name in ("rate", "closed", "seconds", "precision"):
        value = getattr(flags, name)
        if value is not None and not value > 0:
            parser.error(f"--{name}: {value} is not accepted; expected more than 0")
    if not (flags.profile or flags.config or flags.endpoint):
        parser.error("which fleet? expected --profile, --config or --endpoint")
    if flags.verify and flags.endpoint and not flags.model:
        parser.error("--verify with --endpoint needs --model, the file that the fleet serves")
    if bool(flags.key) != bool(flags.server_key):
        parser.error("--key and --server-key belong together")
    return flags


def slo_of(given: str) -> slo.Slo:
    try:
        return slo.parse(given)
    except mix.LoadFault as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


class LoadTest:
    """One target and one mix; each `run_*` is a load on it."""

    def __init__(self, flags: argparse.Namespace, what: mix.Mix, where: target.Target) -> None:
        self._flags, self._mix, self._target = flags, what, where
        served = where.wait_calibrated().model
        if served is None:
            raise mix.LoadFault(f"{where.door.endpoint}: no replica serves a model")
        self.vocabulary = served.vocab_size
        self.asked: list[Asked] = []  # every request of every run

    def run(self) -> dict[str, Any]:
        flags = self._flags
        if flags.sweep:
            return self.sweep()
        if flags.rate:
            return self.open(f"{flags.rate:g}/s", self.arriving(flags.rate), GRACE_S)
        if flags.trace:
            asked = trace.read(flags.trace, self._mix, self.vocabulary)
            return self.open("trace", asked, GRACE_S)
        return self.closed(flags.closed or DEFAULT_CLOSED)

    def arriving(self, rate: float) -> list[Asked]:
        """Equal requests at every rate: only the times differ."""
        flags = self._flags
        times = arrivals.bursts(rate, flags.burst, flags.seed)
        due = itertools.takewhile(lambda at: at < flags.warm_up + flags.seconds, times)
        asked = []
        for at, each in zip(due, self._mix.requests(flags.seed, self.vocabulary), strict=False):
            each.at = at
            asked.append(each)
        return asked

    def open(self, what: str, asked: list[Asked], grace_s: float) -> dict[str, Any]:
        live = text.Live(what, asked)
        lag = offer(self._target.door, asked, live, grace_s)
        live.end()
        last = max((each.at for each in asked), default=0.0)
        seconds = last + 1e-3 - self._flags.warm_up if self._flags.trace else self._flags.seconds
        return self._summary(asked, seconds, lag)

    def closed(self, at_once: int) -> dict[str, Any]:
        flags = self._flags
        asked: list[Asked] = []
        end = time.monotonic() + flags.warm_up + flags.seconds

        def until_the_end() -> Iterator[Asked]:
            for each in self._mix.requests(flags.seed, self.vocabulary):
                if time.monotonic() > end:
                    return
                asked.append(each)
                yield each

        live = text.Live(f"{at_once} at a time", asked)
        lag = closed(self._target.door, until_the_end(), at_once, live)
        live.end()
        return self._summary(asked, flags.seconds, lag)

    def sweep(self) -> dict[str, Any]:
        """Each rate from an idle fleet. What is late counts as missed, so a run need not wait for it."""
        flags = self._flags
        limits = (flags.slo.ttft, flags.slo.e2e, 1000.0)
        grace_s = 2 * max(limits) / 1000 + self._mix.max_tokens[1] * flags.slo.token / 1000
        points: list[dict[str, Any]] = []
        found: dict[float, dict[str, Any]] = {}

        def meets(rate: float) -> bool:
            self._target.wait_idle()
            found[rate] = one = self.open(f"{rate:.2f}/s", self.arriving(rate), grace_s)
            keys = (
                "tokens_per_s",
                "finished_rps",
                "goodput_share",
                "ttft_ms",
                "token_ms",
                "e2e_ms",
                "driver",
            )
            points.append({"rate": round(rate, 3), **{key: one[key] for key in keys}})
            in_time = one["goodput_share"] >= flags.slo_share
            good = bool(in_time and one["finished_rps"] >= STEADY * one["offered_rps"])
            text.say(f"{rate:8.2f}/s  {one['goodput_share']:6.1%} in time: {'met' if good else 'missed'}")
            return good

        full = self.closed(SWEEP_CLOSED)
        text.say(f"{SWEEP_CLOSED} at a time: {full['finished_rps']:.2f} requests/s")
        most = max(full["finished_rps"], 0.1)
        meets(most / 8)  # how it is without a queue
        highest = slo.highest_rate(meets, most / 2, flags.precision)
        best = found.get(highest) or found[min(found)]
        swept = {"highest_rps": round(highest, 3), "slo_share": flags.slo_share, "points": points}
        return {**best, "sweep": swept}

    def _summary(self, asked: list[Asked], seconds: float, lag: Lag) -> dict[str, Any]:
        self.asked += asked
        if seconds <= 0:
            raise mix.LoadFault(f"warm-up: {self._flags.warm_up:g} s is all of the load; expected less")
        return report.summarise(asked, self._flags.warm_up, seconds, self._flags.slo, lag)


def main(arguments: list[str] | None = None) -> int:
    flags = parse(arguments)
    try:
        found = load(flags)
    except (mix.LoadFault, TinyLoopError) as fault:
        print(f"loadtest: {fault}", file=sys.stderr)
        return 1
    for line in text.summary(found):
        print(line)
    if "sweep" in found:
        print(f"highest rate that meets the SLO: {found['sweep']['highest_rps']:g} requests/s")
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "report.json").write_text(json.dumps(found) + "\n")
    if not flags.no_plots:
        plot(found, flags.out)
    if "verified" in found:
        print(f"compared with the engine alone: {found['verified']}, wrong: {len(found['wrong'])}")
    print(json.dumps({name: value for name, value in found.items() if name not in ("cdf", "over_time")}))
    return 1 if found.get("wrong") or not found["finished"] else 0


def load(flags: argparse.Namespace) -> dict[str, Any]:
    config = Path(profiles.path(flags.profile)) if flags.profile else flags.config
    what = mix.read(config) if config else mix.Mix()
    with contextlib.ExitStack() as stack:
        if flags.endpoint:
            where = target.running(flags.endpoint, flags.key, flags.server_key, flags.model)
        else:
            words = [
                f"--{name}={value}" for name in ("replicas", "threads") if (value := getattr(flags, name))
            ]
            assert config is not None
            where = stack.enter_context(target.started(config, what, flags.model, words))
        test = LoadTest(flags, what, where)
        stack.enter_context(target.scaffolds(where, what, test.vocabulary))
        found = test.run()
        after = where.status()
    found["fleet"] = {
        "replicas": len(after.replicas),
        "refused": after.refused,
        "failovers": after.failovers,
        "speculation": [replica.speculation for replica in after.replicas],
    }
    if flags.record:
        trace.write(flags.record, test.asked)
    if flags.verify:
        assert where.model is not None
        text.say("comparing every stream with the engine alone")
        held = {replica.weights for replica in after.replicas if replica.weights}
        if len(held) > 1:
            raise mix.LoadFault(f"verify: {sorted(held)}: expected replicas that hold weights of one type")
        # One thread: two would wait for each other beside a busy machine.
        weights = "".join(held) if held <= CONVERTED else "auto"
        with Model(where.model, threads=1, weights=weights or "auto") as model:
            found["wrong"] = verify.wrong(test.asked, model)
        found["verified"] = sum(each.completion is not None for each in report.parts(test.asked))
    return found


def plot(found: dict[str, Any], folder: Path) -> None:
    try:
        from scripts.load import plots
    except ModuleNotFoundError:
        text.say("no plots: matplotlib is not installed (the extra bench-plots)")
        return
    for path in plots.draw(found, folder):
        text.say(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
