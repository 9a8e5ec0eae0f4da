"""Small configs that cover the model family. Each is named after the kind of model it stands for."""

from typing import Any


def config(**changes: Any) -> dict[str, Any]:
    """A small plain Llama with `changes`."""
    return {
        "vocab_size": 61,
        "d_model": 24,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 6,
        "d_ffn": 40,
        "n_prelude": 0,
        "n_core": 2,
        "n_coda": 0,
        "loops": 1,
        "max_loops": 16,
        "max_seq_len": 512,
        "norm": "pre",
        "norm_eps": 1e-5,
        "injection": "none",
        "start": "prelude",
        "rope": "half",
        "rope_theta": 10000.0,
        "tied_head": False,
        "bos_id": None,
        "eos_ids": [0],
        "beta": None,
    } | changes


_LOOPED: dict[str, Any] = {"n_prelude": 1, "n_core": 2, "n_coda": 1, "loops": 4}

FAMILY: dict[str, dict[str, Any]] = {
    "llama": config(tied_head=True),
    "qwen": config(qk_bias=True, v_bias=True, tied_head=True),
    "qk_norm": config(qk_norm=True, head_dim=8, logit_scale=0.5),
    "add": config(**_LOOPED, injection="add"),
    "add_from_zeros": config(**_LOOPED, injection="add", start="zeros", core_norm=True),
    "concat": config(**_LOOPED, injection="concat", tied_head=True),
    "post": config(**_LOOPED, norm="post", injection="add", n_kv_heads=4),
    "everything": config(
        **_LOOPED,
        norm="sandwich",
        injection="concat",
        loop_norm=True,
        core_norm=True,
        rope="interleaved",
        qk_norm=True,
        qk_bias=True,
        v_bias=True,
        embed_scale=2.0,
        logit_scale=0.7,
        n_kv_heads=1,
        head_dim=10,
    ),
    "ouro": config(norm="sandwich", loops=4, loop_norm=True, final_norm=False, n_kv_heads=4),
    "huginn": config(
        n_prelude=2,
        n_core=3,
        n_coda=2,
        loops=8,
        norm="pre_post",
        injection="concat",
        start="zeros",
        core_norm=True,
        rope="interleaved",
        rope_theta=50000.0,
        qk_bias=True,
        n_kv_heads=4,
        tied_head=True,
        embed_scale=24**0.5,
    ),
}
