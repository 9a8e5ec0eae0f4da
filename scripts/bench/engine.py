"""Decode and prefill rates of the engine: batch 1 and 8, 1 and 2 threads, loops 2, 4, 8; one JSON object as
the last line.

    .venv/bin/python scripts/bench/engine.py [--model PATH] [--repeats 5]

Interleaved: every round measures every case once, and the median over rounds is reported, so that a drift of
the machine's speed touches all cases alike. Read ratios, not absolute rates: machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

from tinyloop_serve.native import GenerateConfig, Model, demo_model_path

PROMPT_TOKENS = 32
NEW_TOKENS = 64


def decode_rate(model: Model, batch: int, loops: int) -> float:
    """Tokens per second over all lanes, the prefill not counted."""
    prompts = [[1 + (7 * i + lane) % 200 for i in range(PROMPT_TOKENS)] for lane in range(batch)]
    config = GenerateConfig(loops=loops, max_tokens=NEW_TOKENS, ignore_eos=True)
    lanes = model.generate_batch(prompts, config)
    return batch * (NEW_TOKENS - 1) / max(lane.stats.decode_ms for lane in lanes) * 1000


def prefill_rate(model: Model, tokens: int, loops: int) -> float:
    """Prompt tokens per second."""
    prompt = [1 + 7 * i % 200 for i in range(tokens)]
    stats = model.generate(prompt, GenerateConfig(loops=loops, max_tokens=1)).stats
    return tokens / stats.prefill_ms * 1000


def start_up_ms(path: Path) -> float:
    begin = time.perf_counter()
    Model(path).close()
    return (time.perf_counter() - begin) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    models = {threads: Model(options.model, threads=threads) for threads in (1, 2)}
    info = models[1].config
    cases = [
        (
            f"decode_b{batch}_loops{loops}_threads{threads}",
            lambda m=model, b=batch, n=loops: decode_rate(m, b, n),
        )
        for threads, model in models.items()
        for batch in (1, 8)
        for loops in (2, 4, 8)
        if loops <= info["max_loops"]
    ] + [
        (
            f"prefill{tokens}_loops{info['loops']}_threads{threads}",
            lambda m=model, n=tokens: prefill_rate(m, n, info["loops"]),
        )
        for threads, model in models.items()
        for tokens in (128, 256)
        if tokens < info["max_seq_len"]
    ]
    measured: dict[str, list[float]] = {name: [] for name, _ in cases}
    for round_number in range(options.repeats + 1):
        print(f"round {round_number} of {options.repeats}", file=sys.stderr)
        for name, run in cases:
            rate = run()
            if round_number:  # the first warms up
                measured[name].append(rate)
    report = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "device": models[1].device,
        },
        "model": {"parameters": models[1].parameters, "weight_bytes": models[1].weight_bytes},
        "load_ms": round(statistics.median(start_up_ms(options.model) for _ in range(5)), 1),
        "tokens_per_second": {name: round(statistics.median(rates), 1) for name, rates in measured.items()},
    }
    for name, rate in report["tokens_per_second"].items():
        print(f"{name:36} {rate:10.1f} tok/s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
