"""What the dispatcher costs a token, beside forwarders that do nothing else; one JSON object as the last
line.

    .venv/bin/python scripts/bench/dispatcher.py [--rounds 3] [--seconds 2] [--profile]

The real dispatcher process stands between raw pyzmq clients and a fake replica whose tokens cost nothing
(dispatcher_peers.py); a bare pyzmq forwarding loop and C zmq.proxy stand in the same place in turn. All run
on one machine, so a fast forwarder is held up by its peers: a rate is therefore frames per second of the
forwarder's busiest thread at work, which is what it would reach with a core to itself; the rate on the clock
is printed beside it.

forward_ratio      token frames/s through the dispatcher, one token to a Step, over the bare loop's
tokens_vs_c_proxy  tokens/s through the dispatcher, 64 streams in batches of 8, over frames/s of zmq.proxy
hop_p50_ratio      median delay of a token that the dispatcher adds to a direct connection, over that which
                   the bare loop adds, at 1,000 tokens/s
cpu_share_1k/_5k   CPU time of the whole dispatcher process over time, at 1,000 and 5,000 tokens/s in 64
                   streams
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEERS = Path(__file__).with_name("dispatcher_peers.py")
STREAMS, CLIENTS, LANES = 64, 8, 8
NS = 1e9


class Place:
    """One forwarder between its peers, in a directory of its own."""

    def __init__(self, stack: contextlib.ExitStack, kind: str, profile: str = "") -> None:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-bench-"))
        self._stack = stack
        self.kind = kind
        self.front = f"ipc://{directory}/front.sock"
        self.back = [f"ipc://{directory}/b{n}.sock" for n in range(STREAMS // LANES)]
        self._profile = profile
        self.forwarder: subprocess.Popen[str] | None = None

    def measure(
        self, seconds: float, *, rate: float = 0.0, single: bool = False, stamped: bool = False
    ) -> dict[str, float]:
        """`rate`: messages per second from the replicas, 0: as many as are taken. `single`: one token each;
        `stamped`: look at delays."""
        if self.kind == "dispatcher":
            self._start(PEERS, "replicas", [self.back, rate, single, stamped])
            self.forwarder = self._dispatcher()
        else:
            where = self.front if self.kind == "direct" else self.back[0]
            self._start(PEERS, "answers", [where, rate, stamped, self.kind == "direct"])
            if self.kind != "direct":
                self.forwarder = self._start(PEERS, self.kind, [self.front, self.back[0]])
                _line(self.forwarder)
        clients = self._start(PEERS, "asks", [self.front, CLIENTS, STREAMS, seconds, stamped])
        assert _line(clients) == "START"
        before = self._cpu_ns()
        assert _line(clients) == "STOP"
        after = self._cpu_ns()
        found: dict[str, float] = json.loads(_line(clients))
        spent = {thread: ns - before.get(thread, 0) for thread, ns in after.items()}
        found["frames_per_s"] = found["frames"] / seconds
        if spent:
            found["share"] = sum(spent.values()) / NS / seconds
            found["per_busy_s"] = found["frames"] / (max(spent.values()) / NS)
        return found

    def _dispatcher(self) -> subprocess.Popen[str]:
        flags = ["--front", self.front, "--batch-sizes", str(LANES), "--min-batch-size", str(LANES)]
        flags += ["--max-wait-ms", "600000", "--loss-ms", "600000", "--stall-ms", "600000"]
        flags += ["--max-queue-ms", "0"]
        for endpoint in self.back:
            flags += ["--replica", endpoint]
        command = [sys.executable, "-m", "tinyloop_serve.dispatcher", *flags]
        if self._profile:
            command[1:1] = ["-m", "cProfile", "-o", self._profile]
        process = self._run(command)
        assert _line(process).startswith("READY")
        return process

    def _start(self, script: Path, role: str, arguments: list[Any]) -> subprocess.Popen[str]:
        return self._run([sys.executable, str(script), role, json.dumps(arguments)])

    def _run(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._stack.callback(_end, process)
        return process

    def _cpu_ns(self) -> dict[str, int]:
        """Of each thread of the forwarder, by /proc/PID/task/TID/schedstat."""
        if self.forwarder is None:
            return {}
        tasks = Path(f"/proc/{self.forwarder.pid}/task")
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit(f"{process.args} ended without a word")
    return line.strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate()


@contextlib.contextmanager
def place(kind: str, profile: str = "") -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        yield Place(stack, kind, profile)


def measure(kind: str, seconds: float, profile: str = "", **how: Any) -> dict[str, float]:
    with place(kind, profile) as here:
        return here.measure(seconds, **how)


RATES: dict[str, tuple[str, dict[str, Any]]] = {
    "bare loop": ("bare", {}),
    "zmq.proxy": ("proxy", {}),
    "dispatcher, a token a Step": ("dispatcher", {"single": True}),
    "dispatcher, 8 tokens a Step": ("dispatcher", {}),
}
DELAYS = {"direct": "direct", "bare loop": "bare", "zmq.proxy": "proxy", "dispatcher": "dispatcher"}
PACED = (1000, 5000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="that count, of each measurement")
    parser.add_argument(
        "--profile", metavar="FILE", default="", help="cProfile of the dispatcher, at full rate"
    )
    flags = parser.parse_args()
    if flags.profile:
        print(measure("dispatcher", flags.seconds, os.path.abspath(flags.profile)))
        return
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in RATES}
    delays: dict[str, list[dict[str, float]]] = {name: [] for name in DELAYS}
    shares: dict[int, list[float]] = {rate: [] for rate in PACED}
    for number in range(flags.rounds):
        print(f"  round {number + 1} of {flags.rounds}", file=sys.stderr)
        for name, (kind, how) in RATES.items():
            rates[name].append(measure(kind, flags.seconds, **how))
        for name, kind in DELAYS.items():
            delays[name].append(measure(kind, flags.seconds, rate=1000, single=True, stamped=True))
        for rate in PACED:
            shares[rate].append(measure("dispatcher", flags.seconds, rate=rate / LANES)["share"])
    report(rates, delays, shares)


def report(
    rates: dict[str, list[dict[str, float]]],
    delays: dict[str, list[dict[str, float]]],
    shares: dict[int, list[float]],
) -> None:
    def median(runs: list[dict[str, float]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    print(f"{STREAMS} streams of {CLIENTS} clients; medians of {len(shares[PACED[0]])} interleaved rounds")
    print(f"{'':30} {'frames/s':>10} {'per busy s':>11} {'a message':>10}")
    for name, runs in rates.items():
        wall, busy = median(runs, "frames_per_s"), median(runs, "per_busy_s")
        each = statistics.median(run["frames"] / run["messages"] for run in runs)
        print(f"{name:30} {wall:10.0f} {busy:11.0f} {each:10.1f}")
    print(f"{'delay of a token':30} {'p50 us':>10} {'p99 us':>11}")
    for name, runs in delays.items():
        print(f"{name:30} {median(runs, 'p50_us'):10.0f} {median(runs, 'p99_us'):11.0f}")
    for rate, found in shares.items():
        print(f"dispatcher at {rate:5} tokens/s: {100 * statistics.median(found):.1f} % of a core")

    speed = {name: median(runs, "per_busy_s") for name, runs in rates.items()}
    hop = {name: median(runs, "p50_us") - median(delays["direct"], "p50_us") for name, runs in delays.items()}
    print(
        json.dumps(
            {
                "forward_ratio": round(speed["dispatcher, a token a Step"] / speed["bare loop"], 3),
                "tokens_vs_c_proxy": round(speed["dispatcher, 8 tokens a Step"] / speed["zmq.proxy"], 3),
                "hop_p50_ratio": round(hop["dispatcher"] / hop["bare loop"], 3),
                "cpu_share_1k": round(statistics.median(shares[1000]), 4),
                "cpu_share_5k": round(statistics.median(shares[5000]), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
