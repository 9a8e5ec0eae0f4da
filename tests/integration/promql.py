"""What a PromQL expression asks for: enough of the language to hold dashboards and alerts against metrics.

`complaints` knows an expression's metrics, the labels and values that they are selected by, and the labels
that it groups by. A word that is none of these and no word of the language is a misspelt metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

WORDS = set("sum max min count rate increase histogram_quantile absent by on unless and or".split())
SCRAPED = {"instance", "job"}  # labels that the scraper adds
SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:]\w*)(?:\{(?P<matchers>[^}]*)\})?")
MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def complaints(expression: str, exported: Iterable[Metric]) -> Iterator[str]:
    """What the expression asks for that is not there; every expression must ask for something."""
    series: dict[str, dict[str, set[str]]] = {}  # sample name -> label -> values
    for family in exported:
        for sample in family.samples:
            labels = series.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    groups = [group for found in GROUPING.findall(expression) for group in re.findall(r"\w+", found)]
    rest = re.sub(r"\[[^\]]*\]", "", GROUPING.sub("", expression))
    used = []
    for found in SELECTOR.finditer(rest):
        name, matchers = found["name"], found["matchers"] or ""
        if name in WORDS:
            continue
        used.append(name)
        if name not in series:
            yield f"no metric {name}"
            continue
        yield from _mismatches(name, matchers, series[name])
        for label in groups:
            if label not in series[name] and label not in SCRAPED:
                yield f"{name} has no label {label} to group by"
    if not used:
        yield "it asks for no metric"


def kept_labels(expression: str, exported: Iterable[Metric]) -> set[str]:
    """The labels that its result has: those it groups by, or else those of its first metric."""
    if grouped := re.search(r"\bby\s*\(([^)]*)\)", expression):
        return set(re.findall(r"\w+", grouped[1]))
    if re.search(r"\b(sum|min|max|count|absent)\s*\(", expression):
        return set()
    names = [found["name"] for found in SELECTOR.finditer(expression) if found["name"] not in WORDS]
    samples = [sample for family in exported for sample in family.samples if sample.name == names[0]]
    return SCRAPED.union(*(sample.labels for sample in samples))


def _mismatches(name: str, matchers: str, labels: dict[str, set[str]]) -> Iterator[str]:
    for part in filter(str.strip, matchers.split(",")):
        if (found := MATCHER.fullmatch(part)) is None:
            yield f"{part!r} is no matcher"
            continue
        label, operator, wanted = found.groups()
        if label in SCRAPED:
            continue
        if label not in labels:
            yield f"{name} has no label {label}"
            continue
        for each in wanted.split("|") if "~" in operator else [wanted]:
            if each not in labels[label]:
                yield f"{label} of {name} is never {each!r}"
