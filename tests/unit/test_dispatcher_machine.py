"""Random histories of everything that can happen to a dispatcher: clients of two tenants that ask, cancel,
make handles and vanish; replicas that join, step, build, evict, fall ill, die and come back; operators that
drain, attach, detach and change the model; a dispatcher that is itself restarted; time that passes.

A fake replica's tokens are a function of model, prompt, seed and position, so what a client has received can
be compared with an undisturbed run. Checked after each event: no request has had more than one terminal;
tokens arrive as 0, 1, 2 ... without gap or repetition, and are the right ones; nothing was sent to a client
that left, and nothing is decoded for it; a replica had its credit when it got a Run, was in rotation, has the
memory for it and holds what the books say, to the byte; no handle serves another tenant; a tenant's limits
and every deadline are kept; within bucket and tenant the first comes first; the books agree (`Core.check`).
At the end of every history each request has had exactly one terminal and no handle is left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.core import Core
from tinyloop_serve.dispatcher.effects import Attach, Detach, Load, Reset, Send, Tokenize
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.protocol.codec import TO_CLIENT, tokens_from_bytes, tokens_to_bytes
from tinyloop_serve.protocol.errors import InvalidRequest
from tinyloop_serve.protocol.messages import (
    VERSION,
    Budget,
    Build,
    Built,
    CacheCost,
    Calibrated,
    Calibration,
    Cancel,
    CancelLanes,
    Control,
    Controlled,
    CreateHandle,
    Done,
    Drop,
    DropHandle,
    Failed,
    Generate,
    Goodbye,
    Handle,
    Handles,
    HeldHandle,
    Hello,
    Lane,
    ListHandles,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    Recipe,
    RenewHandle,
    Run,
    Sampling,
    Step,
    Tokens,
)

ENDPOINTS = ("ipc:///x/r0", "ipc:///x/r1", "ipc:///x/r2")  # the last one is attached at run time, if at all
TENANT_OF = {b"alice": "local", b"bob": "guest", b"carol": "guest"}
CLIENTS = tuple(TENANT_OF)
IDS = ("q1", "q2", "q3", "q4", "q5")
MAX_HANDLES = 2
GUESTS_RUN = 2
MODELS = [
    ModelInfo("demo", letter * 64, vocab_size=100, loops=4, max_loops=8, max_seq_len=64) for letter in "ab"
]
COSTS = {mode: CacheCost(fixed=1, per_loop=1) for mode in ("fp16", "int8")}
BUDGETS = {
    ENDPOINTS[0]: Budget(10_000, 0, 200, 10_000, MAX_HANDLES, COSTS),  # two short lanes, or one with beams
    ENDPOINTS[1]: Budget(10_000, 0, 500, 10_000, MAX_HANDLES, COSTS),
    ENDPOINTS[2]: None,
}
PREFIX, LONGER = tokens_to_bytes([1, 2]), tokens_to_bytes([1, 2, 3])
RECIPES = st.builds(
    Recipe,
    kind=st.sampled_from(["prefix", "resume", "scaffold"]),
    prompt_tokens=st.sampled_from([PREFIX, LONGER]),
    loops=st.sampled_from([0, 4, 2]),
).flatmap(lambda made: st.sampled_from([made, made, replace(made, prompt_tokens=None, prompt_text="x")]))
SAMPLINGS = [Sampling()] * 5 + [Sampling(loops=2), Sampling(beam_size=2), Sampling(loops=9)]
REQUESTS = st.builds(
    Generate,
    id=st.sampled_from(IDS),
    prompt_tokens=st.sampled_from([LONGER, tokens_to_bytes([4, 5])]),
    sampling=st.sampled_from(SAMPLINGS),
    max_tokens=st.sampled_from([1, 3, 3, 5, 40]),
    seed=st.integers(0, 2),
    stream=st.sampled_from([True, True, True, False]),
    deadline_ms=st.sampled_from([0, 0, 0, 5, 2000]),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    method=st.sampled_from(["plain", "plain", "plain", "speculative"]),
).flatmap(lambda asked: st.sampled_from([asked, asked, replace(asked, prompt_tokens=None, prompt_text="x")]))
CONFIG = load(
    {
        "front": "ipc:///x/f",
        "replicas": list(ENDPOINTS[:2]),
        "batch_sizes": [2, 3],
        "max_wait_ms": 10,
        "max_tokens_bands": [4, 128],
        "max_waiting": 6,
        "replica_wait_ms": 3000,
        "stall_ms": 20_000,
        "poison_losses": 3,
        "max_lease_ms": 5000,
        "tenants": {"guest": {"max_running": GUESTS_RUN, "max_handles": 3, "max_priority": 0}},
    }
)
Open = tuple[bytes, str]


def answer(model: str, prompt: bytes, seed: int, count: int) -> list[int]:
    """What an undisturbed run gives."""
    start = ord(model[0]) + sum(prompt) * 7 + seed * 13
    return [(start + 31 * position) % 90 for position in range(count)]


def cache_bytes(sampling: Sampling, prompt: bytes, max_tokens: int) -> int:
    """What the decode cache of a request takes."""
    rounded = -(-(len(prompt) // 4 + max_tokens) // 16) * 16
    sets = 2 * sampling.beam_size if sampling.beam_size > 1 else 1
    return rounded * (1 + sampling.loops) * sets


@dataclass
class FakeReplica:
    """What is inside one replica process."""

    endpoint: str
    pid: int = 1
    model: ModelInfo = MODELS[0]
    connected: bool = False  # in a conversation with the dispatcher
    linked: bool = True  # the dispatcher has a link to it
    announced: int = 0  # pid that the dispatcher knows
    leaving: bool = False  # it is to be detached
    health: str = "ok"
    run: Run | None = None
    lanes: dict[int, Lane] = field(default_factory=dict)  # still to be answered
    made: dict[int, int] = field(default_factory=dict)  # tokens of each so far
    cancelled: set[int] = field(default_factory=set)
    inbox: list[Build | Drop] = field(default_factory=list)
    store: dict[str, Build] = field(default_factory=dict)  # least recently used first

    @property
    def taken(self) -> int:
        """Bytes of its decode caches."""
        lanes = self.run.lanes if self.run else ()
        return sum(cache_bytes(self.run.sampling, lane.prompt, lane.max_tokens) for lane in lanes if self.run)

    def idle_again(self) -> None:
        """What it was doing is void."""
        self.run, self.lanes, self.made, self.cancelled, self.inbox = None, {}, {}, set(), []

    def die(self) -> None:
        """The process ends; the next one remembers nothing."""
        self.idle_again()
        self.pid, self.store, self.connected, self.health = self.pid + 1, {}, False, "ok"

    def ready(self) -> Ready:
        held = tuple(HeldHandle(build, 10) for build in self.store.values())
        name, budget = self.endpoint[-2:], BUDGETS[self.endpoint]
        return Ready(name, self.pid, "cpu", self.model, "{}", budget=budget, handles=held, health=self.health)

    def work_off(self) -> Built | None:
        """The first of what waits in the inbox."""
        match self.inbox.pop(0):
            case Drop(handles=names):
                for name in names:
                    self.store.pop(name, None)
                return None
            case Build() as build:
                self.store.pop(build.handle, None)
                evicted = tuple(self.store)[: max(0, len(self.store) - MAX_HANDLES + 1)]
                for name in evicted:
                    del self.store[name]
                self.store[build.handle] = build
                return Built(build.handle, 10, evicted)


upset = precondition(lambda self: self.calm >= 3)  # else so much breaks that little ever happens


class Dispatcher(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.source = 100.0, ""
        self.new_mark = map("h{:03}".format, itertools.count()).__next__
        self.core = self.new_core()
        self.replicas = {endpoint: FakeReplica(endpoint) for endpoint in ENDPOINTS}
        self.replicas[ENDPOINTS[2]].linked = False
        self.draining: set[str] = set()  # endpoints
        self.texts: dict[int, str] = {}  # jobs at the tokenizer
        self.open: dict[Open, Any] = {}  # what is without a terminal so far
        self.got: dict[Open, list[int]] = {}  # tokens of each
        self.sources: dict[Open, set[str]] = {}  # models of each one's tokens
        self.prompts: dict[Open, bytes] = {}  # as a replica got it
        self.owner: dict[int, Open] = {}  # key -> whose request it is
        self.names: dict[str, tuple[str, bool]] = {}  # handle -> tenant, shared
        self.due: dict[Open, float] = {}  # deadlines
        self.runs: list[Run] = []  # of this dispatcher
        self.calls = 0
        self.calm = 3  # steps since something broke

    def new_core(self) -> Core:
        return Core(CONFIG, Journal(lambda line: None), self.now, name="d", new_mark=self.new_mark)

    # -------------------------------------------------------------- clients

    @initialize(endpoints=st.sampled_from([ENDPOINTS[:2], ENDPOINTS[:2], ENDPOINTS[:1], ()]))
    def begin(self, endpoints: tuple[str, ...]) -> None:
        for endpoint in endpoints:
            self.join(endpoint)

    @rule(client=st.sampled_from(CLIENTS), requests=st.lists(REQUESTS, min_size=1, max_size=3))
    def ask(self, client: bytes, requests: list[Generate]) -> None:
        for asked in requests:
            self.send(client, asked)

    @rule(client=st.sampled_from(CLIENTS), asked=REQUESTS, recipe=st.none() | RECIPES, data=st.data())
    def ask_with_a_handle(
        self, client: bytes, asked: Generate, recipe: Recipe | None, data: st.DataObject
    ) -> None:
        """Mostly in a way that the handle allows."""
        name = self.some_handle(data)
        if (held := self.core.handles.get(name)) and data.draw(st.integers(0, 3)):
            sampling = replace(asked.sampling, loops=held.recipe.loops, beam_size=1)
            asked = replace(asked, sampling=sampling, method="plain")
            recipe = data.draw(st.sampled_from([None, held.recipe]))
            if held.recipe.kind == "resume":
                asked = replace(asked, prompt_text=None, prompt_tokens=None)
        self.send(client, replace(asked, handle=name, recipe=recipe))

    def some_handle(self, data: st.DataObject) -> str:
        names = sorted(held.name for held in self.core.handles)
        return data.draw(st.sampled_from([*names, *names, *sorted(self.names)[-2:], "gone"]))

    @rule(client=st.sampled_from(CLIENTS), asked=REQUESTS, have=st.integers(1, 3))
    def ask_for_the_rest(self, client: bytes, asked: Generate, have: int) -> None:
        """As after the loss of another dispatcher."""
        model = self.core.replicas.model
        if asked.prompt_tokens and model and have <= asked.max_tokens:
            tokens = answer(model.fingerprint, asked.prompt_tokens, asked.seed, have)
            self.send(client, replace(asked, done=tokens_to_bytes(tokens)), tokens, {model.fingerprint})

    def send(
        self, client: bytes, asked: Any, have: list[int] | None = None, sources: set[str] | None = None
    ) -> None:
        which = (client, asked.id)
        if which in self.open:
            (sent,) = self.core.client_says(client, TENANT_OF[client], asked, self.now)
            assert isinstance(sent.message, Failed) and sent.message.field, "a duplicate changes nothing else"
            return
        self.open[which] = asked
        self.got[which], self.sources[which] = list(have or []), set(sources or ())
        self.prompts.pop(which, None)
        self.due[which] = self.now + (getattr(asked, "deadline_ms", 0) / 1000 or 1e9)
        self.look(self.core.client_says(client, TENANT_OF[client], asked, self.now))

    @rule(client=st.sampled_from(CLIENTS), id=st.sampled_from(IDS))
    def cancel(self, client: bytes, id: str) -> None:
        self.look(self.core.client_says(client, TENANT_OF[client], Cancel(id), self.now))

    @upset
    @rule(client=st.sampled_from(CLIENTS), how=st.sampled_from(["goodbye", "unreachable", "lease"]))
    def leave(self, client: bytes, how: str) -> None:
        self.calm = 0
        sends: list[Send] = []
        if how == "lease":
            self.look(self.core.client_says(client, TENANT_OF[client], Ping(1, lease_ms=100), self.now))
            while client in self.core.clients.known():  # and it says nothing more
                self.wait(0.05, None)
        elif how == "goodbye":
            sends = self.core.client_says(client, TENANT_OF[client], Goodbye(), self.now)
        else:
            sends = self.core.client_gone(client, self.now)
        assert not [send for send in sends if send.peer == client]
        self.open = {which: asked for which, asked in self.open.items() if which[0] != client}
        self.look(sends)
        orders = (order.held for order in self.core.handles.orders.values())
        assert not [held for held in (*self.core.handles, *orders) if held.owner == client]

    @upset
    @rule(client=st.sampled_from(CLIENTS))
    def stop_reading(self, client: bytes) -> None:
        self.calm = 0
        self.look(self.core.client_slow(client, self.now))
        assert not [w for w, asked in self.open.items() if w[0] == client and isinstance(asked, Generate)]

    @rule(client=st.sampled_from(CLIENTS), id=st.sampled_from(IDS), recipe=RECIPES, data=st.data())
    def create_handle(self, client: bytes, id: str, recipe: Recipe, data: st.DataObject) -> None:
        shared, detached = data.draw(st.booleans()), data.draw(st.booleans())
        lease_ms = data.draw(st.sampled_from([500, 5000]))
        self.send(client, CreateHandle(id, recipe, shared, detached, lease_ms))
        if data.draw(st.booleans()):
            self.work_off(fails=False)

    @rule(client=st.sampled_from(CLIENTS), kind=st.sampled_from([RenewHandle, DropHandle]), data=st.data())
    def renew_or_drop(self, client: bytes, kind: type, data: st.DataObject) -> None:
        name = self.some_handle(data)
        self.calls += 1
        self.open[client, f"h{self.calls}"] = asked = kind(f"h{self.calls}", name)
        self.look(self.core.client_says(client, TENANT_OF[client], asked, self.now))

    @rule(client=st.sampled_from(CLIENTS))
    def list_handles(self, client: bytes) -> None:
        (sent,) = self.core.client_says(client, TENANT_OF[client], ListHandles("l"), self.now)
        assert isinstance(sent.message, Handles)
        for info in sent.message.handles:
            tenant, shared = self.names[info.handle]
            assert (tenant == TENANT_OF[client]) == info.mine and (shared or info.mine)

    # -------------------------------------------------------------- the tokenizer and the replicas

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), good=st.sampled_from([True, True, True, False]))
    def tokenise(self, data: st.DataObject, good: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[job]
        result = PREFIX if good else InvalidRequest("no")
        self.look(self.core.tokenized(job, result, self.now))

    @rule()
    def reconnect(self) -> None:
        for endpoint in ENDPOINTS:
            self.join(endpoint)

    def join(self, endpoint: str) -> None:
        """The connection is made; the replica answers the greeting."""
        replica = self.replicas[endpoint]
        if replica.linked and not replica.connected:
            self.look(self.core.replica_connected(endpoint))

    @upset
    @rule(endpoint=st.sampled_from(ENDPOINTS), model=st.sampled_from(MODELS), accepted=st.booleans())
    def restart_replica(self, endpoint: str, model: ModelInfo, accepted: bool) -> None:
        """Its process dies, and a new one is started, maybe with another artifact."""
        self.calm = 0
        if accepted:
            self.command(b"alice", Control("accept", "accept", model.fingerprint))
        replica = self.replicas[endpoint]
        replica.die()
        replica.model = model
        if replica.linked:
            self.look(self.core.replica_gone(endpoint, "killed", self.now))
            self.join(endpoint)

    @upset
    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def greet_again(self, endpoint: str) -> None:
        """The replica's process was replaced behind the same connection."""
        self.calm = 0
        replica = self.replicas[endpoint]
        if replica.linked:
            self.tell(replica, Hello("d"))

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Tokens for some lanes, the end for some; the credit comes back with the last."""
        for replica in self.busy():
            which = [key for key in replica.lanes if data.draw(st.booleans())]
            count = data.draw(st.integers(1, 3))
            self.speak(replica, which, count, gives_up=data.draw(st.integers(0, 15)) == 15)

    @precondition(lambda self: self.over())
    @rule(data=st.data(), endpoint=st.sampled_from(ENDPOINTS))
    def speak_of_what_is_over(self, data: st.DataObject, endpoint: str) -> None:
        """A message that was on its way when its run ended, or its replica was lost."""
        run = data.draw(st.sampled_from(self.over()))
        keys = tuple(lane.key for lane in run.lanes)
        bodies = tuple(TO_CLIENT.encode_body(Done(lane.id, "eos")) for lane in run.lanes)
        count = len(keys)
        step = Step(run.run, keys, (0,) * count, (True,) * count, idle=data.draw(st.booleans()))
        assert self.core.replica_says(endpoint, step, bodies, self.now) == []

    def over(self) -> list[Run]:
        going_on = [replica.run for replica in self.replicas.values()]
        return [run for run in self.runs[-6:] if run not in going_on]

    @rule()
    def finish(self) -> None:
        for replica in self.busy():
            self.speak(replica, list(replica.lanes), 99, gives_up=False)

    def busy(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas.values() if replica.run]

    @rule(fails=st.sampled_from([False, False, False, True]))
    def work_off(self, fails: bool) -> None:
        """What the replicas have in their inboxes, which wait behind no run here."""
        for replica in self.replicas.values():
            while replica.connected and replica.inbox:
                if built := replica.work_off():
                    if fails:
                        del replica.store[built.handle]
                        built = replace(built, bytes=0, code="engine", message="out of memory")
                    self.look(self.core.replica_says(replica.endpoint, built, (), self.now))

    @upset
    @rule(data=st.data(), how=st.sampled_from(["goodbye", "killed", "killed", "cut off", "hung"]))
    def lose(self, data: st.DataObject, how: str) -> None:
        self.calm = 0
        linked = [replica for replica in self.replicas.values() if replica.linked]
        if not linked:
            return
        replica = data.draw(st.sampled_from(self.busy() or linked))
        if how == "hung":
            self.wait(3.0, replica.endpoint)
            return
        if how == "goodbye":
            sends = self.core.replica_says(replica.endpoint, Goodbye(), (), self.now)
        else:
            if how == "killed":
                replica.die()
            sends = self.core.replica_gone(replica.endpoint, how, self.now)
        assert Send(replica.endpoint, Reset()) in sends
        self.look(sends)
        if data.draw(st.booleans()):
            self.join(replica.endpoint)

    @upset
    @rule(endpoint=st.sampled_from(ENDPOINTS), health=st.sampled_from(["ok", "3 runs in a row failed"]))
    def fall_ill_or_recover(self, endpoint: str, health: str) -> None:
        self.calm = 0
        replica = self.replicas[endpoint]
        if replica.connected:
            replica.health = health
            self.look(self.core.replica_says(endpoint, Pong(0, health=health), (), self.now))
            told = Calibrated(Calibration(enabled=True, speedup=1.4))
            self.look(self.core.replica_says(endpoint, told, (), self.now))

    # -------------------------------------------------------------- operators, time, the dispatcher itself

    @upset
    @rule(
        client=st.sampled_from([b"alice", b"alice", b"alice", b"bob"]),
        action=st.sampled_from(["attach", "drain", "drain", "resume", "detach", "accept"]),
        endpoint=st.sampled_from(ENDPOINTS),
        within_ms=st.sampled_from([0, 300, 30_000]),
    )
    def order(self, client: bytes, action: Any, endpoint: str, within_ms: int) -> None:
        self.calm = 0
        target = self.replicas[endpoint].model.fingerprint if action == "accept" else endpoint
        self.command(client, Control(action, action, target, within_ms))

    def command(self, client: bytes, order: Control) -> None:
        self.calls += 1
        order = replace(order, id=f"c{self.calls}")
        self.open[client, order.id] = order
        sends = self.core.client_says(client, TENANT_OF[client], order, self.now)
        allowed = [send for send in sends if isinstance(send.message, Controlled)]
        assert not allowed or client == b"alice"
        if allowed and order.action in ("drain", "detach"):
            self.draining.add(order.target)
            self.replicas[order.target].leaving |= order.action == "detach"
        if allowed and order.action == "resume":
            self.draining.discard(order.target)
            self.replicas[order.target].leaving = False
        self.look(sends)

    @rule(
        seconds=st.sampled_from([0.001, 0.010, 0.050, 0.3, 2.0]),
        mute=st.sampled_from([None, None, *ENDPOINTS[:2]]),
    )
    def wait(self, seconds: float, mute: str | None) -> None:
        end, turns = self.now + seconds, 0
        while self.now < end:
            self.now = min(max(self.core.wake_at(), self.now + 0.0001), end)
            sends = self.core.tick(self.now)
            self.look(sends)
            self.answer_pings(sends, mute)
            assert (turns := turns + 1) < 300, "it wakes for nothing"
        late = [which for which in self.open if self.due.get(which, end) < end]
        assert not late, "a deadline ends a request wherever it is"

    @upset
    @rule()
    def restart_dispatcher(self) -> None:
        """Without a word to anybody. Clients notice, reconnect and ask for the rest of each answer."""
        self.calm = 0
        serving = {r.model.fingerprint for r in self.replicas.values() if r.linked}
        if len(serving) > 1:
            return
        self.core = self.new_core()
        self.draining.clear()
        self.texts.clear()
        self.runs.clear()
        open, self.open = self.open, {}
        for replica in self.replicas.values():
            replica.connected = False
            replica.linked = replica.endpoint in ENDPOINTS[:2]
            replica.announced, replica.leaving = 0, False
            replica.idle_again()  # as after any new greeting
            self.join(replica.endpoint)
        for (client, id), asked in open.items():
            if not isinstance(asked, Generate):
                continue
            have, sources = self.got[client, id], self.sources[client, id]
            if sources <= serving:
                again = replace(asked, done=tokens_to_bytes(have) if asked.stream else b"")
                self.send(client, again, have if asked.stream else [], sources)

    def teardown(self) -> None:
        """Everything gets well, and time passes: every request must come to its end."""
        model = self.core.replicas.model or MODELS[0]
        for replica in self.replicas.values():
            if replica.linked and not replica.connected:
                replica.die()
                replica.model = model
                self.join(replica.endpoint)
            if replica.connected and replica.health != "ok":
                self.fall_ill_or_recover(replica.endpoint, "ok")
            if replica.endpoint in self.draining and replica.linked:
                self.command(b"alice", Control("resume", "resume", replica.endpoint))
        for turn in range(400):
            for job in list(self.texts):
                del self.texts[job]
                self.look(self.core.tokenized(job, PREFIX, self.now))
            self.work_off(fails=False)
            self.finish()
            self.wait(0.010 if turn < 100 else 0.050, None)
            self.the_books_agree()
            if not self.open and not self.core.handles.orders:
                break
        left = (self.open, self.core.requests.live(), self.core.handles.orders)
        assert left == ({}, [], {}), f"everything comes to an end: {left}"
        for client in CLIENTS:
            self.look(self.core.client_gone(client, self.now))
        assert not [held for held in self.core.handles if held.owner], "all owners have left"
        for _ in range(7):
            self.wait(1.0, None)
        self.work_off(fails=False)
        assert not len(self.core.handles), "leases have run out"
        self.the_books_agree()

    # -------------------------------------------------------------- what must hold

    def answer_pings(self, sends: list[Send], mute: str | None) -> None:
        for peer, message, _ in sends:
            if isinstance(message, Ping) and isinstance(peer, str) and peer != mute:
                if self.replicas[peer].connected:
                    pong = Pong(message.n, health=self.replicas[peer].health)
                    self.look(self.core.replica_says(peer, pong, (), self.now))

    def speak(self, replica: FakeReplica, keys: list[int], count: int, gives_up: bool) -> None:
        """`count` tokens more for each of `keys`; those that have enough, or were cancelled, end."""
        assert replica.run
        parts: list[tuple[int, int, bool, bytes]] = []
        for key in keys:
            lane = replica.lanes[key]
            made, fingerprint = replica.made[key], replica.model.fingerprint
            until = made if key in replica.cancelled else min(made + count, lane.max_tokens)
            ends = key in replica.cancelled or until == lane.max_tokens
            if until > made and (lane.stream or ends):
                start = made if lane.stream else len(lane.done) // 4
                tokens = answer(fingerprint, lane.prompt, lane.seed, until)[start:]
                body = TO_CLIENT.encode_body(Tokens(lane.id, start, tokens_to_bytes(tokens)))
                parts.append((key, len(tokens), False, body))
            replica.made[key] = until
            if ends:
                why = "cancelled" if key in replica.cancelled else "max_tokens"
                parts.append((key, 0, True, TO_CLIENT.encode_body(Done(lane.id, why))))
                del replica.lanes[key]
        idle = not replica.lanes or gives_up
        columns: Any = list(zip(*parts, strict=True)) or [(), (), (), ()]
        step = Step(replica.run.run, *columns[:3], idle)
        if idle:
            replica.run, replica.lanes, replica.made, replica.cancelled = None, {}, {}, set()
        self.source = replica.model.fingerprint
        self.look(self.core.replica_says(replica.endpoint, step, columns[3], self.now))

    def look(self, sends: list[Send]) -> None:
        for peer, message, payloads in sends:
            if isinstance(peer, bytes):
                self.hear(peer, message, payloads)
            elif isinstance(message, Tokenize):
                self.texts[message.key] = message.text
            elif not isinstance(message, Load):
                self.tell(self.replicas[peer], message)

    def hear(self, client: bytes, message: Any, payloads: tuple[bytes, ...]) -> None:
        """What a client is told."""
        if isinstance(message, Failed) and not message.id:
            self.open = {which: asked for which, asked in self.open.items() if which[0] != client}
        elif isinstance(message, Done | Failed | Handle | Controlled):
            self.terminal((client, message.id))
            if isinstance(message, Handle):
                assert self.names[message.info.handle][0] == TENANT_OF[client], "a handle of its own"
        for payload in payloads:
            body = TO_CLIENT.decode([VERSION, payload])
            assert isinstance(body, Tokens | Done)
            which = (client, body.id)
            assert which in self.open, "nothing after the terminal"
            if isinstance(body, Tokens):
                assert body.seq == len(self.got[which]), "no gap and no repetition"
                self.got[which] += tokens_from_bytes(body.tokens)
                self.sources[which].add(self.source)
                (source,) = self.sources[which]
                seed, count = self.open[which].seed, len(self.got[which])
                assert self.got[which] == answer(source, self.prompts[which], seed, count), "the right ones"
            else:
                full = len(self.got[which]) == self.open[which].max_tokens
                assert body.stop_reason == "cancelled" or full, "all of them"
                self.terminal(which)

    def terminal(self, which: Open) -> None:
        assert which in self.open, "exactly one terminal"
        del self.open[which]

    def tell(self, replica: FakeReplica, message: Any) -> None:
        """What a replica is told."""
        assert replica.linked or isinstance(message, Attach)
        match message:
            case Hello():
                replica.idle_again()
                replica.connected = True
                fresh, replica.announced = replica.announced != replica.pid, replica.pid
                if fresh and not replica.leaving and self.core.replicas.models.would_admit(replica.model):
                    self.draining.discard(replica.endpoint)  # the drained process has gone
                self.look(self.core.replica_says(replica.endpoint, replica.ready(), (), self.now))
            case Run():
                self.take(replica, message)
            case CancelLanes():
                assert set(message.keys) <= set(self.owner), "only what was sent is cancelled"
                replica.cancelled |= set(message.keys) & set(replica.lanes)
            case Build() | Drop():
                assert replica.connected
                if isinstance(message, Build):  # a lost one may be built again for whoever has its recipe
                    tenant, _ = self.names.setdefault(message.handle, (message.tenant, message.shared))
                    assert message.tenant == tenant, "no name becomes another tenant's"
                    self.names[message.handle] = (message.tenant, message.shared)
                replica.inbox.append(message)
                if not any(isinstance(each, Build) for each in replica.inbox):
                    replica.work_off()
            case Reset() | Goodbye():
                replica.idle_again()
                replica.connected = False
            case Attach():
                replica.linked = True
            case Detach():
                replica.linked = replica.connected = replica.leaving = False
                replica.announced = 0
                self.draining.discard(replica.endpoint)

    def take(self, replica: FakeReplica, run: Run) -> None:
        assert replica.connected and replica.run is None, "a Run needs the credit"
        assert replica.health == "ok" and replica.endpoint not in self.draining, "in rotation"
        assert len(run.lanes) == 1 if run.batch_size == 1 else 2 <= len(run.lanes) <= run.batch_size
        assert run.batch_size in (1, 2, 3) and (run.batch_size == 1 or run.sampling.beam_size == 1)
        for lane in run.lanes:
            request = self.core.requests.get(lane.key)
            assert request and request.id == lane.id
            which = self.owner[lane.key] = (request.client, request.id)
            have = tokens_from_bytes(lane.done)
            if request.asked.stream:
                assert have == self.got[which], "it goes on where its client is"
            fingerprint = replica.model.fingerprint
            assert have == answer(fingerprint, lane.prompt, lane.seed, len(have)), "and with the same model"
            self.prompts[which] = lane.prompt
            if lane.handle:
                tenant, shared = self.names.get(lane.handle, (request.tenant, False))
                assert shared or tenant == request.tenant, "no handle of another tenant"
                assert run.batch_size == 1
                if build := replica.store.get(lane.handle):
                    assert lane.prompt.startswith(build.prompt)
                    replica.store[lane.handle] = replica.store.pop(lane.handle)
            self.first_come(replica, lane)
        replica.run = run
        self.runs.append(run)
        budget = BUDGETS[replica.endpoint]
        assert budget is None or replica.taken <= budget.cache_bytes, "it has the memory"
        replica.lanes = {lane.key: lane for lane in run.lanes}
        replica.made = {lane.key: len(lane.done) // 4 for lane in run.lanes}

    def first_come(self, replica: FakeReplica, lane: Lane) -> None:
        """Nothing that came earlier, or had begun, and could run there, was passed over."""
        mine = self.core.requests.get(lane.key)
        assert mine and mine.shape
        budget = BUDGETS[replica.endpoint]
        for bucket in self.core.buckets:
            for other in bucket:
                same = (other.shape, other.tenant, other.priority) == (mine.shape, mine.tenant, mine.priority)
                suits = other.model == mine.model and other.sticky in ("", replica.endpoint)
                earlier = (not other.begun, other.key) < (not mine.begun, mine.key)
                if same and suits and earlier:
                    size = cache_bytes(bucket.shape.sampling, other.prompt, other.asked.max_tokens)
                    assert budget and size > budget.cache_bytes, "first come, first served"

    @invariant()
    def the_books_agree(self) -> None:
        self.calm += 1
        self.core.check(self.now)
        live = {(request.client, request.id) for request in self.core.requests.live()}
        assert live == {which for which, asked in self.open.items() if isinstance(asked, Generate)}
        guests = [r for r in self.core.requests.live() if r.tenant == "guest"]
        assert sum(bool(request.replica) for request in guests) <= GUESTS_RUN
        assert all(request.priority <= 0 for request in guests)
        for replica in self.replicas.values():
            if not replica.connected:
                continue
            for key in set(replica.lanes) - replica.cancelled:
                request = self.core.requests.get(key)
                assert request and not request.cancelled, "nothing is decoded for nobody"
                assert request.replica == replica.endpoint, "nor twice"
            ledger = self.core.replicas[replica.endpoint].ledger
            assert ledger.cache_bytes == (replica.taken if ledger.budget else 0), "to the byte"
            if not replica.inbox:
                held = {h.name for h in self.core.handles.held_by(replica.endpoint)}
                assert held == set(replica.store), "the replica holds what the books say"


TestDispatcher = Dispatcher.TestCase
TestDispatcher.settings = settings(max_examples=60, stateful_step_count=60)
