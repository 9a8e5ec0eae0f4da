"""The engine's tests on another device: TINYLOOP_TEST_DEVICE=emulated puts every model on it that names none.

What they then prove is that the device keeps the engine's promises; a test about the processor itself is left
out, with the reason.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tinyloop_serve import native

DEVICE = os.environ.get("TINYLOOP_TEST_DEVICE", "")
OF_THE_PROCESSOR = {
    "test_shared_pages.py": "pages that are used in place are the processor's",
    "test_affinity_pins_the_team_and_not_its_caller": "the team of threads is the processor's",
}


def _on_device(model: native.Model, path: Any, **options: Any) -> None:
    try:
        native._core.Model.__init__(model, path, **{"device": DEVICE} | options)
    except native.BackendUnavailable as error:
        if "device" in options or not str(error.value).startswith("weights"):
            raise
        pytest.skip(f"not on {DEVICE}: {error.value}")  # it does not hold integers


if DEVICE:
    native.Model.__init__ = _on_device  # type: ignore[method-assign]
    native.simd_levels = lambda: ["auto"]  # the processor's levels are all one to the device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if DEVICE else ():
        if reason := OF_THE_PROCESSOR.get(item.path.name) or OF_THE_PROCESSOR.get(item.name):
            item.add_marker(pytest.mark.skip(reason=f"not on {DEVICE}: {reason}"))
