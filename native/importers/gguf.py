"""Imports a Llama-architecture GGUF file: a plain decoder, so a `.tinyloop` model with one loop.

Everything that would change the numbers and that the engine does not have (rope scaling, experts, other
biases, other architectures) is refused by name: each `llama.*` key and each tensor is either understood or
refused. Quantised tensors are dequantised by the `gguf` package (the extra `import`), which is loaded late.

GGUF stores the rows of wq and wk in the order that makes rotary pairs neighbours. They are put back into the
order of the original checkpoint (rope "half"): a model has the same tensors whichever format it came from.
"""

import hashlib
import importlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyloop_serve.native import artifact
from tinyloop_serve.native.errors import TinyLoopError, refusal
from tinyloop_serve.native.importers import byte_bpe
from tinyloop_serve.native.importers.dtypes import Progress, check_weights, integers, to_dtype
from tinyloop_serve.native.tensors import Tensor

MODEL_TENSORS = {"token_embd.weight": "embed.weight", "output_norm.weight": "final_norm.weight"}
OPTIONAL_TENSORS = {"output.weight": "head.weight"}
LAYER_TENSORS = {
    "attn_norm.weight": "attn_norm.weight",
    "attn_q.weight": "wq.weight",
    "attn_k.weight": "wk.weight",
    "attn_v.weight": "wv.weight",
    "attn_output.weight": "wo.weight",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate.weight": "w_gate.weight",
    "ffn_up.weight": "w_up.weight",
    "ffn_down.weight": "w_down.weight",
}
# Control tokens that end a turn or a text, whether or not the file has a key for them.
END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>")


def convert_gguf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    weights: str = "fp16",
    progress: Progress = lambda done, total: None,
    *,
    layout: str = "panels",
) -> dict[str, object]:
    """Write the GGUF file `source` as the artifact `target` and return the artifact's config.

    `weights` ("fp16", "bf16", "fp32", "int8" or "int4") is the type of the matrices; vectors stay fp32.
    `layout` is that of `artifact.write`. Raises ArtifactError naming the GGUF key or tensor that is not
    supported; nothing is written then.
    """
    check_weights(weights)
    reader = _open(source)
    keys = Keys(reader.fields)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = artifact.complete_config(_config(keys, stored))
    tokenizer, chat_template = _tokenizer(keys, config)
    names = _tensor_names(stored, config)
    tensors: dict[str, Tensor] = {}
    for done, (gguf_name, name) in enumerate(names.items()):
        progress(done, len(names))
        tensors[name] = _tensor(name, stored[gguf_name], config, weights)
    progress(len(names), len(names))
    card = _card(source, keys, stored, weights)
    artifact.write(
        target,
        config,
        tensors,
        tokenizer=tokenizer,
        chat_template=chat_template,
        card=card,
        layout=layout,
        weights=integers(weights),
    )
    return config


class Keys:
    """The key-value part of a GGUF file, which remembers the keys that were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._known: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of `key`, which must be of `kind`; without a default the key is required."""
        self._known.add(key)
        if key not in self._fields:
            if default is ...:
                raise refusal(key, None, "required in a GGUF of this architecture")
            return default
        value = self.value(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise refusal(key, value, f"one value of type {getattr(kind, '__name__', kind)}")
        return value

    def expect(self, key: str, neutral: object, why: str) -> None:
        """Refuse the file unless `key` is absent or has the one value that changes nothing."""
        value = self.get(key, object, neutral)
        if value != neutral:
            raise refusal(key, value, f"{neutral!r} ({why})")

    def unknown(self, prefix: str) -> list[str]:
        return [key for key in self._fields if key.startswith(prefix) and key not in self._known]

    def value(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise refusal(key, str(error), "text in UTF-8") from None


def _open(source: str | os.PathLike[str]) -> Any:
    try:
        package = importlib.import_module("gguf")
    except ImportError:
        raise TinyLoopError(
            "importing GGUF needs the gguf package: pip install 'tinyloop-serve[import]'",
            field="gguf",
            accepted="pip install 'tinyloop-serve[import]'",
        ) from None
    try:
        return package.GGUFReader(os.fspath(source))
    except OSError:
        raise
    # The reader has no error class of its own: a bad file surfaces as any of Python's or numpy's.
    except Exception as error:
        raise refusal("source", os.fspath(source), f"a complete GGUF file ({error})") from error


def _config(keys: Keys, stored: Mapping[str, Any]) -> dict[str, object]:
    architecture = keys.get("general.architecture", str)
    if architecture != "llama":
        raise refusal("general.architecture", architecture, "'llama'")
    width = keys.get("llama.embedding_length", int)
    heads = keys.get("llama.attention.head_count", int)
    head_dim = keys.get("llama.attention.key_length", int, width // max(heads, 1))
    keys.expect("llama.attention.value_length", head_dim, "value heads as wide as key heads")
    keys.expect("llama.rope.dimension_count", head_dim, "rotary embedding of whole heads")
    keys.expect("llama.rope.scaling.type", "none", "no rope scaling")
    keys.expect("llama.expert_count", 0, "no mixture of experts")
    keys.expect("llama.expert_used_count", 0, "no mixture of experts")
    keys.expect("llama.attention.causal", True, "causal attention")
    if "token_embd.weight" not in stored:
        raise refusal("token_embd.weight", None, "required")
    keys.get("llama.vocab_size", int, 0)  # the embedding's rows count
    config: dict[str, object] = {
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": keys.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "d_ffn": keys.get("llama.feed_forward_length", int),
        "n_prelude": 0,
        "n_core": keys.get("llama.block_count", int),
        "n_coda": 0,
        "loops": 1,
        "max_seq_len": keys.get("llama.context_length", int),
        "norm": "pre",
        "norm_eps": _decimal(keys.get("llama.attention.layer_norm_rms_epsilon", float)),
        "injection": "none",
        "start": "prelude",
        "rope": "half",
        "rope_theta": _decimal(keys.get("llama.rope.freq_base", float, 10000.0)),
        "qk_bias": "blk.0.attn_q.bias" in stored or "blk.0.attn_k.bias" in stored,
        "v_bias": "blk.0.attn_v.bias" in stored,
        "tied_head": "output.weight" not in stored,
        "beta": None,
    } | _special_tokens(keys)
    for key in keys.unknown("llama."):
        raise refusal(key, keys.value(key), "a GGUF without this key, which the importer does not know")
    return config


def _special_tokens(keys: Keys) -> dict[str, object]:
    tokens = keys.get("tokenizer.ggml.tokens", list, [])
    types = keys.get("tokenizer.ggml.token_type", list, [])
    ends = [keys.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    ends += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == byte_bpe.CONTROL and token in END_TEXTS
    ]
    bos = keys.get("tokenizer.ggml.bos_token_id", int, None)
    usual = byte_bpe.PRE_TOKENIZERS.get(keys.get("tokenizer.ggml.pre", str, ""), byte_bpe.PreTokenizer(()))
    keys.expect("tokenizer.ggml.add_eos_token", False, "prompts that do not end with the end token")
    return {
        "bos_id": bos,
        "eos_ids": list(dict.fromkeys(end for end in ends if end is not None)),
        "add_bos": keys.get("tokenizer.ggml.add_bos_token", bool, usual.add_bos) and bos is not None,
    }


def _tokenizer(keys: Keys, config: Mapping[str, Any]) -> tuple[str, str]:
    """(tokenizer.json, chat template); ("", "") for a file of weights only."""
    model = keys.get("tokenizer.ggml.model", str, "none")
    if model in ("none", "no_vocab"):
        return "", ""
    if model != "gpt2":
        raise refusal("tokenizer.ggml.model", model, "'gpt2' (byte-level BPE)")
    tokens = keys.get("tokenizer.ggml.tokens", list)
    if len(tokens) > config["vocab_size"]:
        raise refusal(
            "tokenizer.ggml.tokens", f"{len(tokens)} tokens", "at most the rows of token_embd.weight"
        )
    text = byte_bpe.tokenizer_json(
        tokens,
        keys.get("tokenizer.ggml.token_type", list, [byte_bpe.NORMAL] * len(tokens)),
        keys.get("tokenizer.ggml.merges", list),
        keys.get("tokenizer.ggml.pre", str),
    )
    return text, keys.get("tokenizer.chat_template", str, "")


def _tensor_names(stored: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """GGUF name -> our name for all tensors of the file; one without a place in the model is refused."""
    names = MODEL_TENSORS | OPTIONAL_TENSORS
    for i in range(config["n_core"]):
        names |= {f"blk.{i}.{theirs}": f"core.{i}.{ours}" for theirs, ours in LAYER_TENSORS.items()}
    for name, tensor in stored.items():
        if name == "rope_freqs.weight":
            raise refusal(name, list(map(int, tensor.shape)), "a GGUF without rope scaling")
        if name not in names:
            raise refusal(name, list(map(int, tensor.shape)), "a GGUF without this tensor")
    return {name: names[name] for name in stored}


def _tensor(name: str, tensor: Any, config: Mapping[str, Any], weights: str) -> Tensor:
    """The tensor dequantised, wq and wk (and biases) in the checkpoint's row order, in the asked type."""
    try:
        numbers = importlib.import_module("gguf").dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise refusal(
            tensor.name, tensor.tensor_type.name, "a type that the gguf package can dequantise"
        ) from None
    shape = [int(size) for size in reversed(tensor.shape)]
    values: npt.NDArray[np.float32] = np.ascontiguousarray(numbers, dtype=np.float32).reshape(shape)
    part = name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
    if part in ("wq", "q_bias", "wk", "k_bias"):
        values = _half_split(values, config["head_dim"], tensor.name)
    return to_dtype(tensor.name, values, weights)


def _half_split(rows: npt.NDArray[np.float32], head_dim: int, name: str) -> npt.NDArray[np.float32]:
    """Rows of each head from pair order (0, hd/2, 1, hd/2+1, ...) to (0, 1, ..., hd-1)."""
    if rows.shape[0] % head_dim:
        raise refusal(name, rows.shape, f"a multiple of head_dim = {head_dim} rows")
    pairs = rows.reshape(rows.shape[0] // head_dim, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _card(
    source: str | os.PathLike[str], keys: Keys, stored: Mapping[str, Any], weights: str
) -> dict[str, object]:
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": keys.get("general.name", str, ""),
        "organization": keys.get("general.organization", str, ""),
        "licence": keys.get("general.license", str, ""),
        "source": Path(source).name,
        "source_sha256": digest,
        "source_types": dict(Counter(tensor.tensor_type.name for tensor in stored.values())),
        "matrices": weights,
    }


def _decimal(value: float) -> float:
    """The shortest decimal that gives the float32 in the file: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))
