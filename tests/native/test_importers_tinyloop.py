"""An artifact written again is the same model; a damaged or foreign one is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native import models, reference
from tinyloop_serve.native import GenerateConfig, Model, artifact, inspect_artifact
from tinyloop_serve.native.errors import ArtifactError
from tinyloop_serve.native.importers.convert import convert

PROMPT = list(range(1, 20))


def write(path: Path, name: str = "everything", dtype: str = "fp16", **options: Any) -> Path:
    config = models.FAMILY[name]
    artifact.write(path, config, reference.random_model(config, seed=5, dtype=dtype), **options)
    return path


def changed(path: Path, change: Any) -> Path:
    """The file with `change(header)` made and no hash of the data."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    del header["__metadata__"]["data_sha256"]
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return path


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "mixed"])
@pytest.mark.parametrize("name", models.FAMILY)
def test_there_and_back_is_the_same_file_and_the_same_model(tmp_path: Path, name: str, dtype: str) -> None:
    rows = write(tmp_path / "rows", name, dtype, layout="plain", card={"data": "none"}, chat_template="{{x}}")
    config = convert(rows, tmp_path / "panels")
    assert config == artifact.complete_config(models.FAMILY[name])
    convert(tmp_path / "panels", tmp_path / "back", layout="plain")
    assert rows.read_bytes() == (tmp_path / "back").read_bytes()
    convert(tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "panels").read_bytes()
    with Model(rows, threads=1) as copied, Model(tmp_path / "panels", threads=2) as in_place:
        assert np.array_equal(copied.logits(PROMPT), in_place.logits(PROMPT))
        greedy = GenerateConfig(max_tokens=12, ignore_eos=True)
        assert copied.generate(PROMPT, greedy).tokens == in_place.generate(PROMPT, greedy).tokens
        assert copied.parameters == in_place.parameters


def test_other_weights_are_those_that_were_written_so_at_once(tmp_path: Path) -> None:
    source = write(tmp_path / "fp32", dtype="fp32")
    convert(source, tmp_path / "fp16", weights="fp16")
    assert inspect_artifact(tmp_path / "fp16")["weights"] == "fp16"
    tensors = reference.random_model(models.FAMILY["everything"], seed=5, dtype="fp32")
    rounded = {n: t.astype(np.float16) if t.ndim == 2 else t for n, t in tensors.items()}  # type: ignore[union-attr]
    artifact.write(tmp_path / "direct", models.FAMILY["everything"], rounded)
    assert (tmp_path / "fp16").read_bytes() == (tmp_path / "direct").read_bytes()


def test_max_loops_can_be_raised(tmp_path: Path) -> None:
    config = convert(write(tmp_path / "a"), tmp_path / "b", max_loops=99)
    assert config["max_loops"] == inspect_artifact(tmp_path / "b")["config"]["max_loops"] == 99


def test_damaged_data_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    assert refused(path).field == "__metadata__.data_sha256"


def test_what_is_no_artifact_or_no_whole_one_is_refused_by_name(tmp_path: Path) -> None:
    def without(name: str) -> Any:
        return lambda header: header.__setitem__("x.weight", header.pop(name))

    def other_shape(header: dict[str, Any]) -> None:
        shape = header["core.0.wq.weight"]["shape"]
        header["core.0.wq.weight"]["shape"] = [shape[1], shape[0], shape[2]]

    def bad_config(header: dict[str, Any]) -> None:
        header["__metadata__"]["config"] = "7"

    (tmp_path / "text").write_text("x" * 100)
    assert refused(tmp_path / "text").field == "source"
    foreign = changed(write(tmp_path / "a"), lambda header: header["__metadata__"].update(format="pt"))
    assert refused(foreign).field == "source"
    assert refused(changed(write(tmp_path / "a"), without("final_norm.weight"))).field == "final_norm.weight"
    assert refused(changed(write(tmp_path / "a"), other_shape)).field == "core.0.wq.weight"
    assert refused(changed(write(tmp_path / "a"), bad_config)).field == "__metadata__.config"
    assert refused(write(tmp_path / "a"), weights="fp8").field == "weights"
    assert refused(write(tmp_path / "a"), layout="columns").field == "layout"


def refused(source: Path, **options: Any) -> ArtifactError:
    target = source.parent / "target.tinyloop"
    with pytest.raises(ArtifactError) as caught:
        convert(source, target, **options)
    assert caught.value.accepted and not target.exists()
    return caught.value
