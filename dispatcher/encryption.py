"""Which connections of the dispatcher are encrypted, and with which keys.

The front is when it is tcp and we have a `key`: then only the tenants' keys may connect, and a key names
its tenant. A replica's link is when it is tcp and `replica_keys` says whom to expect there. ipc sockets are
kept by their directory, and tcp without keys may not leave the machine. No sockets here.
"""

from __future__ import annotations

from tinyloop_serve.dispatcher.config import Config
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.protocol.errors import InvalidRequest
from tinyloop_serve.protocol.keys import Encryption, KeyPair, needs_keys, read_pair


class Keyring:
    def __init__(self, config: Config) -> None:
        """Reads the key file. Raises `ConfigError`."""
        tenants, expected = config.tenants, config.replica_keys
        self._pair = _read(config.key)
        self._expected = dict(zip(config.replicas, expected, strict=False)) if len(expected) > 1 else {}
        self._common = expected[0] if len(expected) == 1 else ""
        self.front: KeyPair | None = self._pair if config.front.startswith("tcp://") else None
        self.users = {key: tenant for key in sorted(tenants.keys) if (tenant := tenants.named_by(key))}
        if self.front and not self.users:
            accepted = "at least one key in a [tenants.NAME] table"
            raise ConfigError(f"tenants: nobody could connect; expected {accepted}", field="tenants")
        for endpoint in config.replicas:
            self.of(endpoint)

    def of(self, endpoint: str) -> Encryption | None:
        """For the link to a replica; None: it is not encrypted. Raises `ConfigError` where it must be."""
        expected = self._expected.get(endpoint, self._common)
        if endpoint.startswith("tcp://") and self._pair and expected:
            return Encryption(self._pair, expected)
        if needs_keys(endpoint):
            accepted = (
                "the public key of each replica beyond this machine, or one for all, and a `key` of our own"
            )
            raise ConfigError(f"replica_keys: none for {endpoint}; expected {accepted}", field="replica_keys")
        return None


def _read(path: str) -> KeyPair | None:
    try:
        return read_pair(path) if path else None
    except InvalidRequest as error:
        raise ConfigError(error.message, field="key", value=error.value, accepted=error.accepted) from None
