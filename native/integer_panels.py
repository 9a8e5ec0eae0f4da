"""Integer weights: a matrix quantised and put into panels, as the engine does at load, bit for bit.

    int8   (panels, inputs / 4 + 1, 16, 4) bytes; the last 64 of a panel are the 16 outputs' scales, fp32
    int4   (panels, inputs / 32, 288) bytes: of a group of 32 inputs 256 with two weights each, 16 fp16 scales

The panels are those of floats (panels.py) with the inputs padded to a multiple of 32.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tinyloop_serve.native.panels import PANEL, Array, Heads, packed_shape, padded
from tinyloop_serve.native.tensors import BF16, Tensor, bits_of, float32

GROUP = 32  # inputs that share a scale in int4; integer weights have whole groups
GROUP_BYTES = PANEL * GROUP // 2 + PANEL * 2
BLOCK_ELEMENTS = 1 << 22  # quantised at a time, so that an embedding needs no fp32 copy of itself


def int8_shape(shape: tuple[int, ...], heads: Heads) -> tuple[int, ...]:
    panels, inputs, _ = packed_shape(shape, heads)
    return panels, -(-inputs // GROUP) * GROUP // 4 + 1, PANEL, 4


def int4_shape(shape: tuple[int, ...], heads: Heads) -> tuple[int, ...]:
    panels, inputs, _ = packed_shape(shape, heads)
    return panels, -(-inputs // GROUP), GROUP_BYTES


def pack_int8(matrix: Tensor, heads: Heads) -> npt.NDArray[np.int8]:
    """One scale per output: the largest magnitude is 127."""
    return _in_blocks(matrix, heads, int8_shape(matrix.shape, heads), np.int8, _int8)


def pack_int4(matrix: Tensor, heads: Heads) -> npt.NDArray[np.uint8]:
    """One scale per output and group of inputs: the weight of the largest magnitude is -8."""
    return _in_blocks(matrix, heads, int4_shape(matrix.shape, heads), np.uint8, _int4)


def _in_blocks(
    matrix: Tensor,
    heads: Heads,
    shape: tuple[int, ...],
    dtype: type[np.generic],
    quantise: Callable[[npt.NDArray[np.float32], npt.NDArray[np.bool_]], Array],
) -> Array:
    inputs = -(-packed_shape(matrix.shape, heads)[1] // GROUP) * GROUP
    bits = padded(bits_of(matrix), heads, inputs)
    real = padded(np.ones(matrix.shape[0], bool)[:, None], Heads(heads.outputs), 1)[:, 0]
    out = np.zeros(shape, dtype)
    step = max(1, BLOCK_ELEMENTS // (PANEL * inputs))
    for first in range(0, shape[0], step):
        part = slice(first * PANEL, (first + step) * PANEL)
        rows = float32(BF16(bits[part]) if isinstance(matrix, BF16) else bits[part])
        out[first : first + step] = quantise(rows, real[part])
    return out


def _int8(rows: npt.NDArray[np.float32], _: npt.NDArray[np.bool_]) -> Array:
    panels, inputs = len(rows) // PANEL, rows.shape[1]
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    used = np.where(scales > 0, scales, np.float32(1))
    q = np.clip(np.rint(rows / used[:, None]), -127, 127).astype(np.int8)
    bytes_ = q.reshape(panels, PANEL, inputs // 4, 4).swapaxes(1, 2)
    return np.concatenate([bytes_, scales.view(np.int8).reshape(panels, 1, PANEL, 4)], axis=1)


def _int4(rows: npt.NDArray[np.float32], real: npt.NDArray[np.bool_]) -> Array:
    panels, groups = len(rows) // PANEL, rows.shape[1] // GROUP
    weights = rows.reshape(-1, groups, GROUP)
    at = np.abs(weights).argmax(axis=2)
    top = np.take_along_axis(weights, at[..., None], axis=2)[..., 0] + np.float32(0)  # no -0
    largest = np.float32(np.finfo(np.float16).max)
    scales = np.clip(top / np.float32(-8), -largest, largest).astype(np.float16)
    used = np.where(scales == 0, np.float32(np.inf), scales.astype(np.float32))
    q = (np.clip(np.rint(weights / used[..., None]), -8, 7) + 8).astype(np.uint8)
    q[~real], scales[~real] = 0, 0
    low, high = np.moveaxis(q.reshape(panels, PANEL, groups, 4, 2, 4), 4, 0)
    bytes_ = (low | high << 4).transpose(0, 2, 3, 1, 4).reshape(panels, groups, GROUP_BYTES - 2 * PANEL)
    beside = np.ascontiguousarray(scales.reshape(panels, PANEL, groups).swapaxes(1, 2)).view(np.uint8)
    return np.concatenate([bytes_, beside], axis=2)
