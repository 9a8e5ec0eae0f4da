"""The engine's rates and how near they are to the machine's limits; one JSON object as the last line.

    make bench-engine
    .venv/bin/python scripts/bench/engine.py [--only tiny,small] [--sections loops,contexts] [--full]

weights    decode at batch 1, 4, 8 and 16 and prefill of 128 and 512 tokens, for every kind of weights
loops      decode and prefill at 1 to 16 loops
threads    the same work on 1 thread and on all
contexts   decode after 16 to 2048 positions (--full: 4096); cache modes that store inputs up to 512
           (--full: 2048)

Each rate comes with its roofline: operations and bytes that the model's shape asks for (`measure/work.py`),
as a share of the multiply-add peak and of the read bandwidth measured in the same run; the bandwidth is the
L3's where the core's weights fit it, else the DRAM's. Without --full, `small` runs the first section
only, at fewer batch sizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from measure import machine, models, options, ours, timing, work
from measure.neighbours import Neighbours

from tinyloop_serve.native import Model

NAMES = ("tiny", "small")
SECTIONS = ("weights", "loops", "threads", "contexts")
WEIGHTS = ("fp16", "bf16", "int8", "int4")
CACHES = ("fp16", "int8", "h_fp16", "h_int8", "int4")
SHORT, STEPS = 16, 32  # positions before the first decoded token, and tokens decoded
STORED_INPUTS = ("h_fp16", "h_int8", "int4")  # these project all positions again for each token: slow
STORED_INPUT_STEPS = 3


class Case(NamedTuple):
    """`lanes` sequences decode after `positions`, or (0) a prompt of `positions` is prefilled.

    With a cache mode other than "" there is one lane, and its context is made only once.
    """

    weights: str
    lanes: int
    positions: int
    loops: int = models.LOOPS
    threads: int = 0  # 0: all
    cache: str = ""


def main() -> None:
    parser = options.parser(__doc__, NAMES, rounds=5)
    parser.add_argument("--sections", type=options.some_of(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--full", action="store_true", help="small in all sections, 4096 positions")
    chosen = parser.parse_args()
    neighbours = Neighbours()
    before = machine.report(chosen.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen.only:
            for section in chosen.sections:
                if cases := cases_of(name, section, chosen):
                    timing.say(f"{name}, {section}: {len(cases)} cases")
                    found = run(name, cases, chosen.folder or Path(temporary), chosen)
                    rows += [{"model": name, "section": section, **row} for row in found]
    after = machine.ceilings(chosen.threads)
    best = {key: max_of(before[key], value) for key, value in after.items()}
    for row in rows:
        add_shares(row, {**before, **best}, chosen.threads)
        print(line(row))
    report = {"machine": {**before, **best}, "others_cores": round(neighbours.cores(), 3)}
    print(json.dumps({**report, "summary": summary(rows), "cases": rows}))


def cases_of(name: str, section: str, chosen: argparse.Namespace) -> list[Case]:
    whole = name == "tiny" or chosen.full
    if section == "weights":
        lanes = (1, 4, 8, 16) if whole else (1, 8)
        prompts = (128, 512) if whole else (512,)
        return [Case(kind, n, SHORT) for kind in WEIGHTS for n in lanes] + [
            Case(kind, 0, n) for kind in WEIGHTS for n in prompts
        ]
    if not whole:
        return []
    if section == "loops":
        counts = (1, 2, 4, 8, 16)
        return [Case("fp16", 1, SHORT, n) for n in counts] + [Case("fp16", 0, 128, n) for n in counts]
    if section == "threads" and chosen.threads == 1:
        return []
    if section == "threads":
        work_of = ((1, SHORT), (8, SHORT), (0, 512))
        return [
            Case(kind, lanes, positions, threads=threads)
            for kind in ("fp16", "int8")
            for lanes, positions in work_of
            for threads in (1, chosen.threads)
        ]
    contexts = (SHORT, 128, 512, 2048) + ((4096,) if chosen.full else ())
    slow_from = 4096 if chosen.full else 2048
    return [
        Case("fp16", 1, n, cache=cache)
        for n in contexts
        for cache in CACHES
        if cache not in STORED_INPUTS or n < slow_from
    ]


def run(name: str, cases: list[Case], folder: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases interleaved."""
    with ExitStack() as stack:
        loaded: dict[tuple[str, int], Model] = {}
        runs: dict[str, Callable[[], float]] = {}
        kept: dict[str, tuple[Case, Model]] = {}
        for case in cases:
            key = (case.weights, case.threads or chosen.threads)
            if key not in loaded:
                loaded[key] = stack.enter_context(ours.load(name, folder, *key))
            kept[str(case)] = case, loaded[key]
            runs[str(case)] = work_of(loaded[key], case)
        rates = timing.interleave(runs, chosen.rounds, budget_s=45)
        return [measured(case, model, rates[key]) for key, (case, model) in kept.items()]


def work_of(model: Model, case: Case) -> Callable[[], float]:
    if case.lanes == 0:
        return lambda: ours.prefill(model, case.positions, case.loops)
    if not case.cache:
        return lambda: ours.decode(model, case.lanes, case.positions, STEPS, case.loops)
    timing.say(f"prefilling {case.positions} positions, cache {case.cache}")
    prefix = model.create_prefix_cache(models.prompt(case.positions), case.loops, case.cache)
    return lambda: ours.decode_after(model, prefix, steps_of(case), case.cache)


def steps_of(case: Case) -> int:
    return STORED_INPUT_STEPS if case.cache in STORED_INPUTS else STEPS


def measured(case: Case, model: Model, found: timing.Rate) -> dict[str, Any]:
    c, cache = model.config, case.cache or "fp16"
    cache_bytes = model.cache_bytes(1024, cache, case.loops) / 1024
    if case.lanes:
        context = case.positions + steps_of(case) / 2
        cost = work.decode(c, case.weights, case.lanes, context, cache_bytes, case.loops).per(case.lanes)
    else:
        cost = work.prefill(c, case.weights, case.positions, cache_bytes, case.loops).per(case.positions)
    return {
        **case._asdict(),
        "cache": cache,
        "threads": model.threads,
        "tokens_per_second": round(found.median, 1),
        "range": [round(found.low, 1), round(found.high, 1)],
        "mflop_per_token": round(cost.flop / 1e6, 2),
        "mbytes_per_token": round(cost.bytes / 1e6, 2),
        "core_mbytes": round(cost.core_bytes / 1e6, 2),
        "gflop_per_s": round(cost.flop * found.median / 1e9, 1),
        "gbytes_per_s": round(cost.bytes * found.median / 1e9, 1),
    }


def add_shares(row: dict[str, Any], ceilings: dict[str, Any], threads: int) -> None:
    """Achieved over what the machine can do at most on as many threads."""
    team = str(row["threads"] if row["threads"] in (1, threads) else threads)
    level = "l3" if row["core_mbytes"] * 1e6 <= ceilings["caches"].get("L3", 0) else "dram"
    row["level"] = level
    row["fma_share"] = round(row["gflop_per_s"] / ceilings["fma_gflops"][team], 3)
    row["bandwidth_share"] = round(row["gbytes_per_s"] / ceilings[f"{level}_gb_per_s"][team], 3)


def max_of(first: Any, second: Any) -> Any:
    """Of two measurements of a ceiling, the higher one."""
    if isinstance(first, dict):
        return {key: max(value, second[key]) for key, value in first.items()}
    return max(first, second)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that goals are set for, where the run has what they need."""

    def rates(**wanted: Any) -> list[dict[str, Any]]:
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    found: dict[str, Any] = {}
    for name in NAMES:
        for row in rates(model=name, section="weights", weights="fp16", lanes=0, positions=512):
            found[f"{name}_prefill512_fp16_fma_share"] = row["fma_share"]
        team = rates(model=name, section="threads")
        for one, all_of_them in zip(team[::2], team[1::2], strict=True):
            what = f"decode_b{one['lanes']}" if one["lanes"] else f"prefill{one['positions']}"
            key = f"{name}_{what}_{one['weights']}_threads{all_of_them['threads']}_over_1"
            found[key] = round(all_of_them["tokens_per_second"] / one["tokens_per_second"], 3)
        spent = {
            cache: {
                row["positions"]: 1e3 / row["tokens_per_second"]
                for row in rates(model=name, section="contexts", cache=cache)
            }
            for cache in CACHES
        }
        if spent["fp16"]:
            attention = {cache: of[2048] - of[SHORT] for cache, of in spent.items() if 2048 in of}
            found[f"{name}_attention2048_ms"] = {k: round(ms, 3) for k, ms in attention.items()}
            found[f"{name}_attention2048_int8_over_fp16"] = round(attention["fp16"] / attention["int8"], 3)
    return found


def line(row: dict[str, Any]) -> str:
    what = f"decode b{row['lanes']} at {row['positions']}" if row["lanes"] else f"prefill {row['positions']}"
    return (
        f"{row['model']:6} {row['weights']:5} {what:17} cache {row['cache']:7} loops {row['loops']:2}"
        f" threads {row['threads']}: {row['tokens_per_second']:8.1f} tok/s"
        f" {row['gflop_per_s']:6.1f} GFLOP/s ({row['fma_share']:.0%})"
        f" {row['gbytes_per_s']:6.1f} GB/s ({row['bandwidth_share']:.0%} of {row['level'].upper()})"
        f" {row['mbytes_per_token']:7.2f} MB/token"
    )


if __name__ == "__main__":
    main()
