"""Who may use the fleet, and how much of it: `[tenants.NAME]` tables of the configuration file.

A tenant is known by the key of its connection; `LOCAL` is everybody who connects without one (an ipc socket's
file permissions, or loopback, let them in). What a client writes into its messages has no say in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOCAL = "local"


@dataclass(frozen=True)
class Tenant:
    """Counts are of requests and handles; 0 = only the common limit."""

    name: str
    keys: tuple[str, ...] = ()  # CURVE public keys, Z85
    weight: float = 1.0  # its share of the work beside other tenants
    max_waiting: int = 0
    max_running: int = 0
    max_handles: int = 0
    max_priority: int = 10  # higher ones are cut to it
    admin: bool = False  # may give operators' orders


class Tenants:
    def __init__(self, configured: Mapping[str, Tenant]) -> None:
        self._all = {LOCAL: Tenant(LOCAL, admin=True), **configured}
        self._by_key = {key: tenant.name for tenant in self._all.values() for key in tenant.keys}

    def of(self, name: str) -> Tenant:
        """The tenant of that name; one that was never configured has no rights beyond the common ones."""
        return self._all.get(name) or Tenant(name)

    def named_by(self, key: str) -> str | None:
        """The tenant whose CURVE public key (Z85) this is; None: nobody's, so it may not connect."""
        return self._by_key.get(key)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._all)

    @property
    def keys(self) -> frozenset[str]:
        """Every key that may connect."""
        return frozenset(self._by_key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tenants) and self._all == other._all

    def __hash__(self) -> int:
        return hash(frozenset(self._all))
