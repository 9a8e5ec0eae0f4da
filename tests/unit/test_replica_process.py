"""A replica as a process: flags, faults, start-up, what it imports, signals, and that it never outlives
its parent."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinyloop_serve.native import artifact, errors
from tinyloop_serve.native.tensors import Tensor
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_REPLICA
from tinyloop_serve.protocol.messages import VERSION, Hello, Ready
from tinyloop_serve.replica import __main__ as replica_process
from tinyloop_serve.replica.config import EXIT_CONFIG, Config, ConfigFault, parse

HEAVY = ("torch", "numpy", "psutil", "jinja2", "asyncio", "safetensors", "transformers", "prometheus_client")


def byte_level_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the definition of the word"] * 2, trainer)
    return str(tokenizer.to_str())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny.tinyloop", byte_level_tokenizer())


def write_model(path: Path, tokenizer: str) -> Path:
    config: dict[str, object] = {
        **{"vocab_size": 300, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "d_ffn": 64},
        **{"n_prelude": 1, "n_core": 1, "n_coda": 1, "loops": 2, "max_loops": 8, "max_seq_len": 128},
        **{"norm": "pre", "norm_eps": 1e-5, "injection": "add", "start": "prelude"},
        **{"rope": "half", "rope_theta": 10000.0, "tied_head": True},
        **{"bos_id": None, "eos_ids": [], "beta": None},
    }
    random = np.random.default_rng(0)
    tensors: dict[str, Tensor] = {
        name: random.normal(0, 0.2, shape).astype(np.float16)
        for name, shape in artifact.expected_tensors(artifact.complete_config(config)).items()
    }
    artifact.write(path, config, tensors, tokenizer=tokenizer)
    return path


class Started:
    """A replica started as production starts it."""

    def __init__(self, *flags: str, code: str = "") -> None:
        command = ["-c", code] if code else ["-m", "tinyloop_serve.replica"]
        self.process = subprocess.Popen(
            [sys.executable, *command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ready(self) -> dict[str, str]:
        """The fields of its READY line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("READY "), (line, self.end())
        return dict(word.split("=", 1) for word in line.split()[1:])

    def end(self) -> tuple[int, str]:
        """Exit status and standard error."""
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator[Started]:
    replica = Started("--model", str(model), "--endpoint", f"ipc://{tmp_path}/r.sock", "--threads", "1")
    yield replica
    replica.process.kill()
    replica.process.communicate()


def test_flags_become_the_configuration() -> None:
    assert parse(["--model", "m", "--endpoint", "ipc:///run/x/r7.sock"]) == Config(
        model="m", endpoint="ipc:///run/x/r7.sock", name="r7"
    )
    given = parse(
        "--model m --endpoint tcp://127.0.0.1:5000 --name a --threads 3 --max-seq-len 64 --device cpu"
        " --drain-s 0.5 --die-with-parent 12 --memory-mib 100 --max-handles 2 --speculation off"
        " --calibration-prompts p.txt --speculation-threshold 1.5 --stall-s 9 --device-share 3"
        " --scaffold a.txt --scaffold b.txt@4 --weights int8 --affinity 1-3".split()
    )
    assert given == Config(
        model="m",
        endpoint="tcp://127.0.0.1:5000",
        name="a",
        threads=3,
        max_seq_len=64,
        device="cpu",
        memory_mib=100,
        max_handles=2,
        scaffolds=("a.txt", "b.txt@4"),
        speculation="off",
        calibration_prompts="p.txt",
        speculation_threshold=1.5,
        drain_s=0.5,
        stall_s=9.0,
        parent=12,
        device_share=3,
        weights="int8",
        affinity="1-3",
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--endpoint ipc:///x", "--model"),
        ("--model m", "--endpoint"),
        ("--model m --endpoint ipc://relative", "--endpoint"),
        ("--model m --endpoint tcp://0.0.0.0:5000", "leaves this machine"),
        ("--model m --endpoint tcp://127.0.0.1:5000 --key k", "belong together"),
        ("--model m --endpoint ipc:///" + "x" * 107, "longer than 107"),
        ("--model m --endpoint ipc:///x --threads -1", "--threads"),
        ("--model m --endpoint ipc:///x --threads two", "--threads"),
        ("--model m --endpoint ipc:///x --drain-s nan", "--drain-s"),
        ("--model m --endpoint ipc:///x --device-share 0", "--device-share"),
        ("--model m --endpoint ipc:///x --mod m", "--mod"),
    ],
)
def test_a_wrong_flag_is_named(flags: str, named: str) -> None:
    with pytest.raises(ConfigFault, match=named):
        parse(flags.split())


@pytest.mark.parametrize(
    "fault", ["missing", "directory", "garbage", "tokenizer", "flag", "device", "weights", "affinity"]
)
def test_configuration_faults_exit_78_with_a_line_that_says_what(
    fault: str, model: Path, tmp_path: Path
) -> None:
    flags = {"--model": str(model), "--endpoint": f"ipc://{tmp_path}/r.sock"}
    if fault == "missing":
        flags["--model"] = str(tmp_path / "none.tinyloop")
    elif fault == "directory":
        flags["--model"] = str(tmp_path)
    elif fault == "garbage":
        flags["--model"] = str(tmp_path / "garbage.tinyloop")
        Path(flags["--model"]).write_bytes(b"\x00\x01\x02" * 100)
    elif fault == "tokenizer":
        flags["--model"] = str(write_model(tmp_path / "bad.tinyloop", '{"model": {"type": "none"}}'))
    elif fault == "flag":
        flags["--threads"] = "many"
    elif fault == "device":
        flags["--device"] = "abacus"
    elif fault == "weights":
        flags["--weights"] = "int3"
    elif fault == "affinity":
        flags["--affinity"] = "1000000"
    status, errors = Started(*(part for flag in flags.items() for part in flag)).end()
    assert status == EXIT_CONFIG
    line = errors.splitlines()[-1]
    assert line.startswith("tinyloop-replica: ") and "Traceback" not in errors
    shown = {
        "tokenizer": "tokenizer",
        "flag": "--threads",
        "device": "abacus",
        "weights": "int3",
        "affinity": "affinity: 1000000",
    }
    assert shown.get(fault, flags["--model"]) in line


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (errors.OutOfMemoryError("no memory for weights"), 1, "no memory for weights"),
        (MemoryError("none at all"), 1, "MemoryError: none at all"),
        (RuntimeError("can't start new thread"), 1, "can't start new thread"),
        (errors.ArtifactError("damaged"), EXIT_CONFIG, "damaged"),
    ],
)
def test_whatever_keeps_it_from_starting_its_supervisor_is_told(
    raised: Exception, status: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(replica_process.native, "Model", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(10)
        assert replica_process.main(["--model", "m", "--endpoint", f"ipc://{tmp_path}/r.sock"]) == status
        assert told in supervisor.recv(4096).decode()


def test_it_says_ready_and_stops_at_a_signal(started: Started) -> None:
    fields = started.ready()
    assert fields["name"] == "r" and fields["endpoint"].startswith("ipc:///")
    assert 0 < float(fields["startup_ms"]) < 20_000 and 5 < float(fields["rss_mb"]) < 500
    socket = Path(fields["endpoint"].removeprefix("ipc://"))
    assert socket.is_socket() and socket.stat().st_mode & 0o007 == 0
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == (0, "")
    assert not socket.exists()


def test_a_reader_of_its_errors_that_stopped_holds_up_nobody(started: Started) -> None:
    endpoint, errors = started.ready()["endpoint"], started.process.stderr
    assert errors is not None
    fcntl.fcntl(errors, fcntl.F_SETPIPE_SZ, 4096)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.rcvtimeo = 0, 20_000
        peer.connect(endpoint)
        for _ in range(500):
            peer.send_multipart([VERSION, b"nonsense"])
        peer.send_multipart(TO_REPLICA.encode(Hello("d")))
        assert isinstance(FROM_REPLICA.decode(peer.recv_multipart()), Ready)
    started.process.send_signal(signal.SIGTERM)
    status, said = started.end()
    assert status == 0 and said.count("refused a message: ") == 500, "the last ones are said before it ends"


def test_a_replica_keeps_to_its_processors(model: Path, tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    cpus = sorted(ours)[-2:]
    flags = ("--model", str(model), "--endpoint", f"ipc://{tmp_path}/r.sock")
    replica = Started(*flags, "--affinity", ",".join(map(str, cpus)))
    replica.ready()
    own = f"/proc/{replica.process.pid}/task"
    masks: list[set[int]] = []
    while sorted(map(len, masks)).count(1) < len(cpus):  # the decoding thread and the engine's, one each
        masks = [os.sched_getaffinity(int(task)) for task in os.listdir(own)]
    assert all(mask <= set(cpus) for mask in masks) and os.sched_getaffinity(0) == ours
    assert {frozenset(mask) for mask in masks if len(mask) == 1} == {frozenset([cpu]) for cpu in cpus}
    replica.process.send_signal(signal.SIGTERM)
    assert replica.end() == (0, "")


def test_an_endpoint_in_use_is_not_stolen(started: Started, model: Path) -> None:
    endpoint = started.ready()["endpoint"]
    status, errors = Started("--model", str(model), "--endpoint", endpoint).end()
    assert status == 1 and "another process serves" in errors


def test_it_imports_nothing_heavy(model: Path, tmp_path: Path) -> None:
    """Start-up and memory are bounded by what is imported; time itself is too noisy to assert."""
    code = """
        import os, signal, sys, threading
        from tinyloop_serve.replica.__main__ import main
        from tinyloop_serve.replica import server
        serve = server.Server.run
        def run(*arguments):
            print(*sorted(sys.modules))
            os.kill(os.getpid(), signal.SIGTERM)
            serve(*arguments)
        server.Server.run = run
        sys.exit(main(sys.argv[1:]))
    """
    replica = Started(
        *("--model", str(model), "--endpoint", f"ipc://{tmp_path}/r.sock"), code=textwrap.dedent(code)
    )
    replica.ready()
    assert replica.process.stdout is not None
    imported = set(replica.process.stdout.readline().split())
    assert replica.end() == (0, "")
    assert "tokenizers" in imported and "tinyloop_serve.native" in imported
    assert not imported & set(HEAVY)
    assert len(imported) < 250


def test_it_stops_when_its_parent_is_killed(model: Path, tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        flags = [*sys.argv[1:], "--die-with-parent", str(os.getpid())]
        child = subprocess.Popen([sys.executable, "-m", "tinyloop_serve.replica", *flags])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    parent = Started(
        *("--model", str(model), "--endpoint", f"ipc://{tmp_path}/r.sock"), code=textwrap.dedent(code)
    )
    assert parent.process.stdout is not None
    child = int(parent.process.stdout.readline())
    parent.ready()
    parent.process.kill()
    deadline = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.process.communicate()


def test_it_does_not_start_for_a_parent_that_is_gone(model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(model), "--endpoint", f"ipc://{tmp_path}/r.sock", "--die-with-parent", "1")
    assert Started(*flags).end() == (0, "")
    assert not (tmp_path / "r.sock").exists()


def test_a_process_knows_its_age_and_memory() -> None:
    code = "from tinyloop_serve.replica.process import age_ms; print(age_ms())"
    started = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert -20 <= age <= (time.monotonic() - started) * 1000 + 20
    grow = (  # in a process of its own: this one may have free memory to take it from
        "import os; from tinyloop_serve.replica.process import resident_bytes as now; before = now();"
        "ballast = bytearray(os.urandom(1 << 16) * 400); print(now() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", grow], capture_output=True, check=True).stdout)
    assert 20 << 20 < grown < 60 << 20


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not reaped yet does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
