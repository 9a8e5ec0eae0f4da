"""What each type of weights costs in quality; one JSON object as the last line.

    .venv/bin/python scripts/bench/weights.py [--model PATH ...] [--tokens 16384] [--loops 1 2 4 8 16]

Against the fp16 weights of the same model, teacher-forced over real text in windows of 256 tokens: the loss
(nats per token) and its difference, the Kullback-Leibler divergence of the next-token distributions, and the
share of positions whose most likely token is the same. The text is what the demo model was never trained on,
as its card's losses are measured, where the Debian packages that `scripts/train_demo.py` names are installed;
elsewhere the documents of this repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tinyloop_serve.native import Model, demo_model_path
from tinyloop_serve.native.importers.tinyloop import convert_tinyloop

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from demo_model import data  # noqa: E402

WEIGHTS = ("fp16", "bf16", "int8", "int4")
WINDOW = 256
WORDNET, BIBLE = Path("/usr/share/wordnet"), "bible"


def documents() -> tuple[str, list[str]]:
    """(what they are, the documents)."""
    if WORDNET.is_dir() and shutil.which(BIBLE):
        rng = np.random.default_rng(1)  # the split of the shipped model's training
        everything = data.read_wordnet(WORDNET) + data.read_kjv(BIBLE, rng)
        return "held-out documents of the demo model", data.split(everything, 0.015, rng)[1]
    paths = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/*.md"))
    return "documents of this repository", [path.read_text(encoding="utf-8") for path in paths]


def windows(model: Model, texts: Sequence[str], tokens: int) -> npt.NDArray[np.int64]:
    """(n, WINDOW + 1) tokens, in the order of the card's evaluation."""
    tokenizer = Tokenizer.from_str(model.metadata["tokenizer"])
    encoded = data.encode(tokenizer, texts)
    order = np.random.default_rng(0).permutation(len(encoded))
    return data.pack(encoded, WINDOW, order)[: max(1, tokens // WINDOW)]


class Totals:
    """Sums over tokens, of one type of weights at one loop count."""

    def __init__(self) -> None:
        self.loss = self.divergence = 0.0
        self.same = self.count = 0

    def add(self, log_p: npt.NDArray[np.float32], exact: npt.NDArray[np.float32], targets: Any) -> None:
        """log_p, exact: (n, vocabulary) log-probabilities, those of the fp16 weights in `exact`."""
        self.loss -= float(log_p[np.arange(len(targets)), targets].sum(dtype=np.float64))
        self.divergence += float((np.exp(exact) * (exact - log_p)).sum(dtype=np.float64))
        self.same += int((log_p.argmax(1) == exact.argmax(1)).sum())
        self.count += len(targets)


def log_probabilities(model: Model, tokens: list[int], loops: int) -> npt.NDArray[np.float32]:
    logits = model.logits(tokens, loops)
    logits = logits - logits.max(axis=1, keepdims=True)
    found: npt.NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def measure(path: Path, texts: Sequence[str], tokens: int, loop_counts: Sequence[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.tinyloop" for name in WEIGHTS}
        for name, file in files.items():
            convert_tinyloop(path, file, weights=name)
        models = {name: Model(file) for name, file in files.items()}
        sizes = {name: file.stat().st_size for name, file in files.items()}
    reference = models["fp16"]
    counts = [loops for loops in loop_counts if loops <= reference.config["max_loops"]]
    text = windows(reference, texts, tokens)
    totals = {name: {loops: Totals() for loops in counts} for name in WEIGHTS}
    for number, window in enumerate(text):
        print(f"\r{path.stem}: window {number + 1} of {len(text)}", end="", file=sys.stderr, flush=True)
        for loops in counts:
            exact = log_probabilities(reference, window[:-1].tolist(), loops)
            for name, model in models.items():
                found = exact if model is reference else log_probabilities(model, window[:-1].tolist(), loops)
                totals[name][loops].add(found, exact, window[1:])
    print(file=sys.stderr)
    for model in models.values():
        model.close()
    return {
        "tokens": text.shape[0] * WINDOW,
        "weights": {
            name: {"megabytes": round(sizes[name] / 1e6, 1), "loops": rows(totals[name], totals["fp16"])}
            for name in WEIGHTS
        },
    }


def rows(totals: dict[int, Totals], exact: dict[int, Totals]) -> dict[str, Any]:
    return {
        str(loops): {
            "loss": round(t.loss / t.count, 4),
            "loss_difference": round((t.loss - exact[loops].loss) / t.count, 5),
            "divergence": round(t.divergence / t.count, 6),
            "greedy_agreement": round(t.same / t.count, 4),
        }
        for loops, t in totals.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, nargs="+", default=[demo_model_path()], help="fp16 artifacts with a tokenizer"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of text")
    parser.add_argument(
        "--loops", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="up to the model's most"
    )
    options = parser.parse_args()
    name, texts = documents()
    report: dict[str, Any] = {"text": name, "models": {}}
    for path in options.model:
        report["models"][path.stem] = measure(path, texts, options.tokens, options.loops)
    print(f"text: {name}")
    for model, found in report["models"].items():
        print(f"{model}: {found['tokens']} tokens")
        print("  weights      MB  loops    loss  difference  divergence  same token")
        for weights, result in found["weights"].items():
            for loops, row in result["loops"].items():
                print(
                    f"  {weights:8} {result['megabytes']:6.1f} {loops:>6} {row['loss']:7.4f}"
                    f" {row['loss_difference']:11.5f} {row['divergence']:11.6f}"
                    f" {100 * row['greedy_agreement']:9.2f} %"
                )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
