"""What the dispatcher refuses before any work is done: what the announced model cannot do, and modes.

Every refusal is a typed error that names the field and shows the arithmetic. Ranges that need no model
(NaN, negative counts, lengths of ids) were refused by `limits.validate`. This file must not know queues,
replicas or sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tinyloop_serve.protocol.codec import tokens_from_bytes
from tinyloop_serve.protocol.errors import (
    InvalidRequest,
    LimitExceeded,
    ModeRefused,
    Unavailable,
    bad_field,
)
from tinyloop_serve.protocol.messages import Generate, HandleKind, ModelInfo, Recipe, Sampling
from tinyloop_serve.protocol.modes import supported

RETRY_S = 0.5  # when a successor may be there

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.config import Config
    from tinyloop_serve.dispatcher.replicas import Replicas


def enter(draining: bool, replicas: Replicas, config: Config) -> None:
    """Whether the dispatcher takes anything at all. Raises `Unavailable`."""
    if draining:
        leaving = "the dispatcher is shutting down and takes no new requests"
        raise Unavailable(leaving, retry_after_s=RETRY_S)
    if not config.replica_wait_ms and not replicas.alive():
        raise Unavailable(replicas.why_none())


def check(asked: Generate, prompt: bytes, model: ModelInfo, config: Config) -> Sampling:
    """Whether the product's allow-list, the mode matrix and this model let it run; returns the sampling with
    the model's default loops filled in.

    `prompt` is u32 little-endian, with the tokens of the handle it uses in front. Raises `InvalidRequest`,
    `LimitExceeded` or `ModeRefused`.
    """
    _allow(asked, config)
    sampling = resolve(asked.sampling, model)
    _fit(prompt, asked, model)
    _in_vocabulary("done", asked.done, model)
    for stop in asked.stop_tokens:
        if max(stop) >= model.vocab_size:
            raise bad_field("stop_tokens", stop, f"token ids of 0 to {model.vocab_size - 1}")
    return sampling


def check_handle(asked: Generate, kind: HandleKind, held: Recipe, sampling: Sampling) -> None:
    """Whether a request may use this handle. Raises `InvalidRequest` or `ModeRefused`, naming the field."""
    column = "resume" if kind == "resume" else "prefix"
    for mode in _modes(sampling):
        if not supported(mode, column):
            raise _refused(mode, f"a {kind} handle")
    if asked.method != "plain":
        raise bad_field(
            "method", asked.method, f"'plain' for a request that uses a {kind} handle", ModeRefused
        )
    if kind == "resume" and (asked.prompt_text or asked.prompt_tokens):
        raise bad_field("prompt_text", "a prompt", "none: the resume handle holds the whole prompt")
    if sampling.cache_mode != held.cache_mode:
        raise bad_field("sampling.cache_mode", sampling.cache_mode, f"{held.cache_mode!r}, the handle's")
    if kind == "resume" and sampling.cache_window != held.cache_window:
        raise bad_field("sampling.cache_window", sampling.cache_window, f"{held.cache_window}, the handle's")
    if kind == "resume" and sampling.loops < held.loops:
        raise bad_field(
            "sampling.loops", sampling.loops, f"at least {held.loops}, which the handle was built at"
        )
    if kind != "resume" and sampling.loops != held.loops:
        raise bad_field("sampling.loops", sampling.loops, f"{held.loops}, which the handle was built at")


def batchable(sampling: Sampling) -> bool:
    """Whether the mode matrix allows this in `generate_batch`; if not, the request always runs alone."""
    return all(supported(mode, "batch") for mode in _modes(sampling))


def resolve(sampling: Sampling, model: ModelInfo) -> Sampling:
    """With the model's default loops filled in. Raises `LimitExceeded` for more loops than it allows."""
    loops = sampling.loops or model.loops
    if loops > model.max_loops:
        message = f"sampling.loops {loops} > max_loops {model.max_loops} of {model.name}"
        accepted = f"1 to {model.max_loops}, or 0 for the model's default {model.loops}"
        raise LimitExceeded(message, field="sampling.loops", value=str(loops), accepted=accepted)
    return msgspec.structs.replace(sampling, loops=loops)


def _modes(sampling: Sampling) -> list[str]:
    """The rows of the mode matrix that it uses."""
    modes = [sampling.cache_mode]
    modes += ["cache_window"] if sampling.cache_window else []
    modes += ["beam"] if sampling.beam_size > 1 else []
    return modes


def _allow(asked: Generate, config: Config) -> None:
    """The product's allow-list, then the mode matrix."""
    sampling = asked.sampling
    if sampling.cache_mode not in config.cache_modes:
        accepted = ", ".join(config.cache_modes)
        message = f"sampling.cache_mode: {sampling.cache_mode!r} is not offered here; expected {accepted}"
        raise ModeRefused(message, field="sampling.cache_mode", value=sampling.cache_mode, accepted=accepted)
    used = {
        "beam": ("sampling.beam_size", sampling.beam_size > 1),
        "cache_window": ("sampling.cache_window", sampling.cache_window > 0),
        "handles": ("handle", bool(asked.handle or asked.recipe)),
        "speculative": ("method", asked.method == "speculative"),
        "tree_speculative": ("method", asked.method == "tree_speculative"),
    }
    for feature, (field, uses) in used.items():
        if uses and feature not in config.features:
            message = (
                f"{field}: {feature} is not offered here; this fleet allows {', '.join(config.features)}"
            )
            raise ModeRefused(message, field=field, value=feature, accepted=", ".join(config.features))
    column = "single" if asked.method == "plain" else asked.method
    for mode in _modes(sampling):
        if not supported(mode, column):
            raise _refused(mode, column.replace("_", " "))
    if sampling.beam_size > 1 and sampling.temperature > 0:
        accepted = "0 with beam_size > 1: beam search does not sample"
        raise bad_field("sampling.temperature", sampling.temperature, accepted, ModeRefused)


def _refused(mode: str, way: str) -> ModeRefused:
    field = {"beam": "sampling.beam_size", "cache_window": "sampling.cache_window"}.get(
        mode, "sampling.cache_mode"
    )
    message = f"{field}: {mode} cannot be combined with {way}"
    return ModeRefused(
        message, field=field, value=mode, accepted=f"a request without {mode}, or without {way}"
    )


def _fit(prompt: bytes, asked: Generate, model: ModelInfo) -> None:
    field = "prompt_tokens" if asked.prompt_text is None else "prompt_text"
    length = len(prompt) // 4
    if length == 0:
        raise bad_field(field, asked.prompt_text or "", "a prompt of at least one token")
    total = length + asked.max_tokens
    if total > model.max_seq_len:
        message = f"prompt {length} + max_tokens {asked.max_tokens} = {total}"
        message += f" > max_seq_len {model.max_seq_len}"
        room = model.max_seq_len - length
        if room > 0:
            value = str(asked.max_tokens)
            raise LimitExceeded(message, field="max_tokens", value=value, accepted=f"1 to {room}")
        accepted = f"at most {model.max_seq_len - 1} tokens"
        raise LimitExceeded(message, field=field, value=f"{length} tokens", accepted=accepted)
    _in_vocabulary(field, prompt, model)


def _in_vocabulary(field: str, tokens: bytes, model: ModelInfo) -> None:
    ids = tokens_from_bytes(tokens, field)
    if (largest := max(ids, default=0)) >= model.vocab_size:
        where = f"{field}[{ids.index(largest)}]"
        raise InvalidRequest(
            f"{where} = {largest} is not in the vocabulary of {model.vocab_size}",
            field=where,
            value=str(largest),
            accepted=f"0 to {model.vocab_size - 1}",
        )
