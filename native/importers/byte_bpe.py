"""Rebuilds a tokenizer.json (Hugging Face `tokenizers`) for a byte-level BPE from its tokens and merges.

GGUF names the pre-tokenizer (how text is cut into words before BPE) instead of spelling it out;
PRE_TOKENIZERS spells out those that we know. Another name is refused: a near miss gives slightly wrong
tokens, so a model that is slightly worse for a reason no one sees.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from tinyloop_serve.native.errors import refusal

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_BYTES_ONLY: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_GPT2_WORDS: dict[str, Any] = _BYTES_ONLY | {
    "use_regex": True
}  # `tokenizers` has GPT-2's expression built in
_SINGLE_DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}


class PreTokenizer(NamedTuple):
    steps: tuple[dict[str, Any], ...]
    ignore_merges: bool = False  # a word that is a token as a whole is taken as it is
    normalizer: dict[str, Any] | None = None
    add_bos: bool = False  # where the file does not say


def _split(digits: str) -> dict[str, Any]:
    """The word expression of the Llama 3 and Qwen 2 tokenizers; they differ in how digits are grouped."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_CODE = PreTokenizer((_SINGLE_DIGITS, _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_split(r"\p{N}{1,3}"), _BYTES_ONLY), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((_GPT2_WORDS,)),
    "smollm": _CODE,
    "starcoder": _CODE,
    "codeshell": _CODE,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": PreTokenizer((_split(r"\p{N}"), _BYTES_ONLY), normalizer={"type": "NFC"}),
}


def tokenizer_json(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: str) -> str:
    """The text of a tokenizer.json; token ids are positions in `tokens`, `merges` are "left right" by rank.

    Control and user-defined tokens become added tokens: they are found in text before it is cut into words.
    Raises ArtifactError naming the GGUF key.
    """
    if pre not in PRE_TOKENIZERS:
        raise refusal("tokenizer.ggml.pre", pre, "one of " + ", ".join(sorted(PRE_TOKENIZERS)))
    if len(types) != len(tokens):
        raise refusal("tokenizer.ggml.token_type", f"{len(types)} entries", f"{len(tokens)}, one per token")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise refusal("tokenizer.ggml.tokens", twice, "no token twice")
    _check_merges(merges, vocab)
    cut = PRE_TOKENIZERS[pre]
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, token, special=kind == CONTROL)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": cut.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(cut.steps)},
        "post_processor": None,
        "decoder": _BYTES_ONLY | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.ignore_merges,
            "vocab": vocab,
            "merges": list(merges),
        },
    }
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))


def _check_merges(merges: Sequence[str], vocab: dict[str, int]) -> None:
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= vocab.keys():
            raise refusal(
                "tokenizer.ggml.merges", merge, "two tokens, a space between them, that join to a token"
            )


def _added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **plain, "special": special}
