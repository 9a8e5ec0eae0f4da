"""What a call costs at least, from the model's shape alone: operations, and bytes read.

Weights count once per pass of their layer, whatever cache they come from; a multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
PREFILL_CHUNK = 256  # rows of one pass, the engine's default


class Work(NamedTuple):
    flop: float
    bytes: float
    core_bytes: float  # of the weights that every loop reads again

    def per(self, tokens: int) -> Work:
        return Work(self.flop / tokens, self.bytes / tokens, self.core_bytes)


def decode(
    config: Mapping[str, Any], weights: str, lanes: int, context: float, cache_bytes: float, loops: int
) -> Work:
    """One lockstep step; cache_bytes: of one position of one lane."""
    layer, head = parameters(config)
    visits = layer_visits(config, loops)
    flop = 2 * lanes * (visits * layer + head) + 4 * lanes * visits * context * query_width(config)
    read = (visits * layer + head) * WEIGHT_BYTES[weights] + lanes * context * cache_bytes
    return Work(flop, read, config["n_core"] * layer * WEIGHT_BYTES[weights])


def prefill(config: Mapping[str, Any], weights: str, tokens: int, cache_bytes: float, loops: int) -> Work:
    """A whole prompt: every position attends to those before it, the head runs once."""
    layer, head = parameters(config)
    visits = layer_visits(config, loops)
    pairs = tokens * (tokens + 1) / 2
    flop = 2 * (tokens * visits * layer + head) + 4 * visits * pairs * query_width(config)
    passes = -(-tokens // PREFILL_CHUNK)
    read = (passes * visits * layer + head) * WEIGHT_BYTES[weights] + tokens * cache_bytes
    return Work(flop, read, config["n_core"] * layer * WEIGHT_BYTES[weights])


def parameters(c: Mapping[str, Any]) -> tuple[int, int]:
    """Of one layer's matrices, and of the head."""
    kv = c["n_kv_heads"] * c["head_dim"]
    return c["d_model"] * (2 * query_width(c) + 2 * kv + 3 * c["d_ffn"]), c["vocab_size"] * c["d_model"]


def layer_visits(c: Mapping[str, Any], loops: int) -> int:
    return int(c["n_prelude"] + loops * c["n_core"] + c["n_coda"])


def query_width(c: Mapping[str, Any]) -> int:
    return int(c["n_heads"] * c["head_dim"])
