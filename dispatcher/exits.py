"""Every way out of the dispatcher, each with exactly one terminal message; replicas coming and going.

`Exits` holds the dispatcher's tables and `_end`, the only way out. `core.py` builds on it and is where to
start reading. Without I/O, as there.
"""

from __future__ import annotations

from tinyloop_serve.dispatcher.buckets import Buckets
from tinyloop_serve.dispatcher.clients import Clients
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.effects import TOKENIZER, Load, Reset, Send
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.replicas import Replicas
from tinyloop_serve.dispatcher.requests import Request, Requests, State
from tinyloop_serve.protocol import codec, errors, messages


class Exits:
    def __init__(self, config: Config, journal: Journal, now: float) -> None:
        self.requests = Requests(config)  # who is live
        self.buckets = Buckets(config)  # who goes next
        self.replicas = Replicas(config, now)  # who serves
        self.clients = Clients()  # who is still there
        self.refused = 0  # requests that were never admitted
        self._config = config
        self._journal = journal
        self._out: list[Send] = []  # said by the event in progress

    def _end(
        self,
        request: Request,
        terminal: messages.Done | messages.Failed | None,
        outcome: str,
        now: float,
        stats: messages.Stats | None = None,
    ) -> None:
        """The only way out. `terminal` is None when the replica's own goes out, or there is no reader."""
        if request.state is State.WAITING:
            self.buckets.remove(request)
        if terminal is not None:
            self._out.append(Send(request.client, terminal))
        self.requests.end(request, now, failed=outcome not in ("answered", "cancelled"))
        self._journal.request(request, outcome, now, stats)

    def _answered(self, request: Request, payload: bytes, now: float) -> None:
        """The replica's own terminal has gone out as it came; it is read here for the books alone."""
        try:
            terminal = codec.TO_CLIENT.decode([messages.VERSION, payload])
        except errors.TinyLoopError:
            terminal = None  # the client's to complain about
        if isinstance(terminal, messages.Failed):
            self._end(request, None, terminal.code, now)
        elif isinstance(terminal, messages.Done):
            outcome = "cancelled" if terminal.stop_reason == "cancelled" else "answered"
            self._end(request, None, outcome, now, terminal.stats)
        else:
            self._end(request, None, "answered", now)

    def _fail(self, request: Request, error: errors.TinyLoopError, now: float) -> None:
        """The dispatcher's verdict; a lane that is still decoding is stopped."""
        self._stop_lanes([request])
        self._end(request, codec.failed_from(error, request.id), error.code, now)

    def _cancel(self, request: Request | None, now: float) -> None:
        """The client's wish. A running request ends by the replica's own Done, which holds its last text."""
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if request.state is State.RUNNING:
            self._stop_lanes([request])
        else:
            self._end(request, request.done_cancelled(now), "cancelled", now)

    def _forget(self, client: bytes, outcome: str, now: float) -> None:
        """The client is gone: its lanes are stopped, it is sent nothing."""
        self.clients.remove(client)
        requests = self.requests.of(client)
        self._stop_lanes(requests)
        for request in requests:
            self._end(request, None, outcome, now)

    def _stop_lanes(self, requests: list[Request]) -> None:
        for endpoint, keys in self.replicas.lanes_of(requests):
            self._out.append(Send(endpoint, messages.CancelLanes(keys)))

    def _refuse(self, client: bytes, request_id: str, error: errors.TinyLoopError) -> None:
        """Never admitted, so there is nothing to end."""
        self.refused += 1
        self._out.append(Send(client, codec.failed_from(error, request_id)))
        who = {"id": request_id, "client": client.hex()}
        self._journal.event("refused", **who, code=error.code, message=error.message)

    # ------------------------------------------------------------------ replicas and clients come and go

    def _beat(self, now: float, late_s: float) -> None:
        """Life signs: who has gone silent, and the next round of pings; we are `late_s` behind with it."""
        self.clients.excuse(late_s)
        for client in self.clients.expired(now):
            self._forget(client, "lease_expired", now)
        for endpoint, why in self.replicas.expired(now):
            self._lose(endpoint, why, now)
        for request in self.requests.waiting_without(self.replicas.none_since, now):
            self._fail(request, errors.Unavailable(self.replicas.why_none()), now)
        self._out += [Send(endpoint, messages.Ping(n)) for endpoint, n in self.replicas.ping(now)]

    def _join(self, endpoint: str, ready: messages.Ready, now: float) -> bool:
        """Takes its announcement; True when this is the first, from which the fleet knows its model."""
        if self.replicas[endpoint].alive:  # it started anew on the same connection: what it had is void
            self._lose(endpoint, "it announced itself again", now, reset=False)
        first = self.replicas.model is None
        if why := self.replicas.join(endpoint, ready, now):
            self._out.append(Send(endpoint, messages.Goodbye()))
            self._lose(endpoint, why, now, reset=False)
        else:
            who = {"endpoint": endpoint, "replica": ready.name, "model": ready.model.fingerprint}
            self._journal.event("replica_ready", **who, pid=ready.pid)
        if first:
            self._out.append(Send(TOKENIZER, Load(ready.tokenizer, ready.add_bos)))
        return first

    def _lose(self, endpoint: str, why: str, now: float, *, reset: bool = True) -> None:
        """Its requests end here; continuing them on another replica would go here."""
        keys = self.replicas.lose(endpoint, why, now)
        if reset:
            self._out.append(Send(endpoint, Reset()))
        self._journal.event("replica_lost", endpoint=endpoint, why=why, requests=len(keys))
        for request in self.requests.among(keys):
            if request.cancelled:
                self._end(request, request.done_cancelled(now), "cancelled", now)
            else:
                lost = f"replica {self.replicas[endpoint].name} was lost: {why}"
                self._fail(request, errors.ReplicaLost(lost), now)
