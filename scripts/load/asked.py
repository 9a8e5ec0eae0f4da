"""One request of a load and what came of it. Knows neither clients nor clocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyloop_serve.protocol.calls import Completion
from tinyloop_serve.protocol.errors import TinyLoopError


@dataclass
class Asked:
    """Times are seconds of time.monotonic, but `at`. The refinements of a draft are requests of their own, in
    `refined`, each due when the one before it has ended."""

    number: int
    prompt: str | list[int]
    options: dict[str, Any]  # of `AsyncClient.stream`
    at: float = 0.0  # when it is to be asked, seconds after the start
    tenant: int = 0  # which of the target's keys asks
    refine: tuple[int, ...] = ()  # loops of each refinement: not empty, and this is a draft
    cancel_after: int = 0  # tokens; 0 = never
    part: str = "answer"  # or "draft", "refined": of the two only the first has an arrival of its own

    due: float = 0.0  # latencies count from here, whenever it was really sent
    started: float = 0.0  # when it was sent
    ended: float = 0.0  # 0 = it has not
    times: list[float] = field(default_factory=list)  # of each chunk with tokens
    sizes: list[int] = field(default_factory=list)  # its tokens
    tokens: list[int] = field(default_factory=list)  # as they were streamed
    completion: Completion | None = None
    error: TinyLoopError | None = None
    terminals: int = 0
    refined: list[Asked] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From when it was due to its end."""
        return self.ended - self.due

    @property
    def first_s(self) -> float:
        """From when it was due to its first token."""
        return self.times[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Between its chunks, as a reader saw them."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def per_token_s(self) -> float:
        """Mean time of a token after the first chunk; 0 where there was only one chunk."""
        rest = len(self.tokens) - self.sizes[0] if self.sizes else 0
        return (self.times[-1] - self.times[0]) / rest if rest else 0.0


def parts(asked: Iterable[Asked]) -> Iterator[Asked]:
    """Each request, and after a draft its refinements."""
    for each in asked:
        yield each
        yield from each.refined


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
