"""Every message of the protocol, in the order they are spoken; the prose is in SPEC.md beside this file.

Two conversations share the shapes: client <-> dispatcher ("front") and dispatcher <-> replica ("back"). A
multipart message is `[VERSION, body]`, and where a body says so, `[VERSION, body, payload, payload,
...]`; to a client the dispatcher may put several bodies into one message: `[VERSION, body, body, ...]`.
Bodies are MessagePack maps with a `type` key. Token ids travel as raw little-endian u32 bytes.
This file must not know sockets or clocks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = b"TL2"

StopReason = Literal["eos", "stop_sequence", "max_tokens", "grammar", "cancelled"]
ReplicaState = Literal["starting", "ready", "busy", "draining", "lost"]
HandleKind = Literal["prefix", "resume", "scaffold"]
Method = Literal["plain", "speculative", "tree_speculative"]


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


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a handle is made of: with it a lost handle is built again, with the same tokens to follow."""

    kind: HandleKind
    prompt_text: str | None = None  # exactly one of prompt_text, prompt_tokens
    prompt_tokens: bytes | None = None
    loops: int = 0  # of the prefix, or that the resume handle was built at; 0 = the model's default
    cache_mode: str = "fp16"
    cache_window: int = 0  # resume only


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
    priority: int = 0  # -10 .. 10: orders the tenant's own requests, higher first
    method: Method = "plain"  # speculative ones run plain where the calibration says that they do not pay
    handle: str = ""  # of a prefix: the prompt follows it (and may be empty); of a resume: no prompt
    recipe: Recipe | None = None  # of that handle, so that it can be built again if it is lost
    done: bytes = b""  # u32: tokens of this answer that the client has already; the answer goes on after them
    model: str = ""  # identity of the model that gave `done`: no other one can go on with it; "" = unknown


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


class CreateHandle(Message, frozen=True):
    """Builds a handle on one replica. Answered by `Handle` or `Failed`. The tenant's own unless `shared`."""

    id: str  # from the same set of ids as requests
    recipe: Recipe
    shared: bool = False
    detached: bool = False  # outlives the connection that made it, for its lease
    lease_ms: int = 600_000  # it goes when it was neither used nor renewed for so long


class RenewHandle(Message, frozen=True):
    """Answered by `Handle` or `Failed`; its lease begins anew."""

    id: str
    handle: str


class DropHandle(Message, frozen=True):
    """Answered by `Handle` (what it was) or `Failed`."""

    id: str
    handle: str


class ListHandles(Message, frozen=True):
    """The tenant's own handles and the shared ones. Answered by `Handles`."""

    id: str


class Control(Message, frozen=True):
    """An operator's order. Answered by `Controlled` or `Failed`; only tenants with `admin` may.

    attach ENDPOINT   begin to use the replica there
    drain REPLICA     (a name or endpoint) nothing new for it; after `within_ms` its requests go on elsewhere
    resume REPLICA    end its drain
    detach REPLICA    drain it, then forget it
    accept MODEL      (a fingerprint; "" = any) replicas that announce it may join; the first sets the model
    """

    id: str
    action: Literal["attach", "drain", "detach", "resume", "accept"]
    target: str = ""
    within_ms: int = 30_000


class Goodbye(Message, frozen=True):
    """The peer leaves; a client's live requests are cancelled, a replica's continue elsewhere."""


# ------------------------------------------------------------------ dispatcher -> client


class Tokens(Message, frozen=True):
    """The next tokens of a request. `text` is the text that became certain with them (complete UTF-8
    characters, nothing that might still be the start of a stop string)."""

    id: str
    seq: int  # index of the first token here in the answer: 0, then the count so far
    tokens: bytes  # u32 little-endian
    text: str = ""
    model: str = ""  # identity of the model that they come from; only told with the first of a run


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
    replica: str = ""  # the one that finished it
    prefix_tokens: int = 0  # of the prompt, not computed again
    loops_skipped: int = 0  # of the prompt's tokens, by a warm start
    drafted: int = 0
    accepted: int = 0
    mean_loops: float = 0.0  # run per decoded token
    method: str = "plain"  # how it was decoded, whatever was asked
    method_reason: str = ""  # why not as asked
    failovers: int = 0  # replicas that were lost under it


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


class HandleInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    handle: str  # its name: 1 to 64 characters, unguessable
    kind: HandleKind
    tokens: int  # of the prompt it holds
    loops: int
    cache_mode: str = "fp16"
    cache_window: int = 0
    bytes: int = 0
    replica: str = ""
    shared: bool = False
    mine: bool = True  # of this tenant
    uses: int = 0
    idle_ms: int = 0  # since it was last used or renewed
    lease_ms: int = 0


class Handle(Message, frozen=True):
    id: str
    info: HandleInfo


class Handles(Message, frozen=True):
    id: str
    handles: tuple[HandleInfo, ...]


class Controlled(Message, frozen=True):
    """The order was carried out, or (drain, detach) has begun: `Status` shows how far it is."""

    id: str
    message: str = ""


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
    fingerprint: str = ""  # of the model it serves
    weights: str = ""  # "fp16", "int8", ...
    budget_bytes: int = 0  # what caches and handles may take
    reserved_bytes: int = 0  # what the ledger has given out, handles included
    handles: int = 0
    max_handles: int = 0
    speculation: str = ""  # "on 1.42x", "off 1.1x", "pending"
    health: str = "ok"  # or what is wrong
    tokens: int = 0  # that it has made since the dispatcher knows it


class BucketStatus(msgspec.Struct, frozen=True):
    shape: str  # human-readable: loops, band, cache mode, sampling
    waiting: int
    oldest_ms: int


class Latency(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of requests that were answered lately. Milliseconds: median, 90th and 99th percentile."""

    requests: int = 0  # it was taken from; 0 = there were none
    first_token_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)  # from arrival
    token_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)  # each token after the first
    whole_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)  # from arrival to the end


class ModelInfo(msgspec.Struct, frozen=True):
    """What a replica serves."""

    name: str
    fingerprint: str
    vocab_size: int
    loops: int  # default
    max_loops: int
    max_seq_len: int
    parameters: int = 0
    has_tokenizer: bool = False
    chat_template: str = ""
    weights: str = ""  # what the engine holds matrices in: "fp16", "int8", ...
    backend: str = ""  # what computes: "cpu", "cuda"

    @property
    def identity(self) -> str:
        """Equal ones give equal tokens: the file, the weights and what computes with them."""
        return " ".join(filter(None, (self.fingerprint, self.weights, self.backend)))


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
    refused: int = 0
    failovers: int = 0
    handles: int = 0
    draining: bool = False
    tokens: int = 0  # forwarded
    latency: Latency = Latency()


class Pong(Message, frozen=True):
    """Answer to `Ping`. From a replica it carries its life signs; `step_counter` must grow while
    `running` > 0."""

    n: int
    step_counter: int = 0
    running: int = 0
    memory_bytes: int = 0
    health: str = "ok"  # of a replica: or what is wrong, then it gets no new work


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
    method: Method = "plain"
    handle: str = ""  # one that this replica holds, to save work; `prompt` is the whole prompt all the same
    done: bytes = (
        b""  # u32: tokens of the answer that the client has; go on after them, with seq and text to match
    )
    failovers: int = 0  # goes into the stats


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


class Build(Message, frozen=True):
    """Makes a handle, between two runs; answered by `Built`. The credit is not touched: a replica keeps the
    order of Build, Drop and Run as they came."""

    handle: str
    kind: HandleKind
    prompt: bytes  # u32
    loops: int
    cache_mode: str = "fp16"
    cache_window: int = 0
    tenant: str = ""  # kept and told again in `Ready`; not used
    shared: bool = False
    detached: bool = False
    lease_ms: int = 600_000  # 0 = none: one that the replica has had from its start


class Drop(Message, frozen=True):
    """Frees these handles after what came before; unknown ones are ignored."""

    handles: tuple[str, ...]


# ------------------------------------------------------------------ replica -> dispatcher


class CacheCost(msgspec.Struct, frozen=True):
    """Bytes of a decode cache of `n` positions (rounded up to `round_to`) at `loops`:
    n * (fixed + loops * per_loop)."""

    fixed: int
    per_loop: int
    round_to: int = 16


class Budget(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the replica may hold, checked at its start."""

    memory_bytes: int  # the budget that was configured, or found
    weight_bytes: int
    cache_bytes: int  # for the decode caches of one run
    handle_bytes: int  # for handles
    max_handles: int  # over all kinds
    costs: dict[str, CacheCost]  # per cache mode
    window_rows: int = 0  # a windowed cache holds window + window_rows positions


class Calibration(msgspec.Struct, frozen=True, omit_defaults=True):
    """Speculation, measured on this replica."""

    enabled: bool = False
    speedup: float = 0.0  # over plain decoding
    threshold: float = 1.3
    draft_loops: int = 0
    draft_ahead: int = 0
    prompts: int = 0  # it was measured on


class HeldHandle(msgspec.Struct, frozen=True, omit_defaults=True):
    """A handle that the replica has had since before this Hello, as `Build` and `Built` described it."""

    build: Build
    bytes: int = 0


class Ready(Message, frozen=True):
    """Answer to `Hello`: the announcement."""

    name: str
    pid: int
    device: str
    model: ModelInfo
    tokenizer: str = ""  # tokenizer.json text; "" = token prompts only
    add_bos: int = -1  # token put in front of text prompts; -1 = none
    memory_bytes: int = 0
    budget: Budget | None = None  # None: not limited
    calibration: Calibration | None = None  # None: not measured (yet): see Calibrated
    handles: tuple[HeldHandle, ...] = ()
    health: str = "ok"  # as in `Pong`


class Calibrated(Message, frozen=True):
    """Speculation has been measured, after Ready."""

    calibration: Calibration


class Built(Message, frozen=True):
    """The answer to `Build`: the bytes, or why not. `evicted`: handles that went to make room, least recently
    used first."""

    handle: str
    bytes: int = 0
    evicted: tuple[str, ...] = ()
    code: str = ""  # of the error; "" = it is there
    message: str = ""


class Step(Message, frozen=True):
    """What one decode step produced. One payload frame follows per entry of `keys`: an encoded `Tokens`,
    `Done` or `Failed` for that request's client, forwarded as it is. `final[i]` marks a terminal payload.
    `tokens[i]` is the number of tokens in payload i."""

    run: int
    keys: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    final: tuple[bool, ...] = ()
    idle: bool = False  # the run is over: the credit is back


ToDispatcher = (
    Generate
    | Cancel
    | Ping
    | GetStatus
    | CreateHandle
    | RenewHandle
    | DropHandle
    | ListHandles
    | Control
    | Goodbye
)
ToClient = Tokens | Done | Failed | Handle | Handles | Controlled | Status | Pong
ToReplica = Hello | Run | CancelLanes | Build | Drop | Ping | Goodbye
FromReplica = Ready | Calibrated | Step | Built | Pong | Goodbye
