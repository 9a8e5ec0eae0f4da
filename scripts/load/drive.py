"""Asks the requests of a load at their times and notes what happens: one event loop, many streams.

Open loop: a request is sent when it is due, whatever became of those before it, and its latencies count from
then, so that a slow fleet cannot slow its own load and look well. The driver watches itself: how late it sent
(`Lag.send`), how late its loop came round to read (`Lag.read`, which is how wrong a time of a token can be)
and how much of a core it used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.load.asked import Asked
from tinyloop_serve.protocol.aio import AsyncClient
from tinyloop_serve.protocol.errors import TinyLoopError

HEAD_START_S = 0.05  # from the start to the first arrival
TICK_S = 0.02  # how often the loop is looked at
PROGRESS_S = 0.2
Progress = Callable[[], None]


@dataclass
class Lag:
    """The driver's own delays, seconds."""

    send: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    seconds: float = 0.0  # that the load lasted
    cpu_s: float = 0.0  # of this process meanwhile


@dataclass(frozen=True)
class Door:
    """A fleet's endpoint, and the options of one `AsyncClient` for each tenant that knocks."""

    endpoint: str
    tenants: tuple[dict[str, Any], ...] = ({},)
    connections: int = 4  # of each tenant


def nothing() -> None:
    """The progress of those who want to see none."""


def offer(
    door: Door, asked: Sequence[Asked], progress: Progress = nothing, grace_s: float | None = None
) -> Lag:
    """Each at its time; returns when all have ended. What has not `grace_s` after the last was due is left
    (None: it is waited for): it has neither a completion nor an error."""
    return asyncio.run(_offer(door, asked, progress, grace_s))


def closed(door: Door, asked: Iterable[Asked], at_once: int, progress: Progress = nothing) -> Lag:
    """`at_once` at any time, each asked when another has ended, until `asked` has no more."""
    return asyncio.run(_closed(door, asked, at_once, progress))


async def _offer(door: Door, asked: Sequence[Asked], progress: Progress, grace_s: float | None) -> Lag:
    async with _watched(progress) as lag, _clients(door) as client_of:
        tasks = []
        start = time.monotonic() + HEAD_START_S
        for each in sorted(asked, key=lambda each: each.at):
            each.due = start + each.at
            if (wait := each.due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(ask(client_of(each), each)))
        end = max((each.due for each in asked), default=start)
        patience = None if grace_s is None else max(0.0, end + grace_s - time.monotonic())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            _raise_first(tasks)
        lag.send = [each.started - each.due for each in asked if each.started]
    return lag


async def _closed(door: Door, asked: Iterable[Asked], at_once: int, progress: Progress) -> Lag:
    todo = iter(asked)

    async def work(client_of: Callable[[Asked], AsyncClient]) -> None:
        for each in todo:
            each.due = time.monotonic()
            await ask(client_of(each), each)

    async with _watched(progress) as lag, _clients(door) as client_of:
        await asyncio.gather(*(work(client_of) for _ in range(at_once)))
    return lag


async def ask(client: AsyncClient, each: Asked) -> None:
    """One request to its end, and the refinements of a draft after it."""
    if not each.refine:
        await _stream(client, each)
        return
    each.part = "draft"
    shape = {name: each.options[name] for name in ("loops", "cache_mode") if name in each.options}
    each.started = time.monotonic()
    try:
        handle = await client.create_resume(each.prompt, **shape)
    except TinyLoopError as error:
        each.error, each.ended, each.terminals = error, time.monotonic(), 1
        return
    async with handle:
        await _stream(client, each, handle=handle)
        for loops in each.refine:
            options = {**each.options, "loops": loops}
            more = Asked(each.number, each.prompt, options, each.at, each.tenant, part="refined")
            more.due = time.monotonic()
            each.refined.append(more)
            await _stream(client, more, handle=handle)


async def _stream(client: AsyncClient, each: Asked, **using: Any) -> None:
    each.started = each.started or time.monotonic()
    prompt = "" if using else each.prompt  # a resume handle has it
    try:
        async with client.stream(prompt, **each.options, **using) as stream:
            async for chunk in stream:
                if chunk.tokens:
                    each.times.append(time.monotonic())
                    each.sizes.append(len(chunk.tokens))
                    each.tokens += chunk.tokens
                if each.cancel_after and len(each.tokens) >= each.cancel_after:
                    stream.cancel()
            each.completion = await stream.result()
    except TinyLoopError as error:
        each.error = error
    each.ended = time.monotonic()
    each.terminals += 1


def _raise_first(tasks: Iterable[asyncio.Task[None]]) -> None:
    """A mistake of ours in a task must not pass for a request that came to nothing."""
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            raise error


@contextlib.asynccontextmanager
async def _clients(door: Door) -> AsyncIterator[Callable[[Asked], AsyncClient]]:
    """Whose client asks a request."""
    async with contextlib.AsyncExitStack() as stack:
        turns = [
            itertools.cycle(
                [
                    await stack.enter_async_context(AsyncClient(door.endpoint, **options))
                    for _ in range(door.connections)
                ]
            )
            for options in door.tenants
        ]
        yield lambda each: next(turns[each.tenant % len(turns)])


@contextlib.asynccontextmanager
async def _watched(progress: Progress) -> AsyncIterator[Lag]:
    """Looks at the loop while it drives, and lets `progress` speak."""
    lag = Lag()

    async def watch() -> None:
        spoke = time.monotonic()
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            lag.read.append(max(0.0, now - asleep - TICK_S))
            if now - spoke >= PROGRESS_S:
                progress()
                spoke = time.monotonic()

    began, cpu = time.monotonic(), time.process_time()
    watcher = asyncio.create_task(watch())
    try:
        yield lag
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        lag.seconds, lag.cpu_s = time.monotonic() - began, time.process_time() - cpu
