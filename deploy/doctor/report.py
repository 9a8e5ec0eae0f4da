"""Runs the checks and shows what they found.

An installation may lack packages, or have an engine that does not load: what needs them is imported only
after the machine's own checks have found them there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from tinyloop_serve.deploy.doctor import machine
from tinyloop_serve.deploy.doctor.finding import Finding


def run(config: str, model: str, endpoint: str, replicas: int, threads: int, *, as_json: bool) -> int:
    """What is left empty is what `tinyloop up` would take. Returns 0, or 1 when there is a fault. Raises
    `BadConfig` for a file that cannot be read."""
    found = list(machine.installation())
    if _healthy(found):
        found += machine.surroundings()
        found += _of_the_rest(config, model, endpoint, replicas, threads)
    healthy = _healthy(found)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(each) for each in found]}))
    else:
        print(*_lines(found), sep="\n")
    return 0 if healthy else 1


def _healthy(found: list[Finding]) -> bool:
    return all(each.level != "fault" for each in found)


def _of_the_rest(config: str, model: str, endpoint: str, replicas: int, threads: int) -> Iterator[Finding]:
    """The engine and the configuration, as they are without what is wrong in the environment."""
    from tinyloop_serve.deploy import environment

    with environment.without_faults():
        engine = list(machine.engine())
        yield from engine
        if _healthy(engine):
            yield from _of_configuration(config, model, endpoint, replicas, threads)


def _of_configuration(
    config: str, model: str, endpoint: str, replicas: int, threads: int
) -> Iterator[Finding]:
    from tinyloop_serve.deploy.doctor import configuration, services
    from tinyloop_serve.deploy.endpoints import default_endpoint
    from tinyloop_serve.deploy.plan import Plan
    from tinyloop_serve.native import demo_model_path

    plan = Plan(model or str(demo_model_path()), endpoint or default_endpoint(), replicas, threads)
    subject = configuration.read(config, plan)
    yield from configuration.findings(subject)
    if subject.for_services:
        yield from services.findings(config)


def _lines(found: list[Finding]) -> Iterator[str]:
    for each in found:
        yield f"{each.level:<8} {each.subject:<14} {each.text}"
        if each.remedy:
            yield f"{'':<8} {'':<14} -> {each.remedy}"
    counts = {level: sum(each.level == level for each in found) for level in ("fault", "warning")}
    yield ""
    yield ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())
