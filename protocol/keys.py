"""CURVE keys: pairs in files, public keys as 40 characters of text (Z85), and what a socket is given of them.

`NAME.key` holds both halves and is for its owner alone (0600); `NAME.pub` holds the public half and may be
read by everybody. Both are TOML. Who is allowed to connect is the business of whoever binds.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from tinyloop_serve.protocol.errors import InvalidRequest, bad_field

SECRET_SUFFIX = ".key"
PUBLIC_SUFFIX = ".pub"
KEY_CHARS = 40  # of Z85: 32 bytes
MAX_FILE_BYTES = 4096
FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO  # a group may read: service managers hand keys over so


@dataclass(frozen=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Encryption:
    """What one end of a connection needs: its own pair, and which server it expects at the other."""

    pair: KeyPair
    server: str  # public key

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Before `socket.connect`."""
        socket.curve_serverkey = self.server.encode()
        _give(socket, self.pair)


def bind(socket: zmq.Socket[bytes], pair: KeyPair) -> None:
    """Before `socket.bind`: peers must use CURVE, and the ZAP handler of the context says which may."""
    socket.curve_server = True
    _give(socket, pair)


def _give(socket: zmq.Socket[bytes], pair: KeyPair) -> None:
    socket.curve_publickey = pair.public.encode()
    socket.curve_secretkey = pair.secret.encode()


# ------------------------------------------------------------------ files


def create(name: str, directory: Path) -> tuple[Path, str]:
    """A new pair in `directory`; returns the secret file and the public key. Overwrites nothing.

    Raises `InvalidRequest` (the name, or its files exist) or OSError.
    """
    if not name or name.startswith(".") or set(name) & set("/\0") or not name.isprintable():
        raise bad_field("name", name, "a file name")
    secret, public = directory / (name + SECRET_SUFFIX), directory / (name + PUBLIC_SUFFIX)
    for path in (secret, public):
        if path.exists():
            raise bad_field("name", name, f"a name that is free: {path} exists")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    halves = [half.decode() for half in zmq.curve_keypair()]
    _write(secret, 0o600, f'public = "{halves[0]}"\nsecret = "{halves[1]}"\n')
    _write(public, 0o644, f'public = "{halves[0]}"\n')
    return secret, halves[0]


def _write(path: Path, mode: int, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, mode)  # whatever the umask is
        file.write(text)


def read_pair(path: str | os.PathLike[str], field: str = "key") -> KeyPair:
    """The pair in a `.key` file. Raises `InvalidRequest` naming `field`, also when others may read it."""
    table = _read(path, field)
    mode = os.stat(path).st_mode
    if mode & FORBIDDEN_MODE:
        accepted = f"a file that only its owner can write and others cannot read (chmod 600 {path})"
        raise bad_field(field, stat.filemode(mode), accepted)
    public, secret = (
        _checked(table.get(half), f"{field}: {half} in {path}") for half in ("public", "secret")
    )
    pair = KeyPair(public, secret)
    if zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise bad_field(field, str(path), "a public key that belongs to the secret one")
    return pair


def public_key(text: str | os.PathLike[str], field: str = "server_key") -> str:
    """A public key, given as its 40 characters or as the path of a `.pub` or `.key` file.

    Raises `InvalidRequest` naming `field`.
    """
    given = os.fspath(text)
    if os.path.exists(given) or given.endswith((PUBLIC_SUFFIX, SECRET_SUFFIX)):
        return _checked(_read(given, field).get("public"), f"{field}: public in {given}")
    if _is_key(given):
        return given
    raise bad_field(field, given, f"{KEY_CHARS} characters of Z85, or the path of a {PUBLIC_SUFFIX} file")


def found(directory: Path) -> list[tuple[str, str, bool]]:
    """(name, public key, whether its secret half is here) of each key in `directory`, by name."""
    names = {path.stem for path in directory.iterdir() if path.suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX)}
    keys = []
    for name in sorted(names):
        secret = directory / (name + SECRET_SUFFIX)
        known = secret if secret.exists() else directory / (name + PUBLIC_SUFFIX)
        keys.append((name, public_key(known), secret.exists()))
    return keys


def _read(path: str | os.PathLike[str], field: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.loads(file.read(MAX_FILE_BYTES).decode())
    except (OSError, ValueError) as error:  # not there, not text, not TOML
        raise bad_field(field, str(path), f"a key file as `tinyloop keys new` makes them ({error})") from None


def _checked(value: object, field: str) -> str:
    if not isinstance(value, str) or not _is_key(value):
        raise InvalidRequest(f"{field} is not {KEY_CHARS} characters of Z85", field=field)
    return value


def _is_key(text: str) -> bool:
    return len(text) == KEY_CHARS and set(text.encode()) <= set(z85.Z85CHARS)


# ------------------------------------------------------------------ where keys are needed


def encryption(
    endpoint: str, key: str | os.PathLike[str] | None, server_key: str | os.PathLike[str] | None
) -> Encryption | None:
    """What a client of `endpoint` needs, from a `.key` file and the server's public key; None: neither.

    Raises `InvalidRequest`.
    """
    if key is None and server_key is None:
        if needs_keys(endpoint):
            accepted = "the path of a key file, and server_key: what goes over a network is encrypted"
            raise bad_field("key", None, f"{accepted} (`tinyloop keys new`)")
        return None
    if key is None or server_key is None:
        raise bad_field("key" if key is None else "server_key", None, "both of key, server_key, or neither")
    return Encryption(read_pair(key), public_key(server_key))


def needs_keys(endpoint: str) -> bool:
    """Whether messages to or from `endpoint` leave this machine, so that they must be encrypted."""
    scheme, _, address = endpoint.partition("://")
    host, has_port, _ = address.rpartition(":")
    return scheme == "tcp" and bool(has_port) and not is_loopback(host.strip("[]"))


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
