"""The device that the engine's tests run on: TINYLOOP_TEST_DEVICE, or the processor if it names none.

Every test of this folder runs on it, but for those below, each with the reason. On the emulated device a CUDA
thread costs a microsecond, so tests ask it for less (`sized`); how much less is said where they do.
"""

import os
import re
from typing import TypeVar

T = TypeVar("T")

DEVICE = os.environ.get("TINYLOOP_TEST_DEVICE", "")
EMULATED = DEVICE.startswith("emulated")

NO_MODEL = "it loads no model, so it is the same test as on the processor"
# Patterns of "file::test[parameters]".
LEFT_OUT = {
    r"test_(reference|reference_transformers|gguf_importer)\.py": NO_MODEL,
    r"test_importers_(beta|huggingface|text)\.py": NO_MODEL,
    r"test_(weights|integer_panels)\.py": "integer weights are the processor's",
    r"test_engine\.py.*\[int[48]-": "integer weights are the processor's",
    r"test_modes\.py.*\[(everything int8|huginn int4)\b": "integer weights are the processor's",
    r"test_engine_api\.py::test_weights_are_chosen_by": "integer weights are the processor's",
    r"test_engine_api\.py::test_affinity_pins_the_team": "the team of threads is the processor's",
    r"test_shared_pages\.py": "pages that are used in place are the processor's",
}
LEFT_OUT_EMULATED = {
    r"test_smollm2\.py": "a token of a real model takes minutes",
}


def sized(whole: T, emulated: T) -> T:
    """How much of something a test does, and how much on an emulated device."""
    return emulated if EMULATED else whole


def left_out(name: str, emulated: bool = EMULATED) -> str | None:
    """Why a test ("file::test[parameters]") does not run on a device; None if it does."""
    patterns = LEFT_OUT | (LEFT_OUT_EMULATED if emulated else {})
    return next((reason for pattern, reason in patterns.items() if re.match(pattern, name)), None)
