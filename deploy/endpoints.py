"""Where a local fleet and its clients meet: one private directory per user, one socket in it.

The same defaults serve `tinyloop up` and every client command, so neither needs a flag. This file must
not know processes or sockets.
"""

from __future__ import annotations

import os
import stat
import zlib

from tinyloop_serve.protocol.limits import IPC_PATH_BYTES

LONGEST_NAME = len("/replicas-00000000/replica-000.sock")  # of what a fleet puts into the directory


class UnsafeDirectory(Exception):
    """The directory belongs to, or is open to, somebody else: who could read prompts there, or answer
    them."""


def default_endpoint() -> str:
    """`TINYLOOP_ENDPOINT`, or the socket of this user's own fleet."""
    return os.environ.get("TINYLOOP_ENDPOINT") or f"ipc://{runtime_directory()}/front.sock"


def runtime_directory() -> str:
    """This user's directory for sockets; it need not exist yet.

    In `XDG_RUNTIME_DIR`, else in the temporary directory; whichever leaves room for a socket's path.
    """
    candidates = [
        f"{base}/{name}"
        for base, name in (
            (os.environ.get("XDG_RUNTIME_DIR"), "tinyloop"),
            (os.environ.get("TMPDIR"), f"tinyloop-{os.getuid()}"),
        )
        if base and os.path.isabs(base) and os.path.isdir(base)
    ]
    fitting = [path for path in candidates if len(os.fsencode(path)) + LONGEST_NAME <= IPC_PATH_BYTES]
    return [*fitting, f"/tmp/tinyloop-{os.getuid()}"][0]


def replica_directory(endpoint: str) -> str:
    """Where the fleet behind `endpoint` has its replicas' sockets: always the same place for the same
    endpoint."""
    return f"{runtime_directory()}/replicas-{zlib.crc32(endpoint.encode()):08x}"


def make_private(directory: str) -> None:
    """Makes `directory`, for this user only. Raises `UnsafeDirectory` when it is there and is not."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    check_private(directory)


def check_private(directory: str) -> None:
    """Raises `UnsafeDirectory` unless `directory` is missing or this user's alone."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UnsafeDirectory(
            f"{directory} is not a directory of this user alone (mode 0700);"
            " remove it, or set XDG_RUNTIME_DIR"
        )
