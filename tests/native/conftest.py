"""The engine's tests on another device (device.py): TINYLOOP_TEST_DEVICE=emulated puts every model on it that
names none.

What they then prove is that the device keeps the engine's promises. A test that is not in the table of those
left out and yet skips itself there fails: nothing is left out unseen.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.native.device import DEVICE, left_out
from tinyloop_serve import native


def _on_device(model: native.Model, path: Any, **options: Any) -> None:
    native._core.Model.__init__(model, path, **{"device": DEVICE} | options)


if DEVICE:
    native.Model.__init__ = _on_device  # type: ignore[method-assign]
    native.simd_levels = lambda: ["auto"]  # the processor's levels are all one to the device


def _reason(item: pytest.Item) -> str | None:
    if not DEVICE or item.path.parent != Path(__file__).parent:
        return None
    return left_out(f"{item.path.name}::{item.name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _reason(item):
            item.add_marker(pytest.mark.skip(reason=f"not on {DEVICE}: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if DEVICE and report.skipped and not _reason(item):
        report.outcome = "failed"
        report.longrepr = f"skipped on {DEVICE}, and device.py does not say why: {report.longrepr}"
    return report
