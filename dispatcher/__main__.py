"""`python -m tinyloop_serve.dispatcher`: bind the front, say READY, serve until SIGTERM.

    exit status 0    stopped by SIGTERM or SIGINT, or the parent process is gone
                69   the endpoint, or the address for HTTP, cannot be bound
                75   another dispatcher serves the endpoint
                78   the configuration is wrong: restarting does not help

READY is one line on standard output: `READY endpoint=ipc:///... http=127.0.0.1:9190`. Logs are JSON lines on
standard error.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from importlib import metadata

import zmq

from tinyloop_serve.dispatcher.config import EXIT_CONFIG, parse
from tinyloop_serve.dispatcher.http import CannotListen
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.dispatcher.server import Server
from tinyloop_serve.protocol.host import EndpointTaken, Supervisor, allow_many_files, die_with_parent
from tinyloop_serve.protocol.lines import Lines, to_stderr

EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE
EXIT_TAKEN = 75  # EX_TEMPFAIL: it may be free later


def main(arguments: list[str]) -> int:
    with contextlib.closing(to_stderr()) as said:
        return _serve(arguments, said)


def _serve(arguments: list[str], said: Lines) -> int:
    try:
        config = parse(arguments)
        if config.die_with_parent:
            die_with_parent(config.die_with_parent)
        allow_many_files()
        server = Server(config, Journal(said.write), version=_version())
    except ConfigError as error:
        return _give_up(said, str(error), EXIT_CONFIG)
    except EndpointTaken as error:
        return _give_up(said, str(error), EXIT_TAKEN)
    except CannotListen as error:
        return _give_up(said, str(error), EXIT_UNAVAILABLE)
    except (OSError, zmq.ZMQError) as error:
        return _give_up(said, f"cannot bind {config.front}: {error}", EXIT_UNAVAILABLE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    Supervisor().ready(f"serving at {server.endpoint}")
    pages = f" http={server.http}" if server.http else ""
    print(f"READY endpoint={server.endpoint}{pages}", flush=True)
    server.run()
    return 0


def _version() -> str:
    try:
        return metadata.version("tinyloop-serve")
    except metadata.PackageNotFoundError:
        return ""


def _give_up(said: Lines, reason: str, status: int) -> int:
    Supervisor().status(reason)
    said.write(f"tinyloop-dispatcher: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
