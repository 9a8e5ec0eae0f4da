"""Writes a looped model as the plain Llama that it unrolls to: a GGUF whose layers repeat the core's weights.

Only models that have such a form are taken: pre-norm, no injection, no norm between loops. Needs `gguf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from measure import models

PRECISIONS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
LAYER = {
    "attn_norm": "attn_norm", "wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output",
    "ffn_norm": "ffn_norm", "w_gate": "ffn_gate", "w_up": "ffn_up", "w_down": "ffn_down",
}  # fmt: skip


def write(artifact: Path, folder: Path, precision: str) -> Path:
    """Writes it to the folder if it is not there yet."""
    path = folder / f"{artifact.stem}-{precision}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        _write(partial, models.read(artifact), precision)
        partial.rename(path)
    return path


def _write(path: Path, weights: models.Weights, precision: str) -> None:
    """All matrices in one precision, the head too; vectors in fp32, as llama.cpp wants them."""
    c, tensors = weights
    unrollable = {"n_prelude": 0, "n_coda": 0, "norm": "pre", "injection": "none", "start": "prelude"}
    for key, wanted in unrollable.items():
        if c[key] != wanted:
            raise SystemExit(f"config.{key} is {c[key]!r}: only a model with {wanted!r} unrolls to a Llama")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c["max_seq_len"])
    writer.add_embedding_length(c["d_model"])
    writer.add_block_count(c["loops"] * c["n_core"])
    writer.add_feed_forward_length(c["d_ffn"])
    writer.add_head_count(c["n_heads"])
    writer.add_head_count_kv(c["n_kv_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c["norm_eps"])
    writer.add_tokenizer_model("none")  # token ids only

    def add(name: str, array: npt.NDArray[Any]) -> None:
        kind = PRECISIONS[precision] if array.ndim == 2 else PRECISIONS["f32"]
        packed[name] = (quants.quantize(np.asarray(array, np.float32), kind), kind)

    packed: dict[str, tuple[npt.NDArray[Any], Any]] = {}
    add("token_embd.weight", tensors["embed.weight"])
    add("output_norm.weight", tensors["final_norm.weight"])
    if not c["tied_head"]:
        add("output.weight", tensors["head.weight"])
    for layer in range(c["n_core"]):
        for ours, theirs in LAYER.items():
            array = tensors[f"core.{layer}.{ours}.weight"]
            if ours in ("wq", "wk") and c["rope"] == "half":
                array = _rotary_pairs_together(array, c["head_dim"])
            add(f"blk.{layer}.{theirs}.weight", array)
    for name, (array, kind) in packed.items():
        if not name.startswith("blk."):
            writer.add_tensor(name, array, raw_dtype=kind)
    for unrolled in range(c["loops"] * c["n_core"]):
        for theirs in LAYER.values():
            array, kind = packed[f"blk.{unrolled % c['n_core']}.{theirs}.weight"]
            writer.add_tensor(f"blk.{unrolled}.{theirs}.weight", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rotary_pairs_together(array: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows from the order (i, i + head_dim/2) to llama.cpp's (2i, 2i + 1)."""
    outputs, inputs = array.shape
    return array.reshape(-1, 2, head_dim // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)
