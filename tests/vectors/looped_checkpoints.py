"""Tiny Hugging Face checkpoints of every family the importer reads, from a seed and numpy alone.

Both the golden logits' generator and the tests make them here. Every number is a multiple of a power of two
with at most seven significant bits, so it is exact in bf16 (as the checkpoint stores it), fp16 and fp32.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]

SEED = 20261129
VOCAB, WIDTH, FFN, HEADS = 37, 24, 40, 4
TOKENS = [3, 1, 30, 12, 12, 36, 0]

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}
_NANBEIGE: dict[str, Any] = _DECODER | {
    "model_type": "nanbeige",
    "architectures": ["NanbeigeForCausalLM"],
    "head_dim": 10,
    "kv_channels": 10,
    "num_loops": 2,
    "loop_loss_weights": [],
    "skip_loop_final_norm": False,
    "attention_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 70000000,
}

# name -> (config.json, loop counts of the golden logits)
MODELS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "llama": (
        _DECODER
        | {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
        },
        [1],
    ),
    "mistral": (
        _DECODER
        | {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "head_dim": 8,
            "sliding_window": None,
            "rope_theta": 1000000.0,
        },
        [1],
    ),
    "qwen2": (
        _DECODER
        | _QWEN
        | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
        [1],
    ),
    "qwen3": (
        _DECODER
        | _QWEN
        | {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 10,
            "attention_bias": False,
        },
        [1],
    ),
    "ouro": (
        _DECODER
        | _QWEN
        | {
            "model_type": "ouro",
            "architectures": ["OuroForCausalLM"],
            "num_key_value_heads": HEADS,
            "head_dim": WIDTH // HEADS,
            "layer_types": ["full_attention"] * 2,
            "total_ut_steps": 4,
            "early_exit_threshold": 1.0,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
        },
        [1, 2, 3, 4, 8],
    ),
    "huginn": (
        {
            "model_type": "huginn_raven",
            "architectures": ["RavenForCausalLM"],
            "n_embd": WIDTH,
            "n_heads": HEADS,
            "n_layers": 6,
            "block_size": 64,
            "vocab_size": VOCAB,
            "padded_vocab_size": VOCAB,
            "padding_multiple": 4096,
            "tie_embeddings": True,
            "tie_word_embeddings": True,
            "intermediate_size": FFN,
            "bias": False,
            "architecture_class_name": "RecurrentGPT",
            "block_class_name": "SandwichBlock",
            "norm_class_name": "RMSNorm_llama",
            "norm_eps": 1e-6,
            "mlp_class_name": "GatedMLP",
            "nonlin_name": "SiLU",
            "init_strategy": "takase",
            "init_orthogonal": False,
            "state_init": "like-init",
            "injection_type": "linear",
            "n_layers_in_recurrent_block": 3,
            "mean_recurrence": 8,
            "sampling_scheme": "poisson-lognormal-filling",
            "mean_backprop_depth": 8,
            "n_layers_in_prelude": 2,
            "n_layers_in_coda": 1,
            "qk_bias": True,
            "activation_checkpoint_impl": "per-iteration",
            "rope_base": 50000,
            "torch_dtype": "bfloat16",
            "test_time_noise": 0,
            "test_time_noise_type": "fixed",
        },
        [1, 2, 4, 8],
    ),
    "nanbeige": (_NANBEIGE, [1, 2, 3, 4]),
    "nanbeige_normed_once": (
        _NANBEIGE | {"skip_loop_final_norm": True, "qk_layernorm": True, "loop_loss_weights": [0.2, 0.3]},
        [1, 2, 3, 4],
    ),
}


def tensors(name: str) -> Tensors:
    """The checkpoint of MODELS[name], under the names of its family."""
    config = MODELS[name][0]
    shapes = _huginn_shapes(config) if name == "huginn" else _decoder_shapes(config)
    return {tensor: _values(tensor, shape) for tensor, shape in shapes.items()}


def digest(checkpoint: Mapping[str, Array]) -> str:
    """Tells "the weights changed" from "the logits are wrong"."""
    sha = hashlib.sha256()
    for name in sorted(checkpoint):
        sha.update(name.encode() + checkpoint[name].astype("<f4").tobytes())
    return sha.hexdigest()


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    checkpoint: Mapping[str, Array],
    *,
    dtype: str = "BF16",
    shards: int = 1,
) -> Path:
    """config.json and safetensors in `folder`, with an index if there is more than one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(checkpoint)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", checkpoint, dtype)
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: checkpoint[name] for name in names[i::shards]}, dtype)
        weight_map |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(path: Path, checkpoint: Mapping[str, Array], dtype: str = "BF16") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in checkpoint.items():
        encoded = _encoded(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(encoded)],
        }
        data += encoded
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _encoded(values: Array, dtype: str) -> bytes:
    if dtype == "BF16":  # the numbers are exact in it: the lower half of their fp32 bits is zero
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def _values(name: str, shape: tuple[int, ...]) -> Array:
    """RandomState, whose stream numpy has promised never to change; its seed depends on the name alone."""
    draw = np.random.RandomState(zlib.crc32(name.encode()) ^ SEED).standard_normal(shape)
    if name.endswith("bias"):
        return (np.clip(np.round(20 * draw), -127, 127) / 128).astype(np.float32)
    if len(shape) == 1:
        return (np.clip(np.round(64 + 12 * draw), 1, 127) / 64).astype(np.float32)
    return (np.clip(np.round(24 * draw), -127, 127) / 128).astype(np.float32)


def _decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    head = config.get("head_dim", WIDTH // HEADS)
    q, kv = HEADS * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.weight": (q, WIDTH),
            "self_attn.k_proj.weight": (kv, WIDTH),
            "self_attn.v_proj.weight": (kv, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, q),
            "post_attention_layernorm.weight": (WIDTH,),
            "mlp.gate_proj.weight": (FFN, WIDTH),
            "mlp.up_proj.weight": (FFN, WIDTH),
            "mlp.down_proj.weight": (WIDTH, FFN),
        }
        if kind == "qwen2":
            layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
        if kind == "qwen3":
            layer |= {f"self_attn.{x}_norm.weight": (head,) for x in "qk"}
        if config.get("qk_layernorm"):
            layer |= {f"self_attn.{x}_layernorm.weight": (head,) for x in "qk"}
        if kind == "ouro":
            layer |= {"input_layernorm_2.weight": (WIDTH,), "post_attention_layernorm_2.weight": (WIDTH,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (WIDTH,)
    if kind == "ouro":
        shapes |= {"model.early_exit_gate.weight": (1, WIDTH), "model.early_exit_gate.bias": (1,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    return shapes


def _huginn_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "norm_1.weight": (WIDTH,),
        "norm_2.weight": (WIDTH,),
        "norm_3.weight": (WIDTH,),
        "norm_4.weight": (WIDTH,),
        "attn.Wqkv.weight": (3 * WIDTH, WIDTH),
        "attn.qk_bias": (2, 1, HEADS, WIDTH // HEADS),
        "attn.proj.weight": (WIDTH, WIDTH),
        "mlp.fc.weight": (2 * FFN, WIDTH),
        "mlp.proj.weight": (WIDTH, FFN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, WIDTH),
        "transformer.adapter.weight": (WIDTH, 2 * WIDTH),
        "transformer.ln_f.weight": (WIDTH,),
    }
    for stack, count in (("prelude", "prelude"), ("core_block", "recurrent_block"), ("coda", "coda")):
        for i in range(config[f"n_layers_in_{count}"]):
            shapes |= {f"transformer.{stack}.{i}.{name}": shape for name, shape in layer.items()}
    return shapes
