"""Corpus of the demo model, from Debian packages to token windows: WordNet glosses and the King James Bible.

Knows where the text comes from and how documents are cut, split and packed; knows nothing about the model.
"""

import re
import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
_PARTS_OF_SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
_MARKER = re.compile(r"\((a|p|ip)\)$")  # adjective position markers of the WordNet database


def gloss_document(line: str, part: str) -> str | None:
    """One WordNet synset line -> one document; None for instances (persons, places): names are noise here."""
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    n_words = int(fields[3], 16)
    words = [_MARKER.sub("", word).replace("_", " ") for word in fields[4 : 4 + 2 * n_words : 2]]
    if "@i" in fields[4 + 2 * n_words :] or not gloss:
        return None
    gloss = " ".join(gloss.replace("`", "'").split())
    definition = gloss.split('"')[0].rstrip(" ;,:-")
    if not definition:
        return None
    text = f"The definition of {words[0]} ({part}) is: {definition}."
    for example in re.findall(r'"([^"]+)"', gloss)[:2]:
        text += f' Example: "{example.strip(" ;,")}".'
    if len(words) > 1:
        text += f" Synonyms: {', '.join(words[1:5])}."
    return text


def read_wordnet(folder: Path) -> list[str]:
    """Documents of /usr/share/wordnet (Debian package wordnet-base)."""
    documents = []
    for suffix, part in _PARTS_OF_SPEECH.items():
        for line in (folder / f"data.{suffix}").read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.startswith(" ") and (document := gloss_document(line, part)):
                documents.append(document)
    return documents


def read_kjv(command: str, rng: np.random.Generator) -> list[str]:
    """Passages of 4 to 24 verses, one verse a line, never across chapters.

    The text lies compressed in the package bible-kjv-text; `command` is the reader that bible-kjv installs.
    """
    dump = subprocess.run(
        [command, "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True
    ).stdout
    lines = [line.split(" ", 1) for line in dump.splitlines() if line.strip()]
    documents = []
    for _, chapter in groupby(lines, key=lambda line: line[0].split(":")[0]):
        verses = [" ".join(verse.split()) for _, verse in chapter]
        start = 0
        while start < len(verses):
            count = int(rng.integers(4, 25))
            documents.append("\n".join(verses[start : start + count]))
            start += count
    return documents


def split(documents: Sequence[str], held_out: float, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """(training, validation) by document."""
    chosen = rng.random(len(documents)) < held_out
    return (
        [d for d, out in zip(documents, chosen, strict=True) if not out],
        [d for d, out in zip(documents, chosen, strict=True) if out],
    )


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; id 0 is the end-of-text token that also starts every document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> list[np.ndarray]:
    """Token arrays, each beginning with the end-of-text token."""
    eot = tokenizer.token_to_id(EOT)
    return [np.array([eot, *e.ids], dtype=np.int64) for e in tokenizer.encode_batch(list(documents))]


def pack(documents: Sequence[np.ndarray], length: int, order: np.ndarray, min_tail: int = 64) -> np.ndarray:
    """Windows of length + 1 tokens over the documents in `order`: (n, length + 1).

    A window starts at a document's beginning, except that a document cut with `min_tail` or more tokens to
    go is continued in the next window; shorter tails are dropped.
    """
    stream = np.concatenate([documents[i] for i in order])
    starts = np.cumsum([0, *(len(documents[i]) for i in order)])
    windows, at = [], 0
    while at + length + 1 <= len(stream):
        windows.append(stream[at : at + length + 1])
        at += length
        following = int(starts[np.searchsorted(starts, at)])
        if following - at < min_tail:
            at = following
    return np.stack(windows)


class Batches:
    """Endless training batches, shuffled anew each epoch; the n-th batch depends on the seed and n alone."""

    def __init__(self, documents: Sequence[np.ndarray], length: int, rows: int, seed: int) -> None:
        self._documents, self._length, self._rows, self._seed = documents, length, rows, seed
        self._epoch, self._used = -1, 0
        self._windows = np.empty((0, length + 1), dtype=np.int64)

    def next(self) -> np.ndarray:
        """(rows, length + 1) tokens."""
        if self._used + self._rows > len(self._windows):
            self._epoch, self._used = self._epoch + 1, 0
            rng = np.random.default_rng([self._seed, self._length, self._epoch])
            windows = pack(self._documents, self._length, rng.permutation(len(self._documents)))
            self._windows = windows[rng.permutation(len(windows))]
        self._used += self._rows
        return self._windows[self._used - self._rows : self._used]
