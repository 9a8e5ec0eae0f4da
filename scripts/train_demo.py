"""Train, evaluate and export the demo model that the package ships.

    apt-get install wordnet-base bible-kjv-text bible-kjv
    pip install . torch==2.13.0 tokenizers numpy
    OMP_WAIT_POLICY=PASSIVE python scripts/train_demo.py train --run-dir runs/demo --minutes 68.5
    python scripts/train_demo.py export --run-dir runs/demo --out native/models

`train` leaves a checkpoint every few minutes, `export` measures the newest one and writes artifact and card.

Recipe: the core runs a random number of loops, only the last one or two of which carry gradient (truncated
back-propagation); the loss is taken after the last loop and, in some steps, after an earlier one too, where
half of the target is the deep prediction itself (self-distillation), so that few-loop drafts agree with
many-loop answers. The loop count grows from 1-2 to 3-8. Muon trains the matrices, AdamW the embedding and
the gains; the learning rate decays linearly to zero over the step or time budget, whichever is used up
first. With `--steps N --minutes inf` a run is determined by its seed, on one kind of machine.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_model import data, evaluate, export
from demo_model.model import LoopConfig, LoopedLM
from demo_model.muon import Muon
from tokenizers import Tokenizer
from torch import Tensor

# Left alone, the core settles after two loops (beta 0.2): each loop sees little but e. Once it predicts well,
# the state gets as much weight as e (beta 0.6), and more loops go on to improve the answer.
STATE_GAIN, STATE_GAIN_AT = 4.0, 0.35


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and export the demo model.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("train", help="train; checkpoints go to --run-dir")
    p.add_argument("--minutes", type=float, default=80.0, help="time budget of the training loop")
    p.add_argument("--steps", type=int, default=10**9, help="step budget")
    p.add_argument("--tokens", type=int, default=2048, help="tokens per step")
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=0.003)
    p.add_argument(
        "--distill", type=float, default=0.5, help="share of the deep prediction in the shallow target"
    )
    p.add_argument(
        "--no-compile", action="store_true", help="do without torch.compile, which needs a C++ compiler"
    )
    p.add_argument("--resume", action="store_true", help="go on from the run's checkpoint, optimizers fresh")
    p.add_argument("--eval-every", type=float, default=5.0, help="minutes between checkpoints")
    q = commands.add_parser("export", help="evaluate the checkpoint in --run-dir and write artifact and card")
    q.add_argument("--out", type=Path, required=True, help="folder for demo.tinyloop and README.md")
    q.add_argument("--note", default="", help="what else the card should say about the run")
    q.add_argument("--hardware", default="2 CPU cores", help="what the card says about the machine")
    for command in (p, q):
        command.add_argument("--run-dir", type=Path, required=True, help="tokenizer and checkpoint")
        command.add_argument(
            "--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="with data.noun ..."
        )
        command.add_argument("--bible", default="bible", help="reader command of the bible-kjv package")
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> tuple[Tokenizer, list[np.ndarray], list[np.ndarray]]:
    """Tokenizer, training and validation documents as tokens; all three depend on the seed alone."""
    rng = np.random.default_rng(args.seed)
    documents = data.read_wordnet(args.wordnet) + data.read_kjv(args.bible, rng)
    training, validation = data.split(documents, 0.015, rng)
    path = args.run_dir / "tokenizer.json"
    if not path.exists():
        data.train_tokenizer(training, LoopConfig.vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    return tokenizer, data.encode(tokenizer, training), data.encode(tokenizer, validation)


@dataclasses.dataclass(frozen=True)
class Depth:
    """How one step unrolls: `deep` loops, the last `grad_loops` with gradient; a readout after `shallow`."""

    deep: int
    grad_loops: int
    shallow: int  # 0: none


def sample_depth(rng: np.random.Generator, progress: float) -> Depth:
    """Few loops, growing from 1-2 to 1-4, in the first 23 % of the budget; then 3 to 8, mostly 8.

    Loops 1 and 2 are then trained as drafts only (`shallow`): a core that must be at its best after one loop
    has no use for more of them.
    """
    if progress < 0.23:
        largest = int(np.interp(progress, [0.1, 0.45], [2, 8]))
        deep = largest if rng.random() < 0.3 else int(rng.integers(1, largest + 1))
        grad_loops = min(deep, 2 if rng.random() < 0.7 else 1)
        shallow = int(rng.choice([1, 2, 2, 3, 4])) if rng.random() < 0.5 else 0
    else:
        deep = 8 if rng.random() < 0.4 else int(rng.integers(3, 8))
        grad_loops = int(rng.integers(1, 3))
        shallow = int(rng.choice([1, 2, 2, 4])) if rng.random() < 0.4 else 0
    return Depth(deep, grad_loops, shallow if shallow < deep else 0)


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and the log-probabilities (tokens, vocab)."""
    log_p = F.log_softmax(F.linear(hidden.flatten(0, 1), head), dim=-1)
    return F.nll_loss(log_p, targets.flatten()), log_p


def mixed_loss(hidden: Tensor, head: Tensor, targets: Tensor, teacher: Tensor, share: float) -> Tensor:
    """Cross-entropy with (1 - share) of the data and `share` of the teacher's distribution as target."""
    loss, log_p = token_loss(hidden, head, targets)
    return (1 - share) * loss - share * (teacher.exp() * log_p).sum(-1).mean()


def training_loss(model: LoopedLM, window: Tensor, depth: Depth, distill: float) -> tuple[Tensor, float]:
    """(loss to minimise, plain cross-entropy after the deep readout) for window (rows, length + 1)."""
    tokens, targets = window[:, :-1], window[:, 1:]
    e = model.enter(tokens)
    x, shallow = torch.zeros_like(e), e
    for loop in range(1, depth.deep + 1):
        with torch.set_grad_enabled(loop > depth.deep - depth.grad_loops or loop == depth.shallow):
            x = model.loop(x, e)
        if loop == depth.shallow:
            shallow = x
    deep_loss, log_p = token_loss(model.hidden(x), model.embed.weight, targets)
    loss = deep_loss
    if depth.shallow:
        loss = loss + 0.3 * mixed_loss(
            model.hidden(shallow), model.embed.weight, targets, log_p.detach(), distill
        )
    return loss, deep_loss.item()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    tokenizer, training, validation = prepare(args)
    print(
        f"training tokens {sum(map(len, training))} validation tokens {sum(map(len, validation))}", flush=True
    )
    probe = data.pack(validation, 256, np.random.default_rng(0).permutation(len(validation)))[:32]
    model = LoopedLM(LoopConfig(vocab_size=tokenizer.get_vocab_size()))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n != "embed.weight"]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or n == "embed.weight"]
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    step, tokens, seconds, scaled = 0, 0, 0.0, False
    if args.resume:
        state = torch.load(args.run_dir / "model.pt")
        model.load_state_dict(state["model"])
        step, tokens, seconds, scaled = (state[key] for key in ("step", "tokens", "seconds", "scaled"))
    warmup, first_step, started, evaluated = (
        10 if step else 40,
        step,
        time.monotonic() - seconds,
        time.monotonic(),
    )
    optimizers = [
        Muon(matrices, args.muon_lr),
        torch.optim.AdamW(others, args.adam_lr, (0.9, 0.98), 1e-10, 0.0),
    ]
    if not args.no_compile:
        for block in [*model.prelude, *model.core, *model.coda]:
            block.compile(dynamic=False)
    streams = [data.Batches(training, length, args.tokens // length, args.seed) for length in (256, 512)]
    for index in range(step):
        streams[int(index % 4 == 3)].next()
    rng = np.random.default_rng([args.seed, step])
    running: list[float] = []
    while True:
        progress = max(step / args.steps, (time.monotonic() - started) / (60 * args.minutes))
        if progress >= 1:
            break
        if progress >= STATE_GAIN_AT and not scaled:
            model.scale_state(STATE_GAIN)
            scaled = True
        for optimizer, peak in zip(optimizers, (args.muon_lr, args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step - first_step + 1) / warmup) * (1 - progress)
        window = torch.from_numpy(streams[int(step % 4 == 3)].next())
        loss, plain = training_loss(model, window, sample_depth(rng, progress), args.distill)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + window[:, 1:].numel()
        running.append(plain)
        if step % 20 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {step} tokens {tokens} minutes {seconds / 60:.1f} tok/s {tokens / seconds:.0f}"
                f" progress {progress:.3f} loss {np.mean(running[-40:]):.4f}",
                flush=True,
            )
        if time.monotonic() - evaluated > 60 * args.eval_every:
            evaluated = time.monotonic()
            checkpoint(args, model, step, tokens, evaluated - started, scaled)
            print(f"validation {json.dumps(evaluate.losses(model, probe, (1, 2, 4, 8)))}", flush=True)
    checkpoint(args, model, step, tokens, time.monotonic() - started, scaled)
    print(f"validation {json.dumps(evaluate.losses(model, probe, (1, 2, 4, 8, 16)))}", flush=True)


def checkpoint(
    args: argparse.Namespace, model: LoopedLM, step: int, tokens: int, seconds: float, scaled: bool
) -> None:
    state = {"model": model.state_dict(), "config": dataclasses.asdict(model.config)}
    state |= {"step": step, "tokens": tokens, "seconds": seconds, "scaled": scaled}
    torch.save(state, args.run_dir / "partial.pt")
    (args.run_dir / "partial.pt").replace(args.run_dir / "model.pt")


def export_checkpoint(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    tokenizer, training, validation = prepare(args)
    model, state = export.load(args.run_dir / "model.pt")
    windows = data.pack(validation, 256, np.random.default_rng(0).permutation(len(validation)))
    minutes = state["seconds"] / 60
    commands = [line.strip() for line in (__doc__ or "").splitlines() if line.startswith("    ")]
    run = {
        "commands": "\n".join(commands),
        "steps": state["step"],
        "tokens": state["tokens"],
        "minutes": minutes,
        "hardware": args.hardware,
        "note": args.note,
        "seed": args.seed,
        "training_tokens": sum(map(len, training)),
    }
    card = export.make_card(model, tokenizer, windows, run)
    export.export(args.out, model, tokenizer, card)
    print(export.markdown(card))


if __name__ == "__main__":
    arguments = parse_arguments()
    {"train": train, "export": export_checkpoint}[arguments.command](arguments)
