"""What an event of the core results in: messages to send, and the few things that are not messages."""

from __future__ import annotations

from typing import NamedTuple

from tinyloop_serve.protocol.messages import Message

TOKENIZER = "tokenizer"  # the peer that takes `Load` and `Tokenize`
Peer = bytes | str  # a client's routing id | a replica's endpoint or TOKENIZER


class Load(NamedTuple):
    """To the tokenizer: what the fleet's model uses from here on."""

    tokenizer: str  # tokenizer.json text; "" = the model has none
    add_bos: int  # token put in front; -1 = none


class Tokenize(NamedTuple):
    """To the tokenizer: answered by `Core.tokenized` with the same key."""

    key: int
    text: str
    bos: bool = True  # False: it goes on after other tokens, so nothing is put in front


class Attach(NamedTuple):
    """To a replica's link, which there is none of yet: connect to this endpoint from now on."""


class Detach(NamedTuple):
    """To a replica's link: what was said still goes out, then it is closed for good and forgotten."""


class Reset(NamedTuple):
    """To a replica's link: whatever is on the wire is void; connect afresh."""


class Send(NamedTuple):
    """`payloads` are encoded bodies for a client, sent as they came, and then `message` is None."""

    peer: Peer
    message: Message | Load | Tokenize | Attach | Detach | Reset | None
    payloads: tuple[bytes, ...] = ()
