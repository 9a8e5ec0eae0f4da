"""Grammars: what a lane may write, as a JSON schema, a regular expression, Lark or EBNF. Knows no models.

    grammar = Grammar.from_json_schema(schema, model.metadata["tokenizer"], vocab_size, eos_ids)
    model.generate(prompt, GenerateConfig(grammar=grammar))  # the core asks for the mask before every token

By llguidance, not xgrammar. Measured with one JSON schema (vocabularies of 4k / 49k, busy cores): it compiles
in 1 / 1 ms against 2 / 27; a mask takes 9 / 20 us in the median against 7 / 37, one in a hundred 0.2 / 0.6 ms
against 0.05 / 0.1. Both are small beside a forward pass, but xgrammar loads torch (6 s, 260 MB) and requires
transformers and triton; llguidance loads in 0.2 s, is 8 MB and requires nothing. Our figures today:
scripts/bench/grammar.py. It is an optional package (the extra `grammar`), loaded at the first grammar.

JSON: up to 12 characters of whitespace may stand between tokens (small models dwell on it), and a keyword
that cannot be enforced is refused; llguidance's own key "x-guidance" in the schema changes both, for example
{"whitespace_flexible": false}. Regular expressions match the whole text; no look-around, no back-references.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinyloop_serve.native.errors import BackendUnavailable, ConfigError

# llguidance recurses once per nested rule, without a limit: a hostile chain of rules would end the process.
# The worst texts of this length need less than a quarter of this stack, which is address space, not memory.
MAX_TEXT = 1 << 16
STACK_BYTES = 256 << 20
_stack_size = threading.Lock()

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,12}"}

# The most automaton states (1 to 2 kB each) that the lanes of a grammar build and share.
MAX_STATES = 50_000


class Grammar:
    """A compiled grammar for one tokenizer. Any number of lanes and threads may use it at once.

    tokenizer_json: the artifact's metadata["tokenizer"] (byte-level BPE). vocab_size: the model's; rows
    beyond the tokenizer's are never allowed. eos_ids: the model's; allowed where the grammar may end and
    nowhere else, even if such a token has a text. A model without any writes until nothing more is allowed.

    Raises, before anything is generated, ConfigError (field "grammar": the text is no grammar, asks for what
    cannot be enforced, or nothing matches it; "tokenizer"; "eos_ids") and BackendUnavailable (no llguidance).
    """

    def __init__(self, source: str, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """source: what LLMatcher.grammar_from_*() gave; use from_json_schema and its siblings."""
        accepted = f"token ids from 0 to {vocab_size - 1}"
        for token in eos_ids:
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"eos_ids: {token} (accepted: {accepted})",
                    field="eos_ids",
                    value=token,
                    accepted=accepted,
                )
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._source = source
        self._tokenizer, unused = _tokenizer(tokenizer_json, vocab_size)
        words = (vocab_size + 31) // 32
        self._no_text = [_bit(token) for token in {*eos_ids, unused} if token < 32 * words]
        self._ends = [_bit(token) for token in eos_ids]
        self._start = self._compile()
        self.start().allowed(memoryview(bytearray(4 * words)))  # one that cannot start is refused here

    @classmethod
    def from_json_schema(
        cls,
        schema: str | bool | Mapping[str, Any],
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> Grammar:
        """JSON that satisfies the schema (its text, or the parsed object), keys in the schema's order."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            parsed = json.loads(_of_limited_length(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(str(error), "a JSON schema") from None
        plain = isinstance(parsed, dict) and "x-guidance" not in parsed
        read = functools.partial(
            _llguidance().LLMatcher.grammar_from_json_schema, defaults=JSON_OPTIONS if plain else None
        )
        return cls._of(read, text, tokenizer_json, vocab_size, eos_ids)

    @classmethod
    def from_regex(cls, regex: str, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Grammar:
        """Texts that the expression matches as a whole (syntax of Rust's regex)."""
        read = _llguidance().LLMatcher.grammar_from_regex
        return cls._of(read, regex, tokenizer_json, vocab_size, eos_ids)

    @classmethod
    def from_lark(cls, lark: str, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark; it begins at the rule `start`."""
        read = _llguidance().LLMatcher.grammar_from_lark
        return cls._of(read, lark, tokenizer_json, vocab_size, eos_ids)

    @classmethod
    def from_ebnf(cls, ebnf: str, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Grammar:
        """A context-free grammar in llama.cpp's EBNF ("GBNF"); it begins at the rule `root`."""
        read = functools.partial(_llguidance().grammar_from, "ebnf")
        return cls._of(read, ebnf, tokenizer_json, vocab_size, eos_ids)

    @classmethod
    def _of(
        cls,
        read: Callable[[str], str],
        text: str,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> Grammar:
        if not isinstance(text, str):
            raise _refusal(repr(text), "a text")
        try:
            source = read(_of_limited_length(text))
        except ValueError as error:
            raise _refusal(str(error)) from None
        return cls(source, tokenizer_json, vocab_size, eos_ids)

    def start(self) -> GrammarState:
        """The state of a new lane; cheap."""
        return GrammarState(self, self._start.deep_copy())

    def _restart(self) -> Any:
        """A matcher at the start that shares nothing with the lanes so far.

        Copies share the automaton that they build as they go; when it reaches a limit, it fails for all.
        """
        self._start = self._compile()
        return self._start.deep_copy()

    def _compile(self) -> Any:
        library = _llguidance()
        limits = library.LLParserLimits(verbose_errors=False, max_lexer_states=MAX_STATES)
        matcher = _on_deep_stack(
            lambda: library.LLMatcher(self._tokenizer, self._source, log_level=0, limits=limits)
        )
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher


class GrammarState:
    """Where one lane is in its grammar, used by one thread at a time; the core's side is in engine.h."""

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._tokens: list[int] = []
        self._ended = False

    def allowed(self, words: memoryview) -> None:
        """Sets bit `id % 32` of u32 `id // 32` for each token that may come next; words: bytes, zeroed."""
        if self._ended:
            return
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            self._again()
            mask = bytearray(self._matcher.compute_bitmask())
        del mask[len(words) :]
        for byte, bit in self._grammar._no_text:
            mask[byte] &= ~bit
        if self._matcher.is_accepting():
            for byte, bit in self._grammar._ends:
                mask[byte] |= bit
        elif self._matcher.is_error() or not mask.strip(b"\0"):
            raise _refusal(self._matcher.get_error())
        words[:] = mask

    def accept(self, token: int) -> None:
        """Takes a token that `allowed` allowed; an end token ends."""
        if token in self._grammar.eos_ids:
            self._ended = True
            return
        self._tokens.append(token)
        if not self._matcher.consume_token(token):
            self._again()

    def finished(self) -> bool:
        """Nothing but the end may follow."""
        return self._ended or bool(self._matcher.is_stopped())

    def _again(self) -> None:
        """After an error: whether this lane can go on must not depend on others that used the grammar."""
        self._matcher = self._grammar._restart()
        if not self._matcher.consume_tokens(self._tokens):
            raise _refusal(self._matcher.get_error())


def _bit(token: int) -> tuple[int, int]:
    return token >> 3, 1 << (token & 7)


def _of_limited_length(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise _refusal(f"a text of {len(text)} characters", f"at most {MAX_TEXT} characters")
    return text


def _refusal(reason: str, accepted: str = "what llguidance can enforce with this vocabulary") -> ConfigError:
    reason = reason.strip().split("\n<", 1)[0]  # what follows describes llguidance's state
    reason = "\n".join(line[:120] for line in reason.splitlines())[:1000]  # it quotes the text
    if reason in ("", "NoExtensionBias"):
        reason = "no text can come next"
    return ConfigError(
        f"grammar: {reason} (accepted: {accepted})", field="grammar", value=reason, accepted=accepted
    )


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        accepted = "pip install tinyloop-serve[grammar]"
        raise BackendUnavailable(
            f"grammars need the llguidance package: {accepted}", field="grammar", accepted=accepted
        ) from None
    return llguidance


@functools.lru_cache(maxsize=4)
def _tokenizer(tokenizer_json: str, vocab_size: int) -> tuple[Any, int]:
    """llguidance's view of a tokenizer (0.4 s for 49k tokens), and the id of the end token added to it.

    The end is a token of its own: the model's may be texts too, lie beyond the tokenizer, or not exist.
    """
    accepted = "the tokenizer.json of a byte-level BPE"
    try:
        document = json.loads(tokenizer_json)
        ids = {*document["model"]["vocab"].values(), *(added["id"] for added in document["added_tokens"])}
        end = len(ids)
        if ids != set(range(end)) or end > vocab_size:
            raise ValueError(f"its ids are not 0 to n - 1 with n <= {vocab_size}, the model's vocab_size")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": end, "content": "<|end of grammar|>", "special": True, **flags}
        document["added_tokens"].append(token)
        size = max(vocab_size, end + 1)
        return _llguidance().LLTokenizer(json.dumps(document), n_vocab=size, eos_token=[end]), end
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"tokenizer: {error} (accepted: {accepted})",
            field="tokenizer",
            value=str(error)[:1000],
            accepted=accepted,
        ) from None


def _on_deep_stack(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:  # a setting of the process, read when a thread starts
            before = threading.stack_size(STACK_BYTES)
            try:
                running = pool.submit(work)
            finally:
                threading.stack_size(before)
        return running.result()
