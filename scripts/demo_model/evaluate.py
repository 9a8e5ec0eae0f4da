"""What the model card states about a trained model: losses, agreement between loop counts, beta, samples.

Everything is measured in fp32 on the weights as shipped, that is after rounding to fp16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from demo_model.data import EOT
from demo_model.model import LoopedLM
from tokenizers import Tokenizer
from torch import Tensor

LOOP_COUNTS = (1, 2, 4, 8, 16)
PROMPTS = (
    "The definition of",
    "The definition of a garden (noun) is:",
    "In the beginning",
    "And it came to pass",
)


@dataclass(frozen=True)
class Measures:
    """Over all validation tokens, teacher-forced."""

    losses: dict[int, float]  # loop count -> mean cross-entropy in nats per token
    agreement: dict[str, float]  # "2 vs 8" -> share of positions with the same most likely next token
    beta: float  # median over tokens and loops t of |h(t+1) - h(t)| / |h(t) - h(t-1)|
    beta_by_loop: list[float]  # medians for t = 1, 2, ...
    tokens: int


def round_to_half(model: LoopedLM) -> None:
    """Replace the weights by what an fp16 file keeps of them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()


def states(model: LoopedLM, tokens: Tensor, loops: int) -> list[Tensor]:
    """h(0) .. h(loops), the state before the first and after every loop; each (batch, length, d_model)."""
    e = model.enter(tokens)
    found = [torch.zeros_like(e)]
    for _ in range(loops):
        found.append(model.loop(found[-1], e))
    return found


def losses(model: LoopedLM, windows: np.ndarray, loop_counts: Sequence[int]) -> dict[int, float]:
    """Mean cross-entropy per token over windows (n, length + 1) at each loop count."""
    return measure(model, windows, loop_counts).losses


@torch.no_grad()
def measure(model: LoopedLM, windows: np.ndarray, loop_counts: Sequence[int] = LOOP_COUNTS) -> Measures:
    """All measures over windows (n, length + 1); beta over the model's trained loop count."""
    totals = dict.fromkeys(loop_counts, 0.0)
    best: dict[int, list[Tensor]] = {loops: [] for loops in loop_counts}
    gains: list[Tensor] = []
    for chunk in torch.from_numpy(windows).split(8):
        tokens, targets = chunk[:, :-1], chunk[:, 1:]
        h = states(model, tokens, max(loop_counts))
        for loops in loop_counts:
            logits = model.readout(h[loops]).flatten(0, 1)
            totals[loops] += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
            best[loops].append(logits.argmax(-1))
        trained = h[: model.config.loops + 1]
        steps = torch.stack(
            [(b - a).norm(dim=-1).flatten() for a, b in zip(trained, trained[1:], strict=False)]
        )
        gains.append(steps[1:] / steps[:-1].clamp_min(1e-9))
    count = windows.shape[0] * (windows.shape[1] - 1)
    answers = {loops: torch.cat(parts) for loops, parts in best.items()}
    gain = torch.cat(gains, dim=1)
    return Measures(
        losses={loops: total / count for loops, total in totals.items()},
        agreement={
            f"{few} vs 8": (answers[few] == answers[8]).float().mean().item()
            for few in loop_counts
            if few != 8 and 8 in loop_counts
        },
        beta=gain.median().item(),
        beta_by_loop=[row.median().item() for row in gain],
        tokens=count,
    )


@torch.no_grad()
def complete(
    model: LoopedLM, tokenizer: Tokenizer, prompt: str, loops: int, temperature: float = 0.0, seed: int = 1
) -> str:
    """Up to 40 tokens after `prompt`, which starts a document; ends at the end-of-text token.

    Greedy at temperature 0; above, tokens under 5 % of the best one's probability are never drawn (min_p).
    """
    eot = tokenizer.token_to_id(EOT)
    generator = torch.Generator().manual_seed(seed)
    tokens = [eot, *tokenizer.encode(prompt).ids]
    for _ in range(40):
        logits = model(torch.tensor([tokens]), loops)[0, -1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            p = (logits / temperature).softmax(-1)
            p = p * (p >= 0.05 * p.max())
            token = int(torch.multinomial(p, 1, generator=generator))
        if token == eot:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[1:])


def samples(model: LoopedLM, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Completions of the card's prompts: greedy at 2, 4 and 8 loops, and drawn at 8 loops."""
    return [
        {
            "loops": loops,
            "temperature": temperature,
            "text": complete(model, tokenizer, prompt, loops, temperature),
        }
        for temperature, loop_counts in ((0.0, (2, 4, 8)), (0.7, (8,)))
        for prompt in PROMPTS
        for loops in loop_counts
    ]
