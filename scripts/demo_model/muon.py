"""Muon (Jordan et al., 2024): momentum with orthogonalised matrix updates. Other parameters need AdamW."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Roughly semi-orthogonal g (n, rows, cols), rows <= cols, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, then `orthogonalise`, scaled by sqrt(max(1, out/in)); decoupled weight decay."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                g = p.grad.lerp(buffer, group["momentum"])
                tall = g.shape[0] > g.shape[1]
                g = g.mT if tall else g
                stacks[tuple(g.shape)].append((p, g))
            for pairs in stacks.values():
                updates = orthogonalise(torch.stack([g for _, g in pairs]))
                for (p, _), update in zip(pairs, updates, strict=True):
                    update = update.mT if p.shape[0] > p.shape[1] else update
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
