"""PNG plots of a report: latencies as CDFs, the course of a load, a sweep's curve. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 (the backend comes first)

COLOURS = ("#1f6f8b", "#c06c3e", "#6c5b7b")
STYLE: Any = {
    "font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "figure.dpi": 120, "savefig.dpi": 120,
}  # fmt: skip
NAMES = {"ttft_ms": "to the first token", "itl_ms": "between chunks", "e2e_ms": "to the end"}


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """What the report has data for; returns the files."""
    with plt.rc_context(STYLE):
        drawn = []
        if "cdf" in report:
            drawn += [_cdfs(report["cdf"], folder), _course(report["over_time"], folder)]
        if "sweep" in report:
            drawn.append(_curve(report["sweep"], folder))
    return drawn


def _cdfs(found: dict[str, list[float]], folder: Path) -> Path:
    figure, panels = plt.subplots(1, len(NAMES), figsize=(10, 3.2), layout="constrained", sharey=True)
    for axes, (key, name), colour in zip(panels, NAMES.items(), COLOURS, strict=True):
        steps = [number / (len(found[key]) - 1) for number in range(len(found[key]))]
        axes.plot(found[key], steps, color=colour)
        axes.set_xlabel(f"{name}, ms")
        if min(found[key]) > 0:
            axes.set_xscale("log")
            axes.set_xlim(
                left=max(min(found[key]), max(found[key]) / 10_000)
            )  # chunks of one read are no gap
            axes.tick_params(which="minor", labelsize=7)
    panels[0].set_ylabel("share of them")
    return _save(figure, folder / "latency.png")


def _course(found: dict[str, list[float]], folder: Path) -> Path:
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.5), layout="constrained", sharex=True)
    seconds = range(len(found["tokens"]))
    above.plot(seconds, found["tokens"], color=COLOURS[0])
    above.set_ylabel("tokens per second")
    below.plot(seconds, found["sent"], color=COLOURS[1], label="sent per second")
    below.plot(seconds, found["ended"], color=COLOURS[2], label="ended per second")
    below.plot(seconds, found["open"], color="black", linewidth=1, label="open")
    below.set_ylabel("requests")
    below.set_xlabel("seconds")
    below.legend()
    for axes in (above, below):
        axes.set_ylim(bottom=0)
    return _save(figure, folder / "throughput.png")


def _curve(sweep: dict[str, Any], folder: Path) -> Path:
    """Latency over throughput; the rate is written at each point."""
    points = sorted(sweep["points"], key=lambda point: float(point["rate"]))
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axes, key in zip(panels, ("ttft_ms", "e2e_ms"), strict=True):
        for share, colour in zip(("p50", "p99"), COLOURS, strict=False):
            along = [point["tokens_per_s"] for point in points]
            axes.plot(along, [point[key][share] for point in points], marker="o", color=colour, label=share)
        for point in points:
            axes.annotate(f"{point['rate']:.3g}/s", (point["tokens_per_s"], point[key]["p99"]), fontsize=7)
        axes.set_xlabel("tokens per second")
        axes.set_ylabel(f"{NAMES[key]}, ms")
        axes.set_yscale("log")
        axes.legend()
    figure.suptitle(f"highest rate that meets the SLO: {sweep['highest_rps']:.3g} requests/s")
    return _save(figure, folder / "curve.png")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path
