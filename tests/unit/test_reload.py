"""The steps of a reload, with a scripted dispatcher. Catches: one that never ends because a replica is
unknown, or stops half way because the dispatcher was restarted, which forgets what it was ordered."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tinyloop_serve import native
from tinyloop_serve.deploy import reload
from tinyloop_serve.deploy.reload import Reload, Verdict
from tinyloop_serve.protocol.errors import ConnectFailed
from tinyloop_serve.protocol.messages import ReplicaStatus


class Dispatcher:
    """As its client sees it; `event` is called with every order and may do it harm."""

    def __init__(self) -> None:
        self.models = {"replica-0": "old", "replica-1": "old"}  # of those that are known
        self.orders: list[tuple[str, str]] = []
        self.event: Callable[[str, str], None] = lambda action, target: None
        self._down = 0
        self._began = time.monotonic() - 1000

    def restart(self) -> None:
        self._down = 3
        self._began += 1
        self.orders.append(("restarted", ""))

    def connect(self, endpoint: str) -> Dispatcher:
        self._answer()
        return self

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> Any:
        self._answer()
        known = [
            ReplicaStatus(name, f"ipc://{name}", "ready", fingerprint=model)
            for name, model in self.models.items()
        ]
        return SimpleNamespace(uptime_ms=int(1000 * (time.monotonic() - self._began)), replicas=known)

    def control(self, action: str, target: str, *, within_s: float) -> str:
        self._answer()
        self.orders.append((action, target))
        self.event(action, target)
        return ""

    def _answer(self) -> None:
        if self._down:
            self._down -= 1
            raise ConnectFailed("nobody is there")


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    made = Dispatcher()
    monkeypatch.setattr(reload, "connect", made.connect)
    monkeypatch.setattr(reload, "LOOK_S", 0.001)
    monkeypatch.setattr(reload, "KNOWN_S", 0.05)
    monkeypatch.setattr(native, "inspect_artifact", lambda model: {"fingerprint": "new"})
    return made


def watch(dispatcher: Dispatcher, restarting: Callable[[str], None] = lambda name: None) -> Verdict:
    """As the fleet does: restarts the replicas that the reload names."""
    going = Reload("ipc:///x", "m", ["replica-0", "replica-1"])
    end = time.monotonic() + 30
    while (verdict := going.verdict()) is None:
        assert time.monotonic() < end, "no verdict"
        if (name := going.next_to_restart()) is not None:
            dispatcher.orders.append(("restart", name))
            restarting(name)
            dispatcher.models[name] = "new"
        time.sleep(0.001)
    return verdict


TURN = [("accept", "new"), ("drain", "replica-0"), ("restart", "replica-0")]
NEXT = [("accept", "new"), ("drain", "replica-1"), ("restart", "replica-1")]


def test_one_replica_after_the_other(dispatcher: Dispatcher) -> None:
    assert watch(dispatcher).good and dispatcher.orders == TURN + NEXT


def test_a_dispatcher_that_is_away_at_the_beginning_is_waited_for(dispatcher: Dispatcher) -> None:
    dispatcher.restart()
    assert watch(dispatcher).good and dispatcher.orders == [("restarted", ""), *TURN, *NEXT]


def test_a_replica_that_the_dispatcher_does_not_know_is_restarted_too(dispatcher: Dispatcher) -> None:
    del dispatcher.models["replica-0"]
    assert watch(dispatcher).good and dispatcher.orders == [TURN[0], TURN[2], *NEXT]


def test_a_restarted_dispatcher_is_given_its_orders_again(dispatcher: Dispatcher) -> None:
    harm = iter([dispatcher.restart])

    def event(action: str, target: str) -> None:
        if action == "drain":
            next(harm, lambda: None)()

    dispatcher.event = event
    assert watch(dispatcher).good
    assert dispatcher.orders == [*TURN[:2], ("restarted", ""), *TURN, *NEXT]


def test_a_replica_that_came_back_while_the_dispatcher_was_away_keeps_what_it_has(
    dispatcher: Dispatcher,
) -> None:
    harm = iter([dispatcher.restart])
    assert watch(dispatcher, lambda name: next(harm, lambda: None)()).good
    assert dispatcher.orders == [*TURN, ("restarted", ""), TURN[0], *NEXT]


def test_every_end_is_told(dispatcher: Dispatcher) -> None:
    def event(action: str, target: str) -> None:
        raise KeyError("a mistake of ours")

    dispatcher.event = event
    verdict = watch(dispatcher)
    assert not verdict.good and "a mistake of ours" in verdict.text


def test_a_dispatcher_without_end_is_not_served_without_end(dispatcher: Dispatcher) -> None:
    dispatcher.event = lambda action, target: dispatcher.restart()
    verdict = watch(dispatcher)
    assert not verdict.good and "restarted 5 times during the turn of replica-0" in verdict.text
