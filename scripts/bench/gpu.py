"""The engine on a GPU: is it the processor's model, does it keep the promise on bits, how fast is it?
One JSON object in the last line.

    scripts/gpu_check.sh                      (builds it, then runs all of this)
    .venv/bin/python scripts/bench/gpu.py --device cuda [--only same,bits,touch,speed] [--short]

same   logits against the processor's, demo model and `tiny`
bits   tokens of 32 lanes at every batch size, logits of rows alone and in chunks of every size: the same bits
touch  every kernel once on a very small model, for a sanitizer
speed  decode at batch 1, 8, 32 and prefill of 512: the demo model, and `large` (407M parameters, 8 loops)
       beside torch eager and torch with a CUDA graph; all beside the rate at which the device copies memory

--short takes small models and few steps: it proves that this file works, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from measure import checks, models, options, ours, timing, work

from tinyloop_serve.native import (
    GenerateConfig,
    Model,
    SpeculativeConfig,
    artifact,
    demo_model_path,
    devices,
)

BATCHES = (1, 8, 32)


class Amount(NamedTuple):
    context: int  # positions before the decoded ones
    steps: int
    rounds: int
    prompt: int  # of prefill


FULL, SHORT = Amount(64, 32, 3, 512), Amount(4, 2, 1, 8)
AGREE = 0.02  # of the logits' deviation; a rounding of fp16 weights' products is a tenth of it
CACHE_MODES = ("fp16", "int8", "h_fp16", "h_int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=options.some_of(RUN), default=list(RUN), help="by comma")
    parser.add_argument("--short", action="store_true", help="small models, few steps")
    parser.add_argument(
        "--report", type=Path, metavar="FOLDER", help="only gather what gpu_check.sh left there"
    )
    chosen = parser.parse_args()
    if chosen.report:
        print(json.dumps(report := gathered(chosen.report)))
        raise SystemExit(0 if report["passed"] else 1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen.only:
            found |= RUN[part](chosen.device, Path(folder), chosen.short)
    print(json.dumps(found))


def same(device: str, folder: Path, short: bool) -> dict[str, Any]:
    for path in artifacts(folder, short):
        with Model(path, device=device) as there, Model(path) as here:
            checks.same_model(there, here.logits, AGREE, f"{path.stem}: {there.device} and {here.device}")
    return {"same": True}


def bits(device: str, folder: Path, short: bool) -> dict[str, Any]:
    """Ends the program at the first difference."""
    lanes = 8 if short else 32
    for path in artifacts(folder, short):
        prompts = [models.prompt(5 + lane, lane) for lane in range(lanes)]
        configs = [
            GenerateConfig(max_tokens=8, temperature=1.0, seed=lane, ignore_eos=True) for lane in range(lanes)
        ]
        expected: list[list[int]] = []
        with Model(path, device=device) as model:
            text = models.prompt(min(24 if short else 501, model.max_seq_len - 1), 1)
            for size in (1, 2, 8, lanes):
                tokens: list[list[int]] = []
                for at in range(0, lanes, size):
                    batch = model.generate_batch(prompts[at : at + size], configs[at : at + size])
                    tokens += [lane.tokens for lane in batch]
                expected = expected or tokens
                if tokens != expected:
                    raise SystemExit(f"{path.stem}: tokens at batch {size} are not those at batch 1")
        alone: npt.NDArray[np.float32] | None = None
        for chunk in (1, 7, 8, 9, 64, 500):
            with Model(path, device=device, prefill_chunk=chunk) as model:
                logits = model.logits(text)
            alone = logits if alone is None else alone
            if not np.array_equal(logits, alone):
                raise SystemExit(f"{path.stem}: logits in chunks of {chunk} are not those of rows alone")
        timing.say(f"{path.stem}: {lanes} lanes, the same bits at every batch size and chunk")
    return {"bits": True}


def touch(device: str, folder: Path, short: bool) -> dict[str, Any]:
    """Small enough for a sanitizer, which slows a kernel a hundred times."""
    del short
    path = very_small(folder)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with Model(path, device=device, prefill_chunk=16) as model:
        for mode in CACHE_MODES:
            model.generate(prompt, GenerateConfig(max_tokens=2, cache_mode=mode))
        model.generate_batch([prompt, prompt[:3], prompt[:1]], GenerateConfig(max_tokens=2, temperature=1.0))
        model.generate(prompt, GenerateConfig(max_tokens=4, cache_window=4))
        model.generate(prompt, GenerateConfig(max_tokens=2, exit_threshold=0.5))
        plain = GenerateConfig(max_tokens=4)
        model.generate_tree_speculative(prompt, SpeculativeConfig(draft_loops=1, draft_ahead=3), plain)
        model.resume_generate(model.create_resume_handle(prompt, 2), 3, plain)
        model.generate_from_prefix_cache(model.create_prefix_cache(prompt), [7, 7], plain)
        device_name = model.device
    with Model(path, device=device, prefill_chunk=80) as model:  # enough rows for the other products
        model.logits(prompt * 9)
    return {"touch": device_name}


def speed(device: str, folder: Path, short: bool) -> dict[str, Any]:
    amount = SHORT if short else FULL
    about = next((found for found in devices() if found["name"] in (device, f"{device}:0")), {})
    report: dict[str, Any] = {"gpu": about.get("description"), "gpu_bytes": about.get("total_bytes")}
    with_torch = importlib.util.find_spec("torch") is not None
    if with_torch:
        from measure import torch_gpu

        report |= {"torch": torch_gpu.version(), "copy_bytes_per_s": torch_gpu.copy_bandwidth(device, short)}
    for name in ("pocket",) if short else ("demo", "large"):
        path = demo_model_path() if name == "demo" else models.write(name, folder)
        peers = torch_gpu.peers(models.read(path), device) if with_torch and name != "demo" else {}
        with Model(path, device=device) as model:
            report["level"] = model.device
            for key, peer in peers.items():
                checks.same_model(model, peer.logits, AGREE, f"{name}, torch {key}")
            for lanes in BATCHES:
                report[f"decode_b{lanes}_{name}"] = decode(model, peers, lanes, amount) | {
                    "bytes_per_step": (read := bytes_per_step(model, lanes, amount.context))
                }
                found = report[f"decode_b{lanes}_{name}"]
                if copies := report.get("copy_bytes_per_s"):
                    found["of_copy_rate"] = round(found["ours"] / lanes * read / copies, 4)
                timing.say(f"{name}, batch {lanes}: {found}")
            prompt = min(amount.prompt, model.max_seq_len - 1)
            runs = {"ours": lambda m=model, n=prompt: ours.prefill(m, n)}
            runs |= {key: lambda p=peer, n=prompt: p.prefill(n) for key, peer in peers.items()}
            report[f"prefill{prompt}_{name}"] = medians(runs, amount.rounds)
    return report


def decode(model: Model, peers: dict[str, Any], lanes: int, amount: Amount) -> dict[str, float]:
    sizes = amount.context, amount.steps
    runs: dict[str, Callable[[], float]] = {"ours": lambda: ours.decode(model, lanes, *sizes)}
    runs |= {key: lambda p=peer: p.decode(lanes, *sizes) for key, peer in peers.items()}
    return medians(runs, amount.rounds)


def medians(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    return {key: round(rate.median, 1) for key, rate in timing.interleave(runs, rounds, budget_s=8).items()}


def bytes_per_step(model: Model, lanes: int, context: int) -> int:
    """Read at least: weights once a visit, the lanes' caches."""
    config = model.config
    cache = model.cache_bytes(16) / 16
    return round(work.decode(config, "fp16", lanes, context, cache, config["loops"]).bytes)


def gathered(folder: Path) -> dict[str, Any]:
    """What the steps of gpu_check.sh found, and whether all of them passed; also kept as report.json."""
    report: dict[str, Any] = {"passed": True, "steps": {}, "seconds": {}}
    for line in (folder / "steps").read_text().splitlines():
        name, status, rest = line.split(" ", 2)
        report["steps"][name] = {"0": "passed", "left_out": f"left out: {rest}"}.get(
            status, f"status {status}"
        )
        report["passed"] &= status == "0"
        if status != "left_out":
            report["seconds"][name] = int(rest)
        if (found := folder / f"{name}.json").exists():
            report |= json.loads(found.read_text())
    (folder / "report.json").write_text(json.dumps(report) + "\n")
    return report


def artifacts(folder: Path, short: bool) -> Iterator[Path]:
    yield very_small(folder)
    if not short:
        yield demo_model_path()
        yield models.write("tiny", folder)


def very_small(folder: Path) -> Path:
    """A looped model with every kind of layer."""
    path = folder / "very_small.tinyloop"
    config: dict[str, Any] = {
        "vocab_size": 4096, "d_model": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_ffn": 40,
        "n_prelude": 1, "n_core": 2, "n_coda": 1, "loops": 3, "max_loops": 8, "max_seq_len": 96,
        "norm": "sandwich", "norm_eps": 1e-5, "injection": "concat", "start": "prelude", "loop_norm": True,
        "core_norm": True, "rope": "half", "rope_theta": 10000.0, "tied_head": False, "bos_id": None,
        "eos_ids": [], "beta": None,
    }  # fmt: skip
    random = np.random.default_rng(1)
    tensors: dict[str, artifact.Tensor] = {}
    for name, size in artifact.expected_tensors(config).items():
        values = random.standard_normal(size, np.float32) * np.float32(0.2)
        tensors[name] = values + 1 if len(size) == 1 else values.astype(np.float16)
    artifact.write(path, config, tensors)
    return path


RUN = {"same": same, "bits": bits, "touch": touch, "speed": speed}

if __name__ == "__main__":
    main()
