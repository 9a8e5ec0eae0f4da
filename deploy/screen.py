"""What two looks at a fleet tell about its load, as rates and as a screen of text. No terminal, no clock.

Counters of `Status` only grow while the dispatcher lives, so a rate is a difference of two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinyloop_serve.deploy.report import count, duration, table
from tinyloop_serve.protocol.messages import BucketStatus, Latency, ReplicaStatus, Status

BAR = 10  # characters
LATENCIES = (("first token", "first_token_ms"), ("each token", "token_ms"), ("whole answer", "whole_ms"))
REPLICA_COLUMNS = (
    *("REPLICA", "STATE", "RUN", "TOK/S", "SERVED"),
    *("MEMORY", "BUDGET", "HANDLES", "SPECULATION", "HEALTH"),
)


@dataclass(frozen=True)
class Look:
    at: float  # seconds
    status: Status


@dataclass(frozen=True)
class Rates:
    """Per second, between two looks."""

    over_s: float
    tokens: float
    requests: float  # that ended
    replicas: dict[str, float]  # tokens, by endpoint


def between(before: Look, after: Look) -> Rates:
    over_s = after.at - before.at
    old, new = before.status, after.status

    def rate(was: int, now: int) -> float:
        return round(max(0, now - was) / over_s, 2) if over_s > 0 else 0.0

    known = {replica.endpoint: replica.tokens for replica in old.replicas}
    return Rates(
        over_s=round(over_s, 3),
        tokens=rate(old.tokens, new.tokens),
        requests=rate(old.finished + old.failed, new.finished + new.failed),
        replicas={
            each.endpoint: rate(known.get(each.endpoint, each.tokens), each.tokens) for each in new.replicas
        },
    )


def line(rates: Rates, status: Status) -> str:
    """All of it in one line, for a log."""
    serving = sum(each.state in ("ready", "busy") and each.health == "ok" for each in status.replicas)
    return (
        f"replicas={serving}/{len(status.replicas)} running={status.running} waiting={status.waiting}"
        f" tokens_per_s={rates.tokens:.0f} requests_per_s={rates.requests:.1f} finished={status.finished}"
        f" failed={status.failed} refused={status.refused}"
        f" first_token_p99_ms={status.latency.first_token_ms[2]:.0f}"
    )


def lines(
    endpoint: str, rates: Rates, status: Status, trouble: str, width: int, height: int
) -> list[tuple[str, bool]]:
    """(text, whether it is a heading) of each line, cut to `width` columns and `height` lines. `trouble`: why
    there is nothing newer."""
    whole = list(_lines(endpoint, rates, status, trouble))
    if (more := len(whole) - height) > 0:
        whole = [*whole[: height - 1], (f"... {more + 1} more lines: enlarge the window", False)]
    return [(_plain(text)[:width], heading) for text, heading in whole]


def _lines(endpoint: str, rates: Rates, status: Status, trouble: str) -> Iterator[tuple[str, bool]]:
    state = "draining" if status.draining else f"up {duration(status.uptime_ms)}"
    yield f"tinyloop {status.version or '(version unknown)'} at {endpoint}, {state}", True
    if trouble:
        yield f"NO ANSWER: {trouble}; what follows is old", True
    if model := status.model:
        yield f"model     {model.name}, {count(model.parameters)} parameters, {model.loops} loops", False
    yield f"rates     {rates.tokens:.0f} tokens/s, {rates.requests:.1f} requests/s", False
    yield f"now       {status.running} running, {status.waiting} waiting; {status.clients} clients", False
    yield (
        f"so far    {status.finished} finished, {status.failed} failed, {status.refused} refused,"
        f" {status.failovers} failovers",
        False,
    )
    yield "", False
    yield from _headed(_latency(status.latency))
    yield "", False
    yield from _headed(_replicas(status.replicas, rates))
    if status.buckets:
        yield "", False
        yield from _headed(_buckets(status.buckets))


def _headed(rows: Iterator[Sequence[str]]) -> Iterator[tuple[str, bool]]:
    head = next(rows)
    for number, text in enumerate(table(head, rows)):
        yield text, number == 0


def _latency(latency: Latency) -> Iterator[Sequence[str]]:
    yield "LATENCY, ms", "P50", "P90", "P99", f"of {latency.requests} answers in the last minute"
    for name, field in LATENCIES:
        yield name, *(f"{value:.1f}" for value in getattr(latency, field)), ""


def _replicas(replicas: Sequence[ReplicaStatus], rates: Rates) -> Iterator[Sequence[str]]:
    yield REPLICA_COLUMNS
    for each in replicas:
        yield (
            each.name or each.endpoint,
            each.state,
            str(each.running),
            f"{rates.replicas[each.endpoint]:.0f}",
            str(each.served),
            f"{each.memory_bytes / 1e6:.0f} MB",
            _budget(each),
            f"{each.handles}/{each.max_handles}",
            each.speculation,
            each.error or each.health,
        )


def _budget(replica: ReplicaStatus) -> str:
    if not replica.budget_bytes:
        return "not limited"
    share = min(1.0, replica.reserved_bytes / replica.budget_bytes)
    full = round(share * BAR)
    return f"[{'#' * full}{'.' * (BAR - full)}] {100 * share:.0f} % of {replica.budget_bytes / 1e6:.0f} MB"


def _buckets(buckets: Sequence[BucketStatus]) -> Iterator[Sequence[str]]:
    yield "WAITING", "OLDEST", "SHAPE"
    for each in sorted(buckets, key=lambda bucket: -bucket.waiting):
        yield str(each.waiting), f"{each.oldest_ms} ms", each.shape


def _plain(text: str) -> str:
    """Names and errors come from other processes: none of them may steer the terminal."""
    return "".join(each if " " <= each <= "~" else "?" for each in text)
