"""Which clients there are: of which tenant each one is, who promised to stay in touch, and who broke it.

A client that has sent a `Ping` with a lease is held to it; one that never did is gone only when it cannot
be reached. One that never did, has nothing open and is silent for long is forgotten, which costs it nothing.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

MAX_LEASE_S = 3600.0
IDLE_S = 600.0  # without a lease


@dataclass(slots=True)
class _Client:
    tenant: str
    seen: float
    lease_s: float = 0.0  # 0 = no promise


@dataclass
class Clients:
    _all: dict[bytes, _Client] = field(default_factory=dict)

    def saw(self, client: bytes, tenant: str, now: float) -> bool:
        """It said something; False when it is another tenant's than the client we know by this routing id."""
        known = self._all.get(client)
        if known is None:
            self._all[client] = _Client(tenant, now)
            return True
        known.seen = now
        return known.tenant == tenant

    def lease(self, client: bytes, lease_ms: int) -> None:
        """The promise, renewed; 0 withdraws it."""
        self._all[client].lease_s = min(lease_ms / 1000, MAX_LEASE_S)

    def excuse(self, seconds: float) -> None:
        """We were not running for so long, and may have been deaf; it counts against nobody."""
        for client in self._all.values():
            client.seen += seconds

    def expired(self, now: float) -> list[bytes]:
        return [name for name, each in self._all.items() if each.lease_s and now - each.seen > each.lease_s]

    def idle(self, now: float) -> list[bytes]:
        """Those without a lease that have been silent for long."""
        return [name for name, each in self._all.items() if not each.lease_s and now - each.seen > IDLE_S]

    def remove(self, client: bytes) -> None:
        self._all.pop(client, None)

    def known(self) -> Set[bytes]:
        return self._all.keys()
