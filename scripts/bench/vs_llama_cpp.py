"""Our engine against llama.cpp on the same weights, threads and context; ratios ours / theirs as one JSON
object in the last line.

    make bench-llama-cpp
    .venv/bin/python scripts/bench/vs_llama_cpp.py [--only tiny,small] [--cases decode_b1_fp16] [--rounds 5]

Looped models are unrolled for llama.cpp: a GGUF whose layers repeat the core's weights. It runs through
the package llama-cpp-python and its batch API, with flash attention on or off, whichever is faster in the
warm-up. Keys and values are fp16 on both sides. Before anything is timed, the logits of both are compared.

decode_b1_*    one sequence, tokens 33 to 64        batch8_*, batch16_*    as many sequences in lockstep
prefill128_*, prefill512_*    until the first token   *_fp16, *_int8, *_int4    against F16, Q8_0, Q4_0
prefill512_fp16_vs_f32        fp16 against a GGUF in F32
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measure import checks, llama_cpp_peer, machine, models, options, ours, timing, unrolled_gguf
from measure.llama_cpp_peer import PeerContext, PeerModel
from measure.neighbours import Neighbours
from measure.ours import Case

from tinyloop_serve.native import Model

NAMES = ("tiny", "small", "smollm2")
CONTEXT, STEPS = 32, 32


CASES = {
    "decode_b1_fp16": Case("fp16", "f16", lanes=1),
    "batch8_fp16": Case("fp16", "f16", lanes=8),
    "batch16_fp16": Case("fp16", "f16", lanes=16),
    "prefill128_fp16": Case("fp16", "f16", prompt=128),
    "prefill512_fp16": Case("fp16", "f16", prompt=512),
    "decode_b1_int8": Case("int8", "q8_0", lanes=1),
    "batch8_int8": Case("int8", "q8_0", lanes=8),
    "prefill512_int8": Case("int8", "q8_0", prompt=512),
    "decode_b1_int4": Case("int4", "q4_0", lanes=1),
    "prefill512_fp16_vs_f32": Case("fp16", "f32", prompt=512),
}
# How far the logits may be apart, as a share of their standard deviation.
AGREE = {"f32": 0.02, "f16": 0.05}


class Measured(NamedTuple):
    ours: timing.Rate
    theirs: timing.Rate
    flash_attention: bool


def main() -> None:
    chosen = options.parser(__doc__, NAMES, CASES).parse_args()
    neighbours = Neighbours()
    report: dict[str, Any] = {"machine": machine.report(chosen.threads)}
    llama_cpp_peer.start()
    rates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        folder = Path(chosen.folder or temporary)
        for name in chosen.only:
            found = dict(run_model(name, folder, chosen))
            rates[name] = {case: measured_json(one) for case, one in found.items()}
            report[name] = {
                case: round(one.ours.median / one.theirs.median, 3) for case, one in found.items()
            }
    report |= {"tokens_per_second": rates, "others_cores": round(neighbours.cores(), 3)}
    for name in chosen.only:
        for case, ratio in report[name].items():
            one = rates[name][case]
            print(
                f"{name:8} {case:24} {ratio:5.2f}x   ours {one['ours']:8.1f}   llama.cpp {one['theirs']:8.1f}"
            )
    print(json.dumps(report))


def run_model(name: str, folder: Path, chosen: argparse.Namespace) -> Iterator[tuple[str, Measured]]:
    timing.say(f"{name}: writing the models")
    artifact = models.write(name, folder)
    cases = {case: CASES[case] for case in CASES if case in chosen.cases}
    for precision in dict.fromkeys(case.theirs for case in cases.values()):
        of_this = {key: case for key, case in cases.items() if case.theirs == precision}
        path = unrolled_gguf.write(artifact, folder, precision)
        with ours.load(name, folder, next(iter(of_this.values())).weights, chosen.threads) as model:
            with PeerModel(path) as peer:
                if precision in AGREE:
                    checks.same_model(model, peer.logits, AGREE[precision], f"{name}, {precision}")
                for key, case in of_this.items():
                    one = measure(model, peer, case, chosen)
                    timing.say(
                        f"{name} {key}: {one.ours.median:.1f} against {one.theirs.median:.1f} tok/s"
                        f" ({one.ours.median / one.theirs.median:.2f}x,"
                        f" flash attention {'on' if one.flash_attention else 'off'})"
                    )
                    yield key, one
        if chosen.folder is None:
            path.unlink()  # in fp32 it is of some gigabytes


def measure(model: Model, peer: PeerModel, case: Case, chosen: argparse.Namespace) -> Measured:
    lanes, positions = max(case.lanes, 1), case.prompt or CONTEXT + STEPS

    def mine() -> float:
        return ours.rate(model, case, CONTEXT, STEPS)

    def theirs(context: PeerContext) -> float:
        return context.prefill(case.prompt) if case.prompt else context.decode(CONTEXT, STEPS)

    contexts = {flash: PeerContext(peer, chosen.threads, lanes, positions, flash) for flash in (True, False)}
    theirs_by = {str(flash): lambda c=context: theirs(c) for flash, context in contexts.items()}
    warm = timing.interleave(theirs_by, 1)
    best = max(rate.median for rate in warm.values())
    close = {name: run for name, run in theirs_by.items() if warm[name].median > 0.9 * best}
    rates = timing.interleave({"ours": mine, **close}, chosen.rounds)
    for context in contexts.values():
        context.close()
    fastest = max(close, key=lambda name: rates[name].median)
    return Measured(rates["ours"], rates[fastest], fastest == "True")


def measured_json(one: Measured) -> dict[str, Any]:
    return {
        "ours": round(one.ours.median, 1),
        "ours_range": [round(one.ours.low, 1), round(one.ours.high, 1)],
        "theirs": round(one.theirs.median, 1),
        "theirs_range": [round(one.theirs.low, 1), round(one.theirs.high, 1)],
        "flash_attention": one.flash_attention,
    }


if __name__ == "__main__":
    main()
