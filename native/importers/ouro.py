"""Ouro (`model_type` "ouro"): a sandwich-normed decoder run `total_ut_steps` times, with an exit gate.

The model's norm stands after EVERY loop: its output is both what the head reads and what the next loop gets,
so it becomes `loop_norm` and there is no `final_norm`. The gate reads that normed state too. The reference
runs all loops and only then selects; at `early_exit_threshold` 1 it reads the last loop (unless the gate's
probability rounds to one before), which is what an artifact does unless a request asks for less.
"""

from collections.abc import Mapping

from tinyloop_serve.native.importers.llama import LAYER_NAMES, MODEL_NAMES, decoder_plan, expect_no_window
from tinyloop_serve.native.importers.plan import ConfigKeys, Family, Plan
from tinyloop_serve.native.importers.shards import Stored

OURO_MODEL_NAMES = {
    "embed.weight": MODEL_NAMES["embed.weight"],
    "head.weight": MODEL_NAMES["head.weight"],
    "loop_norm.weight": "model.norm.weight",
    "exit_gate.weight": "model.early_exit_gate.weight",
    "exit_gate.bias": "model.early_exit_gate.bias",
}
OURO_LAYER_NAMES = LAYER_NAMES | {
    "attn_post_norm.weight": "input_layernorm_2.weight",
    "ffn_post_norm.weight": "post_attention_layernorm_2.weight",
}


def _ouro(keys: ConfigKeys, stored: Mapping[str, Stored]) -> Plan:
    loops = keys.get("total_ut_steps", int)
    keys.expect("early_exit_threshold", 1.0, 1, why="exits are asked for by requests, not by the model")
    keys.expect("early_exit_step", loops - 1, why="the last loop's state is read")
    keys.expect("attention_bias", False, why="the reference has no such bias")
    keys.ignore("chunk_size")  # read by the reference, used by nothing
    expect_no_window(keys)
    return decoder_plan(
        keys,
        stored,
        model_names=OURO_MODEL_NAMES,
        layer_names=OURO_LAYER_NAMES,
        norm="sandwich",
        loops=loops,
        loop_norm=True,
        final_norm=False,
        exit_gate=True,
    )


FAMILIES = {"ouro": Family("OuroForCausalLM", _ouro)}
