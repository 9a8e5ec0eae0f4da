"""The handles that this replica holds: prefixes, resume handles and scaffolds in one store with one cap.

Least recently used go first, by count and never by memory pressure: the budget has room for the whole cap.
Belongs to the decoding thread, which alone makes, uses and frees handles; `held` may be read from any.
This file must not know sockets or who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tinyloop_serve.native.errors import LimitError
from tinyloop_serve.protocol.codec import tokens_from_bytes
from tinyloop_serve.protocol.messages import Build, HeldHandle


class Builder(Protocol):
    """What is used of `native.Model`."""

    def create_prefix_cache(self, tokens: Sequence[int], n_loops: int, cache_mode: str) -> Any: ...
    def create_resume_handle(
        self, prompt: Sequence[int], loops_used: int, cache_mode: str, cache_window: int
    ) -> Any: ...


class Held(NamedTuple):
    """One handle; `engine` is the engine's own."""

    build: Build
    tokens: list[int]  # of the prompt it holds
    engine: Any


class HandleStore:
    def __init__(self, engine: Builder, max_handles: int) -> None:
        self.max_handles = max_handles
        self.held: tuple[HeldHandle, ...] = ()  # least recently used first
        self._engine = engine
        self._all: dict[str, Held] = {}  # the same order

    def make_room(self, handle: str) -> tuple[str, ...]:
        """For this one, of which there is none then; returns the names of those that had to go."""
        self.drop([handle])
        evicted = tuple(self._all)[: max(0, len(self._all) - self.max_handles + 1)]
        self.drop(evicted)
        return evicted

    def build(self, build: Build) -> int:
        """Makes it, where there is room for it; returns its bytes. Raises what the engine raises, and then
        nothing has changed."""
        if not self.max_handles:
            raise LimitError("this replica holds no handles: --max-handles is 0", accepted="no handle")
        tokens = tokens_from_bytes(build.prompt)
        if build.kind == "resume":
            made = self._engine.create_resume_handle(
                tokens, build.loops, build.cache_mode, build.cache_window
            )
        else:
            made = self._engine.create_prefix_cache(tokens, build.loops, build.cache_mode)
        self._all[build.handle] = Held(build, tokens, made)
        self._tell()
        return int(made.bytes)

    def use(self, handle: str) -> Held | None:
        """That handle, now the most recently used; None: it is not here."""
        held = self._all.pop(handle, None)
        if held is not None:
            self._all[handle] = held
            self._tell()
        return held

    def drop(self, handles: Iterable[str]) -> None:
        """Frees them; unknown ones are ignored."""
        for handle in handles:
            if held := self._all.pop(handle, None):
                held.engine.close()
        self._tell()

    def _tell(self) -> None:
        self.held = tuple(HeldHandle(held.build, held.engine.bytes) for held in self._all.values())
