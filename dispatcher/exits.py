"""Every way out of the dispatcher, each with exactly one terminal message.

`Exits` holds the dispatcher's tables and `_end`, the only way out. On it stand, one on the other: `orders.py`
and `holdings.py` (handles are made and used), `failover.py` (replicas and clients come and go), `operator.py`
(an operator's orders) and `core.py`, which is where to start reading. Without I/O, as there.
"""

from __future__ import annotations

from tinyloop_serve.dispatcher.admission import Admission
from tinyloop_serve.dispatcher.buckets import Buckets
from tinyloop_serve.dispatcher.clients import Clients
from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.effects import Send
from tinyloop_serve.dispatcher.handles import Handles
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.metrics import Metrics
from tinyloop_serve.dispatcher.pace import Pace
from tinyloop_serve.dispatcher.recent import Recent
from tinyloop_serve.dispatcher.replicas import Replicas
from tinyloop_serve.dispatcher.requests import Request, Requests, State
from tinyloop_serve.protocol import codec, errors, messages


class Exits:
    def __init__(self, config: Config, journal: Journal, now: float) -> None:
        self.requests = Requests()  # who is live
        self.admission = Admission(config)  # how many may wait
        self.pace = Pace(config.batch_sizes)  # how long it will run
        self.buckets: Buckets[Request] = Buckets(config)  # who goes next
        self.replicas = Replicas(config, now)  # who serves
        self.handles = Handles()  # what the replicas hold
        self.clients = Clients()  # who is still there
        self.metrics = Metrics(config.tenants.names)  # what has happened
        self.recent = Recent()  # how long requests took lately
        self.failovers = 0  # requests that went on after a replica was lost
        self._config = config
        self._journal = journal
        self._stirred = False  # something changed that may let a call start
        self._out: list[Send] = []  # said by the event in progress

    def _end(
        self,
        request: Request,
        terminal: messages.Done | messages.Failed | None,
        outcome: str,
        now: float,
        heard: messages.Done | messages.Failed | None = None,
    ) -> None:
        """The only way out. `terminal` is None when the replica's own goes out, which is `heard`, or there is
        no reader. `outcome` is "answered", "cancelled", or what went wrong."""
        running = request.state is State.RUNNING
        if request.state is State.WAITING:
            self.buckets.remove(request)
        if running:
            self.buckets.refund(request.tenant, request.cost * (1 - request.share_done))
            self._measure(request, outcome, now)
        if terminal is not None:
            self._out.append(Send(request.client, terminal))
        self.admission.ended(request.tenant, running=running)
        self.requests.end(request, failed=outcome not in ("answered", "cancelled"))
        verdict = terminal or heard
        stats = verdict.stats if isinstance(verdict, messages.Done) else None
        self.metrics.ended(request, outcome, stats, now)
        if outcome == "answered" and stats is not None:
            streamed_at = request.first_at if request.asked.stream else 0.0
            self.recent.answered(request.arrived, streamed_at, stats, now)
        self._journal.request(request, outcome, verdict, now)
        self._stirred = True

    def _measure(self, request: Request, outcome: str, now: float) -> None:
        """What its run says of those to come."""
        if request.shape and not request.failovers and outcome in ("answered", errors.DeadlineExceeded.code):
            loops, seconds, whole = request.shape.sampling.loops, now - request.started, outcome == "answered"
            self.pace.ran(loops, request.size, request.cost, seconds, now, whole=whole)

    def _answered(self, request: Request, payload: bytes, now: float) -> None:
        """The replica's own terminal has gone out as it came; it is read here for the books alone."""
        try:
            terminal = codec.TO_CLIENT.decode([messages.VERSION, payload])
        except errors.TinyLoopError:
            terminal = None  # the client's to complain about
        if isinstance(terminal, messages.Failed):
            self._end(request, None, terminal.code, now, terminal)
        elif isinstance(terminal, messages.Done):
            outcome = "cancelled" if terminal.stop_reason == "cancelled" else "answered"
            self._end(request, None, outcome, now, terminal)
        else:
            self._end(request, None, "answered", now)

    def _fail(self, request: Request, error: errors.TinyLoopError, now: float) -> None:
        """The dispatcher's verdict; a lane that is still decoding is stopped."""
        self._stop_lanes([request])
        self._end(request, codec.failed_from(error, request.id), error.code, now)

    def _fail_late(self, request: Request, needed_s: float, now: float) -> None:
        """It waits and can no longer end in time."""
        allowed_ms, waited_ms = request.asked.deadline_ms, 1000 * (now - request.arrived)
        why = f"it has waited {waited_ms:.0f} ms and would run for about {1000 * needed_s:.0f} ms"
        late = f"{why}: too long for its deadline of {allowed_ms} ms"
        self._fail(request, errors.DeadlineExceeded(late, field="deadline_ms"), now)

    def _cancel(self, request: Request | None, now: float) -> None:
        """The client's wish. A running request ends by the replica's own Done, which holds its last text."""
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if request.state is State.RUNNING:
            self._stop_lanes([request])
        else:
            self._end(request, request.done_cancelled(now), "cancelled", now)

    def _stop_lanes(self, requests: list[Request]) -> None:
        """At their next step; those that run on no replica are left out."""
        lanes: dict[str, list[int]] = {}
        for request in requests:
            if request.replica and request.key in self.replicas[request.replica].lanes:
                lanes.setdefault(request.replica, []).append(request.key)
        self._out += [Send(peer, messages.CancelLanes(tuple(keys))) for peer, keys in lanes.items()]

    def _refuse(self, client: bytes, request_id: str, error: errors.TinyLoopError) -> None:
        """Never admitted, so there is nothing to end. It does not answer a live one that has the same id, and
        whose own answer is still to come."""
        live = self.requests.find(client, request_id) or self.handles.ordered(client, request_id)
        self.metrics.refused[error.code] += 1
        self._out.append(Send(client, codec.failed_from(error, "" if live else request_id)))
        who = {"id": request_id, "client": client.hex()}
        self._journal.event("refused", **who, code=error.code, message=error.message)
