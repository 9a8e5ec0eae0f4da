"""Who is still there. Catches: a promise that outlives its bound, a table that only grows."""

from __future__ import annotations

from tinyloop_serve.dispatcher.clients import IDLE_S, MAX_LEASE_S, Clients

ALICE, BOB = b"alice", b"bob"


def test_the_longest_lease_is_bounded_and_zero_takes_it_back() -> None:
    clients = Clients()
    clients.saw(ALICE, "acme", 0.0)
    clients.lease(ALICE, int(2000 * MAX_LEASE_S))
    assert clients.expired(MAX_LEASE_S) == []
    assert clients.expired(MAX_LEASE_S + 1) == [ALICE]
    clients.lease(ALICE, 0)
    assert clients.expired(MAX_LEASE_S + 1) == []


def test_idle_are_those_without_a_lease_that_have_been_silent_for_long() -> None:
    clients = Clients()
    for client in (ALICE, BOB):
        clients.saw(client, "acme", 0.0)
    clients.lease(BOB, int(2000 * IDLE_S))
    assert clients.idle(IDLE_S) == []
    assert clients.idle(IDLE_S + 1) == [ALICE]
    clients.saw(ALICE, "acme", IDLE_S)
    assert clients.idle(IDLE_S + 1) == []
