"""`tinyloop keys` and `tinyloop handles`, and how a command finds its keys."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit import fake_dispatcher as fake
from tinyloop_serve.deploy import cli
from tinyloop_serve.protocol import keys


def test_keys_are_made_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    assert cli.main(["keys", "new", "alice", "--dir", str(directory)]) == 0
    public, path = capsys.readouterr().out.split()
    assert path == f"{directory}/alice.key" and keys.read_pair(path).public == public
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert cli.main(["keys", "new", "bob", "--dir", str(directory)]) == 0
    (directory / "bob.key").unlink()
    capsys.readouterr()
    assert cli.main(["keys", "list", "--dir", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{public}  alice" and lines[1].endswith("  bob  (public half only)")


def test_a_name_is_not_used_twice_and_a_directory_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cli.main(["keys", "list"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert cli.main(["keys", "new", "alice"]) == 0
    assert cli.main(["keys", "new", "alice"]) == 2
    assert "alice" in capsys.readouterr().err


def test_handles_are_shown_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    dispatcher = fake.FakeDispatcher(answer=fake.pool)
    where = ["--endpoint", dispatcher.endpoint]
    try:
        assert cli.main(["handles", *where]) == 0
        head, line = capsys.readouterr().out.splitlines()
        assert head.split()[:2] == ["handle", "kind"] and line.split()[:4] == ["h1", "prefix", "3", "8"]
        assert cli.main(["handles", "--json", *where]) == 0
        assert json.loads(capsys.readouterr().out)["handles"][0]["handle"] == "h1"
        assert cli.main(["handles", "--drop", "h1", *where]) == 0
        assert capsys.readouterr().out.startswith("dropped prefix h1")
        dispatcher.wait_for("DropHandle")
    finally:
        dispatcher.close()


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_command_finds_its_keys_by_flag_or_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_flag: bool
) -> None:
    public = {name: keys.create(name, tmp_path)[1] for name in ("server", "alice")}
    pair, users = keys.read_pair(tmp_path / "server.key"), {public["alice"]: "acme"}
    dispatcher = fake.FakeDispatcher(answer=fake.pool, pair=pair, users=users)
    given: dict[str, Any] = {"TINYLOOP_KEY": f"{tmp_path}/alice.key", "TINYLOOP_SERVER_KEY": public["server"]}
    for name, value in given.items():
        monkeypatch.setenv(name, "" if by_flag else value)  # also puts back what a flag sets
    flags = ["--key", given["TINYLOOP_KEY"], "--server-key", public["server"]] if by_flag else []
    try:
        assert cli.main(["handles", "--endpoint", dispatcher.endpoint, *flags]) == 0
        assert "h1" in capsys.readouterr().out and dispatcher.users == {"acme"}
    finally:
        dispatcher.close()
