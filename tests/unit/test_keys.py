"""Keys: files that only their owner reads, a connection that only the right keys open, and an error that says
so within the time to connect. Real sockets, one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.unit import fake_dispatcher as fake
from tinyloop_serve.protocol import errors, keys
from tinyloop_serve.protocol.aio import AsyncClient
from tinyloop_serve.protocol.client import Client
from tinyloop_serve.protocol.zap import Gate, user_of

LONG_S = 600.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)  # ZMTP 3.1
PUB = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


class Ring:
    """Keys in a directory, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.public = {name: keys.create(name, directory)[1] for name in ("server", "alice", "mallory")}

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}.key"

    def pair(self, name: str) -> keys.KeyPair:
        return keys.read_pair(self.path(name))


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "keys")


@pytest.fixture
def start(ring: Ring) -> Iterator[Callable[..., fake.FakeDispatcher]]:
    running = []

    def begin(encrypted: bool = True) -> fake.FakeDispatcher:
        pair = ring.pair("server") if encrypted else None
        users = {ring.public["alice"]: "acme"}
        running.append(fake.FakeDispatcher(answer=fake.echo, pair=pair, users=users))
        return running[-1]

    yield begin
    for each in running:
        each.close()


# ------------------------------------------------------------------ files


def test_a_new_pair_is_for_its_owner_and_its_public_half_for_all(ring: Ring) -> None:
    secret, public = ring.directory / "alice.key", ring.directory / "alice.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and stat.S_IMODE(public.stat().st_mode) == 0o644
    assert stat.S_IMODE(ring.directory.stat().st_mode) == 0o700
    pair = ring.pair("alice")
    assert pair.public == ring.public["alice"] == keys.public_key(public) == keys.public_key(str(secret))
    assert pair.secret not in public.read_text() and pair.secret not in repr(pair)
    assert keys.public_key(pair.public) == pair.public
    assert keys.found(ring.directory) == [
        (name, ring.public[name], True) for name in ("alice", "mallory", "server")
    ]
    secret.unlink()
    assert keys.found(ring.directory)[0] == ("alice", pair.public, False)


def test_nothing_is_overwritten_and_names_are_file_names(ring: Ring) -> None:
    before = (ring.directory / "alice.key").read_bytes()
    for name in ("alice", "", "a/b", ".hidden", "a\n", "a\0"):
        with pytest.raises(errors.InvalidRequest) as caught:
            keys.create(name, ring.directory)
        assert caught.value.field == "name"
    assert (ring.directory / "alice.key").read_bytes() == before


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o604])
def test_a_secret_that_others_may_read_or_a_group_may_write_is_refused(ring: Ring, mode: int) -> None:
    os.chmod(ring.path("alice"), mode)
    with pytest.raises(errors.InvalidRequest, match="chmod 600") as caught:
        keys.read_pair(ring.path("alice"))
    assert caught.value.field == "key"
    os.chmod(ring.path("alice"), 0o440)  # as a service manager hands it over
    keys.read_pair(ring.path("alice"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "public = 5\nsecret = 5",
        f'public = "{"a" * 40}"',
        f'public = "{"a" * 39}"\nsecret = "{"b" * 40}"',
        f'public = "{"a" * 40}"\nsecret = "{"b" * 40}"',  # not each other's
        "\udcff",
        "x" * 5000,
    ],
)
def test_a_damaged_file_is_refused(ring: Ring, text: str) -> None:
    path = ring.directory / "alice.key"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(errors.InvalidRequest) as caught:
        keys.read_pair(path)
    assert caught.value.field.startswith("key")


@pytest.mark.parametrize(
    ("key", "server_key", "field"),
    [
        (None, "server", "key"),
        ("alice", None, "server_key"),
        ("alice", "x", "server_key"),
        ("alice", "/nowhere.pub", "server_key"),
        ("nobody", "server", "key"),
    ],
)
def test_what_a_client_is_given_is_checked(
    ring: Ring, key: str | None, server_key: str | None, field: str
) -> None:
    path = key and ring.path(key)
    with pytest.raises(errors.InvalidRequest) as caught:
        Client("tcp://127.0.0.1:1", key=path, server_key=ring.public.get(server_key or "", server_key))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("endpoint", "needed"),
    [
        ("ipc:///run/x", False),
        ("tcp://127.0.0.1:5555", False),
        ("tcp://localhost:5555", False),
        ("tcp://[::1]:5555", False),
        ("tcp://*:5555", True),
        ("tcp://0.0.0.0:*", True),
        ("tcp://10.1.2.3:5555", True),
        ("tcp://[2001:db8::1]:5555", True),
        ("tcp://dispatcher:5555", True),
    ],
)
def test_what_leaves_the_machine_needs_keys(endpoint: str, needed: bool) -> None:
    assert keys.needs_keys(endpoint) is needed
    if needed:
        with pytest.raises(errors.InvalidRequest, match="encrypted") as caught:
            Client(endpoint)
        assert caught.value.field == "key"


# ------------------------------------------------------------------ connections


def ask(endpoint: str, **options: Any) -> str:
    with Client(endpoint, connect_timeout_s=LONG_S, **options) as client:
        return client.generate("hello").text


def test_the_right_keys_connect_and_are_known_by_name(start: Any, ring: Ring) -> None:
    server = start()
    public = f"{ring.directory}/server.pub"
    assert ask(server.endpoint, key=ring.path("alice"), server_key=public) == "hello END"
    assert server.users == {"acme"}


@pytest.mark.parametrize(
    ("key", "server_key", "encrypted", "field"),
    [
        ("mallory", "server", True, "key"),  # not on the list
        ("alice", "mallory", True, "server_key"),  # the server is somebody else
        (None, None, True, "key"),
        ("alice", "server", False, ""),  # either could be to blame: whichever end was quicker
    ],
)
def test_wrong_keys_are_an_auth_error_long_before_the_time_is_up(
    start: Any, ring: Ring, key: str | None, server_key: str | None, encrypted: bool, field: str
) -> None:
    server = start(encrypted)
    options: dict[str, Any] = {}
    if key and server_key:
        options = {"key": ring.path(key), "server_key": ring.public[server_key]}
    with Client(server.endpoint, connect_timeout_s=LONG_S, **options) as client:
        for _ in range(2):  # and again: the client has not given up on its endpoint
            with pytest.raises(errors.AuthError) as caught:
                client.generate("hello")
            assert (
                caught.value.field == (field or caught.value.field)
                and server.endpoint in caught.value.message
            )

    async def main() -> None:
        async with AsyncClient(server.endpoint, connect_timeout_s=LONG_S, **options) as client:
            with pytest.raises(errors.AuthError):
                await client.status()

    asyncio.run(main())
    assert not server.seen, "nothing that was said arrived"


@pytest.mark.parametrize("mask", [0o000, 0o277])
def test_the_modes_are_the_same_whatever_the_umask_is(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        secret, _ = keys.create("k", tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.with_suffix(".pub").stat().st_mode) == 0o644


def test_no_secret_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "k.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        keys.create("k", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_peer_of_another_kind_is_an_error_long_before_the_time_is_up(ring: Ring, encrypted: bool) -> None:
    """ZeroMQ never tries such a one again, and may not even say that it broke the protocol."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()

    def answer() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 ".ljust(100) if encrypted else GREETING + PUB)
                while connection.recv(4096):
                    pass

    over = threading.Event()
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    options = {"key": ring.path("alice"), "server_key": ring.public["server"]} if encrypted else {}
    with (
        Client(f"tcp://{host}:{port}", connect_timeout_s=LONG_S, **options) as client,
        pytest.raises(errors.ProtocolError, match="does not speak"),
    ):
        client.status()
    over.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(fake.CAP_S)


def test_a_refused_key_is_noticed_also_when_the_client_was_idle_meanwhile(start: Any, ring: Ring) -> None:
    server = start()
    options = {"key": ring.path("mallory"), "server_key": ring.public["server"]}
    with Client(server.endpoint, connect_timeout_s=LONG_S, **options) as client:
        fake.wait_until(lambda: client._link._connection is None)
        with pytest.raises(errors.AuthError):
            client.status()


def test_an_encrypted_stream_goes_on_at_the_next_dispatcher(ring: Ring, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    users = {ring.public["alice"]: "acme"}

    def begin(answer: Any) -> fake.FakeDispatcher:
        return fake.FakeDispatcher(endpoint, answer, pair=ring.pair("server"), users=users)

    first = begin(lambda body: [])
    with Client(
        endpoint, resume_s=LONG_S, key=ring.path("alice"), server_key=ring.public["server"]
    ) as client:
        stream = client.stream("hello")
        first.wait_for("Generate")
        first.close()
        second = begin(fake.echo)
        assert stream.result().text == "hello END"
        second.close()


# ------------------------------------------------------------------ the gate


def test_the_gate_answers_from_its_table() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    public, _ = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    refused: list[tuple[str, str]] = []
    gate = Gate(context, {public.decode(): "acme"}, lambda *who: refused.append(who))
    raw = {key: zmq.utils.z85.decode(key) for key in (public, other)}
    head = [b"1.0", b"7", b"", b"10.0.0.9", b""]
    assert gate.answer([*head, b"CURVE", raw[public]]) == [b"1.0", b"7", b"200", b"OK", b"acme", b""]
    for credentials in ([b"CURVE", raw[other]], [b"NULL"], [b"PLAIN", raw[public], b"p"], [b"CURVE"]):
        assert gate.answer([*head, *credentials])[2:5] == [b"400", b"this key is not allowed", b""]
    assert refused == [(other.decode(), "10.0.0.9"), ("", "10.0.0.9"), ("", "10.0.0.9"), ("", "10.0.0.9")]
    assert user_of(zmq.Frame(b"x")) == ""
    gate.socket.close()
    context.term()


def test_a_peer_that_stops_in_the_middle_of_a_handshake_delays_nobody(start: Any, ring: Ring) -> None:
    import socket

    server = start()
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    hangers = [socket.create_connection((host, int(port))) for _ in range(50)]
    for each in hangers:
        each.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")
    begun = time.monotonic()
    assert ask(server.endpoint, key=ring.path("alice"), server_key=ring.public["server"]) == "hello END"
    assert time.monotonic() - begun < fake.CAP_S
    for each in hangers:
        each.close()
