"""Measures beta, the gain of a looped model's core: how much a change of the state shrinks in one more loop.

    beta = median over tokens and loops t >= 1 of |h(t+1) - h(t)| / |h(t) - h(t-1)|

h(0) is the start state, h(t) the state after loop t as the next loop gets it. At most 1: the state settles,
and few loops predict what many would say. Plain numpy in fp32, all texts through one layer at a time; the
cost is bounded by running fewer tokens through a larger model.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tinyloop_serve.native.artifact import complete_config, expected_tensors
from tinyloop_serve.native.tensors import BF16, Tensor, float32

Array = npt.NDArray[np.float32]

MAX_FLOPS = 1e12  # half a minute of numpy on two idle cores
MAX_TOKENS, MIN_TOKENS = 64, 8  # per text
KEPT_BYTES = 2 << 30  # of weights converted to fp32; what does not fit is converted again in every loop
TEXTS = (
    "The river had risen in the night. By morning the lower fields were under water, and the old road to "
    "the mill ended at a gate that stood alone in a brown lake. No one could remember such a spring.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[middle]\n"
    "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long is the journey?\nAnswer: From 9:40 to "
    "12:00 are 2 hours and 20 minutes, and 5 minutes more make 2 hours and 25 minutes, or 145 minutes.",
    "User: Can you explain why the sky is blue?\nAssistant: Sunlight is scattered by the molecules of the "
    "air, and short waves are scattered more than long ones, so blue light comes from all directions.",
)


def measure_beta(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], tokenizer: str = ""
) -> float | None:
    """beta of the artifact that these make, on TEXTS; without a tokenizer on random tokens of a fixed seed.

    None for a model of one loop, which has no gain, and where no state ever changed.
    """
    c: dict[str, Any] = complete_config(config)
    if c["loops"] < 2:
        return None
    states = Core(c, tensors).states(prompts(c, tokenizer))
    steps = [
        np.linalg.norm(after - before, axis=1) for before, after in zip(states, states[1:], strict=False)
    ]
    before, after = np.concatenate(steps[:-1]), np.concatenate(steps[1:])
    moved = before > 0
    ratios = after[moved] / before[moved]
    ratios = ratios[np.isfinite(ratios)]
    return float(np.median(ratios)) if ratios.size else None


def prompts(config: Mapping[str, Any], tokenizer: str) -> list[list[int]]:
    """One list of token ids per text, cut so that the loops over all of them cost at most MAX_FLOPS."""
    core = sum(
        math.prod(shape)
        for name, shape in expected_tensors(config).items()
        if name.startswith(("core.", "inject."))
    )
    affordable = MAX_FLOPS / (2.0 * core * config["loops"]) / len(TEXTS)
    length = min(config["max_seq_len"], max(MIN_TOKENS, min(MAX_TOKENS, int(affordable))))
    if not tokenizer:
        rng = np.random.default_rng(0)
        return [rng.integers(0, config["vocab_size"], length).tolist() for _ in TEXTS]
    encoder = Tokenizer.from_str(tokenizer)
    start = [config["bos_id"]] if config["add_bos"] else []
    return [(start + encoder.encode(text, add_special_tokens=False).ids)[:length] for text in TEXTS]


class Core:
    """The model up to the end of the loops. Rows of all arrays are the positions of all prompts in turn."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = tensors
        self._kept: dict[str, Array] = {}
        self._kept_bytes = 0

    def states(self, prompts: Sequence[Sequence[int]]) -> list[Array]:
        """h(0), h(1), ... h(loops): each (rows, d_model)."""
        c = self.config
        ends = np.cumsum([len(prompt) for prompt in prompts])
        spans = [slice(end - len(prompt), end) for prompt, end in zip(prompts, ends, strict=True)]
        e = c["embed_scale"] * self._embedded([token for prompt in prompts for token in prompt])
        for i in range(c["n_prelude"]):
            e = self._layer(f"prelude.{i}", e, spans)
        x = e if c["start"] == "prelude" else np.zeros_like(e)
        states = [x]
        for _ in range(c["loops"]):
            if c["injection"] == "add":
                x = x + e
            elif c["injection"] == "concat":
                x = np.concatenate([x, e], axis=1) @ self._weight("inject.weight").T
            for i in range(c["n_core"]):
                x = self._layer(f"core.{i}", x, spans)
            if c["loop_norm"]:
                x = self._norm(x, "loop_norm.weight")
            states.append(x)
        return states

    def _layer(self, name: str, x: Array, spans: Sequence[slice]) -> Array:
        kind = self.config["norm"]
        before, after = kind != "post", kind != "pre"  # which norms the layer has
        y = self._attention(name, self._norm(x, f"{name}.attn_norm.weight") if before else x, spans)
        x = self._joined(x, y, f"{name}.attn_post_norm.weight" if after else "")
        y = self._ffn(name, self._norm(x, f"{name}.ffn_norm.weight") if before else x)
        return self._joined(x, y, f"{name}.ffn_post_norm.weight" if after else "")

    def _joined(self, x: Array, y: Array, post_norm: str) -> Array:
        if not post_norm:
            return x + y
        if self.config["norm"] == "sandwich":
            return x + self._norm(y, post_norm)
        return self._norm(x + y, post_norm)

    def _attention(self, name: str, x: Array, spans: Sequence[slice]) -> Array:
        c = self.config
        q = self._heads(name, x, "q", c["n_heads"], biased=c["qk_bias"])
        k = self._heads(name, x, "k", c["n_kv_heads"], biased=c["qk_bias"])
        v = self._heads(name, x, "v", c["n_kv_heads"], biased=c["v_bias"])
        if c["qk_norm"]:
            q, k = self._norm(q, f"{name}.q_norm.weight"), self._norm(k, f"{name}.k_norm.weight")
        mixed = np.empty_like(q)
        group = c["n_heads"] // c["n_kv_heads"]
        for span in spans:
            keys, values = (
                np.repeat(y, group, axis=1).swapaxes(0, 1) for y in (self._rotated(k[span]), v[span])
            )
            scores = self._rotated(q[span]).swapaxes(0, 1) @ keys.swapaxes(1, 2) / math.sqrt(c["head_dim"])
            scores[:, np.triu(np.ones(scores.shape[1:], bool), k=1)] = -np.inf
            powers = np.exp(scores - scores.max(axis=-1, keepdims=True))  # (heads, positions, positions)
            mixed[span] = (powers / powers.sum(axis=-1, keepdims=True) @ values).swapaxes(0, 1)
        return mixed.reshape(len(x), -1) @ self._weight(f"{name}.wo.weight").T

    def _heads(self, name: str, x: Array, which: str, count: int, *, biased: bool) -> Array:
        y = x @ self._weight(f"{name}.w{which}.weight").T
        y = y + self._weight(f"{name}.{which}_bias") if biased else y
        return y.reshape(len(x), count, self.config["head_dim"])

    def _rotated(self, x: Array) -> Array:
        half = self.config["head_dim"] // 2
        angles = np.outer(np.arange(len(x)), self.config["rope_theta"] ** (-np.arange(half) / half))
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        split = self.config["rope"] == "half"
        first = (..., slice(0, half)) if split else (..., slice(0, None, 2))
        second = (..., slice(half, None)) if split else (..., slice(1, None, 2))
        out = np.empty_like(x)
        out[first] = x[first] * cos - x[second] * sin
        out[second] = x[second] * cos + x[first] * sin
        return out

    def _ffn(self, name: str, x: Array) -> Array:
        gate = x @ self._weight(f"{name}.w_gate.weight").T
        up = x @ self._weight(f"{name}.w_up.weight").T
        with np.errstate(over="ignore"):  # exp(-gate) may become infinite: then silu is 0, as it should be
            hidden = gate / (1 + np.exp(-gate)) * up
        return np.asarray(hidden @ self._weight(f"{name}.w_down.weight").T)

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + np.float32(self.config["norm_eps"])) * self._weight(name))

    def _weight(self, name: str) -> Array:
        if name in self._kept:
            return self._kept[name]
        weight = float32(self.tensors[name])
        if self._kept_bytes + weight.nbytes <= KEPT_BYTES:
            self._kept[name] = weight
            self._kept_bytes += weight.nbytes
        return weight

    def _embedded(self, tokens: Sequence[int]) -> Array:
        embed = self.tensors["embed.weight"]
        rows = list(tokens)
        return float32(BF16(embed.bits[rows]) if isinstance(embed, BF16) else embed[rows])
