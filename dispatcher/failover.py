"""Replicas and clients that come and go, and what then becomes of the requests.

By determinism the rest of an answer is a function of the request and the tokens so far, so a request whose
replica is lost goes on elsewhere, after the last token that was forwarded, and its client sees one stream. It
runs alone from then on: if a replica dies under it again, at the same token, the request is the suspect, and
after `poison_losses` it is refused. Without I/O, as `core.py`.
"""

from __future__ import annotations

from abc import abstractmethod

from tinyloop_serve.dispatcher.effects import TOKENIZER, Detach, Load, Reset, Send
from tinyloop_serve.dispatcher.holdings import Holdings
from tinyloop_serve.dispatcher.ledger import refuse_what_never_fits
from tinyloop_serve.dispatcher.replicas import NEVER, Replica
from tinyloop_serve.dispatcher.requests import Request, State
from tinyloop_serve.protocol import codec, errors, messages


class Failover(Holdings):
    name: str  # of this dispatcher process; replicas tell dispatchers apart by it

    @abstractmethod
    def _prepare(self, request: Request, now: float) -> None:
        """From HELD on: `core.py`."""

    @abstractmethod
    def _again(self, now: float) -> None:
        """What was put off until we know more about handles: `core.py`."""

    # ------------------------------------------------------------------ clients

    def _forget(self, client: bytes, outcome: str, now: float) -> None:
        """The client is gone: its lanes are stopped, its handles go, it is sent nothing."""
        self.clients.remove(client)
        requests = self.requests.of(client)
        self._stop_lanes(requests)
        for request in requests:
            self._end(request, None, outcome, now)
        self._owner_left(client)

    # ------------------------------------------------------------------ replicas come

    def _join(self, endpoint: str, ready: messages.Ready, now: float) -> None:
        """Takes its announcement; the first, and an accepted other one, tell what the fleet serves."""
        replica, before = self.replicas[endpoint], self.replicas.model
        if replica.alive:  # it started anew on the same connection: what it had is void
            self._lose(endpoint, "it announced itself again", now, reset=False)
        if why := self.replicas.join(endpoint, ready, now):
            self._out.append(Send(endpoint, messages.Goodbye()))
            self._lose(endpoint, why, now, reset=False)
            return
        self._journal.announced(endpoint, ready)
        if changed := self.replicas.model is not before:
            self._adopt(ready)
        self._relearn(replica, now)
        if changed:
            self._refit(now)
        self._again(now)
        self._stirred = True

    def _adopt(self, ready: messages.Ready) -> None:
        """The fleet's model is another one from here on."""
        self._out.append(Send(TOKENIZER, Load(ready.tokenizer, ready.add_bos)))
        self._model_changed()

    def _refit(self, now: float) -> None:
        """After `_adopt`: what was made for another model is made anew, who serves this one is welcome."""
        for request in self.requests.live():
            if not self._suits(request) and request.state is not State.RUNNING:
                self._restart(request, now)
        for replica in self.replicas:
            if replica.refused and self.replicas.model == replica.model:
                self._out.append(Send(replica.endpoint, messages.Hello(self.name)))

    def _suits(self, request: Request) -> bool:
        """Whether what was made of it holds: tokens that its client has bind it to the model they came from,
        others take the fleet's."""
        bound = bool(request.done and request.model)
        return bound or (self.replicas.model is not None and request.model == self.replicas.model.fingerprint)

    def _restart(self, request: Request, now: float) -> None:
        """It is made ready for the fleet's model, from the beginning."""
        if request.state is State.WAITING:
            self.buckets.remove(request)
        request.state, request.job, request.sticky, request.shape = State.HELD, 0, "", None
        self._prepare(request, now)

    # ------------------------------------------------------------------ replicas go

    def _lose(self, endpoint: str, why: str, now: float, *, reset: bool = True, blame: bool = True) -> None:
        """It works for us no more. `blame`: its requests may be why."""
        replica = self.replicas[endpoint]
        self.metrics.losses[endpoint] += replica.alive
        if replica.shape is not None:
            self.buckets.ended(replica.shape, 0.0, now)
        requests = self.requests.among(self.replicas.lose(endpoint, why, now))
        if reset:
            self._out.append(Send(endpoint, Reset()))
        self._journal.event("replica_lost", endpoint=endpoint, why=why, requests=len(requests))
        self._holder_lost(endpoint, why, blame=blame)
        self._unstick(endpoint)
        for request in requests:
            self._continue(request, replica, why, blame, now)

    def _continue(self, request: Request, replica: Replica, why: str, blame: bool, now: float) -> None:
        """Its replica is lost to it: it goes on elsewhere, after the tokens that its client has."""
        if request.cancelled:
            self._end(request, request.done_cancelled(now), "cancelled", now)
            return
        lost = f"replica {replica.name} was lost: {why}"
        if (answer := _so_far(request)) is None:
            self._fail(request, errors.ReplicaLost(f"{lost}; what it had sent cannot be read"), now)
            return
        request.done, request.payloads = answer, []
        if blame:
            request.losses = request.losses + 1 if request.position == request.lost_at else 1
            request.lost_at = request.position
            if request.losses >= self._config.poison_losses:
                poison = f"{request.losses} replicas in a row were lost at its token {request.position}"
                self._fail(request, errors.PoisonRequest(f"{poison}, and it is not tried again; {lost}"), now)
                return
        self.failovers += 1
        where = {"replica": replica.endpoint, "position": request.position, "losses": request.losses}
        self._journal.event("failover", id=request.id, client=request.client.hex(), **where)
        self.buckets.refund(request.tenant, request.cost)
        self.admission.came_back(request.tenant)
        self.requests.come_back(request, now)
        assert request.shape is not None
        request.shape = request.shape._replace(single=True)
        self.buckets.put(request)
        if not self._suits(request):
            self._restart(request, now)
        self._stirred = True

    def _move(self, replica: Replica, why: str, now: float) -> None:
        """What it runs goes on elsewhere; its run ends without them."""
        requests = [each for each in self.requests.among(replica.lanes) if each.replica == replica.endpoint]
        self._stop_lanes(requests)
        replica.lanes = set()
        for request in requests:
            self._continue(request, replica, why, False, now)

    def _detach(self, replica: Replica, now: float) -> None:
        """Told goodbye, and forgotten."""
        self._lose(replica.endpoint, "it was detached", now, reset=False, blame=False)
        self._out += [Send(replica.endpoint, messages.Goodbye()), Send(replica.endpoint, Detach())]
        self.replicas.remove(replica.endpoint)

    def _drain_on(self, now: float) -> None:
        """Drains whose time is over, and replicas that have drained and are to leave."""
        for replica in list(self.replicas):
            if replica.drained_at <= now:
                replica.drained_at = NEVER
                self._move(replica, "the time for its drain is over", now)
            if replica.leaving and not replica.lanes:
                self._detach(replica, now)

    # ------------------------------------------------------------------ time

    def _beat(self, now: float, late_s: float) -> None:
        """Life signs: who has gone silent, and the next round of pings; we are `late_s` behind with it."""
        self.metrics.late.add(late_s)
        self.clients.excuse(late_s)
        self.handles.excuse(late_s)
        for client in self.clients.expired(now):
            broken = errors.Unavailable(
                "nothing was heard for longer than the lease; what was open has ended"
            )
            self._out.append(Send(client, codec.failed_from(broken, "")))  # it may be alive, and wait
            self._forget(client, "lease_expired", now)
        for client in self.clients.idle(now):
            if not self.requests.of(client) and not self.handles.of(client):
                self.clients.remove(client)
        for endpoint, why in self.replicas.expired(now):
            self._lose(endpoint, why, now)
        self._drain_on(now)
        self._expire_handles(now)
        self._lose_patience(now)
        if not self._learned and now >= self._learning_until:
            self._learned = True
            self._again(now)
        self._out += [Send(endpoint, messages.Ping(n)) for endpoint, n in self.replicas.ping(now)]

    def _lose_patience(self, now: float) -> None:
        """Requests that nobody can serve fail: after a while, or at once when nobody will come."""
        patience_s = self._config.replica_wait_ms / 1000
        absent: dict[str, float | None] = {}
        for request in self.requests.live():
            model = request.model
            if request.state is State.RUNNING:
                continue
            if model not in absent:
                absent[model] = self.replicas.absent_since(model)
            if (since := absent[model]) is None:
                continue
            request.unfit_since = now
            hopeless = bool(model) and not self.replicas.may_return(model)
            if hopeless or now - max(since, request.arrived) >= patience_s:
                self._fail(request, self._nobody(request, hopeless), now)
        for bucket in list(self.buckets):
            may_hold: dict[tuple[str, int], bool] = {}  # one answer for all that are alike: many may wait
            for request in list(bucket):
                size = request.model, request.positions
                if size not in may_hold:
                    may_hold[size] = self.replicas.may_hold(request)
                if may_hold[size]:
                    request.unfit_since = now
                elif now - request.unfit_since >= patience_s:
                    self._outgrown(request, now)

    def _outgrown(self, request: Request, now: float) -> None:
        """Those who had room for it may have left for good, and only smaller ones be there."""
        assert request.shape is not None
        try:
            budgets = self.replicas.budgets(request.model)
            refuse_what_never_fits(budgets, request.shape.sampling, request.positions)
        except errors.LimitExceeded as error:
            self._fail(request, error, now)
        else:  # it would fit one that is not in rotation
            self._fail(request, errors.Unavailable(self.replicas.why_none()), now)

    def _nobody(self, request: Request, hopeless: bool) -> errors.TinyLoopError:
        if not request.failovers:
            return errors.Unavailable(self.replicas.why_none())
        at = f"its replica was lost after token {request.position}"
        if hopeless:
            return errors.ReplicaLost(f"{at}, and no replica is left that serves the same model")
        return errors.ReplicaLost(f"{at}, and {self.replicas.why_none()}")


def _so_far(request: Request) -> bytes | None:
    """The answer's tokens that its client has; None when a replica sent what cannot be read."""
    parts, count = [request.done], len(request.done) // 4
    for payload in request.payloads:
        try:
            message = codec.TO_CLIENT.decode([messages.VERSION, payload])
        except errors.TinyLoopError:
            return None
        if not isinstance(message, messages.Tokens) or message.seq != count or len(message.tokens) % 4:
            return None
        parts.append(message.tokens)
        count += len(message.tokens) // 4
    return b"".join(parts) if count == request.position else None
