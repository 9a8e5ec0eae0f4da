"""Nanbeige 4.2 (`model_type` "nanbeige"): a Llama whose whole stack of layers runs `num_loops` times.

A non-empty `loop_loss_weights` says the loop count instead: one more than its length. The model's norm
stands after every loop and is fed back, or, with `skip_loop_final_norm`, only after the last. The family's
code has many more options; those that change the computation are refused.
"""

from collections.abc import Mapping

from tinyloop_serve.native.importers.llama import LAYER_NAMES, MODEL_NAMES, decoder_plan
from tinyloop_serve.native.importers.plan import ConfigKeys, Family, Plan
from tinyloop_serve.native.importers.shards import Stored

OFF = (
    "enable_double_loop_split",
    "loop_share_kv",
    "enable_depth_attention",
    "enable_hyper_connection",
    "enable_mhc",
    "enable_h_res_identity",
    "mhc_identity_nohresparam",
    "mhc_diff_for_loop",
    "ngram_insert_all_layers",
)
ABSENT = (
    "mhc_double_stream_position_for_loop",
    "emb_neighbor_num",
    "emb_split_num",
    "ngram_vocab_size_ratio",
)
DETAILS_OF_THESE = (
    "depth_attention_recent_window",
    "depth_attention_static_anchor_once",
    "depth_attention_stride",
    "emb_tp_num",
    "loop_middle_layers",
    "mhc_init_gating_factor",
    "mhc_sinkhorn_iterations",
    "ngram_compressed_tokenizer",
    "ngram_embedding_hidden_size",
    "ngram_fused_mode",
    "ngram_layer_downproject_size",
    "ngram_mod_force_prime",
    "num_residual_streams",
    "skip_ngram_for_input",
)
NORMED_NAMES = {ours: theirs for ours, theirs in MODEL_NAMES.items() if ours != "final_norm.weight"} | {
    "loop_norm.weight": MODEL_NAMES["final_norm.weight"]
}
NANBEIGE_LAYER_NAMES = LAYER_NAMES | {
    "q_norm.weight": "self_attn.q_layernorm.weight",
    "k_norm.weight": "self_attn.k_layernorm.weight",
}


def _nanbeige(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    for key in OFF:
        keys.expect(key, False, why="the engine does not have it")
    for key in ABSENT:
        keys.expect(key, why="the engine does not have it")
    keys.expect("insert_ngram_layer_idx", [], why="the engine has no n-gram embeddings")
    keys.expect("attention_bias", False, why="the engine has no bias on the attention's output")
    keys.ignore(*DETAILS_OF_THESE, "kv_channels")  # the last is the training framework's head_dim
    loss_weights = keys.get("loop_loss_weights", list, [])
    loops = keys.get("num_loops", int, 1)
    fed_back = not keys.get("skip_loop_final_norm", bool, False)
    return decoder_plan(
        keys,
        stored,
        model_names=NORMED_NAMES if fed_back else MODEL_NAMES,
        layer_names=NANBEIGE_LAYER_NAMES,
        loops=len(loss_weights) + 1 if loss_weights else loops,
        loop_norm=fed_back,
        final_norm=not fed_back,
        qk_norm=keys.get("qk_layernorm", bool, False),
    )


FAMILIES = {"nanbeige": Family("NanbeigeForCausalLM", _nanbeige)}
