"""The JSON of every command has the fields that docs/deploy.md lists, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Fleet
from tinyloop_serve.native import demo_model_path
from tinyloop_serve.protocol.messages import HandleInfo, Status

pytestmark = pytest.mark.integration

DOCUMENT = Path(__file__).parents[2] / "docs/deploy.md"
STATUS = {"endpoint"} | set(Status.__struct_fields__) - {"id"}


def documented() -> dict[str, str]:
    """The cell of fields, by command."""
    table = DOCUMENT.read_text().split("<!-- json -->")[1].split("<!-- /json -->")[0]
    rows = [line.strip("|").split("|") for line in table.strip().splitlines()[2:]]
    return {name: fields for names, fields in rows for name in re.findall(r"`([^`]+)`", names)}


def fields_of(cell: str) -> tuple[set[str], set[str]]:
    """Those of the object, and those of what its last field holds."""
    outer, _, inner = cell.partition(":")
    return set(re.findall(r"`(\w+)`", outer)), set(re.findall(r"`(\w+)`", inner))


def test_every_command_prints_what_is_documented(shared_fleet: Fleet, tmp_path: Path) -> None:
    cells = documented()
    seen = set[str]()

    def run(command: str, *arguments: str) -> Any:
        done = shared_fleet.run(*command.split(), *arguments, "--json")
        assert done.returncode == 0 or command == "doctor", done.stderr  # which judges this machine
        seen.add(command)
        return json.loads(done.stdout)

    def check(command: str, *arguments: str) -> None:
        found = run(command, *arguments)
        outer, inner = fields_of(cells[command])
        assert set(found) == outer, command
        if inner:
            assert {name for each in found[list(found)[-1]] for name in each} == inner, command

    check("generate", "--max-tokens", "2", "the")
    for order, target in (("drain", "replica-1"), ("resume", "replica-1"), ("detach", "replica-1")):
        check(order, target)
    check("attach", shared_fleet.status().replicas[0].endpoint.replace("replica-0", "replica-1"))
    check("reload")
    check("inspect", str(demo_model_path()))
    check("convert", str(demo_model_path()), f"{tmp_path}/made.tinyloop", "--no-beta")
    check("keys new", "alice", "--dir", str(tmp_path))
    check("keys list", "--dir", str(tmp_path))
    check("doctor")
    config = tmp_path / "fleet.toml"
    config.write_text(f'[fleet]\nmodel = "{demo_model_path()}"\n')
    check("deploy systemd", "--config", str(config), "--prefix", str(tmp_path / "root"))

    assert set(run("status")) <= STATUS
    top = run("top", "--interval", "0.1")
    assert set(top) - STATUS == set(re.findall(r"`(\w+)`", cells["top"])) - {"replicas"}
    with shared_fleet.client() as client:
        handle = client.create_prefix("the")
        (held,) = run("handles")["handles"]
        assert set(held) <= set(HandleInfo.__struct_fields__) and held["handle"] == handle.name
        assert run("handles --drop", handle.name)["dropped"]["handle"] == handle.name
    assert seen == set(cells)
