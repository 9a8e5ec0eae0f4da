"""Whether this replica can still work: failures of the engine in a row, and the way back.

After `MOST_FAILURES` failed calls in a row, or a single one that leaves no doubt, it says that it is ill and
the dispatcher gives it no more work; it then tries itself, once per `PROBE_S`, and is well again with the
first success. When `MOST_PROBES` have failed too, the process ends with `EXIT_ILL` and its supervisor starts
a fresh one. Belongs to the decoding thread; `text` may be read from any.
"""

from __future__ import annotations

EXIT_ILL = 70  # EX_SOFTWARE
MOST_FAILURES = 3
MOST_PROBES = 5
PROBE_S = 1.0
WELL = "ok"


class Health:
    def __init__(self) -> None:
        self.text = WELL  # or what is wrong
        self._failures = 0
        self._trials = 0  # that failed, of those that it made itself while it was ill

    @property
    def ill(self) -> bool:
        return self.text != WELL

    @property
    def hopeless(self) -> bool:
        return self._trials >= MOST_PROBES

    def succeeded(self) -> None:
        self.text, self._failures, self._trials = WELL, 0, 0

    def failed(self, what: str, *, now: bool = False, trial: bool = False) -> None:
        """A call of the engine failed; `now`: that alone makes it ill. `trial`: it was one of its own; what
        others still asked for may fail in no time, and says nothing of how long the trouble lasts."""
        self._failures += 1
        self._trials += trial
        if now and not self.ill:
            self.text = what
        if self._failures >= MOST_FAILURES:
            self.text = f"{self._failures} calls of the engine failed in a row, the last with {what}"
