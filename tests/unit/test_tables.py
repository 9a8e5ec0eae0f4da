"""One configuration file for a whole fleet. Catches: a setting that is written down and does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyloop_serve.deploy import cli, fleet, systemd, tables
from tinyloop_serve.deploy.plan import Plan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What `tinyloop up` would run; nothing is started."""
    made: list[Plan] = []

    class Recorded:
        def __init__(self, plan: Plan) -> None:
            made.append(plan)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(fleet, "Fleet", Recorded)
    return made


def test_up_serves_what_the_fleet_table_says_and_a_flag_wins(plans: list[Plan], tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[fleet]\nmodel = "/srv/m.tinyloop"\nreplicas = 3\ndevices = "cuda:0,cuda:1"\n')
    assert cli.main(["up", "--config", str(path)]) == 0
    flags = ["--model", "n.tinyloop", "--replicas", "4", "--devices", "cuda:2"]
    assert cli.main(["up", "--config", str(path), *flags]) == 0
    assert [(plan.model, plan.replicas, plan.devices) for plan in plans] == [
        ("/srv/m.tinyloop", 3, ("cuda:0", "cuda:1")),
        ("n.tinyloop", 4, ("cuda:2",)),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[replicas]\n", "[replicas] is not accepted; expected one of [dispatcher], [tenants], [replica]"),
        ("tenant.a.weight = 2\n", "[tenant] is not accepted"),
        ("replica = 2\n", "replica: 2 is not accepted; expected a [replica] table"),
        ("[fleet]\ncopies = 2\n", "fleet.copies: 2 is not accepted; expected one of model, replicas"),
        ('[fleet]\nmodel = "m"\n', "fleet.model: 'm' is not accepted; expected an absolute path"),
        ('[fleet]\ndevices = "gpu 0"\n', "fleet.devices: 'gpu 0' is not accepted"),
        ("[dispatcher]\nmax_wait_m = 5\n", "max_wait_m: 5 is not accepted; expected one of batch_sizes"),
        ("[tenants.a]\nweight = -1\n", "tenants.a.weight: -1 is not accepted"),
        ("[replica]\nmemory = 1\n", "replica: --memory: not accepted; expected one of --affinity, --calibr"),
        ("[replica]\nmax_handles = -1\n", "--max-handles"),
        (
            '[replica]\nmodel = "m"\n',
            "fleet.toml: replica.model: 'm' is not accepted; expected [fleet] model",
        ),
        (
            '[replica]\ndevice = "cuda:0"\n',
            "replica.device: 'cuda:0' is not accepted; expected [fleet] devices",
        ),
        (
            "[replica]\ndevice_share = 2\n",
            "replica.device_share: 2 is not accepted; expected [fleet] devices",
        ),
        (
            '[replica]\nendpoint = "ipc:///r"\n',
            "replica.endpoint: 'ipc:///r' is not accepted; expected [fleet] f",
        ),
        ('[replica]\nname = "r"\n', "replica.name: 'r' is not accepted; expected no such key"),
        ("[replica]\ndie-with-parent = 1\n", "replica.die-with-parent: 1 is not accepted"),
        ("nonsense[", "fleet.toml: not TOML"),
    ],
)
def test_up_refuses_a_slip_before_anything_starts(
    plans: list[Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    assert cli.main(["up", "--config", str(path)]) == 78 and not plans
    assert named in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none.toml")
    assert cli.main(["up", "--config", path]) == 78
    assert capsys.readouterr().err == f"tinyloop: {path}: No such file or directory\n"


def test_units_are_not_made_of_a_table_that_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[fleet]\nmodel = "/srv/m.tinyloop"\n[dispatchr]\n')
    with pytest.raises(tables.BadConfig, match=r"\[dispatchr\] is not accepted"):
        systemd.rendered(str(path))
