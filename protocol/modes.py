"""The mode matrix: which way of generating can be combined with which mode. The data is modes.json beside
this file; the engine compiles the same file in, the dispatcher's guards, the documents and the tests read it
here.

Columns are ways to generate, rows are modes of a request. A cell that is False is refused with an error that
names both.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Final

CACHE_MODES: Final = ("fp16", "int8", "int4", "h_fp16", "h_int8")
"""Names of cache modes. `int4` and the `h_` ones store each layer's normed input instead of keys and
values.
"""


@functools.cache
def matrix() -> dict[str, dict[str, bool]]:
    """row -> column -> supported."""
    data = json.loads(files("tinyloop_serve.protocol").joinpath("modes.json").read_text("utf-8"))
    return {row: dict(zip(data["columns"], cells, strict=True)) for row, cells in data["rows"].items()}


def supported(row: str, column: str) -> bool:
    """Whether the mode `row` can be generated in the way of `column`. Raises KeyError for unknown names."""
    return matrix()[row][column]


def markdown() -> str:
    """The matrix as the documents show it."""
    columns = list(next(iter(matrix().values())))
    lines = [
        "| mode | " + " | ".join(c.replace("_", " ") for c in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, cells in matrix().items():
        lines.append(f"| `{row}` | " + " | ".join("yes" if cells[c] else "refused" for c in columns) + " |")
    return "\n".join(lines)
