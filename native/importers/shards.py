"""Reads safetensors: a file, or a Hugging Face folder's `model.safetensors` or the shards of its index.

Own code rather than a package, because bf16 must arrive bit for bit (numpy has no such type) and because a
checkpoint comes from strangers: every length is checked against the file before a byte is mapped. Knows
nothing of models.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinyloop_serve.native.artifact_file import METADATA, read_header
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.tensors import BF16, Tensor

DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Stored(NamedTuple):
    """Where a tensor lies. `dtype` is a key of DTYPES, `offset` counts from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """The tensor, mapped: pages are read when they are used."""
        mapped = np.memmap(self.file, DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)
        return BF16(mapped) if self.dtype == "BF16" else mapped


def open_shards(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder by name. Raises ArtifactError naming the file or the tensor."""
    if (folder / INDEX).is_file():
        return _open_index(folder)
    if not (folder / SINGLE).is_file():
        others = sorted(path.name for path in folder.glob("*.bin")) or sorted(
            path.name for path in folder.glob("*.safetensors")
        )
        raise refusal(SINGLE, ", ".join(others) or None, f"a folder with {SINGLE} or {INDEX}")
    return open_file(folder / SINGLE)


def open_file(path: Path) -> dict[str, Stored]:
    """All tensors of one file by name. Raises ArtifactError naming the file or the tensor."""
    header, start = read_header(path)
    size = path.stat().st_size
    return {
        name: _stored(path, name, entry, start, size - start)
        for name, entry in header.items()
        if name != METADATA
    }


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that a file carries beside its tensors."""
    metadata = read_header(path)[0].get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise refusal(METADATA, type(metadata).__name__, "an object of strings")
    return metadata


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of the folder; an ArtifactError names the file that is not one."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise refusal(path.name, str(error), "JSON in UTF-8") from None
    if not isinstance(tree, dict):
        raise refusal(path.name, type(tree).__name__, "a JSON object")
    return tree


def _open_index(folder: Path) -> dict[str, Stored]:
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise refusal(INDEX, type(where).__name__, "a weight_map of tensor names to file names")
    found: dict[str, Stored] = {}
    for shard in sorted(set(where.values())):
        if shard != os.path.basename(shard) or not (folder / shard).is_file():
            raise refusal(INDEX, shard, "the names of files beside it")
        for name, stored in open_file(folder / shard).items():
            if where.get(name) != shard:
                raise refusal(name, shard, f"the file that {INDEX} gives: {where.get(name)}")
            found[name] = stored
    for name, shard in where.items():
        if name not in found:
            raise refusal(name, None, f"in {shard}, as {INDEX} says")
    return found


def _stored(path: Path, name: str, entry: Any, start: int, data_bytes: int) -> Stored:
    entry = entry if isinstance(entry, Mapping) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPES:
        raise refusal(name, dtype, "an unquantised tensor: " + " | ".join(DTYPES))
    if not _whole_numbers(shape) or not shape or 0 in shape:
        raise refusal(name, shape, "a shape of positive numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise refusal(name, offsets, f"two offsets within the {data_bytes} data bytes of {path.name}")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise refusal(name, offsets, f"as many bytes as {dtype} of shape {shape} needs")
    return Stored(path, dtype, tuple(shape), start + offsets[0])


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
