"""A fleet on several devices, which are emulated. Catches: a replica on another device than it was given,
memory of a device that is given away twice, tokens that depend on the device's number. Left out where the C++
tests were not built before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native import models, reference
from tinyloop_serve.deploy import cli
from tinyloop_serve.native import GenerateConfig, Model, artifact, devices
from tinyloop_serve.replica import budget
from tinyloop_serve.replica.config import parse

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
BUILT = Path(__file__).parents[2] / "build" / "native"
MEMORY_MIB = 64
PROMPTS = [[(7 * k * k + 3 * k + n) % 61 for k in range(5 + n)] for n in range(6)]


@pytest.fixture(autouse=True)
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (BUILT / "libtinyloop_emulated.so").exists():
        pytest.skip("build/native has no libtinyloop_emulated.so: scripts/cpp-tests builds it")
    monkeypatch.setenv("TINYLOOP_BACKEND_PATH", str(BUILT))
    monkeypatch.setenv("EMULATED_GPUS", "2")
    monkeypatch.setenv("EMULATED_GPU_MIB", str(MEMORY_MIB))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.tinyloop"
    config = models.FAMILY["everything"]
    artifact.write(path, config, reference.random_model(config, seed=4, dtype="fp16"))
    return path


def test_each_device_serves_what_the_engine_gives_alone(
    path: Path, tmp_path: Path, fleets: Callable[..., Any]
) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text('[replica]\nspeculation = "off"\n')  # measuring it is slow where kernels are emulated
    flags = ["--model", str(path), "--config", str(config), "--replicas", "3"]
    flags += ["--devices", "emulated:0,emulated:1"]
    shapes = [
        {"loops": 2, "max_tokens": 4, "ignore_eos": True, "seed": n, "temperature": n % 2, "top_k": 9}
        for n in range(len(PROMPTS))
    ]
    with Model(path, device="emulated:1") as model:
        asked = parse(["--model", str(path), "--endpoint", "ipc:///nowhere", "--device", "emulated:1"])
        most_loops = model.config.get("max_loops", model.config["loops"])
        weights = budget.of(model, asked, most_loops).weight_bytes  # and work space
        alone = [
            model.generate(prompt, GenerateConfig(**shape)).tokens
            for prompt, shape in zip(PROMPTS, shapes, strict=True)
        ]
    with fleets(*flags) as fleet, fleet.client() as client:
        streams = [client.stream(prompt, **shape) for prompt, shape in zip(PROMPTS, shapes, strict=True)]
        answers = [stream.result() for stream in streams]
        budgets = {replica.name: replica.budget_bytes for replica in fleet.status().replicas}
    assert [list(answer.tokens) for answer in answers] == alone
    whole, half = ((MEMORY_MIB >> shared << 20) - weights for shared in (0, 1))
    assert budgets == {"replica-0": half, "replica-1": whole, "replica-2": half}  # two share the first


def test_the_machine_is_diagnosed_with_devices_that_have_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = {device["name"]: device for device in devices()}
    assert found["emulated:1"]["total_bytes"] == MEMORY_MIB << 20
    cli.main(["doctor"])
    assert f"emulated:1: kernels emulated on the CPU, {MEMORY_MIB} MiB" in capsys.readouterr().out


def test_a_device_that_is_not_there_ends_the_fleet(path: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tinyloop_serve.deploy.cli",
        "up",
        "--model",
        str(path),
        "--devices",
        "emulated:2",
    ]
    ended = subprocess.run(
        command,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 78
    assert "emulated:2" in ended.stderr and "there are 2 devices" in ended.stderr
