"""`tinyloop status`, `inspect`, `convert`: what a fleet is doing, and what a file holds, as text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyloop_serve.protocol.messages import Status


def status(endpoint: str, *, as_json: bool) -> int:
    from tinyloop_serve.deploy.connect import connect

    with connect(endpoint) as client:
        found = client.status()
    if as_json:
        import msgspec

        fields = msgspec.to_builtins(found)
        del fields["id"], fields["type"]
        print(json.dumps({"endpoint": endpoint, **fields}, ensure_ascii=False))
    else:
        print(*describe_status(endpoint, found), sep="\n")
    return 0


def describe_status(endpoint: str, found: Status) -> Iterable[str]:
    """Lines for people."""
    yield f"tinyloop {found.version or '(version unknown)'} at {endpoint}, up {duration(found.uptime_ms)}"
    if model := found.model:
        yield (
            f"model {model.name}: {count(model.parameters)} parameters, {model.loops} loops (at most"
            f" {model.max_loops}), context {model.max_seq_len} tokens,"
            f" {model.weights or 'unknown'} weights, {model.fingerprint[:12]}"
        )
    else:
        yield "model: none yet, no replica is ready"
    yield (
        f"requests: {found.running} running, {found.waiting} waiting, {found.finished} finished,"
        f" {found.failed} failed; {found.clients} clients"
    )
    yield ""
    yield from table(
        ("REPLICA", "STATE", "PID", "RUNNING", "SERVED", "MEMORY", "SEEN", "ERROR"),
        [
            (
                replica.name or replica.endpoint,
                replica.state,
                str(replica.pid or "-"),
                str(replica.running),
                str(replica.served),
                f"{replica.memory_bytes / 1e6:.0f} MB",
                f"{replica.last_seen_ms / 1000:.1f} s ago" if replica.pid else "never",
                replica.error or ("" if replica.health == "ok" else replica.health),
            )
            for replica in found.replicas
        ],
    )
    if found.buckets:
        yield ""
        yield from table(
            ("WAITING", "OLDEST", "SHAPE"),
            [(str(b.waiting), f"{b.oldest_ms} ms", b.shape) for b in found.buckets],
        )


def inspect(path: str, *, as_json: bool) -> int:
    from tinyloop_serve.native import devices, inspect_artifact

    found = inspect_artifact(path) | {"devices": devices()}
    found["metadata"] = {name: _metadata(name, text) for name, text in found["metadata"].items()}
    if as_json:
        print(json.dumps({"path": os.path.abspath(path), **found}, ensure_ascii=False))
    else:
        print(*describe_artifact(path, found), "", *describe_devices(found["devices"]), sep="\n")
    return 0


def convert(
    source: str,
    target: str,
    weights: str | None,
    layout: str,
    *,
    max_loops: int | None,
    measure_beta: bool,
    as_json: bool,
) -> int:
    from tinyloop_serve.native import inspect_artifact
    from tinyloop_serve.native.importers import convert as importers

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{done} of {total} tensors", end="" if done < total else "\n", file=sys.stderr, flush=True
            )

    importers.convert(
        source, target, weights, progress, layout=layout, max_loops=max_loops, measure_beta=measure_beta
    )
    made = inspect_artifact(target)
    if as_json:
        facts = {
            name: made[name] for name in ("fingerprint", "parameters", "file_bytes", "weights", "layout")
        }
        print(json.dumps({"path": os.path.abspath(target), **facts}))
    else:
        print(next(iter(describe_artifact(target, made))))
    return 0


def describe_artifact(path: str, found: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    config, metadata = found["config"], found["metadata"]
    yield f"{path}: {count(found['parameters'])} parameters, {found['file_bytes'] / 1e6:.1f} MB"
    yield f"fingerprint    {found['fingerprint']}"
    loops = f"{config['loops']} loops (at most {config.get('max_loops', config['loops'])})"
    core = f"{config['n_core']} core x {loops}"
    yield f"layers         {config['n_prelude']} prelude + {core} + {config['n_coda']} coda"
    yield f"context        {config['max_seq_len']} tokens, vocabulary {config['vocab_size']}"
    held = "mapped, shared by a host's replicas" if found["layout"] == "panels" else "copied by each replica"
    yield f"weights        {found['weights']}, {found['layout']}: {held}"
    tokenizer, template = metadata.get("tokenizer", ""), metadata.get("chat_template", "")
    yield f"tokenizer      {tokenizer or 'none: token ids only'}; {'a' if template else 'no'} chat template"
    yield ""
    yield from (f"{name:<14} {json.dumps(value)}" for name, value in config.items())
    if isinstance(card := metadata.get("card"), dict):
        yield ""
        yield from (f"card.{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in card.items())
    yield ""
    yield from table(
        ("TENSOR", "DTYPE", "SHAPE", "BYTES"),
        [
            (tensor["name"], tensor["dtype"], "x".join(map(str, tensor["shape"])), str(tensor["bytes"]))
            for tensor in found["tensors"]
        ],
    )


def describe_devices(found: list[dict[str, Any]]) -> Iterable[str]:
    """Lines for people: what a model can run on here, and why not on the others."""
    for device in found:
        size = f", {device['total_bytes'] / 1e9:.1f} GB" if device["total_bytes"] else ""
        about = f"off: {device['reason']}" if device["reason"] else device["description"] + size
        yield f"device {device['name']:<7} {about}"


def _metadata(name: str, text: str) -> Any:
    """A metadata text as it is shown: JSON parsed, a tokenizer only by its size."""
    if name == "tokenizer" and text:
        return f"tokenizer.json of {len(text.encode())} bytes"
    if name in ("config", "card"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def duration(ms: int) -> str:
    seconds = ms // 1000
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h {seconds // 60 % 60} min"
