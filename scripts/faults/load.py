"""Requests of mixed shapes and seeds, open-loop arrivals, and what became of each: for the scripts that
verify every token against the engine run alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyloop_serve.native import GenerateConfig, Model
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import TinyLoopError


@dataclass
class Asked:
    """One request and what came of it. Times are seconds of time.monotonic."""

    number: int
    prompt: list[int]
    options: dict[str, Any]  # of `Client.stream`
    due: float = 0.0  # after the start
    started: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)  # of each chunk of tokens
    tokens: list[int] = field(default_factory=list)  # as they were streamed
    completion: Any = None
    error: TinyLoopError | None = None
    terminals: int = 0
    cancel_after: int = 0  # tokens; 0 = never

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return self.ended - self.started


def mixed(
    count: int, *, seed: int, vocabulary: int, tokens: tuple[int, int], loops: Sequence[int]
) -> list[Asked]:
    """Requests of mixed shapes, each with a seed of its own."""
    draw = random.Random(seed)
    asked = []
    for number in range(count):
        prompt = [draw.randrange(3, vocabulary) for _ in range(draw.choice((4, 8, 16, 32, 64)))]
        options: dict[str, Any] = {
            "loops": draw.choice(loops),
            "max_tokens": draw.randint(*tokens),
            "seed": draw.getrandbits(64),
            "temperature": draw.choice((0.0, 0.0, 0.8, 1.2)),
            "cache_mode": draw.choice(("fp16", "fp16", "fp16", "int8")),
            "ignore_eos": True,
        }
        if draw.random() < 0.2:
            options["repetition_penalty"] = 1.1
        asked.append(Asked(number, prompt, options))
    return asked


def poisson(asked: Iterable[Asked], rate: float, seed: int) -> None:
    """Open-loop arrivals: due times with exponential gaps, `rate` per second."""
    draw, now = random.Random(seed), 0.0
    for each in asked:
        now += draw.expovariate(rate)
        each.due = now


def run(client: Client, each: Asked) -> None:
    """One request to its end, noted in `each`."""
    each.started = time.monotonic()
    try:
        with client.stream(each.prompt, **each.options) as stream:
            for chunk in stream:
                each.tokens += chunk.tokens
                if chunk.tokens:
                    each.times.append(time.monotonic())
                if each.cancel_after and len(each.tokens) >= each.cancel_after:
                    stream.cancel()
            each.completion = stream.result()
    except TinyLoopError as error:
        each.error = error
    each.ended = time.monotonic()
    each.terminals += 1


def offer(
    clients: Sequence[Client], asked: Sequence[Asked], progress: Callable[[], None] = lambda: None
) -> float:
    """Runs each at its due time, whatever became of those before it; returns when all have ended, seconds
    after the start. Each has a thread of its own and shares one of the `clients`."""
    threads = []
    start = time.monotonic()
    for each in asked:
        while (wait := start + each.due - time.monotonic()) > 0:
            time.sleep(min(wait, 0.2))
            progress()
        thread = threading.Thread(target=run, args=(clients[each.number % len(clients)], each), daemon=True)
        thread.start()
        threads.append(thread)
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        progress()
    return time.monotonic() - start


def closed(clients: Sequence[Client], asked: Sequence[Asked], at_once: int) -> float:
    """`at_once` at any time, each begun when another has ended; returns the seconds it took."""
    todo = list(reversed(asked))
    lock = threading.Lock()

    def work(number: int) -> None:
        while True:
            with lock:
                if not todo:
                    return
                each = todo.pop()
            run(clients[number % len(clients)], each)

    start = time.monotonic()
    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(at_once)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.monotonic() - start


def wrong(asked: Iterable[Asked], model: Model) -> list[int]:
    """Numbers of those whose stream is not what the engine gives alone (or its beginning, if cancelled)."""
    found = []
    for each in asked:
        if each.completion is None:
            continue
        options = dict(each.options)
        for name in ("priority", "method", "deadline_s", "handle"):
            options.pop(name, None)
        alone = model.generate(each.prompt, GenerateConfig(**options)).tokens
        streamed, whole = each.tokens, list(each.completion.tokens)
        expected = alone[: len(streamed)] if each.completion.stop_reason == "cancelled" else alone
        if streamed != expected or whole != streamed:
            found.append(each.number)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
