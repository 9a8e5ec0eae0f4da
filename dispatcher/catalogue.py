"""Every metric that the dispatcher exports: its name, its labels, what it says, and where that is read.

A replica's facts are told here too, from what it announced and its last life sign, so that one page tells of
the whole fleet. Knows no text format and no sockets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tinyloop_serve.dispatcher import readings
from tinyloop_serve.dispatcher.readings import STATES, Read, budgeted, by, each, each_of, measured, one
from tinyloop_serve.dispatcher.replicas import WELL

Labels = tuple[str, ...]
REPLICA = ("replica", "endpoint")
BUCKET = ("loops", "max_tokens", "cache_mode", "batch")


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: Labels
    help: str
    read: Read


def counter(name: str, help: str, read: Read, labels: Labels = ()) -> Metric:
    return Metric(name, "counter", labels, help, read)


def gauge(name: str, help: str, read: Read, labels: Labels = ()) -> Metric:
    return Metric(name, "gauge", labels, help, read)


def histogram(name: str, help: str, read: Read, labels: Labels = ()) -> Metric:
    """Exported as NAME_bucket, NAME_sum and NAME_count."""
    return Metric(name, "histogram", labels, help, read)


_FLEET = (
    gauge(
        "tinyloop_info",
        "1; what this dispatcher and its fleet are",
        readings.info,
        ("version", "model", "fingerprint"),
    ),
    gauge(
        "tinyloop_ready",
        "1 while requests are taken and a replica serves them",
        one(lambda core: core.replicas.alive() and not core.draining),
    ),
    gauge(
        "tinyloop_clients",
        "clients that are connected, as far as it is known",
        one(lambda core: len(core.requests.clients() | core.clients.known())),
    ),
    counter(
        "tinyloop_keys_refused_total",
        "connections with a key that is on no list",
        one(lambda core: core.metrics.keys_refused),
    ),
    histogram(
        "tinyloop_loop_late_seconds",
        "how late the dispatcher's loop was for its heartbeat",
        one(lambda core: core.metrics.late),
    ),
)

_REQUESTS = (
    counter(
        "tinyloop_requests_total",
        "requests that were admitted and have ended; outcome: answered, cancelled, or what went wrong",
        lambda core, now: core.metrics.requests.items(),
        ("tenant", "outcome"),
    ),
    counter(
        "tinyloop_refused_total",
        "requests and orders that were never admitted, by the code of their error",
        by(lambda core: core.metrics.refused),
        ("code",),
    ),
    gauge("tinyloop_requests_waiting", "requests not yet on a replica", readings.waiting, ("tenant",)),
    gauge("tinyloop_requests_running", "requests on a replica", readings.running, ("tenant",)),
    counter(
        "tinyloop_failovers_total",
        "times that a request went on after its replica was lost",
        one(lambda core: core.failovers),
    ),
    histogram(
        "tinyloop_time_to_first_token_seconds",
        "streamed requests, from arrival to the first token sent",
        by(lambda core: core.metrics.first_token),
        ("tenant",),
    ),
    histogram(
        "tinyloop_inter_token_seconds",
        "between two steps of a stream",
        one(lambda core: core.metrics.between),
    ),
    histogram(
        "tinyloop_request_seconds",
        "answered requests, from arrival to the end",
        by(lambda core: core.metrics.whole),
        ("tenant",),
    ),
    counter(
        "tinyloop_tokens_total",
        "tokens generated and sent, as they go",
        one(lambda core: core.metrics.tokens),
    ),
    counter(
        "tinyloop_tenant_tokens_total",
        "tokens generated and sent, of requests that have ended",
        by(lambda core: core.metrics.tokens_of),
        ("tenant",),
    ),
    counter(
        "tinyloop_prompt_tokens_total",
        "tokens of prompts, of requests that have ended",
        one(lambda core: core.metrics.prompt_tokens),
    ),
)

_BATCHES = (
    gauge(
        "tinyloop_bucket_waiting",
        "requests in buckets of such a shape; max_tokens: upper end of its band; batch: may they share one",
        readings.depths,
        BUCKET,
    ),
    gauge(
        "tinyloop_bucket_oldest_seconds",
        "how long the first request in buckets of such a shape has waited",
        readings.oldest,
        BUCKET,
    ),
    histogram(
        "tinyloop_queue_seconds",
        "from a request's arrival to its run",
        by(lambda core: core.metrics.queue),
        ("tenant",),
    ),
    histogram(
        "tinyloop_batch_lanes",
        "requests of a run, padding not counted",
        one(lambda core: core.metrics.lanes),
    ),
)

_HANDLES = (
    gauge("tinyloop_handles", "handles that live", readings.handles, ("kind",)),
    gauge(
        "tinyloop_handle_orders",
        "handles that wait to be built, or are being built",
        one(lambda core: len(core.handles.orders)),
    ),
    counter(
        "tinyloop_handle_builds_total",
        "handles built, or the code of what went wrong",
        by(lambda core: core.metrics.builds),
        ("outcome",),
    ),
    counter(
        "tinyloop_handle_evictions_total",
        "handles that went to make room for others",
        one(lambda core: core.metrics.evictions),
    ),
    counter(
        "tinyloop_handle_uses_total",
        "runs of requests that had a handle to save work",
        one(lambda core: core.metrics.handle_uses),
    ),
    counter(
        "tinyloop_prefix_tokens_total",
        "tokens of prompts that were not computed again, thanks to a handle",
        one(lambda core: core.metrics.prefix_tokens),
    ),
)

_SPECULATION = (
    counter(
        "tinyloop_drafted_tokens_total",
        "tokens drafted by speculation",
        one(lambda core: core.metrics.drafted),
    ),
    counter(
        "tinyloop_accepted_tokens_total",
        "drafted tokens that the full model agreed with",
        one(lambda core: core.metrics.accepted),
    ),
    counter(
        "tinyloop_speculation_declined_total",
        "requests that asked for speculation and were decoded plainly",
        one(lambda core: core.metrics.plain_instead),
    ),
    gauge(
        "tinyloop_replica_speculation_enabled",
        "1 where speculation pays, as measured at the replica's start; absent until then",
        measured(lambda calibration: calibration.enabled),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_speculation_speedup",
        "of speculation over plain decoding, as measured; 0: it is switched off",
        measured(lambda calibration: calibration.speedup),
        REPLICA,
    ),
)

_REPLICAS = (
    gauge(
        "tinyloop_replica_state",
        "1 for the state that the replica is in, of " + ", ".join(STATES),
        readings.states,
        (*REPLICA, "state"),
    ),
    gauge(
        "tinyloop_replica_serving",
        "1 while the replica may be given work",
        each(lambda replica: replica.in_rotation),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_ill",
        "1 while the replica says that it is not well: its engine fails, or it is out of memory",
        each(lambda replica: replica.alive and replica.health != WELL),
        REPLICA,
    ),
    counter(
        "tinyloop_replica_losses_total",
        "times that the replica was lost while it served: it ended, fell silent, or its engine stalled",
        each_of(lambda core: core.metrics.losses),
        REPLICA,
    ),
    counter(
        "tinyloop_replica_engine_failures_total",
        "requests and handles that the replica's engine broke",
        each_of(lambda core: core.metrics.engine_failures),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_running",
        "requests being decoded",
        each(lambda replica: len(replica.lanes)),
        REPLICA,
    ),
    counter(
        "tinyloop_replica_served_total",
        "requests that the replica finished",
        each(lambda replica: replica.served),
        REPLICA,
    ),
    counter(
        "tinyloop_replica_tokens_total",
        "tokens of the replica that were sent on",
        each(lambda replica: replica.tokens),
        REPLICA,
    ),
    counter(
        "tinyloop_replica_steps_total",
        "steps of the replica's engine, by its own count",
        each(lambda replica: replica.step_counter),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_last_seen_seconds",
        "since the replica's last message",
        readings.last_seen,
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_memory_bytes",
        "resident memory, mapped pages of the model included",
        each(lambda replica: replica.memory_bytes),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_cache_bytes",
        "decode caches, as the ledger has given them out",
        each(lambda replica: replica.ledger.cache_bytes),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_cache_budget_bytes",
        "what decode caches may take; absent without a budget",
        budgeted(lambda budget: budget.cache_bytes),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_handle_bytes",
        "handles, by the ledger",
        each(lambda replica: replica.ledger.handle_bytes),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_handle_budget_bytes",
        "what handles may take; absent without a budget",
        budgeted(lambda budget: budget.handle_bytes),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_handles",
        "handles that the replica holds",
        each(lambda replica: replica.ledger.handles),
        REPLICA,
    ),
    gauge(
        "tinyloop_replica_max_handles",
        "handles that the replica may hold; absent without a budget",
        budgeted(lambda budget: budget.max_handles),
        REPLICA,
    ),
)

CATALOGUE = _FLEET + _REQUESTS + _BATCHES + _HANDLES + _SPECULATION + _REPLICAS


def markdown() -> str:
    """The table of docs/operations.md."""
    rows = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)
