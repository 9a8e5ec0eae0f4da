"""Pages for monitoring. Catches: a reader that can hold up the loop, another reader or the listener; a loop
that stands still and looks healthy; a page that takes the service down."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from tests.unit.test_dispatcher_core import ALICE, R0, R1, Bench, announce
from tinyloop_serve.dispatcher import http as pages_over_http
from tinyloop_serve.dispatcher.http import CannotListen, Http, Page, Route
from tinyloop_serve.dispatcher.pages import ROUTES
from tinyloop_serve.dispatcher.wake import Wake
from tinyloop_serve.protocol.messages import Control, Pong


class Place:
    """Http and a loop that serves it; `known` is what the loop knows."""

    def __init__(self, routes: dict[str, Route], *known: Any) -> None:
        self.wake = Wake()
        self.http = Http("127.0.0.1:0", self.wake, routes)
        self.known = known
        self._stopped = threading.Event()
        self._loop = threading.Thread(target=self._turn)
        self._loop.start()

    def _turn(self) -> None:
        while not self._stopped.is_set():
            select.select([self.wake.fd], [], [], 10)
            self.wake.clear()
            if not self._stopped.is_set():
                self.http.answer(*self.known)

    def stop_the_loop(self) -> None:
        self._stopped.set()
        self.wake()
        self._loop.join()

    def connect(self) -> socket.socket:
        host, _, port = self.http.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def free(self) -> int:
        """Readers that would still be let in."""
        return self.http._listener._places._value

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        """Status, Content-Type, body."""
        connection = http.client.HTTPConnection(self.http.address, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
        connection.close()
        return found

    def close(self) -> None:
        self.stop_the_loop()
        self.http.close()


def text(found: object, accept: str) -> Page:
    return Page(200, "text/plain", str(found).encode())


@pytest.fixture
def place() -> Iterator[Callable[..., Place]]:
    places = []

    def make(*arguments: Any) -> Place:
        places.append(Place(*arguments))
        return places[-1]

    yield make
    for each in places:
        each.close()


def test_the_loop_reads_and_a_thread_beside_it_draws(place: Any) -> None:
    by: dict[str, str] = {}

    def read(number: int) -> int:
        by["read"] = threading.current_thread().name
        return number + 1

    def draw(found: int, accept: str) -> Page:
        by["draw"] = threading.current_thread().name
        return Page(200, "text/plain", f"{found} {accept}".encode())

    here = place({"/n": Route(read, draw)}, 41)
    assert here.get("/n?x=1", Accept="a/b") == (200, "text/plain", "42 a/b")
    assert by["read"] == here._loop.name != by["draw"]
    assert here.get("/n", method="HEAD") == (200, "text/plain", "")
    with here.connect() as raw:
        raw.sendall(b"HEAD /n HTTP/1.0\r\n\r\n")
        head = b"".join(iter(lambda: raw.recv(4096), b""))
    assert b"Content-Length: 3\r\n" in head and head.endswith(b"\r\n\r\n")
    status, _, body = here.get("/none")
    assert status == 404 and "/n" in body
    assert here.get("/n", method="POST")[0] == 501


def test_a_loop_that_stands_still_is_not_healthy(place: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pages_over_http, "PATIENCE_S", 0.1)
    here = place({"/health": Route(lambda: "fine", text)})
    assert here.get("/health")[0] == 200
    here.stop_the_loop()
    status, _, body = here.get("/health")
    assert status == 503 and "loop has not turned" in body


def test_a_page_that_fails_harms_nobody(place: Any) -> None:
    def fail() -> None:
        raise KeyError("missing")

    here = place({"/bad": Route(fail, text), "/good": Route(lambda: "fine", text)})
    status, _, body = here.get("/bad")
    assert status == 500 and "KeyError" in body
    assert here.get("/good")[0] == 200


def test_silent_readers_hold_up_nobody_and_too_many_are_turned_away(place: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pages_over_http, "MOST_READERS", 3)
    here = place({"/n": Route(lambda: "fine", text)})
    with contextlib.ExitStack() as open_ones:
        for _ in range(2):
            open_ones.enter_context(here.connect()).sendall(b"GET /n HT")
        assert here.get("/n")[0] == 200
        eventually(lambda: here.free() == 1)
        open_ones.enter_context(here.connect()).sendall(b"GET /n HT")
        eventually(lambda: here.free() == 0)
        one_too_many = open_ones.enter_context(here.connect())
        with contextlib.suppress(ConnectionError):  # a reset, if it was quicker than our words
            one_too_many.sendall(b"GET /n HTTP/1.0\r\n\r\n")
            assert one_too_many.recv(100) == b""
    eventually(lambda: here.free() == 3)
    assert here.get("/n")[0] == 200


@pytest.mark.parametrize("what", ["drips", "reads nothing"])
def test_a_reader_has_so_long_in_all_however_busy_it_looks(place: Any, monkeypatch: Any, what: str) -> None:
    monkeypatch.setattr(pages_over_http, "READER_S", 0.3)
    here = place({"/n": Route(lambda: "n" * (64 << 20), text)})
    with here.connect() as reader:
        if what == "reads nothing":
            reader.sendall(b"GET /n HTTP/1.0\r\n\r\n")
        reader.sendall(b"GET /n HTTP/1.0\r\nX: " if what == "drips" else b"")
        eventually(lambda: here.free() == pages_over_http.MOST_READERS - 1)

        def over() -> bool:
            if what == "drips":
                with contextlib.suppress(OSError):
                    reader.sendall(b"x")
            return here.free() == pages_over_http.MOST_READERS

        eventually(over)


def test_questions_of_readers_that_lost_patience_are_not_read(place: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pages_over_http, "PATIENCE_S", 0.05)
    here = place({"/n": Route(lambda: pytest.fail("nobody waits for it"), text)})
    here.stop_the_loop()
    assert here.get("/n")[0] == 503
    here.http.answer()


def test_a_turn_of_the_loop_answers_what_was_asked_before_it(place: Any) -> None:
    asked = []

    def read() -> str:
        asked.append(len(asked))
        if len(asked) < 5:  # as quick readers would, one after the other
            here.http._questions.append(pages_over_http._Question(read, SimpleQueue()))
        return "fine"

    here = place({"/n": Route(read, text)})
    assert here.get("/n")[0] == 200
    assert len(asked) == 1


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=address):
            Http(address, lambda: None, {})


# ------------------------------------------------------------------ what the pages say


def test_ready_is_about_the_fleet_and_health_about_the_loop(place: Any) -> None:
    bench = Bench(ready=1)
    here = place(ROUTES, bench.core, bench.now)
    assert here.get("/ready")[0] == 200
    bench.gone(R0)
    status, kind, body = here.get("/ready")
    assert (status, kind) == (503, "application/json")
    assert "connection was closed" in json.loads(body)["why"]
    assert here.get("/health")[0] == 200
    bench.replica(R0, announce(R0))
    assert here.get("/ready")[0] == 200
    bench.core.draining = True
    assert here.get("/ready")[0] == 503 and here.get("/health")[0] == 200


@pytest.mark.parametrize("fault", ["never came", "ill", "lost", "drained", "none"])
def test_the_probe_of_the_replicas_fails_for_every_fault_but_not_for_an_order(place: Any, fault: str) -> None:
    bench = Bench(ready=1 if fault == "never came" else 2)
    if fault == "ill":
        bench.replica(R1, Pong(1, health="3 calls of the engine failed in a row"))
    elif fault == "lost":
        bench.gone(R1, "its engine made no step for 31.0 s")
    elif fault == "drained":
        bench.client(ALICE, Control("c", "drain", R1))
    status, _, body = place(ROUTES, bench.core, bench.now).get("/health/replicas")
    said = json.loads(body)["wrong"]
    if fault in ("drained", "none"):
        assert status == 200 and said == {}
    else:
        why = {"ill": "failed in a row", "lost": "made no step", "never came": "starting"}[fault]
        ((who, told),) = said.items()
        assert status == 503 and R1 in who and why in told


def test_metrics_come_in_the_format_that_the_reader_accepts(place: Any) -> None:
    bench = Bench(ready=1)
    here = place(ROUTES, bench.core, bench.now)
    status, kind, body = here.get("/metrics")
    assert status == 200 and kind.startswith("text/plain") and "tinyloop_ready 1.0" in body
    assert "process_resident_memory_bytes" in body
    _, kind, body = here.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and body.endswith("# EOF\n")
