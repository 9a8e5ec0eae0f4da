"""Which models the replicas of this fleet may serve: one for new requests, and former ones for the rest of
their answers.

    current   what new requests are run with: the first replica's, then the first accepted one's
    former    what was current before: such a replica finishes answers that were begun with it
    accepted  what an operator lets replace `current`, once

The same file held in other weights, or computed by another backend, gives other tokens, so it may not serve
beside it; nor replace it, as requests in here name their model by the fingerprint alone. This file
must not know replicas.
"""

from __future__ import annotations

from tinyloop_serve.protocol.errors import ReplicaLost
from tinyloop_serve.protocol.messages import Generate, ModelInfo


class Models:
    def __init__(self) -> None:
        self.current: ModelInfo | None = None
        self._former: dict[str, ModelInfo] = {}  # by fingerprint
        self._accepted: str | None = None  # a fingerprint; "" = any; None: the fleet stays as it is

    def known(self, fingerprint: str) -> ModelInfo:
        """The current one or a former one."""
        assert self.current is not None
        return self.current if self.current.fingerprint == fingerprint else self._former[fingerprint]

    def suitable(self, asked: Generate) -> ModelInfo:
        """The current one; for an answer that goes on, the one it was begun with. Raises `ReplicaLost` where
        that one is not served any more."""
        assert self.current is not None
        if not (asked.done and asked.model):
            return self.current
        for model in (self.current, *self._former.values()):
            if asked.model == model.identity:
                return model
        served = f"the fleet serves {_title(self.current)}, whose tokens would differ"
        raise ReplicaLost(
            f"the answer was begun with model {asked.model}; {served}", field="model", value=asked.model
        )

    def accept(self, fingerprint: str) -> None:
        """The next replica that announces it makes it the fleet's model."""
        self._accepted = fingerprint

    def admit(self, model: ModelInfo) -> str:
        """Returns "" or why a replica with this model must not serve; may change `current`."""
        if self.current is None:
            self.current = model
        elif not self.would_admit(model):
            served = self._served(model) or self.current
            return f"it serves {_title(model)}, the fleet serves {_title(served)}"
        elif self.would_replace(model):
            self._former[self.current.fingerprint] = self.current
            self._former.pop(model.fingerprint, None)
            self.current, self._accepted = model, None
        return ""

    def would_admit(self, model: ModelInfo) -> bool:
        if served := self._served(model):
            return model.identity == served.identity
        return self.current is None or self.would_replace(model)

    def would_replace(self, model: ModelInfo) -> bool:
        """Whether a replica that announces it now would change the fleet's model."""
        differs = self.current is not None and model.fingerprint != self.current.fingerprint
        return differs and self._accepted in ("", model.fingerprint)

    def _served(self, model: ModelInfo) -> ModelInfo | None:
        """The current or former model of the same file."""
        if self.current is not None and model.fingerprint == self.current.fingerprint:
            return self.current
        return self._former.get(model.fingerprint)


def _title(model: ModelInfo) -> str:
    what = (model.fingerprint[:12], model.weights, model.backend)
    return f"{model.name} ({', '.join(filter(None, what))})"
