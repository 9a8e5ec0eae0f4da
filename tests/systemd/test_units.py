"""The unit files. Catches: a key that systemd does not know, a service less locked up than we say, a
configuration fault that is found only when the service starts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tinyloop_serve.deploy import systemd
from tinyloop_serve.deploy.tables import BadConfig
from tinyloop_serve.native import demo_model_path

FLEET = f'[fleet]\nmodel = "{demo_model_path()}"\nreplicas = 3\n'
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


def render(tmp_path: Path, text: str) -> Path:
    tmp_path.mkdir(exist_ok=True)
    config = tmp_path / "fleet.toml"
    config.write_text(text)
    systemd.render(str(config), tmp_path / "root")
    return tmp_path / "root"


VARIANTS = {
    "plain": FLEET,
    "cuda": FLEET + 'devices = "cuda:0,cuda:1"\n',
    "http": FLEET + '[dispatcher]\nhttp = "127.0.0.1:9190"\n',
    "tcp": FLEET + 'front = "tcp://0.0.0.0:5555"\n[dispatcher]\nkey = "/etc/tinyloop/keys/dispatcher.key"\n',
}


@needs_systemd
@pytest.mark.parametrize("variant", VARIANTS)
def test_systemd_knows_every_word(tmp_path: Path, variant: str) -> None:
    units = render(tmp_path, VARIANTS[variant]) / "etc/systemd/system"
    names = ["tinyloop.target", "tinyloop-dispatcher.service", "tinyloop-replica@0.service"]
    shutil.copy(units / "tinyloop-replica@.service", units / "tinyloop-replica@0.service")
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(units / name) for name in names)],
        capture_output=True,
        text=True,
        env={"SYSTEMD_UNIT_PATH": f"{units}:"},
        timeout=60,
    )
    assert checked.stdout + checked.stderr == "", "its exit status is 0 even for a misspelt key"


@needs_systemd
@pytest.mark.parametrize("unit", ["tinyloop-dispatcher.service", "tinyloop-replica@.service"])
def test_a_service_can_do_little_harm(tmp_path: Path, unit: str) -> None:
    path = render(tmp_path, FLEET) / "etc/systemd/system" / unit
    shown = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", shown)
    assert exposure and float(exposure.group(1)) <= 2.5, shown


def test_what_the_files_say(tmp_path: Path) -> None:
    root = render(
        tmp_path, FLEET + "[dispatcher]\ndrain_ms = 9000\n[replica]\nmax_handles = 3\ndrain_s = 4\n"
    )
    units = root / "etc/systemd/system"
    dispatcher = (units / "tinyloop-dispatcher.service").read_text()
    replica = (units / "tinyloop-replica@.service").read_text()
    target = (units / "tinyloop.target").read_text()
    for n in range(3):
        assert f"--replica ipc:///run/tinyloop/replica-{n}/replica.sock" in dispatcher
        assert f"tinyloop-replica@{n}.service" in target
    assert "TimeoutStopSec=14\n" in dispatcher and "TimeoutStopSec=9\n" in replica
    assert "LimitNOFILE=65536\n" in dispatcher and "LimitNOFILE=4096\n" in replica
    assert "--max-handles 3" in replica and "--drain-s 4" in replica
    for text in (dispatcher, replica, target):
        assert "<" not in text and ">" not in text, "every place was filled"
    assert "RestartPreventExitStatus=78" in dispatcher and "RestartPreventExitStatus=78" in replica
    assert (root / "usr/lib/sysusers.d/tinyloop.conf").read_text().startswith("u tinyloop ")


@pytest.mark.parametrize("variant", ["plain", "http", "tcp"])
def test_only_a_dispatcher_that_needs_it_sees_the_network(tmp_path: Path, variant: str) -> None:
    units = render(tmp_path, VARIANTS[variant]) / "etc/systemd/system"
    closed = "PrivateNetwork=yes\nRestrictAddressFamilies=AF_UNIX\nIPAddressDeny=any\n"
    assert closed in (units / "tinyloop-replica@.service").read_text()
    assert (closed in (units / "tinyloop-dispatcher.service").read_text()) == (variant == "plain")


def test_keys_come_as_credentials(tmp_path: Path) -> None:
    text = (render(tmp_path, VARIANTS["tcp"]) / "etc/systemd/system/tinyloop-dispatcher.service").read_text()
    assert "LoadCredential=dispatcher.key:/etc/tinyloop/keys/dispatcher.key" in text
    assert "--key %d/dispatcher.key" in text and "PrivateNetwork=no" in text


def test_every_replica_has_a_device_and_its_part_of_it(tmp_path: Path) -> None:
    units = render(tmp_path, VARIANTS["cuda"]) / "etc/systemd/system"
    service = (units / "tinyloop-replica@.service").read_text()
    assert "--device ${DEVICE} --device-share ${DEVICE_SHARE}" in service
    assert "PrivateDevices=no" in service and "MemoryDenyWriteExecute=no" in service
    for n, (device, share) in enumerate([("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]):
        of_unit = (units / f"tinyloop-replica@{n}.service.d" / "device.conf").read_text()
        assert of_unit == f"[Service]\nEnvironment=DEVICE={device} DEVICE_SHARE={share}\n"
    on_processor = render(tmp_path / "cpu", FLEET) / "etc/systemd/system"
    assert "--device" not in (on_processor / "tinyloop-replica@.service").read_text()
    assert not list(on_processor.glob("*.d"))


def test_an_interpreter_in_a_home_stays_within_reach(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/home/ada/.pyenv/bin/python3")
    for python, seen in ((tmp_path / "python", "read-only"), ("/usr/bin/env", "yes")):
        units = render(tmp_path, f'[fleet]\nmodel = "/srv/m.tinyloop"\npython = "{python}"\n')
        text = (units / "etc/systemd/system/tinyloop-dispatcher.service").read_text()
        assert f"ProtectHome={seen}\n" in text, "a link that leads into a home counts too"


@pytest.mark.parametrize(
    "text, named",
    [
        ("[fleet]\n", "fleet.model: missing"),
        ('[fleet]\nmodel = "relative"\n', "fleet.model: 'relative'"),
        (FLEET + "copies = 3\n", "fleet.copies"),
        (FLEET.replace("replicas = 3", "replicas = 0"), "fleet.replicas: 0"),
        (FLEET.replace("replicas = 3", 'replicas = "3"'), "fleet.replicas: '3'"),
        (FLEET + '[dispatcher]\nmax_wait_ms = "x"\n', "dispatcher.max_wait_ms"),
        (FLEET + "front = 'tcp://0.0.0.0:5555'\n", "front"),
        (FLEET + "devices = 'gpu 0'\n", "fleet.devices: 'gpu 0'"),
        (FLEET + "devices = 'cuda:0,cuda:0'\n", "fleet.devices: 'cuda:0,cuda:0'"),
        (FLEET + "devices = 'cuda:0,cuda:1,cuda:2,cuda:3'\n", "at most 3 devices"),
        ("no toml", "fleet.toml"),
    ],
)
def test_a_fault_is_named_before_anything_is_written(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(named)):
        render(tmp_path, text)
    assert not (tmp_path / "root").exists()
