"""Random histories of the dispatcher's core: arrivals, cancels, deadlines, tokenising, steps, losses, clients
that leave. After every event: each request has had at most one terminal, nothing was sent to a client that
left, a replica had its credit when it got a Run, and the books agree (`Core.check`). At the end of every
history each request has had exactly one.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.core import Core
from tinyloop_serve.dispatcher.effects import Reset, Send, Tokenize
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest
from tinyloop_serve.protocol.messages import (
    Cancel,
    CancelLanes,
    Done,
    Failed,
    Generate,
    Goodbye,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    Run,
    Sampling,
    Step,
)

REPLICAS = ("ipc:///x/r0", "ipc:///x/r1")
CLIENTS = (b"alice", b"bob")
IDS = ("q1", "q2", "q3", "q4", "q5", "q6")
MODEL = ModelInfo("demo", "f" * 64, vocab_size=100, loops=4, max_loops=8, max_seq_len=64)
REQUESTS = st.builds(
    Generate,
    id=st.sampled_from(IDS),
    prompt_tokens=st.just(tokens_to_bytes([1, 2])),
    sampling=st.sampled_from(
        [Sampling()] * 4 + [Sampling(loops=2), Sampling(beam_size=2), Sampling(loops=9)]
    ),
    max_tokens=st.sampled_from([8, 8, 8, 40]),
    deadline_ms=st.sampled_from([0, 0, 0, 5, 2000]),
).flatmap(lambda asked: st.sampled_from([asked, replace(asked, prompt_tokens=None, prompt_text="x")]))
CONFIG = load(
    {
        "front": "ipc:///x/f",
        "replicas": list(REPLICAS),
        "batch_sizes": [2, 3],
        "max_wait_ms": 10,
        "max_tokens_bands": [32, 128],
        "max_waiting": 4,
        "replica_wait_ms": 3000,
        "stall_ms": 20_000,
    }
)

Open = tuple[bytes, str]


class FakeReplica:
    def __init__(self) -> None:
        self.connected = False
        self.run: Run | None = None
        self.open: dict[int, Open] = {}  # key -> whose request it is


class Dispatcher(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.core = Core(CONFIG, Journal(lambda line: None), self.now, name="d")
        self.replicas = {endpoint: FakeReplica() for endpoint in REPLICAS}
        self.texts: dict[int, str] = {}  # keys at the tokenizer
        self.unanswered: set[Open] = set()  # requests without a terminal so far
        self.owner: dict[int, Open] = {}

    # -------------------------------------------------------------- what the world does

    @initialize(endpoints=st.sets(st.sampled_from(REPLICAS)))
    def begin(self, endpoints: set[str]) -> None:
        for endpoint in sorted(endpoints):
            self.join(endpoint)

    @rule(client=st.sampled_from(CLIENTS), requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def ask(self, client: bytes, requests: list[Generate]) -> None:
        for asked in requests:
            if (client, asked.id) in self.unanswered:
                (send,) = self.core.client_says(
                    client, "local", asked, self.now
                )  # a duplicate changes nothing else
                assert isinstance(send.message, Failed) and send.message.field == "id"
                continue
            self.unanswered.add((client, asked.id))
            self.look(self.core.client_says(client, "local", asked, self.now))

    @rule(client=st.sampled_from(CLIENTS), id=st.sampled_from(IDS))
    def cancel(self, client: bytes, id: str) -> None:
        self.look(self.core.client_says(client, "local", Cancel(id), self.now))

    @rule(client=st.sampled_from(CLIENTS), how=st.sampled_from(["goodbye", "unreachable"]))
    def leave(self, client: bytes, how: str) -> None:
        if how == "goodbye":
            sends = self.core.client_says(client, "local", Goodbye(), self.now)
        else:
            sends = self.core.client_gone(client, self.now)
        assert not [send for send in sends if send.peer == client]
        self.unanswered = {open for open in self.unanswered if open[0] != client}
        self.look(sends)

    @rule(client=st.sampled_from(CLIENTS))
    def stop_reading(self, client: bytes) -> None:
        self.look(self.core.client_slow(client, self.now))
        assert not [open for open in self.unanswered if open[0] == client]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), good=st.booleans())
    def tokenise(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[key]
        result = tokens_to_bytes([1, 2, 3]) if good else InvalidRequest("no")
        self.look(self.core.tokenized(key, result, self.now))

    @rule(endpoint=st.sampled_from(REPLICAS))
    def join(self, endpoint: str) -> None:
        replica = self.replicas[endpoint]
        if not replica.connected:
            replica.connected = True
            ready = Ready(endpoint[-2:], 1, "cpu", MODEL, "{}")
            self.look(self.core.replica_says(endpoint, ready, (), self.now))

    @rule(endpoint=st.sampled_from(REPLICAS), data=st.data())
    def step(self, endpoint: str, data: st.DataObject) -> None:
        """One token for some lanes, the end for some; the credit comes back with the last, or at once."""
        replica = self.replicas[endpoint]
        if replica.run is None:
            return
        keys = tuple(key for key in replica.open if data.draw(st.booleans()))
        final = tuple(data.draw(st.booleans()) for _ in keys)
        self.speak(endpoint, keys, final, gives_up=data.draw(st.integers(0, 4)) == 0)

    @rule(endpoint=st.sampled_from(REPLICAS), says_goodbye=st.booleans())
    def lose(self, endpoint: str, says_goodbye: bool) -> None:
        if says_goodbye:
            sends = self.core.replica_says(endpoint, Goodbye(), (), self.now)
        else:
            sends = self.core.replica_gone(endpoint, "killed", self.now)
        assert Send(endpoint, Reset()) in sends
        self.look(sends)

    @rule(seconds=st.sampled_from([0.001, 0.010, 0.3, 1.0]), mute=st.sampled_from([None, *REPLICAS]))
    def wait(self, seconds: float, mute: str | None) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(max(self.core.wake_at(), self.now + 0.0001), end)
            sends = self.core.tick(self.now)
            self.look(sends)
            for peer, message, _ in sends:
                if isinstance(message, Ping) and isinstance(peer, str) and peer != mute:
                    if self.replicas[peer].connected:
                        self.look(self.core.replica_says(peer, Pong(message.n), (), self.now))

    def teardown(self) -> None:
        for endpoint in REPLICAS:
            self.join(endpoint)
        for _ in range(100):
            for key in list(self.texts):
                del self.texts[key]
                self.look(self.core.tokenized(key, tokens_to_bytes([1]), self.now))
            for endpoint, replica in self.replicas.items():
                if replica.run:
                    keys = tuple(replica.open)
                    self.speak(endpoint, keys, (True,) * len(keys), gives_up=False)
            self.wait(0.010, None)
        assert not self.unanswered and not self.core.requests.live()

    # -------------------------------------------------------------- what must hold

    def speak(self, endpoint: str, keys: tuple[int, ...], final: tuple[bool, ...], gives_up: bool) -> None:
        replica = self.replicas[endpoint]
        assert replica.run
        payloads = tuple(
            b"%s %d" % (b"final" if f else b"token", k) for k, f in zip(keys, final, strict=True)
        )
        for key, last in zip(keys, final, strict=True):
            if last:
                del replica.open[key]
        idle = not replica.open or gives_up
        step = Step(replica.run.run, keys, tuple(1 for _ in keys), final, idle)
        if idle:
            replica.run, replica.open = None, {}
        self.look(self.core.replica_says(endpoint, step, payloads, self.now))

    def look(self, sends: list[Send]) -> None:
        for peer, message, payloads in sends:
            if isinstance(peer, bytes):
                if isinstance(message, Done | Failed):
                    self.terminal((peer, message.id))
                for payload in payloads:
                    word, key = payload.split()
                    assert self.owner[int(key)] in self.unanswered, "nothing after the terminal"
                    assert self.owner[int(key)][0] == peer
                    if word == b"final":
                        self.terminal(self.owner[int(key)])
            elif isinstance(message, Tokenize):
                self.texts[message.key] = message.text
            elif isinstance(message, Run):
                self.take(peer, message)
            elif isinstance(message, CancelLanes):
                assert set(message.keys) <= set(self.owner), "only what was sent is cancelled"
            elif isinstance(message, Reset):
                self.replicas[peer] = FakeReplica()

    def take(self, endpoint: str, run: Run) -> None:
        replica = self.replicas[endpoint]
        assert replica.connected and replica.run is None, "a Run needs the credit"
        assert len(run.lanes) == 1 if run.batch_size == 1 else 2 <= len(run.lanes) <= run.batch_size
        assert run.batch_size in (1, 2, 3) and (run.batch_size == 1 or run.sampling.beam_size == 1)
        keys = [lane.key for lane in run.lanes]
        assert keys == sorted(keys) and not set(keys) & set(self.owner), "arrival order, never twice"
        for lane in run.lanes:
            request = self.core.requests.get(lane.key)
            assert request and request.id == lane.id
            self.owner[lane.key] = (request.client, request.id)
        replica.run, replica.open = run, {key: self.owner[key] for key in keys}

    def terminal(self, open: Open) -> None:
        assert open in self.unanswered, "exactly one terminal"
        self.unanswered.remove(open)

    @invariant()
    def the_books_agree(self) -> None:
        self.core.check(self.now)
        live = {(request.client, request.id) for request in self.core.requests.live()}
        assert live == self.unanswered


TestDispatcher = Dispatcher.TestCase
TestDispatcher.settings = settings(max_examples=60, stateful_step_count=60)
