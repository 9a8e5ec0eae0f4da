"""The panel layout of a matrix, in which the engine computes: native/FORMAT.md, "Panels". Knows no file.

A matrix (outputs, inputs) becomes (panels, inputs, 16): 16 outputs side by side. Where an axis is made of
heads, every head is padded with zeros to a multiple of 16, but nothing follows the last head's own inputs.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PANEL = 16
ALIGNMENT = 64  # bytes: of a panel tensor in the file, so a panel must be a multiple of it


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
    """(panels, inputs, 16) of a matrix of `shape`."""
    outputs, inputs = (_place(size - 1, head) + 1 for size, head in zip(shape, heads, strict=True))
    return -(-outputs // PANEL), inputs, PANEL


def pack(matrix: npt.NDArray[Any], heads: Heads) -> npt.NDArray[Any]:
    panels, inputs, _ = packed_shape(matrix.shape, heads)
    padded = np.zeros((panels * PANEL, inputs), matrix.dtype)
    padded[_places(matrix.shape, heads)] = matrix
    return np.ascontiguousarray(padded.reshape(panels, PANEL, inputs).swapaxes(1, 2))


def unpack(packed: npt.NDArray[Any], shape: tuple[int, ...], heads: Heads) -> npt.NDArray[Any]:
    """The matrix of `shape` that `pack` was given."""
    panels, inputs, _ = packed.shape
    padded: npt.NDArray[Any] = np.ascontiguousarray(packed.swapaxes(1, 2)).reshape(panels * PANEL, inputs)
    return np.ascontiguousarray(padded[_places(shape, heads)])


def _place(i: int, head: int) -> int:
    """Where element i of an axis goes."""
    return i // head * _padded(head) + i % head if head else i


def _places(shape: tuple[int, ...], heads: Heads) -> tuple[Any, ...]:
    """The index of a matrix's elements in its padded form."""
    if all(head % PANEL == 0 for head in heads):
        return tuple(slice(0, size) for size in shape)
    axes = (
        np.arange(size) if not head else np.arange(size) // head * _padded(head) + np.arange(size) % head
        for size, head in zip(shape, heads, strict=True)
    )
    return np.ix_(*axes)


def _padded(head: int) -> int:
    return -(-head // PANEL) * PANEL
