"""`tinyloop doctor`: each thing that can be wrong is found, named, and comes with what to do."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve import native
from tinyloop_serve.deploy import cli, environment, systemd
from tinyloop_serve.deploy.doctor import machine, services
from tinyloop_serve.native import demo_model_path
from tinyloop_serve.protocol import keys

ROOT = Path(__file__).parents[2]
FLEET = (
    f'[fleet]\nmodel = "{demo_model_path()}"\nuser = "root"\nfront = "ipc:///run/tinyloop/front/front.sock"\n'
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(environment.PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def diagnosis(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[dict[str, str]]]:
    status = cli.main(["doctor", "--json", *flags])
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] == (status == 0)
    return status, found["findings"]


def faults(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, str]:
    """Text and remedy of the faults, by subject."""
    status, found = diagnosis(capsys, *flags)
    bad = {each["subject"]: f"{each['text']} {each['remedy']}" for each in found if each["level"] == "fault"}
    assert bool(bad) == (status == 1)
    return bad


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Any]:
    def write(text: str) -> str:
        (tmp_path / "fleet.toml").write_text(text)
        return str(tmp_path / "fleet.toml")

    yield write


# ------------------------------------------------------------------ the machine


def test_a_machine_in_order_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = diagnosis(capsys)
    assert status == 0
    subjects = {each["subject"] for each in found}
    assert {"python", "packages", "engine", "devices", "environment", "directory", "files"} <= subjects
    assert {"model", "cores"} <= subjects
    assert any("cuda" in each["text"] for each in found if each["subject"] == "devices")
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "0 faults" in shown and all(name in shown for name in environment.VARIABLES)


def test_a_device_with_memory_of_its_own_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {"name": "cuda:0", "description": "NVIDIA H200", "reason": "", "total_bytes": 141 << 30}
    monkeypatch.setattr(native, "devices", lambda: [gpu])
    status, found = diagnosis(capsys)
    assert status == 0
    assert [each["text"] for each in found if each["subject"] == "devices"] == [
        "cuda:0: NVIDIA H200, 144384 MiB"
    ]


def test_the_list_of_variables_is_complete() -> None:
    """What the sources read, in Python and C++."""
    read = set[str]()
    for folder in ("protocol", "dispatcher", "replica", "native", "deploy"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h") and "tests" not in path.parts:
                text = path.read_text()
                read |= set(re.findall(r'(?:environ|getenv|variable)[^\n"]*"(TINYLOOP_\w+)"', text))
    assert read and read <= set(environment.VARIABLES)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("TINYLOOP_THREAD", "2", "TINYLOOP_THREADS is meant"),
        ("TINYLOOP_THREADS", "many", "1 to 1024"),
        ("TINYLOOP_ENDPOINT", "here", "ipc:///absolute/path"),
        ("TINYLOOP_ENDPOINT", f"ipc:///{'x' * 120}", "107 bytes"),
        ("TINYLOOP_KEY", "/nowhere.key", "key file"),
        ("TINYLOOP_SERVER_KEY", "short", "40 characters"),
        ("TINYLOOP_BACKEND_PATH", "/nowhere", "not a directory"),
        ("TINYLOOP_WEIGHTS", "int3", "int8"),
        ("TINYLOOP_CACHE_MODE", "fp8", "h_fp16"),
        ("TINYLOOP_EARLY_EXIT", "2", "0 (off) to 1"),
        ("TINYLOOP_SPECULATIVE", "yes", "expected 0, 1"),
    ],
)
def test_a_variable_that_is_unknown_or_wrong_is_a_fault(
    name: str, value: str, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = faults(capsys)
    assert list(found) == ["environment"] and part in found["environment"]


def test_a_directory_that_others_can_open_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tinyloop").mkdir(mode=0o755)
    assert "chmod 700" in faults(capsys)["directory"]


def test_few_files_are_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 4096))
    assert "files" not in faults(capsys)  # a dispatcher takes what it may
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 128))
    assert "ulimit -Hn" in faults(capsys)["files"]


def test_an_old_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["msgspec>=99.1", "numpy>=1", 'x>=9; extra == "y"']
    monkeypatch.setattr(machine.metadata, "requires", lambda _: needed)
    assert [text.split()[0] for text in machine._too_old()] == ["msgspec"]


@pytest.mark.parametrize("module", ["msgspec", "zmq", "numpy"])
def test_a_missing_package_is_a_fault_and_not_a_traceback(module: str) -> None:
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == {module!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
from importlib import util
real = util.find_spec
util.find_spec = lambda name: None if name == {module!r} else real(name)
from tinyloop_serve.deploy.cli import main
sys.exit(main(["doctor", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (bad,) = [
        each
        for each in json.loads(done.stdout)["findings"]
        if each["level"] == "fault" and each["subject"] == "packages"
    ]
    assert module in bad["text"] and "pip install" in bad["remedy"]


# ------------------------------------------------------------------ a configuration


def test_a_good_configuration_is_accepted(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    path = config("[dispatcher]\nmax_wait_ms = 4\n[replica]\nmemory_mib = 200\nmax_handles = 2\n")
    status, found = diagnosis(capsys, "--config", path, "--replicas", "1", "--threads", "1")
    assert status == 0 and not [each for each in found if each["level"] != "ok"]


@pytest.mark.parametrize(
    ("text", "subject", "part"),
    [
        ("[dispatcher]\nmax_wait = 4\n", "dispatcher", "max_wait_ms"),
        ("[dispatcher]\nmax_wait_ms = -1\n", "dispatcher", "from 0 to"),
        ("[dispatchers]\n", "configuration", "[dispatcher]"),
        ("[tenants.a]\nweigth = 2\n", "dispatcher", "weight"),
        ("[replica]\nmax_handle = 2\n", "replica", "--max-handle"),
        ("[replica]\nmemory_mib = 9\n", "memory", "MiB"),
        ('[replica]\ncalibration_prompts = "/nowhere.txt"\n', "replica", "/nowhere.txt"),
        ('[replica]\nscaffold = ["/nowhere.txt"]\n', "replica", "/nowhere.txt"),
        ('[dispatcher]\nkey = "/nowhere.key"\n', "dispatcher", "/nowhere.key"),
        (f'[dispatcher]\nfront = "ipc:///{"x" * 120}/f"\n', "dispatcher", "107"),
        ('[dispatcher]\nfront = "tcp://0.0.0.0:5000"\n', "dispatcher", "key"),
        ('[fleet]\nmodel = "/nowhere.tinyloop"\n', "model", "/nowhere.tinyloop"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named(
    text: str, subject: str, part: str, capsys: pytest.CaptureFixture[str], config: Any
) -> None:
    found = faults(capsys, "--config", config(text))
    assert part in found[subject]


def test_a_key_that_others_can_read_is_a_fault(
    capsys: pytest.CaptureFixture[str], config: Any, tmp_path: Path
) -> None:
    path, public = keys.create("d", tmp_path)
    text = f'[dispatcher]\nfront = "tcp://127.0.0.1:5000"\nkey = "{path}"\n[tenants.a]\nkeys = ["{public}"]\n'
    assert not faults(capsys, "--config", config(text))
    path.chmod(0o644)
    assert "chmod 600" in faults(capsys, "--config", config(text))["dispatcher"]


def test_a_file_that_cannot_be_read_is_no_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", "/nowhere.toml"]) == 78
    assert "/nowhere.toml" in capsys.readouterr().err


def test_the_replicas_are_those_of_the_configuration(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    path = config("[fleet]\nreplicas = 3\n[load]\n")
    for flags, count in ((), 3), (("--replicas", "5"), 5):
        _, found = diagnosis(capsys, "--config", path, *flags)
        (said,) = [each["text"] for each in found if each["subject"] == "cores"]
        assert said.startswith(f"{count} replicas")


def test_more_threads_than_cores_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = diagnosis(capsys, "--replicas", "2", "--threads", "999")
    (said,) = [each for each in found if each["subject"] == "cores"]
    assert status == 0 and said["level"] == "warning" and said["remedy"]


# ------------------------------------------------------------------ services


def levels(path: str, root: Path) -> list[tuple[str, str]]:
    return [(each.level, each.text) for each in services.findings(path, root)]


def test_installed_units_are_compared_with_the_configuration(config: Any, tmp_path: Path) -> None:
    root, path = tmp_path / "root", config(FLEET)
    ((level, text),) = levels(path, root)
    assert level == "ok" and "not installed" in text
    systemd.render(path, root)
    assert levels(path, root) == [("ok", "the installed units are those of the configuration")]
    config(FLEET + "replicas = 5\n")
    ((level, text),) = levels(path, root)
    assert level == "warning" and "tinyloop.target" in text and "fleet.toml" in text
    config(FLEET)
    (root / "etc/tinyloop/replica.env").write_text("# threads\nTINYLOOP_THREDS=2\n")
    assert [level for level, _ in levels(path, root)] == ["ok", "fault"]
    config(FLEET.replace('"root"', '"nobody-of-this-name"'))
    assert ("fault", "no user nobody-of-this-name") in levels(path, root)


def test_a_unit_that_failed_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text("#!/bin/sh\nprintf 'active\\nfailed\\ninactive\\n'; exit 3\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = list(services._states(["a", "b", "c"]))
    assert [each.level for each in found] == ["ok", "fault", "warning"]
    assert "journalctl -u b" in found[1].remedy
