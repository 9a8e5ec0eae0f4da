"""The numpy reference against architectures in transformers, on small random weights in float64.

Between them they cover what SmolLM2 does not: biases (Qwen 2), norms of q and k (Qwen 3), sandwich norms and
interleaved rotary pairs (GLM 4). The looped families that need remote code are not here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.native import models, reference

torch: Any = pytest.importorskip("torch", reason="pip install torch==2.13.0")
transformers: Any = pytest.importorskip("transformers", reason="pip install transformers==5.24.0")
pytestmark = [pytest.mark.real_model, pytest.mark.filterwarnings("ignore")]

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 9, 60]
SHARED = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
NAMES = {
    "self_attn.q_proj.weight": "wq.weight",
    "self_attn.k_proj.weight": "wk.weight",
    "self_attn.v_proj.weight": "wv.weight",
    "self_attn.o_proj.weight": "wo.weight",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.q_norm.weight": "q_norm.weight",
    "self_attn.k_norm.weight": "k_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "post_self_attn_layernorm.weight": "attn_post_norm.weight",
    "post_mlp_layernorm.weight": "ffn_post_norm.weight",
    "mlp.gate_proj.weight": "w_gate.weight",
    "mlp.up_proj.weight": "w_up.weight",
    "mlp.down_proj.weight": "w_down.weight",
}


def qwen2() -> tuple[Any, dict[str, Any]]:
    shared = SHARED | {"head_dim": 6}  # Qwen 2 has no head_dim of its own
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shared)), {
        "head_dim": 6,
        "qk_bias": True,
        "v_bias": True,
    }


def qwen3() -> tuple[Any, dict[str, Any]]:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHARED)), {"qk_norm": True}


def glm4() -> tuple[Any, dict[str, Any]]:
    shared = dict(SHARED, attention_bias=True)
    shared["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
    changes = {"norm": "sandwich", "rope": "interleaved", "qk_bias": True, "v_bias": True}
    return transformers.Glm4ForCausalLM(transformers.Glm4Config(**shared)), changes


def our_tensors(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if not name.startswith("model.layers."):
            ours = {"embed_tokens": "embed", "norm": "final_norm", "lm_head": "head"}[name.split(".")[-2]]
            found[f"{ours}.weight"] = values
            continue
        _, _, layer, part = name.split(".", 3)
        if part == "mlp.gate_up_proj.weight":  # GLM keeps both in one
            found[f"core.{layer}.w_gate.weight"], found[f"core.{layer}.w_up.weight"] = np.split(values, 2)
        else:
            found[f"core.{layer}.{NAMES[part]}"] = values
    return found


@pytest.mark.parametrize("architecture", [qwen2, qwen3, glm4])
def test_logits_equal_those_of_transformers(architecture: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    torch.manual_seed(1)
    model, changes = architecture()
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0  # norms start as ones
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    config = models.config(**({"head_dim": 8, "rope_theta": 500.0} | changes))
    ours = reference.logits(config, our_tensors(model), TOKENS, kv_fp16=False)
    # transformers keeps rotary angles in float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
