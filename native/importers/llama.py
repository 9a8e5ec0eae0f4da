"""Llama and the models of exactly its structure (Mistral without a window, Qwen 2, Qwen 3): one loop.

Also the ground for the looped families that keep Llama's names: `decoder_plan` reads what they share.
Differences that the engine does not compute are refused by their key in config.json.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyloop_serve.native.artifact import complete_config, expected_tensors
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.importers.plan import ConfigKeys, Family, Part, Plan
from tinyloop_serve.native.importers.shards import Stored
from tinyloop_serve.native.tensors import BF16

MODEL_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "wq.weight": "self_attn.q_proj.weight",
    "wk.weight": "self_attn.k_proj.weight",
    "wv.weight": "self_attn.v_proj.weight",
    "wo.weight": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "w_gate.weight": "mlp.gate_proj.weight",
    "w_up.weight": "mlp.up_proj.weight",
    "w_down.weight": "mlp.down_proj.weight",
}


def _llama(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    keys.expect("attention_bias", False, why="the engine has no bias on the attention's output")
    return decoder_plan(keys, stored, theta=10000.0)


def _mistral(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    # An absent key is Mistral's default, a window of 4096; null is no window; a window that no allowed
    # position can leave is none either.
    window = keys.get("sliding_window", int, 4096)
    positions = keys.get("max_position_embeddings", int)
    if window < positions and not keys.is_null("sliding_window"):
        raise refusal("sliding_window", window, f"null, or at least max_position_embeddings = {positions}")
    expect_full_attention(keys)
    return decoder_plan(keys, stored, kv_heads_default=8)


def _qwen2(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    expect_no_window(keys)
    return decoder_plan(keys, stored, qk_bias=True, v_bias=True)


def _qwen3(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    keys.expect("attention_bias", False, why="the engine has no bias on the attention's output")
    expect_no_window(keys)
    keys.get("head_dim", int)  # its default is not d_model / n_heads
    return decoder_plan(keys, stored, qk_norm=True)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
}


def decoder_plan(
    keys: ConfigKeys,
    stored: Mapping[str, Stored],
    *,
    model_names: Mapping[str, str] = MODEL_NAMES,
    layer_names: Mapping[str, str] = LAYER_NAMES,
    theta: float | None = None,
    kv_heads_default: int | None = None,
    **changes: object,
) -> Plan:
    """The plan of a decoder with Llama's keys and names; `changes` go into the artifact's config.

    `theta` is the family's rope_theta where config.json does not say; None: it must say.
    """
    config = complete_config(_config(keys, theta, kv_heads_default) | changes)
    parts: dict[str, Part] = {}
    for name, shape in expected_tensors(config).items():
        if name in model_names:
            parts[name] = Part(model_names[name], shape)
        else:
            _, layer, part = name.split(".", 2)
            parts[name] = Part(f"model.layers.{layer}.{layer_names[part]}", shape)
    unused = {
        name for name in stored if name.endswith("rotary_emb.inv_freq")
    }  # older checkpoints; theta says it
    if config["tied_head"]:
        unused |= tied_copy(stored, model_names["embed.weight"], model_names["head.weight"])
    return Plan(config, parts, frozenset(unused))


def expect_no_window(keys: ConfigKeys) -> None:
    """Qwen's way to say it: the window counts only with `use_sliding_window`, and per layer."""
    keys.expect("use_sliding_window", False, why="the engine has no sliding window")
    expect_full_attention(keys)
    keys.ignore("sliding_window", "max_window_layers")


def expect_full_attention(keys: ConfigKeys) -> None:
    types = keys.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in types):
        raise refusal("layer_types", types, "'full_attention' for every layer")


def tied_copy(stored: Mapping[str, Stored], embed: str, head: str) -> set[str]:
    """{head} if the checkpoint also holds the tied head; one that differs from the embedding is refused."""
    if head not in stored:
        return set()
    if embed in stored and not _same_bits(stored[head], stored[embed]):
        raise refusal(
            head, "not equal to the embedding", f"a copy of {embed}, as the config says they are tied"
        )
    return {head}


def _same_bits(one: Stored, other: Stored) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = one.read(), other.read()
    return np.array_equal(a.bits if isinstance(a, BF16) else a, b.bits if isinstance(b, BF16) else b)


def _config(keys: ConfigKeys, theta: float | None, kv_heads_default: int | None) -> dict[str, Any]:
    keys.expect("hidden_act", "silu", "swish", why="SwiGLU")
    keys.expect("mlp_bias", False, why="the engine has no biases in the feed-forward")
    keys.expect("partial_rotary_factor", 1.0, 1, why="rotary embedding of whole heads")
    width, heads = keys.get("hidden_size", int), keys.get("num_attention_heads", int)
    return {
        "vocab_size": keys.get("vocab_size", int),
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": keys.get("num_key_value_heads", int, kv_heads_default or heads),
        "head_dim": keys.get("head_dim", int, width // max(heads, 1)),
        "d_ffn": keys.get("intermediate_size", int),
        "n_prelude": 0,
        "n_core": keys.get("num_hidden_layers", int),
        "n_coda": 0,
        "loops": 1,
        "max_seq_len": keys.get("max_position_embeddings", int),
        "norm": "pre",
        "norm_eps": keys.get("rms_norm_eps", float),
        "injection": "none",
        "start": "prelude",
        "rope": "half",
        "rope_theta": _rope_theta(keys, theta),
        "tied_head": keys.get("tie_word_embeddings", bool, False),
        "bos_id": None,
        "eos_ids": [],
        "beta": None,
    }


def _rope_theta(keys: ConfigKeys, default: float | None) -> float:
    """From `rope_theta`, or from `rope_parameters` as transformers 5 writes it; scaled RoPE is refused."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = keys.get(key, dict, {})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default" or scaling.keys() - {"rope_type", "type", "rope_theta"}:
            raise refusal(
                key, scaling, "plain rotary embedding: null, or rope_type 'default' with rope_theta"
            )
    nested = keys.get("rope_parameters", dict, {}).get("rope_theta")
    theta = keys.get("rope_theta", float, nested if nested is not None else default)
    if type(theta) not in (int, float):
        raise refusal("rope_theta", theta, "required in config.json: a number")
    return float(theta)
