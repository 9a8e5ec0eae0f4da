"""A caller's end of a handle: what the pool keeps of a prompt, so that it is not computed again.

Both clients share it. Nothing here waits: dropping is said, not asked. Which replica holds the handle, and
what becomes of it when that one is lost, is the dispatcher's business.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from tinyloop_serve.protocol.messages import HandleInfo, HandleKind, Recipe

if TYPE_CHECKING:
    from tinyloop_serve.protocol.link import Link


class Handle:
    """Made by `create_prefix`, `create_scaffold`, `create_resume`; used as `generate(..., handle=...)`.

    Its lease is renewed for as long as this object and its client live. Leaving a `with` (or `async
    with`) block drops it, and so does forgetting the object, unless it was made `detached`. A request that
    uses it brings along what it is made of, so a handle that was lost is built again; see `rebuild` in
    `calls.Options`.
    """

    def __init__(
        self, info: HandleInfo, recipe: Recipe, link: Link, client: object, *, detached: bool
    ) -> None:
        self.info = info
        self.recipe = recipe
        self._client = client  # keeps the link open
        self._link = link
        self._finalizer = weakref.finalize(self, link.release if detached else link.drop, info.handle)

    @property
    def name(self) -> str:
        """Names it in another process: `generate(..., handle=name)`."""
        return self.info.handle

    @property
    def kind(self) -> HandleKind:
        return self.info.kind

    def drop(self) -> None:
        """Frees it, after what was asked of it before. May be called again."""
        if self._finalizer.detach():
            self._link.drop(self.name)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    async def __aenter__(self) -> Handle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        info = self.info
        return f"<Handle {info.kind} {info.handle}: {info.tokens} tokens, {info.loops} loops>"
