"""The batching policy, whole: which waiting requests form the next engine call.

A bucket holds waiting requests that may share a batch: the same `Sampling`, and `max_tokens` in the same
band, so that lanes end at about the same step. A bucket is ripe when it has `min_batch_size` requests,
when its oldest has waited `max_wait_ms`, or when its shape can never be batched. Of the ripe buckets the
one that has waited longest *since its last run* goes next: a rare shape beside a hot one waits at most
`max_wait_ms` and the run in progress, and a flood of new shapes cannot starve an old one. Within a bucket,
first come first served. No clocks, no messages, no replicas.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.guards import batchable
from tinyloop_serve.protocol.messages import Sampling

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.requests import Request


class Shape(NamedTuple):
    sampling: Sampling  # loops resolved
    band: int  # upper end of the max_tokens band; 0 = above the last

    def __str__(self) -> str:
        s = self.sampling
        extra = f" window={s.cache_window} beam={s.beam_size}" if not batchable(s) else ""
        draw = f"T={s.temperature:g} top_k={s.top_k} top_p={s.top_p:g} min_p={s.min_p:g}"
        draw += f" repeat={s.repetition_penalty:g}"
        return f"loops={s.loops} max_tokens<={self.band or 'any'} {s.cache_mode} {draw}{extra}"


@dataclass
class Bucket:
    shape: Shape
    turn: float = 0.0  # when a run of this shape last started or ended, seconds
    queue: list[Request] = field(default_factory=list)  # in the order of arrival

    @property
    def waits_since(self) -> float:
        return max(self.turn, self.queue[0].arrived)


class Call(NamedTuple):
    """One engine call: `lanes` run at `batch_size` (1: `generate_stream`; more: `generate_batch`)."""

    shape: Shape
    lanes: list[Request]
    batch_size: int


class Buckets:
    def __init__(self, config: Config) -> None:
        self._sizes = config.batch_sizes  # ascending
        self._min_batch_size = config.min_batch_size
        self._max_wait_s = config.max_wait_ms / 1000
        self._bands = config.max_tokens_bands  # ascending
        self._buckets: dict[Shape, Bucket] = {}  # never an empty one

    def take(self, now: float) -> Call | None:
        """The next engine call, removed from its bucket; None while nothing is ripe."""
        ripe = [bucket for bucket in self._buckets.values() if self._ripe_at(bucket) <= now]
        if not ripe:
            return None
        bucket = min(ripe, key=lambda bucket: bucket.waits_since)
        ready = len(bucket.queue)
        if batchable(bucket.shape.sampling) and ready >= self._min_batch_size:
            count = min(ready, self._sizes[-1])
        else:
            count = 1
        smallest = bisect_left(self._sizes, count)  # that holds them
        batch_size = 1 if count == 1 else self._sizes[smallest]
        lanes, bucket.queue = bucket.queue[:count], bucket.queue[count:]
        bucket.turn = now
        self._drop_if_empty(bucket)
        return Call(bucket.shape, lanes, batch_size)

    def _ripe_at(self, bucket: Bucket) -> float:
        """When its next call may start, seconds."""
        if not batchable(bucket.shape.sampling) or len(bucket.queue) >= self._min_batch_size:
            return 0.0
        return bucket.queue[0].arrived + self._max_wait_s

    def ended(self, shape: Shape, now: float) -> None:
        """A run of this shape is over: its bucket queues behind all that waited meanwhile."""
        if bucket := self._buckets.get(shape):
            bucket.turn = now

    def shape_of(self, sampling: Sampling, max_tokens: int) -> Shape:
        index = bisect_left(self._bands, max_tokens)
        return Shape(sampling, self._bands[index] if index < len(self._bands) else 0)

    def put(self, request: Request) -> None:
        """Adds a request whose `shape` is set, in its place by arrival (text took longer to get here)."""
        assert request.shape is not None
        bucket = self._buckets.setdefault(request.shape, Bucket(request.shape))
        insort(bucket.queue, request, key=lambda request: request.key)

    def remove(self, request: Request) -> None:
        assert request.shape is not None
        bucket = self._buckets[request.shape]
        bucket.queue.remove(request)
        self._drop_if_empty(bucket)

    def _drop_if_empty(self, bucket: Bucket) -> None:
        if not bucket.queue:
            del self._buckets[bucket.shape]

    def ripe_at(self) -> float:
        """When the next call may start, seconds; infinity when nothing waits."""
        return min(map(self._ripe_at, self._buckets.values()), default=float("inf"))

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets.values())
