"""The prompts that speculation is measured on: the operator's own, or a few plain ones."""

from __future__ import annotations

from tinyloop_serve.native import Model
from tinyloop_serve.replica.config import Config, ConfigFault
from tinyloop_serve.replica.text import Vocabulary

PLAIN = (
    "The definition of a word is",
    "In the beginning there was nothing but the sea and",
    "A list of things to do before the winter:",
    "She opened the letter and read it twice, because",
    "Water boils at a lower temperature on a mountain, for",
)
COUNT = range(5, 11)  # fewer say little, more take long
MOST_TOKENS = 64  # of each: what matters is how well few loops predict many


def read(config: Config, model: Model, vocabulary: Vocabulary | None) -> list[list[int]]:
    """Token ids per prompt; none when speculation is off. Raises `ConfigFault` naming the file."""
    if config.speculation == "off":
        return []
    texts = _lines(config.calibration_prompts) if config.calibration_prompts else list(PLAIN)
    most = min(MOST_TOKENS, model.max_seq_len // 2)
    if vocabulary is None:  # no text: any token ids will do
        size = model.config["vocab_size"]
        return [[(7 * number + 13 * n) % size for n in range(16)][:most] for number, _ in enumerate(texts)]
    return [ids for text in texts if (ids := vocabulary.encode(text)[:most])]


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            texts = [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFault(f"--calibration-prompts {path}: {error}") from error
    if len(texts) not in COUNT:
        raise ConfigFault(
            f"--calibration-prompts {path}: {len(texts)} prompts, one per line; expected 5 to 10"
        )
    return texts
