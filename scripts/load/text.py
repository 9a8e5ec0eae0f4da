"""A load for people: a line of progress, and the summary of a report. Changes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.load.asked import Asked, parts

PLAIN_EVERY_S = 5.0  # where nobody watches


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Live:
    """One line about a load in progress, on stderr: rewritten on a terminal, else a new one now and then."""

    def __init__(self, what: str, asked: Sequence[Asked]) -> None:
        self._what, self._asked = what, asked
        self._terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._tokens = 0

    def __call__(self) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._last < PLAIN_EVERY_S:
            return
        sent, ended, failed, tokens = 0, 0, 0, 0
        for each in parts(self._asked):
            sent += bool(each.started)
            ended += bool(each.ended)
            failed += each.error is not None
            tokens += len(each.tokens)
        rate = (tokens - self._tokens) / (now - self._last) if now > self._last else 0.0
        line = f"{self._what}  {now - self._start:5.0f} s  sent {sent}  open {sent - ended}  failed {failed}"
        self._write(f"{line}  {rate:.0f} tok/s")
        self._last, self._tokens = now, tokens

    def end(self) -> None:
        if self._terminal:
            self._write("")
            sys.stderr.write("\r")

    def _write(self, line: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r{line[:110]:<110}")
            sys.stderr.flush()
        else:
            say(line)


def summary(report: dict[str, Any]) -> Iterator[str]:
    """Lines."""
    yield (
        f"{report['requests']} requests in {report['seconds']:.1f} s:"
        f" {report['finished']} finished, {sum(report['errors'].values())} failed,"
        f" {report['unfinished']} left unfinished"
    )
    for name, count in sorted(report["errors"].items()):
        yield f"  {name}: {count}"
    yield (
        f"{report['offered_rps']:.2f} requests/s asked, {report['finished_rps']:.2f} finished,"
        f" {report['tokens_per_s']:.0f} tokens/s"
    )
    if any(report["slo"].values()):
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in report["slo"].items() if limit)
        share = f"{report['goodput_share']:.1%} of those asked"
        yield f"in time ({limits}): {report['goodput_rps']:.2f} requests/s, {share}"
    yield f"{'ms':24}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    yield from _latencies(report, "")
    for part, found in report["by_part"].items():
        yield from _latencies(found, f", {part}")
    yield _row("wait in the dispatcher", report["queue_ms"])
    for shape, found in report["by_shape"].items():
        yield _row(f"  {shape}", found["queue_ms"])
    yield "batch sizes: " + ", ".join(f"{n} x {size}" for size, n in report["batch_sizes"].items())
    if report["prefix_share"]:
        yield f"prompt tokens that a prefix saved: {report['prefix_share']:.1%}"
    if report["accepted_share"]:
        yield f"drafted tokens that were accepted: {report['accepted_share']:.1%}"
    yield from _driver(report["driver"])


def _driver(found: dict[str, Any]) -> Iterator[str]:
    sent, read = found["send_lag_ms"]["p99"], found["read_lag_ms"]["p99"]
    yield (
        f"driver: sent {sent:.1f} ms late at p99, read {read:.1f} ms late at p99,"
        f" {found['cpu_share']:.0%} of a core"
    )
    if not found["kept_up"]:
        yield "  IT DID NOT KEEP UP: latencies are in part its own. Lower the rate, or use another machine"


def _latencies(report: dict[str, Any], of: str) -> Iterator[str]:
    for name, key in (
        ("first token", "ttft_ms"), ("between chunks", "itl_ms"), ("per token", "token_ms"),
        ("whole", "e2e_ms"),
    ):  # fmt: skip
        yield _row(name + of, report[key])


def _row(name: str, found: dict[str, float]) -> str:
    return f"{name:24}" + "".join(f"{found[share]:10.1f}" for share in ("p50", "p90", "p99", "max"))
