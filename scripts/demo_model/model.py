"""The looped language model in plain PyTorch: what the demo trains, and an independent reference for tests.

Parameter names equal the artifact's tensor names, so `state_dict()` is what gets exported. This file knows
nothing about training, data or the serving stack.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LoopConfig:
    """Shape of a looped model; the field names are the artifact's config keys."""

    vocab_size: int = 4096
    d_model: int = 192
    n_heads: int = 3
    head_dim: int = 64
    d_ffn: int = 512
    n_prelude: int = 1
    n_core: int = 3
    n_coda: int = 1
    loops: int = 8
    max_loops: int = 16
    max_seq_len: int = 576  # trained on windows of up to 512; 64 more are read as well
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    embed_scale: float = 16.0

    def artifact_config(self, eos_id: int, beta: float | None) -> dict[str, object]:
        """All config keys of the artifact format for this architecture."""
        return asdict(self) | {
            "n_kv_heads": self.n_heads,
            "norm": "sandwich",
            "injection": "concat",
            "start": "zeros",
            "loop_norm": True,
            "core_norm": False,
            "final_norm": True,
            "rope": "half",
            "qk_norm": False,
            "qk_bias": False,
            "v_bias": False,
            "tied_head": True,
            "logit_scale": 1.0,
            "bos_id": eos_id,
            "eos_ids": [eos_id],
            "add_bos": True,
            "beta": beta,
        }


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of pos * theta^(-2i/head_dim); each (length, head_dim / 2)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the pairs (i, i + head_dim/2) of x (batch, heads, length, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """One sandwich-norm layer: x += n2(attn(n1 x)); x += n4(mlp(n3 x))."""

    def __init__(self, c: LoopConfig) -> None:
        super().__init__()
        width = c.n_heads * c.head_dim
        self.n_heads, self.head_dim = c.n_heads, c.head_dim
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn_post_norm = RMSNorm(c.d_model, c.norm_eps, gain=0.4)
        self.ffn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.ffn_post_norm = RMSNorm(c.d_model, c.norm_eps, gain=0.4)
        self.wq = nn.Linear(c.d_model, width, bias=False)
        self.wk = nn.Linear(c.d_model, width, bias=False)
        self.wv = nn.Linear(c.d_model, width, bias=False)
        self.wo = nn.Linear(width, c.d_model, bias=False)
        self.w_gate = nn.Linear(c.d_model, c.d_ffn, bias=False)
        self.w_up = nn.Linear(c.d_model, c.d_ffn, bias=False)
        self.w_down = nn.Linear(c.d_ffn, c.d_model, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal multi-head attention; x (batch, length, d_model)."""
        batch, length, _ = x.shape
        shape = (batch, length, self.n_heads, self.head_dim)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn_post_norm(self.attention(self.attn_norm(x), cos, sin))
        h = self.ffn_norm(x)
        return x + self.ffn_post_norm(self.w_down(F.silu(self.w_gate(h)) * self.w_up(h)))


class LoopedLM(nn.Module):
    """Prelude once, core `loops` times with the prelude's output mixed in at each start, coda once."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: LoopConfig) -> None:
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.prelude = nn.ModuleList(Block(c) for _ in range(c.n_prelude))
        self.core = nn.ModuleList(Block(c) for _ in range(c.n_core))
        self.coda = nn.ModuleList(Block(c) for _ in range(c.n_coda))
        self.inject = nn.Linear(2 * c.d_model, c.d_model, bias=False)
        self.loop_norm = RMSNorm(c.d_model, c.norm_eps)
        self.final_norm = RMSNorm(c.d_model, c.norm_eps)
        cos, sin = rope_table(c.max_seq_len, c.head_dim, c.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.embed.weight, std=1 / c.embed_scale)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and name != "embed.weight":
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        # The state enters rotated: in its own basis it looks so much like e that all loops do the same.
        rotation = nn.init.orthogonal_(torch.empty(c.d_model, c.d_model))
        self.inject.weight.data = torch.cat([rotation, torch.eye(c.d_model)], dim=1)

    def _run(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in layers:
            x = layer(x, cos, sin)
        return x

    def enter(self, tokens: Tensor) -> Tensor:
        """tokens (batch, length) -> e (batch, length, d_model), the input injected into every loop."""
        return self._run(self.prelude, self.embed(tokens) * self.config.embed_scale)

    def loop(self, x: Tensor, e: Tensor) -> Tensor:
        """One pass of the core; its RMSNorm at the end keeps the state bounded at any loop count."""
        return self.loop_norm(self._run(self.core, self.inject(torch.cat([x, e], dim=-1))))

    @torch.no_grad()
    def scale_state(self, factor: float) -> None:
        """Let the state weigh `factor` times more against e at the start of each loop."""
        self.inject.weight[:, : self.config.d_model] *= factor

    def hidden(self, x: Tensor) -> Tensor:
        """State after the last loop -> what the head multiplies; both (batch, length, d_model)."""
        return self.final_norm(self._run(self.coda, x))

    def readout(self, x: Tensor) -> Tensor:
        """State after the last loop -> logits (batch, length, vocab_size)."""
        return F.linear(self.hidden(x), self.embed.weight)

    def forward(self, tokens: Tensor, loops: int) -> Tensor:
        e = self.enter(tokens)
        x = torch.zeros_like(e)
        for _ in range(loops):
            x = self.loop(x, e)
        return self.readout(x)
