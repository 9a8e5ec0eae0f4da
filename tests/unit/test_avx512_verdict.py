"""`make avx512` passes only what ran to its end, on AVX-512, without a failure."""

from __future__ import annotations

import pytest

from scripts.avx512.verdict import judge

PASSED = """[    1.007433] Failed to access perfctr msr (MSR c4 is 0)
init: start /one
level avx512
12 checks, 0 failed
init: end /one 0
init: start /two
level avx512
30 checks, 0 failed
init: end /two 0
init: done"""


def faults(text: str) -> list[str]:
    return judge(("one", "two"), text.splitlines())[1]


def test_a_run_that_passes() -> None:
    assert judge(("one", "two"), PASSED.splitlines()) == (42, [])


@pytest.mark.parametrize(
    ("found", "instead", "fault"),
    [
        (
            "30 checks, 0 failed\ninit: end /two 0",
            "30 checks, 3 failed\ninit: end /two 256",
            "two ended with wait",
        ),
        ("30 checks, 0 failed\ninit: end /two 0", "init: end /two 11", "two ended with wait status 11"),
        ("level avx512\n30", "level avx2\n30", "two checked nothing"),
        ("30 checks", "0 checks", "two checked nothing"),
        ("30 checks, 0 failed\n", "", "two checked nothing"),
        ("30 checks, 0 failed\ninit: end /two 0\ninit: done", "", "two did not end"),
        ("\ninit: done", "", "the machine did not come to the end"),
    ],
)
def test_what_is_seen(found: str, instead: str, fault: str) -> None:
    assert found in PASSED
    assert any(text.startswith(fault) for text in faults(PASSED.replace(found, instead)))
