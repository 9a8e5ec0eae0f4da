"""Integer weights in an artifact: each in its place, as near as its scale allows; and the same model as
quantising at load gives."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors

from tests.native import models, reference
from tinyloop_serve.native import (
    ArtifactError,
    ConfigError,
    Model,
    artifact,
    inspect_artifact,
    integer_panels,
)
from tinyloop_serve.native.importers.convert import convert

PROMPT = list(range(1, 30))


def write(path: Path, name: str, dtype: str = "fp16", **options: Any) -> dict[str, npt.NDArray[Any]]:
    """The tensors that were written."""
    config = models.FAMILY[name]
    tensors = reference.random_model(config, seed=6, dtype=dtype)
    artifact.write(path, config, tensors, **options)
    return tensors  # type: ignore[return-value]


def weight(stored: npt.NDArray[Any], output: int, inp: int) -> tuple[float, float]:
    """(the weight, its scale), by the format's description."""
    panel, j = stored[output // 16], output % 16
    if stored.dtype == np.int8:
        scale = float(panel[-1, j].copy().view(np.float32)[0])
        return float(panel[inp // 4, j, inp % 4]) * scale, scale
    group, k = panel[inp // 32], inp % 32
    scale = float(group[256 + 2 * j : 258 + 2 * j].copy().view(np.float16)[0])
    return (int(group[k // 8 * 64 + j * 4 + k % 4] >> k // 4 % 2 * 4 & 15) - 8) * scale, scale


@pytest.mark.parametrize("weights", artifact.INTEGERS)
@pytest.mark.parametrize("name", models.FAMILY)
def test_every_weight_is_in_its_place(tmp_path: Path, name: str, weights: str) -> None:
    tensors = write(tmp_path / "t", name, weights=weights)
    config = models.FAMILY[name]
    head, padded = config["head_dim"], -(-config["head_dim"] // 16) * 16
    deserialize: Any = safetensors.deserialize
    for tensor_name, entry in deserialize((tmp_path / "t").read_bytes()):
        rows = tensors[tensor_name]
        if rows.ndim == 1:
            assert entry["dtype"] == "F16"
            continue
        dtype: Any = {"I8": np.int8, "U8": np.uint8}[entry["dtype"]]
        stored = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
        part = tensor_name.split(".")[-2]
        real = set()
        for out, inp in np.ndindex(*rows.shape):
            o = out // head * padded + out % head if part in ("wq", "wk", "wv") else out
            i = inp // head * padded + inp % head if part == "wo" else inp
            found, scale = weight(stored, o, i)
            # int4 has 16 values: the largest weight is -8 steps, and one as large of the other sign only 7
            steps = 0.501 if dtype is np.int8 else 1.01
            assert abs(found - float(rows[out, inp])) <= steps * abs(scale)
            real.add(o)
        for o in set(range(stored.shape[0] * 16)) - real:
            assert weight(stored, o, 0)[1] == 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("weights", artifact.INTEGERS)
@pytest.mark.parametrize("name", models.FAMILY)
def test_quantising_at_conversion_and_at_load_give_the_same_bits(
    tmp_path: Path, name: str, weights: str, dtype: str
) -> None:
    write(tmp_path / "plain", name, dtype, layout="plain")
    write(tmp_path / "panels", name, dtype)
    convert(tmp_path / "panels", tmp_path / "converted", weights=weights)
    assert inspect_artifact(tmp_path / "converted")["weights"] == weights
    with Model(tmp_path / "converted", threads=1) as model:
        assert model.weights == weights
        expected = model.logits(PROMPT)
    for path in ("plain", "panels"):
        with Model(tmp_path / path, weights=weights, threads=2) as model:
            assert np.array_equal(model.logits(PROMPT), expected)
    with Model(tmp_path / "converted", weights=weights) as model:
        assert np.array_equal(model.logits(PROMPT), expected)


@pytest.mark.parametrize("asked", ["fp16", "bf16", "int4"])
def test_integers_are_not_turned_into_other_weights(tmp_path: Path, asked: str) -> None:
    write(tmp_path / "int8", "concat", weights="int8")
    with pytest.raises(ConfigError, match="auto or int8") as caught:
        Model(tmp_path / "int8", weights=asked)
    assert caught.value.field == "weights"
    with pytest.raises(ArtifactError) as refused:
        convert(tmp_path / "int8", tmp_path / "t", weights=asked)
    assert refused.value.accepted and not (tmp_path / "t").exists()


def test_integers_come_in_panels_only(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        write(tmp_path / "t", "llama", weights="int8", layout="plain")
    assert caught.value.field == "layout"
    with pytest.raises(ArtifactError) as caught:
        write(tmp_path / "t", "llama", weights="int2")
    assert caught.value.field == "weights" and not list(tmp_path.iterdir())


def test_large_matrices_are_quantised_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for weights in artifact.INTEGERS:
        write(tmp_path / "whole", "huginn", "bf16", weights=weights)
        with monkeypatch.context() as patch:
            patch.setattr(integer_panels, "BLOCK_ELEMENTS", 1)
            write(tmp_path / "blocks", "huginn", "bf16", weights=weights)
        assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()


def test_weights_of_zero_and_of_any_size_survive(tmp_path: Path) -> None:
    config = models.FAMILY["llama"]
    tensors: dict[str, Any] = reference.random_model(config, seed=6, dtype="fp32")
    up, down = tensors["core.0.w_up.weight"], tensors["core.0.w_down.weight"]
    up[3], up[5, 4:], down[:, :32] = 0, 0, 0
    up[7], up[8], down[2, 3] = 1e-9, -0.0, 1e5
    artifact.write(tmp_path / "fp32", config, tensors)
    for weights in artifact.INTEGERS:
        artifact.write(tmp_path / weights, config, tensors, weights=weights)
        with Model(tmp_path / weights) as model, Model(tmp_path / "fp32", weights=weights) as at_load:
            found = model.logits(PROMPT)
            assert np.isfinite(found).all() and np.array_equal(found, at_load.logits(PROMPT))
