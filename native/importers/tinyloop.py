"""Writes a `.tinyloop` artifact again, with other weights or in another layout: the same model.

Config, tokenizer, template and card are carried over. The source is checked as a checkpoint from strangers:
shapes against its config, and its data against the hash in its header.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyloop_serve.native import artifact, panels
from tinyloop_serve.native.artifact_file import HASH, verify
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.importers.dtypes import Progress, check_weights, integers, to_dtype
from tinyloop_serve.native.importers.shards import Stored, open_file, read_metadata
from tinyloop_serve.native.tensors import BF16, Tensor, bits_of


def convert_tinyloop(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    weights: str | None = None,
    progress: Progress = lambda done, total: None,
    *,
    layout: str = "panels",
    max_loops: int | None = None,
) -> dict[str, object]:
    """Write the artifact `source` as the artifact `target` and return its config.

    `weights` is the type of the matrices, None: as they are; vectors stay as they are. `layout` is that of
    `artifact.write`. `max_loops`: the most that a request may ask for, None: the source's. Raises
    ArtifactError naming what is wrong; nothing is written then.
    """
    if weights is not None:
        check_weights(weights)
    path = Path(source)
    metadata = read_metadata(path)
    tree = _object("config", metadata.get("config", ""))
    config = artifact.complete_config(tree | ({} if max_loops is None else {"max_loops": max_loops}))
    if HASH in metadata:
        verify(path, metadata[HASH])
    tensors = _tensors(open_file(path), config, weights, progress)
    artifact.write(
        target,
        config,
        tensors,
        tokenizer=metadata.get("tokenizer", ""),
        chat_template=metadata.get("chat_template", ""),
        card=_object("card", metadata["card"]) if "card" in metadata else None,
        layout=layout,
        weights=integers(weights),
    )
    return config


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise refusal(f"__metadata__.{field}", text, f"JSON ({error})") from None
    if not isinstance(tree, dict):
        raise refusal(f"__metadata__.{field}", text, "a JSON object")
    return tree


def _tensors(
    stored: Mapping[str, Stored], config: Mapping[str, Any], weights: str | None, progress: Progress
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shapes = artifact.expected_tensors(config)
    for done, (name, shape) in enumerate(shapes.items()):
        progress(done, len(shapes))
        if name not in stored:
            raise refusal(name, None, f"required: shape {shape}")
        tensor = _plain(name, stored[name], shape, config["head_dim"])
        matrix = len(shape) == 2 and shape[0] > 1
        tensors[name] = to_dtype(name, tensor, weights) if weights and matrix else tensor
    for name in stored:
        if name not in shapes:
            raise refusal(name, stored[name].shape, "an artifact without this tensor")
    progress(len(shapes), len(shapes))
    return tensors


def _plain(name: str, stored: Stored, shape: tuple[int, ...], head_dim: int) -> Tensor:
    """The tensor in rows, however it is stored."""
    tensor = stored.read()
    if stored.shape == shape:
        return tensor
    heads = panels.heads_of(name, head_dim)
    if len(shape) != 2 or stored.shape != panels.packed_shape(shape, heads):
        raise refusal(name, stored.shape, f"shape {shape}, or that of its panels")
    rows = panels.unpack(bits_of(tensor), shape, heads)
    return BF16(rows) if isinstance(tensor, BF16) else rows
