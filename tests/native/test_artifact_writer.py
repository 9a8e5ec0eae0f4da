"""What we write is a safetensors file to others, and nothing invalid is written."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from tests.native import models, reference
from tinyloop_serve import native
from tinyloop_serve.native import artifact, artifact_file
from tinyloop_serve.native.errors import ArtifactError, TinyLoopError, refusal
from tinyloop_serve.native.tensors import BF16, Tensor


def _write(path: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    config = models.config() if config is None else config
    artifact.write(path, config, reference.random_model(config, seed=1) | tensors)


def _read_by_others(path: Path) -> dict[str, Any]:
    deserialize: Any = safetensors.deserialize
    return dict(deserialize(path.read_bytes()))


def _little_endian_bytes(tensor: Tensor) -> bytes:
    return (tensor.bits if isinstance(tensor, BF16) else tensor).tobytes()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "mixed"])
@pytest.mark.parametrize("name", models.FAMILY)
def test_the_official_reader_gets_the_same_bits(tmp_path: Path, name: str, dtype: str) -> None:
    path = tmp_path / "model.tinyloop"
    config = models.FAMILY[name]
    tensors = reference.random_model(config, seed=3, dtype=dtype)
    tokenizer = '{"model":{"vocab":{"é":60}}}'
    artifact.write(path, config, tensors, tokenizer=tokenizer, card={"data": "none"}, layout="plain")

    read = _read_by_others(path)
    assert read.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        kind = "BF16" if isinstance(tensor, BF16) else {2: "F16", 4: "F32"}[tensor.dtype.itemsize]
        assert read[tensor_name]["dtype"] == kind
        assert tuple(read[tensor_name]["shape"]) == tensor.shape
        assert bytes(read[tensor_name]["data"]) == _little_endian_bytes(tensor)
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "tinyloop" and metadata["format_version"] == "1"
    assert json.loads(metadata["config"]) == artifact.complete_config(config)
    assert json.loads(metadata["tokenizer"])["model"]["vocab"] == {"é": 60}
    assert json.loads(metadata["card"]) == {"data": "none"}
    data = path.read_bytes()[8 + int.from_bytes(path.read_bytes()[:8], "little") :]
    assert metadata["data_sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", models.FAMILY)
def test_panels_have_every_element_in_its_place_and_zeros_elsewhere(
    tmp_path: Path, name: str, dtype: str
) -> None:
    config = models.FAMILY[name]
    tensors = reference.random_model(config, seed=3, dtype=dtype)
    artifact.write(tmp_path / "t", config, tensors)
    head, padded = config["head_dim"], -(-config["head_dim"] // 16) * 16
    for tensor_name, entry in _read_by_others(tmp_path / "t").items():
        tensor = tensors[tensor_name]
        rows = tensor.bits if isinstance(tensor, BF16) else tensor
        found = np.frombuffer(entry["data"], rows.dtype).reshape(entry["shape"]).copy()
        assert (found.ndim == 3) == (rows.ndim == 2)
        if rows.ndim < 2:
            assert np.array_equal(found, rows)
            continue
        part = tensor_name.split(".")[-2]
        for out, inp in np.ndindex(*rows.shape):
            o = out // head * padded + out % head if part in ("wq", "wk", "wv") else out
            i = inp // head * padded + inp % head if part == "wo" else inp
            assert found[o // 16, i, o % 16] == rows[out, inp]
            found[o // 16, i, o % 16] = 0
        assert not found.any()


def test_what_has_no_aligned_panels_stays_in_rows(tmp_path: Path) -> None:
    config = models.config(d_model=25, n_heads=1, n_kv_heads=1)
    artifact.write(tmp_path / "odd", config, reference.random_model(config, seed=1, dtype="fp16"))
    shapes = {name: entry["shape"] for name, entry in _read_by_others(tmp_path / "odd").items()}
    assert shapes["embed.weight"] == [61, 25] and shapes["core.0.w_down.weight"] == [2, 40, 16]

    config = models.config()
    tensors = reference.random_model(config, seed=1, dtype="fp16")
    tensors["core.0.wk.weight"] = reference.random_model(config, seed=1)["core.0.wk.weight"]
    artifact.write(tmp_path / "mixed", config, tensors)
    shapes = {name: entry["shape"] for name, entry in _read_by_others(tmp_path / "mixed").items()}
    assert [len(shapes[f"core.0.{part}.weight"]) for part in ("wq", "wk", "wv", "wo")] == [2, 2, 2, 3]
    for name in ("odd", "mixed"):
        native.Model(tmp_path / name).close()


def test_metadata_that_is_not_given_is_not_there(tmp_path: Path) -> None:
    _write(tmp_path / "t")
    with safetensors.safe_open(tmp_path / "t", "numpy") as file:
        assert file.metadata().keys() == {"format", "format_version", "config", "data_sha256"}


@pytest.mark.parametrize("layout", artifact.LAYOUTS)
def test_the_file_is_aligned_and_without_holes(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "model.tinyloop"
    config = models.config(d_model=5, vocab_size=7, d_ffn=6)  # odd sizes
    artifact.write(path, config, reference.random_model(config, seed=1, dtype="mixed"), layout=layout)

    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entries = [header[name] for name in header if name != "__metadata__"]

    assert (8 + length) % 64 == 0
    offset, order = 0, []
    for entry in entries:
        width = {"F16": 2, "F32": 4}[entry["dtype"]]
        panels = len(entry["shape"]) == 3
        assert entry["data_offsets"][0] == offset and offset % (64 if panels else width) == 0
        offset = entry["data_offsets"][1]
        order.append((panels, 0 if panels else width))
    assert 8 + length + offset == len(data)
    assert order == sorted(order, reverse=True) and {(False, 2), (False, 4)} <= set(order)
    assert ((True, 0) in order) == (layout == "panels")


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    config = models.config()
    tensors = reference.random_model(config, seed=1)
    artifact.write(tmp_path / "a", config, tensors)
    backwards = dict(reversed(config.items())) | {"loop_norm": False, "rope_theta": 10000}
    artifact.write(tmp_path / "b", backwards, dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_memory_layout_and_byte_order_is_written_right(tmp_path: Path) -> None:
    tensors = reference.random_model(models.config(), seed=1)
    plain = tensors["core.0.wq.weight"]
    _write(tmp_path / "a")
    unusual: dict[str, Any] = {"core.0.wq.weight": np.asfortranarray(plain).astype(">f4")}
    _write(tmp_path / "b", **unusual)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


BAD_CONFIGS: list[tuple[str, Any]] = [
    ("vocab_size", 0),
    ("vocab_size", 1 << 40),
    ("d_model", 24.0),
    ("d_model", True),
    ("n_heads", "4"),
    ("n_kv_heads", 3),
    ("n_kv_heads", 8),
    ("head_dim", 5),
    ("d_ffn", -1),
    ("n_core", 0),
    ("loops", 0),
    ("max_loops", 0),
    ("max_seq_len", None),
    ("norm", "rms"),
    ("norm_eps", 0.0),
    ("norm_eps", float("nan")),
    ("injection", "sum"),
    ("start", "zeros"),  # with no injection
    ("start", "random"),
    ("loop_norm", 1),
    ("rope", "neox"),
    ("rope_theta", float("inf")),
    ("tied_head", "yes"),
    ("logit_scale", None),
    ("bos_id", 61),
    ("bos_id", -1),
    ("eos_ids", [1, 61]),
    ("eos_ids", [1, 1]),
    ("eos_ids", 1),
    ("eos_ids", [True]),
    ("add_bos", True),  # with no bos_id
    ("beta", -0.5),
    ("colour", "red"),
]


@pytest.mark.parametrize(("field", "value"), BAD_CONFIGS)
def test_a_bad_config_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    tensors = reference.random_model(models.config(), seed=1)
    with pytest.raises(ArtifactError) as caught:
        artifact.write(tmp_path / "x", models.config() | {field: value}, tensors)
    assert caught.value.field == f"config.{field}" and caught.value.accepted
    assert caught.value.value is value or caught.value.value == value
    assert not list(tmp_path.iterdir())


def test_max_loops_below_loops_is_refused() -> None:
    with pytest.raises(ArtifactError, match="max_loops"):
        artifact.complete_config(models.config(loops=8, max_loops=4))


@pytest.mark.parametrize("field", [field for field in artifact.CONFIG_FIELDS])
def test_every_field_has_a_default_or_is_required(field: artifact.ConfigField) -> None:
    config = models.config()
    config.pop(field.name, None)
    if field.default is artifact.REQUIRED and not field.default_from:
        with pytest.raises(ArtifactError) as caught:
            artifact.complete_config(config)
        assert caught.value.field == f"config.{field.name}"
    else:
        expected = config[field.default_from] if field.default_from else field.default
        assert artifact.complete_config(config)[field.name] == expected


WQ = "core.0.wq.weight"
BAD_TENSORS: list[tuple[str, Any]] = [
    (WQ, np.zeros((24, 25), np.float16)),
    (WQ, np.zeros(24 * 24, np.float16)),
    (WQ, np.zeros((24, 24), np.float64)),
    (WQ, np.zeros((24, 24), np.uint16)),
    (WQ, [[0.0] * 24] * 24),
    (WQ, np.full((24, 24), np.inf, np.float16)),
    (WQ, np.full((24, 24), np.nan, np.float32)),
    (WQ, BF16(np.full((24, 24), 0x7F80, np.uint16))),
    (WQ, None),
    ("core.2.wq.weight", np.zeros((24, 24), np.float16)),
    ("inject.weight", np.zeros((24, 48), np.float16)),
]


@pytest.mark.parametrize(("name", "tensor"), BAD_TENSORS)
def test_a_bad_tensor_is_refused_by_name(tmp_path: Path, name: str, tensor: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        _write(tmp_path / "x", **{name: tensor})
    assert caught.value.field == name and caught.value.accepted
    assert not list(tmp_path.iterdir())


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensors = reference.random_model(models.config(), seed=1)
    del tensors["final_norm.weight"]
    with pytest.raises(ArtifactError) as caught:
        artifact.write(tmp_path / "x", models.config(), tensors)
    assert caught.value.field == "final_norm.weight"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer", "{"),
        ("tokenizer", "[]"),
        ("tokenizer", '{"model": {"vocab": {"a": 61}}}'),
        ("tokenizer", '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 70, "content": "<x>"}]}'),
        ("tokenizer", b"{}"),
        ("chat_template", 7),
        ("card", {"loss": float("nan")}),
        ("card", {"data": object()}),
        ("layout", "columns"),
    ],
)
def test_bad_metadata_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    tensors = reference.random_model(models.config(), seed=1)
    with pytest.raises(ArtifactError) as caught:
        artifact.write(tmp_path / "x", models.config(), tensors, **{field: value})
    assert caught.value.field == field


def test_text_that_is_not_unicode_and_headers_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = reference.random_model(models.config(), seed=1)
    with pytest.raises(ArtifactError, match="metadata"):
        artifact.write(tmp_path / "x", models.config(), tensors, chat_template="\ud800")
    monkeypatch.setattr(artifact_file, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ArtifactError, match="header"):
        artifact.write(tmp_path / "x", models.config(), tensors)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.tinyloop"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        _write(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_file_can_be_read_by_whoever_the_umask_allows(tmp_path: Path) -> None:
    path = tmp_path / "model.tinyloop"
    before = os.umask(0o027)
    try:
        _write(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_bfloat16_rounds_to_nearest_even() -> None:
    numbers = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3.3895314e38, np.nan, 0.0], np.float32)
    bits = BF16.from_float32(numbers).bits.tolist()
    # 1 + 2^-8 is halfway and goes down to even, 1 + 3 * 2^-8 is halfway and goes up to even.
    assert bits == [0x3F80, 0xC020, 0x3F80, 0x3F82, 0x7F7F, 0x7FC0, 0x0000]
    assert BF16.from_float32(numbers[:2]).float32().tolist() == [1.0, -2.5]
    with pytest.raises(TypeError):
        BF16(np.zeros(2, np.int32))


def test_errors_say_what_to_change_and_survive_pickling() -> None:
    import pickle

    error = refusal("config.norm", "x" * 500, "'pre' | 'post'")
    assert len(str(error)) < 300 and "config.norm" in str(error) and "'pre' | 'post'" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ArtifactError) and isinstance(copy, TinyLoopError)
    assert (str(copy), copy.field, copy.value, copy.accepted) == (
        str(error),
        "config.norm",
        "x" * 500,
        "'pre' | 'post'",
    )


def test_writing_needs_no_compiled_core() -> None:
    """Trainers and importers may run where nothing is compiled; the package's imports stand aside here."""
    program = f"""
import sys, types
package = types.ModuleType("tinyloop_serve.native")
package.__path__ = [{str(Path(artifact.__file__).parent)!r}]
sys.modules["tinyloop_serve.native"] = package
import tinyloop_serve.native.importers.gguf
sys.exit("tinyloop_serve.native._core" in sys.modules or "gguf" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Rules of the writer alone: such models load, but no one should make them.
WRITER_ONLY = [("norm_eps", 0.0), ("start", "zeros"), ("eos_ids", [1, 1])]


@pytest.mark.parametrize(("field", "value"), [bad for bad in BAD_CONFIGS if bad not in WRITER_ONLY])
def test_the_loader_refuses_the_same_configs(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "model.tinyloop"
    _write(path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["config"] = json.dumps(models.config() | {field: value})
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    with pytest.raises(ArtifactError) as caught:
        native.inspect_artifact(path)
    assert caught.value.field is not None and caught.value.accepted
    not_json = isinstance(value, float) and not math.isfinite(value)
    assert caught.value.field.startswith("config" if not_json else f"config.{field}")


@pytest.mark.parametrize("name", models.FAMILY)
def test_the_loader_reads_what_was_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.tinyloop"
    _write(path, models.FAMILY[name])
    found = native.inspect_artifact(path)
    assert found["config"] == artifact.complete_config(models.FAMILY[name])
