"""What attention costs: milliseconds per decode step by context, cache mode and batch, and per prefill of
512 tokens; one JSON object as the last line.

    .venv/bin/python scripts/bench/attention.py [--contexts 128,512,2048,4096] [--batches 1,8] [--threads 2]

Two random models, made here. `heads` is nearly nothing but attention (16 heads of 64, 32 layer visits, 16
inputs per layer), for the cache modes that hold keys and values; `inputs` (d 512, 8 heads of 64, 32 visits)
is for the modes that hold a layer's inputs, whose cost is projecting them again. A step's attention is its
time less the time at one position. The bytes are those of the cache that a step reads, so GB/s is at most the
memory's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tinyloop_serve.native import GenerateConfig, Model, artifact

STEPS = 7
PREFILL = 512
VOCAB = 64
HEADS_MODES = ("fp16", "int8")
INPUTS_MODES = ("h_fp16", "h_int8", "int4")


def random_model(path: Path, d_model: int, heads: int, kv_heads: int, d_ffn: int, longest: int) -> Path:
    config: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": d_model, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": 64,
        "d_ffn": d_ffn, "n_prelude": 0, "n_core": 4, "n_coda": 0, "loops": 8, "max_seq_len": longest + 64,
        "norm": "pre", "norm_eps": 1e-5, "injection": "none", "start": "prelude", "rope": "half",
        "rope_theta": 10000.0, "tied_head": True, "bos_id": None, "eos_ids": [], "beta": None,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors: dict[str, artifact.Tensor] = {
        name: (np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)).astype(
            np.float16
        )
        for name, shape in artifact.expected_tensors(config).items()
    }
    artifact.write(path, config, tensors)
    return path


def tokens(count: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % VOCAB for i in range(count)]


def median_step_ms(run: Callable[[Callable[..., None]], object]) -> float:
    """`run` decodes and calls what it is given after every step."""
    marks: list[float] = []
    run(lambda *_: marks.append(time.perf_counter()))
    return statistics.median(b - a for a, b in zip(marks, marks[1:], strict=False)) * 1000


def decode_steps(model: Model, mode: str, context: int, batch: int, rounds: int) -> float:
    """Milliseconds of one decode step with `context` positions cached in every lane."""
    config = GenerateConfig(max_tokens=STEPS + 1, cache_mode=mode, ignore_eos=True)
    if batch == 1 and context > 1:
        prefix = model.create_prefix_cache(tokens(context - 1), cache_mode=mode)
        found = [
            median_step_ms(lambda mark: model.generate_from_prefix_cache(prefix, [1], config, mark))
            for _ in range(rounds)
        ]
        prefix.close()
        return min(found)
    prompts = [tokens(context, lane) for lane in range(batch)]
    return min(
        median_step_ms(lambda mark: model.generate_batch(prompts, config, mark))
        for _ in range(min(rounds, 2))
    )


def prefill_ms(model: Model, mode: str, count: int) -> float:
    config = GenerateConfig(max_tokens=1, cache_mode=mode)
    return min(model.generate(tokens(count), config).stats.prefill_ms for _ in range(3))


def measure(model: Model, modes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for mode in modes:
        for batch in options.batches:
            idle = decode_steps(model, mode, 1, batch, options.rounds)
            for context in options.contexts:
                if batch * context > options.most:
                    continue
                ms = decode_steps(model, mode, context, batch, options.rounds) - idle
                read = batch * context * model.cache_bytes(1024, mode) / 1024
                report[f"{mode}_b{batch}_{context}"] = {
                    "attention_ms": round(ms, 3),
                    "cache_gb_per_s": round(read / ms / 1e6, 1),
                    "step_ms": round(ms + idle, 3),
                }
        whole, short = prefill_ms(model, mode, PREFILL), prefill_ms(model, mode, PREFILL // 8)
        report[f"{mode}_prefill{PREFILL}"] = {
            "attention_ms": round(whole - 8 * short, 1),
            "step_ms": round(whole, 1),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 2048, 4096])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=[*HEADS_MODES, *INPUTS_MODES])
    parser.add_argument("--kv-heads", type=int, default=16, help="of the 16 heads of `heads`")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=4096, help="positions of all lanes together")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        longest = max(PREFILL, *options.contexts)
        for name, all_modes, shape in (
            ("heads", HEADS_MODES, (16, 16, options.kv_heads, 16)),
            ("inputs", INPUTS_MODES, (512, 8, 8, 1408)),
        ):
            modes = [mode for mode in all_modes if mode in options.modes]
            if not modes:
                continue
            path = random_model(Path(folder) / f"{name}.tinyloop", *shape, longest)
            with Model(path, threads=options.threads) as model:
                report |= {"device": model.device, "threads": model.threads}
                report |= measure(model, modes, options)
    for name, row in report.items():
        if isinstance(row, dict):
            speed = f"{row['cache_gb_per_s']:8.1f} GB/s" if "cache_gb_per_s" in row else ""
            print(f"{name:20} attention {row['attention_ms']:9.3f} ms of {row['step_ms']:9.3f} {speed}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
