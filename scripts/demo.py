"""`make demo`: a dispatcher and two replicas on the shipped model, one completion at 2, 4 and 8 loops,
and down again.

The fleet is started as a user starts it (`tinyloop up`), in a directory of its own, beside any other that
runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

from tinyloop_serve.deploy.report import describe_status
from tinyloop_serve.protocol.client import Client

PROMPT = "And it came to pass"
LOOPS = (2, 4, 8)
MAX_TOKENS = 48


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinyloop-demo-") as directory:
        endpoint = f"ipc://{directory}/tinyloop/front.sock"
        environment = {**os.environ, "XDG_RUNTIME_DIR": directory}
        up = [
            "-m",
            "tinyloop_serve.deploy.cli",
            "up",
            "--endpoint",
            endpoint,
            "--die-with-parent",
            str(os.getpid()),
        ]
        fleet = subprocess.Popen([sys.executable, *up], stdout=subprocess.PIPE, text=True, env=environment)
        assert fleet.stdout is not None
        if not (ready := fleet.stdout.readline()).startswith("READY"):
            return fleet.wait() or 1
        print(ready, end="")
        with Client(endpoint) as client:
            for loops in LOOPS:
                show(client, loops)
            print()
            print(*describe_status(endpoint, client.status()), sep="\n")
        fleet.send_signal(signal.SIGTERM)
        fleet.communicate()
    print(f"\nfleet stopped with status {fleet.returncode}; {time.monotonic() - started:.1f} s in all")
    return fleet.returncode


def show(client: Client, loops: int) -> None:
    """Streams one completion and its statistics."""
    print(f"\n{loops} loops: {PROMPT}", end="", flush=True)
    with client.stream(PROMPT, loops=loops, max_tokens=MAX_TOKENS, repetition_penalty=1.15) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        stats = stream.result().stats
    rate = 1000 * (stats.generated_tokens - 1) / max(stats.decode_ms, 0.001)
    print(
        f"\n  {stats.generated_tokens} tokens, {rate:.0f} tokens/s; first after {stats.first_token_ms:.1f} ms"
        f" (prefill of {stats.prompt_tokens}: {stats.prefill_ms:.1f} ms);"
        f" cache {stats.cache_bytes >> 10} KiB; waited {stats.queue_ms:.1f} ms; {stats.replica}"
    )


if __name__ == "__main__":
    sys.exit(main())
