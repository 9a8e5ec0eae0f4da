"""The command line without a fleet: what flags become, how commands end, where sockets are, when children
restart."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.deploy import ask, cli, endpoints, outcome, report
from tinyloop_serve.deploy.chat_template import render
from tinyloop_serve.deploy.children import (
    ATTEMPTS,
    BREAKER_S,
    EXIT_CONFIG,
    LONGEST_DELAY_S,
    NEVER,
    START_S,
    WATCHDOG_S,
    Child,
    Restarts,
)
from tinyloop_serve.deploy.connect import connect
from tinyloop_serve.deploy.outcome import CommandFault
from tinyloop_serve.deploy.plan import Plan
from tinyloop_serve.native import errors as native
from tinyloop_serve.protocol import errors as protocol
from tinyloop_serve.protocol.messages import BucketStatus, ModelInfo, ReplicaStatus, Status


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose path leaves room for a socket's, and no other place for one."""
    monkeypatch.delenv("TINYLOOP_ENDPOINT", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


# ------------------------------------------------------------------ flags


def test_flags_become_options_and_what_is_left_out_stays_the_protocols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def generate(*arguments: Any, **named: Any) -> int:
        calls.append((*arguments, named))
        return 0

    monkeypatch.setattr(ask, "generate", generate)
    monkeypatch.setenv("TINYLOOP_ENDPOINT", "ipc:///run/x/front.sock")
    assert cli.main(["generate", "The definition of"]) == 0
    assert calls.pop() == ("ipc:///run/x/front.sock", "The definition of", None, {}, {"as_json": False})
    flags = (
        "generate --endpoint ipc:///e --loops 4 --max-tokens 9 --seed 18446744073709551615 --temperature 0.5"
        " --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --stop a --stop b --ignore-eos"
        " --cache-mode fp16 --deadline-s 2.5 --json --chat --system S Q"
    )
    assert cli.main(flags.split()) == 0
    options = {
        **{"loops": 4, "max_tokens": 9, "seed": 2**64 - 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9},
        **{"min_p": 0.1, "repetition_penalty": 1.1, "stop": ["a", "b"], "ignore_eos": True},
        **{"cache_mode": "fp16", "deadline_s": 2.5},
    }
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert calls.pop() == ("ipc:///e", "Q", messages, options, {"as_json": True})


def test_text_can_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def generate(endpoint: str, text: str, *_: Any, **__: Any) -> int:
        texts.append(text)
        return 0

    monkeypatch.setattr(ask, "generate", generate)
    monkeypatch.setattr("sys.stdin.read", lambda: "from a pipe\n", raising=False)
    assert cli.main(["generate", "-"]) == 0
    assert texts == ["from a pipe\n"]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "nonsense",
        "generate",
        "generate a --loops x",
        "up --replicas 0",
        "generate a --loop 3",
        "convert a",
    ],
)
def test_wrong_usage_exits_2(flags: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(flags.split())
    assert ended.value.code == outcome.USAGE


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("convert /none/a b", "/none/a: No such file or directory"),
        ("generate --system S Q", "--system: a message of a conversation; expected with --chat"),
    ],
)
def test_what_cannot_be_done_as_given_is_named_and_exits_2(
    flags: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(flags.split()) == outcome.USAGE
    assert capsys.readouterr().err == f"tinyloop: {told}\n"


def test_a_file_is_named_in_json_as_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "/none/a", "b", "--json"]) == outcome.USAGE
    message = "/none/a: No such file or directory"
    assert json.loads(capsys.readouterr().out) == {"error": {"code": "command", "message": message}}


def test_help_documents_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    for status in (outcome.FAILED, outcome.USAGE, outcome.UNAVAILABLE, outcome.TRY_LATER, outcome.CONFIG):
        assert f"\n  {status} " in shown
    assert f"\n  {outcome.INTERRUPTED} " in shown


def test_the_command_starts_without_what_it_does_not_need() -> None:
    code = """
import sys
from tinyloop_serve.deploy.cli import main
try:
    main(["--version"])
finally:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tinyloop ")
    loaded = set(done.stdout.split())
    assert not loaded & {
        "zmq",
        "msgspec",
        "numpy",
        "tokenizers",
        "tinyloop_serve.native",
        "jinja2",
        "subprocess",
    }


# ------------------------------------------------------------------ how commands end


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (protocol.ConnectFailed("nobody"), 69),
        (protocol.AuthError("key"), 69),
        (protocol.ProtocolError("version"), 1),
        (protocol.Overloaded("full"), 75),
        (protocol.Unavailable("none"), 75),
        (protocol.DeadlineExceeded("late"), 75),
        (protocol.LimitExceeded("long", field="max_tokens", value="9", accepted="1 to 5"), 2),
        (protocol.InvalidRequest("bad"), 2),
        (protocol.ReplicaLost("gone"), 1),
        (protocol.EngineFailed("broke"), 1),
        (native.ArtifactError("bad", field="config.loops", value=-1), 78),
        (native.BackendUnavailable("no gpu"), 78),
        (CommandFault("no template"), 2),
        (FileNotFoundError("no file"), 2),
        (OSError("disk full"), 1),
        (endpoints.UnsafeDirectory("open"), 78),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_error_is_one_message_and_one_status(
    error: BaseException, status: int, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with outcome.reported(as_json=as_json) as result:
        raise error
    assert result.status == status  # type: ignore[unreachable]
    shown = capsys.readouterr()
    assert str(error) in shown.err and "Traceback" not in shown.err
    assert ("tinyloop up" in shown.err) == (status == 69)
    if as_json and status != 130:
        described = json.loads(shown.out)["error"]
        assert described["message"] == str(error)
        if isinstance(error, protocol.LimitExceeded):
            assert described == {
                **{"code": "limit", "message": "long", "field": "max_tokens"},
                **{"value": "9", "accepted": "1 to 5"},
            }
    else:
        assert shown.out == ""


def test_our_own_mistakes_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), outcome.reported(as_json=False):
        raise ZeroDivisionError


# ------------------------------------------------------------------ where sockets are


def test_client_and_fleet_agree_on_a_private_place(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoints.runtime_directory() == f"{short_tmp}/tinyloop-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    assert endpoints.default_endpoint() == f"ipc://{short_tmp}/tinyloop/front.sock"
    monkeypatch.setenv("TINYLOOP_ENDPOINT", "tcp://127.0.0.1:5000")
    assert endpoints.default_endpoint() == "tcp://127.0.0.1:5000"


def test_a_path_too_long_for_a_socket_is_not_taken(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = short_tmp / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    for base in (endpoints.runtime_directory(), endpoints.replica_directory("ipc:///e")):
        assert base.startswith(f"{short_tmp}/tinyloop-")
    longest = f"{endpoints.replica_directory('ipc:///e')}/replica-999.sock"
    assert len(longest) <= endpoints.IPC_PATH_BYTES
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert endpoints.runtime_directory().startswith("/")


def test_a_directory_that_others_can_open_is_refused(short_tmp: Path) -> None:
    directory = endpoints.runtime_directory()
    endpoints.check_private(directory)  # missing is fine
    endpoints.make_private(directory)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    os.chmod(directory, 0o750)
    with pytest.raises(endpoints.UnsafeDirectory, match="0700"):
        endpoints.make_private(directory)
    with pytest.raises(endpoints.UnsafeDirectory):
        connect(endpoints.default_endpoint())
    os.rename(directory, short_tmp / "elsewhere")
    os.chmod(short_tmp / "elsewhere", 0o700)
    os.symlink(short_tmp / "elsewhere", directory)
    with pytest.raises(endpoints.UnsafeDirectory):
        endpoints.check_private(directory)


def test_a_private_directory_of_somebody_else_is_not_used(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints.make_private(f"{short_tmp}/mine")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(endpoints.UnsafeDirectory, match="this user alone"):
        endpoints.check_private(f"{short_tmp}/mine")


def test_nobody_there_is_said_at_once(short_tmp: Path) -> None:
    path = short_tmp / "front.sock"
    with pytest.raises(protocol.ConnectFailed, match="No such file"):
        connect(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(protocol.ConnectFailed, match="refused"):
        connect(f"ipc://{path}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(protocol.ConnectFailed):
        connect(f"tcp://127.0.0.1:{port}")
    with pytest.raises(protocol.InvalidRequest, match="endpoint"):
        connect("nonsense")


# ------------------------------------------------------------------ children


def test_restarts_back_off_and_forgive() -> None:
    restarts = Restarts()
    delays = [restarts.died(-9, ready_for_s=1.0) for _ in range(9)]
    assert delays == [0.25, 0.5, 1, 2, 4, 8, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]
    assert restarts.died(1, ready_for_s=60.0) == 0.25
    assert {restarts.died(-9, ready_for_s=1.0) for _ in range(2000)} >= {LONGEST_DELAY_S}


def test_a_child_that_never_becomes_ready_opens_the_breaker() -> None:
    assert Restarts().died(EXIT_CONFIG, ready_for_s=None) is None
    restarts = Restarts()
    delays = [restarts.died(1, ready_for_s=None) for _ in range(ATTEMPTS)]
    assert max(delay or 0.0 for delay in delays[:-1]) < BREAKER_S and delays[-1] == BREAKER_S
    assert restarts.broken and restarts.died(1, ready_for_s=None) == BREAKER_S
    assert (restarts.died(1, ready_for_s=1.0) or 99.0) < BREAKER_S and not restarts.broken


def test_a_child_is_read_until_ready_and_says_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(
        "import os, socket, sys, time\nprint('first')\nprint('READY name=x startup_ms=12', flush=True)\n"
        "sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "sign.sendto(b'WATCHDOG=1\\nSTATUS=x', os.environ['NOTIFY_SOCKET'])\n"
        "print('last', file=sys.stderr)\ntime.sleep(60)\n"
    )
    child = Child("x", ["talker"], str(tmp_path / "signs"))
    child.listen()
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        child.start(1.0)
    finally:
        os.chdir(before)
    assert child.silent_until == 1.0 + START_S, "nor may it start for ever"
    lines: list[str] = []
    while "last" not in lines:
        lines += child.read(now=5.0)[0]
    assert lines == ["first", "last"]
    assert child.silent_until == 5.0 + WATCHDOG_S, "from READY on it owes signs of life"
    child.read_signs(6.5)
    assert child.silent_until == 6.5 + WATCHDOG_S
    child.excuse(8.0)
    assert child.silent_until == 8.0 + WATCHDOG_S
    assert child.ready_field("startup_ms") == "12" and child.ready_field("nothing") == ""
    assert os.getsid(child.pid) == child.pid  # Ctrl-C in our terminal does not reach it
    assert not child.reap(6.0)
    child.signal(signal.SIGKILL)
    while not child.reap(7.0):
        pass
    assert child.how_it_ended() == "was killed by SIGKILL"
    assert child.start_at == 7.25 and not child.running and child.silent_until == NEVER
    child.close()
    assert not (tmp_path / "signs").exists()


def test_threads_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert Plan("m", "e", replicas=cores * 2).threads_each() == 1
    assert Plan("m", "e", replicas=1).threads_each() == cores
    assert Plan("m", "e", threads=3).threads_each() == 3


# ------------------------------------------------------------------ chat templates


def test_a_chat_template_is_rendered_as_its_authors_meant() -> None:
    pytest.importorskip("jinja2")
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    <|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = [{"role": "user", "content": " hi <|end|> "}]
    assert render(template, messages) == "    <|user|>hi <|end|><|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / messages }}",
    ],
)
def test_a_hostile_or_broken_template_is_a_fault_of_the_command(template: str) -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(CommandFault, match="chat template failed"):
        render(template, [])


def test_without_jinja2_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(CommandFault, match="pip install jinja2"):
        render("x", [])


# ------------------------------------------------------------------ reports


def test_status_is_shown_as_a_table() -> None:
    model = ModelInfo("demo", "f" * 32, 4096, 8, 16, 512, parameters=4_200_000)
    replicas = (
        ReplicaStatus("r0", "ipc:///r0", "busy", 10, 2, 5, 99, 40_000_000, 120),
        ReplicaStatus("", "ipc:///r1", "lost", error="the connection was closed"),
    )
    buckets = (BucketStatus("loops=4 max_tokens<=32", 3, 12),)
    lines = list(
        report.describe_status(
            "ipc:///e", Status("s", "0.1.0", 5000, model, replicas, buckets, 3, 2, 5, 1, 4)
        )
    )
    shown = "\n".join(lines)
    assert "4.2M parameters" in shown and "8 loops (at most 16)" in shown
    assert "2 running, 3 waiting, 5 finished, 1 failed; 4 clients" in shown
    columns = [line.split() for line in lines]
    assert ["r0", "busy", "10", "2", "5", "40", "MB", "0.1", "s", "ago"] in columns
    assert "the connection was closed" in shown and "loops=4 max_tokens<=32" in shown
    nothing = Status("s", "", 0, None, (), (), 0, 0, 0, 0, 0)
    assert any("no replica is ready" in line for line in report.describe_status("ipc:///e", nothing))


def test_a_fleet_that_cannot_fit_its_weights_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    from tinyloop_serve.deploy.plan import Plan, lacking_memory

    model = tmp_path / "big.tinyloop"
    with model.open("wb") as file:
        file.truncate(300 << 20)  # sparse
    plan = Plan(model=str(model), endpoint="ipc:///unused", replicas=3)
    assert lacking_memory(plan, available=1 << 30) == ""
    assert lacking_memory(dataclasses.replace(plan, weights="int4"), available=800 << 20) == "", (
        "less than the file"
    )
    lack = lacking_memory(plan, available=800 << 20)
    assert "3 replicas x 300 MiB of weights + 0 MiB shared = 900 MiB" in lack
    assert "800 MiB of memory are free" in lack


def test_weights_that_replicas_share_are_counted_once(tmp_path: Path) -> None:
    from tinyloop_serve.deploy.plan import Plan, lacking_memory

    entries = {
        "a": {"dtype": "F16", "shape": [4, 1 << 18, 16], "data_offsets": [0, 32 << 20]},
        "b": {"dtype": "F16", "shape": [2, 1 << 20], "data_offsets": [32 << 20, 36 << 20]},
        "c": {"dtype": "F16", "shape": "wide", "data_offsets": None},
    }
    header = json.dumps(entries).encode()
    model = tmp_path / "model.tinyloop"
    with model.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(36 << 20)
    plan = Plan(model=str(model), endpoint="ipc:///unused", replicas=3)
    assert lacking_memory(plan, available=45 << 20) == ""
    lack = lacking_memory(plan, available=43 << 20)
    assert "3 replicas x 4 MiB of weights + 32 MiB shared = 44 MiB" in lack
