"""The `Status` snapshot: what the dispatcher knows, for people and for monitoring. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyloop_serve.protocol.messages import BucketStatus, ReplicaStatus, Status

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.buckets import Bucket
    from tinyloop_serve.dispatcher.core import Core
    from tinyloop_serve.dispatcher.replicas import Replica


def snapshot(core: Core, status_id: str, now: float) -> Status:
    return Status(
        id=status_id,
        version=core.version,
        uptime_ms=_ms(now - core.started),
        model=core.replicas.model,
        replicas=tuple(_replica(replica, now) for replica in core.replicas),
        buckets=tuple(_bucket(bucket, now) for bucket in core.buckets),
        waiting=core.requests.waiting,
        running=core.requests.running,
        finished=core.requests.finished,
        failed=core.requests.failed + core.refused,
        clients=len(core.requests.clients() | core.clients.known()),
    )


def _replica(replica: Replica, now: float) -> ReplicaStatus:
    return ReplicaStatus(
        name=replica.name,
        endpoint=replica.endpoint,
        state=replica.state,
        pid=replica.ready.pid if replica.ready else 0,
        running=len(replica.lanes),
        served=replica.served,
        step_counter=replica.step_counter,
        memory_bytes=replica.memory_bytes,
        last_seen_ms=_ms(now - replica.last_seen) if replica.last_seen else 0,
        error=replica.error,
    )


def _bucket(bucket: Bucket, now: float) -> BucketStatus:
    oldest = _ms(now - bucket.queue[0].arrived)
    return BucketStatus(shape=str(bucket.shape), waiting=len(bucket.queue), oldest_ms=oldest)


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
