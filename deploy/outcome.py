"""How a command ends: every error becomes one message, and the exit status that cli.py documents.

error                                       status
TransportError but ProtocolError            69    with how to start a fleet
Overloaded, Unavailable, DeadlineExceeded   75
RequestError                                2
other errors of the fleet                   1
errors of the engine, artifacts, config     78
a file that is not there, or not ours       2
other errors of the system                  1
KeyboardInterrupt                           130
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

FAILED, USAGE, UNAVAILABLE, TRY_LATER, CONFIG, INTERRUPTED = 1, 2, 69, 75, 78, 130


class CommandFault(Exception):
    """The command cannot be carried out as given; the message says what to change."""


@dataclass
class Result:
    status: int = 0


@contextlib.contextmanager
def reported(*, as_json: bool) -> Iterator[Result]:
    """Runs the body of a command. Errors are printed, as a JSON object on standard output with `as_json`."""
    result = Result()
    try:
        yield result
        sys.stdout.flush()
    except KeyboardInterrupt:
        result.status = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result.status = FAILED
    except CommandFault as error:
        result.status = _report(error, USAGE, as_json)
    except Exception as error:
        status = _status_of(error)
        if status is None:
            raise
        result.status = _report(error, status, as_json)


def _status_of(error: Exception) -> int | None:
    """None: a mistake of ours, to be shown with its traceback."""
    from tinyloop_serve.deploy.endpoints import UnsafeDirectory
    from tinyloop_serve.deploy.tables import BadConfig
    from tinyloop_serve.native import errors as native
    from tinyloop_serve.protocol import errors as protocol

    table: list[tuple[type[Exception], int]] = [
        (protocol.ProtocolError, FAILED),
        (protocol.TransportError, UNAVAILABLE),
        (protocol.Overloaded, TRY_LATER),
        (protocol.Unavailable, TRY_LATER),
        (protocol.DeadlineExceeded, TRY_LATER),
        (protocol.RequestError, USAGE),
        (protocol.TinyLoopError, FAILED),
        (native.TinyLoopError, CONFIG),
        (UnsafeDirectory, CONFIG),
        (BadConfig, CONFIG),
        (FileNotFoundError, USAGE),
        (IsADirectoryError, USAGE),
        (NotADirectoryError, USAGE),
        (PermissionError, USAGE),
        (OSError, FAILED),
    ]
    return next((status for kind, status in table if isinstance(error, kind)), None)


def _report(error: Exception, status: int, as_json: bool) -> int:
    from tinyloop_serve.protocol.errors import TinyLoopError

    message = str(error)
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {error.strerror}"
    if as_json:
        described = {"code": "command", "message": message}
        if isinstance(error, TinyLoopError):
            described["code"] = error.code
        for name in ("field", "value", "accepted"):
            if getattr(error, name, None) not in (None, ""):
                described[name] = str(getattr(error, name))
        print(json.dumps({"error": described}))
    print(f"tinyloop: {message}", file=sys.stderr)
    if status == UNAVAILABLE and "tinyloop up" not in message:
        print("tinyloop: start a fleet with `tinyloop up`, in another terminal", file=sys.stderr)
    return status
