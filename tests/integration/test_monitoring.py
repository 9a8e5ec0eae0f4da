"""What a running fleet tells its operators. Catches: a metric, label, panel or alert that is promised and not
there, a replica in trouble that no page shows, a log line without what it is read for."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from scripts.faults.harm import Harm
from tests.integration.conftest import Fleet, fleet_of, wait_until
from tests.integration.promql import complaints, kept_labels
from tinyloop_serve.dispatcher.catalogue import CATALOGUE
from tinyloop_serve.replica.session import STUCK

pytestmark = pytest.mark.integration


def get(fleet: Fleet, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    (address,) = [word.removeprefix("http=") for word in fleet.ready.split() if word.startswith("http=")]
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(fleet: Fleet) -> dict[str, Metric]:
    status, body = get(fleet, "/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(body)}


def journal(fleet: Fleet, event: str) -> list[dict[str, Any]]:
    lines = Path(fleet.environment["JOURNAL"]).read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


@pytest.fixture(scope="module")
def watched() -> Iterator[Fleet]:
    """A fleet with pages and a journal."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "fleet.toml"
        config.write_text(
            '[dispatcher]\nhttp = "127.0.0.1:0"\nloss_ms = 60000\n[replica]\nspeculation = "off"\n'
        )
        log = str(Path(directory) / "journal")
        with fleet_of("--replicas", "2", "--config", str(config), "--log", log) as fleet:
            fleet.environment["JOURNAL"] = log
            yield fleet


@pytest.fixture(scope="module")
def exported(watched: Fleet) -> dict[str, Metric]:
    """Its metrics after requests of every kind, while some wait."""
    with watched.client() as client:
        prefix = client.create_prefix("In the beginning")
        client.generate(" was", handle=prefix, max_tokens=4)
        list(client.stream("the", max_tokens=12))
        client.batch(["a", "b", "c", "d"], max_tokens=8)
        client.generate("the", max_tokens=4, method="speculative")
        replicas = [replica.pid for replica in watched.status().replicas]
        for pid in replicas:
            os.kill(pid, signal.SIGSTOP)
        try:
            streams = [
                client.stream("the", max_tokens=4, loops=n) for n in (1, 2, 3, 4)
            ]  # no two share a run
            wait_until(lambda: (now := watched.status()).running == 2 and now.waiting == 2)
            found = scrape(watched)
        finally:
            for pid in replicas:
                os.kill(pid, signal.SIGCONT)
        for stream in streams:
            stream.result()
    return found


def test_every_metric_of_the_catalogue_is_exported_as_it_says(exported: dict[str, Metric]) -> None:
    for metric in CATALOGUE:
        family = exported[metric.name.removesuffix("_total")]
        assert family.samples, metric.name
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), metric.name


def test_what_is_exported_is_what_happened(watched: Fleet, exported: dict[str, Metric]) -> None:
    def total(family: str, name: str, **labels: str) -> float:
        samples = exported[family].samples
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    assert total("tinyloop_requests", "tinyloop_requests_total", outcome="answered") == 7
    assert total("tinyloop_requests", "tinyloop_requests_total") == 7
    first_tokens = "tinyloop_time_to_first_token_seconds"
    assert total(first_tokens, f"{first_tokens}_count") == 1
    assert total("tinyloop_handle_uses", "tinyloop_handle_uses_total") == 1
    assert total("tinyloop_prefix_tokens", "tinyloop_prefix_tokens_total") > 0
    assert total("tinyloop_bucket_waiting", "tinyloop_bucket_waiting") >= 1
    assert total("tinyloop_requests_running", "tinyloop_requests_running") >= 1
    assert total("tinyloop_replica_cache_bytes", "tinyloop_replica_cache_bytes") > 0
    assert total("tinyloop_tokens", "tinyloop_tokens_total") >= 4 + 4


def test_a_request_leaves_one_line_with_all_that_is_known_of_it(watched: Fleet) -> None:
    with watched.client() as client:
        answer = client.stream("the", max_tokens=5).result()
        handle = client.create_prefix("In the beginning")
        client.generate(" was", handle=handle, max_tokens=2, loops=handle.info.loops)

    def lines() -> list[dict[str, Any]]:
        return [line for line in journal(watched, "request") if line["max_tokens"] in (5, 2)]

    wait_until(lambda: len(lines()) == 2)
    streamed, with_handle = lines()
    assert streamed["tenant"] == "local" and streamed["outcome"] == "answered"
    assert streamed["stop_reason"] == answer.stop_reason and streamed["failovers"] == 0
    assert 0 <= streamed["queue_ms"] <= streamed["ttft_ms"] <= streamed["total_ms"]
    assert streamed["stats"]["replica"] == answer.stats.replica
    assert streamed["stats"].get("batch_size", 1) == 1 and streamed["stats"]["generated_tokens"] == 5
    assert with_handle["handle"] and with_handle["handle_used"] and not streamed["handle_used"]
    assert with_handle["stats"]["prefix_tokens"] > 0
    (first, *_) = journal(watched, "replica_ready")
    assert first["budget"]["cache_bytes"] > 0 and first["health"] == "ok"


def test_the_pages_follow_a_replica_that_dies_and_comes_back(watched: Fleet) -> None:
    assert [get(watched, path)[0] for path in ("/health", "/ready", "/health/replicas")] == [200] * 3
    target = watched.replica("replica-1")
    watched.process.send_signal(signal.SIGSTOP)  # so that nobody brings it back before we have looked
    try:
        os.kill(target.pid, signal.SIGKILL)
        _, body = wait_until(lambda: (page := get(watched, "/health/replicas"))[0] == 503 and page)
        ((who, _),) = json.loads(body)["wrong"].items()
        assert "replica-1" in who
        assert [get(watched, path)[0] for path in ("/health", "/ready")] == [200] * 2
    finally:
        watched.process.send_signal(signal.SIGCONT)
    wait_until(lambda: get(watched, "/health/replicas")[0] == 200)
    losses = scrape(watched)["tinyloop_replica_losses"].samples
    assert {s.labels["replica"]: s.value for s in losses} == {"replica-0": 0, "replica-1": 1}
    wait_until(lambda: [line["endpoint"] for line in journal(watched, "replica_lost")] == [target.endpoint])


def test_a_replica_that_hangs_is_out_until_it_has_been_replaced(tmp_path: Path) -> None:
    """Not only lost: it answers its dispatcher's greeting again at once, and would hang with the next run."""
    config = tmp_path / "fleet.toml"
    config.write_text(
        '[dispatcher]\nhttp = "127.0.0.1:0"\nstall_ms = 1200\n[replica]\nspeculation = "off"\nstall_s = 4\n'
    )
    with fleet_of("--replicas", "2", "--config", str(config)) as fleet, fleet.client() as client:
        fleet.wait_all_ready()
        hung, harm = fleet.replica("replica-0"), Harm()
        assert harm.do("hang", hung.pid)
        streams = [client.stream("the", max_tokens=4, loops=n) for n in (1, 2)]  # no two share a run
        assert sum(stream.result().stats.failovers for stream in streams) == 1
        wait_until(lambda: STUCK in get(fleet, "/health/replicas")[1])
        ill = scrape(fleet)["tinyloop_replica_ill"].samples
        assert {s.labels["replica"]: s.value for s in ill} == {"replica-0": 1, "replica-1": 0}
        for number in range(8):
            answer = client.generate("the", max_tokens=4, loops=1 + number % 4)
            assert answer.stats.replica == "replica-1" and not answer.stats.failovers
        wait_until(lambda: (harm.reap(), get(fleet, "/health/replicas")[0] == 200)[1])
        assert fleet.replica("replica-0").pid != hung.pid
        assert any("replica-0 ended with status 70" in line for line in fleet.said), fleet.said


# ------------------------------------------------------------------ the dashboard and the alerts


def dashboard() -> list[dict[str, Any]]:
    """Its panels, the rows between them left out."""
    text = files("tinyloop_serve.deploy").joinpath("dashboards", "grafana.json").read_text("utf-8")
    return [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    text = files("tinyloop_serve.deploy").joinpath("dashboards", "alerts.yaml").read_text("utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def test_every_panel_shows_what_the_fleet_exports(exported: dict[str, Metric]) -> None:
    found = []
    for panel in dashboard():
        assert panel["targets"] and panel["description"], panel["title"]
        for target in panel["targets"]:
            found += [f"{panel['title']}: {each}" for each in complaints(target["expr"], exported.values())]
            shown = re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"])
            kept = kept_labels(target["expr"], exported.values())
            found += [f"{panel['title']}: {each} is not kept" for each in shown if each not in kept]
    assert not found


def test_every_alert_is_about_what_the_fleet_exports(exported: dict[str, Metric]) -> None:
    found = []
    for rule in alerts():
        name, expression, summary = rule["alert"], rule["expr"], rule["annotations"]["summary"]
        found += [f"{name}: {each}" for each in complaints(expression, exported.values())]
        kept = kept_labels(expression, exported.values())
        told = re.findall(r"\$labels\.(\w+)", summary)
        found += [f"{name}: {each} is not kept" for each in told if each not in kept]
    assert not found
    assert len(alerts()) == len({rule["alert"] for rule in alerts()}) > 10
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in alerts())


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    asked = " ".join(target["expr"] for panel in dashboard() for target in panel["targets"])
    asked += " ".join(rule["expr"] for rule in alerts())
    assert not [metric.name for metric in CATALOGUE if not re.search(rf"\b{metric.name}(_\w+)?\b", asked)]


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("sum(rate(tinyloop_request_total[5m]))", "no metric tinyloop_request_total"),
        ("tinyloop_queue_seconds > 1", "no metric tinyloop_queue_seconds"),  # a histogram's name is no series
        ('tinyloop_requests_total{tenants="a"}', "no label tenants"),
        ('tinyloop_requests_total{outcome="poisoned"}', "never 'poisoned'"),
        ('tinyloop_requests_total{outcome=~"engine|lost"}', "never 'lost'"),
        ("sum by (replica) (tinyloop_requests_total)", "no label replica to group by"),
        ("1 > 0", "asks for no metric"),
        ('sum by (tenant) (tinyloop_requests_total{instance=~".*", outcome="engine"})', ""),
    ],
)
def test_the_check_of_expressions_sees_what_is_not_there(
    exported: dict[str, Metric], expression: str, complaint: str
) -> None:
    found = list(complaints(expression, exported.values()))
    assert len(found) == bool(complaint) and complaint in "".join(found)
