"""Decisions of the dispatcher, without I/O: an event and the time go in, what to send comes out.

`(peer, message, now) -> [(peer, message, payloads)]`. Events come from `server.py`, which alone touches
sockets and the clock. A request's way down: `_admit`, `_prepare`, `_place`, `_assign` (a `Run` to a
replica: `replica/server.py`). Its tokens' way up: `_relay`, just under it. Side topics hide behind one
verb each: `guards` (may it run), `requests` (who is live), `buckets` (who goes next), `replicas` (who
serves), `clients` (who is still there), `exits` (ways out).
"""

from __future__ import annotations

from tinyloop_serve.dispatcher import guards, status
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.effects import TOKENIZER, Send, Tokenize
from tinyloop_serve.dispatcher.exits import Exits
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.requests import Request, State
from tinyloop_serve.protocol import errors, messages


class Core(Exits):
    """One dispatcher's state; not thread-safe. Each public method but `wake_at` and `check` is an event."""

    def __init__(self, config: Config, journal: Journal, now: float, *, name: str, version: str = "") -> None:
        super().__init__(config, journal, now)
        self.name = name  # unique per process: replicas tell dispatchers apart by it
        self.version = version
        self.started = now
        self.draining = False
        self._next_beat = now

    # ------------------------------------------------------------------ events

    def client_says(self, client: bytes, message: messages.ToDispatcher, now: float) -> list[Send]:
        self.clients.saw(client, now)
        match message:
            case messages.Generate():
                self._admit(client, message, now)
            case messages.Cancel():
                self._cancel(self.requests.find(client, message.id), now)
            case messages.Ping():
                self.clients.lease(client, message.lease_ms, now)
                self._out.append(Send(client, messages.Pong(message.n)))
            case messages.GetStatus():
                self._out.append(Send(client, status.snapshot(self, message.id, now)))
            case messages.Goodbye():
                self._forget(client, "client_gone", now)
        return self._decide(now)

    def replica_says(
        self, endpoint: str, message: messages.FromReplica, payloads: tuple[bytes, ...], now: float
    ) -> list[Send]:
        self.replicas.saw(endpoint, now)
        match message:
            case messages.Ready():
                if self._join(endpoint, message, now):
                    for request in self.requests.live():
                        self._prepare(request, now)
            case messages.Step():
                self._relay(endpoint, message, payloads, now)
            case messages.Pong():
                self.replicas.pong(endpoint, message, now)
            case messages.Goodbye():
                self._lose(endpoint, "it said goodbye", now)
        return self._decide(now)

    def tokenized(self, key: int, result: bytes | errors.TinyLoopError, now: float) -> list[Send]:
        """Answer to `Tokenize`: the prompt as u32 little-endian, or why there is none."""
        if request := self.requests.get(key):  # else it ended meanwhile
            if isinstance(result, bytes):
                self._place(request, result, now)
            else:
                self._fail(request, result, now)
        return self._decide(now)

    def tick(self, now: float) -> list[Send]:
        """Time has passed; `wake_at` says when the next tick is due, more do no harm."""
        for request in self.requests.expired(now):
            late = f"the deadline of {request.asked.deadline_ms} ms passed while {request.state.value}"
            self._fail(request, errors.DeadlineExceeded(late, field="deadline_ms"), now)
        if (late_s := now - self._next_beat) >= 0:
            self._next_beat = now + self._config.heartbeat_ms / 1000
            self._beat(now, late_s)
        return self._decide(now)

    def wake_at(self) -> float:
        """When the next tick is due, seconds."""
        ripe = self.buckets.ripe_at() if self.replicas.idle() else self._next_beat
        return min(ripe, self.requests.next_deadline(), self._next_beat)

    def _decide(self, now: float) -> list[Send]:
        """The end of every event: calls that can start do, and all that was said goes out."""
        self._assign(now)
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------ a request's way down

    def _admit(self, client: bytes, asked: messages.Generate, now: float) -> None:
        try:
            guards.enter(asked, self.draining, self.replicas, self._config)
            request = self.requests.admit(client, asked, now)
        except errors.TinyLoopError as error:
            self._refuse(client, asked.id, error)
        else:
            self._prepare(request, now)

    def _prepare(self, request: Request, now: float) -> None:
        """Held until a replica has announced the model; then text is turned into tokens, off the loop."""
        if self.replicas.model is None:
            return
        if request.asked.prompt_text is None:
            self._place(request, request.asked.prompt_tokens or b"", now)
        else:
            request.state = State.TOKENIZING
            self._out.append(Send(TOKENIZER, Tokenize(request.key, request.asked.prompt_text)))

    def _place(self, request: Request, prompt: bytes, now: float) -> None:
        """Into its bucket, if the model can run it at all."""
        assert self.replicas.model is not None
        request.prompt = prompt
        try:
            sampling = guards.check(request.asked, prompt, self.replicas.model, self._config.cache_modes)
        except errors.TinyLoopError as error:
            self._fail(request, error, now)
        else:
            request.state = State.WAITING
            request.shape = self.buckets.shape_of(sampling, request.asked.max_tokens)
            self.buckets.put(request)

    def _assign(self, now: float) -> None:
        """While a replica has its credit and a bucket is ripe: one Run."""
        while (replica := self.replicas.idle()) and (call := self.buckets.take(now)):
            run = self.replicas.spend(replica, call.shape, {request.key for request in call.lanes}, now)
            for request in call.lanes:
                self.requests.start(request, replica.endpoint, now)
            lanes = tuple(request.lane() for request in call.lanes)
            message = messages.Run(run, call.shape.sampling, lanes, call.batch_size)
            self._out.append(Send(replica.endpoint, message))

    # ------------------------------------------------------------------ its tokens' way up

    def _relay(self, endpoint: str, step: messages.Step, payloads: tuple[bytes, ...], now: float) -> None:
        """Forwards payloads undecoded, one Send per client; those of requests that have ended are dropped."""
        if not self.replicas.stepped(endpoint, step.run, now):
            return
        mail: dict[bytes, list[bytes]] = {}
        for key, tokens, final, payload in zip(step.keys, step.tokens, step.final, payloads, strict=True):
            if final:
                self.replicas.answered(endpoint, key)
            if (request := self.requests.get(key)) and request.replica == endpoint:
                mail.setdefault(request.client, []).append(payload)
                request.delivered += tokens
                if final:
                    self._answered(request, payload, now)
        self._out += [Send(client, None, tuple(bodies)) for client, bodies in mail.items()]
        if step.idle:
            shape, unanswered = self.replicas.restore(endpoint, now)
            self.buckets.ended(shape, now)
            for request in self.requests.among(unanswered):
                self._fail(request, errors.EngineFailed("the replica ended the run without an answer"), now)

    # ------------------------------------------------------------------ events off the main road

    def client_garbled(
        self, client: bytes, request_id: str, error: errors.TinyLoopError, now: float
    ) -> list[Send]:
        """It sent what cannot be decoded; `request_id` is "" where that could not be read either."""
        live = self.requests.find(client, request_id)  # its terminal is still to come, and this is not it
        self._refuse(client, "" if live else request_id, error)
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
        return [Send(endpoint, messages.Hello(self.name))]

    def replica_gone(self, endpoint: str, why: str, now: float) -> list[Send]:
        self._lose(endpoint, why, now)
        return self._decide(now)

    def stop(self, now: float) -> list[Send]:
        """The end: what is still live fails, replicas are told."""
        self.draining = True
        for request in self.requests.live():
            self._fail(request, errors.Unavailable("the dispatcher was stopped"), now)
        self._out += [Send(each.endpoint, messages.Goodbye()) for each in self.replicas if each.alive]
        return self._decide(now)

    def check(self, now: float) -> None:
        """Raises AssertionError unless all books agree; tests call it after every event."""
        self.requests.check()
        self.replicas.check()
        waiting = {request.key for request in self.requests.live() if request.state is State.WAITING}
        queued = [request.key for bucket in self.buckets for request in bucket.queue]
        assert sorted(queued) == sorted(waiting), "every waiting request is in one bucket, once"
        for request in self.requests.live():
            lanes = [replica.endpoint for replica in self.replicas if request.key in replica.lanes]
            assert lanes == ([request.replica] if request.replica else []), "every running one has one lane"
        assert not (self.replicas.idle() and self.buckets.ripe_at() <= now), "nothing ripe waits in vain"
        assert not self._out, "everything that was said went out"
