"""`tinyloop handles`: what the fleet holds for this tenant, and the end of one."""

from __future__ import annotations

import json
import sys

import msgspec

from tinyloop_serve.deploy.connect import connect

COLUMNS = "{:41}  {:8}  {:>7}  {:>5}  {:6}  {:>9}  {:10}  {:>5}  {:>7}  {}"


def show(endpoint: str, *, as_json: bool) -> int:
    with connect(endpoint) as client:
        held = client.handles()
    if as_json:
        print(json.dumps({"handles": [msgspec.to_builtins(each) for each in held]}))
        return 0
    if held:
        print(
            COLUMNS.format(
                "handle", "kind", "tokens", "loops", "cache", "KiB", "replica", "uses", "idle s", ""
            )
        )
    else:
        print("no handles", file=sys.stderr)
    for each in held:
        whose = "shared" if each.shared else ""
        size, idle = f"{each.bytes / 1024:.0f}", f"{each.idle_ms / 1000:.0f}"
        shape = (each.handle, each.kind, each.tokens, each.loops, each.cache_mode)
        print(COLUMNS.format(*shape, size, each.replica, each.uses, idle, whose).rstrip())
    return 0


def drop(endpoint: str, name: str, *, as_json: bool) -> int:
    with connect(endpoint) as client:
        gone = client.drop_handle(name)
    if as_json:
        print(json.dumps({"dropped": msgspec.to_builtins(gone)}))
        return 0
    print(f"dropped {gone.kind} {gone.handle}: {gone.tokens} tokens, {gone.bytes} bytes")
    return 0
