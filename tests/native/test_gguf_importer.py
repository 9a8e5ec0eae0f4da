"""A GGUF file becomes the same model, or is refused by the name of the key or tensor that is in the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.native import models, reference
from tinyloop_serve.native.errors import ArtifactError, TinyLoopError
from tinyloop_serve.native.importers import byte_bpe, gguf
from tinyloop_serve.native.importers.gguf import convert_gguf

gguf_package = pytest.importorskip("gguf", reason="pip install gguf")

CONFIG = models.config(
    vocab_size=270, d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ffn=96, tied_head=True, bos_id=256
)
KEYS: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 270,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.chat_template": "{{ messages }}",
    "general.name": "tiny",
    "general.license": "cc0-1.0",
}


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in plain else next(shifted)) for byte in range(256)]


SPECIAL = ["<|endoftext|>", "<|im_end|>", "<tool>"]
TOKENS = [*byte_alphabet(), *SPECIAL, "Ġt", "he", "Ġthe", *(f"<unused{i}>" for i in range(8))]
TYPES = [byte_bpe.NORMAL] * 256 + [byte_bpe.CONTROL, byte_bpe.CONTROL, byte_bpe.USER_DEFINED]
TYPES += [byte_bpe.NORMAL] * 3 + [byte_bpe.UNUSED] * 8

THEIR_NAMES = {
    "wq.weight": "attn_q.weight",
    "wk.weight": "attn_k.weight",
    "wv.weight": "attn_v.weight",
    "wo.weight": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "w_gate.weight": "ffn_gate.weight",
    "w_up.weight": "ffn_up.weight",
    "w_down.weight": "ffn_down.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
}


def their_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Renamed, and with rotary pairs as neighbours, as llama.cpp's converter leaves them."""
    out = {}
    for name, tensor in tensors.items():
        if not name.startswith("core."):
            theirs = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}[
                name.split(".")[0]
            ]
            out[f"{theirs}.weight"] = tensor
            continue
        _, layer, part = name.split(".", 2)
        if part in ("wq.weight", "wk.weight", "q_bias", "k_bias"):
            order = np.arange(16).reshape(2, 8).T.ravel()  # 0, 8, 1, 9, ...
            heads = tensor.reshape(-1, 16, *tensor.shape[1:])
            tensor = heads[:, order].reshape(tensor.shape)
        out[f"blk.{layer}.{THEIR_NAMES[part]}"] = tensor
    return out


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_gguf(
        tensors: dict[str, Any] | None = None,
        *,
        extra: dict[str, Any] | None = None,  # tensors under GGUF names
        quantised: str = "F32",
        architecture: str = "llama",
        **keys: Any,
    ) -> Path:
        """A GGUF file with KEYS changed by `keys` (None leaves one out; "__" stands for ".")."""
        path = tmp_path / "source.gguf"
        writer = gguf_package.GGUFWriter(path, architecture)
        renamed = {key.replace("__", "."): value for key, value in keys.items()}
        lists = {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": TYPES}
        for key, value in (KEYS | lists | renamed).items():
            if value is None:
                continue
            add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
            getattr(writer, f"add_{add}")(key, value)
        kind = gguf_package.GGMLQuantizationType[quantised]
        tensors = reference.random_model(CONFIG, 5) if tensors is None else tensors
        for name, tensor in (their_tensors(tensors) | (extra or {})).items():
            if tensor.ndim == 2 and quantised != "F32":
                writer.add_tensor(name, gguf_package.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make_gguf


def refused(source: Path, tmp_path: Path, **options: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        convert_gguf(source, tmp_path / "target.tinyloop", **options)
    assert caught.value.accepted
    assert not (tmp_path / "target.tinyloop").exists()
    return caught.value


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_config_and_tensors_come_through_exactly(
    make: Make, tmp_path: Path, biased: bool, tied: bool
) -> None:
    expected = CONFIG | {"tied_head": tied, "qk_bias": biased, "v_bias": biased, "n_core": 2}
    tensors = reference.random_model(expected, seed=9)
    steps: list[tuple[int, int]] = []

    config = convert_gguf(
        make(tensors),
        tmp_path / "t",
        "fp32",
        lambda done, total: steps.append((done, total)),
        layout="plain",
    )

    expected |= {"eos_ids": [257, 256], "max_loops": 1}
    assert {key: config[key] for key in expected} == expected
    written = load_file(tmp_path / "t")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(written[name], tensor), name
    assert steps[0] == (0, len(tensors)) and steps[-1] == (len(tensors), len(tensors))


@pytest.mark.parametrize("quantised", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_dequantised(make: Make, tmp_path: Path, quantised: str) -> None:
    tensors = reference.random_model(CONFIG, seed=9)
    source = make(tensors, quantised=quantised)
    convert_gguf(source, tmp_path / "t", "fp32", layout="plain")
    written = load_file(tmp_path / "t")
    kind = gguf_package.GGMLQuantizationType[quantised]
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensor = gguf_package.dequantize(gguf_package.quantize(tensor, kind), kind)
        assert np.array_equal(written[name], tensor), name
    with safe_open(tmp_path / "t", "numpy") as file:
        card = json.loads(file.metadata()["card"])
    assert card["source_types"][quantised] == 15 and card["licence"] == "cc0-1.0"
    assert len(card["source_sha256"]) == 64


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_matrices_get_the_asked_dtype_and_vectors_stay_fp32(make: Make, tmp_path: Path, dtype: str) -> None:
    tensors = reference.random_model(CONFIG, seed=9)
    convert_gguf(make(tensors), tmp_path / "t", dtype, layout="plain")
    kinds = {"fp16": "F16", "bf16": "BF16", "fp32": "F32"}
    with safe_open(tmp_path / "t", "numpy") as file:
        for name, tensor in tensors.items():
            part = file.get_slice(name)
            assert part.get_dtype() == (kinds[dtype] if tensor.ndim == 2 else "F32")
    if dtype == "fp16":
        wo = load_file(tmp_path / "t")["core.1.wo.weight"]
        assert np.array_equal(wo, tensors["core.1.wo.weight"].astype(np.float16))


def test_the_tokenizer_and_the_special_tokens_come_along(make: Make, tmp_path: Path) -> None:
    config = convert_gguf(make(tokenizer__ggml__add_bos_token=True), tmp_path / "t")
    with safe_open(tmp_path / "t", "numpy") as file:
        metadata = file.metadata()
    assert metadata["chat_template"] == "{{ messages }}"
    assert (config["bos_id"], config["eos_ids"], config["add_bos"]) == (256, [257, 256], True)
    tokenizer = Tokenizer.from_str(metadata["tokenizer"])
    tokens = tokenizer.encode("to the <tool> é42<|im_end|>").tokens
    assert tokens == ["t", "o", "Ġthe", "Ġ", "<tool>", "Ġ", "Ã", "©", "4", "2", "<|im_end|>"]
    for text in ("", "the  theé 🙂\n\ttab", "<|im_end|>\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.decode([257, 258]) == "<tool>"  # a control token is not part of the text, this one is


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 1234  a\n", ["It", "'s", "Ġ1234", "Ġ", "Ġa", "Ċ"]),
        ("smollm", "It's 1234  a\n", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġa", "Ċ"]),
        ("llama-bpe", "It'S 1234  a\n\n b", ["It", "'S", "Ġ", "123", "4", "Ġ", "Ġa", "ĊĊ", "Ġb"]),
        ("qwen2", "It'S 1234  a\n\n b", ["It", "'S", "Ġ", "1", "2", "3", "4", "Ġ", "Ġa", "ĊĊ", "Ġb"]),
    ],
)
def test_pre_tokenizers_cut_words_as_they_should(pre: str, text: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_str(byte_bpe.tokenizer_json(TOKENS, TYPES, KEYS["tokenizer.ggml.merges"], pre))
    assert tokenizer.pre_tokenizer is not None
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_llama3_tokenizers_take_whole_words_first_and_start_with_bos(make: Make, tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "they"]  # no merge leads to it
    config = convert_gguf(
        make(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__tokens=tokens), tmp_path / "t"
    )
    assert config["add_bos"] is True
    with safe_open(tmp_path / "t", "numpy") as file:
        tokenizer = Tokenizer.from_str(file.metadata()["tokenizer"])
    assert tokenizer.encode("they").tokens == ["they"]


def test_a_file_without_tokenizer_is_a_model_of_token_ids(make: Make, tmp_path: Path) -> None:
    without = {key.replace(".", "__"): None for key in KEYS if key.startswith("tokenizer.")}
    without |= {"tokenizer__ggml__tokens": None, "tokenizer__ggml__token_type": None}
    config = convert_gguf(make(**without), tmp_path / "t")
    assert (config["bos_id"], config["eos_ids"], config["add_bos"]) == (None, [], False)
    with safe_open(tmp_path / "t", "numpy") as file:
        assert file.metadata().keys() == {"format", "format_version", "config", "card", "data_sha256"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "linear"),
        ("llama.rope.scaling.factor", 2.0),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.feed_forward_length", [96, 64]),
        ("llama.expert_count", 8),
        ("llama.expert_used_count", 2),
        ("llama.attention.sliding_window", 64),
        ("llama.attention.causal", False),
        ("llama.residual_scale", 0.5),
        ("llama.embedding_length", None),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.block_count", "2"),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.model", "bert"),
        ("tokenizer.ggml.pre", "default"),
        ("tokenizer.ggml.pre", "tekken"),
        ("tokenizer.ggml.pre", None),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.merges", ["Ġ t", "x y"]),
        ("tokenizer.ggml.merges", ["Ġ t he"]),
        ("tokenizer.ggml.tokens", [*TOKENS[:-1], "Ġthe"]),
        ("tokenizer.ggml.tokens", [*TOKENS, "one more than the model has"]),
        ("tokenizer.ggml.token_type", TYPES[:-1]),
        ("tokenizer.ggml.add_eos_token", True),
    ],
)
def test_an_unsupported_key_is_refused_by_name(make: Make, tmp_path: Path, key: str, value: Any) -> None:
    error = refused(make(**{key.replace(".", "__"): value}), tmp_path)
    assert error.field == key


def test_other_architectures_are_refused(make: Make, tmp_path: Path) -> None:
    error = refused(make(architecture="qwen2"), tmp_path)
    assert (error.field, error.value) == ("general.architecture", "qwen2")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_output.bias", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(make: Make, tmp_path: Path, name: str) -> None:
    assert refused(make(extra={name: np.ones(8, np.float32)}), tmp_path).field == name


def test_a_missing_tensor_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    tensors = reference.random_model(CONFIG, 5)
    del tensors["core.1.w_up.weight"]
    assert refused(make(tensors), tmp_path).field == "core.1.w_up.weight"


def test_numbers_that_fp16_cannot_hold_are_refused_with_the_way_out(make: Make, tmp_path: Path) -> None:
    tensors = reference.random_model(CONFIG, 5)
    tensors["core.0.w_up.weight"][3, 3] = 1e5
    source = make(tensors)
    error = refused(source, tmp_path)
    assert error.field == "blk.0.ffn_up.weight" and "bf16" in str(error)
    convert_gguf(source, tmp_path / "t", "bf16")


def test_bad_weights_are_refused(make: Make, tmp_path: Path) -> None:
    assert refused(make(), tmp_path, weights="fp8").field == "weights"


@pytest.mark.parametrize("size", [0, 3, 40, 5000, -1000])
def test_a_truncated_file_is_refused(make: Make, tmp_path: Path, size: int) -> None:
    source = make()
    source.write_bytes(source.read_bytes()[:size])
    assert refused(source, tmp_path).field == "source"


def test_a_text_that_is_not_utf8_is_refused_by_its_key(make: Make, tmp_path: Path) -> None:
    source = make()
    source.write_bytes(source.read_bytes().replace(b"cc0-1.0", b"cc0\xff1.0"))
    assert refused(source, tmp_path).field == "general.license"


def test_random_damage_is_refused_or_harmless(make: Make, tmp_path: Path) -> None:
    """No damage to keys, names, types or offsets surfaces as anything but an ArtifactError."""
    whole = make().read_bytes()
    described = whole.index(b"output_norm.weight") + 100  # the numbers of the tensors come after
    rng = np.random.default_rng(1)
    refusals = 0
    for _ in range(60):
        data = bytearray(whole)
        for position in rng.integers(0, described, rng.integers(1, 4)):
            data[position] = rng.integers(0, 256)
        (tmp_path / "damaged.gguf").write_bytes(data)
        try:
            convert_gguf(tmp_path / "damaged.gguf", tmp_path / "t")
        except ArtifactError as error:
            assert error.field
            refusals += 1
    assert refusals > 20


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        convert_gguf(tmp_path / "no.gguf", tmp_path / "t")


def test_without_the_gguf_package_the_error_says_how_to_get_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    source = make()
    monkeypatch.setattr(gguf.importlib, "import_module", absent)  # type: ignore[attr-defined]
    with pytest.raises(TinyLoopError, match=r"pip install 'tinyloop-serve\[import\]'"):
        convert_gguf(source, tmp_path / "t")
