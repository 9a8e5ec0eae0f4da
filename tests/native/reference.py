"""The whole model family in plain numpy float64: what the engine's numbers are compared with.

Written from the description of the artifact's config alone, for reading: one token sequence at a time, no
cache, nothing fused. It shares only the names and shapes of `native/artifact.py` with the product. `kv_fp16`
rounds keys (after RoPE) and values to fp16, as the engine's default cache holds and its attention reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyloop_serve.native.artifact import complete_config, expected_tensors
from tinyloop_serve.native.tensors import BF16, Tensor

Array = npt.NDArray[np.float64]


def logits(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    tokens: Sequence[int],
    loops: int | None = None,
    *,
    kv_fp16: bool = True,
) -> Array:
    """The logits after each position of `tokens`: (n, vocab_size). `loops` None is the config's own count."""
    model = Reference(config, tensors, kv_fp16=kv_fp16)
    return model.logits(tokens, model.config["loops"] if loops is None else loops)


def greedy(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    prompt: Sequence[int],
    loops: int | None,
    n: int,
    *,
    kv_fp16: bool = True,
) -> list[int]:
    """`n` tokens, each the most likely one (the lowest id among equals); end tokens do not end it."""
    model = Reference(config, tensors, kv_fp16=kv_fp16)
    tokens = list(prompt)
    for _ in range(n):
        last = model.logits(tokens, model.config["loops"] if loops is None else loops)[-1]
        tokens.append(int(np.argmax(last)))
    return tokens[len(prompt) :]


def random_model(config: Mapping[str, object], seed: int, dtype: str = "fp32") -> dict[str, Any]:
    """Random tensors of the config, of ordinary scale so that no loop count blows rounding errors up.

    `dtype` is fp32, fp16 or bf16; with "mixed" the matrices are fp16 and the vectors fp32.
    """
    rng = np.random.default_rng(seed)
    tied = bool(complete_config(config)["tied_head"])
    tensors: dict[str, Any] = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            centre = 0.0 if name.endswith("_bias") else 1.0
            values = centre + 0.2 * rng.standard_normal(shape)
        else:
            shrunk = name.endswith(("wo.weight", "w_down.weight"))  # what a layer adds to the residual stream
            scale = (0.5 if shrunk else 1.0) / np.sqrt(shape[1])
            if name == "embed.weight" and not tied:
                scale = 0.5
            values = scale * rng.standard_normal(shape)
        tensors[name] = _as_dtype(values, "fp32" if dtype == "mixed" and len(shape) == 1 else dtype)
    return tensors


class Reference:
    """A model with its tensors as float64. Rows of all arrays are positions of the one sequence."""

    def __init__(
        self, config: Mapping[str, object], tensors: Mapping[str, Tensor], *, kv_fp16: bool = True
    ) -> None:
        self.config: dict[str, Any] = complete_config(config)
        self.weights = {name: _float64(tensor) for name, tensor in tensors.items()}
        self.kv_fp16 = kv_fp16

    def logits(self, tokens: Sequence[int], loops: int) -> Array:
        c, w = self.config, self.weights
        x = self.after_loops(self.prelude(tokens), loops)
        if c["core_norm"]:
            x = self.rms_norm(x, w["core_norm.weight"])
        for i in range(c["n_coda"]):
            x = self.layer(f"coda.{i}", x)
        if c["final_norm"]:
            x = self.rms_norm(x, w["final_norm.weight"])
        head = w["embed.weight"] if c["tied_head"] else w["head.weight"]
        return np.asarray(c["logit_scale"] * (x @ head.T))

    def prelude(self, tokens: Sequence[int]) -> Array:
        """The injected signal e: (n, d_model)."""
        e: Array = self.config["embed_scale"] * self.weights["embed.weight"][list(tokens)]
        for i in range(self.config["n_prelude"]):
            e = self.layer(f"prelude.{i}", e)
        return e

    def after_loops(self, e: Array, loops: int) -> Array:
        """The state after `loops` runs of the core: (n, d_model)."""
        x = e if self.config["start"] == "prelude" else np.zeros_like(e)
        for _ in range(loops):
            x = self.loop(x, e)
        return x

    def loop(self, x: Array, e: Array) -> Array:
        c, w = self.config, self.weights
        if c["injection"] == "add":
            x = x + e
        elif c["injection"] == "concat":
            x = np.concatenate([x, e], axis=1) @ w["inject.weight"].T
        for i in range(c["n_core"]):
            x = self.layer(f"core.{i}", x)
        if c["loop_norm"]:
            x = self.rms_norm(x, w["loop_norm.weight"])
        return x

    def layer(self, name: str, x: Array) -> Array:
        """One transformer layer, with its norms where the config's `norm` puts them."""

        def norm(which: str, y: Array) -> Array:
            return self.rms_norm(y, self.weights[f"{name}.{which}.weight"])

        if self.config["norm"] == "pre":
            x = x + self.attention(name, norm("attn_norm", x))
            return x + self.mlp(name, norm("ffn_norm", x))
        if self.config["norm"] == "sandwich":
            x = x + norm("attn_post_norm", self.attention(name, norm("attn_norm", x)))
            return x + norm("ffn_post_norm", self.mlp(name, norm("ffn_norm", x)))
        if self.config["norm"] == "post":
            x = norm("attn_post_norm", x + self.attention(name, x))
            return norm("ffn_post_norm", x + self.mlp(name, x))
        assert self.config["norm"] == "pre_post"
        x = norm("attn_post_norm", x + self.attention(name, norm("attn_norm", x)))
        return norm("ffn_post_norm", x + self.mlp(name, norm("ffn_norm", x)))

    def attention(self, name: str, x: Array) -> Array:
        c = self.config
        heads, kv_heads = c["n_heads"], c["n_kv_heads"]
        q = self.heads(name, x, "q", heads, biased=c["qk_bias"])
        k = self.heads(name, x, "k", kv_heads, biased=c["qk_bias"])
        v = self.heads(name, x, "v", kv_heads, biased=c["v_bias"])
        if c["qk_norm"]:
            q = self.rms_norm(q, self.weights[f"{name}.q_norm.weight"])
            k = self.rms_norm(k, self.weights[f"{name}.k_norm.weight"])
        q, k = self.rope(q), self.rope(k)
        if self.kv_fp16:
            k, v = _through_fp16(k), _through_fp16(v)
        mixed = np.empty_like(q)
        for h in range(heads):
            group = h // (heads // kv_heads)
            scores = q[:, h] @ k[:, group].T / np.sqrt(c["head_dim"])  # (n, n): row attends to column
            scores[np.triu_indices(len(x), k=1)] = -np.inf
            mixed[:, h] = _softmax(scores) @ v[:, group]
        return mixed.reshape(len(x), -1) @ self.weights[f"{name}.wo.weight"].T

    def heads(self, name: str, x: Array, which: str, count: int, *, biased: bool) -> Array:
        """The q, k or v projection: (n, count, head_dim)."""
        y = x @ self.weights[f"{name}.w{which}.weight"].T
        if biased:
            y = y + self.weights[f"{name}.{which}_bias"]
        return y.reshape(len(x), count, self.config["head_dim"])

    def rope(self, x: Array) -> Array:
        """Rotate pair i of every head by position * theta^(-2i/head_dim): (n, heads, head_dim)."""
        half = self.config["head_dim"] // 2
        frequency = self.config["rope_theta"] ** (-np.arange(half) / half)
        angle = np.arange(len(x))[:, None, None] * frequency
        first, second = (
            (slice(0, half), slice(half, None))
            if self.config["rope"] == "half"
            else (slice(0, None, 2), slice(1, None, 2))
        )
        out = np.empty_like(x)
        out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
        out[..., second] = x[..., second] * np.cos(angle) + x[..., first] * np.sin(angle)
        return out

    def mlp(self, name: str, x: Array) -> Array:
        gate = x @ self.weights[f"{name}.w_gate.weight"].T
        up = x @ self.weights[f"{name}.w_up.weight"].T
        return np.asarray((gate / (1.0 + np.exp(-gate)) * up) @ self.weights[f"{name}.w_down.weight"].T)

    def rms_norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self.config["norm_eps"]) * weight)


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _through_fp16(x: Array) -> Array:
    # By way of fp32, because the engine computes in fp32: rounding twice can differ from rounding once.
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


def _float64(tensor: Tensor) -> Array:
    return (tensor.float32() if isinstance(tensor, BF16) else tensor).astype(np.float64)


def _as_dtype(values: Array, dtype: str) -> Tensor:
    if dtype == "bf16":
        return BF16.from_float32(values.astype(np.float32))
    return values.astype(np.float32 if dtype == "fp32" else np.float16)
