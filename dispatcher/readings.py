"""How the values of metrics are read from the core: one number, one per key, one per replica, one per shape.

Called by the loop's own hand, between two events, so that what is told fits together. Labels have few values:
tenants and replicas are configured, and of a shape only what is bounded goes into one, never a number that
clients choose freely. Changes nothing; knows no names of metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from tinyloop_serve.dispatcher.buckets import Shape
from tinyloop_serve.dispatcher.metrics import Distribution
from tinyloop_serve.dispatcher.replicas import Replica
from tinyloop_serve.protocol.messages import Budget, Calibration

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.core import Core

Value = float | Distribution
Samples = Iterable[tuple[tuple[str, ...], Value]]  # label values, value
Read = Callable[["Core", float], Samples]
STATES = ("starting", "ready", "busy", "draining", "lost")


def one(value: Callable[[Core], Value]) -> Read:
    return lambda core, now: [((), value(core))]


def by(values: Callable[[Core], Mapping[str, Value]]) -> Read:
    return lambda core, now: [((key,), value) for key, value in values(core).items()]


def each(value: Callable[[Replica], float | None]) -> Read:
    """Of every replica that has such a value."""
    return lambda core, now: [
        (who(replica), found) for replica in core.replicas if (found := value(replica)) is not None
    ]


def budgeted(value: Callable[[Budget], float]) -> Read:
    """Of every replica that serves within a budget."""
    return each(lambda replica: None if replica.ledger.budget is None else value(replica.ledger.budget))


def measured(value: Callable[[Calibration], float]) -> Read:
    """Of every replica that has measured speculation."""
    return each(lambda replica: None if replica.calibration is None else value(replica.calibration))


def each_of(counts: Callable[[Core], Mapping[str, float]]) -> Read:
    """Of every replica, by endpoint."""
    return lambda core, now: [(who(replica), counts(core)[replica.endpoint]) for replica in core.replicas]


def who(replica: Replica) -> tuple[str, str]:
    """Two replicas may have one name. Without one it has not announced itself yet."""
    return replica.name, replica.endpoint


def info(core: Core, now: float) -> Samples:
    model = core.replicas.model
    return [((core.version, model.name if model else "", model.fingerprint if model else ""), 1)]


def states(core: Core, now: float) -> Samples:
    for replica in core.replicas:
        current = "draining" if replica.alive and replica.draining else replica.state
        for state in STATES:
            yield (*who(replica), state), state == current


def last_seen(core: Core, now: float) -> Samples:
    return [(who(replica), now - replica.last_seen) for replica in core.replicas if replica.last_seen]


def waiting(core: Core, now: float) -> Samples:
    return [((tenant,), core.admission.counts(tenant)[0]) for tenant in core.metrics.tenants]


def running(core: Core, now: float) -> Samples:
    return [((tenant,), core.admission.counts(tenant)[1]) for tenant in core.metrics.tenants]


def depths(core: Core, now: float) -> Samples:
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for bucket in core.buckets:
        found[_kind(bucket.shape)] += len(bucket)
    return found.items()


def oldest(core: Core, now: float) -> Samples:
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for bucket in core.buckets:
        found[_kind(bucket.shape)] = max(found[_kind(bucket.shape)], now - bucket.oldest)
    return found.items()


def _kind(shape: Shape) -> tuple[str, str, str, str]:
    """What the label of a bucket keeps of its shape."""
    sampling, batch = shape.sampling, "yes" if shape.batchable else "no"
    return str(sampling.loops), str(shape.band or "any"), sampling.cache_mode, batch


def handles(core: Core, now: float) -> Samples:
    kinds = dict.fromkeys(("prefix", "resume", "scaffold"), 0)
    for held in core.handles:
        kinds[held.recipe.kind] += 1
    return [((kind,), count) for kind, count in kinds.items()]
