"""What each cache mode costs in quality and saves in bytes; one JSON object as the last line.

    .venv/bin/python scripts/bench/cache_modes.py [--model PATH] [--tokens 200]

Against the fp16 cache of the same model, teacher-forced over real text tokens where the model has a
tokenizer (else random ones): the root mean square logit error relative to the logits' standard deviation,
and the share of
positions whose most likely token is the same. A second model with random weights and 8 loops shows what no
training
can hide.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tinyloop_serve.native import Model, artifact, demo_model_path
from tinyloop_serve.native.tensors import Tensor

MODES = ("fp16", "int8", "h_fp16", "h_int8", "int4")
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and "
    "darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And "
    "God said, Let there be light: and there was light. The definition of river (noun) is: a large natural "
    "stream of water. The definition of gentle (adjective) is: soft and mild; not harsh or stern or severe. "
    "And he said unto them, Go ye into all the world."
)


def random_model(folder: Path) -> Path:
    """4 layers, 8 loops, grouped queries; weights of ordinary scale."""
    config: dict[str, Any] = {
        "vocab_size": 512, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ffn": 256,
        "n_prelude": 1, "n_core": 2, "n_coda": 1, "loops": 8, "max_seq_len": 512, "norm": "sandwich",
        "norm_eps": 1e-5, "injection": "add", "start": "prelude", "rope": "half", "rope_theta": 10000.0,
        "tied_head": True,
        "bos_id": None, "eos_ids": [], "beta": None,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors: dict[str, Tensor] = {
        name: (np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)).astype(
            np.float16
        )
        for name, shape in artifact.expected_tensors(config).items()
    }
    artifact.write(folder / "random.tinyloop", config, tensors)
    return folder / "random.tinyloop"


def text_tokens(model: Model, count: int) -> list[int]:
    if text := model.metadata.get("tokenizer"):
        from tokenizers import Tokenizer

        ids: list[int] = Tokenizer.from_str(text).encode(TEXT).ids
        return ids[:count]
    return [int(t) for t in np.random.default_rng(1).integers(0, model.config["vocab_size"], count)]


def compare(path: Path, count: int) -> dict[str, Any]:
    with Model(path) as model:
        tokens = text_tokens(model, count)
        exact = model.logits(tokens, 0, "fp16")
        rows: dict[str, Any] = {}
        for mode in MODES:
            found = model.logits(tokens, 0, mode)
            rows[mode] = {
                "bytes_per_token": model.cache_bytes(1024, mode) // 1024,
                "logit_error": round(float(np.sqrt(np.mean((found - exact) ** 2)) / exact.std()), 4),
                "greedy_agreement": round(float(np.mean(found.argmax(1) == exact.argmax(1))), 3),
            }
        return {"tokens": len(tokens), "loops": model.config["loops"], "modes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = {
            options.model.stem: compare(options.model, options.tokens),
            "random": compare(random_model(Path(folder)), options.tokens),
        }
    for name, result in report.items():
        print(f"{name}: {result['tokens']} tokens at {result['loops']} loops")
        for mode, row in result["modes"].items():
            error, agreement = row["logit_error"], row["greedy_agreement"]
            print(f"  {mode:8} {row['bytes_per_token']:7} B/token  error {error:.4f}  greedy {agreement:.3f}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
