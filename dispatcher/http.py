"""Pages for monitoring over HTTP, in threads beside the loop.

A thread here never looks at the dispatcher itself: it puts its question into a queue, wakes the loop, and the
loop answers between two events (`answer`). So a page tells of one moment, a slow or silent reader holds up
nobody, and a loop that has stopped turning shows: its questions stay unanswered, which is a 503. What the
pages say is in `pages.py`. Plain HTTP without keys: bind it to loopback or to a network for monitoring.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from queue import Empty, SimpleQueue
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

PATIENCE_S = 2.0  # with the loop, before it counts as stuck
READER_S = 5.0  # for one reader to ask and to read, in all
MOST_READERS = 16  # at once; more are turned away
LOOK_S = 0.2  # how soon the listener notices `close`, and readers whose time is over
TEXT = "text/plain; charset=utf-8"


class CannotListen(Exception):
    """The address for HTTP cannot be bound."""


class Page(NamedTuple):
    status: int
    kind: str  # Content-Type
    body: bytes


class Route(NamedTuple):
    """`read` is called by the loop with whatever it gives to `answer`; `draw`, with what came of that and the
    reader's Accept header, in a thread here."""

    read: Callable[..., Any]
    draw: Callable[[Any, str], Page]


class _Question(NamedTuple):
    read: Callable[..., Any]
    answer: SimpleQueue[Any]


class Http:
    def __init__(self, address: str, wake: Callable[[], None], routes: Mapping[str, Route]) -> None:
        """Listens at `address`, HOST:PORT. `wake` makes the loop call `answer`. Raises `CannotListen`."""
        self._wake = wake
        self._routes = routes
        self._questions: deque[_Question] = deque()
        host, _, port = address.rpartition(":")
        try:
            self._listener = _Listener(host.strip("[]"), int(port), self.page)
        except OSError as error:
            raise CannotListen(f"http: {address!r} cannot be bound: {error}") from error
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=[LOOK_S], name="http", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """HOST:PORT, the port filled in."""
        host, port, *_ = self._listener.server_address
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def answer(self, *known: object) -> None:
        """By the loop, after each wake: what was asked, from what is known now. Never blocks or raises. What
        is asked meanwhile has its own wake, and waits for the next turn."""
        for _ in range(len(self._questions)):
            try:
                question = self._questions.popleft()
            except IndexError:
                return  # its reader has lost patience
            try:
                found = question.read(*known)
            except Exception as error:  # a page must not take the service down with it
                found = error
            question.answer.put(found)

    def page(self, path: str, accept: str) -> Page:
        """In a reader's thread."""
        if (route := self._routes.get(path.partition("?")[0])) is None:
            return Page(404, TEXT, f"there are {', '.join(self._routes)}\n".encode())
        question = _Question(route.read, SimpleQueue())
        self._questions.append(question)
        self._wake()
        try:
            found = question.answer.get(timeout=PATIENCE_S)
        except Empty:
            with contextlib.suppress(ValueError):  # it is being answered, too late
                self._questions.remove(question)
            return Page(503, TEXT, f"the dispatcher's loop has not turned for {PATIENCE_S:g} s\n".encode())
        if isinstance(found, Exception):
            return Page(500, TEXT, f"{type(found).__name__}: {found}\n".encode())
        return route.draw(found, accept)

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


class _Listener(ThreadingMixIn, TCPServer):
    """Without the look-up of our host's name that the standard library's HTTP server begins with."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MOST_READERS

    def __init__(self, host: str, port: int, page: Callable[[str, str], Page]) -> None:
        self.page = page
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MOST_READERS)
        self._until: dict[socket.socket, float] = {}  # when a reader's time is over
        super().__init__((host, port), _Reader)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            self._until[request] = time.monotonic() + READER_S
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._until[request]
            self._places.release()

    def service_actions(self) -> None:
        """Every `LOOK_S`. A reader that drips is never too slow for a socket's own timeout."""
        now = time.monotonic()
        for request, until in list(self._until.items()):
            if now > until:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away, or was too slow, is nobody's concern."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Reader(BaseHTTPRequestHandler):
    server: _Listener

    def do_GET(self) -> None:
        page = self.server.page(self.path, self.headers.get("Accept", ""))
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """The journal is for requests of ours, not for these."""
