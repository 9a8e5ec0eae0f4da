"""The tensors that the writer takes: numpy arrays, and the element type that numpy lacks. Knows no file."""

from typing import Any

import numpy as np
import numpy.typing as npt


class BF16:
    """A bfloat16 tensor for the writer: the 16 bits of each element in a numpy uint16 array."""

    def __init__(self, bits: npt.NDArray[np.uint16]) -> None:
        if not isinstance(bits, np.ndarray) or bits.dtype != np.uint16:
            raise TypeError(
                "BF16 wraps a numpy uint16 array of bfloat16 bits; use BF16.from_float32 for numbers"
            )
        self.bits = bits

    @classmethod
    def from_float32(cls, values: npt.NDArray[np.float32]) -> "BF16":
        """Round to nearest, ties to even; NaN stays NaN."""
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return cls(np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16))

    def float32(self) -> npt.NDArray[np.float32]:
        """The same numbers, exactly."""
        return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


Tensor = npt.NDArray[Any] | BF16


def dtype_name(tensor: Tensor) -> str:
    """As a safetensors header spells it."""
    return "BF16" if isinstance(tensor, BF16) else {2: "F16", 4: "F32"}[tensor.dtype.itemsize]


def bits_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The array that holds the elements' bits."""
    return tensor.bits if isinstance(tensor, BF16) else tensor


def float32(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The same numbers as fp32: exact from every type that an artifact or a checkpoint may have."""
    return tensor.float32() if isinstance(tensor, BF16) else np.asarray(tensor, dtype=np.float32)


def all_finite(tensor: Tensor) -> bool:
    if isinstance(tensor, BF16):
        return bool(np.all((tensor.bits & np.uint16(0x7F80)) != np.uint16(0x7F80)))
    return bool(np.all(np.isfinite(tensor)))
