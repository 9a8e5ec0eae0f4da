"""What the dispatcher knows: the `Status` snapshot, and in short whether all is well. For people and for
monitoring; changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyloop_serve.protocol.messages import BucketStatus, ReplicaStatus, Status

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.buckets import Bucket
    from tinyloop_serve.dispatcher.core import Core
    from tinyloop_serve.dispatcher.replicas import Replica
    from tinyloop_serve.dispatcher.requests import Request


def snapshot(core: Core, status_id: str, now: float) -> Status:
    return Status(
        id=status_id,
        version=core.version,
        uptime_ms=_ms(now - core.started),
        model=core.replicas.model,
        replicas=tuple(_replica(replica, now) for replica in core.replicas),
        buckets=tuple(_bucket(bucket, now) for bucket in core.buckets),
        waiting=core.admission.waiting,
        running=core.admission.running,
        finished=core.requests.finished,
        failed=core.requests.failed,
        clients=len(core.requests.clients() | core.clients.known()),
        refused=core.metrics.refused.total(),
        failovers=core.failovers,
        handles=len(core.handles),
        draining=core.draining,
        tokens=core.metrics.tokens,
        latency=core.recent.latency(now),
    )


def why_not_ready(core: Core) -> str:
    """ "" while requests are taken and at least one replica serves them."""
    if core.draining:
        return "the dispatcher is stopping"
    return "" if core.replicas.alive() else core.replicas.why_none()


def ailing(core: Core) -> dict[str, str]:
    """What is wrong with which replica; one that an operator drains is out by an order."""
    return {
        f"{each.name or '?'} ({each.endpoint})": each.why_out
        for each in core.replicas
        if not each.in_rotation and not each.draining
    }


def summary(core: Core) -> str:
    """One line, for the service manager; another one only when replicas come, go or fall ill."""
    every, serving = list(core.replicas), [each for each in core.replicas if each.in_rotation]
    wrong = "; ".join(f"{who}: {why}" for who, why in ailing(core).items())
    return f"{len(serving)} of {len(every)} replicas serve" + (f"; {wrong}" if wrong else "")


def _replica(replica: Replica, now: float) -> ReplicaStatus:
    ledger, budget = replica.ledger, replica.ledger.budget
    return ReplicaStatus(
        name=replica.name,
        endpoint=replica.endpoint,
        state="draining" if replica.alive and replica.draining else replica.state,
        pid=replica.ready.pid if replica.ready else 0,
        running=len(replica.lanes),
        served=replica.served,
        step_counter=replica.step_counter,
        memory_bytes=replica.memory_bytes,
        last_seen_ms=_ms(now - replica.last_seen) if replica.last_seen else 0,
        error=replica.error,
        fingerprint=replica.fingerprint,
        weights=replica.ready.model.weights if replica.ready else "",
        budget_bytes=budget.cache_bytes + budget.handle_bytes if budget else 0,
        reserved_bytes=ledger.cache_bytes + ledger.handle_bytes,
        handles=ledger.handles,
        max_handles=budget.max_handles if budget else 0,
        speculation=_speculation(replica),
        health=replica.health,
        tokens=replica.tokens,
    )


def _speculation(replica: Replica) -> str:
    measured = replica.calibration
    if replica.ready is None or measured is None:
        return "pending" if replica.alive else ""
    return f"{'on' if measured.enabled else 'off'} {measured.speedup:.2f}x"


def _bucket(bucket: Bucket[Request], now: float) -> BucketStatus:
    return BucketStatus(shape=str(bucket.shape), waiting=len(bucket), oldest_ms=_ms(now - bucket.oldest))


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
