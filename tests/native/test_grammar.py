"""Grammars: what a lane writes is in the grammar, whatever the seed, batch or reuse; the rest is refused.

The models are random and tiny, so they write nonsense: all form in these answers comes from the masks.
"""

import functools
import importlib.util
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from tests.native import models, reference
from tests.native.device import sized
from tinyloop_serve.native import (
    BackendUnavailable,
    ConfigError,
    GenerateConfig,
    Generation,
    ModeError,
    Model,
    SpeculativeConfig,
    artifact,
)
from tinyloop_serve.native import grammar as grammar_module
from tinyloop_serve.native.grammar import MAX_TEXT, Grammar

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("llguidance"), reason="pip install tinyloop-serve[grammar]"
)

VOCAB = 330  # the tokenizer has 300 tokens: the other rows are padding
END = 0
PROMPT = [40, 41, 42, 43, 44, 45]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "日本"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOUR = r"#[0-9a-f]{3}([0-9a-f]{3})?"
WORDS = r"[A-Z][a-z]{1,8}( [a-zé]{1,8}){0,3}[.!?]"
SUM = 'start: term ("+" term)~0..3\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]{0,2}/'
ANSWER = 'root ::= ("yes" | "no") (", " reason)?\nreason ::= [a-z]+ "."'


def is_person(text: str) -> bool:
    found = json.loads(text)
    assert set(found) <= {"name", "age", "tags"}
    assert isinstance(found["name"], str) and len(found["name"]) <= 8
    assert type(found["age"]) is int and 0 <= found["age"] <= 150
    tags = found.get("tags", ["new"])
    return 1 <= len(tags) <= 3 and set(tags) <= {"new", "old", "日本"}


def is_sum(text: str) -> bool:
    return set(text) <= set("0123456789+()") and isinstance(eval(text), int)


def full_match(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text) is not None


CASES: dict[str, tuple[Callable[..., Grammar], Any, Callable[[str], bool]]] = {
    "schema": (Grammar.from_json_schema, PERSON, is_person),
    "schema as text": (Grammar.from_json_schema, json.dumps(PERSON), is_person),
    "compact": (
        Grammar.from_json_schema,
        PERSON | {"x-guidance": {"whitespace_flexible": False}},
        lambda text: is_person(text) and not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)),
    ),
    "integer": (
        Grammar.from_json_schema,
        {"type": "integer", "minimum": 5, "maximum": 5000},
        lambda text: 5 <= int(text) <= 5000,
    ),
    "colour": (Grammar.from_regex, COLOUR, full_match(COLOUR)),
    "words": (Grammar.from_regex, WORDS, full_match(WORDS)),
    "sum": (Grammar.from_lark, SUM, is_sum),
    "answer": (Grammar.from_ebnf, ANSWER, full_match(r"(yes|no)(, [a-z]+\.)?")),
}
each_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE with merges in and across the tokens of JSON and of other scripts."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        '{"name": "日本", "age": 100, "tags": ["new", "old"]}',
        "yes, the end. no, the 日本 é",
        "(12+300)",
    ]
    tokenizer.train_from_iterator(corpus * 5, trainer)
    return tokenizer


@functools.cache
def tokenizer_json() -> str:
    return str(tokenizer().to_str())


@functools.cache
def compiled(name: str, ends: tuple[int, ...] = (END,)) -> Grammar:
    read, text, _ = CASES[name]
    return read(text, tokenizer_json(), VOCAB, ends)


@functools.cache
def model_config(ends: tuple[int, ...] = (END,)) -> dict[str, Any]:
    return models.FAMILY["concat"] | {"vocab_size": VOCAB, "eos_ids": list(ends), "max_seq_len": 600}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "model.tinyloop"
    artifact.write(
        path,
        model_config(),
        reference.random_model(model_config(), seed=3, dtype="fp16"),
        tokenizer=tokenizer_json(),
    )
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path, threads=1) as model:
        yield model


def config(name: str | None, seed: int = 0, **changes: Any) -> GenerateConfig:
    grammar = None if name is None else compiled(name)
    return GenerateConfig(
        **{"max_tokens": 150, "temperature": 1.0, "seed": seed, "grammar": grammar} | changes
    )


def id_of(text: str) -> int:
    token = tokenizer().token_to_id(text)
    assert token is not None
    return token


def text_of(found: Generation) -> str:
    return str(tokenizer().decode(found.tokens))


@each_case
def test_every_answer_is_in_the_grammar(model: Model, name: str) -> None:
    lanes = model.generate_batch([PROMPT] * 24, [config(name, seed) for seed in range(24)])
    finished = [lane for lane in lanes if lane.stats.stop_reason in ("eos", "grammar")]
    assert len(finished) >= 20
    for lane in finished:
        assert CASES[name][2](text_of(lane)), text_of(lane)
        assert (lane.tokens[-1] == END) == (lane.stats.stop_reason == "eos")
        assert END not in lane.tokens[:-1] and max(lane.tokens) < 300
        assert lane.stats.grammar_ms > 0
    assert len({text_of(lane) for lane in finished}) > 5


@each_case
def test_greedy_answers_are_in_the_grammar(model: Model, name: str) -> None:
    found = model.generate(PROMPT, config(name, temperature=0.0, repetition_penalty=1.3))
    if found.stats.stop_reason != "max_tokens":
        assert CASES[name][2](text_of(found))
    assert (
        found.tokens == model.generate(PROMPT, config(name, temperature=0.0, repetition_penalty=1.3)).tokens
    )


def test_lanes_with_different_grammars_and_none_give_what_each_gives_alone(model: Model) -> None:
    names = [*CASES, None]
    configs = [config(name, seed, max_tokens=60) for seed, name in enumerate(names)]
    prompts = [PROMPT[: 2 + i % 4] for i in range(len(names))]
    steps: list[list[int | None]] = []
    lanes = model.generate_batch(prompts, configs, steps.append)
    for i, lane in enumerate(lanes):
        alone = model.generate(prompts[i], configs[i])
        assert (lane.tokens, lane.stats.stop_reason) == (alone.tokens, alone.stats.stop_reason)
        assert [step[i] for step in steps if step[i] is not None] == lane.tokens
    assert lanes[-1].stats.grammar_ms == 0


@each_case
def test_reuse_changes_nothing(model: Model, name: str) -> None:
    cold = model.generate(PROMPT, config(name, 7, loops=4))
    prefix = model.create_prefix_cache(PROMPT[:4], n_loops=4)
    assert (
        model.generate_from_prefix_cache(prefix, PROMPT[4:], config(name, 7, loops=4)).tokens == cold.tokens
    )
    handle = model.create_resume_handle(PROMPT, loops_used=2)
    assert model.resume_generate(handle, 4, config(name, 7)).tokens == cold.tokens


def test_streaming_delivers_the_same_tokens(model: Model) -> None:
    seen: list[int] = []
    found = model.generate_stream(PROMPT, config("schema", 3), lambda token, position: seen.append(token))
    assert seen == found.tokens == model.generate(PROMPT, config("schema", 3)).tokens


def test_threads_with_a_model_each_may_share_a_grammar(path: Path, model: Model) -> None:
    seeds = range(sized(6, 2))
    expected = [model.generate(PROMPT, config("schema", seed)).tokens for seed in seeds]
    fresh = Grammar.from_json_schema(PERSON, tokenizer_json(), VOCAB, [END])
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        with Model(path, threads=1) as own:
            found[number] = [own.generate(PROMPT, config(None, s, grammar=fresh)).tokens for s in seeds]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == dict.fromkeys(range(3), expected)


def test_what_cannot_be_combined_is_refused_and_names_both(model: Model) -> None:
    before = model.step_counter
    speculative = SpeculativeConfig(draft_loops=1)
    calls: dict[str, Callable[[], object]] = {
        "speculative": lambda: model.generate_speculative(PROMPT, speculative, config("colour")),
        "tree_speculative": lambda: model.generate_tree_speculative(PROMPT, speculative, config("colour")),
        "beam": lambda: model.generate(PROMPT, config("colour", beam_size=2, temperature=0.0)),
    }
    for other, call in calls.items():
        with pytest.raises(ModeError, match=f"grammar.*{other}") as caught:
            call()
        assert caught.value.field == "grammar"
    assert model.step_counter == before


def test_a_grammar_for_another_vocabulary_size_is_refused(model: Model) -> None:
    smaller = Grammar.from_regex("a+", tokenizer_json(), 300, [END])
    with pytest.raises(ConfigError, match="vocab_size") as caught:
        model.generate(PROMPT, GenerateConfig(max_tokens=3, grammar=smaller))
    assert caught.value.field == "grammar"


def test_ends_are_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    five, three = id_of("5"), id_of("3")
    for ends in [(END,), (five,), (VOCAB - 1, END)]:  # special, a text, a padding row
        state = Grammar.from_regex("[0-9]{2,3}", tokenizer_json(), VOCAB, ends).start()
        assert not set(ends) & allowed(state) and three in allowed(state)
        state.accept(three)
        assert not set(ends) & allowed(state)
        state.accept(three)
        assert set(ends) <= allowed(state) and three in allowed(state) and not state.finished()
        state.accept(three)
        assert allowed(state) == set(ends) and state.finished()
    state = Grammar.from_regex("[0-9]{2,3}", tokenizer_json(), VOCAB, [END]).start()
    state.accept(three)
    state.accept(three)
    state.accept(END)
    assert state.finished() and not allowed(state)


def test_a_model_without_an_end_writes_until_nothing_more_is_allowed(path: Path) -> None:
    ends: tuple[int, ...] = ()
    endless = path.with_name("endless.tinyloop")
    artifact.write(
        endless, model_config(ends), reference.random_model(model_config(ends), seed=3, dtype="fp16")
    )
    with Model(endless, threads=1) as model:
        for seed in range(5):
            found = model.generate(PROMPT, config(None, seed, grammar=compiled("colour", ends)))
            assert found.stats.stop_reason == "grammar" and len(text_of(found)) == 7
        empty = model.generate(
            PROMPT, config(None, grammar=Grammar.from_regex("", tokenizer_json(), VOCAB, []))
        )
        assert empty.tokens == [] and empty.stats.stop_reason == "grammar"


def test_an_end_that_is_ignored_still_ends_the_grammar(model: Model) -> None:
    for seed in range(8):
        ended = model.generate(PROMPT, config("integer", seed))
        ignored = model.generate(PROMPT, config("integer", seed, ignore_eos=True))
        assert ignored.tokens == ended.tokens and ignored.stats.stop_reason == "grammar"


def test_padding_rows_are_never_allowed() -> None:
    for size in (300, 319, 320, 321, 384):
        grammar = Grammar.from_regex("(?s).*", tokenizer_json(), size, [END])
        found = allowed(grammar.start())
        assert END in found and 200 < len(found) and max(found) < 300


def test_json_may_have_some_whitespace_but_none_dwells_on_it() -> None:
    def accepted(text: str, **more: Any) -> bool:
        state = Grammar.from_json_schema(PERSON | more, tokenizer_json(), VOCAB, [END]).start()
        for token in tokenizer().encode(text).ids:
            if token not in allowed(state):
                return False
            state.accept(token)
        return state.finished()

    person = {"name": "a", "age": 7, "tags": ["old"]}
    compact = json.dumps(person, separators=(",", ":"))
    assert accepted(json.dumps(person)) and accepted(compact) and accepted(json.dumps(person, indent=4))
    assert not accepted(compact.replace(":", ":" + " " * 13))
    strict = {"x-guidance": {"whitespace_flexible": False}}
    assert accepted(compact, **strict) and not accepted(json.dumps(person), **strict)


def test_all_text_can_be_written_token_by_token() -> None:
    grammar = Grammar.from_regex("(?s).*", tokenizer_json(), VOCAB, [END])
    text = "日本 é \n\t\0 😀 <|end|> " + json.dumps(PERSON)
    state = grammar.start()
    for token in tokenizer().encode(text.replace("<|end|>", "<| end|>")).ids:
        assert token in allowed(state)
        state.accept(token)
    assert END in allowed(state)


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (Grammar.from_json_schema, {"type": "objekt"}, "objekt"),
        (Grammar.from_json_schema, {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (Grammar.from_json_schema, {"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        (Grammar.from_json_schema, {"type": "string", "format": "no-such"}, "no-such"),
        (Grammar.from_json_schema, {"$ref": "http://example.com/schema"}, "example.com"),
        (Grammar.from_json_schema, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text"),
        (Grammar.from_json_schema, {"const": float("nan")}, "JSON"),
        (Grammar.from_json_schema, {"const": {1, 2}}, "JSON"),
        (Grammar.from_json_schema, '{"type": ', "JSON"),
        (Grammar.from_json_schema, '{}}], "max_tokens": 5, "x": [{"a": {}', "JSON"),
        (Grammar.from_json_schema, "[" * 20_000, "JSON"),
        (Grammar.from_json_schema, 3, "schema"),
        (Grammar.from_json_schema, False, "false"),
        (Grammar.from_regex, "[a-", "unclosed"),
        (Grammar.from_regex, "(?=a)b", "look-around"),
        (Grammar.from_regex, r"(a)\1", "backreferences"),
        (Grammar.from_regex, "(" * 5000 + ")" * 5000, "nest"),
        (Grammar.from_regex, "\ud800", "surrogates"),
        (Grammar.from_regex, b"a", "a text"),
        (Grammar.from_regex, "a" * (MAX_TEXT + 1), "characters"),
        (Grammar.from_lark, "start: missing", "missing"),
        (Grammar.from_lark, "start: start", "no text"),
        (Grammar.from_lark, "", "Empty"),
        (Grammar.from_ebnf, 'root ::= "a" | missing', "missing"),
        (Grammar.from_ebnf, "root ::= " + "(" * 20_000, "grammar"),
    ],
)
def test_a_bad_grammar_is_refused_by_field_and_reason(
    read: Callable[..., Grammar], text: object, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read(text, tokenizer_json(), VOCAB, [END])
    assert caught.value.field == "grammar" and caught.value.accepted
    assert len(str(caught.value)) < 1200


def chain(link: str, last: str, start: str) -> str:
    """As many links as a text may hold, each naming the next."""
    links, length = [start], len(start)
    while length < MAX_TEXT - 200:
        links.append(link.format(len(links) - 1, len(links)))
        length += len(links[-1])
    return "".join(links) + last.format(len(links) - 1)


@pytest.mark.parametrize(
    "text",
    [
        chain("a{0}:a{1}\n", 'a{0}:"b"', "start: a0\n"),
        chain("A{0}:/x/|A{1}\n", 'A{0}:"b"', "start: A0\n"),
        chain('"{0}":{{"$ref":"#/$defs/{1}"}},', '"{0}":{{}}}}}}', '{"$ref":"#/$defs/0","$defs":{'),
        chain(
            '"{0}":{{"allOf":[{{"$ref":"#/$defs/{1}"}}]}},', '"{0}":{{}}}}}}', '{"$ref":"#/$defs/0","$defs":{'
        ),
        chain(
            '"{0}":{{"required":["x"],"properties":{{"x":{{"$ref":"#/$defs/{1}"}}}}}},',
            '"{0}":{{"type":"null"}}}}}}',
            '{"$ref":"#/$defs/0","$defs":{',
        ),
    ],
    ids=["rules", "terminals", "references", "allOf", "properties"],
)
def test_no_text_ends_the_process(text: str) -> None:
    read = Grammar.from_json_schema if text.startswith("{") else Grammar.from_lark
    try:
        allowed(read(text, tokenizer_json(), VOCAB, [END]).start())
    except ConfigError as error:
        assert error.field == "grammar"


def test_a_lane_does_not_depend_on_what_others_made_of_the_shared_automaton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    explosive = "(?s).*a.{25}"  # a new state with almost every token
    expected = [walk(Grammar.from_regex(explosive, tokenizer_json(), VOCAB, []), seed) for seed in range(3)]
    monkeypatch.setattr(grammar_module, "MAX_STATES", 400)  # enough for one lane
    shared = Grammar.from_regex(explosive, tokenizer_json(), VOCAB, [])
    first = shared._start
    assert [walk(shared, seed) for seed in range(3)] == expected
    assert shared._start is not first  # the limit was met, and another automaton begun
    monkeypatch.setattr(grammar_module, "MAX_STATES", 60)
    with pytest.raises(ConfigError, match="too many states") as caught:
        walk(Grammar.from_regex(explosive, tokenizer_json(), VOCAB, []), 0)
    assert caught.value.field == "grammar"


def test_a_grammar_of_another_tokenizer_or_end_is_refused() -> None:
    for text in ("", "{}", "[]", '{"model": {"vocab": {"a": 1}}, "added_tokens": []}', tokenizer_json()[:99]):
        with pytest.raises(ConfigError, match="byte-level BPE") as caught:
            Grammar.from_regex("a", text, VOCAB, [END])
        assert caught.value.field == "tokenizer"
    with pytest.raises(ConfigError, match="vocab_size"):
        Grammar.from_regex("a", tokenizer_json(), 299, [END])
    with pytest.raises(ConfigError, match="eos_ids"):
        Grammar.from_regex("a", tokenizer_json(), VOCAB, [VOCAB])


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BackendUnavailable, match=r"pip install tinyloop-serve\[grammar\]") as caught:
        Grammar.from_regex("a", tokenizer_json(), VOCAB, [END])
    assert caught.value.field == "grammar"


def allowed(state: Any) -> set[int]:
    words = bytearray((state._grammar.vocab_size + 31) // 32 * 4)
    state.allowed(memoryview(words))
    return {token for token in range(8 * len(words)) if words[token >> 3] >> (token & 7) & 1}


def walk(grammar: Grammar, seed: int) -> list[set[int]]:
    """The masks along a random text of the grammar."""
    state, choice = grammar.start(), random.Random(seed)
    masks: list[set[int]] = []
    while len(masks) < 60 and not state.finished():
        masks.append(allowed(state))
        state.accept(choice.choice(sorted(masks[-1])))
    return masks
