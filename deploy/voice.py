"""What a local fleet says: that it serves, on standard output; what happens to it, and what its children say,
on standard error; and the dispatcher's journal, which goes to a file. None of it may hold up the fleet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tinyloop_serve.deploy import endpoints
from tinyloop_serve.deploy.plan import Plan
from tinyloop_serve.protocol.lines import Lines, to_stderr, to_stdout


class Voice:
    def __init__(self) -> None:
        self._shown, self._said = to_stdout(), to_stderr()
        self._journal: Lines | None = None

    def say(self, text: str) -> None:
        self._said.write(f"tinyloop: {text}")

    def pass_on(self, name: str, line: str) -> None:
        """Of the child `name`. The dispatcher's journal, in JSON, is kept where there is a log, and dropped
        otherwise."""
        if not line.startswith("{"):
            self._said.write(f"{name}: {line}")
        elif self._journal:
            self._journal.write(line)

    def announce(self, plan: Plan, endpoint: str, http: str, took_s: float) -> None:
        """That the fleet serves, and how to use it."""
        pages = f" http={http}" if http else ""
        flag = "" if endpoint == endpoints.default_endpoint() else f" --endpoint {endpoint}"
        self._shown.write(
            f"READY endpoint={endpoint} replicas={plan.replicas} threads={plan.threads_each()}"
            f" startup_ms={took_s * 1000:.0f}{pages}"
            f'\n  try:  tinyloop generate{flag} "The definition of"'
            f"\n        tinyloop status{flag}"
            "\n  Ctrl-C stops the fleet"
        )

    @contextlib.contextmanager
    def log_to(self, path: str) -> Iterator[None]:
        """Keeps the journal there meanwhile. Raises `OSError`."""

        def lost(why: str) -> None:
            self.say(f"--log {path}: {why}; its lines are lost until that is over")

        with open(path, "ab", buffering=0) as file:
            self._journal = Lines(file.fileno(), lost)
            try:
                yield
            finally:
                self._journal.close()

    def close(self) -> None:
        self._shown.close()
        self._said.close()
