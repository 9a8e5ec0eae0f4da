"""The dispatcher's sockets where peers come and go, lie about who they are, or hold keys. Peers are plain
pyzmq and msgpack where they misbehave, the client library where they do not. Nothing waits for a fixed time.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.integration.test_dispatcher_server import PATIENCE_S, Client, Fleet, Replica, keys, receive
from tinyloop_serve.dispatcher import link
from tinyloop_serve.dispatcher.config import load
from tinyloop_serve.dispatcher.journal import Journal
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.dispatcher.server import Server
from tinyloop_serve.protocol import errors
from tinyloop_serve.protocol import keys as curve
from tinyloop_serve.protocol.client import Client as Library
from tinyloop_serve.protocol.limits import MAX_BODY_BYTES
from tinyloop_serve.protocol.zap import Gate

pytestmark = pytest.mark.integration


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def running(fleet: Fleet, *ids: str) -> tuple[Client, Replica, dict[str, Any]]:
    """A client's requests, and the replica that runs them as one batch."""
    client, replica = fleet.client(), fleet.replica()
    replica.hear("Hello")
    client.ask("warm")
    warm = replica.hear("Run")
    for id in ids:
        client.ask(id)
    while client.status()["waiting"] < len(ids):
        pass
    replica.step(warm, {keys(warm)[0]: b"x"}, last=True)
    assert receive(client.socket) == [b"TL2", b"x"]
    return client, replica, replica.hear("Run")


# ------------------------------------------------------------------ one message for many bodies


def test_what_gathers_for_a_client_leaves_in_order_and_in_bounded_messages(fleet: Fleet) -> None:
    fleet.serve(client_bytes=1 << 30)
    client, replica, run = running(fleet, "a", "b")
    bodies = []
    for n in range(600):
        payloads = {key: b"%d of %d" % (n, key) for key in keys(run)}
        bodies += payloads.values()
        replica.step(run, payloads)
    large = [bytes([n]) * 200_000 for n in range(5)]
    for body in large:
        replica.step(run, {keys(run)[0]: body})
    got: list[bytes] = []
    messages = 0
    while len(got) < len(bodies) + len(large):
        version, *some = receive(client.socket)
        assert version == b"TL2" and 1 <= len(some) <= 256
        assert len(some) == 1 or sum(map(len, some)) <= 256 << 10
        got += some
        messages += 1
    assert got == bodies + large
    assert messages < len(got)


def test_a_replica_that_miscounts_its_payloads_is_given_up_and_no_client_sees_them(fleet: Fleet) -> None:
    fleet.serve(replica_wait_ms=100, heartbeat_ms=20)
    for payloads in ([], [b"one"], [b"one", b"two", b"three"]):
        client, replica, run = running(fleet, "a", "b")
        head = {"type": "Step", "run": run["run"], "keys": keys(run), "tokens": (1, 1), "final": (False,) * 2}
        for _ in range(3):  # so that the missing ones would be taken from the next message
            replica.say(head, *payloads)
        ends = [client.hear(), client.hear()]
        assert {end["code"] for end in ends} == {"replica_lost"}
        assert "malformed" in ends[0]["message"]
        replica.socket.close(0)
        client.socket.close(0)


def test_a_replica_whose_payload_is_too_large_for_any_client_is_given_up(fleet: Fleet) -> None:
    fleet.serve(replica_wait_ms=100, heartbeat_ms=20)
    client, replica, run = running(fleet, "a")
    replica.step(run, {keys(run)[0]: bytes(MAX_BODY_BYTES + 1)})
    end = client.hear()
    assert end["code"] == "replica_lost" and "payload" in end["message"]


# ------------------------------------------------------------------ who is who


def test_a_stolen_routing_id_disturbs_nobody(fleet: Fleet) -> None:
    """ZeroMQ lets a peer choose its routing id; the one who had it first keeps it."""
    fleet.serve()
    victim = fleet.client(ROUTING_ID=b"victim")
    replica = fleet.replica()
    victim.ask("q")
    run = replica.hear("Run")
    thief = fleet.client(ROUTING_ID=b"victim")
    for _ in range(20):
        thief.say("Cancel", id="q")
        thief.say("Goodbye")
    bystander = fleet.client()
    for n in range(20):
        replica.step(run, {keys(run)[0]: b"%d" % n})
        assert receive(victim.socket) == [b"TL2", b"%d" % n]
        assert bystander.status()["running"] == 1
    assert not thief.socket.poll(0)
    replica.step(run, {keys(run)[0]: b"end"}, last=True)
    assert receive(victim.socket) == [b"TL2", b"end"]


def test_a_message_of_endless_frames_is_refused_and_the_next_one_read(fleet: Fleet) -> None:
    fleet.serve()
    client = fleet.client()
    client.socket.send_multipart([b"TL2", msgpack.packb({"type": "Ping", "n": 0}), *[b"x"] * 5000])
    assert client.hear()["code"] == "protocol"
    client.socket.send_multipart([b"TL2", msgpack.packb({"type": "Ping", "n": 1}), b""])
    assert client.hear()["code"] == "protocol"
    client.say("Ping", n=2)
    assert client.hear() == {"type": "Pong", "n": 2}


def test_a_frame_over_the_limit_cuts_its_sender_off(fleet: Fleet) -> None:
    fleet.serve()
    client, bystander = fleet.client(), fleet.client()
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.socket.send_multipart([b"TL2", bytes(MAX_BODY_BYTES)])
    assert client.hear()["code"] == "invalid"
    client.socket.send_multipart([b"TL2", bytes(MAX_BODY_BYTES + 1)])
    assert monitor.poll(1000 * PATIENCE_S)
    client.socket.disable_monitor()
    monitor.close(0)
    assert bystander.status()["type"] == "Status"


# ------------------------------------------------------------------ replicas join and leave


def test_a_replica_joins_and_leaves_at_run_time(fleet: Fleet) -> None:
    fleet.serve()
    fleet.replica(0).hear("Hello")
    with Library(fleet.front) as operator:
        second = fleet.replica(1)
        assert fleet.back[1] in operator.control("attach", fleet.back[1])
        second.hear("Hello")
        while [replica.state for replica in operator.status().replicas] != ["ready", "ready"]:
            pass
        with pytest.raises(errors.InvalidRequest) as caught:
            operator.control("attach", fleet.back[1])
        assert caught.value.field == "target"
        operator.control("detach", fleet.back[1], within_s=0)
        second.hear("Goodbye")
        while len(operator.status().replicas) > 1:
            pass
        operator.control("attach", fleet.back[1])  # and it may come again
        second.hear("Hello")


def test_a_handle_goes_with_the_connection_that_renewed_it_last(fleet: Fleet) -> None:
    """A client that connects anew renews its handles, before its old connection is noticed to be gone."""
    fleet.serve()
    old, new, replica = fleet.client(), fleet.client(), fleet.replica()
    old.say("CreateHandle", id="c", recipe={"kind": "prefix", "prompt_tokens": bytes(4)})
    build = replica.hear("Build")
    replica.say({"type": "Built", "handle": build["handle"], "bytes": 64})
    assert old.hear()["info"]["handle"] == build["handle"]
    new.say("RenewHandle", id="r", handle=build["handle"])
    assert new.hear()["type"] == "Handle"
    old.say("Goodbye")
    old.say("ListHandles", id="l")
    assert [each["handle"] for each in old.hear()["handles"]] == [build["handle"]]
    new.say("Goodbye")
    assert replica.hear("Drop")["handles"] == [build["handle"]]


def test_an_endpoint_beyond_the_machine_is_not_attached_without_keys(fleet: Fleet) -> None:
    fleet.serve()
    with Library(fleet.front) as operator, pytest.raises(errors.InvalidRequest, match="key"):
        operator.control("attach", "tcp://192.0.2.1:5555")


# ------------------------------------------------------------------ keys


class Locked:
    """A fleet on tcp, with keys: a dispatcher, two tenants of which one is an operator, and a stranger."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self.fleet = fleet
        self.directory = directory
        names = ("dispatcher", "replica", "alice", "root", "stranger")
        self.public = {name: curve.create(name, directory)[1] for name in names}
        self.refused: list[str] = []

    def serve(self, back: str = "", **options: Any) -> str:
        raw: dict[str, Any] = {
            "front": "tcp://127.0.0.1:*",
            "replicas": [back or self.fleet.back[0]],
            "key": f"{self.directory}/dispatcher.key",
            "tenants": {
                "acme": {"keys": [self.public["alice"]]},
                "ops": {"keys": [self.public["root"]], "admin": True},
            },
        }
        server = Server(load(raw | options), Journal(self.refused.append))
        self.fleet.run(server)
        return server.endpoint

    def replica(self, name: str) -> tuple[Replica, str]:
        """With the keys of `name`, on tcp; whom it lets in is for the test to say."""
        replica = Replica(self.fleet.context, "", "r0")
        self.fleet.peers.append(replica)
        curve.bind(replica.socket, curve.read_pair(self.directory / f"{name}.key"))
        return replica, f"tcp://127.0.0.1:{replica.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def client(self, endpoint: str, name: str, **options: Any) -> Library:
        key, server_key = f"{self.directory}/{name}.key", f"{self.directory}/dispatcher.pub"
        return Library(endpoint, key=key, server_key=server_key, connect_timeout_s=PATIENCE_S, **options)


@pytest.fixture
def locked(fleet: Fleet, tmp_path: Path) -> Locked:
    return Locked(fleet, tmp_path / "keys")


def test_a_key_names_its_tenant_and_nothing_else_does(locked: Locked) -> None:
    endpoint = locked.serve()
    locked.fleet.replica(0).hear("Hello")
    with locked.client(endpoint, "alice") as alice, locked.client(endpoint, "root") as root:
        assert alice.status().clients >= 1
        assert root.control("accept")
        with pytest.raises(errors.Forbidden) as caught:
            alice.control("accept")
        assert "'acme'" in caught.value.message
    with locked.client(endpoint, "stranger") as stranger, pytest.raises(errors.AuthError):
        stranger.status()
    with Library(endpoint, connect_timeout_s=PATIENCE_S) as open_, pytest.raises(errors.AuthError):
        open_.status()
    assert any('"key_refused"' in line and locked.public["stranger"] in line for line in locked.refused)
    [(server, _)] = locked.fleet.servers
    assert server._core.metrics.keys_refused >= 1


def test_a_replicas_link_is_encrypted_and_expects_its_key(locked: Locked) -> None:
    gate = Gate(locked.fleet.context, {locked.public["dispatcher"]: "dispatcher"})
    replica, back = locked.replica("replica")
    endpoint = locked.serve(back, replica_keys=[locked.public["replica"]])
    assert gate.socket.poll(1000 * PATIENCE_S)
    gate.serve()
    replica.hear("Hello")
    with locked.client(endpoint, "alice") as alice:
        while [each.state for each in alice.status().replicas] != ["ready"]:
            pass
    gate.socket.close()


def test_machines_that_vanish_are_noticed_on_every_tcp_connection(locked: Locked) -> None:
    """Each end probes a silent connection (/proc/net/tcp: state 01 is established, timer 02 keep-alive)."""
    replica = Replica(locked.fleet.context, "", "r0")
    locked.fleet.peers.append(replica)
    back = f"tcp://127.0.0.1:{replica.socket.bind_to_random_port('tcp://127.0.0.1')}"
    endpoint = locked.serve(back)
    replica.hear("Hello")
    with locked.client(endpoint, "alice") as alice:
        alice.status()
        front, behind = (f":{int(each.rpartition(':')[2]):04X}" for each in (endpoint, back))

        def timers() -> list[str]:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            live = [row for row in rows if row[3] == "01"]
            ours = [row for row in live if row[1].endswith(front) or row[2].endswith((front, behind))]
            return [row[5][:2] for row in ours]

        while "01" in timers():  # something said is still to be acknowledged
            pass
        assert timers() == ["02"] * 3


@pytest.mark.parametrize(("name", "why"), [("stranger", "other keys"), ("replica", "does not know our key")])
def test_a_link_whose_keys_do_not_fit_says_so_and_is_never_a_replica(
    locked: Locked, name: str, why: str
) -> None:
    gate = Gate(locked.fleet.context, {})
    _, back = locked.replica(name)
    endpoint = locked.serve(back, replica_keys=[locked.public["replica"]])
    if name == "replica":
        assert gate.socket.poll(1000 * PATIENCE_S)
        gate.serve()
    with locked.client(endpoint, "alice") as alice:
        while not (replica := alice.status().replicas[0]).error:
            pass
    assert replica.state == "lost" and why in replica.error
    assert sum('"replica_lost"' in line for line in locked.refused) == 1  # and not ten times a second
    gate.socket.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_link_to_what_is_no_replica_says_so_and_finds_the_one_that_comes_later(
    locked: Locked, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REFUSED_S", 0.2)
    keys_of_it = {"replica_keys": [locked.public["replica"]]} if encrypted else {}
    before: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    other = before.socket(zmq.PUB)  # another kind of socket, with keys where none are expected
    if not encrypted:
        curve.bind(other, curve.read_pair(locked.directory / "replica.key"))
    back = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
    endpoint = locked.serve(back, **keys_of_it)
    with locked.client(endpoint, "alice") as alice:
        while not (error := alice.status().replicas[0].error):
            pass
    quicker = ("it uses no keys", "it has other keys, or none") if encrypted else ("it asks for keys",)
    assert any(why in error for why in quicker)  # the end that breaks off first knows more
    before.destroy(linger=0)  # and its port is free
    gate = Gate(locked.fleet.context, {locked.public["dispatcher"]: "dispatcher"})
    replica = Replica(locked.fleet.context, "", "r0")
    locked.fleet.peers.append(replica)
    if encrypted:
        curve.bind(replica.socket, curve.read_pair(locked.directory / "replica.key"))
    replica.socket.bind(back)
    if encrypted:
        assert gate.socket.poll(1000 * PATIENCE_S)
        gate.serve()
    replica.hear("Hello")
    gate.socket.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"key": "/nowhere.key"}, "key"),
        ({"tenants": {}}, "tenants"),
        ({"replicas": ["tcp://192.0.2.1:5555"]}, "replica_keys"),
    ],
)
def test_what_could_not_work_is_a_configuration_error(
    locked: Locked, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        locked.serve(**change)
    assert caught.value.field == field


def test_the_socket_and_its_directory_are_for_the_group_at_most(fleet: Fleet) -> None:
    directory = fleet.path.parent / "run"
    fleet.front, fleet.path = f"ipc://{directory}/front.sock", directory / "front.sock"
    fleet.serve()
    assert stat.S_IMODE(fleet.path.stat().st_mode) == 0o660
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    assert stat.S_IMODE((directory / "front.sock.lock").stat().st_mode) == 0o600
