"""What the pages of `http.py` say.

    /metrics          every metric of the catalogue, and this process's own, for Prometheus
    /health           200: the process lives and its loop turns
    /ready            200: requests are taken and at least one replica serves them
    /health/replicas  200: every replica serves, or is out by an operator's order; else 503, and what is wrong
                      with which (it never came, its engine fails or stalls, it is out of memory, it is lost)

The last three are JSON. This file must not know sockets; `prometheus_client` writes the text formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tinyloop_serve.dispatcher import status
from tinyloop_serve.dispatcher.catalogue import CATALOGUE
from tinyloop_serve.dispatcher.core import Core
from tinyloop_serve.dispatcher.http import Page, Route
from tinyloop_serve.dispatcher.metrics import Distribution

FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
ABOVE_ALL = "+Inf"


def metrics(core: Core, now: float) -> list[Metric]:
    """The catalogue with its values, as they are now."""
    found = []
    for metric in CATALOGUE:
        family: Any = FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
        for labels, value in metric.read(core, now):
            if isinstance(value, Distribution):
                bounds = [*map(floatToGoString, value.bounds), ABOVE_ALL]
                family.add_metric(labels, list(zip(bounds, value.at_most(), strict=True)), value.sum)
            else:
                family.add_metric(labels, float(value))
        found.append(family)
    return found


class _Found(Collector):
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return [*self._found, *_OURSELVES.collect()]


_OURSELVES = ProcessCollector(registry=None)


def _draw_metrics(found: list[Metric], accept: str) -> Page:
    encode, kind = choose_encoder(accept)
    return Page(200, kind, encode(_Found(found)))


def _health(core: Core, now: float) -> dict[str, object]:
    return {"ok": True, "uptime_s": round(now - core.started, 3), "summary": status.summary(core)}


def _ready(core: Core, now: float) -> dict[str, object]:
    why = status.why_not_ready(core)
    return {"ok": not why, "why": why}


def _replicas(core: Core, now: float) -> dict[str, object]:
    wrong = status.ailing(core)
    return {"ok": not wrong, "replicas": len(list(core.replicas)), "wrong": wrong}


def _draw_json(found: dict[str, object], accept: str) -> Page:
    body = json.dumps(found) + "\n"
    return Page(200 if found["ok"] else 503, "application/json", body.encode())


ROUTES = {
    "/metrics": Route(metrics, _draw_metrics),
    "/health": Route(_health, _draw_json),
    "/ready": Route(_ready, _draw_json),
    "/health/replicas": Route(_replicas, _draw_json),
}
