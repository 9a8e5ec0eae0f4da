"""Runs a GGUF through llama.cpp's own batch API, as the package llama-cpp-python binds it.

Only llama_decode and taking the logits are on the clock: filling the batch in Python is not the peer's fault.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np
import numpy.typing as npt

from measure import models

MAX_ROWS = 512  # of one batch: a prefill of 512 is one pass


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


def start() -> None:
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


class PeerModel:
    """A loaded GGUF. Contexts made from it must be closed first."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp does not load {path}")
        self.handle = model
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))

    def __enter__(self) -> PeerModel:
        return self

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab_size), after each position."""
        context = PeerContext(self, 1, 1, len(tokens), False)
        found = context.logits(tokens)
        context.close()
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        llama_cpp.llama_model_free(self.handle)


class PeerContext:
    """One shape of work: `lanes` sequences of at most `positions` tokens, fp16 keys and values."""

    def __init__(
        self, model: PeerModel, threads: int, lanes: int, positions: int, flash_attention: bool
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = lanes * (-(-positions // 256) * 256)  # it pads to 256 anyway
        params.n_seq_max = lanes
        params.n_batch = params.n_ubatch = MAX_ROWS
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash_attention)
        params.no_perf = True
        self.model, self.lanes = model, lanes
        self.handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise SystemExit("llama.cpp makes no context of this shape")
        self.memory = llama_cpp.llama_get_memory(self.handle)
        self.batch = llama_cpp.llama_batch_init(MAX_ROWS, 0, 1)
        self.prefilled = 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.handle)

    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second, until the first token is there."""
        self._forget(0)
        rows = [(token, i, 0, i == tokens - 1) for i, token in enumerate(models.prompt(tokens))]
        begin = self._fill(rows)
        self._decode([tokens - 1])
        return tokens / (time.perf_counter() - begin)

    def decode(self, context: int, steps: int) -> float:
        """Tokens per second over all lanes, from `context` positions on."""
        if self.prefilled != context:  # the prompts stay in the cache for the next round
            self._forget(0)
            for lane in range(self.lanes):
                prompt = models.prompt(context, lane)
                self._fill([(token, i, lane, i == context - 1) for i, token in enumerate(prompt)])
                self._decode([context - 1])
            self.prefilled = context
        self._forget(context)
        tokens, elapsed = [3 + lane for lane in range(self.lanes)], 0.0
        for step in range(steps):
            rows = [(token, context + step, lane, True) for lane, token in enumerate(tokens)]
            begin = self._fill(rows)
            tokens = [int(row.argmax()) for row in self._decode(range(self.lanes))]
            elapsed += time.perf_counter() - begin
        return self.lanes * steps / elapsed

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab_size), after each position of lane 0."""
        self._forget(0)
        self._fill([(token, i, 0, True) for i, token in enumerate(tokens)])
        return np.array(self._decode(range(len(tokens))))

    def _forget(self, context: int) -> None:
        """Cuts every lane back to its first `context` positions."""
        llama_cpp.llama_memory_seq_rm(self.memory, -1, context, -1)
        self.prefilled = min(self.prefilled, context)

    def _fill(self, rows: Sequence[tuple[int, int, int, bool]]) -> float:
        """(token, position, lane, wants logits) per row. Returns the time when the batch was full."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, lane, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, lane
        return time.perf_counter()

    def _decode(self, wanted: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        """The logits of those rows; they live until the next call."""
        if status := llama_cpp.llama_decode(self.handle, self.batch):
            raise SystemExit(f"llama_decode answers {status}")
        shape = (self.model.vocab_size,)
        return [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.handle, row), shape) for row in wanted
        ]
