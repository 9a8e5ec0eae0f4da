"""Speculation against plain decoding: by beta, the gain of the model's core.

The models are one artifact whose injection is made to weigh the state more or less against the prompt: the
same shapes and work, another beta. Each is calibrated as a replica does it at its start.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure.models import Weights, read
from measure.timing import say
from tokenizers import Tokenizer

from crossings.rounds import interleaved
from crossings.section import Section, where
from tinyloop_serve.native import GenerateConfig, Model, artifact, calibrate_speculation
from tinyloop_serve.native.importers.beta import measure_beta
from tinyloop_serve.native.importers.tinyloop import convert_tinyloop
from tinyloop_serve.replica.speculation import CANDIDATES

STATE = (0.25, 1.0, 2.0, 3.0, 4.0, 8.0)  # times its trained weight
TEXTS = (
    "The definition of river (noun) is:",
    "And it came to pass in those days, that",
    "In the beginning God created",
    "And the king said unto the servants,",
    "The definition of walk (verb) is:",
)
NEW = 48
THRESHOLD = 1.3


def measure(path: Path, threads: int, rounds: int, states: tuple[float, ...] = STATE) -> Section:
    head = ("beta", "drafts accepted", "draft loops, ahead", "times as fast")
    section = Section("speculation", head, [])
    points = []
    with tempfile.TemporaryDirectory() as folder, Model(path, threads=1) as source:
        plain = Path(folder) / "plain.tinyloop"
        convert_tinyloop(path, plain, layout="plain")
        weights, tokenizer = read(plain), source.metadata["tokenizer"]
        prompts = [Tokenizer.from_str(tokenizer).encode(text).ids for text in TEXTS]
        for state in states:
            made = Path(folder) / f"{state}.tinyloop"
            beta = _write(made, weights, tokenizer, state)
            with Model(made, threads=threads) as model:
                points.append((beta, *_compare(model, prompts, rounds, beta)))
    points.sort()
    for beta, gain, accepted, settings in points:
        section.rows.append((f"{beta:.2f}", f"{accepted:.0%}", settings, f"{gain:.2f}x"))
    gains = [(beta, gain) for beta, gain, *_ in points]
    section.data = {f"{beta:.3f}": gain for beta, gain in gains}
    section.crossings = [
        f"beta: {THRESHOLD}x as fast, the default threshold, {where(gains, '', level=THRESHOLD)}",
        f"beta: as fast as plain decoding {where(gains, '')}",
    ]
    return section


def _write(path: Path, weights: Weights, tokenizer: str, state: float) -> float:
    """Writes the model whose core gets `state` times the state; returns its beta."""
    tensors = {name: np.array(values) for name, values in weights.tensors.items()}
    injection = tensors["inject.weight"].astype(np.float32)  # (d, 2d): the state's half, then the prompt's
    injection[:, : injection.shape[0]] *= state
    tensors["inject.weight"] = injection.astype(np.float16)
    beta = measure_beta(weights.config, tensors, tokenizer)
    assert beta is not None
    artifact.write(path, weights.config, tensors, tokenizer=tokenizer)
    return beta


def _compare(model: Model, prompts: list[list[int]], rounds: int, beta: float) -> tuple[float, float, str]:
    """-> times as fast, share of accepted drafts, settings."""
    say(f"  speculation, beta {beta:.2f}: calibrating")
    best = calibrate_speculation(model, prompts, candidates=CANDIDATES, max_tokens=24).best
    config = GenerateConfig(max_tokens=NEW, ignore_eos=True)
    counts = [0, 0]

    def plain() -> float:
        return sum(model.generate(prompt, config).stats.decode_ms for prompt in prompts)

    def drafted() -> float:
        stats = [model.generate_speculative(prompt, best, config).stats for prompt in prompts]
        counts[0] += sum(each.accepted for each in stats)
        counts[1] += sum(each.drafted for each in stats)
        return sum(each.decode_ms for each in stats)

    cases: dict[str, Callable[[], float]] = {"plain": plain, "drafted": drafted}
    times = interleaved(f"speculation, beta {beta:.2f}", cases, rounds)
    settings = f"{best.draft_loops}, {best.draft_ahead}"
    return times.ratio("plain", "drafted"), counts[0] / max(1, counts[1]), settings
