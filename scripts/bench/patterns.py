"""When each way to use the pool wins and where it begins to: the tables of docs/patterns.md; one JSON object
as the last line.

    .venv/bin/python scripts/bench/patterns.py [--only batches,tiers] [--rounds 5] [--write docs/patterns.md]

Cases of a table are measured in turn; a cell is the median over rounds of the ratio within a round. Five to
six minutes on an idle machine of two cores; --short shows that it runs, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from crossings import batches, latency, prefixes, speculation, tiers
from crossings.section import Section, write
from measure.machine import describe
from measure.models import write as write_model
from measure.options import some_of
from measure.timing import say

from tinyloop_serve.native import demo_model_path

COMMAND = ".venv/bin/python scripts/bench/patterns.py"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("latency", "batches", "prefixes", "tiers", "speculation")
    parser.add_argument("--only", type=some_of(names), default=list(names), help="tables, by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="one round of little work")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this document")
    flags = parser.parse_args()
    rounds, demo = (1 if flags.short else flags.rounds), demo_model_path()
    with tempfile.TemporaryDirectory() as folder:

        def lockstep() -> Section:
            models = {"demo": demo}
            if not flags.short:
                models["tiny"] = write_model("tiny", Path(folder))
            return batches.measure(models, flags.threads, rounds, mean=8 if flags.short else 32)

        measures: dict[str, Callable[[], Section]] = {
            "latency": lambda: latency.measure(rounds, *((4, (1, 4)) if flags.short else ())),
            "batches": lockstep,
            "prefixes": lambda: prefixes.measure(
                demo, flags.threads, rounds, (4,) if flags.short else prefixes.NEW
            ),
            "tiers": lambda: tiers.measure(demo, flags.threads, rounds),
            "speculation": lambda: speculation.measure(
                demo, flags.threads, rounds, (1.0, 8.0) if flags.short else speculation.STATE
            ),
        }
        sections = []
        for name in flags.only:
            say(name)
            sections.append(measures[name]())
    machine = describe()
    kind = f"{machine['cores']} cores of {machine['cpu']}, {machine['simd']}, {flags.threads} threads"
    made = f"Measured on {kind}; medians of {rounds} interleaved rounds of `{COMMAND}`."
    for section in sections:
        print(f"{section.name}\n\n{section.markdown()}\n")
    if flags.write:
        write(flags.write, sections, made)
    found = json.dumps({"machine": machine, **{section.name: section.data for section in sections}})
    print(json.dumps(json.loads(found, parse_float=lambda digits: round(float(digits), 3))))


if __name__ == "__main__":
    main()
