"""Our engine against the same looped model written in torch, eager; ratios ours / theirs as one JSON object
in the last line.

    make bench-torch
    .venv/bin/python scripts/bench/vs_torch.py [--only tiny,small] [--cases decode_b1] [--rounds 5]

torch runs the better of two ways in each case (`measure/torch_peer.py`): "fused" and "plain". Ours is fp16,
theirs fp32 (`decode_b1`, `decode_b8`, `decode_b16`, `prefill512`) or bf16 (`*_vs_bf16`); `*_int8` is int8 on
both sides, theirs torch's dynamic quantisation. Keys without a suffix are of `tiny`, the others end in
`_small` (torch's bf16 is so slow on a CPU without bf16 arithmetic that `small` gets only its first case).
Before anything is timed, the logits of both are compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import checks, machine, models, options, ours, timing
from measure.neighbours import Neighbours
from measure.ours import Case
from measure.torch_peer import TorchPeer

NAMES = ("tiny", "small")
CONTEXT, STEPS = 32, 16


CASES = {
    "decode_b1": Case("fp16", "fp32", lanes=1),
    "decode_b8": Case("fp16", "fp32", lanes=8),
    "decode_b16": Case("fp16", "fp32", lanes=16),
    "prefill512": Case("fp16", "fp32", prompt=512),
    "decode_b1_vs_bf16": Case("fp16", "bf16", lanes=1),
    "decode_b8_vs_bf16": Case("fp16", "bf16", lanes=8, only="tiny"),
    "prefill512_vs_bf16": Case("fp16", "bf16", prompt=512, only="tiny"),
    "decode_b1_int8": Case("int8", "int8", lanes=1),
    "decode_b8_int8": Case("int8", "int8", lanes=8),
    "prefill512_int8": Case("int8", "int8", prompt=512),
}
# How far the logits may be apart, as a share of their standard deviation.
AGREE = {"fp32": 0.01, "bf16": 0.2}


def main() -> None:
    chosen = options.parser(__doc__, NAMES, CASES).parse_args()
    torch.set_num_threads(chosen.threads)
    neighbours = Neighbours()
    report: dict[str, Any] = {"machine": machine.report(chosen.threads), "torch": torch.__version__}
    rates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen.only:
            for key, case_rates in run_model(name, chosen.folder or Path(temporary), chosen).items():
                key += "" if name == "tiny" else f"_{name}"
                theirs = max(case_rates["fused"].median, case_rates["plain"].median)
                report[key] = round(case_rates["ours"].median / theirs, 3)
                rates[key] = {way: round(rate.median, 1) for way, rate in case_rates.items()}
    report |= {"tokens_per_second": rates, "others_cores": round(neighbours.cores(), 3)}
    for key, found in rates.items():
        of_each = "   ".join(f"{way} {rate:8.1f}" for way, rate in found.items())
        print(f"{key:24} {report[key]:6.2f}x   {of_each}")
    print(json.dumps(report))


def run_model(name: str, folder: Path, chosen: argparse.Namespace) -> dict[str, dict[str, timing.Rate]]:
    weights = models.read(models.write(name, folder))
    found = {}
    cases = {key: case for key, case in CASES.items() if key in chosen.cases and case.only in ("", name)}
    for kind in dict.fromkeys(case.theirs for case in cases.values()):
        of_this = {key: case for key, case in cases.items() if case.theirs == kind}
        peers = {way: TorchPeer(weights, way == "fused", kind) for way in ("fused", "plain")}
        with ours.load(name, folder, next(iter(of_this.values())).weights, chosen.threads) as model:
            for way, peer in peers.items():
                if kind in AGREE:
                    checks.same_model(model, peer.logits, AGREE[kind], f"{name}, torch {way} {kind}")
            for key, case in of_this.items():
                runs = {"ours": lambda c=case: ours.rate(model, c, CONTEXT, STEPS)}
                runs |= {way: lambda p=peer, c=case: theirs(p, c) for way, peer in peers.items()}
                found[key] = timing.interleave(runs, chosen.rounds)
                of_each = ", ".join(f"{way} {rate.median:.1f}" for way, rate in found[key].items())
                timing.say(f"{name} {key}: {of_each} tok/s")
    return found


def theirs(peer: TorchPeer, case: Case) -> float:
    return peer.prefill(case.prompt) if case.prompt else peer.decode(case.lanes, CONTEXT, STEPS)


if __name__ == "__main__":
    main()
