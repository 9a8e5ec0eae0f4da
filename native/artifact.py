"""Writes a `.tinyloop` artifact: one safetensors file with the model's config and tokenizer in its metadata.

Equal input gives equal bytes, so a fingerprint of the file is a fingerprint of the model. The file's bytes
are `artifact_file.py`'s business, the panel layout is `panels.py`'s.

CONFIG_FIELDS and `expected_tensors` are the one description, on the Python side, of what a model may be. The
compiled loader checks the same rules again, because it may be handed any file; this file must not need it.
"""

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyloop_serve.native import integer_panels, panels
from tinyloop_serve.native.artifact_file import Entry, save
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.tensors import BF16, Tensor, all_finite, bits_of, dtype_name

FORMAT = "tinyloop"
FORMAT_VERSION = "1"
REQUIRED = object()

LAYOUTS = ("panels", "plain")
INTEGERS = ("int8", "int4")
ENDS = ("embed.weight", "head.weight")  # int8 beside int4 layers: four bits cost more there than they save

NORMS = ("pre", "sandwich", "post", "pre_post")


class ConfigField(NamedTuple):
    """One key of the config. `low` and `high` are inclusive; for `list[int]` they bound every element."""

    name: str
    kind: str  # "int" | "float" | "bool" | "choice" | "list[int]"
    meaning: str
    default: object = REQUIRED
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    nullable: bool = False
    default_from: str = ""  # the default is the value of this other field


CONFIG_FIELDS: tuple[ConfigField, ...] = (
    ConfigField("vocab_size", "int", "rows of embed.weight", low=1, high=1 << 24),
    ConfigField("d_model", "int", "width of the residual stream", low=1, high=1 << 16),
    ConfigField("n_heads", "int", "query heads", low=1, high=1024),
    ConfigField("n_kv_heads", "int", "key and value heads; divides n_heads", low=1, high=1024),
    ConfigField("head_dim", "int", "width of a head; even", low=2, high=1024),
    ConfigField("d_ffn", "int", "hidden width of the SwiGLU", low=1, high=1 << 18),
    ConfigField("n_prelude", "int", "layers run once before the loops", low=0, high=1024),
    ConfigField("n_core", "int", "layers run `loops` times", low=1, high=1024),
    ConfigField("n_coda", "int", "layers run once after the loops", low=0, high=1024),
    ConfigField("loops", "int", "loop count the model was trained for, and the default", low=1, high=1024),
    ConfigField(
        "max_loops", "int", "most loops a request may ask for", default_from="loops", low=1, high=1024
    ),
    ConfigField("max_seq_len", "int", "trained context in tokens", low=1, high=1 << 24),
    ConfigField("norm", "choice", "where a layer's norms stand", choices=NORMS),
    ConfigField("norm_eps", "float", "epsilon of every RMSNorm", low=1e-12, high=1.0),
    ConfigField(
        "injection", "choice", "how each loop sees the prelude's output", choices=("none", "add", "concat")
    ),
    ConfigField("start", "choice", "state before the first loop", choices=("prelude", "zeros")),
    ConfigField("loop_norm", "bool", "norm at the end of every loop, fed back", default=False),
    ConfigField("core_norm", "bool", "norm once after the last loop, before the coda", default=False),
    ConfigField("final_norm", "bool", "norm before the head", default=True),
    ConfigField(
        "rope", "choice", "which two elements of a head rotate together", choices=("half", "interleaved")
    ),
    ConfigField("rope_theta", "float", "base of the rotary angles", low=1.0, high=1e12),
    ConfigField("qk_norm", "bool", "per-head RMSNorm of q and k before RoPE", default=False),
    ConfigField("qk_bias", "bool", "bias of q and k", default=False),
    ConfigField("v_bias", "bool", "bias of v", default=False),
    ConfigField(
        "exit_gate", "bool", "has a gate that says after each loop how likely it is the last", default=False
    ),
    ConfigField("tied_head", "bool", "the head is embed.weight"),
    ConfigField("embed_scale", "float", "factor of the embeddings", default=1.0, low=-1e6, high=1e6),
    ConfigField("logit_scale", "float", "factor of the logits", default=1.0, low=-1e6, high=1e6),
    ConfigField("bos_id", "int", "token that starts a text, or null", low=0, nullable=True),
    ConfigField("eos_ids", "list[int]", "tokens that end a generation", low=0),
    ConfigField("add_bos", "bool", "text prompts get bos_id in front", default=False),
    ConfigField("beta", "float", "measured gain of the core map, or null", low=0.0, nullable=True),
)


def write(
    path: str | os.PathLike[str],
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    tokenizer: str = "",
    chat_template: str = "",
    card: Mapping[str, object] | None = None,
    layout: str = "panels",
    weights: str | None = None,
) -> None:
    """Check everything, then write the artifact beside `path` and rename it into place.

    `tensors` are float16, float32 or BF16 arrays, named and shaped as `expected_tensors(config)` says.
    `tokenizer` is the text of a tokenizer.json, `chat_template` a Jinja template, `card` a JSON-able dict.
    `layout` is how matrices are stored: "panels", which the engine uses in place, or "plain" rows, which it
    copies. `weights` is "int8" or "int4", always in panels; None: as the tensors are. Raises ArtifactError,
    which names the field or tensor, before any file is touched.
    """
    complete = complete_config(config)
    _check_tensors(complete, tensors)
    _check_tokenizer(tokenizer, _whole(complete, "vocab_size"))
    if not isinstance(chat_template, str):
        raise refusal("chat_template", type(chat_template).__name__, "a string")
    if layout not in LAYOUTS:
        raise refusal("layout", layout, " | ".join(LAYOUTS))
    if weights is not None and weights not in INTEGERS:
        raise refusal("weights", weights, " | ".join(INTEGERS))
    if weights and layout != "panels":
        raise refusal("layout", layout, f"panels, for {weights} weights")
    metadata = {"format": FORMAT, "format_version": FORMAT_VERSION, "config": json.dumps(complete)}
    metadata |= {"tokenizer": tokenizer} if tokenizer else {}
    metadata |= {"chat_template": chat_template} if chat_template else {}
    metadata |= {"card": _card_text(card)} if card is not None else {}
    save(path, metadata, _entries(complete, tensors, layout, weights))


def complete_config(config: Mapping[str, object]) -> dict[str, object]:
    """The config with defaults filled in, in the order of CONFIG_FIELDS; an ArtifactError names a bad key."""
    known = {field.name for field in CONFIG_FIELDS}
    for name in config:
        if name not in known:
            raise refusal(f"config.{name}", config[name], "only the keys of CONFIG_FIELDS")
    complete: dict[str, object] = {}
    for field in CONFIG_FIELDS:
        default = complete[field.default_from] if field.default_from else field.default
        value = config.get(field.name, default)
        if value is REQUIRED:
            raise refusal(f"config.{field.name}", None, f"required: {_accepted(field)}")
        complete[field.name] = _checked(field, value)
    _check_together(complete)
    return complete


def expected_tensors(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of exactly the tensors that a model of this config has; matrices are (out, in)."""
    c = complete_config(config)
    vocab, width = _whole(c, "vocab_size"), _whole(c, "d_model")
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, width)}
    for stack in ("prelude", "core", "coda"):
        for i in range(_whole(c, f"n_{stack}")):
            shapes |= {f"{stack}.{i}.{name}": shape for name, shape in _layer_tensors(c).items()}
    if c["injection"] == "concat":
        shapes["inject.weight"] = (width, 2 * width)
    shapes |= {f"{name}.weight": (width,) for name in ("loop_norm", "core_norm", "final_norm") if c[name]}
    if c["exit_gate"]:
        shapes |= {"exit_gate.weight": (1, width), "exit_gate.bias": (1,)}
    if not c["tied_head"]:
        shapes["head.weight"] = (vocab, width)
    return shapes


def _layer_tensors(c: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    width, ffn, head = _whole(c, "d_model"), _whole(c, "d_ffn"), _whole(c, "head_dim")
    q, kv = _whole(c, "n_heads") * head, _whole(c, "n_kv_heads") * head
    before, after = c["norm"] != "post", c["norm"] != "pre"
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {"attn_norm.weight": (width,)} if before else {}
    shapes |= {
        "wq.weight": (q, width),
        "wk.weight": (kv, width),
        "wv.weight": (kv, width),
        "wo.weight": (width, q),
    }
    shapes |= {"q_bias": (q,), "k_bias": (kv,)} if c["qk_bias"] else {}
    shapes |= {"v_bias": (kv,)} if c["v_bias"] else {}
    shapes |= {"q_norm.weight": (head,), "k_norm.weight": (head,)} if c["qk_norm"] else {}
    shapes |= {"attn_post_norm.weight": (width,)} if after else {}
    shapes |= {"ffn_norm.weight": (width,)} if before else {}
    shapes |= {"w_gate.weight": (ffn, width), "w_up.weight": (ffn, width), "w_down.weight": (width, ffn)}
    shapes |= {"ffn_post_norm.weight": (width,)} if after else {}
    return shapes


def _checked(field: ConfigField, value: object) -> object:
    """`value` if the field takes it (an int becomes a float where a float is meant), else raises."""
    if value is None and field.nullable:
        return None
    if field.kind == "float" and _is_int(value):
        value = float(value)  # type: ignore[arg-type]
    valid = {
        "int": _is_int(value),
        "float": isinstance(value, float) and math.isfinite(value),
        "bool": isinstance(value, bool),
        "choice": isinstance(value, str) and value in field.choices,
        "list[int]": isinstance(value, list) and all(_is_int(item) for item in value),
    }[field.kind]
    numbers = value if isinstance(value, list) else [value] if isinstance(value, int | float) else []
    if not valid or any(not field.low <= number <= field.high for number in numbers):
        raise refusal(f"config.{field.name}", value, _accepted(field))
    return list(value) if isinstance(value, list) else value


def _check_together(c: Mapping[str, object]) -> None:
    """The rules that need two fields."""
    vocab, heads, kv_heads = _whole(c, "vocab_size"), _whole(c, "n_heads"), _whole(c, "n_kv_heads")
    if heads % kv_heads:
        raise refusal("config.n_kv_heads", kv_heads, f"a divisor of n_heads = {heads}")
    if _whole(c, "head_dim") % 2:
        raise refusal("config.head_dim", c["head_dim"], "an even number")
    if _whole(c, "max_loops") < _whole(c, "loops"):
        raise refusal("config.max_loops", c["max_loops"], f"at least loops = {c['loops']}")
    if c["start"] == "zeros" and c["injection"] == "none":
        raise refusal(
            "config.start", "zeros", "'prelude' when injection is 'none' (else no loop ever sees the prompt)"
        )
    if c["bos_id"] is not None and _whole(c, "bos_id") >= vocab:
        raise refusal("config.bos_id", c["bos_id"], f"below vocab_size = {vocab}")
    if c["add_bos"] and c["bos_id"] is None:
        raise refusal("config.add_bos", True, "false when bos_id is null")
    eos_ids = c["eos_ids"]
    assert isinstance(eos_ids, list)
    if any(token >= vocab for token in eos_ids) or len(set(eos_ids)) != len(eos_ids):
        raise refusal("config.eos_ids", eos_ids, f"different tokens below vocab_size = {vocab}")


def _check_tensors(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    expected = expected_tensors(config)
    for name in tensors:
        if name not in expected:
            raise refusal(
                name,
                "a tensor that this config does not have",
                "exactly the names of expected_tensors(config)",
            )
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise refusal(name, None, f"required: shape {shape}")
        if not isinstance(tensor, BF16) and (
            not isinstance(tensor, np.ndarray)
            or tensor.dtype.newbyteorder("=") not in (np.float16, np.float32)
        ):
            raise refusal(
                name, str(getattr(tensor, "dtype", type(tensor).__name__)), "float16, float32 or BF16"
            )
        if tensor.shape != shape:
            raise refusal(name, tensor.shape, f"shape {shape}")
        if not all_finite(tensor):
            raise refusal(name, "holds NaN or infinity", "finite numbers")


def _check_tokenizer(text: str, vocab_size: int) -> None:
    """A tokenizer.json in outline, with no token id that the model does not have."""
    if not isinstance(text, str):
        raise refusal("tokenizer", type(text).__name__, "the text of a tokenizer.json")
    if not text:
        return
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise refusal("tokenizer", text, f"JSON ({error})") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise refusal("tokenizer", text, "a tokenizer.json object with a 'model'")
    vocab = tree["model"].get("vocab")
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab or ())))
    added = tree.get("added_tokens") or []
    ids += [token.get("id") for token in added if isinstance(token, dict)]
    for token in ids:
        if not _is_int(token) or not 0 <= token < vocab_size:
            raise refusal("tokenizer", token, f"token ids below vocab_size = {vocab_size}")


def _card_text(card: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(card), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise refusal("card", card, f"JSON-able values ({error})") from None


def _entries(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], layout: str, weights: str | None
) -> list[Entry]:
    """In the order of the file: panels of floats, which need the data's alignment and keep it, and of int8;
    panels of int4, which need less; then wide elements."""
    head_dim = _whole(config, "head_dim")
    packed, plain = [], []
    for name in expected_tensors(config):
        tensor = tensors[name]
        if len(tensor.shape) == 2 and name != "exit_gate.weight":
            heads = panels.heads_of(name, head_dim)
            if weights == "int8" or (weights and name in ENDS):
                shape = integer_panels.int8_shape(tensor.shape, heads)
                packed.append(Entry(name, "I8", shape, partial(integer_panels.pack_int8, tensor, heads)))
                continue
            if weights:
                shape = integer_panels.int4_shape(tensor.shape, heads)
                packed.append(Entry(name, "U8", shape, partial(integer_panels.pack_int4, tensor, heads)))
                continue
            if layout == "panels" and _fits_panels(name, tensors, heads):
                shape = panels.packed_shape(tensor.shape, heads)
                packed.append(Entry(name, dtype_name(tensor), shape, partial(_packed, tensor, heads)))
                continue
        plain.append(Entry(name, dtype_name(tensor), tensor.shape, partial(_little_endian, tensor)))
    packed.sort(key=lambda entry: entry.dtype == "U8")
    return packed + sorted(plain, key=lambda entry: -bits_of(tensors[entry.name]).itemsize)


def _fits_panels(name: str, tensors: Mapping[str, Tensor], heads: panels.Heads) -> bool:
    """Where the panels are whole units of alignment; wq, wk and wv only together, as one matrix."""
    tensor = tensors[name]
    stem, _, part = name.removesuffix(".weight").rpartition(".")
    if part in ("wq", "wk", "wv"):
        kinds = {dtype_name(tensors[f"{stem}.{one}.weight"]) for one in ("wq", "wk", "wv")}
        if len(kinds) > 1:
            return False
    _, inputs, width = panels.packed_shape(tensor.shape, heads)
    return inputs * width * bits_of(tensor).itemsize % panels.ALIGNMENT == 0


def _packed(tensor: Tensor, heads: panels.Heads) -> npt.NDArray[Any]:
    return panels.pack(_little_endian(tensor), heads)


def _little_endian(tensor: Tensor) -> npt.NDArray[Any]:
    array = bits_of(tensor)
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _accepted(field: ConfigField) -> str:
    if field.kind == "choice":
        return " | ".join(repr(choice) for choice in field.choices)
    bounds = "".join(
        f"{word} {bound:g}"
        for word, bound in ((", at least", field.low), (", at most", field.high))
        if math.isfinite(bound)
    )
    return field.kind + bounds + (", or null" if field.nullable else "")


def _whole(config: Mapping[str, object], name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
