"""Replicas on one host hold the weights of an artifact in panels once; one in rows is copied by each."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.native import models
from tinyloop_serve.native import artifact
from tinyloop_serve.native.tensors import Tensor

# 14 MB of fp16, so that what else a process allocates does not matter; tied, so that every page is used.
CONFIG = models.config(
    vocab_size=4096, d_model=512, d_ffn=1024, n_heads=8, n_kv_heads=8, head_dim=64, tied_head=True
)

PROGRAM = """
import sys
from tinyloop_serve.native import GenerateConfig, Model
with Model(sys.argv[1], threads=1) as model:
    model.generate([1, 2, 3], GenerateConfig(max_tokens=2, ignore_eos=True))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    random = np.random.default_rng(0)
    shapes = artifact.expected_tensors(CONFIG)
    return {name: random.normal(0, 0.05, shape).astype(np.float16) for name, shape in shapes.items()}


@pytest.fixture
def path(tmp_path: Path, tensors: dict[str, Tensor], request: pytest.FixtureRequest) -> Path:
    artifact.write(tmp_path / "model.tinyloop", CONFIG, tensors, layout=request.param)
    return tmp_path / "model.tinyloop"


@pytest.fixture
def two_processes(path: Path) -> Iterator[list[int]]:
    """That have loaded the model and generated."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield [process.pid for process in started]
    for process in started:
        process.communicate(timeout=20)


def pages(pid: int, path: Path) -> dict[str, int]:
    """Bytes by kind, of the mappings of `path` in a process; "Anonymous" of the whole process."""
    total = {"Rss": 0, "Pss": 0, "Shared_Clean": 0, "Private_Clean": 0, "Private_Dirty": 0, "Anonymous": 0}
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        kind, _, rest = line.partition(":")
        if kind in total and (ours or kind == "Anonymous"):
            total[kind] += int(rest.split()[0]) * 1024
    return total


@pytest.mark.parametrize("path", ["panels"], indirect=True)
def test_two_processes_share_the_pages_of_panels(path: Path, two_processes: list[int]) -> None:
    weights = path.stat().st_size
    for found in (pages(pid, path) for pid in two_processes):
        assert found["Rss"] > 0.9 * weights
        assert found["Shared_Clean"] > 0.9 * weights and found["Pss"] < 0.6 * found["Rss"]
        assert found["Private_Dirty"] == 0


@pytest.mark.parametrize("path", ["plain", "panels"], indirect=True)
def test_only_rows_are_copied(path: Path, two_processes: list[int], request: pytest.FixtureRequest) -> None:
    weights = path.stat().st_size
    floor = pages(subprocess_without_a_model(request), path)["Anonymous"]
    for found in (pages(pid, path) for pid in two_processes):
        copied = found["Anonymous"] - floor
        if "plain" in request.node.name:
            assert copied > 0.9 * weights and found["Rss"] == 0  # the file is let go of
        else:
            assert copied < 0.5 * weights  # work space and the cache


def subprocess_without_a_model(request: pytest.FixtureRequest) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, tinyloop_serve.native; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "\n"
    request.addfinalizer(process.communicate)
    return process.pid
