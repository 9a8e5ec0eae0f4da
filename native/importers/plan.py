"""What a family's reader hands to the importer: the artifact's config, and where its tensors come from.

A reader looks at `config.json` through `ConfigKeys`, which remembers what was asked for: a key that nobody
understood may change the computation, so it is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.importers.shards import Stored

# Keys of config.json that no family's forward pass reads: how it was trained, stored, sampled or wrapped.
NEUTRAL_KEYS = frozenset(
    "_name_or_path architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id "
    "do_sample dropout dtype eos_token_id forced_bos_token_id forced_eos_token_id id2label initializer_range "
    "label2id max_length max_new_tokens min_length model_type num_return_sequences "
    "output_attentions output_hidden_states pad_token_id prefix problem_type repetition_penalty return_dict "
    "sep_token_id task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers_version unk_token_id use_cache "
    # splits products that are whole again before anything nonlinear
    "pretraining_tp".split()
)


class ConfigKeys:
    """config.json. A null counts as an absent key, as in the families' own config classes."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = {key: value for key, value in tree.items() if value is not None}
        self._nulls = {key for key, value in tree.items() if value is None}
        self._known = set(NEUTRAL_KEYS)

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of `key`, which must be a `kind`; an int is a float too. No default: required."""
        self._known.add(key)
        if key not in self._tree:
            if default is ...:
                raise refusal(key, None, f"required in config.json: {kind.__name__}")
            return default
        value = self._tree[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise refusal(key, value, f"a value of type {kind.__name__}")
        return value

    def expect(self, key: str, *neutral: object, why: str) -> None:
        """Refuse the model unless `key` is absent or has a value that asks nothing of the engine."""
        self._known.add(key)
        value = self._tree.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            accepted = " or ".join([*map(repr, neutral), "no such key"])
            raise refusal(key, value, f"{accepted} ({why})")

    def is_null(self, key: str) -> bool:
        """Whether the key is there and says null."""
        return key in self._nulls

    def ignore(self, *keys: str) -> None:
        """Keys that mean nothing once others have their expected values."""
        self._known.update(keys)

    def refuse_unknown(self) -> None:
        for key, value in self._tree.items():
            if key not in self._known:
                raise refusal(key, value, "a config.json without this key, which the importer does not know")


class Part(NamedTuple):
    """One tensor of the artifact: rows first..last (of the leading axis) of a checkpoint's tensor.

    `shape` is that of the whole tensor in the checkpoint. The rows are reshaped to the artifact's shape.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: slice = slice(None)


@dataclass(frozen=True)
class Plan:
    """`parts` has every tensor that `config` has; `unused` are the checkpoint's that carry nothing more."""

    config: dict[str, Any]
    parts: dict[str, Part]
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()  # what a user of the artifact should know, kept in its card

    def check_names(self, stored: Mapping[str, Stored]) -> None:
        """Refuse a checkpoint that lacks a tensor, has one in another shape, or has one without a place."""
        for part in self.parts.values():
            if part.tensor not in stored:
                raise refusal(part.tensor, None, f"required: shape {part.shape}")
            if stored[part.tensor].shape != part.shape:
                raise refusal(part.tensor, stored[part.tensor].shape, f"shape {part.shape}")
        used = {part.tensor for part in self.parts.values()}
        for name in stored:
            if name not in used and name not in self.unused:
                raise refusal(name, stored[name].shape, "a checkpoint without this tensor")


class Family(NamedTuple):
    """One `model_type`: the head's class name and the reader."""

    architecture: str
    plan: Callable[[ConfigKeys, Mapping[str, Stored]], Plan]
