"""Huginn (`model_type` "huginn_raven"): prelude, a core that is fed the prelude's output in every loop, coda.

The reference starts the loops from random noise, so its logits differ from run to run; an artifact starts
from zeros, which is the reference with `init_scale=0`. `ln_f` is used twice: after the last loop (not fed
back) and before the head. The q, k and v rows lie in one matrix, so do the gate's and the up-projection's.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyloop_serve.native.artifact import complete_config, expected_tensors
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.importers.llama import tied_copy
from tinyloop_serve.native.importers.plan import ConfigKeys, Family, Part, Plan
from tinyloop_serve.native.importers.shards import Stored
from tinyloop_serve.native.tensors import float32

STACKS = {"prelude": "prelude", "core": "core_block", "coda": "coda"}
EMBED, HEAD, ROTATIONS = "transformer.wte.weight", "lm_head.weight", "freqs_cis"
NOTE = "Starts from zeros: the reference with init_scale=0. Its default start is random noise."


def _huginn(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    config = complete_config(_config(keys))
    parts: dict[str, Part] = {}
    for name, shape in expected_tensors(config).items():
        stack, _, rest = name.partition(".")
        if stack in STACKS:
            layer, part = rest.split(".", 1)
            parts[name] = _layer_part(f"transformer.{STACKS[stack]}.{layer}", part, config)
        else:
            theirs = {
                "embed": EMBED,
                "head": HEAD,
                "inject": "transformer.adapter.weight",
                "core_norm": "transformer.ln_f.weight",
                "final_norm": "transformer.ln_f.weight",
            }
            parts[name] = Part(theirs[stack], shape)
    unused = tied_copy(stored, EMBED, HEAD) if config["tied_head"] else set()
    if ROTATIONS in stored:
        _check_rotations(stored[ROTATIONS], config)
        unused.add(ROTATIONS)
    return Plan(config, parts, frozenset(unused), notes=(NOTE,))


FAMILIES = {"huginn_raven": Family("RavenForCausalLM", _huginn)}


def _config(keys: ConfigKeys) -> dict[str, Any]:
    keys.expect("bias", False, why="the engine has no bias in the adapter")
    keys.expect("architecture_class_name", "RecurrentGPT", why="the one structure that is known")
    keys.expect("block_class_name", "SandwichBlock", why="the one structure that is known")
    keys.expect("mlp_class_name", "GatedMLP", why="SwiGLU")
    keys.expect("nonlin_name", "SiLU", why="SwiGLU")
    keys.expect("norm_class_name", "RMSNorm_llama", why="RMSNorm")
    keys.expect("injection_type", "linear", why="the adapter sees state and prelude side by side")
    keys.expect("state_init", "like-init", "zero", why="an artifact starts from zeros")
    keys.expect("test_time_noise", 0, 0.0, why="no noise between loops")
    keys.ignore("activation_checkpoint_impl", "effective_expected_depth", "init_orthogonal", "init_strategy")
    keys.ignore("mean_backprop_depth", "n_layers", "num_hidden_layers", "padding_multiple", "sampling_scheme")
    keys.ignore("test_time_noise_type")
    width, heads = keys.get("n_embd", int), keys.get("n_heads", int)
    head_dim = width // max(heads, 1)
    vocab = keys.get("vocab_size", int)
    tied = keys.get("tie_embeddings", bool)
    scale = keys.get("init_values", dict, {}).get("embed_scale", math.sqrt(width))
    if not isinstance(scale, float) or not math.isclose(scale, math.sqrt(width), rel_tol=1e-6):
        raise refusal("init_values", scale, f"embed_scale = sqrt(n_embd) = {math.sqrt(width)}")
    keys.expect("hidden_size", width, why="n_embd")
    keys.expect("num_attention_heads", heads, why="n_heads")
    keys.expect("num_key_value_heads", heads, why="n_heads")
    keys.expect("head_dim", head_dim, why="n_embd / n_heads")
    keys.expect("padded_vocab_size", vocab, why="vocab_size")
    keys.expect("tie_word_embeddings", tied, why="tie_embeddings")
    return {
        "vocab_size": vocab,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": head_dim,
        "d_ffn": keys.get("intermediate_size", int),
        "n_prelude": keys.get("n_layers_in_prelude", int),
        "n_core": keys.get("n_layers_in_recurrent_block", int),
        "n_coda": keys.get("n_layers_in_coda", int),
        "loops": keys.get("mean_recurrence", int),
        "max_seq_len": keys.get("block_size", int),
        "norm": "pre_post",
        "norm_eps": keys.get("norm_eps", float),
        "injection": "concat",
        "start": "zeros",
        "core_norm": True,
        "rope": "interleaved",
        "rope_theta": keys.get("rope_base", float),
        "qk_bias": keys.get("qk_bias", bool),
        "tied_head": tied,
        "embed_scale": math.sqrt(width),
        "bos_id": None,
        "eos_ids": [],
        "beta": None,
    }


def _layer_part(prefix: str, part: str, config: Mapping[str, Any]) -> Part:
    """Where a layer's tensor lies. All heads have their own keys, so q, k and v are equally high."""
    width, ffn = config["d_model"], config["d_ffn"]
    whole = {
        "attn_norm.weight": ("norm_1.weight", (width,)),
        "attn_post_norm.weight": ("norm_2.weight", (width,)),
        "ffn_norm.weight": ("norm_3.weight", (width,)),
        "ffn_post_norm.weight": ("norm_4.weight", (width,)),
        "wo.weight": ("attn.proj.weight", (width, width)),
        "w_down.weight": ("mlp.proj.weight", (width, ffn)),
    }
    if part in whole:
        name, shape = whole[part]
        return Part(f"{prefix}.{name}", shape)
    if part in ("q_bias", "k_bias"):
        i = ("q_bias", "k_bias").index(part)
        shape = (2, 1, config["n_heads"], config["head_dim"])
        return Part(f"{prefix}.attn.qk_bias", shape, slice(i, i + 1))
    if part in ("w_gate.weight", "w_up.weight"):
        i = ("w_gate.weight", "w_up.weight").index(part)
        return Part(f"{prefix}.mlp.fc.weight", (2 * ffn, width), slice(i * ffn, (i + 1) * ffn))
    i = ("wq.weight", "wk.weight", "wv.weight").index(part)
    return Part(f"{prefix}.attn.Wqkv.weight", (3 * width, width), slice(i * width, (i + 1) * width))


def _check_rotations(stored: Stored, config: Mapping[str, Any]) -> None:
    """The reference rotates by this stored table of (cos, sin); it must be the one that rope_base gives."""
    half, positions = config["head_dim"] // 2, config["max_seq_len"]
    shape = (1, positions, 1, half, 2)
    if stored.shape != shape:
        raise refusal(ROTATIONS, stored.shape, f"shape {shape}")
    angles = np.outer(np.arange(positions), config["rope_theta"] ** (-np.arange(half) / half))
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(shape)
    # fp32 angles are off by about position * 6e-8, a table kept in bf16 by 2^-9.
    tolerance = 1e-6 * positions + {"F32": 1e-5, "F16": 1e-3, "BF16": 4e-3}[stored.dtype]
    worst = float(np.abs(float32(stored.read()) - expected).max())
    if not worst <= tolerance:
        raise refusal(ROTATIONS, f"off by {worst:.3g}", "the rotations of rope_base")
