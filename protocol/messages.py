"""Every message of the protocol, in the order they are spoken; the prose is in SPEC.md beside this file.

Two conversations share the shapes: client <-> dispatcher ("front") and dispatcher <-> replica ("back"). A
multipart message is `[VERSION, body]`, and where a body says so, `[VERSION, body, payload, payload,
...]`. Bodies are MessagePack maps with a `type` key. Token ids travel as raw little-endian u32 bytes.
This file must not know sockets or clocks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = b"TL1"

StopReason = Literal["eos", "stop_sequence", "max_tokens", "cancelled"]
ReplicaState = Literal["starting", "ready", "busy", "lost"]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all bodies; `type` is the class name."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields that every lane of one batch must share (SPEC: a batch has one shape)."""

    loops: int = 0  # core iterations per token; 0 = the model's own default
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    cache_mode: str = "fp16"
    cache_window: int = 0  # positions; 0 = the whole context
    beam_size: int = 1


# ------------------------------------------------------------------ client -> dispatcher


class Generate(Message, frozen=True):
    """One request. Answered by `Tokens`* and exactly one of `Done`, `Failed`."""

    id: str  # chosen by the client, unique among its live requests, 1 to 64 characters
    prompt_text: str | None = None  # exactly one of prompt_text, prompt_tokens
    prompt_tokens: bytes | None = None  # u32 little-endian
    sampling: Sampling = Sampling()
    max_tokens: int = 128
    seed: int = 0  # 0 .. 2**64-1
    stop: tuple[str, ...] = ()  # strings; the text ends before the first that appears
    stop_tokens: tuple[
        tuple[int, ...], ...
    ] = ()  # token sequences; generation ends after the first that appears
    ignore_eos: bool = False
    stream: bool = True  # False: the whole answer comes in one `Tokens` before `Done`
    deadline_ms: int = 0  # counted from arrival at the dispatcher; 0 = none


class Cancel(Message, frozen=True):
    """Ends a request; its terminal message is `Done` with stop_reason "cancelled". Unknown ids are
    ignored."""

    id: str


class Ping(Message, frozen=True):
    """Liveness, in both conversations; answered by `Pong` with the same `n`. A client that has pinged
    once is held to it: after `lease_ms` of silence its requests are cancelled."""

    n: int
    lease_ms: int = 0


class GetStatus(Message, frozen=True):
    """Answered by `Status` with the same `id`."""

    id: str


class Goodbye(Message, frozen=True):
    """The peer leaves; a client's live requests are cancelled, a replica's are failed over or failed."""


# ------------------------------------------------------------------ dispatcher -> client


class Tokens(Message, frozen=True):
    """The next tokens of a request. `text` is the text that became certain with them (complete UTF-8
    characters, nothing that might still be the start of a stop string)."""

    id: str
    seq: int  # index of the first token here in the answer: 0, then the count so far
    tokens: bytes  # u32 little-endian
    text: str = ""


class Stats(msgspec.Struct, frozen=True, omit_defaults=True):
    """GenerateStats of the engine, then what the pool adds. Times in milliseconds."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    loops: int = 0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0  # engine time from the call to the first token
    decode_ms: float = 0.0
    cache_bytes: int = 0
    queue_ms: float = 0.0  # from arrival at the dispatcher to the assignment
    batch_size: int = 1  # lanes of the call that served it, padding lanes not counted
    replica: str = ""


class Done(Message, frozen=True):
    """Terminal: the request ended well. `text` is the rest of the text, after all `Tokens`."""

    id: str
    stop_reason: StopReason
    text: str = ""
    stats: Stats = Stats()


class Failed(Message, frozen=True):
    """Terminal: the request was refused or broke. See errors.py for the codes."""

    id: str  # "" when the message could not be read far enough to know
    code: str
    message: str
    field: str = ""
    value: str = ""
    accepted: str = ""
    retry_after_ms: int = 0


class ReplicaStatus(msgspec.Struct, frozen=True):
    name: str
    endpoint: str
    state: ReplicaState
    pid: int = 0
    running: int = 0  # requests being decoded
    served: int = 0  # requests finished since the dispatcher knows it
    step_counter: int = 0  # the core's: grows while it works
    memory_bytes: int = 0  # resident
    last_seen_ms: int = 0  # age of its last message
    error: str = ""  # why it is lost


class BucketStatus(msgspec.Struct, frozen=True):
    shape: str  # human-readable: loops, band, cache mode, sampling
    waiting: int
    oldest_ms: int


class ModelInfo(msgspec.Struct, frozen=True):
    """What a replica serves; equal fingerprints mean equal tokens."""

    name: str
    fingerprint: str
    vocab_size: int
    loops: int  # default
    max_loops: int
    max_seq_len: int
    parameters: int = 0
    has_tokenizer: bool = False
    chat_template: str = ""


class Status(Message, frozen=True):
    id: str
    version: str
    uptime_ms: int
    model: ModelInfo | None
    replicas: tuple[ReplicaStatus, ...]
    buckets: tuple[BucketStatus, ...]
    waiting: int
    running: int
    finished: int
    failed: int
    clients: int


class Pong(Message, frozen=True):
    """Answer to `Ping`. From a replica it carries its life signs; `step_counter` must grow while
    `running` > 0."""

    n: int
    step_counter: int = 0
    running: int = 0
    memory_bytes: int = 0


# ------------------------------------------------------------------ dispatcher -> replica


class Hello(Message, frozen=True):
    """Opens the back conversation; answered by `Ready`. A replica works for the dispatcher whose Hello
    came last and cancels what it still did for another."""

    dispatcher: str  # unique per dispatcher process


class Lane(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request inside a `Run`."""

    key: int  # the dispatcher's own number for it; unique for the dispatcher's life
    id: str  # the client's id, for the frames that the replica writes
    prompt: bytes  # u32 little-endian
    max_tokens: int
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    stream: bool = True
    queue_ms: float = 0.0


class Run(Message, frozen=True):
    """One engine call: `generate_stream` for one lane, `generate_batch` at `batch_size` lanes for more.
    The replica has one credit: the next Run may come after `Step.idle`."""

    run: int
    sampling: Sampling  # loops already resolved
    lanes: tuple[Lane, ...]
    batch_size: int = 1  # the configured size that holds the lanes


class CancelLanes(Message, frozen=True):
    """Stop these lanes at the next step; each still gets its terminal frame. Unknown keys are ignored."""

    keys: tuple[int, ...]


# ------------------------------------------------------------------ replica -> dispatcher


class Ready(Message, frozen=True):
    """Answer to `Hello`: the announcement."""

    name: str
    pid: int
    device: str
    model: ModelInfo
    tokenizer: str = ""  # tokenizer.json text; "" = token prompts only
    add_bos: int = -1  # token put in front of text prompts; -1 = none
    memory_bytes: int = 0


class Step(Message, frozen=True):
    """What one decode step produced. One payload frame follows per entry of `keys`: an encoded `Tokens`,
    `Done` or `Failed` for that request's client, forwarded as it is. `final[i]` marks a terminal payload.
    `tokens[i]` is the number of tokens in payload i."""

    run: int
    keys: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    final: tuple[bool, ...] = ()
    idle: bool = False  # the run is over: the credit is back


ToDispatcher = Generate | Cancel | Ping | GetStatus | Goodbye
ToClient = Tokens | Done | Failed | Status | Pong
ToReplica = Hello | Run | CancelLanes | Ping | Goodbye
FromReplica = Ready | Step | Pong | Goodbye
