"""The ledger of live requests: who asked, where each one is, and that each leaves exactly once.

`admit` and `end` are the two sides of the ledger; `check` is its invariant, called by tests after every
event. This file must not know sockets, messages' encoding or the policy.

    state       what it waits for               left by
    HELD        the first replica's announcement   TOKENIZING, WAITING, end
    TOKENIZING  its text prompt's token ids        WAITING, end
    WAITING     its turn; it is in a bucket        RUNNING, end
    RUNNING     its tokens; a lane of a replica    end
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tinyloop_serve.dispatcher.buckets import Shape
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.protocol.errors import Overloaded, bad_field
from tinyloop_serve.protocol.messages import Done, Generate, Lane, Stats


class State(Enum):
    HELD = "held"
    TOKENIZING = "tokenizing"
    WAITING = "waiting"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Request:
    """One live `Generate`. `key` numbers the arrivals and is never reused."""

    key: int
    client: bytes  # routing id
    asked: Generate
    arrived: float  # seconds, the caller's clock
    state: State = State.HELD
    prompt: bytes = b""  # u32 little-endian, once known
    shape: Shape | None = None  # once the model is known
    replica: str = ""  # endpoint, while RUNNING
    started: float = 0.0
    delivered: int = 0  # tokens forwarded to the client
    cancelled: bool = False  # the client asked; the replica has yet to answer

    @property
    def id(self) -> str:
        return self.asked.id

    def lane(self) -> Lane:
        """What a replica needs to know; `start` has been called."""
        asked, queue_ms = self.asked, (self.started - self.arrived) * 1000
        return Lane(
            key=self.key,
            id=self.id,
            prompt=self.prompt,
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            stop=asked.stop,
            stop_tokens=asked.stop_tokens,
            ignore_eos=asked.ignore_eos,
            stream=asked.stream,
            queue_ms=round(queue_ms, 3),
        )

    def done_cancelled(self, now: float) -> Done:
        """The terminal of a cancelled request that no replica answers."""
        queue_ms = round(((self.started or now) - self.arrived) * 1000, 3)
        stats = Stats(prompt_tokens=len(self.prompt) // 4, generated_tokens=self.delivered, queue_ms=queue_ms)
        return Done(self.id, "cancelled", stats=stats)


class Requests:
    def __init__(self, config: Config) -> None:
        self._max_waiting = config.max_waiting
        self._replica_wait_s = config.replica_wait_ms / 1000
        self.finished = 0
        self.failed = 0
        self._next_key = 1
        self._by_key: dict[int, Request] = {}  # in the order of arrival
        self._by_client: dict[bytes, dict[str, Request]] = {}  # never an empty entry
        self._deadlines: list[tuple[float, int]] = []  # a heap; keys that have ended are skipped
        self._running = 0
        self._pace_s = 0.05  # moving average of the time between two ends
        self._last_end = 0.0

    def admit(self, client: bytes, asked: Generate, now: float) -> Request:
        """Enters a request, HELD. Raises `InvalidRequest`: its id is live; `Overloaded`: too many wait."""
        if self.find(client, asked.id):
            raise bad_field("id", asked.id, "an id that is not among the client's live requests")
        if self.waiting >= self._max_waiting:
            quarter_s = self._pace_s * self._max_waiting / 4  # until a quarter of the queue has gone
            retry_s = min(max(quarter_s, 0.1), 10.0)
            full = f"{self.waiting} requests wait and no more are queued; try again in {retry_s:.1f} s"
            raise Overloaded(full, retry_after_s=retry_s)
        request = Request(self._next_key, client, asked, now)
        self._next_key += 1
        self._by_key[request.key] = request
        self._by_client.setdefault(client, {})[asked.id] = request
        if asked.deadline_ms:
            heapq.heappush(self._deadlines, (now + asked.deadline_ms / 1000, request.key))
        return request

    def end(self, request: Request, now: float, *, failed: bool) -> None:
        """Removes it; the caller has sent, or now sends, its one terminal message."""
        del self._by_key[request.key]
        mine = self._by_client[request.client]
        del mine[request.id]
        if not mine:
            del self._by_client[request.client]
        self._running -= request.state is State.RUNNING
        self.failed += failed
        self.finished += not failed
        self._pace_s += 0.1 * (min(now - self._last_end, 1.0) - self._pace_s)
        self._last_end = now

    def start(self, request: Request, replica: str, now: float) -> None:
        request.state, request.replica, request.started = State.RUNNING, replica, now
        self._running += 1

    def get(self, key: int) -> Request | None:
        return self._by_key.get(key)

    def find(self, client: bytes, request_id: str) -> Request | None:
        return self._by_client.get(client, {}).get(request_id)

    def of(self, client: bytes) -> list[Request]:
        return list(self._by_client.get(client, {}).values())

    def among(self, keys: set[int]) -> list[Request]:
        """Those of `keys` that are live, in the order of arrival."""
        return [self._by_key[key] for key in sorted(keys) if key in self._by_key]

    def clients(self) -> set[bytes]:
        return set(self._by_client)

    def live(self) -> list[Request]:
        """All of them, in the order of arrival."""
        return list(self._by_key.values())

    def waiting_without(self, none_since: float | None, now: float) -> list[Request]:
        """Those whose patience is over while no replica is there (since `none_since`; None = one is)."""
        if none_since is None:
            return []
        limit = now - self._replica_wait_s
        waiting = (request for request in self.live() if request.state is not State.RUNNING)
        return [request for request in waiting if max(request.arrived, none_since) <= limit]

    def expired(self, now: float) -> Iterator[Request]:
        """Those whose own deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                yield request

    def next_deadline(self) -> float:
        while self._deadlines and self._deadlines[0][1] not in self._by_key:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        """Those not yet on a replica."""
        return len(self._by_key) - self._running

    def check(self) -> None:
        """Raises AssertionError unless the books agree with each other."""
        running = [request for request in self._by_key.values() if request.state is State.RUNNING]
        assert len(running) == self._running, "running count"
        indexed = [request for mine in self._by_client.values() for request in mine.values()]
        assert {r.key for r in indexed} == set(self._by_key) and len(indexed) == len(self._by_key), "index"
        assert all(bool(r.replica) == (r.state is State.RUNNING) for r in self._by_key.values()), "replica"
        assert all(mine for mine in self._by_client.values()), "empty client entry"
        assert self.waiting <= self._max_waiting, "queue bound"
        assert self._next_key - 1 == self.finished + self.failed + len(self._by_key), "each ends once"
