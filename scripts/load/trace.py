"""A load as a file: one JSON object per line, for one request, in any order.

    {"at": 0.25, "prompt_tokens": 40, "loops": 4, "max_tokens": 32, "seed": 7}
    {"at": 0.31, "prompt": "The definition of", "tenant": 1, "refine": [16], "loops": 4}

`at` is seconds after the start. `prompt` is a text or token ids; `prompt_tokens` asks for so many random
ones, drawn by the line's number. `prefix` puts the mix's scaffold of that number in front of them. `tenant`
and `refine` are those of mix.py, all other keys are options of `Client.stream`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.load.asked import Asked
from scripts.load.mix import LoadFault, Mix, random_tokens
from tinyloop_serve.protocol.calls import Options

OPTIONS = tuple(name for name in Options.__annotations__ if name not in ("handle", "rebuild"))
OURS = ("at", "prompt", "prompt_tokens", "prefix", "tenant", "refine")


def read(path: Path, mix: Mix, vocabulary: int) -> list[Asked]:
    """Raises `LoadFault` naming the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFault(f"{path}: {error}") from error
    found = []
    for number, line in enumerate(lines):
        if line.strip():
            try:
                found.append(_request(json.loads(line), number, mix, vocabulary))
            except (ValueError, TypeError) as error:
                raise LoadFault(f"{path}, line {number + 1}: {error}") from error
    if not found:
        raise LoadFault(f"{path}: no request in it; expected a JSON object per line")
    return found


def write(path: Path, asked: Iterable[Asked]) -> None:
    """What `read` reads back as the same requests."""
    with path.open("w", encoding="utf-8") as file:
        for each in asked:
            line: dict[str, Any] = {"at": round(each.at, 6), "prompt": each.prompt, **each.options}
            line |= {"tenant": each.tenant} if each.tenant else {}
            line |= {"refine": list(each.refine)} if each.refine else {}
            file.write(json.dumps(line) + "\n")


def _request(line: Any, number: int, mix: Mix, vocabulary: int) -> Asked:
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} is not accepted; expected an object")
    for name in line:
        if name not in OPTIONS and name not in OURS:
            raise ValueError(f"{name!r} is not accepted; expected one of {', '.join([*OURS, *OPTIONS])}")
    at = line.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise ValueError(f"at: {at!r} is not accepted; expected seconds from 0")
    if ("prompt" in line) == ("prompt_tokens" in line):
        raise ValueError("expected either prompt or prompt_tokens")
    prompt = line.get("prompt")
    if prompt is None:
        count = _whole("prompt_tokens", line["prompt_tokens"], 1)
        prompt = random_tokens(random.Random(number), count, vocabulary)
    if "prefix" in line:
        if isinstance(prompt, str) or not mix.prefixes:
            raise ValueError("prefix: not accepted; it needs a mix with prefixes, and a prompt of tokens")
        prompt = mix.prefix(_whole("prefix", line["prefix"], 0) % mix.prefixes, vocabulary) + prompt
    refine = tuple(_whole("refine", loops, 1) for loops in line.get("refine", ()))
    options = {name: value for name, value in line.items() if name in OPTIONS}
    tenant = _whole("tenant", line.get("tenant", 0), 0)
    return Asked(number, prompt, options, at=at, tenant=tenant, refine=refine)


def _whole(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: {value!r} is not accepted; expected a whole number from {low}")
    return value
