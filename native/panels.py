"""The panel layout of a matrix, in which the engine computes: native/FORMAT.md, "Panels". Knows no file.

A matrix (outputs, inputs) of floats becomes (panels, inputs, 16): 16 outputs side by side. Where an axis is
made of heads, every head is padded with zeros to a multiple of 16, but nothing follows the last head's own
inputs. Integer weights: integer_panels.py.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PANEL = 16
ALIGNMENT = 64  # bytes: of a panel tensor in the file, so a panel of floats must be a multiple of it


class Heads(NamedTuple):
    """The head width along each axis of a matrix; 0: the axis is not made of heads."""

    outputs: int = 0
    inputs: int = 0


def heads_of(name: str, head_dim: int) -> Heads:
    """Of the artifact's matrix `name`."""
    part = name.rsplit(".", 2)[-2]
    if part in ("wq", "wk", "wv"):
        return Heads(outputs=head_dim)
    return Heads(inputs=head_dim) if part == "wo" else Heads()


def packed_shape(shape: tuple[int, ...], heads: Heads) -> tuple[int, int, int]:
    """(panels, inputs, 16) of a matrix of floats of `shape`."""
    outputs, inputs = (_place(size - 1, head) + 1 for size, head in zip(shape, heads, strict=True))
    return -(-outputs // PANEL), inputs, PANEL


def pack(matrix: Array, heads: Heads) -> Array:
    """Floats in panels, or whatever stands for floats."""
    panels, inputs, _ = packed_shape(matrix.shape, heads)
    return np.ascontiguousarray(padded(matrix, heads, inputs).reshape(panels, PANEL, inputs).swapaxes(1, 2))


def unpack(packed: Array, shape: tuple[int, ...], heads: Heads) -> Array:
    """The matrix of `shape` that `pack` was given."""
    panels, inputs, _ = packed.shape
    rows: Array = np.ascontiguousarray(packed.swapaxes(1, 2)).reshape(panels * PANEL, inputs)
    return np.ascontiguousarray(rows[_places(shape, heads)])


def padded(matrix: Array, heads: Heads, inputs: int) -> Array:
    """(a multiple of 16, inputs), heads and ends padded with zeros."""
    panels = packed_shape(matrix.shape, heads)[0]
    rows = np.zeros((panels * PANEL, inputs), matrix.dtype)
    rows[_places(matrix.shape, heads)] = matrix
    return rows


def _place(i: int, head: int) -> int:
    """Where element i of an axis goes."""
    return i // head * _padded_head(head) + i % head if head else i


def _places(shape: tuple[int, ...], heads: Heads) -> tuple[Any, ...]:
    """The index of a matrix's elements in its padded form."""
    if all(head % PANEL == 0 for head in heads):
        return tuple(slice(0, size) for size in shape)
    axes = (
        np.arange(size) if not head else np.arange(size) // head * _padded_head(head) + np.arange(size) % head
        for size, head in zip(shape, heads, strict=True)
    )
    return np.ix_(*axes)


def _padded_head(head: int) -> int:
    return -(-head // PANEL) * PANEL
