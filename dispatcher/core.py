"""Decisions of the dispatcher, without I/O: an event and the time go in, what to send comes out.

`(peer, message, now) -> [(peer, message, payloads)]`. Events come from `server.py`, which alone touches
sockets and the clock. A request's way down: `_admit`, `_prepare`, `_place`, `_assign` (a `Run` to a
replica: `replica/server.py`). Its tokens' way up: `_relay`, just under it. Side topics hide behind one
verb each: `guards` (may it run), `admission` (may it wait), `turns` and `pace` (how long it will wait, and
run), `requests` (who is live), `buckets` (who goes next), `vacancy` (may it run there), `replicas` (who
serves), `handles` (what they hold), `clients` (who is still there); `exits` (ways out), `orders` and
`holdings` (handles are made and used), `failover` (replicas are lost), `operator`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tinyloop_serve.dispatcher import audit, guards, names, status
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.effects import Send
from tinyloop_serve.dispatcher.handles import Order
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.ledger import lane_bytes, refuse_what_never_fits
from tinyloop_serve.dispatcher.operator import Operator
from tinyloop_serve.dispatcher.replicas import NEVER, Replica
from tinyloop_serve.dispatcher.requests import Request, State, work
from tinyloop_serve.dispatcher.vacancy import Vacancy
from tinyloop_serve.protocol import errors, messages
from tinyloop_serve.protocol.limits import validate


class Core(Operator):
    """One dispatcher's state; not thread-safe. Each public method but `wake_at` and `check` is an event."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        now: float,
        *,
        name: str,
        version: str = "",
        new_mark: Callable[[], str] = names.mark,
    ) -> None:
        super().__init__(config, journal, now, new_mark)
        self.name = name
        self.version = version
        self.started = now
        self._next_beat = now
        self._ripe_at = NEVER  # when the next call may start, as things are

    # ------------------------------------------------------------------ events

    def client_says(
        self, client: bytes, tenant: str, message: messages.ToDispatcher, now: float
    ) -> list[Send]:
        """`tenant` is whose the connection is; what the client writes has no say in it."""
        if not self.clients.saw(client, tenant, now):  # another's connection, by the same routing id
            self._forget(client, "client_gone", now)
            self.clients.saw(client, tenant, now)
        try:
            validate(message)
        except errors.TinyLoopError as error:
            self._refuse(client, getattr(message, "id", ""), error)
            return self._decide(now)
        match message:
            case messages.Generate():
                self._admit(client, tenant, message, now)
            case messages.Cancel():
                self._cancel(self.requests.find(client, message.id), now)
            case messages.Ping():
                self.clients.lease(client, message.lease_ms)
                self._out.append(Send(client, messages.Pong(message.n)))
            case messages.GetStatus():
                self._out.append(Send(client, status.snapshot(self, message.id, now)))
            case messages.CreateHandle():
                self._create(client, tenant, message, now)
            case messages.RenewHandle():
                self._renew(client, tenant, message, now)
            case messages.DropHandle():
                self._drop(client, tenant, message, now)
            case messages.ListHandles():
                self._list(client, tenant, message, now)
            case messages.Control():
                self._control(client, tenant, message, now)
            case messages.Goodbye():
                self._forget(client, "client_gone", now)
        return self._decide(now)

    def replica_says(
        self, endpoint: str, message: messages.FromReplica, payloads: tuple[bytes, ...], now: float
    ) -> list[Send]:
        if endpoint not in self.replicas:  # its last words after it was detached
            return []
        self.replicas.saw(endpoint, now)
        match message:
            case messages.Step():
                self._relay(self.replicas[endpoint], message, payloads, now)
            case messages.Pong():
                self._life_sign(self.replicas[endpoint], message, now)
            case messages.Ready():
                self._join(endpoint, message, now)
            case messages.Built():
                self._built(endpoint, message, now)
            case messages.Calibrated():
                self.replicas[endpoint].calibration = message.calibration
            case messages.Goodbye():
                self._lose(endpoint, "it said goodbye", now, blame=False)
        return self._decide(now)

    def tokenized(self, key: int, result: bytes | errors.TinyLoopError, now: float) -> list[Send]:
        """Answer to `Tokenize`: the text as u32 little-endian, or why there is none."""
        subject = self._texts.pop(key, None)
        if isinstance(subject, Order):
            if subject.job == key and self.handles.orders.get(subject.held.name) is subject:
                self._order_spelled(subject, result)
        elif subject is not None and subject.job == key and self.requests.get(subject.key) is subject:
            self._spelled(subject, result, now)
        return self._decide(now)  # else it ended meanwhile, or is made anew for another model

    def tick(self, now: float) -> list[Send]:
        """Time has passed; `wake_at` says when the next tick is due, more do no harm."""
        for request in self.requests.expired(now):
            late = f"the deadline of {request.asked.deadline_ms} ms passed while {request.state.value}"
            self._fail(request, errors.DeadlineExceeded(late, field="deadline_ms"), now)
        self._loosen(now)
        if (late_s := now - self._next_beat) >= 0:
            self._next_beat = now + self._config.heartbeat_ms / 1000
            self._beat(now, late_s)
        return self._decide(now)

    def wake_at(self) -> float:
        """When the next tick is due, seconds."""
        loose_at = self._loose_at[0][0] if self._loose_at else NEVER
        return min(self._ripe_at, self.requests.next_deadline(), loose_at, self._next_beat)

    def _decide(self, now: float) -> list[Send]:
        """The end of every event: calls that can start do, and all that was said goes out."""
        if self._stirred or now >= self._ripe_at:
            self._assign(now)
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------ a request's way down

    def _admit(self, client: bytes, tenant: str, asked: messages.Generate, now: float) -> None:
        rights, model = self._config.tenants.of(tenant), self.replicas.model
        loops = asked.sampling.loops or (model.loops if model else 1)
        cost = work(asked, loops)
        try:
            guards.enter(self.draining, self.replicas, self._config)
            self._refuse_taken_id(client, asked.id)
            self.pace.refuse_never(asked.deadline_ms, loops, cost, now)
            self.admission.enter(rights, *self._forecast(tenant, asked, loops, cost, now), asked.deadline_ms)
        except errors.TinyLoopError as error:
            self._refuse(client, asked.id, error)
        else:
            priority = min(asked.priority, rights.max_priority)
            self._prepare(self.requests.admit(client, tenant, asked, priority, cost, now), now)

    def _forecast(
        self, tenant: str, asked: messages.Generate, loops: int, cost: float, now: float
    ) -> tuple[float, float]:
        """How long it will wait, and then run. Nothing is foretold where nobody has to wait."""
        if self.replicas.idle():
            return 0.0, 0.0
        single = asked.method != "plain" or bool(asked.handle)
        shape = self.buckets.shape_of(replace(asked.sampling, loops=loops), asked.max_tokens, single=single)
        run_s = self.pace.likely_s(loops, self.buckets.company(shape), cost, now)
        return self.buckets.wait_s(shape, tenant), run_s

    def _prepare(self, request: Request, now: float) -> None:
        """Held until the model and its handle are known; then texts are turned into tokens, off the loop."""
        if self.replicas.model is None:
            return
        asked = request.asked
        try:
            model = self.replicas.models.suitable(asked)
        except errors.TinyLoopError as error:
            self._fail(request, error, now)
            return
        request.model = model.fingerprint
        held = self.handles.find(asked.handle, request.tenant)
        if asked.handle and not held and not asked.recipe:
            if not self._learning(now):
                self._fail(request, self.handles.lost(asked.handle, request.tenant), now)
            return
        recipe = held.recipe if held else asked.recipe
        request.held = held
        request.basis = recipe and replace(recipe, loops=recipe.loops or model.loops)
        request.pieces = [] if recipe is None else [recipe.prompt_text or recipe.prompt_tokens or b""]
        request.pieces.append(asked.prompt_text or asked.prompt_tokens or b"")
        self._spell(request, now)

    def _spell(self, request: Request, now: float) -> None:
        """Its next text goes to the tokenizer; without any its prompt is whole."""
        for index, piece in enumerate(request.pieces):
            if isinstance(piece, str):
                request.state = State.TOKENIZING
                request.job = self._tokenize(request, piece, bos=index == 0)
                return
        self._place(request, b"".join(each for each in request.pieces if isinstance(each, bytes)), now)

    def _spelled(self, request: Request, result: bytes | errors.TinyLoopError, now: float) -> None:
        request.job = 0
        if isinstance(result, bytes):
            texts = (index for index, piece in enumerate(request.pieces) if isinstance(piece, str))
            request.pieces[next(texts)] = result
            self._spell(request, now)
        else:
            self._fail(request, result, now)

    def _place(self, request: Request, prompt: bytes, now: float) -> None:
        """Into its bucket, if the model can run it at all."""
        asked, model, request.prompt = request.asked, self.replicas.models.known(request.model), prompt
        try:
            sampling = guards.check(asked, prompt, model, self._config)
            if request.basis is not None:
                guards.check_handle(asked, request.basis.kind, request.basis, sampling)
        except errors.TinyLoopError as error:
            self._fail(request, error, now)
            return
        try:
            refuse_what_never_fits(self.replicas.budgets(request.model), sampling, request.positions)
        except errors.LimitExceeded as error:
            if self._learning(now):  # one with more memory may have yet to announce itself
                request.state = State.HELD
            else:
                self._fail(request, error, now)
            return
        self._choose_handle(request, sampling, now)
        single = request.alone or asked.method != "plain" or request.held is not None
        request.state, request.unfit_since = State.WAITING, now
        request.shape = self.buckets.shape_of(sampling, asked.max_tokens, single=single)
        self.buckets.put(request)
        self._stirred = True

    def _assign(self, now: float) -> None:
        """While a replica has its credit and a bucket is ripe that it has room for: one Run."""
        while any([self._give(replica, now) for replica in self.replicas.idle()]):
            pass
        self._build_waiting()
        self._ripe_at = self.buckets.ripe_at(after=now) if self.replicas.idle() else NEVER
        self._stirred = False

    def _give(self, replica: Replica, now: float) -> bool:
        vacancy = self.vacancy(replica, now)
        call = self.buckets.take(now, vacancy)
        for request, needed_s in vacancy.late.values():
            self._fail_late(request, needed_s, now)
        if call is None:
            return False
        sampling, budget = call.shape.sampling, replica.ledger.budget
        caches = {each.key: lane_bytes(budget, sampling, each.positions) for each in call.lanes}
        run = self.replicas.spend(replica, call.shape, caches, now)
        lanes = []
        for request in call.lanes:
            self.requests.start(request, replica.endpoint, call.batch_size, now)
            self.admission.started(request.tenant)
            request.uses = self.handles.use(request.held, replica.endpoint, now)
            lanes.append(request.lane(request.uses))
        self.metrics.ran(call.lanes, now)
        message = messages.Run(run, sampling, tuple(lanes), call.batch_size)
        self._out.append(Send(replica.endpoint, message))
        for request in call.lanes:
            self._order_again(request, now)
        return True

    def vacancy(self, replica: Replica, now: float) -> Vacancy:
        return Vacancy(replica, self._config.tenants, self.admission, self.buckets, self.pace, now)

    # ------------------------------------------------------------------ its tokens' way up

    def _relay(self, replica: Replica, step: messages.Step, payloads: tuple[bytes, ...], now: float) -> None:
        """Forwards payloads undecoded, one Send per client; those of requests that have ended are dropped."""
        replica.moved_at = now
        if step.run != replica.run or not step.run:
            return  # of a run that is not out
        endpoint, mail, given, streams = replica.endpoint, dict[bytes, list[bytes]](), 0, 0
        for key, tokens, final, payload in zip(step.keys, step.tokens, step.final, payloads, strict=True):
            if final and key in replica.lanes:
                replica.lanes.remove(key)
                replica.served += 1
            request = self.requests.get(key)
            if request is None or request.replica != endpoint:
                continue
            mail.setdefault(request.client, []).append(payload)
            if tokens:
                given, streams = given + tokens, streams + 1
                if not request.first_at:
                    request.first_at = now
                    self.metrics.began(request, now)
                request.delivered += tokens
            if final:
                self._answered(request, payload, now)
            else:
                request.payloads.append(payload)  # what it would go on after
        if given:
            replica.tokens += given
            self.metrics.stepped(given, streams, now - replica.stepped_at if replica.stepped_at else None)
            replica.stepped_at = now
        self._out += [Send(client, None, tuple(bodies)) for client, bodies in mail.items()]
        if step.idle:
            self._run_over(replica, now)

    def _run_over(self, replica: Replica, now: float) -> None:
        """Its credit is back."""
        shape, unanswered = self.replicas.restore(replica, now)
        self.buckets.ended(shape, now - replica.began, now)
        for request in self.requests.among(unanswered):
            self._fail(request, errors.EngineFailed("the replica ended the run without an answer"), now)
        self._stirred = True

    # ------------------------------------------------------------------ events off the main road

    def client_garbled(
        self, client: bytes, request_id: str, error: errors.TinyLoopError, now: float
    ) -> list[Send]:
        """It sent what cannot be decoded; `request_id` is "" where that could not be read either."""
        self._refuse(client, request_id, error)
        return self._decide(now)

    def client_gone(self, client: bytes, now: float) -> list[Send]:
        """It cannot be reached: nothing is sent to it any more."""
        self._forget(client, "client_gone", now)
        return self._decide(now)

    def client_slow(self, client: bytes, now: float) -> list[Send]:
        """More is queued for it than a client may have: its streams end here."""
        for request in self.requests.of(client):
            self._fail(request, errors.TransportError("the client reads too slowly"), now)
        return self._decide(now)

    def replica_connected(self, endpoint: str) -> list[Send]:
        return [Send(endpoint, messages.Hello(self.name))] if endpoint in self.replicas else []

    def replica_gone(self, endpoint: str, why: str, now: float) -> list[Send]:
        if endpoint in self.replicas:
            self._lose(endpoint, why, now)
        return self._decide(now)

    def stop(self, now: float) -> list[Send]:
        """The end: what is still live fails, replicas are told."""
        self.draining = True
        stopped = errors.Unavailable("the dispatcher was stopped", retry_after_s=guards.RETRY_S)
        for request in self.requests.live():
            self._fail(request, stopped, now)
        for order in list(self.handles.orders.values()):
            self._withdraw(order)
            self._refuse_order(order, stopped)
        self._out += [Send(each.endpoint, messages.Goodbye()) for each in self.replicas if each.alive]
        return self._decide(now)

    def _life_sign(self, replica: Replica, pong: messages.Pong, now: float) -> None:
        if self.replicas.pong(replica, pong, now):
            who = {"endpoint": replica.endpoint, "replica": replica.name}
            self._journal.event("replica_health", **who, health=replica.health)
            if not replica.in_rotation:
                self._unstick(replica.endpoint)
            self._stirred = True

    def _again(self, now: float) -> None:
        for request in self.requests.live():
            if request.state is State.HELD:
                self._prepare(request, now)
        self._ask_again(now)

    def check(self, now: float) -> None:
        """Raises AssertionError unless all books agree; tests call it after every event."""
        audit.check(self, now)
        assert not self._out, "everything that was said went out"
