"""What a load's requests say together: one dictionary, for people (text.py), plots and machines.

Counted are the requests that were due in the window after the warm-up, refinements among them. What the
fleet did per second is counted by the time at which it did it, so that a backlog that is worked off
afterwards does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from scripts.load.asked import Asked, parts, percentile
from scripts.load.drive import Lag
from scripts.load.slo import Slo

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATE_S = 0.02  # a driver that is later than this in one of a hundred cases is in its own way
BUSY = 0.9  # of a core
CDF_POINTS = 200


def summarise(asked: Iterable[Asked], warm_up_s: float, seconds: float, slo: Slo, lag: Lag) -> dict[str, Any]:
    sent = [each for each in parts(asked) if each.due]
    begin = min((each.due - each.at for each in sent), default=0.0) + warm_up_s
    end = begin + seconds
    counted = [each for each in sent if begin <= each.due < end]
    done = [each for each in counted if each.completion]
    in_time = [each for each in done if slo.met(each)]
    stats = [each.completion.stats for each in done if each.completion]
    ended = sum(each.completion is not None and begin <= each.ended < end for each in sent)
    tokens = sum(
        size
        for each in sent
        for time, size in zip(each.times, each.sizes, strict=True)
        if begin <= time < end
    )
    return {
        "requests": len(counted),
        "finished": len(done),
        "unfinished": sum(not each.ended for each in counted),
        "errors": dict(Counter(type(each.error).__name__ for each in counted if each.error)),
        "seconds": round(seconds, 3),
        "offered_rps": round(len(counted) / seconds, 3),
        "finished_rps": round(ended / seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "slo": asdict(slo),
        "goodput_rps": round(len(in_time) / seconds, 3),
        "goodput_share": round(len(in_time) / max(1, len(counted)), 4),
        **latencies(done),
        "by_part": {
            part: latencies(found)
            for part in ("draft", "refined")
            if (found := [each for each in done if each.part == part])
        },
        "queue_ms": shares([each.queue_ms for each in stats], 1.0),
        "by_shape": _waits(done, _shape),
        "by_tenant": _waits(done, lambda each: str(each.tenant)),
        "batch_sizes": {str(size): n for size, n in sorted(Counter(s.batch_size for s in stats).items())},
        "replicas": dict(sorted(Counter(s.replica for s in stats).items())),
        "methods": dict(sorted(Counter(s.method for s in stats).items())),
        "prefix_share": _share(sum(s.prefix_tokens for s in stats), sum(s.prompt_tokens for s in stats)),
        "loops_skipped": sum(s.loops_skipped for s in stats),
        "accepted_share": _share(sum(s.accepted for s in stats), sum(s.drafted for s in stats)),
        "failovers": sum(s.failovers for s in stats),
        "driver": driver(lag),
        "cdf": cdfs(done),
        "over_time": over_time(sent),
    }


def latencies(done: Sequence[Asked]) -> dict[str, dict[str, float]]:
    """Milliseconds: to the first token, between chunks, per token after the first, to the end."""
    streamed = [each for each in done if each.times]
    return {
        "ttft_ms": shares([each.first_s for each in streamed]),
        "itl_ms": shares([gap for each in streamed for gap in each.gaps]),
        "token_ms": shares([each.per_token_s for each in streamed if len(each.times) > 1]),
        "e2e_ms": shares([each.seconds for each in done]),
    }


def shares(values: Sequence[float], to_ms: float = 1000.0) -> dict[str, float]:
    found = {name: round(to_ms * percentile(values, share), 3) for name, share in SHARES.items()}
    return found | {"max": round(to_ms * max(values, default=0.0), 3)}


def driver(lag: Lag) -> dict[str, Any]:
    """How far the driver was in its own way, and whether that spoils what it found."""
    cpu = lag.cpu_s / lag.seconds if lag.seconds else 0.0
    late = max(percentile(lag.send, 0.99), percentile(lag.read, 0.99))
    return {
        "send_lag_ms": shares(lag.send),
        "read_lag_ms": shares(lag.read),
        "cpu_share": round(cpu, 3),
        "kept_up": late <= LATE_S and cpu <= BUSY,
    }


def over_time(asked: Iterable[Asked]) -> dict[str, list[float]]:
    """Per second from the first request on, warm-up included: tokens, requests sent and ended, and how many
    were open at its end."""
    sent = [each for each in asked if each.started]
    if not sent:
        return {"tokens": [], "sent": [], "ended": [], "open": []}
    start = min(each.due for each in sent)
    last = max([each.ended for each in sent] + [time for each in sent for time in each.times])
    rows = {name: [0.0] * (int(last - start) + 1) for name in ("tokens", "sent", "ended", "open")}
    for each in sent:
        for time, size in zip(each.times, each.sizes, strict=True):
            rows["tokens"][int(time - start)] += size
        rows["sent"][int(each.started - start)] += 1
        if each.ended:
            rows["ended"][int(each.ended - start)] += 1
    now = 0.0
    for second in range(len(rows["open"])):
        now += rows["sent"][second] - rows["ended"][second]
        rows["open"][second] = now
    return rows


def cdfs(asked: Sequence[Asked]) -> dict[str, list[float]]:
    """Milliseconds at evenly spaced shares from 0 to 1."""
    done = [each for each in asked if each.times]
    values = {
        "ttft_ms": [each.first_s for each in done],
        "itl_ms": [gap for each in done for gap in each.gaps],
        "e2e_ms": [each.seconds for each in done],
    }
    steps = [number / CDF_POINTS for number in range(CDF_POINTS + 1)]
    return {
        name: [round(1000 * percentile(each, step), 3) for step in steps] for name, each in values.items()
    }


def _shape(each: Asked) -> str:
    options = each.options
    loops = options.get("loops", "default")
    return f"loops={loops} {options.get('cache_mode', 'fp16')} {options.get('method', 'plain')} {each.part}"


def _waits(done: Iterable[Asked], key: Callable[[Asked], str]) -> dict[str, Any]:
    """Finished requests and their wait in the dispatcher, in groups."""
    groups: dict[str, list[float]] = {}
    for each in done:
        assert each.completion is not None
        groups.setdefault(key(each), []).append(each.completion.stats.queue_ms)
    return {
        name: {"finished": len(waits), "queue_ms": shares(waits, 1.0)}
        for name, waits in sorted(groups.items())
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
