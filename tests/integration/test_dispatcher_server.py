"""The dispatcher as a process (or its server in a thread), between clients and replicas made of plain pyzmq
and msgpack. Catches: frames that are decoded on the way, a slow client that delays others, an endpoint that
is stolen, a death that nobody notices, an unclean end. No test waits for a fixed time: each waits for what
must come, for up to `PATIENCE_S`.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.link import RECONNECT_S, Link
from tinyloop_serve.dispatcher.poller import Poller
from tinyloop_serve.dispatcher.server import Server

pytestmark = pytest.mark.integration

PATIENCE_S = 30
WORDS = (
    '{"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},'
    '"model":{"type":"WordLevel","vocab":{"a":0,"b":1,"?":2},"unk_token":"?"}}'
)
MODEL = {
    "name": "demo", "fingerprint": "f" * 64, "vocab_size": 100, "loops": 4, "max_loops": 8, "max_seq_len": 64,
}  # fmt: skip
READY = {"type": "Ready", "pid": 7, "device": "cpu", "model": MODEL, "tokenizer": WORDS}


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(1000 * PATIENCE_S), "nothing came"
    return socket.recv_multipart()


class Client:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.heard: list[bytes] = []  # bodies of the last message that are still to be looked at
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send_multipart([b"TL2", msgpack.packb({"type": kind, **fields})])

    def ask(self, id: str, **fields: Any) -> None:
        prompt = {} if "prompt_text" in fields else {"prompt_tokens": bytes([1, 0, 0, 0])}
        self.say("Generate", id=id, **({"max_tokens": 8} | prompt | fields))

    def hear(self) -> dict[str, Any]:
        if not self.heard:
            version, *self.heard = receive(self.socket)
            assert version == b"TL2"
        message: dict[str, Any] = msgpack.unpackb(self.heard.pop(0))
        return message

    def status(self) -> dict[str, Any]:
        self.say("GetStatus", id="s")
        while (message := self.hear())["type"] != "Status":
            pass
        return message


class Replica:
    """Answers Hello and Ping while it waits for something else, as a live replica would."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 1000 * PATIENCE_S  # its last words leave before it does
        if endpoint:
            self.socket.bind(endpoint)
        self.peer = b""

    def hear(self, kind: str) -> dict[str, Any]:
        while (message := self.next())["type"] != kind:
            pass
        return message

    def next(self) -> dict[str, Any]:
        self.peer, version, body = receive(self.socket)
        assert version == b"TL2"
        message: dict[str, Any] = msgpack.unpackb(body)
        if message["type"] == "Hello":
            self.say(READY | {"name": self.name})
        elif message["type"] == "Ping":
            self.say({"type": "Pong", "n": message["n"]})
        return message

    def say(self, message: dict[str, Any], *payloads: bytes) -> None:
        self.socket.send_multipart([self.peer, b"TL2", msgpack.packb(message), *payloads])

    def step(self, run: dict[str, Any], payloads: dict[int, bytes], *, last: bool = False) -> None:
        keys = tuple(payloads)
        head = {"type": "Step", "run": run["run"], "keys": keys, "tokens": (1,) * len(keys), "idle": last}
        self.say(head | {"final": (last,) * len(keys)}, *payloads.values())


def keys(run: dict[str, Any]) -> list[int]:
    return [lane["key"] for lane in run["lanes"]]


class Fleet:
    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.front = f"ipc://{directory}/front.sock"
        self.back = [f"ipc://{directory}/r{n}.sock" for n in range(2)]
        self.path = directory / "front.sock"
        self.peers: list[Client | Replica] = []  # kept until `close`
        self.processes: list[subprocess.Popen[str]] = []
        self.servers: list[tuple[Server, threading.Thread]] = []

    def serve(self, replicas: int = 1, **options: Any) -> None:
        """A dispatcher in a thread of this process."""
        raw = {"front": self.front, "replicas": self.back[:replicas], "max_wait_ms": 1, "loss_ms": 60_000}
        self.run(Server(load(raw | options), Journal(lambda line: None)))

    def run(self, server: Server) -> None:
        thread = threading.Thread(target=server.run)
        thread.start()
        self.servers.append((server, thread))

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """A dispatcher as it is started in production."""
        command = [sys.executable, "-m", "tinyloop_serve.dispatcher", "--front", self.front]
        process = subprocess.Popen(
            [*command, "--replica", self.back[0], "--loss-ms", "60000", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def client(self, **options: int) -> Client:
        self.peers.append(client := Client(self.context, self.front, **options))
        return client

    def replica(self, n: int = 0) -> Replica:
        self.peers.append(replica := Replica(self.context, self.back[n], f"r{n}"))
        return replica

    def close(self) -> None:
        for server, thread in self.servers:
            server.stop()
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for process in self.processes:
            process.kill()
            process.communicate()
        self.context.destroy(linger=0)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


# ------------------------------------------------------------------ frames


def test_payloads_are_forwarded_byte_for_byte(fleet: Fleet) -> None:
    fleet.serve()
    alice, bob, replica = fleet.client(), fleet.client(), fleet.replica()
    replica.hear("Hello")
    alice.ask("warm")
    warm = replica.hear("Run")
    for client, id in ((alice, "a1"), (alice, "a2"), (bob, "b1")):
        client.ask(id)
    while alice.status()["waiting"] < 3:
        pass
    replica.step(warm, {keys(warm)[0]: b"\xc1 not MessagePack"}, last=True)
    assert receive(alice.socket) == [b"TL2", b"\xc1 not MessagePack"]
    run = replica.hear("Run")
    assert run["batch_size"] == 4 and len(run["lanes"]) == 3
    words = {lane["key"]: b"\x00\xff" + lane["id"].encode() for lane in run["lanes"]}
    replica.step(run, words)
    assert receive(alice.socket) == [b"TL2", b"\x00\xffa1", b"\x00\xffa2"]  # one message for a client
    assert receive(bob.socket) == [b"TL2", b"\x00\xffb1"]


def test_text_is_tokenised_on_the_way(fleet: Fleet) -> None:
    fleet.serve()
    client, replica = fleet.client(), fleet.replica()
    client.ask("t", prompt_text="a b")
    assert replica.hear("Run")["lanes"][0]["prompt"] == bytes([0, 0, 0, 0, 1, 0, 0, 0])


def test_garbage_is_answered_and_survived(fleet: Fleet) -> None:
    fleet.serve(max_body=2048)
    client, replica = fleet.client(), fleet.replica()
    for frames, code in (
        ([b"TL2"], "protocol"),
        ([b"TL9", b"x"], "protocol"),
        ([b"TL2", b"\xc1"], "invalid"),
        ([b"TL2", msgpack.packb({"type": "Generate", "id": "q", "nope": 1})], "invalid"),
        ([b"TL2", b"x" * 4096], "limit"),
        ([b"TL2", msgpack.packb({"type": "Goodbye"}), b"y"], "protocol"),
    ):
        client.socket.send_multipart(frames)
        assert client.hear()["code"] == code
    client.ask("q")
    run = replica.hear("Run")
    replica.step(run, {keys(run)[0]: b"end"}, last=True)
    assert receive(client.socket) == [b"TL2", b"end"]


def test_a_reader_of_the_journal_that_stopped_holds_up_nobody(fleet: Fleet) -> None:
    process, client = fleet.start(), fleet.client()
    assert ready_line(process) and process.stderr
    fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    for n in range(200):
        client.ask(f"q{n}", max_tokens=-1)
        assert client.hear()["id"] == f"q{n}"
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE_S)
    refused = [json.loads(line)["id"] for line in log.splitlines() if '"refused"' in line]
    assert refused == [f"q{n}" for n in range(200)], "the last ones are written before it ends"


# ------------------------------------------------------------------ clients


def test_a_client_that_does_not_read_is_cut_off_and_delays_nobody(fleet: Fleet) -> None:
    fleet.serve(replicas=2, client_bytes=1 << 20)
    slow, fast = fleet.client(RCVHWM=1), fleet.client()
    replicas = [fleet.replica(0), fleet.replica(1)]
    for replica in replicas:
        replica.hear("Hello")
    while [r["state"] for r in fast.status()["replicas"]] != ["ready", "ready"]:
        pass
    slow.ask("s")
    while fast.status()["running"] < 1:
        pass
    fast.ask("f", sampling={"loops": 2})
    runs = {}
    for replica in replicas:
        run = replica.hear("Run")
        runs[run["lanes"][0]["id"]] = (replica, run)
    (feeder, slow_run), (server, fast_run) = runs["s"], runs["f"]
    big = bytes(200_000)
    for n in range(1000):  # far more than ZeroMQ and the kernel hold for one connection
        feeder.step(slow_run, {keys(slow_run)[0]: big})
        server.step(fast_run, {keys(fast_run)[0]: b"%d" % n})
        assert receive(fast.socket) == [b"TL2", b"%d" % n]  # before the next: nobody waited for the slow one
        if feeder.socket.poll(0) and feeder.next()["type"] == "CancelLanes":
            break
    else:
        raise AssertionError("the slow client was never cut off")
    last = b""
    while last in (b"", big):  # once it reads, it finds all that was sent, and why that is all
        last = receive(slow.socket)[-1]
    failed = msgpack.unpackb(last)
    assert (failed["type"], failed["id"], failed["code"]) == ("Failed", "s", "transport")


def test_a_client_that_was_given_up_is_told_once_it_reads_and_is_served_again(fleet: Fleet) -> None:
    fleet.serve(client_stall_ms=100)
    slow, fast, replica = fleet.client(RCVHWM=1), fleet.client(), fleet.replica()
    replica.hear("Hello")
    slow.ask("s")
    run, big = replica.hear("Run"), bytes(200_000)
    while not (replica.socket.poll(0) and replica.next()["type"] == "CancelLanes"):
        replica.step(run, {keys(run)[0]: big})
    while fast.status()["clients"] > 1:
        pass
    while (last := receive(slow.socket)[-1]) == big:
        pass
    failed = msgpack.unpackb(last)
    assert (failed["type"], failed["id"], failed["code"]) == ("Failed", "", "transport")
    assert slow.status()["clients"] == 2


def test_the_lanes_of_a_client_that_is_gone_are_cancelled(fleet: Fleet) -> None:
    fleet.serve()
    client, replica = fleet.client(), fleet.replica()
    client.ask("q")
    run = replica.hear("Run")
    replica.step(run, {keys(run)[0]: b"first"})
    assert receive(client.socket) == [b"TL2", b"first"]
    client.socket.close()
    while True:  # the kernel may take a while to say so
        replica.step(run, {keys(run)[0]: b"more"})
        if (message := replica.next())["type"] == "CancelLanes":
            assert list(message["keys"]) == keys(run)
            return


# ------------------------------------------------------------------ replicas


def test_a_closed_connection_is_noticed_at_once_and_the_replica_may_come_back(fleet: Fleet) -> None:
    fleet.serve(replicas=2)  # heartbeats would take a minute
    client, dying, other = fleet.client(), fleet.replica(0), fleet.replica(1)
    for replica in (dying, other):
        replica.hear("Hello")
    while [r["state"] for r in client.status()["replicas"]] != ["ready", "ready"]:
        pass
    client.ask("q1")
    while client.status()["running"] < 1:
        pass
    client.ask("q2", sampling={"loops": 2})
    lost, kept = dying.hear("Run"), other.hear("Run")
    dying.step(lost, {keys(lost)[0]: b"last words"})
    dying.socket.close()
    version, words, *client.heard = receive(client.socket)
    assert words == b"last words"
    failed = client.hear()
    assert (failed["id"], failed["code"]) == (lost["lanes"][0]["id"], "replica_lost")
    other.step(kept, {keys(kept)[0]: b"unmoved"})
    assert receive(client.socket) == [b"TL2", b"unmoved"]
    assert [r["state"] for r in client.status()["replicas"]] == ["lost", "busy"]
    fleet.replica(0).hear("Hello")
    while [r["state"] for r in client.status()["replicas"]] != ["ready", "busy"]:
        pass


def test_a_silent_replica_is_given_up_and_rejoins_by_a_new_hello(fleet: Fleet) -> None:
    fleet.serve(heartbeat_ms=20, loss_ms=200)
    client, replica = fleet.client(), fleet.replica()
    client.ask("q")
    run = replica.hear("Run")  # and from here on it says nothing
    old = replica.peer
    while client.status()["replicas"][0]["state"] != "lost":
        pass
    replica.hear("Hello")
    assert replica.peer != old  # a fresh connection: nothing old can be mistaken for new
    again = replica.hear("Run")  # the request goes on
    assert again["run"] > run["run"] and keys(again) == keys(run)
    replica.step(again, {keys(again)[0]: b"end"}, last=True)
    assert receive(client.socket) == [b"TL2", b"end"]


def test_a_replica_that_sends_garbage_is_given_up(fleet: Fleet) -> None:
    fleet.serve(heartbeat_ms=20)
    client, replica = fleet.client(), fleet.replica()
    client.ask("q")
    run = replica.hear("Run")
    old = replica.peer
    replica.say({"type": "Step", "run": "one"})
    replica.hear("Hello")
    assert replica.peer != old
    again = replica.hear("Run")
    assert again["run"] > run["run"]
    replica.step(again, {keys(again)[0]: b"end"}, last=True)
    assert receive(client.socket) == [b"TL2", b"end"]


# ------------------------------------------------------------------ the process


def test_sigterm_lets_live_requests_end_and_exits_clean(fleet: Fleet) -> None:
    process = fleet.start()
    assert ready_line(process) == f"READY endpoint={fleet.front}\n"
    assert stat.S_IMODE(fleet.path.stat().st_mode) == 0o660
    client, replica = fleet.client(), fleet.replica()
    client.ask("live")
    run = replica.hear("Run")
    process.send_signal(signal.SIGTERM)
    while True:
        client.ask("late")
        client.say("Cancel", id="late")
        message = client.hear()
        if message["type"] == "Failed":  # else SIGTERM had yet to be seen, and the cancel was answered
            assert message["code"] == "unavailable"
            break
    replica.step(run, {keys(run)[0]: b"end"}, last=True)
    while receive(client.socket) != [b"TL2", b"end"]:
        pass
    replica.hear("Goodbye")
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and not fleet.path.exists()
    assert '"outcome": "answered"' in log and "Traceback" not in log


def test_sigterm_fails_what_does_not_end(fleet: Fleet) -> None:
    process = fleet.start("--drain-ms", "50")
    ready_line(process)
    client, replica = fleet.client(), fleet.replica()
    client.ask("live")
    replica.hear("Run")
    process.send_signal(signal.SIGTERM)
    assert client.hear()["code"] == "unavailable"
    assert process.wait(PATIENCE_S) == 0


def test_a_second_dispatcher_refuses_and_the_first_serves_on(fleet: Fleet) -> None:
    first = fleet.start()
    ready_line(first)
    second = fleet.start()
    output, log = second.communicate(timeout=PATIENCE_S)
    assert (second.returncode, output) == (75, "") and "another process" in log
    assert fleet.client().status()["waiting"] == 0
    first.kill()
    first.wait()
    assert fleet.path.exists()  # left behind
    assert ready_line(fleet.start()).startswith("READY")


def test_a_directory_open_to_everybody_is_a_configuration_error(fleet: Fleet) -> None:
    fleet.path.parent.chmod(0o777)
    process = fleet.start()
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 78 and "front" in log and str(fleet.path.parent) in log


def test_a_taken_port_is_unavailable(fleet: Fleet) -> None:
    taken = fleet.context.socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    fleet.front = f"tcp://127.0.0.1:{port}"
    process = fleet.start()
    _, log = process.communicate(timeout=PATIENCE_S)
    taken.close()
    assert process.returncode == 69 and fleet.front in log


def test_a_taken_address_of_the_pages_is_unavailable_and_the_front_is_let_go(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = fleet.start("--http", address)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 69 and address in log and "http" in log
    assert ready_line(fleet.start("--http", "127.0.0.1:0")).count("http=") == 1


def test_it_takes_all_the_open_files_that_it_may_have(fleet: Fleet) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    process = fleet.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ready_line(process)
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)


@pytest.mark.parametrize("spare", [0, 1])  # 1: enough for a socket, not for its monitor
def test_without_a_descriptor_to_spare_a_replica_is_tried_again_later(fleet: Fleet, spare: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1 + spare)  # the same refusal, sooner
    held, poller = context.socket(zmq.DEALER), Poller()
    link = Link(fleet.back[0], context, poller)
    assert not link.due(set(), 1.0) and not link.open and link.open_at == 1.0 + RECONNECT_S
    held.close()
    context.destroy(linger=0)
    poller.close()


def test_it_dies_with_its_parent(fleet: Fleet) -> None:
    command = [sys.executable, "-m", "tinyloop_serve.dispatcher", "--front", fleet.front]
    command += ["--replica", fleet.back[0], "--die-with-parent"]
    script = (
        f"import os, subprocess, sys\nsubprocess.Popen([*{command!r}, str(os.getpid())])\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    fleet.processes.append(parent)
    assert ready_line(parent).startswith("READY")
    parent.kill()
    assert parent.stdout and parent.stdout.read() == ""  # ends when the dispatcher, which holds it too, ends
    assert not fleet.path.exists()  # and it ended by its own SIGTERM, clean
    assert os.path.exists(f"{fleet.path}.lock")
