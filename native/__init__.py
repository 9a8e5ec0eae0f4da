"""The engine: load a looped model and generate from it in this process. Knows nothing of queues, sockets or
processes.

with Model(demo_model_path()) as model:
    print(model.generate([1, 2, 3], GenerateConfig(loops=4, max_tokens=16)).tokens)
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from tinyloop_serve.native import _core
from tinyloop_serve.native._core import (
    GenerateConfig,
    GenerateStats,
    Generation,
    PrefixCache,
    PrefixPool,
    ResumeHandle,
    SpeculativeConfig,
    devices,
    simd_levels,
)
from tinyloop_serve.native.calibration import Calibration, SpeculationBench, calibrate_speculation
from tinyloop_serve.native.errors import (
    ArtifactError,
    BackendFailed,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    LimitError,
    ModeError,
    ModelBusyError,
    OutOfMemoryError,
    TinyLoopError,
)

__all__ = [
    "ArtifactError",
    "BackendFailed",
    "BackendUnavailable",
    "Calibration",
    "ClosedError",
    "ConfigError",
    "GenerateConfig",
    "GenerateStats",
    "Generation",
    "LimitError",
    "LockedModel",
    "ModeError",
    "Model",
    "ModelBusyError",
    "OutOfMemoryError",
    "PrefixCache",
    "PrefixPool",
    "ResumeHandle",
    "SpeculationBench",
    "SpeculativeConfig",
    "TinyLoopError",
    "calibrate_speculation",
    "demo_model_path",
    "devices",
    "inspect_artifact",
    "simd_levels",
]


class Model(_core.Model):
    """A loaded artifact; a context manager that frees it. Methods and arguments are described in `_core.pyi`.

    Not re-entrant: a call that overlaps another raises `ModelBusyError` and disturbs nothing. `step_counter`
    may be read from any thread while another computes.
    """

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration as the artifact states it."""
        config: dict[str, Any] = json.loads(self.metadata["config"])
        return config

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LockedModel(Model):
    """The lock-per-model way to share one model between threads: calls wait for each other instead of being
    refused.

    `with shared.locked():` holds the lock over several calls, for example building a handle and using it.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        self._lock = threading.RLock()

    def locked(self) -> threading.RLock:
        """The lock, a context manager."""
        return self._lock


def _locking(name: str) -> Callable[..., Any]:
    call = getattr(Model, name)

    @functools.wraps(call)
    def locked(self: LockedModel, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            return call(self, *arguments, **named)

    return locked


for _name in (
    "generate",
    "generate_stream",
    "generate_batch",
    "generate_speculative",
    "generate_tree_speculative",
    "create_prefix_cache",
    "generate_from_prefix_cache",
    "generate_with_pool",
    "create_resume_handle",
    "resume_generate",
    "logits",
):
    setattr(LockedModel, _name, _locking(_name))


def inspect_artifact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in an artifact: config, metadata, tensors, file_bytes, parameters, fingerprint; of its matrices
    the `weights` ("fp16", ...) and the `layout` ("panels", "plain"), or "mixed".

    Raises ArtifactError, naming the field, for a file that is not a valid artifact. Unlike loading, this
    reads the whole file where its header has a hash of the data, and compares.
    """
    from tinyloop_serve.native.artifact_file import HASH, verify  # hashing is not for those who only load

    found = _core.inspect_artifact(path)
    if HASH in found["metadata"]:
        verify(path, found["metadata"][HASH])
    matrices = [t for t in found["tensors"] if len(t["shape"]) > 1 and t["name"] != "exit_gate.weight"]
    return {
        "config": json.loads(found["metadata"]["config"]),
        "weights": _weights({matrix["name"]: _WEIGHTS[matrix["dtype"]] for matrix in matrices}),
        "layout": _common("panels" if len(matrix["shape"]) > 2 else "plain" for matrix in matrices),
        **found,
    }


_WEIGHTS = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", "I8": "int8", "U8": "int4"}


def _weights(stored: dict[str, str]) -> str:
    ends = {stored.pop(name) for name in ("embed.weight", "head.weight") if name in stored}
    if ends == {"int8"} and set(stored.values()) == {"int4"}:
        return "int4"
    return _common([*ends, *stored.values()])


def _common(names: Iterable[str]) -> str:
    different = set(names)
    return different.pop() if len(different) == 1 else "mixed"


def demo_model_path() -> Path:
    """The small looped language model that ships with the package (English glosses and verse)."""
    return Path(__file__).parent / "models" / "demo.tinyloop"
