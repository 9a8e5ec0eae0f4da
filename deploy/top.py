"""`tinyloop top`: a fleet's load, live. On a terminal a screen that is drawn anew, else a line per interval.

A thread of its own asks the dispatcher, so that keys and a resized window are answered at once also when
nobody answers. Curses keeps the terminal: whatever ends this, it is as it was before.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from tinyloop_serve.deploy import screen
from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.deploy.screen import Look, Rates
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.errors import TinyLoopError

if TYPE_CHECKING:
    import curses

KEPT_S = 5.0  # of looks, for the rates
KEY_MS = 50  # how long a key or a new size may have to wait
QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watch:
    """Looks at a fleet every `interval_s`. The first look is the caller's, who so gets its error."""

    def __init__(self, endpoint: str, interval_s: float) -> None:
        self.looks: tuple[Look, ...] = ()  # of the last seconds, in one life of the dispatcher
        self.trouble = ""  # why there is nothing newer
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._client: Client | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def look(self) -> None:
        if self._client is None:
            self._client = connect(self._endpoint)
        try:
            status = self._client.status()
        except TinyLoopError:
            self._client.close()
            self._client = None
            raise
        now = time.monotonic()
        oldest = now - KEPT_S - self._interval_s
        before = [
            look
            for look in self.looks
            if look.at > oldest and look.status.uptime_ms <= status.uptime_ms  # else it was another life
        ]
        self.looks, self.trouble = (*before, Look(now, status)), ""

    def rates(self) -> Rates:
        looks = self.looks
        return screen.between(looks[0], looks[-1])

    def pause(self) -> bool:
        """Until the next look is due; whether there is one."""
        return not self._over.wait(self._interval_s)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def close(self) -> None:
        self.stop()
        if self._thread.is_alive():
            self._thread.join(1.0)
        if self._client is not None:
            self._client.close()

    def _run(self) -> None:
        while self.pause():
            try:
                self.look()
            except (TinyLoopError, OSError) as error:
                self.trouble = str(error)


def show(endpoint: str, *, interval_s: float, once: bool, as_json: bool) -> int:
    """Until somebody quits; `once` and `as_json`: after one interval."""
    watch = Watch(endpoint, interval_s)
    try:
        watch.look()
        if once or as_json:
            watch.pause()
            watch.look()
            _print(endpoint, watch, as_json)
        elif sys.stdout.isatty() and sys.stdin.isatty() and _can_draw():
            _draw_until_quit(endpoint, watch)
        else:
            _print_until_quit(watch)
    finally:
        watch.close()
    return 0


def _print(endpoint: str, watch: Watch, as_json: bool) -> None:
    status, rates = watch.looks[-1].status, watch.rates()
    if not as_json:
        whole = 1 << 16  # columns and lines: nothing is cut
        print(*(text for text, _ in screen.lines(endpoint, rates, status, "", whole, whole)), sep="\n")
        return
    fields = msgspec.to_builtins(status)
    del fields["id"], fields["type"]
    per_s = {
        "over_s": rates.over_s,
        "tokens_per_s": rates.tokens,
        "requests_per_s": rates.requests,
    }
    for replica in fields["replicas"]:
        replica["tokens_per_s"] = rates.replicas[replica["endpoint"]]
    print(json.dumps({"endpoint": endpoint, **per_s, **fields}, ensure_ascii=False))


def _print_until_quit(watch: Watch) -> None:
    for number in QUIT_SIGNALS:
        signal.signal(number, lambda *_: watch.stop())
    while watch.pause():
        stamp = time.strftime("%H:%M:%S")
        try:
            watch.look()
        except (TinyLoopError, OSError) as error:
            print(f"{stamp} no answer: {error}", flush=True)
        else:
            print(stamp, screen.line(watch.rates(), watch.looks[-1].status), flush=True)


# ------------------------------------------------------------------ the live screen


def _can_draw() -> bool:
    try:
        import curses

        curses.setupterm()
    except (ImportError, curses.error):  # a Python without it, or a terminal that nobody knows
        return False
    return curses.tigetstr("cup") is not None


def _draw_until_quit(endpoint: str, watch: Watch) -> None:
    import curses

    quits: list[int] = []
    for number in QUIT_SIGNALS:
        signal.signal(number, lambda n, _: quits.append(n))

    def loop(window: curses.window) -> None:
        window.timeout(KEY_MS)
        drawn: tuple[Look, str] | None = None
        while not quits:
            if (news := (watch.looks[-1], watch.trouble)) != drawn:
                _draw(window, endpoint, watch)
                drawn = news
            key = window.getch()
            if key == curses.KEY_RESIZE:
                window.clear()
                drawn = None
            elif key in (ord("q"), ord("Q")):
                return

    watch.start()
    curses.wrapper(loop)


def _draw(window: curses.window, endpoint: str, watch: Watch) -> None:
    import curses

    height, width = window.getmaxyx()
    status, rates = watch.looks[-1].status, watch.rates()
    window.erase()
    # The last column stays empty: writing to the last cell of all would scroll.
    for row, (text, heading) in enumerate(
        screen.lines(endpoint, rates, status, watch.trouble, width - 1, height)
    ):
        window.addstr(row, 0, text, curses.A_BOLD if heading else curses.A_NORMAL)
    window.refresh()
