"""The tokenising thread. Catches: a text prompt without an answer, a loop that waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tinyloop_serve.dispatcher import tokenize
from tinyloop_serve.dispatcher.effects import Load, Tokenize
from tinyloop_serve.dispatcher.tokenize import Tokenizer
from tinyloop_serve.protocol.codec import tokens_from_bytes
from tinyloop_serve.protocol.errors import InvalidRequest, LimitExceeded, TinyLoopError

WORDS = (
    '{"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},'
    '"model":{"type":"WordLevel","vocab":{"a":0,"b":1,"?":2},"unk_token":"?"}}'
)


class Desk:
    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self.tokenizer = Tokenizer(self._woken.release)

    def answers(self, *jobs: Load | Tokenize) -> list[tuple[int, list[int] | TinyLoopError]]:
        for job in jobs:
            self.tokenizer.take(job)
        for job in jobs:
            if isinstance(job, Tokenize):
                assert self._woken.acquire(timeout=30)
        results = self.tokenizer.results()
        return [(key, tokens_from_bytes(r) if isinstance(r, bytes) else r) for key, r in results]


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.tokenizer.close()


def test_text_becomes_ids_in_order(desk: Desk) -> None:
    jobs = (Load(WORDS, -1), Tokenize(1, "a b"), Tokenize(2, "b c"), Tokenize(3, " "))
    assert desk.answers(*jobs) == [(1, [0, 1]), (2, [1, 2]), (3, [])]


def test_the_models_first_token_is_put_in_front(desk: Desk) -> None:
    assert desk.answers(Load(WORDS, 9), Tokenize(1, "a")) == [(1, [9, 0])]
    assert desk.answers(Tokenize(2, "a", bos=False)) == [(2, [0])]  # it goes on after other tokens


def test_a_prompt_is_not_cut_or_filled_up_as_the_file_says(desk: Desk) -> None:
    lengths = json.loads(WORDS) | {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 2, "pad_type_id": 0, "pad_token": "?",
        },
    }  # fmt: skip
    assert desk.answers(Load(json.dumps(lengths), -1), Tokenize(1, "a b a b a")) == [(1, [0, 1, 0, 1, 0])]


def test_too_long_a_text_is_refused_by_its_tokens(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_PROMPT_TOKENS", 3)
    (fits, (_, error)) = desk.answers(Load(WORDS, -1), Tokenize(1, "a b a"), Tokenize(2, "a b a b"))
    assert fits == (1, [0, 1, 0])
    assert isinstance(error, LimitExceeded) and error.value == "'4 tokens'"


def test_the_loop_goes_on_while_a_long_text_is_tokenised(desk: Desk) -> None:
    """Whether the package lets other threads run: a text that takes 0.2 s must not stop this one for it."""
    desk.tokenizer.take(Load(WORDS, -1))
    assert desk.answers(Tokenize(1, "a")) == [(1, [0])]  # loaded
    desk.tokenizer.take(Tokenize(2, "a b " * 125_000))
    turns = 0
    while not (results := desk.tokenizer.results()):
        time.sleep(0.001)
        turns += 1
    ((key, ids),) = results
    assert (key, len(ids)) == (2, 1_000_000) and turns > 10


@pytest.mark.parametrize("tokenizer, why", [("", "no tokenizer"), ("{", "cannot be read")])
def test_without_a_tokenizer_the_answer_says_what_to_send(desk: Desk, tokenizer: str, why: str) -> None:
    ((key, error),) = desk.answers(Load(tokenizer, -1), Tokenize(1, "a"))
    assert isinstance(error, InvalidRequest) and why in error.message and "prompt_tokens" in error.message
    assert desk.answers(Load(WORDS, -1), Tokenize(2, "a")) == [(2, [0])]  # the thread lives on
