"""Whether two engines run the same model: their logits are compared before anything is timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from measure import models
from measure.timing import say
from tinyloop_serve.native import Model

Logits = npt.NDArray[np.float32]


def same_model(ours: Model, theirs: Callable[[list[int]], Logits], tolerance: float, what: str) -> None:
    """Ends the program if the logits differ by more than `tolerance` standard deviations (root mean square).

    Unrelated models differ by 1.4; the same model in two roundings by a few thousandths.
    """
    tokens = models.prompt(24)
    mine, found = ours.logits(tokens), theirs(tokens)
    error = float(np.sqrt(np.mean((found - mine) ** 2)) / mine.std())
    same = float(np.mean(found.argmax(1) == mine.argmax(1)))
    say(f"{what}: logits differ by {error:.4f} of their deviation; same best token {same:.0%}")
    if not error < tolerance:
        raise SystemExit(f"{what}: not the same model: logits differ by {error:.4f}, at most {tolerance}")
