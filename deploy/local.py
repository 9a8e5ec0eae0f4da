"""What a local fleet writes down for the other commands of its user: who it is, and how its last reload went.

A process id alone may by now be another process, which a signal would end: the record has the time at which
the process was started as well, counted from the machine's own start, because the clock may be set meanwhile.
This file must not know children or sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tinyloop_serve.deploy import endpoints


@dataclass(frozen=True)
class Record:
    pid: int
    started: int  # clock ticks after the machine
    model: str  # path of the artifact
    reloading: bool = False
    reloads: int = 0  # that have ended
    reloaded: bool = True  # the last one did what it should
    verdict: str = ""  # of the last one, for people


class Papers:
    """The record of this process, on disk from `write` to `remove`."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._path = _path(endpoint)
        self._record = Record(os.getpid(), _started(os.getpid()), os.path.abspath(model))

    def write(self) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self._record)))
        draft.replace(self._path)

    def reload_begins(self) -> None:
        self._record = replace(self._record, reloading=True)
        self.write()

    def reload_ended(self, reloaded: bool, verdict: str) -> None:
        count = self._record.reloads + 1
        self._record = replace(
            self._record, reloading=False, reloads=count, reloaded=reloaded, verdict=verdict
        )
        self.write()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def read(endpoint: str) -> Record | None:
    """Of this user's fleet behind `endpoint`; None when there is none that lives."""
    try:
        record = Record(**json.loads(_path(endpoint).read_text()))
        alive = _started(record.pid) == record.started
    except (OSError, ValueError, TypeError):
        return None
    return record if alive else None


def _started(pid: int) -> int:
    """proc(5), field 22; the name, which comes before it, may have spaces and brackets. Raises `OSError`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _path(endpoint: str) -> Path:
    return Path(endpoints.replica_directory(endpoint), "fleet.json")
