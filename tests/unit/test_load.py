"""The load generator without a fleet. Catches: a report that counts the warm-up, hides a wait before the
sending or takes a backlog for throughput; a driver that does not see that it lags; a search that misses the
rate."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.load import arrivals, mix, report, slo, target, text, trace
from scripts.load.asked import Asked
from scripts.load.drive import Lag
from tinyloop_serve.deploy import profiles
from tinyloop_serve.protocol.calls import Completion
from tinyloop_serve.protocol.errors import Overloaded
from tinyloop_serve.protocol.messages import Stats

VOCABULARY = 100


def request(at: float, *, late: float = 0.0, first: float = 0.1, gap: float = 0.01, tokens: int = 5) -> Asked:
    """Due `at`, sent `late` after that; its first token `first` after it was sent."""
    asked = Asked(0, [1, 2], {"loops": 4}, at=at, due=1000.0 + at)
    asked.started = asked.due + late
    asked.times = [asked.started + first + gap * n for n in range(tokens)]
    asked.sizes, asked.tokens = [1] * tokens, list(range(tokens))
    asked.ended = asked.times[-1]
    stats = Stats(batch_size=2, queue_ms=3.0, prompt_tokens=2, generated_tokens=tokens)
    asked.completion = Completion("", tuple(asked.tokens), "max_tokens", stats)
    return asked


def summary(asked: list[Asked], **options: Any) -> dict[str, Any]:
    given = {"warm_up_s": 0.0, "seconds": 10.0, "slo": slo.Slo(), "lag": Lag(seconds=1.0)} | options
    return report.summarise(asked, **given)


def test_the_warm_up_and_what_was_due_after_the_window_do_not_count() -> None:
    asked = [request(0.0, first=9.0), request(2.0), request(3.0), request(12.5)]
    found = summary(asked, warm_up_s=1.0)
    assert found["requests"] == found["finished"] == 2
    assert found["ttft_ms"]["max"] == pytest.approx(100)


def test_latencies_count_from_when_a_request_was_due() -> None:
    found = summary([request(0.0, late=2.0)])
    assert found["ttft_ms"]["p50"] == pytest.approx(2100) and found["e2e_ms"]["p50"] == pytest.approx(2140)
    assert found["itl_ms"]["max"] == pytest.approx(10)


def test_a_backlog_worked_off_after_the_window_is_no_throughput() -> None:
    asked = [request(n / 10, first=0.1 if n < 50 else 20.0) for n in range(100)]
    found = summary(asked)
    assert found["finished"] == 100 and found["offered_rps"] == 10
    assert found["finished_rps"] == 5 and found["tokens_per_s"] == 25
    assert sum(found["over_time"]["tokens"]) == 500


def test_errors_are_counted_by_type_and_miss_the_slo() -> None:
    failed = request(1.0)
    failed.completion, failed.error = None, Overloaded("full")
    left = request(2.0)
    left.completion, left.ended = None, 0.0
    limits = slo.Slo(ttft=150, token=20, e2e=1000)
    asked = [
        request(0.0),
        failed,
        left,
        request(3.0, late=0.1),
        request(4.0, gap=0.03),
        request(5.0, first=0.02),
    ]
    found = summary(asked, slo=limits)
    assert found["errors"] == {"Overloaded": 1} and found["unfinished"] == 1
    assert found["goodput_share"] == pytest.approx(2 / 6, abs=1e-4)


def test_refinements_are_requests_of_their_own() -> None:
    draft = request(0.0)
    draft.part, more = "draft", request(0.5)
    more.part = "refined"
    draft.refined.append(more)
    found = summary([draft])
    assert found["requests"] == 2 and set(found["by_part"]) == {"draft", "refined"}


@pytest.mark.parametrize(
    ("lag", "kept_up"),
    [
        (Lag(send=[0.001] * 100, read=[0.001] * 100, seconds=10, cpu_s=2), True),
        (Lag(send=[0.001] * 90 + [0.1] * 10, read=[], seconds=10, cpu_s=2), False),
        (Lag(send=[], read=[0.05] * 100, seconds=10, cpu_s=2), False),
        (Lag(send=[], read=[], seconds=10, cpu_s=9.9), False),
    ],
)
def test_a_driver_that_lags_says_so(lag: Lag, kept_up: bool) -> None:
    assert report.driver(lag)["kept_up"] is kept_up


@pytest.mark.parametrize("limit", [0.3, 7.0, 40.0, 1000.0])
def test_the_search_finds_the_highest_rate_that_meets(limit: float) -> None:
    tried: list[float] = []

    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = slo.highest_rate(meets, 8.0, precision=0.05)
    assert limit / 1.05 <= found <= limit
    assert len(tried) <= slo.MOST_STEPS
    assert slo.highest_rate(lambda rate: False, 8.0) == 0.0


def test_arrivals_have_their_rate_and_bursts_come_together() -> None:
    times = list(itertools.takewhile(lambda at: at < 1000, arrivals.poisson(5.0, seed=3)))
    assert len(times) == pytest.approx(5000, rel=0.05) and times == sorted(times)
    together = list(itertools.islice(arrivals.bursts(20.0, 4, seed=3), 400))
    assert all(len(set(together[n : n + 4])) == 1 for n in range(0, 400, 4))
    assert together[-1] == pytest.approx(20, rel=0.3)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_few_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stderr, now = io.StringIO(), itertools.count(100.0, 0.5)
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(text, "time", SimpleNamespace(monotonic=lambda: next(now)))
    live = text.Live("20/s", [request(0.0), request(1.0)])
    for _ in range(40):
        live()
    live.end()
    said = stderr.getvalue()
    assert "20/s" in said and "sent 2  open 0  failed 0" in said and "tok/s" in said
    assert said.count("\n") == (0 if terminal else 4)
    assert said.count("\r") == (42 if terminal else 0)


def test_equal_seeds_ask_equal_requests_in_the_mix_shares() -> None:
    what = mix.Mix(
        prompt_tokens=(2, 4), loops=(2, 8), prefixes=2, prefix_tokens=16, prefix_share=0.75, refine=(8, 16),
        refine_share=0.25, tenants=3,
    )  # fmt: skip
    first, again = (list(itertools.islice(what.requests(7, VOCABULARY), 400)) for _ in range(2))
    assert first == again
    prefixes = [what.prefix(n, VOCABULARY) for n in range(2)]
    assert sum(each.prompt[:16] in prefixes for each in first) == pytest.approx(300, abs=40)
    assert sum(each.refine == (8, 16) for each in first) == pytest.approx(100, abs=40)
    assert {each.options["loops"] for each in first} == {2, 8} and {each.tenant for each in first} == {
        0,
        1,
        2,
    }
    assert all(3 <= token < VOCABULARY for each in first for token in each.prompt if isinstance(token, int))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"prompt_tokens": [9, 2]}, "prompt_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"loops": [0]}, "loops"),
        ({"prefix_share": 1.5}, "prefix_share"),
        ({"prefix_share": 0.5}, "prefixes"),
        ({"refine_share": 0.5}, "refine"),
        ({"method": "guess"}, "method"),
        ({"cache_mode": []}, "cache_mode"),
        ({"rate": 3}, "rate"),
    ],
)
def test_a_load_table_that_is_wrong_is_refused_by_name(table: dict[str, Any], named: str) -> None:
    with pytest.raises(mix.LoadFault, match=named):
        mix.parse(table, "fleet.toml")


def test_a_recorded_load_is_asked_again_as_it_was(tmp_path: Path) -> None:
    what = mix.Mix(refine=(16,), refine_share=0.5, tenants=2)
    asked = list(itertools.islice(what.requests(1, VOCABULARY), 20))
    for each, at in zip(asked, arrivals.poisson(10, 1), strict=False):
        each.at = round(at, 6)
    trace.write(tmp_path / "t.jsonl", asked)
    assert trace.read(tmp_path / "t.jsonl", mix.Mix(), VOCABULARY) == asked


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"at": -1, "prompt_tokens": 4}, "at"),
        ({"at": 0}, "prompt"),
        ({"at": 0, "prompt": "a", "prompt_tokens": 3}, "prompt"),
        ({"at": 0, "prompt_tokens": 0}, "prompt_tokens"),
        ({"at": 0, "prompt_tokens": 3, "prefix": 0}, "prefix"),
        ({"at": 0, "prompt_tokens": 3, "shape": "round"}, "shape"),
        ({"at": 0, "prompt_tokens": 3, "refine": [0]}, "refine"),
        ("soon", "an object"),
    ],
)
def test_a_line_of_a_trace_that_is_wrong_is_refused_by_number_and_name(
    tmp_path: Path, line: object, named: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"at": 0, "prompt_tokens": 4}\n' + json.dumps(line) + "\n")
    with pytest.raises(mix.LoadFault, match=f"line 2: .*{named}"):
        trace.read(path, mix.Mix(), VOCABULARY)


@pytest.mark.parametrize("text", ["ttft", "ttft=0", "ttft=nan", "speed=3", "token=-1", "token=fast"])
def test_an_slo_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(slo.LoadFault):
        slo.parse(text)


def test_tables_written_again_are_the_same() -> None:
    import tomllib

    for name in profiles.names():
        tables = tomllib.loads(Path(profiles.path(name)).read_text())
        assert tomllib.loads(target.toml(tables)) == tables
