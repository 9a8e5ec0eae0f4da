"""Grammars: compile time, start-up of a lane and cost of a mask; one JSON object as the last line.

    .venv/bin/python scripts/bench/grammar.py [--model PATH ...] [--lanes 12] [--tokens 80]

The model is not run: each lane draws among the allowed tokens, all equally likely, and so wanders through
all of the grammar. The core waits for a mask before every token, and for `accept` after it. Times are in
microseconds unless the name says milliseconds. The first lane pays for automaton states that all share.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyloop_serve.native import demo_model_path, inspect_artifact
from tinyloop_serve.native.grammar import Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["a", "b", "customer"]},
    },
    "required": ["name", "age", "tags", "address", "kind"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[Callable[..., Grammar], Any]] = {
    "json_schema": (Grammar.from_json_schema, PERSON),
    "any_json_object": (Grammar.from_json_schema, {"type": "object"}),
    "regex": (Grammar.from_regex, r"[A-Z][a-z]+( [A-Z][a-z]+)*: [0-9]{1,3}(\.[0-9]{2})?"),
    "lark": (Grammar.from_lark, 'start: term ("+" term)*\nterm: /[1-9][0-9]*/ | "(" start ")"'),
}
Tokenizer = tuple[str, int, list[int]]


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    begin = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - begin, result


def measure(
    read: Callable[..., Grammar], text: Any, tokenizer: Tokenizer, lanes: int, tokens: int
) -> dict[str, Any]:
    compile_s = []
    for _ in range(5):
        seconds, grammar = timed(read, text, *tokenizer)
        compile_s.append(seconds)
    start_s, mask_s, accept_s, first_lane_s = [], [], [], 0.0
    words = memoryview(bytearray((grammar.vocab_size + 31) // 32 * 4))
    for lane in range(lanes):
        choice = random.Random(lane)
        seconds, state = timed(grammar.start)
        start_s.append(seconds)
        for _ in range(tokens):
            words[:] = bytes(len(words))
            mask_s.append(timed(state.allowed, words)[0])
            allowed = [t for t in range(8 * len(words)) if words[t >> 3] >> (t & 7) & 1]
            going_on = [token for token in allowed if token not in grammar.eos_ids]
            if not going_on:
                break
            accept_s.append(timed(state.accept, choice.choice(going_on))[0])
        if lane == 0:
            first_lane_s = statistics.mean(mask_s)
    mask_s.sort()
    return {
        "compile_ms": round(1e3 * statistics.median(compile_s), 2),
        "start": round(1e6 * statistics.median(start_s), 1),
        "mask_median": round(1e6 * statistics.median(mask_s), 1),
        "mask_mean": round(1e6 * statistics.mean(mask_s), 1),
        "mask_p99": round(1e6 * mask_s[int(0.99 * len(mask_s))], 1),
        "mask_mean_first_lane": round(1e6 * first_lane_s, 1),
        "accept_median": round(1e6 * statistics.median(accept_s), 1),
        "masks": len(mask_s),
    }


def import_ms() -> float:
    code = "import time; t = time.perf_counter(); import llguidance; print(time.perf_counter() - t)"
    runs = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    return round(1e3 * statistics.median(runs), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", help="artifacts with a tokenizer")
    parser.add_argument("--lanes", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=80, help="per lane, at most")
    options = parser.parse_args()

    report: dict[str, Any] = {"import_ms": import_ms(), "models": {}}
    for path in options.model or [demo_model_path()]:
        found = inspect_artifact(path)
        config = found["config"]
        tokenizer = (found["metadata"]["tokenizer"], config["vocab_size"], config["eos_ids"])
        tokenizer_s, _ = timed(Grammar.from_regex, "a", *tokenizer)
        results: dict[str, Any] = {
            "vocab_size": config["vocab_size"],
            "tokenizer_ms": round(1e3 * tokenizer_s, 1),
        }
        print(f"{path}: {results['vocab_size']} tokens, tokenizer built in {results['tokenizer_ms']} ms")
        for name, (read, text) in GRAMMARS.items():
            cost = results[name] = measure(read, text, tokenizer, options.lanes, options.tokens)
            print(
                f"  {name:16} compile {cost['compile_ms']:6.2f} ms  mask {cost['mask_median']:6.1f} us,"
                f" mean {cost['mask_mean']:6.1f}  accept {cost['accept_median']:5.1f} us"
            )
        report["models"][path.name] = results
    print(json.dumps(report))


if __name__ == "__main__":
    main()
