"""An operator's orders: replicas join and leave at run time, and the fleet goes over to another model.

    attach    a new endpoint is tried from now on, as if it had been configured
    drain     nothing new; when the time is over its requests go on elsewhere
    resume    the end of a drain
    detach    drained, then forgotten
    accept    another model may join, and becomes the fleet's: replicas are then restarted one by one with it

Only tenants with `admin` may. Without I/O, as `core.py`.
"""

from __future__ import annotations

from tinyloop_serve.dispatcher import readers
from tinyloop_serve.dispatcher.effects import Attach, Send
from tinyloop_serve.dispatcher.failover import Failover
from tinyloop_serve.dispatcher.replicas import Replica
from tinyloop_serve.protocol import errors
from tinyloop_serve.protocol.keys import needs_keys
from tinyloop_serve.protocol.messages import Control, Controlled, Hello


class Operator(Failover):
    def _control(self, client: bytes, tenant: str, order: Control, now: float) -> None:
        try:
            if not self._config.tenants.of(tenant).admin:
                raise errors.Forbidden(f"tenant {tenant!r} may not give operators' orders", field="action")
            done = self._obey(order, now)
        except errors.TinyLoopError as error:
            self._refuse(client, order.id, error)
        else:
            self._journal.event("control", action=order.action, target=order.target, tenant=tenant, did=done)
            self._out.append(Send(client, Controlled(order.id, done)))
            self._stirred = True

    def _obey(self, order: Control, now: float) -> str:
        """Carries it out; returns what was done. Raises `InvalidRequest`."""
        until = now + max(order.within_ms, 0) / 1000
        match order.action:
            case "attach":
                return self._attach(order.target)
            case "accept":
                return self._accept(order.target, now)
            case "resume":
                replica = self._target(order)
                self.replicas.resume(replica, now)
                return f"{replica.endpoint} is {'in rotation' if replica.in_rotation else replica.why_out}"
            case "drain" | "detach":
                replica = self._target(order)
                replica.leaving = replica.leaving or order.action == "detach"
                self.replicas.drain(replica, until, now)
                self._unstick(replica.endpoint)
                self._drain_on(now)
                return f"{replica.endpoint} drains its {len(replica.lanes)} running requests"

    def _attach(self, endpoint: str) -> str:
        try:
            readers.endpoint("target", endpoint)
            if not self._config.key and needs_keys(endpoint):
                raise readers.refuse("target", endpoint, "a loopback address, or a `key` to encrypt with")
        except readers.ConfigError as error:
            raise errors.bad_field("target", endpoint, error.accepted) from None
        if endpoint in self.replicas or endpoint == self._config.front:
            raise errors.bad_field("target", endpoint, "an endpoint that is not in use")
        self.replicas.add(endpoint)
        self._out.append(Send(endpoint, Attach()))
        return f"{endpoint} is tried from now on"

    def _accept(self, fingerprint: str, now: float) -> str:
        """Those that serve such a model already set the fleet's, those that were refused are asked again."""
        models = self.replicas.models
        models.accept(fingerprint)
        for replica in self.replicas:
            if fingerprint and replica.alive and replica.ready and models.would_replace(replica.ready.model):
                models.admit(replica.ready.model)
                self._adopt(replica.ready)
                self._refit(now)
                return f"the fleet serves the model of {replica.name}"
        for replica in self.replicas:
            if replica.refused and replica.ready and models.would_replace(replica.ready.model):
                self._out.append(Send(replica.endpoint, Hello(self.name)))
                return f"replica {replica.name} is asked again, and sets the model"
        return "the next replica that announces it sets the model"

    def _target(self, order: Control) -> Replica:
        if (replica := self.replicas.named(order.target)) is None:
            names = ", ".join(f"{each.name or '?'} ({each.endpoint})" for each in self.replicas)
            raise errors.bad_field("target", order.target, f"a replica: {names or 'there is none'}")
        return replica
