"""Handles are made: from a client's `CreateHandle` to the replica that has built it.

Decisions only; the book itself is `handles.py`, and what becomes of a handle then is in `holdings.py`. One
replica builds one handle at a time, so that what waits, waits here.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tinyloop_serve.dispatcher import guards, names
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.effects import TOKENIZER, Send, Tokenize
from tinyloop_serve.dispatcher.exits import Exits
from tinyloop_serve.dispatcher.handles import Held, Order, OrderState
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.replicas import Replica
from tinyloop_serve.dispatcher.requests import Request
from tinyloop_serve.protocol import codec, errors, messages

LEASE_MS = 600_000  # of a handle that is built again and whose own is not known any more


class Orders(Exits):
    def __init__(self, config: Config, journal: Journal, now: float, new_mark: Callable[[], str]) -> None:
        super().__init__(config, journal, now)
        self.draining = False  # nothing new is taken
        self._new_mark = new_mark  # of a handle's name
        self._texts: dict[int, Request | Order] = {}  # what is at the tokenizer, by job
        self._next_job = 1

    def _create(self, client: bytes, tenant: str, asked: messages.CreateHandle, now: float) -> None:
        try:
            guards.enter(self.draining, self.replicas, self._config)
            self._refuse_taken_id(client, asked.id)
            self._refuse_too_many(tenant)
        except errors.TinyLoopError as error:
            self._refuse(client, asked.id, error)
        else:
            held = Held(
                names.name(self._new_mark(), tenant),
                tenant,
                asked.recipe,
                shared=asked.shared,
                detached=asked.detached,
                lease_s=self._lease_s(asked.lease_ms),
                owner=client,
                used=now,
            )
            self._order(Order(held, asked.recipe, client, asked.id, now), now)

    def _order_again(self, request: Request, now: float) -> None:
        """The tenant's own handle that the request named is gone, and its recipe is here: it is built for the
        next one. What other tenants have is of no account: they have no such name."""
        name, recipe = request.asked.handle, request.basis
        if request.asked.recipe is None or recipe is None or not names.belongs(name, request.tenant):
            return
        if self.handles.taken(name):
            return
        try:
            self._refuse_too_many(request.tenant)
        except errors.TinyLoopError:
            return  # the request itself does without
        was = self.handles.once(name)
        held = Held(
            name,
            request.tenant,
            recipe,
            shared=was.shared if was else False,
            detached=was.detached if was else False,
            lease_s=was.lease_s if was else self._lease_s(LEASE_MS),
            owner=request.client,
            used=now,
        )
        self._order(Order(held, recipe, None, "", now), now)

    def _refuse_taken_id(self, client: bytes, request_id: str) -> None:
        self.requests.refuse_live_id(client, request_id)
        if self.handles.ordered(client, request_id):
            raise errors.bad_field("id", request_id, "an id that is not among the client's live requests")

    def _refuse_too_many(self, tenant: str) -> None:
        limit, has = self._config.tenants.of(tenant).max_handles, self.handles.count(tenant)
        if limit and has >= limit:
            message = f"tenant {tenant!r} has {has} handles of at most {limit}; drop one first"
            raise errors.LimitExceeded(message, field="recipe", value=f"{has} handles", accepted=f"{limit}")
        if len(self.handles.orders) >= self._config.max_waiting:
            message = f"{len(self.handles.orders)} handles wait to be built and no more are queued"
            raise errors.Overloaded(message, retry_after_s=1.0)

    def _lease_s(self, lease_ms: int) -> float:
        longest_ms = self._config.max_lease_ms
        return min(lease_ms if lease_ms > 0 else longest_ms, longest_ms) / 1000

    # ------------------------------------------------------------------ from the order to the handle

    def _order(self, order: Order, now: float) -> None:
        self.handles.order(order)
        self._prepare_order(order)

    def _prepare_order(self, order: Order) -> None:
        """Held until the model is known; then its text is turned into tokens."""
        if self.replicas.model is None:
            return
        recipe, order.held.model = order.recipe, self.replicas.model.fingerprint
        if recipe.prompt_text is None:
            self._queue_order(order, recipe.prompt_tokens or b"")
        else:
            order.state = OrderState.TOKENIZING
            order.job = self._tokenize(order, recipe.prompt_text)

    def _tokenize(self, subject: Request | Order, text: str, *, bos: bool = True) -> int:
        """Returns the number of the job; `Core.tokenized` gets the answer."""
        job, self._next_job = self._next_job, self._next_job + 1
        self._texts[job] = subject
        self._out.append(Send(TOKENIZER, Tokenize(job, text, bos)))
        return job

    def _order_spelled(self, order: Order, result: bytes | errors.TinyLoopError) -> None:
        order.job = 0
        if isinstance(result, bytes):
            self._queue_order(order, result)
        else:
            self._refuse_order(order, result)

    def _queue_order(self, order: Order, prompt: bytes) -> None:
        """Its tokens are known: it waits for a replica, if the model and the modes allow it at all."""
        assert self.replicas.model is not None
        asked = order.recipe
        sampling = messages.Sampling(
            asked.loops, cache_mode=asked.cache_mode, cache_window=asked.cache_window
        )
        trial = messages.Generate(order.id, sampling=sampling, max_tokens=1, handle=order.held.name)
        try:
            sampling = guards.check(trial, prompt, self.replicas.model, self._config)
            recipe = replace(asked, prompt_text=None, prompt_tokens=prompt, loops=sampling.loops)
            guards.check_handle(trial, recipe.kind, recipe, sampling)
            self._refuse_where_none_is_held(order)
        except errors.TinyLoopError as error:
            self._refuse_order(order, error)
        else:
            order.held.recipe, order.state = recipe, OrderState.WAITING
            self._stirred = True

    def _refuse_where_none_is_held(self, order: Order) -> None:
        budgets = self.replicas.budgets(order.held.model)
        if budgets and not any(budget is None or budget.max_handles for budget in budgets):
            message = "no replica holds handles: their max_handles is 0"
            raise errors.LimitExceeded(message, field="recipe", value="1 handle", accepted="no handle")

    def _build_waiting(self) -> None:
        """What can be built is."""
        for order in list(self.handles.orders.values()):
            if order.state is OrderState.WAITING and (replica := self._builder(order)):
                order.state, order.replica = OrderState.BUILDING, replica.endpoint
                self.replicas.build(replica, order.held.name)
                self._out.append(Send(replica.endpoint, order.build()))

    def _builder(self, order: Order) -> Replica | None:
        """The replica with the most room; of those, one that is idle."""
        free = [
            replica
            for replica in self.replicas
            if replica.in_rotation and not replica.building and replica.fingerprint == order.held.model
            if replica.ledger.budget is None or replica.ledger.budget.max_handles
        ]
        return min(free, key=lambda replica: (replica.ledger.handles, replica.state == "busy"), default=None)

    def _built(self, endpoint: str, built: messages.Built, now: float) -> None:
        """The replica's answer. What it evicted is gone whether or not it then had success."""
        replica = self.replicas[endpoint]
        self.metrics.built(endpoint, built)
        if built.code == errors.EngineFailed.code:
            who = {"endpoint": endpoint, "replica": replica.name, "handle": built.handle}
            self._journal.event("build_failed", **who, message=built.message)
        for name in built.evicted:
            self._journal.event("handle_evicted", handle=name, replica=replica.name, endpoint=endpoint)
            replica.ledger.release_handle(name)
            if held := self.handles.get(name):
                why = f"it was evicted: replica {replica.name} holds a limited number, the last used ones"
                self.handles.leave(held, endpoint, why, final=True)
        if replica.building == built.handle:
            replica.building, self._stirred = "", True
        order = self.handles.orders.get(built.handle)
        if order is None or order.replica != endpoint:
            if not built.code and not self.handles.holds(endpoint, built.handle):  # nobody wants it any more
                self._out.append(Send(endpoint, messages.Drop((built.handle,))))
        elif built.code:
            failed = messages.Failed(order.id, built.code, built.message)
            self._refuse_order(order, codec.error_from(failed))
        else:
            self.handles.close(order)
            order.held.used = now
            self.handles.keep(order.held, endpoint, built.bytes)
            replica.ledger.reserve_handle(built.handle, built.bytes)
            if order.client is not None:
                info = self._info(order.held, order.held.tenant, now)
                self._out.append(Send(order.client, messages.Handle(order.id, info)))

    def _info(self, held: Held, tenant: str, now: float) -> messages.HandleInfo:
        return held.info(tenant, ", ".join(self.replicas[each].name for each in held.holders), now)

    def _refuse_order(self, order: Order, error: errors.TinyLoopError) -> None:
        self.handles.close(order)
        if order.client is not None:
            self._refuse(order.client, order.id, error)
        else:
            self._journal.event(
                "handle_failed", handle=order.held.name, code=error.code, message=error.message
            )

    def _withdraw(self, order: Order) -> None:
        """Nobody wants it any more, or not there."""
        if order.replica:  # it keeps the order of what it is told
            self._out.append(Send(order.replica, messages.Drop((order.held.name,))))
            order.replica = ""
