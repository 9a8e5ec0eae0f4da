"""The ledger of live requests: who asked, where each one is, and that each leaves exactly once.

`admit` and `end` are the two sides of the ledger; `check` is its invariant, called by tests after every
event. This file must not know sockets, messages' encoding or the policy.

    state       what it waits for                  left by
    HELD        the model, news of its handle,     TOKENIZING, WAITING, end
                or a replica that could hold it
    TOKENIZING  token ids of a text                WAITING, end; HELD
    WAITING     its turn; it is in a bucket        RUNNING, end; HELD (another model)
    RUNNING     its tokens; a lane of a replica    end; WAITING (the replica was lost)
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tinyloop_serve.dispatcher.buckets import Shape
from tinyloop_serve.dispatcher.handles import Held
from tinyloop_serve.protocol.errors import bad_field
from tinyloop_serve.protocol.messages import Done, Generate, Lane, Recipe, Stats

CHARACTERS_PER_TOKEN = 4  # roughly, for an estimate of the work before a text is tokenised


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
    tenant: str
    asked: Generate
    arrived: float  # seconds, the caller's clock
    priority: int = 0  # what was asked, cut to what the tenant may
    cost: float = 1.0  # of work: core iterations over all its tokens, estimated at arrival
    state: State = State.HELD

    # what it is, once the model is known
    model: str = ""  # fingerprint; `prompt` and `shape` hold for this model alone
    pieces: list[str | bytes] = field(default_factory=list)  # of the prompt; texts become tokens in turn
    job: int = 0  # number of the `Tokenize` that is out
    prompt: bytes = b""  # u32 little-endian
    shape: Shape | None = None

    # the handle that saves it a prefill
    basis: Recipe | None = None  # of the handle that it named, its loops resolved: the prompt begins with it
    held: Held | None = None  # this one, whoever gets its name later; losing it now is no error
    sticky: str = ""  # endpoint of a replica that holds it, while waiting for that one

    # where it runs
    replica: str = ""  # endpoint, while RUNNING
    started: float = 0.0
    size: int = 1  # of its batch
    uses: str = ""  # the handle that saved its last run work
    unfit_since: float = 0.0  # WAITING: when it began to, or a replica in rotation could last hold it
    cancelled: bool = False  # the client asked; the replica has yet to answer

    # what its client has, to go on from when a replica is lost
    done: bytes = b""  # u32: tokens of the answer before the run in progress
    payloads: list[bytes] = field(default_factory=list)  # forwarded since, as they came
    delivered: int = 0  # tokens forwarded in all
    first_at: float = 0.0  # when the first were
    failovers: int = 0  # replicas lost under it
    alone: bool = False  # after a loss: so that guilt becomes its own
    losses: int = 0  # of replicas, in a row, at the same token
    lost_at: int = -1  # that token

    @property
    def id(self) -> str:
        return self.asked.id

    @property
    def begun(self) -> bool:
        """Whether its client has tokens of it, to go on after; does not change while it waits."""
        return bool(self.done)

    @property
    def position(self) -> int:
        """Tokens of the answer that its client has."""
        return len(self.asked.done) // 4 + self.delivered

    @property
    def positions(self) -> int:
        """Of its decode cache."""
        return len(self.prompt) // 4 + self.asked.max_tokens

    @property
    def share_done(self) -> float:
        """How much of its work is done, 0 to 1."""
        return min(self.delivered / max(self.asked.max_tokens - len(self.asked.done) // 4, 1), 1.0)

    def lane(self, handle: str) -> Lane:
        """What a replica needs to know; `start` has been called. `handle` is one that it holds, or ""."""
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
            method=asked.method,
            handle=handle,
            done=self.done,
            failovers=self.failovers,
        )

    def done_cancelled(self, now: float) -> Done:
        """The terminal of a cancelled request that no replica answers."""
        queue_ms = round(((self.started or now) - self.arrived) * 1000, 3)
        stats = Stats(
            prompt_tokens=len(self.prompt) // 4,
            generated_tokens=self.position,
            queue_ms=queue_ms,
            failovers=self.failovers,
        )
        return Done(self.id, "cancelled", stats=stats)


def work(asked: Generate, loops: int) -> float:
    """Core iterations over all its tokens, estimated before texts are tokenised; `loops` if it names none."""
    text, tokens = asked.prompt_text or "", asked.prompt_tokens or b""
    length = len(text) / CHARACTERS_PER_TOKEN + len(tokens) / 4
    return (length + asked.max_tokens) * (asked.sampling.loops or loops) * asked.sampling.beam_size


class Requests:
    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self._next_key = 1
        self._by_key: dict[int, Request] = {}  # in the order of arrival
        self._by_client: dict[bytes, dict[str, Request]] = {}  # never an empty entry
        self._deadlines: list[tuple[float, int]] = []  # a heap; keys that have ended are skipped

    def admit(
        self, client: bytes, tenant: str, asked: Generate, priority: int, cost: float, now: float
    ) -> Request:
        """Enters a request, HELD; its id is free (`refuse_live_id`)."""
        request = Request(self._next_key, client, tenant, asked, now, priority, cost, done=asked.done)
        self._next_key += 1
        self._by_key[request.key] = request
        self._by_client.setdefault(client, {})[asked.id] = request
        if asked.deadline_ms:
            if len(self._deadlines) > 64 + 2 * len(self._by_key):  # mostly of those that have ended
                self._deadlines = [each for each in self._deadlines if each[1] in self._by_key]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (now + asked.deadline_ms / 1000, request.key))
        return request

    def refuse_live_id(self, client: bytes, request_id: str) -> None:
        """Raises `InvalidRequest` when the client has a live request of that id."""
        if self.find(client, request_id):
            raise bad_field("id", request_id, "an id that is not among the client's live requests")

    def end(self, request: Request, *, failed: bool) -> None:
        """Removes it; the caller has sent, or now sends, its one terminal message."""
        del self._by_key[request.key]
        mine = self._by_client[request.client]
        del mine[request.id]
        if not mine:
            del self._by_client[request.client]
        self.failed += failed
        self.finished += not failed

    def start(self, request: Request, replica: str, size: int, now: float) -> None:
        """It goes to a replica, in a batch of this size."""
        request.size = size
        request.state, request.replica, request.sticky = State.RUNNING, replica, ""
        request.started = request.started or now

    def come_back(self, request: Request, now: float) -> None:
        """Its replica is lost to it: it waits again, to run alone and without a handle."""
        request.state, request.replica, request.held = State.WAITING, "", None
        request.alone, request.unfit_since = True, now
        request.failovers += 1

    def get(self, key: int) -> Request | None:
        return self._by_key.get(key)

    def find(self, client: bytes, request_id: str) -> Request | None:
        return self._by_client.get(client, {}).get(request_id)

    def of(self, client: bytes) -> list[Request]:
        return list(self._by_client.get(client, {}).values())

    def among(self, keys: Collection[int]) -> list[Request]:
        """Those of `keys` that are live, in the order of arrival."""
        return [self._by_key[key] for key in sorted(keys) if key in self._by_key]

    def clients(self) -> set[bytes]:
        return set(self._by_client)

    def live(self) -> list[Request]:
        """All of them, in the order of arrival."""
        return list(self._by_key.values())

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

    def check(self) -> None:
        """Raises AssertionError unless the books agree with each other."""
        indexed = [request for mine in self._by_client.values() for request in mine.values()]
        assert {r.key for r in indexed} == set(self._by_key) and len(indexed) == len(self._by_key), "index"
        for request in self._by_key.values():
            assert bool(request.replica) == (request.state is State.RUNNING), "replica"
            assert not request.sticky or request.state is State.WAITING, "sticky"
            assert bool(request.shape) or request.state in (State.HELD, State.TOKENIZING), "shape"
        assert all(mine for mine in self._by_client.values()), "empty client entry"
        assert self._next_key - 1 == self.finished + self.failed + len(self._by_key), "each ends once"
