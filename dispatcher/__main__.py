"""`python -m tinyloop_serve.dispatcher`: bind the front, say READY, serve until SIGTERM.

    exit status 0    stopped by SIGTERM or SIGINT, or the parent process is gone
                69   the endpoint cannot be bound
                75   another dispatcher serves the endpoint
                78   the configuration is wrong: restarting does not help

READY is one line on standard output: `READY endpoint=ipc:///...`. Logs are JSON lines on standard error.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import metadata

import zmq

from tinyloop_serve.dispatcher.config import EXIT_CONFIG, parse
from tinyloop_serve.dispatcher.endpoints import EndpointTaken
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.dispatcher.server import Server

EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE
EXIT_TAKEN = 75  # EX_TEMPFAIL: it may be free later
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    try:
        config = parse(arguments)
        if config.die_with_parent:
            die_with_parent(config.die_with_parent)
        server = Server(config, Journal(), version=_version())
    except ConfigError as error:
        return _give_up(str(error), EXIT_CONFIG)
    except EndpointTaken as error:
        return _give_up(str(error), EXIT_TAKEN)
    except (OSError, zmq.ZMQError) as error:
        return _give_up(f"cannot bind {config.front}: {error}", EXIT_UNAVAILABLE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    print(f"READY endpoint={server.endpoint}", flush=True)
    server.run()
    return 0


def die_with_parent(parent: int) -> None:
    """Asks the kernel for a SIGTERM when `parent`, the process that started us, is gone; exits if it is.

    The kernel watches the *thread* that started us: a supervisor starts its children from its main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request reached the kernel
        raise SystemExit(0)


def _version() -> str:
    try:
        return metadata.version("tinyloop-serve")
    except metadata.PackageNotFoundError:
        return ""


def _give_up(reason: str, status: int) -> int:
    print(f"tinyloop-dispatcher: {reason}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
