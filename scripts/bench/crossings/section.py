"""One pattern's table and crossing points, as Markdown, and its place in a document. Measures nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Section:
    name: str  # of its place: <!-- measured: NAME --> ... <!-- /measured -->
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    crossings: list[str] = field(default_factory=list)  # a sentence each
    data: dict[str, Any] = field(default_factory=dict)  # for the JSON

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.head, ("---",) * len(self.head), *self.rows)]
        return "\n".join(lines + [""] + [f"- {sentence}" for sentence in self.crossings])


def crossing(points: Sequence[tuple[float, float]], level: float = 1.0) -> float | None:
    """Where the line through (x, y) points, in order of x, first passes `level`; None: it does not."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y0 != y1 and (y0 - level) * (y1 - level) <= 0:
            return x0 + (level - y0) * (x1 - x0) / (y1 - y0)
    return None


def where(points: Sequence[tuple[float, float]], unit: str, scale: float = 1.0, level: float = 1.0) -> str:
    """`at 43 %`, or that there is no such place."""
    found = crossing(points, level)
    if found is not None:
        return f"at {scale * found:.3g}{unit}"
    side = "above" if all(y >= level for _, y in points) else "below"
    return f"nowhere between {scale * points[0][0]:.3g} and {scale * points[-1][0]:.3g}{unit} (always {side})"


def write(path: Path, sections: Sequence[Section], machine: str) -> None:
    """Replaces what lies between the marks. Raises ValueError for a mark that is not there."""
    text = path.read_text("utf-8")
    for section in sections:
        pattern = rf"(<!-- measured: {section.name} -->\n).*?(<!-- /measured -->)"
        content = f"{section.markdown()}\n\n{machine}\n"
        place = re.search(pattern, text, re.S)
        if place is None:
            raise ValueError(f"{path}: no place is marked <!-- measured: {section.name} -->")
        text = text[: place.end(1)] + content + text[place.start(2) :]
    path.write_text(text, "utf-8")
