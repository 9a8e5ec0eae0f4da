"""The bytes of an artifact: header, order, alignment and hash. Knows neither models nor numbers.

An 8-byte little-endian header length, a JSON header padded with spaces so that the data starts at a multiple
of 64, then the tensors without holes. The header's `data_sha256` is the hash of all that follows it, so the
header alone tells two artifacts apart, and a reader need not read the weights to name them.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinyloop_serve.native.errors import refusal

DATA_ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20
MAX_READ_HEADER_BYTES = 100_000_000  # of any safetensors file: the limit of the format's own library
METADATA = "__metadata__"
HASH = "data_sha256"
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
READ_BYTES = 1 << 24


class Entry(NamedTuple):
    """One tensor of the file. `read` gives its bytes, row-major and little-endian, when they are written."""

    name: str
    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    read: Callable[[], Any]  # -> an object with the buffer protocol

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def save(path: str | os.PathLike[str], metadata: dict[str, str], entries: Sequence[Entry]) -> None:
    """Write the file beside `path`, in the order of `entries`, and rename it into place.

    A rename, so that a process that has the old file mapped keeps it. Raises ArtifactError, before any file
    is touched, for a header that is too large or not Unicode.
    """
    header = _header(metadata, "0" * 64, entries)
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(header)
            digest = hashlib.sha256()
            for entry in entries:
                data = memoryview(entry.read()).cast("B")
                assert len(data) == entry.bytes
                digest.update(data)
                file.write(data)
            file.seek(0)
            file.write(_header(metadata, digest.hexdigest(), entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def verify(path: str | os.PathLike[str], recorded: str) -> None:
    """Raise ArtifactError unless the data of the artifact at `path` has the hash `recorded`.

    For a file that a reader has accepted: the rest of it is not looked at.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        while block := file.read(READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != recorded:
        raise refusal(
            f"{METADATA}.{HASH}", recorded, f"{digest.hexdigest()}, the hash of the data: a damaged file"
        )


def mapped_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes of the artifact at `path` its users map and share; the rest each of them copies.

    An estimate for a file that nobody has checked yet. Raises OSError or ArtifactError where there is no
    header to read.
    """
    total = 0
    for entry in read_header(Path(path))[0].values():
        match entry:
            case {"shape": [_, _, _, *_], "data_offsets": [int(begin), int(end)]}:
                total += end - begin
    return min(total, os.path.getsize(path))


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begins. Raises ArtifactError naming the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_READ_HEADER_BYTES):
            raise refusal(path.name, f"{size} bytes, header of {length}", "a complete safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise refusal(path.name, str(error), "a safetensors file with a JSON header") from None
    if not isinstance(header, dict):
        raise refusal(path.name, type(header).__name__, "a safetensors header that is an object")
    return header, 8 + length


def _header(metadata: dict[str, str], digest: str, entries: Sequence[Entry]) -> bytes:
    """With its length in front."""
    tree: dict[str, object] = {METADATA: metadata | {HASH: digest}}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.bytes]
        tree[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.bytes
    try:
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refusal(
            "metadata", error.object[error.start : error.end], "text that is valid Unicode"
        ) from None
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise refusal(
            "header", len(text), f"at most {MAX_HEADER_BYTES} bytes of config, tokenizer and tensor names"
        )
    return len(text).to_bytes(8, "little") + text
