"""One way in for all formats: `convert` looks at the source and calls the importer that reads it."""

import os
from pathlib import Path

from tinyloop_serve.native.artifact import FORMAT
from tinyloop_serve.native.errors import ArtifactError, refusal
from tinyloop_serve.native.importers.dtypes import Progress
from tinyloop_serve.native.importers.gguf import convert_gguf
from tinyloop_serve.native.importers.huggingface import convert_huggingface
from tinyloop_serve.native.importers.shards import read_metadata
from tinyloop_serve.native.importers.tinyloop import convert_tinyloop


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    weights: str | None = None,
    progress: Progress = lambda done, total: None,
    *,
    layout: str = "panels",
    max_loops: int | None = None,
    measure_beta: bool = True,
) -> dict[str, object]:
    """Write `source`, a GGUF file, a Hugging Face folder or an artifact, as the artifact `target`; return its
    config.

    `weights` is the type of the matrices; None: fp16, or what an artifact has. The other arguments are those
    of `convert_huggingface`. A GGUF holds a model of one loop, so the last two have no meaning for it; an
    artifact keeps its beta. Raises OSError for a source that cannot be read and ArtifactError, which names
    the key, tensor or file, for one that is not supported.
    """
    path = Path(source)
    if path.is_dir():
        return convert_huggingface(
            path,
            target,
            weights or "fp16",
            progress,
            layout=layout,
            max_loops=max_loops,
            measure_beta=measure_beta,
        )
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return convert_gguf(path, target, weights or "fp16", progress, layout=layout)
    if _is_artifact(path):
        return convert_tinyloop(path, target, weights, progress, layout=layout, max_loops=max_loops)
    raise refusal(
        "source",
        os.fspath(source),
        "a GGUF file, a .tinyloop artifact, or a folder with config.json and safetensors",
    )


def _is_artifact(path: Path) -> bool:
    try:
        return read_metadata(path).get("format") == FORMAT
    except ArtifactError:
        return False
