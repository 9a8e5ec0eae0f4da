"""Imports a Hugging Face folder (config.json, safetensors, tokenizer.json) without torch or transformers.

1. `config.json` names the family; the family's reader turns its keys into a plan (plan.py), refusing what the
   engine does not compute.
2. The plan is checked against the names and shapes of the tensors, before any is read.
3. Tensors are converted one by one, the tokenizer and its settings are carried over (text.py), beta is
   measured (beta.py), and the artifact is written.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyloop_serve.native import artifact
from tinyloop_serve.native.errors import refusal
from tinyloop_serve.native.importers import huginn, llama, nanbeige, ouro
from tinyloop_serve.native.importers.beta import measure_beta as measured_beta
from tinyloop_serve.native.importers.dtypes import Progress, check_weights, integers, to_dtype
from tinyloop_serve.native.importers.plan import ConfigKeys, Family, Part, Plan
from tinyloop_serve.native.importers.shards import Stored, open_shards, read_json
from tinyloop_serve.native.importers.text import read_text
from tinyloop_serve.native.tensors import BF16, Tensor

FAMILIES: dict[str, Family] = llama.FAMILIES | ouro.FAMILIES | huginn.FAMILIES | nanbeige.FAMILIES


def convert_huggingface(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    weights: str = "fp16",
    progress: Progress = lambda done, total: None,
    *,
    layout: str = "panels",
    max_loops: int | None = None,
    measure_beta: bool = True,
) -> dict[str, object]:
    """Write the model in the folder `source` as the artifact `target` and return the artifact's config.

    `weights` ("fp16", "bf16", "fp32", "int8" or "int4") is the type of the matrices; vectors stay fp32.
    `layout` is that of `artifact.write`. `max_loops` is the most that a request may ask for; None: twice the
    trained loops of a looped model. Raises ArtifactError naming the key of config.json, the tensor or the
    file that is not supported; nothing is written then.
    """
    check_weights(weights)
    folder = Path(source)
    tree = read_json(folder / "config.json")
    family = _family(tree)
    stored = open_shards(folder)
    plan = _plan(family, tree, stored)
    text = read_text(folder, tree)
    loops = plan.config["loops"]
    most = max_loops if max_loops is not None else 2 * loops if loops > 1 else 1
    config = artifact.complete_config(plan.config | text.special | {"max_loops": most})
    tensors = _tensors(plan, stored, config, weights, progress)
    if measure_beta:
        config["beta"] = measured_beta(config, tensors, text.tokenizer)
    card = _card(folder, tree, plan, stored, weights)
    artifact.write(
        target,
        config,
        tensors,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        card=card,
        layout=layout,
        weights=integers(weights),
    )
    return config


def _family(tree: Mapping[str, Any]) -> Family:
    model_type, architectures = tree.get("model_type"), tree.get("architectures")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise refusal("model_type", model_type, " | ".join(FAMILIES))
    family = FAMILIES[model_type]
    if architectures not in (None, [], [family.architecture]):
        raise refusal("architectures", architectures, f"[{family.architecture!r}]")
    return family


def _plan(family: Family, tree: Mapping[str, Any], stored: Mapping[str, Stored]) -> Plan:
    keys = ConfigKeys(tree)
    keys.expect("quantization_config", why="unquantised weights")
    keys.expect("is_encoder_decoder", False, why="a decoder")
    plan = family.plan(keys, stored)
    keys.refuse_unknown()
    plan.check_names(stored)
    return plan


def _tensors(
    plan: Plan, stored: Mapping[str, Stored], config: Mapping[str, object], weights: str, progress: Progress
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for done, (name, shape) in enumerate(artifact.expected_tensors(config).items()):
        progress(done, len(plan.parts))
        part = plan.parts[name]
        tensors[name] = to_dtype(part.tensor, _read(part, stored[part.tensor], shape), weights)
    progress(len(plan.parts), len(plan.parts))
    return tensors


def _read(part: Part, stored: Stored, shape: tuple[int, ...]) -> Tensor:
    tensor = stored.read()
    if isinstance(tensor, BF16):
        return BF16(tensor.bits[part.rows].reshape(shape))
    return tensor[part.rows].reshape(shape)


def _card(
    folder: Path, tree: Mapping[str, Any], plan: Plan, stored: Mapping[str, Stored], weights: str
) -> dict[str, object]:
    files = sorted({tensor.file for tensor in stored.values()} | {folder / "config.json"})
    return {
        "name": folder.resolve().name,
        "licence": _licence(folder / "README.md"),
        "model_type": tree["model_type"],
        "source_sha256": {file.name: _sha256(file) for file in files},
        "source_types": dict(Counter(tensor.dtype for tensor in stored.values())),
        "matrices": weights,
        "notes": list(plan.notes),
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _licence(readme: Path) -> str:
    """The `license:` line of a model card's front matter."""
    if not readme.is_file():
        return ""
    front = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    line = re.search(r"^license:\s*(\S+)\s*$", front[1], re.MULTILINE) if front else None
    return line[1] if line else ""
