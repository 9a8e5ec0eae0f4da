"""The dispatcher's configuration. Catches: a bad value that is accepted, or refused without saying why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.dispatcher.config import Config, load, parse
from tinyloop_serve.dispatcher.readers import ConfigError

FRONT, REPLICA = "ipc:///run/x/front.sock", "ipc:///run/x/r0.sock"
BASE: dict[str, object] = {"front": FRONT, "replicas": [REPLICA]}


def test_flags_alone() -> None:
    config = parse(["--front", FRONT, "--replica", REPLICA, "--replica", "tcp://127.0.0.1:5000"])
    assert config == Config(FRONT, (REPLICA, "tcp://127.0.0.1:5000"))


def test_flags_win_over_the_file_and_other_tables_are_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'[dispatcher]\nfront = "{FRONT}"\nreplicas = ["{REPLICA}"]\nbatch_sizes = [8, 2]\nmax_wait_ms = 3\n'
        "[replica]\nanything = 1\n"
    )
    config = parse(["--config", str(file), "--max-wait-ms", "7.5", "--max-tokens-bands", "64, 16"])
    assert (config.batch_sizes, config.max_wait_ms, config.max_tokens_bands) == ((2, 8), 7.5, (16, 64))


KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # an example key of ZeroMQ RFC 26

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_sizes": [0, 2]}, "batch_sizes[0]", "from 1"),
    ({"batch_sizes": []}, "batch_sizes", "at least one"),
    ({"batch_sizes": [2, 2]}, "batch_sizes", "differ"),
    ({"batch_sizes": 4}, "batch_sizes", "a list"),
    ({"batch_sizes": "2,four"}, "batch_sizes[1]", "whole number"),
    ({"min_batch_size": 9}, "min_batch_size", "at most 8"),
    ({"min_batch_size": True}, "min_batch_size", "whole number"),
    ({"max_wait_ms": -1}, "max_wait_ms", "from 0"),
    ({"max_wait_ms": float("nan")}, "max_wait_ms", "a number"),
    ({"max_waiting": 2.5}, "max_waiting", "whole number"),
    ({"loss_ms": 100}, "loss_ms", "more than heartbeat_ms = 250"),
    ({"cache_modes": [""]}, "cache_modes[0]", "one of fp16, int8"),
    ({"features": ["flying"]}, "features[0]", "one of beam"),
    ({"poison_losses": 0}, "poison_losses", "from 1"),
    ({"replica_keys": ["short"]}, "replica_keys[0]", "Z85"),
    ({"replica_keys": [KEY, KEY.upper()], "replicas": [REPLICA]}, "replica_keys", "one key for all"),
    ({"tenants": {"a": {"wait": 1}}}, "tenants.a.wait", "weight"),
    ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight", "from 0.001"),
    ({"tenants": {"a": {"keys": ["x"]}}}, "tenants.a.keys[0]", "Z85"),
    ({"tenants": {"a": {"keys": [KEY]}, "b": {"keys": [KEY]}}}, "tenants.b.keys", "not also of tenant 'a'"),
    ({"tenants": {"a": {"admin": "yes"}}}, "tenants.a.admin", "true or false"),
    ({"tenants": {"a": 1}}, "tenants", "[tenants.NAME]"),
    ({"max_waitms": 3}, "max_waitms", "max_wait_ms"),
    ({"front": "tcp://0.0.0.0:5555"}, "front", "loopback"),
    ({"front": "tcp://*:5555"}, "front", "loopback"),
    ({"front": "tcp://example.org:5555"}, "front", "loopback"),
    ({"front": "tcp://127.0.0.1:http"}, "front", "port"),
    ({"front": "ipc://relative"}, "front", "absolute"),
    ({"front": "ipc:///" + "x" * 107}, "front", "107 bytes"),
    ({"front": "inproc://x"}, "front", "ipc:///"),
    ({"front": 5}, "front", "ipc:///"),
    ({"replicas": ["tcp://10.0.0.1:1"]}, "replicas[0]", "loopback"),
    ({"replicas": [FRONT]}, "replicas", "other than front"),
    ({"http": "9190"}, "http", "HOST:PORT"),
    ({"http": "127.0.0.1:65536"}, "http", "HOST:PORT"),
    ({"http": 9190}, "http", "HOST:PORT"),
]


@pytest.mark.parametrize("change, field, accepted", BAD)
def test_a_bad_value_names_field_value_and_what_is_accepted(
    change: dict[str, Any], field: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE | change)
    assert caught.value.field == field and accepted in caught.value.accepted
    assert field in str(caught.value) and caught.value.accepted in str(caught.value)


@pytest.mark.parametrize("missing", ["front", "replicas"])
def test_endpoints_have_no_default(missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value for name, value in BASE.items() if name != missing})
    assert caught.value.field == missing


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://[::1]:5555", "tcp://localhost:0", FRONT])
def test_endpoints_that_stay_on_the_machine(endpoint: str) -> None:
    assert load(BASE | {"front": endpoint}).front == endpoint


@pytest.mark.parametrize("text", [None, "front = ", "dispatcher = 5"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "fleet.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)])
    assert caught.value.field == "config"


def test_an_unknown_flag_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="--nope"):
        parse(["--nope"])


def test_with_a_key_tcp_may_leave_the_machine() -> None:
    config = load(BASE | {"front": "tcp://0.0.0.0:5555", "key": "/etc/tinyloop/dispatcher.secret"})
    assert config.front == "tcp://0.0.0.0:5555"


def test_tenants_are_known_by_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'[dispatcher]\nfront = "{FRONT}"\nreplicas = ["{REPLICA}"]\n'
        f"[tenants.search]\nkeys = ['{KEY}']\nweight = 3\nadmin = true\n[tenants.local]\nmax_waiting = 5\n"
    )
    tenants = parse(["--config", str(file)]).tenants
    assert tenants.named_by(KEY) == "search" and tenants.named_by("other") is None
    assert (tenants.of("search").weight, tenants.of("search").admin) == (3.0, True)
    assert (tenants.of("local").max_waiting, tenants.of("local").admin) == (5, False)
    assert tenants.of("unheard of").weight == 1.0 and not tenants.of("unheard of").admin
