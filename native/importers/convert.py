"""One way in for all formats: `convert` looks at the source and calls the importer that reads it."""

import os
from pathlib import Path

from tinyloop_serve.native.artifact import refusal
from tinyloop_serve.native.importers.dtypes import Progress
from tinyloop_serve.native.importers.gguf import convert_gguf
from tinyloop_serve.native.importers.huggingface import convert_huggingface


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "fp16",
    progress: Progress = lambda done, total: None,
    *,
    max_loops: int | None = None,
    measure_beta: bool = True,
) -> dict[str, object]:
    """Write `source`, a GGUF file or a Hugging Face folder, as the artifact `target`; return its config.

    The arguments are those of `convert_huggingface`; a GGUF holds a model of one loop, so the last two have
    no meaning for it. Raises OSError for a source that cannot be read and ArtifactError, which names the
    key, tensor or file, for one that is not supported.
    """
    path = Path(source)
    if path.is_dir():
        return convert_huggingface(
            path, target, dtype, progress, max_loops=max_loops, measure_beta=measure_beta
        )
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise refusal(
            "source", os.fspath(source), "a GGUF file, or a folder with config.json and safetensors"
        )
    return convert_gguf(path, target, dtype, progress)
