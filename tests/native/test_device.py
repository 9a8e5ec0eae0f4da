"""What the engine's tests leave out on a device (device.py): that, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import device

FOLDER = Path(__file__).parent
WHOLLY = {
    "test_gguf_importer.py",
    "test_importers_beta.py",
    "test_importers_huggingface.py",
    "test_importers_text.py",
    "test_integer_panels.py",
    "test_reference.py",
    "test_reference_transformers.py",
    "test_shared_pages.py",
    "test_smollm2.py",
    "test_weights.py",
    "test_engine_api.py::test_affinity_pins_the_team_and_not_its_caller",
    "test_engine_api.py::test_weights_are_chosen_by_name_or_by_the_environment",
}


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Of all tests of this folder, parameters included."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    found = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=True)
    return re.findall(r"^tests/native/(test_.*)$", found.stdout, re.MULTILINE)


def test_only_what_is_listed_is_left_out_on_the_emulated_device(names: list[str]) -> None:
    of_test: dict[str, list[bool]] = {}
    of_file: dict[str, list[bool]] = {}
    for name in names:
        out = device.left_out(name, emulated=True) is not None
        of_test.setdefault(name.partition("[")[0], []).append(out)
        of_file.setdefault(name.partition("::")[0], []).append(out)
    files = {name for name, out in of_file.items() if all(out)}
    tests = {name for name, out in of_test.items() if all(out) and name.partition("::")[0] not in files}
    # A file whose packages are not installed has no tests.
    assert files | tests == {name for name in WHOLLY if name.partition("::")[0] in of_file}
    in_part = {name for name, out in of_test.items() if any(out) and not all(out)}
    for name in names:
        if name.partition("[")[0] in in_part and device.left_out(name, emulated=True):
            assert re.search(r"int8|int4", name), "only integer weights are left out of a test that runs"


def test_every_entry_leaves_something_out(names: list[str]) -> None:
    for pattern in device.LEFT_OUT | device.LEFT_OUT_EMULATED:
        assert any(re.match(pattern, name) for name in names), pattern


def test_what_is_said_to_load_no_model_loads_none() -> None:
    without = [p for p in FOLDER.glob("test_*.py") if device.left_out(f"{p.name}::") == device.NO_MODEL]
    assert len(without) == 6
    for path in without:
        assert not re.search(r"\bModel\(", path.read_text()), path.name
