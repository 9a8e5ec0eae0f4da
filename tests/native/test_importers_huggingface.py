"""A folder is imported as it is, or refused by the name of the key, tensor or file that is in the way."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.vectors import looped_checkpoints
from tinyloop_serve.native.errors import ArtifactError
from tinyloop_serve.native.importers import shards
from tinyloop_serve.native.importers.convert import convert
from tinyloop_serve.native.tensors import BF16

MODELS = looped_checkpoints.MODELS
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_folder(
        model: str,
        *,
        without: str = "",
        extra: dict[str, Any] | None = None,
        dtype: str = "BF16",
        shards: int = 1,
        **keys: Any,
    ) -> Path:
        """The checkpoint `model` with `keys` of config.json changed (... leaves one out)."""
        config = {key: value for key, value in (MODELS[model][0] | keys).items() if value is not ...}
        tensors = looped_checkpoints.tensors(model) | (extra or {})
        tensors.pop(without, None)
        return looped_checkpoints.write_folder(tmp_path / "hf", config, tensors, dtype=dtype, shards=shards)

    return make_folder


def refused(source: Path, **options: Any) -> ArtifactError:
    target = source.parent / "target.tinyloop"
    with pytest.raises(ArtifactError) as caught:
        convert(source, target, **options)
    assert caught.value.accepted
    assert not target.exists()
    return caught.value


# What the engine does not compute, family by family.
REFUSED_KEYS = [
    ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    ("llama", "attention_bias", True),
    ("llama", "mlp_bias", True),
    ("llama", "hidden_act", "gelu"),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "quantization_config", {"quant_method": "fp8"}),
    ("llama", "num_local_experts", 8),
    ("llama", "logits_scaling", 2.0),
    ("llama", "hidden_size", ...),
    ("llama", "rms_norm_eps", "1e-5"),
    ("llama", "num_hidden_layers", 2.0),
    ("llama", "is_encoder_decoder", True),
    ("mistral", "sliding_window", 32),
    ("mistral", "rope_theta", ...),
    ("qwen2", "use_sliding_window", True),
    ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen3", "head_dim", ...),
    ("qwen3", "attention_bias", True),
    ("qwen3", "num_experts", 16),
    ("ouro", "total_ut_steps", ...),
    ("ouro", "early_exit_threshold", 0.9),
    ("ouro", "early_exit_step", 1),
    ("ouro", "use_sliding_window", True),
    ("ouro", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("huginn", "bias", True),
    ("huginn", "nonlin_name", "GELU"),
    ("huginn", "mlp_class_name", "BaseMLP"),
    ("huginn", "block_class_name", "TransformerPreNormBlock"),
    ("huginn", "norm_class_name", "LayerNorm"),
    ("huginn", "injection_type", "add"),
    ("huginn", "state_init", "normal"),
    ("huginn", "test_time_noise", 0.1),
    ("huginn", "num_key_value_heads", 2),
    ("huginn", "init_values", {"embed_scale": 1.0}),
    ("huginn", "n_embd", ...),
    ("nanbeige", "enable_double_loop_split", True),
    ("nanbeige", "loop_share_kv", True),
    ("nanbeige", "enable_depth_attention", True),
    ("nanbeige", "enable_hyper_connection", True),
    ("nanbeige", "enable_mhc", True),
    ("nanbeige", "emb_neighbor_num", 3),
    ("nanbeige", "insert_ngram_layer_idx", [0]),
    ("nanbeige", "attention_bias", True),
    ("nanbeige", "mlp_bias", True),
    ("nanbeige", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("nanbeige", "a_new_option", 1),
]


@pytest.mark.parametrize(("model", "key", "value"), REFUSED_KEYS)
def test_a_key_that_changes_the_computation_is_refused_by_name(
    make: Make, model: str, key: str, value: Any
) -> None:
    error = refused(make(model, **{key: value}))
    assert error.field == key and key in str(error)


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("llama", "rope_scaling", {"rope_type": "default"}),
        ("llama", "rope_theta", ...),  # Llama's own default is the model's value
        ("llama", "attention_bias", None),
        ("llama", "head_dim", None),
        ("llama", "pretraining_tp", 2),
        ("mistral", "sliding_window", 64),  # as long as the longest text
        ("qwen2", "sliding_window", None),
        ("qwen2", "layer_types", ["full_attention"] * 2),
        ("ouro", "early_exit_step", 3),
        ("ouro", "early_exit_threshold", None),
        ("huginn", "init_values", {"std": 0.1, "embed_scale": math.sqrt(24)}),
        ("huginn", "state_init", "zero"),
        ("nanbeige", "num_residual_streams", 4),
    ],
)
def test_a_key_that_changes_nothing_is_accepted(make: Make, model: str, key: str, value: Any) -> None:
    changed = make(model, **{key: value})
    convert(changed, changed.parent / "changed")
    convert(make(model), changed.parent / "plain")
    ours, plain = load_file(changed.parent / "changed"), load_file(changed.parent / "plain")
    assert all(np.array_equal(ours[name], plain[name]) for name in plain)
    with (
        safe_open(changed.parent / "changed", "numpy") as a,
        safe_open(changed.parent / "plain", "numpy") as b,
    ):
        assert a.metadata()["config"] == b.metadata()["config"]


def test_mistrals_window_is_there_unless_the_config_says_null(make: Make, tmp_path: Path) -> None:
    long = {"max_position_embeddings": 8192}
    assert refused(make("mistral", sliding_window=..., **long)).field == "sliding_window"
    convert(make("mistral", sliding_window=None, **long), tmp_path / "t")


def test_rope_parameters_as_transformers_5_writes_them(make: Make, tmp_path: Path) -> None:
    nested = {"rope_type": "default", "rope_theta": 5e5}
    config = convert(make("qwen2", rope_parameters=nested, rope_theta=...), tmp_path / "t")
    assert config["rope_theta"] == 5e5


@pytest.mark.parametrize("model_type", ["mixtral", "gemma3", "ouro_transformer", None, 3])
def test_another_family_is_refused(make: Make, model_type: Any) -> None:
    error = refused(make("llama", model_type=model_type))
    assert error.field == "model_type" and "huginn_raven" in str(error)


def test_another_head_than_a_language_models_is_refused(make: Make) -> None:
    assert refused(make("llama", architectures=["LlamaForSequenceClassification"])).field == "architectures"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.1.self_attn.o_proj.bias"),
        ("llama", "model.layers.2.mlp.up_proj.weight"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3", "model.layers.0.self_attn.q_proj.bias"),
        ("ouro", "model.layers.0.input_layernorm_3.weight"),
        ("huginn", "transformer.adapter.bias"),
        ("nanbeige", "model.ngram_embeddings.weight"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(make: Make, model: str, name: str) -> None:
    assert refused(make(model, extra={name: np.ones(24, np.float32)})).field == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("ouro", "model.early_exit_gate.bias"),
        ("ouro", "model.layers.1.post_attention_layernorm_2.weight"),
        ("huginn", "transformer.core_block.2.attn.qk_bias"),
        ("nanbeige", "model.norm.weight"),
        ("nanbeige_normed_once", "model.layers.0.self_attn.q_layernorm.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(make: Make, model: str, name: str) -> None:
    assert refused(make(model, without=name)).field == name


def test_a_tensor_of_another_shape_is_refused_by_name(make: Make) -> None:
    name = "transformer.prelude.0.attn.Wqkv.weight"
    error = refused(make("huginn", extra={name: np.ones((24, 24), np.float32)}))
    assert (error.field, error.value) == (name, (24, 24))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(make: Make, tmp_path: Path) -> None:
    for model, embed in (("qwen2", "model.embed_tokens.weight"), ("huginn", "transformer.wte.weight")):
        same = looped_checkpoints.tensors(model)[embed]
        assert convert(make(model, extra={"lm_head.weight": same}), tmp_path / "t")["tied_head"] is True
        assert refused(make(model, extra={"lm_head.weight": -same})).field == "lm_head.weight"


def test_old_rotary_buffers_carry_nothing(make: Make, tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    convert(make("llama", extra=buffer), tmp_path / "t")


def test_huginns_stored_rotations_must_be_those_of_the_config(make: Make, tmp_path: Path) -> None:
    angles = np.outer(np.arange(64), 50000.0 ** (-np.arange(3) / 3))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32).reshape(1, 64, 1, 3, 2)
    convert(make("huginn", extra={"freqs_cis": table}, dtype="F32"), tmp_path / "t")
    convert(make("huginn", extra={"freqs_cis": table}), tmp_path / "t")  # rounded to bf16
    assert refused(make("huginn", extra={"freqs_cis": table[..., ::-1]}, dtype="F32")).field == "freqs_cis"
    assert refused(make("huginn", extra={"freqs_cis": table[:, :8]}, dtype="F32")).field == "freqs_cis"


def test_the_card_says_how_huginn_differs_from_its_reference(make: Make, tmp_path: Path) -> None:
    convert(make("huginn"), tmp_path / "t")
    with safe_open(tmp_path / "t", "numpy") as file:
        card = json.loads(file.metadata()["card"])
    assert "zeros" in card["notes"][0]
    assert card["source_types"] == {"BF16": 57} and card["model_type"] == "huginn_raven"
    assert set(card["source_sha256"]) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
def test_numbers_come_through_exactly(make: Make, tmp_path: Path, stored: str, dtype: str) -> None:
    convert(make("huginn", dtype=stored), tmp_path / "t", weights=dtype, layout="plain")
    found = {name: tensor.read() for name, tensor in shards.open_file(tmp_path / "t").items()}
    source = looped_checkpoints.tensors("huginn")
    for name, values in {
        "inject.weight": source["transformer.adapter.weight"],
        "core.1.wk.weight": source["transformer.core_block.1.attn.Wqkv.weight"][24:48],
        "core.1.k_bias": source["transformer.core_block.1.attn.qk_bias"][1].ravel(),
        "coda.0.w_up.weight": source["transformer.coda.0.mlp.fc.weight"][40:],
    }.items():
        tensor = found[name]
        assert isinstance(tensor, BF16) == (dtype == "bf16" and values.ndim == 2), name
        assert np.array_equal(tensor.float32() if isinstance(tensor, BF16) else tensor, values), name


def test_large_tensors_are_converted_in_blocks(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in ("fp16", "bf16", "fp32"):
        convert(make("ouro", dtype="F32"), tmp_path / "whole", weights=dtype)
        monkeypatch.setattr("tinyloop_serve.native.importers.dtypes.BLOCK_ELEMENTS", 100)
        convert(make("ouro", dtype="F32"), tmp_path / "blocks", weights=dtype)
        assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()


def test_numbers_that_fp16_cannot_hold_are_refused_with_the_way_out(make: Make, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    values = looped_checkpoints.tensors("llama")[name].copy()
    values[3, 3] = 131072.0
    error = refused(make("llama", extra={name: values}))
    assert error.field == name and "bf16" in str(error)
    convert(make("llama", extra={name: values}), tmp_path / "t", weights="bf16")


def test_shards_and_one_file_give_the_same_artifact(make: Make, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    convert(make("ouro"), tmp_path / "one")
    (tmp_path / "hf" / "model.safetensors").unlink()
    convert(
        make("ouro", shards=3), tmp_path / "three", progress=lambda done, total: steps.append((done, total))
    )
    one, three = load_file(tmp_path / "one"), load_file(tmp_path / "three")
    assert one.keys() == three.keys() and all(np.array_equal(one[name], three[name]) for name in one)
    assert steps[0] == (0, len(one)) and steps[-1] == (len(one), len(one))


def test_an_index_that_lies_is_refused(make: Make) -> None:
    def changed(change: Callable[[dict[str, str]], object]) -> ArtifactError:
        source = make("llama", shards=2)
        index = json.loads((source / shards.INDEX).read_text())
        change(index["weight_map"])
        (source / shards.INDEX).write_text(json.dumps(index))
        return refused(source)

    name = "model.norm.weight"
    assert changed(lambda where: where.pop(name)).field == name
    assert changed(lambda where: where.update({"ghost": where[name]})).field == "ghost"
    assert changed(lambda where: where.update({name: "absent.safetensors"})).field == shards.INDEX
    assert changed(lambda where: where.update({name: "../hf/model.safetensors"})).field == shards.INDEX


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "w"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}, "w"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}, "w"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "w"),
        ({"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}, "w"),
        ({"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "w"),
        ({"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]}, "w"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "w"),
        ("text", "w"),
    ],
)
def test_a_damaged_header_is_refused_before_anything_is_mapped(make: Make, entry: Any, what: str) -> None:
    source = make("llama")
    text = json.dumps({what: entry}).encode()
    (source / shards.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    assert refused(source).field == what


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused(make: Make, size: int) -> None:
    source = make("llama")
    path = source / shards.SINGLE
    path.write_bytes(path.read_bytes()[:size])
    assert refused(source).field in (shards.SINGLE, "lm_head.weight")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_config_that_is_not_json_is_refused(make: Make, text: str) -> None:
    source = make("llama")
    (source / "config.json").write_bytes(text.encode("latin-1"))
    assert refused(source).field == "config.json"


def test_weights_in_another_format_are_refused_with_what_is_there(make: Make) -> None:
    source = make("llama")
    (source / shards.SINGLE).rename(source / "pytorch_model.bin")
    error = refused(source)
    assert (error.field, error.value) == (shards.SINGLE, "pytorch_model.bin")


def test_convert_looks_at_the_source(make: Make, tmp_path: Path) -> None:
    folder = make("llama")
    assert refused(folder / "config.json").field == "source"
    (tmp_path / "not_whole.bin").write_bytes(b"GGUF")
    assert refused(tmp_path / "not_whole.bin").field == "source"
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "absent", tmp_path / "t")
    assert refused(folder, weights="fp8").field == "weights"
    assert refused(folder, max_loops=0).field == "config.max_loops"
