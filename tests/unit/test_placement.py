"""Which replica runs on which device. Catches: a device that stays idle or is given away twice over."""

from __future__ import annotations

from typing import Any

import pytest

from tinyloop_serve.deploy import cli, report
from tinyloop_serve.deploy.placement import Place, named, placed
from tinyloop_serve.deploy.plan import Plan, replica_options
from tinyloop_serve.replica.config import Config, parse


def test_replicas_take_the_devices_in_turn() -> None:
    assert placed(2, named("cuda:0, cuda:1")) == [Place("cuda:0", 1), Place("cuda:1", 1)]
    shares = [(place.device, place.share) for place in placed(5, ["cuda:0", "cuda:1"])]
    assert shares == [("cuda:0", 3), ("cuda:1", 2), ("cuda:0", 3), ("cuda:1", 2), ("cuda:0", 3)]


@pytest.mark.parametrize(
    "devices",
    ["", "cuda:", "CUDA", "cuda 0", "a/b", "cuda:01", "cuda:0,cuda:0", "cuda,cuda:0", "cuda:0,cuda:1,cuda:2"],
)
def test_devices_that_cannot_be_given_out_are_refused(
    devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is not accepted; expected"):
        placed(2, named(devices))
    if devices:
        assert cli.main(["up", "--replicas", "2", "--devices", devices]) == 2
        assert "--devices: " in capsys.readouterr().err


def test_a_fleet_tells_its_replicas_where_they_are() -> None:
    def configured(n: int, **plan: Any) -> Config:
        return parse(["--endpoint", "ipc:///x/r.sock", *replica_options(Plan("m", "e", **plan))[n]])

    configs = [configured(n, replicas=3, devices=("cuda:0", "cuda:1")) for n in range(3)]
    places = [(config.device, config.device_share) for config in configs]
    assert places == [("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]
    assert configured(0).device == "cpu"
    assert configured(0, replica_flags=("--device", "cuda:3")).device == "cuda:3"


def test_devices_are_shown_with_the_reason_where_one_is_off() -> None:
    shown = report.describe_devices(
        [
            {"name": "cuda:0", "description": "NVIDIA H200", "reason": "", "total_bytes": 150_000_000_000},
            {"name": "cuda", "description": "", "reason": "no driver", "total_bytes": 0},
        ]
    )
    assert list(shown) == ["device cuda:0  NVIDIA H200, 150.0 GB", "device cuda    off: no driver"]
