"""The command line that the comparisons share: which models, which cases, how often."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def parser(
    description: str | None, names: Iterable[str], cases: Iterable[str] = (), rounds: int = 5
) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", type=some_of(names), default=list(names), help="models, by comma")
    if cases:
        made.add_argument("--cases", type=some_of(cases), default=list(cases), help="by comma")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--folder", type=Path, help="where models are kept; by default they are deleted")
    return made


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: one of {', '.join(known)}")
        return text.split(",")

    return parse
