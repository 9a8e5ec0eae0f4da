"""What the reuse primitives save: wall-clock ratios of one run, interleaved; one JSON object as the last
line.

    .venv/bin/python scripts/bench/primitives.py [--model PATH] [--repeats 9] [--threads 2] [--no-407m]

speculative_speedup    decode time of generate over generate_speculative at the default loops, greedy, with
the
                       settings that calibrate_speculation chose; the ceiling's arithmetic is printed beside
                       it
warm_start_saved       share of a cold call's wall-clock that an upgrade of a 4-loop handle to 8 loops saves
(512
                       prompt tokens, 16 new ones); _4_16: to 16 loops; _407m: on a random model of 407M
                       parameters
pool_prefill_fraction  prefill time with 448 of 512 tokens in a PrefixPool over a cold prefill
prefix_copy_ms         copying 512 cached tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tinyloop_serve.native import (
    GenerateConfig,
    Model,
    PrefixPool,
    artifact,
    calibrate_speculation,
    demo_model_path,
)
from tinyloop_serve.native.tensors import Tensor

TEXTS = (
    "The definition of river (noun) is:",
    "And it came to pass in those days, that",
    "The definition of gentle (adjective) is:",
    "In the beginning God created",
    "And the king said unto the servants,",
    "The definition of walk (verb) is:",
)


def medians(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Every case once per round; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats + 1):
        print(f"  round {number} of {repeats}", file=sys.stderr)
        for name, run in cases.items():
            elapsed = run()
            if number:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def total_ms(stats: Any) -> float:
    return float(stats.prefill_ms + stats.decode_ms)


def text_prompts(model: Model) -> list[list[int]]:
    if text := model.metadata.get("tokenizer"):
        from tokenizers import Tokenizer

        encode = Tokenizer.from_str(text).encode
        return [encode(each).ids for each in TEXTS]
    return [[1 + (i * 7 + j) % 50 for i in range(12)] for j in range(6)]


def speculation(model: Model, repeats: int) -> dict[str, Any]:
    prompts = text_prompts(model)
    found = calibrate_speculation(model, prompts, max_tokens=48)
    best, config = found.best, GenerateConfig(max_tokens=96, ignore_eos=True)
    counts = [0, 0, 0]

    def plain() -> float:
        return sum(model.generate(p, config).stats.decode_ms for p in prompts)

    def drafted() -> float:
        total = 0.0
        for prompt in prompts:
            stats = model.generate_speculative(prompt, best, config).stats
            counts[0] += stats.drafted
            counts[1] += stats.accepted
            counts[2] += stats.generated_tokens
            total += stats.decode_ms
        return total

    def batch_of(lanes: int) -> float:
        return max(g.stats.decode_ms for g in model.generate_batch([prompts[0]] * lanes, config))

    four = 4  # lanes
    cases = {
        "plain": plain,
        "speculative": drafted,
        "one": lambda: batch_of(1),
        "four": lambda: batch_of(four),
    }
    ms = medians(cases, repeats)
    c = model.config
    loops, rounds = c["loops"], counts[2] - counts[1]
    head = c["vocab_size"] / (4 * c["d_model"] + 3 * c["d_ffn"])  # in layer visits, by weights read
    visits = c["n_prelude"] + loops * c["n_core"] + c["n_coda"] + head
    rows = 1 + counts[0] / rounds
    draft = rows * (c["n_prelude"] + best.draft_loops * c["n_core"]) + (rows - 1) * (c["n_coda"] + head)
    verify = (loops - best.draft_loops) * c["n_core"] + c["n_coda"] + head
    ceiling = visits * counts[2] / rounds / (draft + verify)
    row = (ms["four"] / ms["one"] - 1) / (four - 1)  # what a further row costs, in first rows
    bound = visits * counts[2] / rounds / (draft + verify * (1 + (rows - 1) * row))
    print(
        f"speculation: draft_loops {best.draft_loops}, draft_ahead {best.draft_ahead},"
        f" margin {best.draft_margin}; accepted {counts[1]} of {counts[0]} drafts;"
        f" {counts[2] / rounds:.2f} tokens a round\n"
        f"  ceiling if more rows cost nothing: plain {visits:.1f} layer visits a token; a round {draft:.1f}"
        f" drafting + {verify:.1f} verifying: {ceiling:.2f}\n"
        f"  a further row costs {row:.2f} of the first here (batch of 4 over 1): {bound:.2f}"
    )
    return {
        "speculative_speedup": round(ms["plain"] / ms["speculative"], 3),
        "speculative_ceiling": round(ceiling, 3),
        "speculative_ceiling_with_row_cost": round(bound, 3),
        "row_cost": round(row, 3),
        "accepted_share": round(counts[1] / max(1, counts[0]), 3),
        "draft": [best.draft_loops, best.draft_ahead, best.draft_margin],
    }


def warm_start(model: Model, upgrades: tuple[int, ...], tokens: int, repeats: int) -> dict[int, float]:
    """Share saved by upgrading a 4-loop handle, per target loops."""
    prompt = [1 + 7 * i * i % 300 for i in range(tokens)]
    handle = model.create_resume_handle(prompt, 4)
    cases: dict[str, Callable[[], float]] = {}
    for loops in upgrades:
        config = GenerateConfig(loops=loops, max_tokens=16, ignore_eos=True)
        cases[f"cold{loops}"] = lambda c=config: total_ms(model.generate(prompt, c).stats)
        cases[f"warm{loops}"] = lambda c=config, n=loops: total_ms(model.resume_generate(handle, n, c).stats)
    ms = medians(cases, repeats)
    return {loops: 1 - ms[f"warm{loops}"] / ms[f"cold{loops}"] for loops in upgrades}


def pool(model: Model, repeats: int) -> dict[str, Any]:
    prompt = [1 + 7 * i * i % 300 for i in range(512)]
    config = GenerateConfig(max_tokens=1)
    held = PrefixPool(2)
    held.register_prefix(model, prompt[:448])
    whole = model.create_prefix_cache(prompt)
    ms = medians(
        {
            "cold": lambda: model.generate(prompt, config).stats.prefill_ms,
            "hit": lambda: model.generate_with_pool(held, prompt, config).stats.prefill_ms,
            "copy": lambda: model.generate_from_prefix_cache(whole, [], config).stats.prefill_ms,
            "one": lambda: model.generate(prompt[:1], config).stats.prefill_ms,
        },
        repeats,
    )
    return {
        "pool_prefill_fraction": round(ms["hit"] / ms["cold"], 3),
        "prefix_copy_ms": round(ms["copy"] - ms["one"], 3),
        "prefix_bytes": whole.bytes,
    }


def random_407m(folder: Path) -> Path:
    """prelude 2, core 12, coda 2 of width 1408: about 407M parameters, random."""
    config: dict[str, Any] = {
        "vocab_size": 16384, "d_model": 1408, "n_heads": 22, "n_kv_heads": 22, "head_dim": 64, "d_ffn": 3840,
        "n_prelude": 2, "n_core": 12, "n_coda": 2, "loops": 8, "max_loops": 16, "max_seq_len": 1024, "norm":
        "pre", "norm_eps": 1e-5, "injection": "add", "start": "prelude", "rope": "half", "rope_theta":
        10000.0,
        "tied_head": True, "bos_id": None, "eos_ids": [], "beta": None,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors: dict[str, Tensor] = {}
    for name, shape in artifact.expected_tensors(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float16)
        else:
            tensors[name] = (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5 / 4).astype(
                np.float16
            )
    artifact.write(folder / "random.tinyloop", config, tensors)
    return folder / "random.tinyloop"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-407m", action="store_true", help="leave the big random model out")
    options = parser.parse_args()
    with Model(options.model, threads=options.threads) as model:
        report = speculation(model, options.repeats)
        saved = warm_start(model, (8, 16), 512, options.repeats)
        report |= {"warm_start_saved": round(saved[8], 3), "warm_start_saved_4_16": round(saved[16], 3)}
        report |= pool(model, options.repeats)
    if not options.no_407m:
        with (
            tempfile.TemporaryDirectory() as folder,
            Model(random_407m(Path(folder)), threads=options.threads) as model,
        ):
            print(f"407M: {model.parameters} parameters", file=sys.stderr)
            report["warm_start_saved_407m"] = round(warm_start(model, (8,), 512, 2)[8], 3)
    for name, value in report.items():
        print(f"{name:24} {value}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
