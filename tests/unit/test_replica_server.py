"""The replica's socket and loop, in this process: what a dispatcher sees while a run is decoded."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.codec import FROM_REPLICA, TO_REPLICA
from tinyloop_serve.protocol.host import EndpointTaken
from tinyloop_serve.protocol.messages import (
    VERSION,
    Build,
    Drop,
    FromReplica,
    Goodbye,
    Hello,
    Lane,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    Run,
    Sampling,
    Stats,
    Step,
    ToReplica,
)
from tinyloop_serve.replica.answer import step_of
from tinyloop_serve.replica.executor import Building, Job, Outcome
from tinyloop_serve.replica.server import FOREVER, Mailbox, Server
from tinyloop_serve.replica.session import LifeSigns, Session

READY = Ready("r0", 1, "cpu", ModelInfo("m", "f", 10, 4, 8, 100))


class HandDecoded:
    """An executor whose steps the test makes."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.builds: list[Building] = []
        self.dropped: list[Drop] = []

    def submit(self, run: Run) -> Job:
        self.jobs.append(Job(run, None, frozenset()))
        return self.jobs[-1]

    def build(self, build: Build) -> Building:
        self.builds.append(Building(build))
        return self.builds[-1]

    def drop(self, drop: Drop) -> None:
        self.dropped.append(drop)


class Replica:
    """A server in a thread of its own."""

    def __init__(self, endpoint: str, drain_s: float = 0.3, stall_s: float = FOREVER) -> None:
        self.endpoint = endpoint
        self.mailbox = Mailbox()
        self.work = HandDecoded()
        self.said: list[str] = []
        server = Server(endpoint, self.mailbox, self.said.append)
        self.signs = LifeSigns(5, 6, "ok")
        self.looks = 0  # at them
        session = Session(self.work, announce=lambda: READY, life_signs=self._look)

        def serve() -> None:
            server.run(session, drain_s, stall_s)
            server.close()

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def _look(self) -> LifeSigns:
        self.looks += 1
        return self.signs

    def step(self, token: int, *, idle: bool = False) -> None:
        job = self.work.jobs[-1]
        answer = job.answers[0]
        parts = answer.take(token)
        if idle:
            parts += answer.finish("max_tokens", Stats())
        self.mailbox.post(Outcome(job, *step_of(job.run.run, parts, idle=idle)))


class Peer:
    """A dispatcher's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)

    def say(self, message: ToReplica) -> None:
        self.socket.send_multipart(TO_REPLICA.encode(message))

    def hear(self) -> FromReplica:
        return FROM_REPLICA.decode(self.socket.recv_multipart())

    def ask(self, message: ToReplica) -> FromReplica:
        self.say(message)
        return self.hear()


Connect = Callable[[str], Peer]


@pytest.fixture
def connect() -> Iterator[Connect]:
    context = zmq.Context()
    peers: list[Peer] = []

    def connect(endpoint: str) -> Peer:
        peers.append(Peer(context, endpoint))
        return peers[-1]

    yield connect
    context.destroy(linger=0)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica(f"ipc://{tmp_path}/r.sock")
    yield replica
    replica.mailbox.request_stop()
    replica.thread.join(10)
    assert not replica.thread.is_alive()


RUN = Run(run=3, sampling=Sampling(), lanes=(Lane(key=1, id="a", prompt=b"\1\0\0\0", max_tokens=9),))


def test_it_answers_pings_while_it_decodes(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    assert peer.ask(Hello("d")) == READY
    peer.say(RUN)
    assert peer.ask(Ping(1)) == Pong(1, 5, 1, 6)
    replica.step(7)
    assert peer.hear() == Step(3, (1,), (1,), (False,))
    assert peer.ask(Ping(2)) == Pong(2, 5, 1, 6)
    replica.step(8, idle=True)
    assert peer.hear() == Step(3, (1, 1), (1, 0), (False, True), idle=True)
    assert peer.ask(Ping(3)) == Pong(3, 5, 0, 6)


def test_an_engine_that_fails_is_told_of_before_the_credit_is_given_back(
    replica: Replica, connect: Connect
) -> None:
    peer = connect(replica.endpoint)
    peer.ask(Hello("d"))
    peer.say(RUN)
    assert peer.ask(Ping(1)) == Pong(1, 5, 1, 6)  # it has the run
    replica.signs = replica.signs._replace(health="failing")
    replica.step(1, idle=True)
    first, second = peer.hear(), peer.hear()
    assert isinstance(first, Pong) and first.health == "failing"
    assert isinstance(second, Step) and second.idle


def test_an_engine_that_hangs_ends_it_without_a_goodbye(tmp_path: Path, connect: Connect) -> None:
    """So that what it was given is under suspicion; also when nobody waits for it."""
    hanging = Replica(f"ipc://{tmp_path}/h.sock", stall_s=0.05)
    peer = connect(hanging.endpoint)
    peer.ask(Hello("d"))
    hanging.signs = hanging.signs._replace(working=True)
    peer.ask(Ping(1))  # nothing else wakes the loop
    hanging.thread.join(10)
    assert "no step" in hanging.mailbox.given_up
    peer.socket.setsockopt(zmq.RCVTIMEO, 100)
    with pytest.raises(zmq.Again):
        while True:
            assert not isinstance(peer.hear(), Goodbye)


def test_its_supervisor_hears_of_its_health_and_nothing_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        replica = Replica(f"ipc://{tmp_path}/s.sock")

        def hear(wanted: bytes) -> None:
            while supervisor.recv(4096) != wanted:
                pass

        try:
            hear(b"WATCHDOG=1")
            replica.signs = LifeSigns(5, 6, "failing")
            hear(b"STATUS=failing")
            replica.signs = LifeSigns(5, 6, "ok")
            hear(b"STATUS=well again")
            replica.signs = LifeSigns(5, 6, "ok", working=True)
            supervisor.settimeout(0.6)
            deadline, looks = time.monotonic() + 10, 0
            with pytest.raises(TimeoutError):
                while time.monotonic() < deadline:
                    looks = replica.looks
                    supervisor.recv(4096)
            assert replica.looks - looks < 20, "it does not spin while it has nothing to say"
        finally:
            replica.mailbox.request_stop()
            replica.thread.join(10)


def test_garbage_is_survived(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    for frames in (
        [b""],
        [b"TL2"],
        [b"TL9", b"x"],
        [b"TL2", b"\xc1"],
        [b"TL2", b"\x80", b"more"],
        [b"x"] * 2000,
    ):
        peer.socket.send_multipart(frames)
    assert peer.ask(Hello("d")) == READY


def test_a_dispatcher_that_died_is_noticed_by_its_run(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    peer.ask(Hello("d"))
    peer.say(RUN)
    peer.ask(Ping(1))
    peer.socket.close()
    job = replica.work.jobs[0]
    deadline = time.monotonic() + 5
    while not job.answers[0].cancelled:
        assert time.monotonic() < deadline
        replica.step(1)
        time.sleep(0.01)
    assert connect(replica.endpoint).ask(Hello("e")) == READY


def test_the_former_dispatcher_is_told(replica: Replica, connect: Connect) -> None:
    old, new = connect(replica.endpoint), connect(replica.endpoint)
    old.ask(Hello("a"))
    assert new.ask(Hello("b")) == READY
    assert old.hear() == Goodbye()


def test_it_stops_at_once_when_nothing_runs(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    peer.ask(Hello("d"))
    started = time.monotonic()
    replica.mailbox.request_stop()
    assert peer.hear() == Goodbye()
    replica.thread.join(5)
    assert time.monotonic() - started < 2


def test_a_run_may_end_before_it_stops(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    peer.ask(Hello("d"))
    peer.say(RUN)
    peer.ask(Ping(1))
    replica.mailbox.request_stop()
    assert peer.ask(Ping(2)) == Pong(2, 5, 1, 6)
    replica.step(7, idle=True)
    assert peer.hear() == Step(3, (1, 1), (1, 0), (False, True), idle=True)
    assert peer.hear() == Goodbye()


def test_a_run_that_does_not_end_is_given_up(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    peer.ask(Hello("d"))
    peer.say(RUN)
    peer.ask(Ping(1))
    replica.mailbox.request_stop()
    assert peer.hear() == Goodbye()
    assert replica.work.jobs[0].answers[0].cancelled


def test_one_that_gives_its_engine_up_does_not_take_its_leave(replica: Replica, connect: Connect) -> None:
    """A goodbye would clear the requests that it had of what happened to it."""
    peer = connect(replica.endpoint)
    peer.ask(Hello("d"))
    peer.say(RUN)
    peer.ask(Ping(1))
    replica.mailbox.give_up("the engine made no step")
    replica.thread.join(10)
    assert not peer.socket.poll(300)


def test_a_second_server_does_not_steal_the_endpoint(replica: Replica) -> None:
    with pytest.raises(EndpointTaken):
        Server(replica.endpoint, Mailbox(), print)


def test_an_oversize_message_is_refused_by_the_transport(replica: Replica, connect: Connect) -> None:
    peer = connect(replica.endpoint)
    monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.socket.send_multipart([VERSION, b"\0" * (TO_REPLICA.max_body_bytes + 1)])
    assert monitor.poll(10_000)
    peer.socket.disable_monitor()
    monitor.close(0)
    assert connect(replica.endpoint).ask(Hello("d")) == READY


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_it_binds_an_address_of_ipv6() -> None:
    server = Server("tcp://[::1]:0", Mailbox(), print)
    assert server.endpoint.startswith("tcp://[::1]:")
    server.close()


def test_over_tcp_with_keys_only_a_known_dispatcher_gets_in(tmp_path: Path) -> None:
    ours, theirs, strangers = (
        keys.read_pair(keys.create(name, tmp_path)[0]) for name in ("replica", "dispatcher", "stranger")
    )
    mailbox, said = Mailbox(), list[str]()
    server = Server("tcp://127.0.0.1:0", mailbox, said.append, ours, [theirs.public])
    endpoint = server.endpoint
    session = Session(HandDecoded(), announce=lambda: READY, life_signs=lambda: LifeSigns(5, 6, "ok"))
    thread = threading.Thread(target=server.run, args=(session, 0.1))
    thread.start()
    context = zmq.Context()
    try:
        for pair, answered in ((strangers, False), (None, False), (theirs, True)):
            socket = context.socket(zmq.DEALER)
            if pair:
                keys.Encryption(pair, ours.public).connect(socket)
            socket.connect(endpoint)
            socket.send_multipart(TO_REPLICA.encode(Hello("d")))
            assert bool(socket.poll(10_000 if answered else 300)) == answered
            socket.close(linger=0)
    finally:
        context.destroy(linger=0)
        mailbox.request_stop()
        thread.join()
        server.close()
    assert said and strangers.public in said[0]
