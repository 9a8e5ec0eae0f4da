"""Devices as Python and a replica see them: what there is and why not, and a refusal in a moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.native import models, reference
from tinyloop_serve.native import BackendUnavailable, ConfigError, Model, artifact, devices

PLUGINS = Path(__file__).parents[2] / "native" / "tests" / "plugins"
INCLUDE = Path(__file__).parents[2] / "native" / "include"


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-ins that need no engine."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to make plug-ins with")
    folder = tmp_path_factory.mktemp("plugins")
    for kind in ("old", "absent", "empty"):
        command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{INCLUDE}", str(PLUGINS / f"{kind}.cpp")]
        subprocess.run([*command, "-o", str(folder / f"libtinyloop_{kind}.so")], check=True)
    (folder / "libtinyloop_text.so").write_text("not a library")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "model.tinyloop"
    config = models.FAMILY["llama"]
    artifact.write(path, config, reference.random_model(config, seed=3, dtype="fp16"))
    return path


def test_listing_says_what_there_is_and_why_not(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_BACKEND_PATH", str(plugins))
    found = {device["name"]: device for device in devices()}
    assert found["cpu"]["reason"] == "" and found["cpu"]["total_bytes"] == 0
    assert found["absent"]["reason"] == "no driver (error 35)"
    assert "version 1" in found["old"]["reason"]
    assert "no tinyloop_backend" in found["empty"]["reason"]
    assert "libtinyloop_text.so" in found["text"]["reason"]
    assert any(name.startswith("cuda") for name in found)


def test_a_device_that_is_not_there_is_refused_by_name(
    model: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLOOP_BACKEND_PATH", str(plugins))
    for name, reason in {
        "absent": "no driver",
        "absent:1": "no driver",
        "old": "version 1",
        "empty": "no tinyloop_backend",
        "text": "libtinyloop_text",
        "abacus": "this build has no libtinyloop_abacus.so",
        "cpu:1": "1 device",
    }.items():
        begin = time.monotonic()
        with pytest.raises(BackendUnavailable, match=reason) as refused:
            Model(model, device=name)
        assert time.monotonic() - begin < 1
        assert (refused.value.field, refused.value.value) == ("device", name)
        assert refused.value.accepted
    for name in ("", "cuda:", "cuda:x", "../cuda"):
        with pytest.raises(ConfigError, match="device"):
            Model(model, device=name)


def test_a_replica_without_its_device_ends_and_says_why(model: Path, plugins: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinyloop_serve.replica", "--model", str(model), "--device", "absent:3"]
    command += ["--endpoint", f"ipc://{tmp_path}/r.sock"]
    ended = subprocess.run(
        command,
        env=os.environ | {"TINYLOOP_BACKEND_PATH": str(plugins)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 78
    assert "absent:3" in ended.stderr and "no driver (error 35)" in ended.stderr
