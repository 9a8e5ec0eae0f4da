"""`tinyloop inspect`, `convert`: model files."""

from __future__ import annotations

import argparse

from tinyloop_serve.deploy.flags import Subcommands, add_json, positive


def add(commands: Subcommands) -> None:
    inspect = commands.add_parser("inspect", help="what is in a .tinyloop artifact")
    inspect.add_argument("path", metavar="PATH")
    add_json(inspect)
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser(
        "convert",
        help="make a .tinyloop artifact from a GGUF file, a Hugging Face folder or another artifact",
    )
    convert.add_argument("source", metavar="SOURCE")
    convert.add_argument("target", metavar="TARGET")
    convert.add_argument(
        "--weights",
        choices=("fp16", "bf16", "fp32", "int8", "int4"),
        help="type of the matrices (default: fp16; another artifact's: as they are)",
    )
    convert.add_argument(
        "--layout",
        choices=("panels", "plain"),
        default="panels",
        help="of the matrices: panels (default), which the replicas of a host map and share, or plain rows",
    )
    convert.add_argument(
        "--max-loops",
        type=positive,
        metavar="N",
        help="that a request may ask for (default: twice the model's)",
    )
    convert.add_argument("--no-beta", action="store_true", help="do not measure the gain of the core")
    add_json(convert)
    convert.set_defaults(run=_convert)


def _inspect(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import report

    return report.inspect(flags.path, as_json=flags.json)


def _convert(flags: argparse.Namespace) -> int:
    from tinyloop_serve.deploy import report

    return report.convert(
        flags.source,
        flags.target,
        flags.weights,
        flags.layout,
        max_loops=flags.max_loops,
        measure_beta=not flags.no_beta,
        as_json=flags.json,
    )
