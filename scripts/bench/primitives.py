"""What the reuse primitives save on one model: ratios of wall-clock in one run; one JSON object as the last
line.

    .venv/bin/python scripts/bench/primitives.py [--model PATH] [--repeats 7] [--threads 1]

prefix        a prompt whose first 3/4 come from a PrefixCache, over a cold prefill
prefix_copy   copying a cached prefix, over computing it
resume        upgrading a 4-loop handle to max_loops (the first token), over a cold run
speculative   decode time of generate over generate_speculative, 2 loops drafting for the default loops
tree          the same for generate_tree_speculative
Every case is measured in turn in every round; the medians over rounds are divided.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from tinyloop_serve.native import GenerateConfig, Model, SpeculativeConfig, demo_model_path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    model = Model(options.model, threads=options.threads)
    most = model.config["max_loops"]
    loops = model.config["loops"]
    n = min(160, model.max_seq_len // 2)
    prompt = [1 + 7 * i * i % 300 for i in range(n)]
    first = GenerateConfig(loops=loops, max_tokens=1)
    deep = GenerateConfig(loops=most, max_tokens=1)
    long = GenerateConfig(loops=loops, max_tokens=64, ignore_eos=True)
    prefix = model.create_prefix_cache(prompt[: 3 * n // 4], loops)
    whole = model.create_prefix_cache(prompt, loops)
    handle = model.create_resume_handle(prompt, min(4, most))
    draft = SpeculativeConfig(draft_loops=min(2, loops), draft_ahead=4, branches=2)

    speculative = [0, 0]

    def drafted() -> float:
        stats = model.generate_speculative(prompt[:32], draft, long).stats
        speculative[0] += stats.accepted
        speculative[1] += stats.drafted
        return stats.decode_ms

    cases: dict[str, Callable[[], float]] = {
        "cold": lambda: model.generate(prompt, first).stats.prefill_ms,
        "prefix": lambda: (
            model.generate_from_prefix_cache(prefix, prompt[3 * n // 4 :], first).stats.prefill_ms
        ),
        "copy": lambda: model.generate_from_prefix_cache(whole, [], first).stats.prefill_ms,
        "cold_deep": lambda: model.generate(prompt, deep).stats.prefill_ms,
        "resume": lambda: model.resume_generate(handle, most, deep).stats.prefill_ms,
        "plain": lambda: model.generate(prompt[:32], long).stats.decode_ms,
        "speculative": drafted,
        "tree": lambda: model.generate_tree_speculative(prompt[:32], draft, long).stats.decode_ms,
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(options.repeats + 1):
        print(f"round {round_number} of {options.repeats}", file=sys.stderr)
        for name, run in cases.items():
            elapsed = run()
            if round_number:
                times[name].append(elapsed)
    ms = {name: statistics.median(values) for name, values in times.items()}
    report = {
        "prompt_tokens": n,
        "loops": loops,
        "ms": {name: round(value, 3) for name, value in ms.items()},
        "prefix_copy_bytes": whole.bytes,
        "ratio": {
            "prefix": round(ms["cold"] / ms["prefix"], 2),
            "prefix_copy": round(ms["cold"] / ms["copy"], 2),
            "resume": round(ms["cold_deep"] / ms["resume"], 2),
            "speculative": round(ms["plain"] / ms["speculative"], 2),
            "tree": round(ms["plain"] / ms["tree"], 2),
        },
        "accepted_share": round(speculative[0] / max(1, speculative[1]), 3),
    }
    for name, ratio in report["ratio"].items():  # type: ignore[attr-defined]
        print(f"{name:12} {ratio:6.2f} times as fast")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
