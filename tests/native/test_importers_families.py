"""An imported checkpoint says what its family's own code says, at every loop count.

The golden logits come from that code (tests/vectors/make_looped_logits.py). Catches: a tensor in the wrong
place, a norm too many or too few between loops, the wrong rotary pairing, epsilon, scale or start state.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.native import reference
from tests.vectors import looped_checkpoints
from tinyloop_serve.native import Model
from tinyloop_serve.native.importers.convert import convert

VECTORS = Path(looped_checkpoints.__file__).parent
MODELS = looped_checkpoints.MODELS
CASES = [(name, loops) for name, (_, counts) in MODELS.items() for loops in counts]


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / f"{name}_logits.json").read_text())
    return found


@pytest.fixture(scope="module", params=list(MODELS))
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    source = looped_checkpoints.write_folder(folder / "hf", MODELS[name][0], looped_checkpoints.tensors(name))
    convert(source, folder / "model.tinyloop", max_loops=8, layout="plain")
    return name, folder / "model.tinyloop"


@pytest.mark.parametrize("name", MODELS)
def test_the_checkpoint_is_the_one_that_the_golden_logits_are_of(name: str) -> None:
    assert golden(name)["checkpoint_sha256"] == looped_checkpoints.digest(looped_checkpoints.tensors(name))


def test_the_logits_are_the_reference_codes(imported: tuple[str, Path]) -> None:
    """In float64 to the last digits that the golden file has; the engine within its fp16 cache's rounding."""
    name, path = imported
    expected = golden(name)
    weights = load_file(path)
    with Model(path, threads=1) as model:
        for loops, rows in expected["logits"].items():
            want = np.array(rows)
            exact = reference.logits(model.config, weights, expected["tokens"], int(loops), kv_fp16=False)
            assert np.abs(exact - want).max() < 1e-9, loops
            engine = model.logits(expected["tokens"], loops=int(loops))
            assert np.abs(engine - want).max() < 5e-3 * max(1.0, float(np.abs(want).max())), loops
            cached = reference.logits(model.config, weights, expected["tokens"], int(loops))
            assert np.abs(engine - cached).max() < 1e-3 * max(1.0, float(np.abs(want).max())), loops


def test_ouros_gate_reads_the_normed_state_after_each_loop(tmp_path: Path) -> None:
    source = looped_checkpoints.write_folder(tmp_path, MODELS["ouro"][0], looped_checkpoints.tensors("ouro"))
    config = convert(source, tmp_path / "t", weights="fp32", layout="plain")
    weights = load_file(tmp_path / "t")
    expected = golden("ouro")
    model = reference.Reference(config, weights, kv_fp16=False)
    for loops, want in enumerate(expected["gate"], start=1):
        state = model.after_loops(model.prelude(expected["tokens"]), loops)
        gate = state @ model.weights["exit_gate.weight"][0] + model.weights["exit_gate.bias"]
        assert np.abs(gate - want).max() < 1e-9


@pytest.mark.parametrize(
    ("name", "loops", "most"),
    [("llama", 1, 1), ("ouro", 4, 8), ("huginn", 8, 16), ("nanbeige", 2, 4), ("nanbeige_normed_once", 3, 6)],
)
def test_the_loop_count_is_the_trained_one(name: str, loops: int, most: int, tmp_path: Path) -> None:
    source = looped_checkpoints.write_folder(tmp_path, MODELS[name][0], looped_checkpoints.tensors(name))
    config = convert(source, tmp_path / "t", measure_beta=False)
    assert (config["loops"], config["max_loops"]) == (loops, most)
