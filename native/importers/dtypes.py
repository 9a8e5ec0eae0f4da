"""The element types of an artifact's matrices, and the one conversion to them that all importers share."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tinyloop_serve.native.artifact import INTEGERS
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.tensors import BF16, Tensor, float32

Progress = Callable[[int, int], object]  # (tensors done, tensors in all)

DTYPES: dict[str, Callable[[npt.NDArray[np.float32]], Tensor]] = {
    "fp16": lambda values: values.astype(np.float16),
    "bf16": BF16.from_float32,
    "fp32": lambda values: values,
}
WEIGHTS = (*DTYPES, *INTEGERS)
BLOCK_ELEMENTS = 1 << 22  # converted at a time, so that an embedding needs no fp32 copy of itself


def check_weights(weights: str) -> None:
    if weights not in WEIGHTS:
        raise refusal("weights", weights, " | ".join(WEIGHTS))


def integers(weights: str | None) -> str | None:
    """What `artifact.write` shall make of the tensors that `to_dtype` gave."""
    return weights if weights in INTEGERS else None


def to_dtype(name: str, tensor: Tensor, weights: str) -> Tensor:
    """A matrix in the type `weights`, a vector (or a matrix of one row) in fp32. What is exact stays exact.
    Matrices that the writer will quantise stay as they are.

    Raises ArtifactError naming the tensor `name` for numbers that fp16 cannot hold.
    """
    if len(tensor.shape) == 1 or tensor.shape[0] == 1:
        return float32(tensor)
    if weights in INTEGERS or (weights == "bf16" and isinstance(tensor, BF16)):
        return tensor
    rows = max(1, BLOCK_ELEMENTS * tensor.shape[0] // max(1, int(np.prod(tensor.shape))))
    blocks = [
        _converted(name, float32(_rows(tensor, first, first + rows)), weights)
        for first in range(0, tensor.shape[0], rows)
    ]
    if len(blocks) == 1:
        return blocks[0]
    arrays = [block.bits if isinstance(block, BF16) else block for block in blocks]
    joined = np.concatenate(arrays)
    return BF16(joined) if weights == "bf16" else joined


def _rows(tensor: Tensor, first: int, last: int) -> Tensor:
    return BF16(tensor.bits[first:last]) if isinstance(tensor, BF16) else tensor[first:last]


def _converted(name: str, values: npt.NDArray[np.float32], dtype: str) -> Tensor:
    if dtype == "fp16":
        largest = float(np.abs(values).max(initial=0.0))
        if largest > float(np.finfo(np.float16).max):
            raise refusal(name, largest, "numbers up to 65504 in fp16: use weights bf16 or fp32")
    return DTYPES[dtype](values)
