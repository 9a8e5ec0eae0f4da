"""The text side of a Hugging Face folder: tokenizer.json, the chat template, and which tokens start and end.

The artifact's tokenizer encodes without special tokens; whether a text starts with one is `add_bos`. So what
the folder's own tokenizer would put around a text is found by asking it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.importers.gguf import END_TEXTS
from tinyloop_serve.native.importers.shards import read_json

ENDS = (*END_TEXTS, "<|end_text|>", "<|end_turn|>")


class Text(NamedTuple):
    tokenizer: str  # "": the model takes token ids only
    chat_template: str
    special: dict[str, object]  # bos_id, eos_ids, add_bos


def read_text(folder: Path, config: Mapping[str, Any]) -> Text:
    """`config` is config.json. Raises ArtifactError naming the file and key that cannot be carried over."""
    settings = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    ends = _ids("eos_token_id", generation.get("eos_token_id")) + _ids(
        "eos_token_id", config.get("eos_token_id")
    )
    starts = _ids("bos_token_id", generation.get("bos_token_id", config.get("bos_token_id")))
    bos = starts[0] if starts else None
    add_bos = False
    text = _tokenizer(folder)
    if text:
        tokenizer = _loaded(text)
        ends += [
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content in ENDS
        ]
        bos, add_bos = _start(tokenizer, settings, bos)
    eos_ids = list(dict.fromkeys(ends))
    return Text(
        text, _chat_template(folder, settings), {"bos_id": bos, "eos_ids": eos_ids, "add_bos": add_bos}
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(key: str, value: object) -> list[int]:
    """A token id or a list of them, as generation_config.json and config.json have them."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int for item in ids):
        raise refusal(key, value, "a token id or a list of token ids")
    return ids


def _tokenizer(folder: Path) -> str:
    if not (folder / "tokenizer.json").is_file():
        for other in ("tokenizer.model", "vocab.json"):
            if (folder / other).is_file():
                raise refusal(
                    "tokenizer.json",
                    other,
                    "a tokenizer.json (AutoTokenizer.from_pretrained(x).save_pretrained(x) makes it)",
                )
        return ""
    tree = read_json(folder / "tokenizer.json")
    tree |= {"truncation": None, "padding": None}  # left over from training: they would cut and pad prompts
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))


def _loaded(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    # The package raises bare Exception.
    except Exception as error:
        raise refusal("tokenizer.json", str(error), "a file that the tokenizers package reads") from None


def _start(tokenizer: Tokenizer, settings: Mapping[str, Any], bos: int | None) -> tuple[int | None, bool]:
    """(bos_id, add_bos). `add_bos_token` wins over the post-processor, as in the classes that know it."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    dressed = tokenizer.encode("a", add_special_tokens=True).ids
    if settings.get("add_eos_token") or dressed[max(0, len(dressed) - len(bare)) :] != bare:
        raise refusal("tokenizer.json post_processor", dressed, "no token after the text")
    added = dressed[: len(dressed) - len(bare)]
    if len(added) > 1:
        raise refusal("tokenizer.json post_processor", added, "at most one token before the text")
    wanted = settings.get("add_bos_token")
    if not isinstance(wanted, bool):
        return (added[0], True) if added else (bos, False)
    if not wanted:
        return bos, False
    if added:
        return added[0], True
    content = settings.get("bos_token")
    content = content.get("content") if isinstance(content, dict) else content
    named = tokenizer.token_to_id(content) if isinstance(content, str) else bos
    if named is None:
        raise refusal("tokenizer_config.json bos_token", content, "a token, as add_bos_token is true")
    return named, True


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """chat_template.jinja, else the template in tokenizer_config.json (the "default" one of several)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default") or ""
    if not isinstance(template, str):
        raise refusal("tokenizer_config.json chat_template", type(template).__name__, "text")
    return template
