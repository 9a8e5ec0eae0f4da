"""The profile for one stream against the one for batches, each a whole fleet: by requests at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

from crossings.rounds import interleaved
from crossings.section import Section, where
from scripts.load.asked import Asked, percentile
from scripts.load.drive import closed
from scripts.load.mix import Mix
from scripts.load.target import Target, started
from tinyloop_serve.deploy import profiles

AT_ONCE = (1, 2, 4, 8, 16)
MIX = Mix(prompt_tokens=(16, 16), max_tokens=(32, 48), loops=(8,))
PROFILES = ("single", "bucketed")


def measure(rounds: int, requests: int = 32, at_once: tuple[int, ...] = AT_ONCE) -> Section:
    """Each case asks `requests` in all."""
    firsts: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        cases: dict[str, Callable[[], float]] = {}
        for profile in PROFILES:
            target = stack.enter_context(started(Path(profiles.path(profile)), MIX, None, ()))
            vocabulary = _vocabulary(target)
            for count in at_once:
                cases[f"{profile} {count}"] = _case(
                    target, vocabulary, count, requests, firsts.setdefault(f"{profile} {count}", [])
                )
        times = interleaved("latency", cases, rounds)
    head = ("at a time", "first token, single", "first token, bucketed", "tokens/s, bucketed over single")
    section = Section("latency", head, [])
    points = []
    for count in at_once:
        gain = times.ratio(f"single {count}", f"bucketed {count}")
        points.append((float(count), gain))
        waits = [1000 * percentile(firsts[f"{profile} {count}"], 0.5) for profile in PROFILES]
        section.rows.append((str(count), *(f"{wait:.1f} ms" for wait in waits), f"{gain:.2f}x"))
        section.data[str(count)] = {"gain": gain, **dict(zip(PROFILES, waits, strict=True))}
    section.crossings.append(f"batches overtake the single stream {where(points, ' requests at a time')}")
    return section


def _vocabulary(target: Target) -> int:
    model = target.wait_calibrated().model
    assert model is not None
    return model.vocab_size


def _case(
    target: Target, vocabulary: int, at_once: int, requests: int, firsts: list[float]
) -> Callable[[], float]:
    def run() -> float:
        asked: list[Asked] = list(itertools.islice(MIX.requests(1, vocabulary), requests))
        lag = closed(target.door, asked, at_once)
        firsts.extend(each.first_s for each in asked)
        return lag.seconds

    return run
