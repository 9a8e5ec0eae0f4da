"""How soon a replica is ready, and what two of them on one host hold; one JSON object as the last line.

    .venv/bin/python scripts/bench/startup.py [--model PATH ...] [--repeats 9]

The same model with its matrices as plain rows, which every process copies into the engine's layout, and in
panels, which it maps. ready_ms: from the start of the process `python -m tinyloop_serve.replica` to its READY
line, medians of interleaved rounds. Memory is that of two processes that have loaded the model and generated
16 tokens: rss and pss (what they share is divided between them) of each, private: what it alone holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinyloop_serve.native import demo_model_path
from tinyloop_serve.native.artifact import LAYOUTS
from tinyloop_serve.native.importers.tinyloop import convert_tinyloop

GENERATE = """
import sys
from tinyloop_serve.native import GenerateConfig, Model
with Model(sys.argv[1], threads=1) as model:
    model.generate([1, 2, 3], GenerateConfig(max_tokens=16, ignore_eos=True))
    print("READY", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[int]:
    """The pid of a Python process that has said READY."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("READY"):
            raise SystemExit(f"{arguments} said {line!r}")
        yield process.pid
    finally:
        process.terminate()
        process.communicate()


def ready_ms(model: Path, folder: str) -> float:
    begin = time.perf_counter()
    flags = ("--model", str(model), "--endpoint", f"ipc://{folder}/replica.sock", "--threads", "1")
    with started("-m", "tinyloop_serve.replica", *flags):
        return (time.perf_counter() - begin) * 1000


def memory(model: Path) -> dict[str, float]:
    """Megabytes of one of two processes that have used the model."""
    with started("-c", GENERATE, str(model)) as pid, started("-c", GENERATE, str(model)):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = {kind: int(number) for kind, number in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    private = kb["Private_Clean"] + kb["Private_Dirty"]
    return {
        name: round(value * 1.024e-3, 1)
        for name, value in (("rss_mb", kb["Rss"]), ("pss_mb", kb["Pss"]), ("private_mb", private))
    }


def measure(source: Path, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        models = {layout: Path(folder) / f"{layout}.tinyloop" for layout in LAYOUTS}
        for layout, model in models.items():
            convert_tinyloop(source, model, layout=layout)
        times: dict[str, list[float]] = {layout: [] for layout in models}
        for number in range(repeats + 1):  # the first round warms up
            print(f"  {source.stem}: round {number} of {repeats}", file=sys.stderr)
            for layout, model in models.items():
                elapsed = ready_ms(model, folder)
                if number:
                    times[layout].append(elapsed)
        weights = round(models["plain"].stat().st_size / 1e6, 1)
        return {
            "file_mb": weights,
            "layouts": {
                layout: {"ready_ms": round(statistics.median(times[layout])), **memory(model)}
                for layout, model in models.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, nargs="+", default=[demo_model_path()])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    report = {model.stem: measure(model, options.repeats) for model in options.model}
    for name, found in report.items():
        print(f"{name}: {found['file_mb']} MB")
        print("  layout  ready ms  rss MB  pss MB  private MB")
        for layout, row in found["layouts"].items():
            print(
                f"  {layout:6} {row['ready_ms']:9} {row['rss_mb']:7} {row['pss_mb']:7} {row['private_mb']:11}"
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
