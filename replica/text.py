"""Token ids to text, one token at a time: whole characters only, and nothing past a stop string.

    Vocabulary      one per model: the tokenizer, and which ids have no text
    Detokeniser     one per request: ids in, certain text out
    StopStrings     one per request: text in, text before the first stop string out
    RequestText     the two in a row

A tokenizer decodes sequences, not ids: a byte-level token may hold half a character, and others put a space
in front of a word only when something precedes it. So the detokeniser decodes a short window (the tokens of
the last piece as context, then the new ones) and shows what the new ones added; the cost of a token does
not grow with the answer. This file must not know the engine, sockets or messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
CHARACTER_BYTES = 4  # of the longest UTF-8 character, so at most that many tokens make one
LONGEST_PENDING = 16  # tokens; a model that emits endless invalid bytes must not make the window grow


class Vocabulary:
    """The text of a model's tokens. `hidden` ids (the end-of-sequence ids) have none, nor have special
    tokens.

    Raises ValueError when `tokenizer_json` is not a tokenizer.
    """

    def __init__(self, tokenizer_json: str, hidden: Iterable[int] = ()) -> None:
        from tokenizers import Tokenizer  # here: a model without a tokenizer need not pay for the import

        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the extension raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error
        special = {id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._hidden = frozenset(special | set(hidden))

    def has_text(self, token: int) -> bool:
        return token not in self._hidden and self._tokenizer.id_to_token(token) is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a whole sequence; the reference for what a detokeniser shows piece by piece."""
        return self.decode_visible([token for token in tokens if self.has_text(token)])

    def decode_visible(self, tokens: list[int]) -> str:
        """The same for tokens that all have text."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


class Detokeniser:
    """Ids in, text out. All pieces together equal `vocabulary.decode` of all ids (byte-level tokenizers:
    always; byte-fallback ones: where the bytes are valid UTF-8)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []  # context, then pending tokens
        self._context = 0  # tokens of the window that are context
        self._shown = 0  # characters of the window's text that were given out
        self._unfinished = 0  # tokens in a row after which the text ended in an unfinished character

    def push(self, token: int) -> str:
        """The text that became certain with `token`, often one token's, "" inside a character."""
        if not self._vocabulary.has_text(token):
            return ""
        self._window.append(token)
        text = self._vocabulary.decode_visible(self._window)
        self._unfinished = self._unfinished + 1 if text.endswith(UNFINISHED) else 0
        if self._unfinished < CHARACTER_BYTES:
            certain = len(text.rstrip(UNFINISHED))
        else:  # too many for one character: only the last mark can still change
            certain = len(text) - 1
        if certain <= self._shown:
            piece = ""
        else:
            piece, self._shown = text[self._shown : certain], certain
            if certain == len(text):
                self._drop(self._context, held=0)
                self._context = len(self._window)
                return piece
        if len(self._window) - self._context > LONGEST_PENDING:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The end of the sequence: what is still held, unfinished characters as U+FFFD."""
        text = self._vocabulary.decode_visible(self._window)
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece

    def _drop(self, tokens: int, held: int) -> None:
        """Drops tokens from the front of the window; `held` characters at its end are not given out yet."""
        del self._window[:tokens]
        self._shown = max(0, len(self._vocabulary.decode_visible(self._window)) - held)
        self._context = 0

    def _shorten(self, text: str) -> None:
        """Drops old pending tokens, at a place that no character spans: one in any CHARACTER_BYTES places."""
        end = len(self._window) - CHARACTER_BYTES
        for position in range(end, end - CHARACTER_BYTES, -1):
            before, after = self._window[:position], self._window[position:]
            if self._vocabulary.decode_visible(before) + self._vocabulary.decode_visible(after) == text:
                break
        self._drop(position, held=len(text) - self._shown)


class StopStrings:
    """Text in, text out, up to the stop string that is complete first (of those, the longest)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""  # the longest end of the text that might become a stop string
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is certainly before any stop string and was not given out yet."""
        if self.found or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            self.found = True
            _, certain = min(matches)
        else:
            certain = len(self._held) - max(_overlap(self._held, stop) for stop in self._stops)
        piece, self._held = self._held[:certain], self._held[certain:]
        return piece

    def flush(self) -> str:
        """The end of the text: what was held is no stop string after all."""
        piece, self._held = ("" if self.found else self._held), ""
        return piece


class RequestText:
    """The text of one answer. Without a vocabulary (token ids only) it is always empty."""

    def __init__(self, vocabulary: Vocabulary | None, stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(vocabulary) if vocabulary else None
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """A stop string is complete: the answer's text ended before it, later tokens add nothing."""
        return self._stops.found

    def push(self, token: int) -> str:
        return self._stops.push(self._detokeniser.push(token)) if self._detokeniser else ""

    def flush(self) -> str:
        if not self._detokeniser:
            return ""
        return self._stops.push(self._detokeniser.flush()) + self._stops.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
