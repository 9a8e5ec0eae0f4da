"""`tinyloop up`, `reload`: a fleet on this machine, and a changed model file for one that runs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tinyloop_serve.deploy.flags import (
    Subcommands,
    add_connection,
    add_endpoint,
    add_json,
    endpoint,
    positive,
)

PROFILES = ("single", "bucketed", "scaffold", "tiers", "speculative")  # said here: a start imports nothing


def add(commands: Subcommands) -> None:
    up = commands.add_parser("up", help="a dispatcher and replicas in the foreground, until Ctrl-C")
    up.add_argument(
        "--model", metavar="FILE", help="a .tinyloop artifact (default: [fleet]'s, else the demo model)"
    )
    up.add_argument(
        "--replicas",
        type=positive,
        default=0,
        metavar="N",
        help="default: [fleet]'s, one on each of the devices, or 2",
    )
    up.add_argument(
        "--devices",
        default="",
        metavar="D,D",
        help="that the replicas are on, in turn: cuda:0,cuda:1 (default: [fleet]'s, else the processor)",
    )
    up.add_argument(
        "--threads", type=positive, default=0, metavar="N", help="per replica (default: share cores)"
    )
    up.add_argument("--max-seq-len", type=positive, default=0, metavar="N", help="default: the model's")
    up.add_argument(
        "--affinity",
        type=_affinity,
        default="none",
        metavar="CPUS",
        help="for replicas to divide: none (default: they share), auto (all of ours), or a list: 0,2-5",
    )
    up.add_argument(
        "--weights",
        choices=("auto", "fp16", "bf16", "int8", "int4"),
        default="auto",
        help="in memory (default: $TINYLOOP_WEIGHTS, else the model's)",
    )
    configuration = up.add_mutually_exclusive_group()
    configuration.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help="TOML: [fleet], [dispatcher], [tenants.NAME], [replica] tables",
    )
    configuration.add_argument(
        "--profile", default="", choices=PROFILES, help="a ready configuration: docs/patterns.md"
    )
    up.add_argument("--log", default="", metavar="FILE", help="append a JSON line per request")
    up.add_argument(
        "--die-with-parent", type=positive, default=0, metavar="PID", help="stop when PID is gone"
    )
    add_endpoint(up)
    up.set_defaults(run=_up)

    reload = commands.add_parser(
        "reload", help="bring a changed model file into a running fleet, a replica at a time"
    )
    reload.add_argument(
        "--systemd",
        action="store_true",
        help="the fleet is that of the systemd units: restart theirs (default: tell `tinyloop up`)",
    )
    reload.add_argument(
        "--config",
        default="/etc/tinyloop/fleet.toml",
        metavar="FILE",
        help="with --systemd: the configuration that the units were rendered from (default: %(default)s)",
    )
    add_connection(reload)
    add_json(reload)
    reload.set_defaults(run=_reload)


def _affinity(text: str) -> str:
    from tinyloop_serve.deploy import processors

    try:
        processors.named_cpus(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _up(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import placement, tables
    from tinyloop_serve.deploy.fleet import Fleet
    from tinyloop_serve.deploy.outcome import CommandFault
    from tinyloop_serve.deploy.plan import Plan

    config = os.path.abspath(flags.config) if flags.config else ""
    if flags.profile:
        from tinyloop_serve.deploy import profiles

        config = profiles.path(flags.profile)
    configured = tables.read(config) if config else {}
    fleet = tables.fleet_of(configured)
    if flags.die_with_parent:
        from tinyloop_serve.protocol.host import die_with_parent

        die_with_parent(flags.die_with_parent)
    named = flags.devices or (fleet.devices if fleet.devices != "cpu" else "")
    devices = placement.named(named) if named else ()
    replicas = flags.replicas or fleet.replicas or len(devices) or Plan.replicas
    try:
        placement.placed(replicas, devices or ("cpu",))
    except ValueError as error:
        if not flags.devices:
            raise tables.BadConfig(f"fleet.devices: {error}") from error
        raise CommandFault(f"--devices: {error}") from error
    front = endpoint(flags)
    _judge(configured, front, replicas)
    plan = Plan(
        model=flags.model or fleet.model or _demo_model(),
        endpoint=front,
        replicas=replicas,
        devices=devices,
        threads=flags.threads,
        max_seq_len=flags.max_seq_len,
        weights=flags.weights,
        affinity=flags.affinity,
        log=flags.log,
        config=config,
        replica_flags=tables.replica_flags(configured),
    )
    return Fleet(plan).run()


def _judge(configured: dict[str, Any], front: str, replicas: int) -> None:
    """A model may take long to load: what the processes would refuse then is refused before, and once."""
    from tinyloop_serve.deploy import tables
    from tinyloop_serve.dispatcher import config, readers
    from tinyloop_serve.replica import config as replica

    sockets = [f"ipc:///replica-{n}.sock" for n in range(replicas)]
    try:
        config.load(tables.dispatcher_values(configured, front, sockets))
    except readers.ConfigError as error:
        raise tables.BadConfig(f"dispatcher: {error}") from error
    try:
        replica.parse(["--model", "m", "--endpoint", sockets[0], *tables.replica_flags(configured)])
    except replica.ConfigFault as error:
        raise tables.BadConfig(f"replica: {error}") from error


def _reload(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import reloading

    if flags.systemd:
        where = endpoint(flags) if flags.endpoint else ""
        return reloading.of_units(flags.config, where, as_json=flags.json)
    return reloading.of_local_fleet(endpoint(flags), as_json=flags.json)


def _demo_model() -> str:
    from tinyloop_serve.native import demo_model_path

    return str(demo_model_path())
