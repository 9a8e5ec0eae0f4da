"""Every token of a load against the engine run alone: batch, replica, reuse and fail-over must not show."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.load.asked import Asked, parts
from tinyloop_serve.native import GenerateConfig, Model

OF_THE_POOL = ("priority", "method", "deadline_s")  # options that the engine does not know, nor the tokens


def wrong(asked: Iterable[Asked], model: Model) -> list[int]:
    """Numbers of those whose stream is not what the engine gives alone (or its beginning, if cancelled)."""
    found = []
    for each in parts(asked):
        if each.completion is None:
            continue
        options = {name: value for name, value in each.options.items() if name not in OF_THE_POOL}
        alone = model.generate(_tokens(each.prompt, model), GenerateConfig(**options)).tokens
        expected = alone[: len(each.tokens)] if each.completion.stop_reason == "cancelled" else alone
        if each.tokens != expected or list(each.completion.tokens) != each.tokens:
            found.append(each.number)
    return found


def _tokens(prompt: str | list[int], model: Model) -> list[int]:
    """As the dispatcher makes them."""
    if not isinstance(prompt, str):
        return prompt
    from tokenizers import Tokenizer

    front = [model.config["bos_id"]] if model.config["add_bos"] else []
    text = Tokenizer.from_str(model.metadata["tokenizer"])
    return [*front, *text.encode(prompt, add_special_tokens=False).ids]
