"""Draws docs/performance/*.svg from the JSON lines that the benchmarks printed, kept beside them.

    make bench-plots
    .venv/bin/python scripts/bench/plot.py [--folder docs/performance]

Equal JSON gives equal files. A plot whose JSON, or whose section of it, is not there is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402 (the backend comes first)
from matplotlib.axes import Axes  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "performance"
COLOURS = {
    "tiny": "#1f6f8b", "small": "#99b898", "smollm2": "#c06c3e",
    "fp16": "#1f6f8b", "bf16": "#99b898", "int8": "#c06c3e", "int4": "#6c5b7b",
    "h_fp16": "#8fb8c9", "h_int8": "#e0b090",
}  # fmt: skip
MARKS = {"fp16": "o", "bf16": "s", "int8": "^", "int4": "D"}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "tinyloop", "font.size": 9, "axes.grid": True,
    "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def ratios(axes: Axes, report: dict[str, Any]) -> None:
    """How many times as fast as llama.cpp, for every case and model."""
    names = [name for name in ("tiny", "small", "smollm2") if name in report]
    cases = list(dict.fromkeys(case for name in names for case in report[name]))
    height = 0.8 / len(names)
    for at, name in enumerate(names):
        rows = [(i, report[name][case]) for i, case in enumerate(cases) if case in report[name]]
        places = [i + (at - (len(names) - 1) / 2) * height for i, _ in rows]
        axes.barh(places, [ratio for _, ratio in rows], height, color=COLOURS[name], label=name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as llama.cpp")
    axes.legend()


def batches(axes: Axes, report: dict[str, Any]) -> None:
    """Tokens per second of `tiny` over the lanes of a batch."""
    for kind in MARKS:
        rows = [
            (row["lanes"], row["tokens_per_second"])
            for row in report["cases"]
            if (row["model"], row["section"], row["weights"]) == ("tiny", "weights", kind) and row["lanes"]
        ]
        if rows:
            axes.plot(*zip(*rows, strict=True), marker=MARKS[kind], color=COLOURS[kind], label=kind)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 8, 16], ["1", "4", "8", "16"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("lanes in lockstep")
    axes.set_ylabel("tokens per second, all lanes")
    axes.legend(title="weights")


def contexts(axes: Axes, report: dict[str, Any]) -> None:
    """Milliseconds per token of `tiny` over the positions it attends to."""
    of = [row for row in report["cases"] if (row["model"], row["section"]) == ("tiny", "contexts")]
    for mode in dict.fromkeys(row["cache"] for row in of):
        rows = [(row["positions"], 1e3 / row["tokens_per_second"]) for row in of if row["cache"] == mode]
        axes.plot(*zip(*rows, strict=True), marker="o", color=COLOURS[mode], label=mode)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["positions"] for row in of})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("positions in the cache")
    axes.set_ylabel("ms per token")
    axes.legend(title="cache")


def roofline(axes: Axes, report: dict[str, Any]) -> None:
    """GFLOP/s over operations per byte of weights and cache, under the ceilings of all threads."""
    machine = report["machine"]
    rows = [row for row in report["cases"] if row["section"] == "weights"]
    for row in rows:
        axes.plot(
            row["mflop_per_token"] / row["mbytes_per_token"],
            row["gflop_per_s"],
            MARKS[row["weights"]],
            color=COLOURS[row["weights"]],
            fillstyle="full" if row["model"] == "tiny" else "none",
        )
    for kind, mark in MARKS.items():
        axes.plot([], [], mark, color=COLOURS[kind], label=kind)
    low, high = 0.5, 1.5 * max(row["mflop_per_token"] / row["mbytes_per_token"] for row in rows)
    peak = list(machine["fma_gflops"].values())[-1]
    axes.axhline(peak, color="black", linewidth=1)
    axes.text(high, peak, "fp32 multiply-add peak", ha="right", va="bottom")
    for key, label in (("dram_gb_per_s", "DRAM"), ("l3_gb_per_s", "L3")):
        bandwidth = list(machine[key].values())[-1]
        axes.plot([low, peak / bandwidth], [low * bandwidth, peak], color="black", linewidth=1)
        axes.text(low, low * bandwidth, label, va="bottom")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("operations per byte (filled: tiny, hollow: small)")
    axes.set_ylabel("GFLOP/s")
    axes.legend(title="weights")


class Plot(NamedTuple):
    source: str  # name of the JSON file
    section: str  # of its cases that are drawn; "": it has no sections
    draw: Callable[[Axes, dict[str, Any]], None]
    inches: tuple[float, float]

    def missing(self, folder: Path) -> str:
        """What it cannot be drawn without; "": nothing."""
        file = folder / f"{self.source}.json"
        if not file.exists():
            return f"no {file.name} in {folder}"
        if self.section and not any(row["section"] == self.section for row in self.report(folder)["cases"]):
            return f"no {self.section!r} in {file.name}"
        return ""

    def report(self, folder: Path) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((folder / f"{self.source}.json").read_text())
        return report


PLOTS = {
    "ratios": Plot("vs_llama_cpp", "", ratios, (7, 5)),
    "batches": Plot("engine", "weights", batches, (5, 3.2)),
    "contexts": Plot("engine", "contexts", contexts, (5, 3.2)),
    "roofline": Plot("engine", "weights", roofline, (6, 4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    plt.rcParams.update(STYLE)
    for name, plot in PLOTS.items():
        if missing := plot.missing(folder):
            print(f"{name}.svg: {missing}, left out")
            continue
        figure, axes = plt.subplots(figsize=plot.inches, layout="constrained")
        plot.draw(axes, plot.report(folder))
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        print(f"{name}.svg")


if __name__ == "__main__":
    main()
