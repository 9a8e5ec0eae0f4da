"""`tinyloop status`, `top`, `handles`, `drain`, `resume`, `attach`, `detach`: care of a running fleet."""

from __future__ import annotations

import argparse

from tinyloop_serve.deploy.flags import Subcommands, add_connection, add_json, endpoint, seconds


def add(commands: Subcommands) -> None:
    status = commands.add_parser("status", help="replicas, queues and counts of the fleet")
    status.set_defaults(run=_status)

    top = commands.add_parser("top", help="the fleet's load, live: replicas, budgets, queues, latencies")
    top.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="between two looks (default 1)"
    )
    top.add_argument("--once", action="store_true", help="one look, over one interval (so does --json)")
    top.set_defaults(run=_top)

    handles = commands.add_parser("handles", help="prefixes and resume handles that the fleet holds")
    handles.add_argument("--drop", default="", metavar="NAME", help="free this one")
    handles.set_defaults(run=_handles)

    drain = commands.add_parser("drain", help="give a replica nothing new and let its requests end")
    resume = commands.add_parser("resume", help="end a replica's drain")
    attach = commands.add_parser("attach", help="use the replica at an endpoint from now on")
    detach = commands.add_parser("detach", help="drain a replica, then forget it")
    for order in (drain, resume, detach):
        order.add_argument("target", metavar="NAME", help="a replica's name or endpoint")
    attach.add_argument("target", metavar="ENDPOINT", help="that the replica binds")
    for order in (drain, detach):
        order.add_argument(
            "--within",
            type=seconds,
            default=30.0,
            metavar="S",
            help="then its requests go on at other replicas, from their next token (default 30)",
        )
        order.add_argument("--wait", action="store_true", help="until it has no requests left")
    for order in (drain, resume, attach, detach):
        order.set_defaults(run=_order)

    for command in (status, top, handles, drain, resume, attach, detach):
        add_connection(command)
        add_json(command)


def _status(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import report

    return report.status(endpoint(flags), as_json=flags.json)


def _top(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import top

    interval_s = max(flags.interval, 0.1)
    return top.show(endpoint(flags), interval_s=interval_s, once=flags.once, as_json=flags.json)


def _handles(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import handles

    if flags.drop:
        return handles.drop(endpoint(flags), flags.drop, as_json=flags.json)
    return handles.show(endpoint(flags), as_json=flags.json)


def _order(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import operator

    return operator.order(
        endpoint(flags),
        flags.command,
        flags.target,
        within_s=getattr(flags, "within", 0.0),
        wait=getattr(flags, "wait", False),
        as_json=flags.json,
    )
