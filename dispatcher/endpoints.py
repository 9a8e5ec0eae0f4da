"""The front's place in the file system: one dispatcher per ipc path, and a path that only its group reaches.

A second bind of an ipc path silently steals it, so a lock file is held first. It stays when the process
ends: removing it would race with the next owner. tcp needs none of this: its bind fails by itself.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.protocol.host import lock


class Place:
    """Held from before the bind until after the close."""

    def __init__(self, endpoint: str) -> None:
        """Raises `EndpointTaken`, `ConfigError` (the directory is open to everybody) or OSError."""
        self._lock = -1
        scheme, _, path = endpoint.partition("://")
        self._path = Path(path) if scheme == "ipc" else None
        if self._path is not None:
            _private_directory(self._path.parent)
            self._lock = lock(str(self._path))
            self._remove_socket()  # a stale one: its owner would hold the lock

    def opened(self) -> None:
        """After the bind: owner and group may connect."""
        if self._path is not None:
            self._path.chmod(0o660)

    def close(self) -> None:
        if self._path is not None and self._lock >= 0:
            self._remove_socket()
            os.close(self._lock)
            self._lock = -1

    def _remove_socket(self) -> None:
        assert self._path is not None
        if self._path.is_socket():
            self._path.unlink()


def _private_directory(directory: Path) -> None:
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH:
        accepted = "a path in a directory that others cannot write to"
        message = f"front: everybody may write to {directory} ({stat.filemode(mode)}); expected {accepted}"
        raise ConfigError(message, field="front", value=str(directory), accepted=accepted)
