"""A configuration, as the processes would read it: values, keys, the model, its memory, the cores."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinyloop_serve import native
from tinyloop_serve.deploy import endpoints, tables
from tinyloop_serve.deploy.doctor.finding import Finding, fault, ok, warning
from tinyloop_serve.deploy.plan import Plan, lacking_memory
from tinyloop_serve.deploy.tables import TABLES, BadConfig, replica_flags
from tinyloop_serve.dispatcher import config as dispatcher
from tinyloop_serve.dispatcher.encryption import Keyring
from tinyloop_serve.dispatcher.readers import ConfigError
from tinyloop_serve.protocol import keys
from tinyloop_serve.protocol.errors import InvalidRequest
from tinyloop_serve.replica import budget, prompts, scaffolds
from tinyloop_serve.replica import config as replica
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.text import Vocabulary


@dataclass(frozen=True)
class Subject:
    """What is to be checked: a file, or what `tinyloop up` would run without one."""

    path: str  # "" = none
    plan: Plan
    tables: dict[str, Any] = field(default_factory=dict)

    @property
    def for_services(self) -> bool:
        """It has what systemd's units are rendered from."""
        return "model" in self.tables.get("fleet", {})


def read(path: str, plan: Plan) -> Subject:
    """`plan.replicas` may be 0: as the file says. A `[fleet]` table for services says all of what runs.
    Raises `BadConfig`."""
    if not path:
        return Subject("", replace(plan, replicas=plan.replicas or Plan.replicas))
    found = tables.load(path)
    fleet = tables.fleet_of(found)
    plan = replace(plan, replicas=plan.replicas or fleet.replicas or Plan.replicas)
    subject = Subject(path, plan, found)
    if not subject.for_services:
        return subject
    replicas = fleet.replicas or Plan.replicas
    return replace(subject, plan=replace(plan, model=fleet.model, endpoint=fleet.front, replicas=replicas))


def findings(subject: Subject) -> Iterator[Finding]:
    if subject.path:
        yield from _tables(subject)
        yield from _dispatcher(subject)
    yield from _replica(subject)
    yield from _cores(subject)


def _tables(subject: Subject) -> Iterator[Finding]:
    for name in subject.tables:
        if name not in TABLES:
            expected = ", ".join(f"[{each}]" for each in TABLES)
            yield fault("configuration", f"{name}: nobody reads this table", f"rename it: {expected}")


def _dispatcher(subject: Subject) -> Iterator[Finding]:
    sockets = [f"ipc://{_replicas(subject)}/replica-{n}.sock" for n in range(subject.plan.replicas)]
    try:
        given = dispatcher.read_file(Path(subject.path))
        flags = {"front": subject.plan.endpoint, "replicas": sockets}
        config = dispatcher.load(given | flags if subject.for_services else flags | given)
        Keyring(config)
    except ConfigError as error:
        remedy = f"expected {error.accepted}" if error.accepted else ""
        yield fault("dispatcher", f"[dispatcher] {error.message}", remedy)
        return
    directory = Path(config.front.removeprefix("ipc://")).parent
    if config.front.startswith("ipc://") and directory.is_dir() and directory.stat().st_mode & stat.S_IWOTH:
        yield fault("dispatcher", f"everybody may write to {directory}", f"chmod o-w {directory}")
    yield ok("dispatcher", f"[dispatcher] is accepted; clients connect to {config.front}")
    if config.front.startswith("tcp://") and config.key:
        yield ok("keys", f"{config.key} can be used; {len(config.tenants.keys)} keys of tenants may connect")


def _replica(subject: Subject) -> Iterator[Finding]:
    plan = subject.plan
    try:
        flags = replica_flags(subject.tables)
        where = (
            "--model",
            plan.model,
            "--endpoint",
            f"ipc://{_replicas(subject)}/replica-0.sock",
        )
        config = replica.parse([*where, *flags])
        if config.key:
            keys.read_pair(config.key)
    except (BadConfig, replica.ConfigFault, InvalidRequest) as error:
        yield fault("replica", f"[replica] {error}")
        return
    if subject.path:
        yield ok("replica", "[replica] is accepted")
    yield from _model(plan, config)


def _replicas(subject: Subject) -> str:
    return endpoints.replica_directory(subject.plan.endpoint)


def _model(plan: Plan, config: replica.Config) -> Iterator[Finding]:
    if lack := lacking_memory(plan):
        yield fault("memory", lack, "fewer replicas, or int8 weights: `tinyloop convert --weights int8`")
        return
    try:
        with native.Model(config.model, max_seq_len=config.max_seq_len, threads=1) as model:
            shape = model.config
            each = budget.of(model, config, shape.get("max_loops", shape["loops"]))
            if wrong := _wrong_texts(config, model):
                yield fault("replica", f"[replica] {wrong}")
                return
    except (native.TinyLoopError, OSError, ValueError) as error:
        yield fault("model", f"{config.model}: {error}", "make it anew: `tinyloop convert`")
        return
    except replica.ConfigFault as error:
        yield fault("memory", str(error))
        return
    yield ok(
        "model",
        f"{config.model}: {shape['loops']} loops, {each.weight_bytes >> 20} MiB of weights and work space",
    )
    if config.memory_mib:
        free = f"{each.cache_bytes >> 20} of them for the caches of a run"
        yield ok("memory", f"each replica may take {config.memory_mib} MiB, {free}")
    elif plan.replicas > 1:
        text = f"no memory_mib: each of {plan.replicas} replicas counts on all memory that is free"
        yield warning("memory", text, f"[replica] memory_mib = {(each.memory_bytes >> 20) // plan.replicas}")


def _wrong_texts(config: replica.Config, model: native.Model) -> str:
    """ "" or what is wrong with the files of prompts, which a replica reads when its model is there. Raises
    `ValueError` for the model's tokenizer."""
    tokenizer = model.metadata.get("tokenizer", "")
    vocabulary = Vocabulary(tokenizer) if tokenizer else None
    try:
        prompts.read(config, model, vocabulary)
        scaffolds.register(config, model, vocabulary, HandleStore(model, config.max_handles))
    except replica.ConfigFault as error:
        return str(error)
    return ""


def _cores(subject: Subject) -> Iterator[Finding]:
    plan, cores = subject.plan, len(os.sched_getaffinity(0))
    threads = plan.replicas * plan.threads_each()
    text = f"{plan.replicas} replicas with {plan.threads_each()} threads each, {cores} cores"
    if threads > cores:
        yield warning("cores", text, "fewer replicas or threads: they wait for each other")
    else:
        yield ok("cores", text)
