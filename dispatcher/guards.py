"""What the dispatcher refuses before any work is done: what the announced model cannot do, and modes.

Every refusal is a typed error that names the field and shows the arithmetic. Ranges that need no model
(NaN, negative counts, lengths of ids) were refused by the codec. This file must not know queues, replicas
or sockets.
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
from tinyloop_serve.protocol.limits import validate
from tinyloop_serve.protocol.messages import Generate, ModelInfo, Sampling
from tinyloop_serve.protocol.modes import supported

if TYPE_CHECKING:
    from tinyloop_serve.dispatcher.config import Config
    from tinyloop_serve.dispatcher.replicas import Replicas


def enter(asked: Generate, draining: bool, replicas: Replicas, config: Config) -> None:
    """Whether the dispatcher takes it at all: its form, and that somebody may serve it.

    Raises `InvalidRequest`, `LimitExceeded` or `Unavailable`.
    """
    validate(asked)
    if draining:
        raise Unavailable("the dispatcher is shutting down and takes no new requests")
    if not config.replica_wait_ms and not replicas.alive():
        raise Unavailable(replicas.why_none())


def check(asked: Generate, prompt: bytes, model: ModelInfo, cache_modes: tuple[str, ...]) -> Sampling:
    """Whether this model can run it; returns the sampling with the model's default loops filled in.

    `prompt` is u32 little-endian. Raises `InvalidRequest`, `LimitExceeded` or `ModeRefused`.
    """
    sampling = _resolve(asked, model, cache_modes)
    _fit(prompt, asked, model)
    return sampling


def batchable(sampling: Sampling) -> bool:
    """Whether the mode matrix allows this in `generate_batch`; if not, the request always runs alone."""
    modes = [sampling.cache_mode]
    modes += ["cache_window"] if sampling.cache_window else []
    modes += ["beam"] if sampling.beam_size > 1 else []
    return all(supported(mode, "batch") for mode in modes)


def _resolve(asked: Generate, model: ModelInfo, cache_modes: tuple[str, ...]) -> Sampling:
    sampling = asked.sampling
    if sampling.cache_mode not in cache_modes:
        accepted = ", ".join(cache_modes)
        message = f"sampling.cache_mode: {sampling.cache_mode!r} is not offered here; expected {accepted}"
        raise ModeRefused(message, field="sampling.cache_mode", value=sampling.cache_mode, accepted=accepted)
    loops = sampling.loops or model.loops
    if loops > model.max_loops:
        message = f"sampling.loops {loops} > max_loops {model.max_loops} of {model.name}"
        accepted = f"1 to {model.max_loops}, or 0 for the model's default {model.loops}"
        raise LimitExceeded(message, field="sampling.loops", value=str(loops), accepted=accepted)
    return msgspec.structs.replace(sampling, loops=loops)


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
    ids = tokens_from_bytes(prompt, field)
    if (largest := max(ids)) >= model.vocab_size:
        where = f"{field}[{ids.index(largest)}]"
        raise InvalidRequest(
            f"{where} = {largest} is not in the vocabulary of {model.vocab_size}",
            field=where,
            value=str(largest),
            accepted=f"0 to {model.vocab_size - 1}",
        )
