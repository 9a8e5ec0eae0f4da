"""What becomes of handles that there are: used, renewed, listed, dropped, lost, learned of again.

A request never depends on its handle once it was let in: without it, it gives the same tokens. So it is
bound to the replica that holds one for `sticky_wait_ms` at most. Decisions only; the book is `handles.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.effects import Send
from tinyloop_serve.dispatcher.handles import Held, OrderState
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.orders import Orders
from tinyloop_serve.dispatcher.replicas import Replica
from tinyloop_serve.dispatcher.requests import Request
from tinyloop_serve.protocol import errors, messages

Asked = messages.RenewHandle | messages.DropHandle


class Holdings(Orders):
    def __init__(self, config: Config, journal: Journal, now: float, new_mark: Callable[[], str]) -> None:
        super().__init__(config, journal, now, new_mark)
        self._loose_at: deque[tuple[float, Request]] = deque()  # when each has waited enough for its replica
        self._later: list[tuple[bytes, str, Asked]] = []  # about handles that we may yet learn of
        self._learning_until = now + config.replica_wait_ms / 1000
        self._learned = False  # that time is over, and what waited for it was told

    # ------------------------------------------------------------------ requests

    def _choose_handle(self, request: Request, sampling: messages.Sampling, now: float) -> None:
        """The one it named, or the longest scaffold that its prompt begins with; a replica that holds it."""
        if request.basis is not None:
            tokens = request.pieces[0]
            assert isinstance(tokens, bytes)
            request.basis = replace(request.basis, prompt_text=None, prompt_tokens=tokens)
        elif request.asked.method == "plain" and sampling.beam_size == 1 and not sampling.cache_window:
            request.held = self.handles.scaffold(request.tenant, request.prompt, sampling, request.model)
        if request.done:  # what goes on after a loss does so without
            request.held = None
        if (held := request.held) is None:
            return
        homes = [self.replicas[each] for each in held.holders if self.replicas[each].in_rotation]
        if homes:
            request.sticky = min(homes, key=lambda replica: replica.state == "busy").endpoint
            self._loose_at.append((now + self._config.sticky_wait_ms / 1000, request))

    def _loosen(self, now: float) -> None:
        """Those that have waited enough for the replica with their handle take any."""
        while self._loose_at and self._loose_at[0][0] <= now:
            self._loose_at.popleft()[1].sticky = ""
            self._stirred = True

    def _unstick(self, endpoint: str) -> None:
        """Requests that wait for this replica alone take any: it takes none."""
        for _, request in self._loose_at:
            if request.sticky == endpoint:
                request.sticky = ""
        self._stirred = True

    # ------------------------------------------------------------------ what clients ask

    def _renew(self, client: bytes, tenant: str, asked: Asked, now: float) -> None:
        if held := self._own(client, tenant, asked, now):
            held.used, held.owner = now, client  # a client that connected anew takes its handles along
            self._out.append(Send(client, messages.Handle(asked.id, self._info(held, tenant, now))))

    def _drop(self, client: bytes, tenant: str, asked: Asked, now: float) -> None:
        if held := self._own(client, tenant, asked, now):
            self._out.append(Send(client, messages.Handle(asked.id, self._info(held, tenant, now))))
            self._give_up([held], "it was dropped")

    def _list(self, client: bytes, tenant: str, asked: messages.ListHandles, now: float) -> None:
        infos = (self._info(held, tenant, now) for held in self.handles.visible(tenant))
        self._out.append(Send(client, messages.Handles(asked.id, tuple(infos))))

    def _own(self, client: bytes, tenant: str, asked: Asked, now: float) -> Held | None:
        """The tenant's own handle; None: the client has its refusal, or will have its answer later."""
        held = self.handles.find(asked.handle, tenant)
        if held is not None and held.tenant == tenant:
            return held
        if held is not None:
            message = f"handle {asked.handle!r} is another tenant's, shared for use"
            error: errors.TinyLoopError = errors.Forbidden(message, field="handle", value=asked.handle)
        elif self._learning(now) and len(self._later) < self._config.max_waiting:
            self._later.append((client, tenant, asked))
            return None
        else:
            error = self.handles.lost(asked.handle, tenant)
        self._refuse(client, asked.id, error)
        return None

    def _ask_again(self, now: float) -> None:
        """More is known about handles: what was put off for that."""
        for order in list(self.handles.orders.values()):
            if order.state is OrderState.HELD:
                self._prepare_order(order)
        later, self._later = self._later, []
        for client, tenant, asked in later:
            act = self._renew if isinstance(asked, messages.RenewHandle) else self._drop
            act(client, tenant, asked, now)

    # ------------------------------------------------------------------ what ends them

    def _give_up(self, helds: Iterable[Held], why: str) -> None:
        """They are gone, and their replicas free the memory."""
        names: dict[str, list[str]] = {}
        for held in helds:
            for endpoint in held.holders:
                names.setdefault(endpoint, []).append(held.name)
                self.replicas[endpoint].ledger.release_handle(held.name)
            self.handles.end(held, why)
        self._out += [Send(endpoint, messages.Drop(tuple(each))) for endpoint, each in names.items()]

    def _owner_left(self, client: bytes) -> None:
        """Its handles go with it, but for the detached ones."""
        for order in self.handles.orders_of(client):
            if order.held.detached:
                self.handles.orphan(order)
            else:
                self._withdraw(order)
                self.handles.close(order)
        left = self.handles.of(client)
        for held in left:
            held.owner = None
        self._give_up([held for held in left if not held.detached], "the client that made it has left")
        self._later = [each for each in self._later if each[0] != client]

    def _holder_lost(self, endpoint: str, why: str, *, blame: bool) -> None:
        """What it held is gone, unless it comes back with it; what it was building is built anew."""
        name = self.replicas[endpoint].name
        for held in self.handles.held_by(endpoint):
            self.handles.leave(held, endpoint, f"replica {name}, which held it, was lost: {why}", final=False)
        for order in [each for each in self.handles.orders.values() if each.replica == endpoint]:
            order.state, order.replica = OrderState.WAITING, ""
            order.losses += blame
            if order.losses >= self._config.poison_losses:
                message = f"{order.losses} replicas were lost while they built it; it is not tried again"
                self._refuse_order(order, errors.PoisonRequest(message, field="recipe"))

    def _model_changed(self) -> None:
        """Handles belong to a model."""
        assert self.replicas.model is not None
        fingerprint = self.replicas.model.fingerprint
        self._give_up(
            [h for h in self.handles if h.model != fingerprint], "the fleet serves another model now"
        )
        for order in list(self.handles.orders.values()):
            self._withdraw(order)
            order.state, order.job = OrderState.HELD, 0
            self._prepare_order(order)

    def _expire_handles(self, now: float) -> None:
        for held in self.handles.expired(now):
            self._give_up([held], f"its lease of {held.lease_s:g} s ran out")
        patience_s = self._config.replica_wait_ms / 1000
        for order in list(self.handles.orders.values()):
            since = None if order.replica else self.replicas.absent_since(order.held.model)
            if since is not None and now - max(since, order.arrived) >= patience_s:
                self._refuse_order(order, errors.Unavailable(self.replicas.why_none()))

    # ------------------------------------------------------------------ what we learn again

    def _relearn(self, replica: Replica, now: float) -> None:
        """What it holds from before; what it must not hold any more is dropped."""
        assert replica.ready is not None and self.replicas.model is not None
        current = replica.fingerprint == self.replicas.model.fingerprint
        unwanted = []
        for told in replica.ready.handles:
            here = self.clients.known().__contains__
            if current and self.handles.relearn(told, replica.endpoint, replica.fingerprint, here, now):
                replica.ledger.reserve_handle(told.build.handle, told.bytes)
            else:
                unwanted.append(told.build.handle)
        if unwanted:
            self._out.append(Send(replica.endpoint, messages.Drop(tuple(unwanted))))

    def _learning(self, now: float) -> bool:
        """Whether a replica that has yet to announce itself may hold handles that we do not know: we have
        just begun, and it has not."""
        return now < self._learning_until and any(replica.state == "starting" for replica in self.replicas)
