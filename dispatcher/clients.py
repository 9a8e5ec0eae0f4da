"""Which clients have promised to stay in touch, and who broke the promise.

A client that has sent a `Ping` with a lease is held to it; one that never did is gone only when it cannot
be reached.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

MAX_LEASE_S = 3600.0


@dataclass(slots=True)
class _Lease:
    seconds: float
    seen: float


@dataclass
class Clients:
    _leases: dict[bytes, _Lease] = field(default_factory=dict)

    def lease(self, client: bytes, lease_ms: int, now: float) -> None:
        """The promise, renewed; 0 withdraws it."""
        if lease_ms > 0:
            self._leases[client] = _Lease(min(lease_ms / 1000, MAX_LEASE_S), now)
        else:
            self._leases.pop(client, None)

    def saw(self, client: bytes, now: float) -> None:
        if lease := self._leases.get(client):
            lease.seen = now

    def excuse(self, seconds: float) -> None:
        """We were not running for so long, and may have been deaf; it counts against nobody."""
        for lease in self._leases.values():
            lease.seen += seconds

    def expired(self, now: float) -> list[bytes]:
        return [client for client, lease in self._leases.items() if now - lease.seen > lease.seconds]

    def remove(self, client: bytes) -> None:
        self._leases.pop(client, None)

    def known(self) -> Set[bytes]:
        return self._leases.keys()
