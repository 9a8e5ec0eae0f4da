"""The page of patterns and the tables in it. Catches: a crossing point in the wrong place, a table that is
written elsewhere, a profile that the page forgets."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tinyloop_serve.deploy import profiles

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "patterns.md"


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return importlib.import_module("crossings.section")


def test_a_crossing_lies_where_the_line_passes_one(section: Any) -> None:
    assert section.crossing([(0.0, 0.5), (1.0, 1.5), (2.0, 3.0)]) == 0.5
    assert section.crossing([(0.0, 2.0), (0.5, 1.0)]) == 0.5
    assert section.crossing([(0.0, 2.0), (0.4, 1.2), (0.8, 0.8)]) == pytest.approx(0.6)
    assert section.crossing([(0.0, 1.2), (9.0, 1.1)]) is None
    assert section.crossing([(0.0, 1.9), (2.0, 0.9)], level=1.4) == pytest.approx(1.0)
    assert section.where([(0.0, 0.5), (1.0, 1.5)], " %", 100) == "at 50 %"
    assert section.where([(0.0, 1.5), (0.75, 1.2)], " %", 100) == "nowhere between 0 and 75 % (always above)"


def test_ratios_are_taken_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    rounds = importlib.import_module("crossings.rounds")
    drift = iter([9.0, 9.0, 9.0, 1.0, 2.0, 1.0, 10.0, 20.0, 10.0, 2.0, 4.0, 2.0])  # the first round warms up
    times = rounds.interleaved("test", dict.fromkeys("abc", lambda: next(drift)), 3)
    assert times.ratio("b", "a") == 2 and times.ratio(("a", "b"), ("c", "c")) == 1.5
    assert times.median("b") == 4


def test_a_table_goes_to_its_place_and_leaves_the_rest(section: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    tables = [
        section.Section(name, ("a", "b"), [("1", "2")], ["it pays"])
        for name in ("latency", "batches", "prefixes", "tiers", "speculation")
    ]
    section.write(page, tables, "A machine.")
    once = page.read_text()
    assert once.count("| 1 | 2 |\n\n- it pays\n\nA machine.\n<!-- /measured -->") == 5
    section.write(page, tables, "A machine.")
    assert page.read_text() == once
    with pytest.raises(ValueError, match="measured: other"):
        section.write(page, [section.Section("other", ("a",), [])], "")


def test_the_page_has_every_profile_and_its_load_test() -> None:
    text = PAGE.read_text()
    for name in profiles.names():
        assert f"| `{name}` |" in text and f"loadtest.py --profile {name} " in text
