"""The operator's commands against a real fleet: drains, replicas that leave and come, a new model file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Fleet, fleet_of
from tinyloop_serve.native import demo_model_path

pytestmark = pytest.mark.integration

PROMPT = "The definition of"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file that the tests below may change."""
    path = tmp_path_factory.mktemp("models") / "fleet.tinyloop"
    shutil.copy(demo_model_path(), path)
    return path


@pytest.fixture(scope="module")
def own_fleet(model: Path) -> Iterator[Fleet]:
    with fleet_of("--replicas", "2", "--model", str(model)) as fleet:
        yield fleet


def answer(done: Any, status: int = 0) -> Any:
    """The one JSON object that a command printed."""
    assert done.returncode == status, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def change(fleet: Fleet, model: Path, max_loops: int) -> str:
    """Puts another model in its place; returns the fingerprint."""
    flags = ("--max-loops", str(max_loops), "--no-beta", "--json")
    made = answer(fleet.run("convert", str(model), f"{model}.new", *flags))
    os.replace(f"{model}.new", model)
    return str(made["fingerprint"])


# ------------------------------------------------------------------ orders


def test_a_drain_waits_for_its_requests_and_resume_ends_it(
    own_fleet: Fleet, reference: Any, eventually: Any
) -> None:
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0}
    with own_fleet.client() as client:
        stream = client.stream(PROMPT, **options)
        next(stream)
        (busy,) = [replica for replica in own_fleet.status().replicas if replica.running]
        did = answer(own_fleet.run("drain", busy.name, "--wait", "--within", "0.2", "--json"))
        assert did["action"] == "drain" and did["replica"] == busy.name and did["waited"] is True
        drained = own_fleet.replica(busy.name)
        assert drained.running == 0 and drained.state == "draining"
        tokens = stream.result().tokens
        assert list(tokens) == reference.tokens(PROMPT, **options), "it ended well, here or elsewhere"
    back = own_fleet.run("resume", busy.endpoint)
    assert back.returncode == 0 and "in rotation" in back.stdout
    assert own_fleet.replica(busy.name).state == "ready"


def test_a_replica_is_detached_and_attached_again(own_fleet: Fleet, eventually: Any) -> None:
    endpoint = own_fleet.replica("replica-1").endpoint
    shown = own_fleet.run("detach", "replica-1", "--wait")
    assert shown.returncode == 0 and "it has none left" in shown.stdout
    eventually(lambda: [each.name for each in own_fleet.status().replicas] == ["replica-0"])
    assert answer(own_fleet.run("attach", endpoint, "--json"))["replica"] == endpoint
    own_fleet.wait_all_ready()
    assert own_fleet.replica("replica-1").endpoint == endpoint


@pytest.mark.parametrize("command", ["drain", "resume", "detach"])
def test_an_order_to_nobody_names_those_there_are(own_fleet: Fleet, command: str) -> None:
    error = answer(own_fleet.run(command, "replica-9", "--json"), status=2)["error"]
    assert error["field"] == "target" and "replica-0" in error["accepted"]


def test_an_order_without_a_fleet_is_told_so(own_fleet: Fleet) -> None:
    nowhere = f"ipc://{own_fleet.directory}/nobody.sock"
    for command in (["drain", "replica-0"], ["reload"]):
        error = answer(own_fleet.run(*command, "--endpoint", nowhere, "--json"), status=69)["error"]
        assert error["code"] == "connect"


# ------------------------------------------------------------------ a new model file


def test_a_changed_model_file_comes_in_by_reload(own_fleet: Fleet, model: Path) -> None:
    fingerprint = change(own_fleet, model, 20)
    done = answer(own_fleet.run("reload", "--json"))
    assert done["reloaded"] is True and done["model"] == str(model)
    assert {each.fingerprint for each in own_fleet.status().replicas} == {fingerprint}
    again = own_fleet.run("reload")
    assert again.returncode == 0 and "already" in again.stdout
    good = model.rename(f"{model}.good")
    model.write_bytes(good.read_bytes()[:1000])
    refused = own_fleet.run("reload")
    assert refused.returncode == 1 and str(model) in refused.stderr and not refused.stdout
    assert answer(own_fleet.run("generate", "--json", "--max-tokens", "3", PROMPT))["tokens"]
    good.rename(model)


SYSTEMCTL = """#!{python}
import json, os, signal, subprocess, sys
if os.path.exists("{directory}/refuse"):
    sys.exit("Access denied")
assert sys.argv[1:3] == ["restart", "--no-block"], sys.argv
name = "replica-" + sys.argv[3].removeprefix("tinyloop-replica@").removesuffix(".service")
status = subprocess.check_output([sys.executable, "-m", "tinyloop_serve.deploy.cli", "status", "--json"])
pid = next(each["pid"] for each in json.loads(status)["replicas"] if each["name"] == name)
os.kill(pid, signal.SIGTERM)
"""


def test_units_are_restarted_one_after_the_other(own_fleet: Fleet, model: Path, tmp_path: Path) -> None:
    """With a systemctl that restarts the replicas of this fleet, as systemd would."""
    (tmp_path / "systemctl").write_text(SYSTEMCTL.format(python=sys.executable, directory=tmp_path))
    (tmp_path / "systemctl").chmod(0o755)
    config = tmp_path / "fleet.toml"
    config.write_text(f'[fleet]\nmodel = "{model}"\nfront = "{own_fleet.endpoint}"\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    fingerprint = change(own_fleet, model, 24)
    command = ["reload", "--systemd", "--config", str(config), "--json"]
    (tmp_path / "refuse").touch()
    error = answer(own_fleet.run(*command, PATH=path), status=2)["error"]
    assert "Access denied" in error["message"] and "tinyloop-replica@" in error["message"]
    assert {each.state for each in own_fleet.status().replicas} == {"ready"}, "none stays drained"
    (tmp_path / "refuse").unlink()
    assert answer(own_fleet.run(*command, PATH=path))["reloaded"] is True
    assert {each.fingerprint for each in own_fleet.status().replicas} == {fingerprint}
