"""The reloads of a fleet that serves, one at a time: reload.py says whose turn it is, this file restarts that
replica, and writes down how it went.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

from tinyloop_serve.deploy.children import Child
from tinyloop_serve.deploy.local import Papers
from tinyloop_serve.deploy.reload import Reload


class Renewal:
    def __init__(
        self, model: str, replicas: Sequence[Child], papers: Papers, say: Callable[[str], None]
    ) -> None:
        self._model = model
        self._replicas = {child.name: child for child in replicas}
        self._papers = papers
        self._say = say
        self._reload: Reload | None = None  # the one in progress

    @property
    def goes_on(self) -> bool:
        return self._reload is not None

    def go_on(self, endpoint: str, now: float, *, wanted: Callable[[], bool]) -> None:
        """A changed model file: one replica after the other ends its requests and starts with the new one.
        `wanted` is asked for the next one when none goes on."""
        if self._reload is None and wanted():
            self._reload = Reload(endpoint, self._model, list(self._replicas))
            with self._on_paper():
                self._papers.reload_begins()
        if self._reload is None:
            return
        while (name := self._reload.next_to_restart()) is not None:
            child = self._replicas[name]
            child.start_at = now if not child.running else child.start_at
            child.restarts.never_ready = 0
            child.signal(signal.SIGTERM)
        if (verdict := self._reload.verdict()) is not None:
            self._say(verdict.text)
            self._reload = None
            with self._on_paper():
                self._papers.reload_ended(verdict.good, verdict.text)

    @contextlib.contextmanager
    def _on_paper(self) -> Iterator[None]:
        """The fleet goes on where the record of a reload cannot be written: the disk is full, say."""
        try:
            yield
        except OSError as error:
            self._say(f"what becomes of the reload cannot be written down: {error}")
