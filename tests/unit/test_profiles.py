"""Every profile is accepted by all that reads it. Catches: a profile with a key that no process knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.load import mix
from tinyloop_serve.deploy import profiles, tables
from tinyloop_serve.deploy.commands import serving
from tinyloop_serve.deploy.systemd import render
from tinyloop_serve.deploy.tables import BadConfig
from tinyloop_serve.dispatcher import config as dispatcher
from tinyloop_serve.replica import config as replica


@pytest.mark.parametrize("name", profiles.names())
def test_a_profile_is_read_by_every_process(name: str, tmp_path: Path) -> None:
    path = Path(profiles.path(name))
    found = tables.read(str(path))
    assert set(found) == {"fleet", "dispatcher", "replica", "load"}
    read = dispatcher.read_file(path) | {"front": "ipc:///run/a.sock", "replicas": ["ipc:///run/b.sock"]}
    dispatcher.load(read)
    replica.parse(["--model", "m", "--endpoint", "ipc:///run/b.sock", *tables.replica_flags(found)])
    mix.read(path)
    assert tables.fleet_of(found).replicas >= 1
    with_model = tmp_path / "fleet.toml"
    with_model.write_text(path.read_text().replace("[fleet]", '[fleet]\nmodel = "/srv/model.tinyloop"'))
    assert render(str(with_model), tmp_path / "root")


def test_the_command_offers_all_of_them() -> None:
    assert sorted(serving.PROFILES) == profiles.names()


def test_a_name_or_a_count_that_is_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="profile: 'fast' is not accepted; expected one of bucketed, .*tiers"):
        profiles.path("fast")
    path = tmp_path / "fleet.toml"
    for count in ("-1", "true", '"two"', "2000"):
        path.write_text(f"[fleet]\nreplicas = {count}\n")
        with pytest.raises(BadConfig, match="fleet.replicas"):
            tables.fleet_of(tables.read(str(path)))
    path.write_text("[dispatcher]\n")
    assert tables.fleet_of(tables.read(str(path))).replicas == 0


def test_one_lane_to_a_batch_is_no_batch() -> None:
    path = Path(profiles.path("single"))
    read = dispatcher.read_file(path) | {"front": "ipc:///run/a.sock", "replicas": ["ipc:///run/b.sock"]}
    config = dispatcher.load(read)
    assert config.batch_sizes == (1,) and config.min_batch_size == 1
