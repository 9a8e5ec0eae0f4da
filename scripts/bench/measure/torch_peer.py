"""The looped model as one would write it in torch: eager, with a key/value cache, in inference mode.

Two ways. "fused": one matrix for q, k and v, one for gate and up, and scaled_dot_product_attention. "plain":
each matrix apart, attention written out. Knows nothing of our engine.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from measure import models

Pair = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU. x: (lanes, new positions, d_model)."""

    def __init__(self, weights: models.Weights, name: str, fused: bool) -> None:
        super().__init__()
        c = weights.config
        self.heads, self.head_dim, self.eps = c["n_heads"], c["head_dim"], c["norm_eps"]
        self.fused = fused

        def tensor(which: str) -> Tensor:
            return torch.from_numpy(np.array(weights.tensors[f"core.{name}.{which}.weight"], np.float32))

        def parameter(which: str) -> nn.Parameter:
            return nn.Parameter(tensor(which), requires_grad=False)

        self.attn_norm, self.ffn_norm = parameter("attn_norm"), parameter("ffn_norm")
        groups = (("wq", "wk", "wv"), ("w_gate", "w_up")) if fused else (("wq",), ("wk",), ("wv",))
        if not fused:
            groups += (("w_gate",), ("w_up",))
        self.linear = nn.ModuleDict(
            {"_".join(group): linear(torch.cat([tensor(which) for which in group])) for group in groups}
        )
        self.wo, self.w_down = linear(tensor("wo")), linear(tensor("w_down"))

    def forward(self, x: Tensor, turn: Pair, cache: Pair, at: int) -> Tensor:
        """cache: keys and values, (lanes, heads, all positions, head_dim), filled up to `at`."""
        keys, values = cache
        y = F.rms_norm(x, (x.shape[-1],), self.attn_norm, self.eps)
        if self.fused:
            q, k, v = self.linear["wq_wk_wv"](y).chunk(3, -1)
        else:
            q, k, v = self.linear["wq"](y), self.linear["wk"](y), self.linear["wv"](y)
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        end = at + x.shape[1]
        keys[:, :, at:end] = rotate(k, turn)
        values[:, :, at:end] = v
        attended = self.attend(rotate(q, turn), keys[:, :, :end], values[:, :, :end])
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        y = F.rms_norm(x, (x.shape[-1],), self.ffn_norm, self.eps)
        if self.fused:
            gate, up = self.linear["w_gate_w_up"](y).chunk(2, -1)
        else:
            gate, up = self.linear["w_gate"](y), self.linear["w_up"](y)
        return x + self.w_down(F.silu(gate) * up)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new position sees all; more than one are a whole prompt."""
        new = q.shape[2]
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1)
        scores = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5
        if new > 1:
            scores = scores + torch.full((new, new), -torch.inf, dtype=q.dtype).triu(1)
        return scores.softmax(-1) @ v


class LoopedModel(nn.Module):
    """The core's layers run `loops` times; every (loop, layer) has its own keys and values."""

    def __init__(self, weights: models.Weights, fused: bool) -> None:
        super().__init__()
        self.config = c = weights.config
        self.embed = nn.Embedding.from_pretrained(_tensor(weights, "embed.weight"))
        self.final_norm = nn.Parameter(_tensor(weights, "final_norm.weight"), requires_grad=False)
        self.layers = nn.ModuleList(Layer(weights, str(i), fused) for i in range(c["n_core"]))
        self.head = linear(_tensor(weights, "embed.weight" if c["tied_head"] else "head.weight"))

    def forward(self, tokens: Tensor, cache: list[Pair], at: int, only_last: bool) -> Tensor:
        """tokens: (lanes, new positions) -> logits of each, or of the last of each lane."""
        c = self.config
        x = self.embed(tokens)
        turn = angles(at, tokens.shape[1], c["head_dim"], c["rope_theta"], x.dtype)
        for loop in range(c["loops"]):
            for number, layer in enumerate(self.layers):
                x = layer(x, turn, cache[loop * c["n_core"] + number], at)
        if only_last:
            x = x[:, -1:]
        return self.head(F.rms_norm(x, (c["d_model"],), self.final_norm, c["norm_eps"]))


class TorchPeer:
    """A model in fp32, bf16, or fp32 with dynamically quantised int8 matrices."""

    def __init__(self, weights: models.Weights, fused: bool, kind: str) -> None:
        self.config = weights.config
        model = LoopedModel(weights, fused).eval()
        if kind == "int8":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is deprecated, and still what torch itself has
                model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        self.dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        self.model = model.to(self.dtype)

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second, until the first token is there."""
        cache = self._cache(1, tokens)
        prompt = torch.tensor([models.prompt(tokens)])
        begin = time.perf_counter()
        self.model(prompt, cache, 0, True).argmax(-1).tolist()
        return tokens / (time.perf_counter() - begin)

    @torch.inference_mode()
    def decode(self, lanes: int, context: int, steps: int) -> float:
        """Tokens per second over all lanes, from `context` positions on."""
        cache = self._cache(lanes, context + steps)
        prompt = torch.tensor([models.prompt(context, lane) for lane in range(lanes)])
        tokens = self.model(prompt, cache, 0, True).argmax(-1)
        begin = time.perf_counter()
        for step in range(steps):
            tokens = self.model(tokens, cache, context + step, True).argmax(-1)
        return lanes * steps / (time.perf_counter() - begin)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab_size)."""
        found = self.model(torch.tensor([tokens]), self._cache(1, len(tokens)), 0, False)[0]
        return found.float().numpy()

    def _cache(self, lanes: int, positions: int) -> list[Pair]:
        c: dict[str, Any] = self.config
        shape = (lanes, c["n_heads"], positions, c["head_dim"])
        slots = c["loops"] * c["n_core"]
        empty = torch.zeros((slots, 2, *shape), dtype=self.dtype)
        return [(keys, values) for keys, values in empty]


def linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def angles(at: int, count: int, head_dim: int, theta: float, dtype: torch.dtype) -> Pair:
    """Cosines and sines, (count, head_dim), both halves alike."""
    inverse = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    turns = torch.outer(torch.arange(at, at + count, dtype=torch.float32), inverse).repeat(1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotate(x: Tensor, turn: Pair) -> Tensor:
    """Pairs (i, i + head_dim/2)."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _tensor(weights: models.Weights, name: str) -> Tensor:
    return torch.from_numpy(np.array(weights.tensors[name], np.float32))
