"""Text while tokens arrive: whatever the token boundaries, the pieces add up to the whole, cut at the first
stop."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders

from tinyloop_serve.replica.text import (
    LONGEST_PENDING,
    UNFINISHED,
    Detokeniser,
    RequestText,
    StopStrings,
    Vocabulary,
)

CORPUS = (
    "The definition of a looped model: one block, run many times. In the beginning was the word.",
    "日本語の文章は、文字ごとに三バイトです。機械は学ぶ。",
    "emoji 😀😃 👩‍👩‍👧 flags 🇫🇷🇯🇵 and combining e\u0301 a\u0300o\u0302 ﷺ ½ ß ﬁ",
    "def f(x):\n\treturn x  +  1\r\n\n\n   # spaces",
)
END = "<|end|>"
TEXTS = st.one_of(
    st.text(alphabet="ab the日本😀👩‍e\u0301\u0300\n", max_size=40),
    st.text(max_size=30),
    st.lists(st.sampled_from([*CORPUS, " ", "a", "😀", "�"]), max_size=4).map("".join),
)


@functools.cache
def byte_level() -> tuple[Tokenizer, Vocabulary]:
    """A byte-level BPE: every byte is a token, some pairs of a few scripts are merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer, Vocabulary(tokenizer.to_str())


@functools.cache
def sentence_piece() -> tuple[Tokenizer, Vocabulary]:
    """Llama 2's kind: a mark for spaces, byte tokens for what is not in the vocabulary, first space
    stripped."""
    words = ["▁", "▁the", "▁a", "▁b", "a", "b", "the", "▁re", "placed", "日"]
    vocabulary = {
        word: index for index, word in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + words)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.decoder = token_decoders.Sequence(
        [
            token_decoders.Replace("▁", " "),
            token_decoders.ByteFallback(),
            token_decoders.Fuse(),
            token_decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer, Vocabulary(tokenizer.to_str())


def split_at_random(tokenizer: Tokenizer, text: str, seed: int) -> list[int]:
    """Tokens of `text`, encoded in random byte slices: boundaries fall inside characters too."""
    alphabet = {char: byte for byte, char in _byte_chars().items()}
    inverse = {byte: char for char, byte in alphabet.items()}
    vocab = tokenizer.get_vocab()
    data, rng, tokens, at = text.encode(), random.Random(seed), [], 0
    while at < len(data):
        for size in (rng.randint(1, 8), 4, 3, 2, 1):
            token = vocab.get("".join(inverse[byte] for byte in data[at : at + size]))
            if token is not None:
                break
        assert token is not None
        tokens.append(token)
        at += min(size, len(data) - at)
    return tokens


@functools.cache
def _byte_chars() -> dict[int, str]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others are moved above U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + n) for n, byte in enumerate(moved)}


def pieces(vocabulary: Vocabulary, tokens: list[int]) -> list[str]:
    detokeniser = Detokeniser(vocabulary)
    return [*(detokeniser.push(token) for token in tokens), detokeniser.flush()]


def first_stop(text: str, stops: list[str]) -> str:
    """`text` up to the stop string that is complete first; the longest of those."""
    found = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else text


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(0, 2**32))
def test_pieces_add_up_and_hold_no_half_characters(text: str, seed: int) -> None:
    tokenizer, vocabulary = byte_level()
    tokens = split_at_random(tokenizer, text, seed)
    assert vocabulary.decode(tokens) == text
    shown = pieces(vocabulary, tokens)
    assert "".join(shown) == text
    if UNFINISHED not in text:
        assert not any(UNFINISHED in piece for piece in shown)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_invalid_bytes_add_up_too(data: bytes) -> None:
    tokenizer, vocabulary = byte_level()
    vocab, chars = tokenizer.get_vocab(), _byte_chars()
    tokens = [vocab[chars[byte]] for byte in data]
    assert "".join(pieces(vocabulary, tokens)) == vocabulary.decode(tokens) == data.decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=80))
def test_any_tokens_of_a_byte_level_vocabulary_add_up(tokens: list[int]) -> None:
    _, vocabulary = byte_level()
    assert "".join(pieces(vocabulary, tokens)) == vocabulary.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab the日😀é", max_size=20))
def test_a_sentence_piece_vocabulary_adds_up(text: str) -> None:
    tokenizer, vocabulary = sentence_piece()
    tokens = tokenizer.encode(text.replace(" ", "▁")).ids
    assert "".join(pieces(vocabulary, tokens)) == vocabulary.decode(tokens)


@settings(max_examples=300, deadline=None)
@given(
    TEXTS,
    st.lists(st.text(alphabet="ab the日😀", min_size=1, max_size=4), max_size=4),
    st.integers(0, 2**32),
)
def test_text_ends_before_the_first_stop(text: str, stops: list[str], seed: int) -> None:
    tokenizer, vocabulary = byte_level()
    answer, shown = RequestText(vocabulary, stops), ""
    for token in split_at_random(tokenizer, text, seed):
        shown += answer.push(token)
        assert text.startswith(shown)
        if answer.stopped:
            break
    shown += answer.flush()
    assert shown == first_stop(text, stops)
    assert answer.stopped == (shown != text)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", max_size=5), max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_is_found_wherever_the_text_is_split(parts: list[str], stops: list[str]) -> None:
    whole = "".join(parts)
    for chunks in (parts, [whole], list(whole)):
        matcher = StopStrings(stops)
        assert "".join([*(matcher.push(chunk) for chunk in chunks), matcher.flush()]) == first_stop(
            whole, stops
        )


def test_a_stop_over_three_tokens_is_held_back_and_released() -> None:
    matcher = StopStrings(["<end>"])
    assert [matcher.push(part) for part in ("go <e", "n", "g", " <en", "d", ">x")] == [
        "go ", "", "<eng", " ", "", "",
    ]  # fmt: skip
    assert matcher.found and matcher.flush() == ""


def test_flush_gives_the_beginning_of_a_stop_that_never_came() -> None:
    matcher = StopStrings(["###"])
    assert matcher.push("a##") == "a"
    assert matcher.flush() == "##"


def test_special_hidden_and_unknown_tokens_have_no_text() -> None:
    tokenizer, vocabulary = byte_level()
    end = tokenizer.get_vocab()[END]
    tokens = [*tokenizer.encode("a").ids, end, 10_000, *tokenizer.encode("b").ids]
    assert "".join(pieces(vocabulary, tokens)) == "ab"
    hidden = Vocabulary(tokenizer.to_str(), hidden=tokenizer.encode("b").ids)
    assert "".join(pieces(hidden, tokens)) == "a"


def test_text_comes_with_the_token_that_completes_it() -> None:
    tokenizer, vocabulary = byte_level()
    vocab, chars = tokenizer.get_vocab(), _byte_chars()
    tokens = [vocab[chars[byte]] for byte in "a😀b".encode()]
    assert pieces(vocabulary, tokens) == ["a", "", "", "", "😀", "b", ""]


def test_an_endless_run_of_invalid_bytes_keeps_the_window_short() -> None:
    tokenizer, vocabulary = byte_level()
    vocab, chars = tokenizer.get_vocab(), _byte_chars()
    for pattern in (b"\x80", b"\xf0\x9f", b"\xe6\x97\xff", b"\xf0\x9f\x98"):
        tokens: list[int] = [vocab[chars[byte]] for byte in pattern] * 400
        detokeniser, shown, longest = Detokeniser(vocabulary), "", 0
        for token in tokens:
            shown += detokeniser.push(token)
            longest = max(longest, len(detokeniser._window))
        assert shown + detokeniser.flush() == vocabulary.decode(tokens)
        assert longest <= LONGEST_PENDING + 2


def test_the_work_per_token_does_not_grow() -> None:
    tokenizer, vocabulary = byte_level()
    detokeniser = Detokeniser(vocabulary)
    for token in tokenizer.encode(" ".join(CORPUS) * 20).ids:
        detokeniser.push(token)
        assert len(detokeniser._window) < 16


def test_without_a_vocabulary_there_is_no_text() -> None:
    answer = RequestText(None, ["a"])
    assert answer.push(1) == "" and answer.flush() == "" and not answer.stopped


def test_a_text_that_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="not a tokenizer"):
        Vocabulary('{"model": 1}')
