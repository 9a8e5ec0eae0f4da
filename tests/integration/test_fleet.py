"""A fleet of real processes on the shipped model. Catches: tokens that depend on how a request was served, a
death that reaches more than its own requests or is not noticed, processes that outlive their parent.
Fixtures are in conftest.py.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.protocol.calls import Completion
from tinyloop_serve.protocol.errors import TinyLoopError
from tinyloop_serve.protocol.modes import CACHE_MODES

pytestmark = pytest.mark.integration

LOOPS = (2, 4, 8)
BANDS = (8, 36, 130)  # max_tokens: one in each of the dispatcher's first three bands
PROMPTS = ("The definition of", "In the beginning", "a kind of", "日本 and 😀", "And the LORD said", "the")
LOSS_S = 2.0  # within which the clients of a dead replica must know
LONG: dict[str, Any] = {"max_tokens": 300, "loops": 8, "ignore_eos": True}


def test_64_mixed_requests_give_what_each_gives_alone(shared_fleet: Any, reference: Any) -> None:
    """3 loop counts x 3 bands, greedy and sampled, with and without the end of text, all at once."""
    shapes = itertools.cycle(itertools.product(LOOPS, BANDS))
    requests: list[tuple[str, dict[str, Any]]] = []
    for number, (loops, max_tokens) in enumerate(itertools.islice(shapes, 64)):
        options: dict[str, Any] = {"loops": loops, "max_tokens": max_tokens - number % 3, "seed": number}
        options |= {"temperature": 0.9, "top_k": 40, "top_p": 0.95} if number % 4 == 3 else {}
        options |= {"ignore_eos": True} if number % 2 else {}
        requests.append((f"{PROMPTS[number % len(PROMPTS)]} {number}", options))

    def ask(request: tuple[str, dict[str, Any]]) -> tuple[str, Completion]:
        with client.stream(request[0], **request[1]) as stream:
            chunks = list(stream)
            assert [chunk.seq for chunk in chunks] == sorted(chunk.seq for chunk in chunks)
            return "".join(chunk.text for chunk in chunks), stream.result()

    with shared_fleet.client() as client, ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, requests))
    batches = set()
    for (prompt, options), (streamed, answer) in zip(requests, answers, strict=True):
        alone = reference.tokens(prompt, **options)
        assert list(answer.tokens) == alone, (prompt, options)
        assert answer.text == streamed == reference.text(alone)
        assert answer.stats.generated_tokens == len(alone) and answer.stats.loops == options["loops"]
        batches.add(answer.stats.batch_size)
    assert {answer.stats.replica for _, answer in answers} == {"replica-0", "replica-1"}
    assert max(batches) > 1, "nothing was batched"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_costs_no_token(
    fleet: Any, reference: Any, eventually: Any, number: signal.Signals
) -> None:
    """Killed, or stopped for good, in the middle of a stream, which then goes on at another."""
    prompt = "The definition of"
    others = [
        ("In the beginning", {"max_tokens": 60, "loops": 4, "seed": n, "temperature": 0.8}) for n in range(6)
    ]
    with fleet.client() as client, ThreadPoolExecutor(8) as pool:
        victim = client.stream(prompt, **LONG)
        first = next(victim)
        busy = fleet.freeze_busy()
        served = [pool.submit(client.generate, text, **options) for text, options in others]
        eventually(lambda: fleet.status().waiting == 0)
        os.kill(busy.pid, number)
        rest = list(victim)
        tokens = [token for chunk in [first, *rest] for token in chunk.tokens]
        assert tokens == reference.tokens(prompt, **LONG)
        answer = victim.result()
        assert list(answer.tokens) == tokens and answer.text == reference.text(tokens)
        assert answer.stats.failovers == 1 and answer.stats.replica != busy.name
        assert answer.stats.generated_tokens == len(tokens)
        for (text, options), future in zip(others, served, strict=True):
            assert list(future.result(60).tokens) == reference.tokens(text, **options)
        assert fleet.status().failovers >= 1

        os.kill(busy.pid, signal.SIGKILL) if number == signal.SIGSTOP else None
        eventually(lambda: fleet.replica(busy.name).pid not in (0, busy.pid))
        fleet.wait_all_ready()
        answer = client.generate(prompt, max_tokens=20, loops=2)
        assert list(answer.tokens) == reference.tokens(prompt, max_tokens=20, loops=2)
    assert any(f"{busy.name} was killed by SIGKILL" in line for line in fleet.said)


def test_status_shows_a_lost_replica(fleet: Any, eventually: Any) -> None:
    target = fleet.replica("replica-1")
    assert target.state == "ready" and target.memory_bytes > 0 and target.last_seen_ms < 2000
    os.kill(target.pid, signal.SIGKILL)
    lost = eventually(
        lambda: [r for r in fleet.status().replicas if r.endpoint == target.endpoint and r.state == "lost"]
    )
    assert lost[0].error
    fleet.wait_all_ready()
    assert fleet.replica("replica-1").error == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dispatcher_that_is_restarted_costs_no_token(
    fleet: Any, reference: Any, eventually: Any, number: signal.Signals
) -> None:
    (dispatcher,) = [pid for pid, line in fleet.children().items() if "tinyloop_serve.dispatcher" in line]
    with fleet.client() as client:
        stream = client.stream("The definition of", **LONG)
        tokens = list(next(stream).tokens)
        os.kill(dispatcher, number)
        for chunk in stream:
            tokens += chunk.tokens
        assert tokens == reference.tokens("The definition of", **LONG)
        eventually(lambda: any("dispatcher is back" in line for line in fleet.said))
        fleet.wait_all_ready()
        assert list(client.generate("the", max_tokens=5).tokens) == reference.tokens("the", max_tokens=5)


def test_cancel_reaches_the_middle_of_a_stream(shared_fleet: Any, reference: Any) -> None:
    prompt = "The definition of"
    with shared_fleet.client() as client:
        stream = client.stream(prompt, **LONG)
        next(stream)
        busy = shared_fleet.freeze_busy()
        assert busy.running == 1
        stream.cancel()
        os.kill(busy.pid, signal.SIGCONT)
        answer = stream.result()
        assert answer.stop_reason == "cancelled"
        alone = reference.tokens(prompt, **LONG)
        assert 0 < len(answer.tokens) < len(alone) and list(answer.tokens) == alone[: len(answer.tokens)]
        assert reference.text(answer.tokens).startswith(answer.text)
        again = client.generate(prompt, max_tokens=5, loops=2)
        assert list(again.tokens) == reference.tokens(prompt, max_tokens=5, loops=2)


def test_heartbeats_are_answered_while_a_replica_decodes(shared_fleet: Any) -> None:
    """The step counter that status shows grows while streams run back to back."""
    counters = set()
    with shared_fleet.client() as client, ThreadPoolExecutor(2) as pool:
        options = {**LONG, "max_tokens": 150}
        streams = [pool.submit(client.generate, "the", seed=n, **options) for n in range(4)]
        while not all(stream.done() for stream in streams):
            busy = [replica for replica in shared_fleet.status().replicas if replica.running]
            assert all(replica.last_seen_ms < 2000 for replica in busy)
            counters |= {replica.step_counter for replica in busy}
    assert len(counters) > 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_everything_and_leaves_nothing(fleet: Any, number: signal.Signals) -> None:
    children = fleet.children()
    assert len(children) == 3
    assert fleet.stop(number) == 0
    assert fleet.all_gone(children)
    assert not [path for path in fleet.directory.rglob("*") if path.is_socket()]


def test_streams_end_before_a_stopped_fleet_does(fleet: Any, reference: Any) -> None:
    options = {**LONG, "max_tokens": 200}
    with fleet.client() as client:
        stream = client.stream("The definition of", **options)
        next(stream)
        fleet.process.send_signal(signal.SIGTERM)
        assert list(stream.result().tokens) == reference.tokens("The definition of", **options)
    assert fleet.process.wait(30) == 0


def test_a_second_signal_does_not_wait(fleet: Any) -> None:
    children = fleet.children()
    with fleet.client(resume_s=0) as client:
        stream = client.stream("The definition of", **LONG)
        next(stream)
        fleet.freeze_busy()  # its stream cannot end
        fleet.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        asked = time.monotonic()
        fleet.process.send_signal(signal.SIGTERM)
        fleet.process.wait(30)
        assert time.monotonic() - asked < 4
        assert fleet.all_gone(children)
        with pytest.raises(TinyLoopError):  # which one depends on who was first
            stream.result()


def test_children_do_not_outlive_a_killed_fleet(fleet: Any, eventually: Any) -> None:
    children = fleet.children()
    with fleet.client() as client:
        next(client.stream("The definition of", **LONG))
        fleet.process.kill()
        eventually(lambda: fleet.all_gone(children), 15)


def test_a_fleet_does_not_outlive_its_starter(fleet: Any, eventually: Any) -> None:
    """`--die-with-parent`, as scripts use it, in a directory beside the fixture's."""
    code = """
        import os, subprocess, sys, time
        command = [sys.executable, "-m", "tinyloop_serve.deploy.cli", "up", "--replicas", "1"]
        up = subprocess.Popen([*command, "--die-with-parent", str(os.getpid())])
        print(up.pid, flush=True)
        time.sleep(60)
    """
    directory = fleet.directory / "b"
    directory.mkdir()
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**fleet.environment, "XDG_RUNTIME_DIR": str(directory)},
    )
    with starter:
        assert starter.stdout is not None
        up = int(starter.stdout.readline())
        assert starter.stdout.readline().startswith("READY ")
        starter.kill()
        eventually(lambda: fleet.all_gone([up]), 15)


def test_one_fleet_per_endpoint(shared_fleet: Any) -> None:
    second = shared_fleet.run("up")
    assert second.returncode == 1 and "already serves" in second.stderr
    assert "give this one an --endpoint" in second.stderr


def test_a_log_that_cannot_be_written_is_named(shared_fleet: Any) -> None:
    unwritable = shared_fleet.run("up", "--log", "/nowhere/log")
    assert unwritable.returncode == 2
    assert unwritable.stderr == "tinyloop: /nowhere/log: No such file or directory\n"


def test_a_fleet_that_cannot_start_says_why_and_ends(shared_fleet: Any) -> None:
    directory = shared_fleet.directory / "c"
    directory.mkdir()
    environment = {**shared_fleet.environment, "XDG_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-m", "tinyloop_serve.deploy.cli", "up", "--model", "/nowhere.tinyloop"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 78 and "/nowhere.tinyloop" in done.stderr and "Traceback" not in done.stderr


def test_the_journal_has_a_line_per_request(fleet: Any) -> None:
    assert fleet.stop() == 0
    environment = {**fleet.environment, "TINYLOOP_ENDPOINT": fleet.endpoint}
    log = fleet.directory / "journal"
    command = [sys.executable, "-m", "tinyloop_serve.deploy.cli", "up", "--replicas", "1", "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as up:
        assert up.stdout is not None and up.stdout.readline().startswith("READY ")
        with fleet.client() as client:
            client.generate("the", max_tokens=3)
        up.send_signal(signal.SIGTERM)
    assert up.returncode == 0
    assert '"event": "request"' in log.read_text()


def test_scaffolds_of_the_configuration_save_work_from_the_start(
    fleets: Any, tmp_path: Path, reference: Any
) -> None:
    scaffold = "The definition of a word is what the dictionary says of it, and no more.\n"
    (tmp_path / "scaffold.txt").write_text(scaffold)
    (tmp_path / "fleet.toml").write_text(f'[replica]\nscaffold = ["{tmp_path}/scaffold.txt@2"]\n')
    with (
        fleets("--replicas", "2", "--config", str(tmp_path / "fleet.toml")) as fleet,
        fleet.client() as client,
    ):
        (info,) = client.handles()
        assert (info.kind, info.loops, info.shared, info.lease_ms) == ("scaffold", 2, True, 0)
        prompt = scaffold + "The word sea"
        for _ in range(3):  # on either replica
            answer = client.generate(prompt, loops=2, max_tokens=8)
            assert answer.stats.prefix_tokens == info.tokens > 8
            assert list(answer.tokens) == reference.tokens(prompt, loops=2, max_tokens=8)
        assert not client.generate(prompt, loops=4, max_tokens=8).stats.prefix_tokens, "of other loops"


def test_the_environment_of_a_fleet_changes_no_token(
    fleets: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, more = "The definition of a word is", " what"
    with monkeypatch.context() as environment:
        environment.setenv("TINYLOOP_CACHE_MODE", "int4")
        environment.setenv("TINYLOOP_EARLY_EXIT", "0.25")
        environment.setenv("TINYLOOP_SPECULATIVE", "1")
        with fleets("--replicas", "1") as fleet, fleet.client() as client:
            plain = client.generate(prompt + more, loops=8, max_tokens=24)
            prefix = client.create_prefix(prompt, loops=8)
            behind = client.generate(more, handle=prefix, loops=8, max_tokens=24)
            draft = client.draft(prompt, loops=4, max_tokens=24)
            refined = draft.refine(loops=8, max_tokens=24)
    assert list(plain.tokens) == reference.tokens(prompt + more, loops=8, max_tokens=24)
    pieces = [*reference.encode(prompt), *reference.tokenizer.encode(more, add_special_tokens=False).ids]
    assert behind.stats.prefix_tokens and list(behind.tokens) == reference.tokens(
        pieces, loops=8, max_tokens=24
    )
    assert refined.stats.loops_skipped and list(refined.tokens) == reference.tokens(
        prompt, loops=8, max_tokens=24
    )
    assert plain.stats.drafted == 0


def test_many_clients_come_and_go(shared_fleet: Any) -> None:
    """Abandoned streams free their lanes: all is idle again soon."""
    barrier = threading.Barrier(8)

    def visit(number: int) -> None:
        with shared_fleet.client() as client:
            barrier.wait(30)
            next(client.stream("The definition of", seed=number, temperature=1.0, **LONG))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(8)))
    deadline = time.monotonic() + 30
    while (status := shared_fleet.status()).running or status.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "mode",
    [{"cache_mode": mode} for mode in CACHE_MODES] + [{"cache_window": 16}, {"beam_size": 3}],
    ids=lambda mode: "-".join(str(value) for item in mode.items() for value in item),
)
def test_every_mode_gives_through_the_fleet_what_it_gives_alone(
    shared_fleet: Any, reference: Any, mode: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"loops": 4, "max_tokens": 24, **mode}
    with shared_fleet.client() as client:
        for answer, prompt in zip(client.batch(PROMPTS, **options), PROMPTS, strict=True):
            assert list(answer.tokens) == reference.tokens(prompt, **options)
