"""The looped model in torch on a GPU, two ways: "eager", and "graph", a decode step of fixed shape that is
captured once as a CUDA graph and played back. Half precision, the matrices fused as in torch_peer.py. Knows
nothing of our engine.

Where the device is not CUDA (a check of this file) all is on the processor, and the graph's step is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from measure import models
from measure.torch_peer import Layer, LoopedModel, Pair, angles, rotate


def version() -> str:
    return torch.__version__


def place(device: str) -> torch.device:
    return torch.device(device if device.startswith("cuda") else "cpu")


def copy_bandwidth(device: str, short: bool) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    on, size, times = place(device), (1 << 20) if short else (1 << 30), 20
    source = torch.empty(size, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    target.copy_(source)
    wait(on)
    begin = time.perf_counter()
    for _ in range(times):
        target.copy_(source)
    wait(on)
    return 2 * size * times / (time.perf_counter() - begin)


def peers(weights: models.Weights, device: str) -> dict[str, Any]:
    on = place(device)
    with torch.inference_mode():
        model = LoopedModel(weights, fused=True).eval()
        model = model.to(on, torch.float16 if on.type == "cuda" else torch.float32)
    return {"eager": Eager(model, on), "graph": Graph(model, on)}


class Eager:
    def __init__(self, model: LoopedModel, on: torch.device) -> None:
        self.model, self.on = model, on

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second, until the first token is there."""
        with self.on:
            cache = empty_cache(self.model, 1, tokens)
            prompt = torch.tensor([models.prompt(tokens)])
            begin = time.perf_counter()
            self.model(prompt, cache, 0, True).argmax(-1).tolist()
        return tokens / (time.perf_counter() - begin)

    @torch.inference_mode()
    def decode(self, lanes: int, context: int, steps: int) -> float:
        """Tokens per second over all lanes, from `context` positions on."""
        with self.on:
            cache, tokens = prefilled(self.model, lanes, context, context + steps)
            wait(self.on)
            begin = time.perf_counter()
            for step in range(steps):
                tokens = self.model(tokens, list(cache), context + step, True).argmax(-1)
            wait(self.on)
        return lanes * steps / (time.perf_counter() - begin)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab_size)."""
        with self.on:
            cache = empty_cache(self.model, 1, len(tokens))
            found = self.model(torch.tensor([tokens]), cache, 0, False)[0]
        return np.asarray(found.float().cpu().numpy())


class Graph:
    """Its prefill is the eager one: a graph is for the many steps of one shape."""

    def __init__(self, model: LoopedModel, on: torch.device) -> None:
        self.model, self.on = model, on
        self.prefill = Eager(model, on).prefill

    @torch.inference_mode()
    def decode(self, lanes: int, context: int, steps: int) -> float:
        with self.on:
            step = Step(self.model, *prefilled(self.model, lanes, context, context + steps), context)
            play = self._captured(step, context)
            wait(self.on)
            begin = time.perf_counter()
            for _ in range(steps):
                play()
            wait(self.on)
        return lanes * steps / (time.perf_counter() - begin)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab_size), a step for each."""
        rows = []
        with self.on:
            cache = empty_cache(self.model, 1, len(tokens))
            step = Step(self.model, cache, torch.zeros((1, 1), dtype=torch.long), 0)
            for token in tokens:
                step.tokens.fill_(token)
                step()
                rows.append(np.array(step.logits[0, 0].float().cpu().numpy()))
        return np.stack(rows)

    def _captured(self, step: Step, context: int) -> Callable[[], None]:
        step()  # libraries choose their kernels
        if self.on.type != "cuda":
            step.position.fill_(context)
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step.position.fill_(context)
        return lambda: graph.replay()


class Step:
    """One position of every lane; which, is a number on the device, so that a playback needs nothing new."""

    def __init__(self, model: LoopedModel, cache: list[Pair], tokens: Tensor, at: int) -> None:
        self.model, self.cache, self.tokens = model, cache, tokens.clone()
        c, like = model.config, cache[0][0]
        self.places = torch.arange(like.shape[2])
        self.turns = angles(0, like.shape[2], c["head_dim"], c["rope_theta"], like.dtype)
        self.position = torch.tensor([at])
        self.logits = torch.zeros((like.shape[0], 1, c["vocab_size"]), dtype=like.dtype)

    def __call__(self) -> None:
        model, c = self.model, self.model.config
        x = model.embed(self.tokens)
        turn = self.turns[0][self.position], self.turns[1][self.position]
        seen = (self.places <= self.position)[None, None, None]
        for loop in range(c["loops"]):
            for number, layer in enumerate(model.layers):
                x = self._layer(layer, x, turn, seen, *self.cache[loop * c["n_core"] + number])
        self.logits.copy_(model.head(F.rms_norm(x, (c["d_model"],), model.final_norm, c["norm_eps"])))
        self.tokens.copy_(self.logits.argmax(-1))
        self.position += 1

    def _layer(
        self, layer: Layer, x: Tensor, turn: Pair, seen: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        y = F.rms_norm(x, (x.shape[-1],), layer.attn_norm, layer.eps)
        q, k, v = layer.linear["wq_wk_wv"](y).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (layer.heads, layer.head_dim)).transpose(1, 2) for t in (q, k, v))
        keys.index_copy_(2, self.position, rotate(k, turn))
        values.index_copy_(2, self.position, v)
        attended = F.scaled_dot_product_attention(rotate(q, turn), keys, values, attn_mask=seen)
        x = x + layer.wo(attended.transpose(1, 2).flatten(2))
        y = F.rms_norm(x, (x.shape[-1],), layer.ffn_norm, layer.eps)
        gate, up = layer.linear["w_gate_w_up"](y).chunk(2, -1)
        return x + layer.w_down(F.silu(gate) * up)


def prefilled(model: LoopedModel, lanes: int, context: int, positions: int) -> tuple[list[Pair], Tensor]:
    """A cache that holds `context` positions of every lane, and the tokens that follow them."""
    cache = empty_cache(model, lanes, positions)
    prompt = torch.tensor([models.prompt(context, lane) for lane in range(lanes)])
    return cache, model(prompt, cache, 0, True).argmax(-1)


def empty_cache(model: LoopedModel, lanes: int, positions: int) -> list[Pair]:
    c: dict[str, Any] = model.config
    shape = (c["loops"] * c["n_core"], 2, lanes, c["n_heads"], positions, c["head_dim"])
    empty = torch.zeros(shape, dtype=model.final_norm.dtype)
    return [(keys, values) for keys, values in empty]


def wait(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)
