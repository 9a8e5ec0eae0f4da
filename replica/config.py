"""Configuration of one replica: parsed once, from flags, into a frozen structure. Opens nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tinyloop_serve.protocol.keys import needs_keys
from tinyloop_serve.protocol.limits import IPC_PATH_BYTES

EXIT_CONFIG = 78  # EX_CONFIG: a service manager must not restart us


class ConfigFault(Exception):
    """A flag is wrong; trying again unchanged fails again."""


@dataclass(frozen=True)
class Config:
    """Times in seconds, lengths in tokens."""

    model: str  # path of the .tinyloop file
    endpoint: str  # that this replica binds
    name: str  # for people: status, logs, stats
    threads: int = 0  # of the engine; 0 = TINYLOOP_THREADS, else all cores
    max_seq_len: int = 0  # 0 = the model's
    device: str = "cpu"  # or a plug-in's: "cuda", "cuda:1"
    memory_mib: int = 0  # the budget for weights, handles and caches; 0 = what is free
    max_handles: int = 8  # prefixes, resume handles and scaffolds together
    scaffolds: tuple[str, ...] = ()  # files of prompts' beginnings, held from the start: FILE or FILE@LOOPS
    speculation: str = "auto"  # "auto": measured at the start; "off"
    calibration_prompts: str = ""  # file with a prompt per line; "" = our own
    speculation_threshold: float = 1.3  # times as fast as plain decoding, or it is switched off
    key: str = ""  # file of our secret CURVE key; needed for tcp beyond loopback
    dispatcher_keys: tuple[str, ...] = ()  # public keys, or `.pub` files, of those that may connect then
    drain_s: float = 2.0  # how long a run may go on after SIGTERM
    stall_s: float = 30.0  # no step in the middle of a run for so long: end with status 70
    parent: int = 0  # process id of the supervisor we die with; 0 = none
    device_share: int = 1  # so many replicas share the device's own memory
    weights: str = "auto"  # of the engine; "auto" = TINYLOOP_WEIGHTS, else as the artifact has them
    affinity: str = "none"  # processors of this process: "none", "auto" (one per thread) or a list like 0,2-5


def parse(arguments: Sequence[str]) -> Config:
    """The configuration from command-line `arguments`.

    Raises `ConfigFault`; the process must then exit with `EXIT_CONFIG`.
    """
    parser = _Parser(
        "tinyloop-replica", allow_abbrev=False, description="One model, one socket, one decoder."
    )
    parser.add_argument("--model", required=True, metavar="FILE", help="the .tinyloop artifact to serve")
    parser.add_argument(
        "--endpoint", required=True, type=_endpoint, help="ipc:///path or tcp://127.0.0.1:port to bind"
    )
    parser.add_argument("--name", default="", help="shown in status and stats (default: from the endpoint)")
    parser.add_argument("--threads", type=_count, default=0, metavar="N", help="0 = all cores (default)")
    parser.add_argument(
        "--max-seq-len", type=_count, default=0, metavar="N", help="0 = the model's (default)"
    )
    parser.add_argument(
        "--memory-mib",
        type=_count,
        default=0,
        metavar="N",
        help="budget for weights, handles and caches; too little: exit status 78 (0 = what is free)",
    )
    parser.add_argument(
        "--max-handles",
        type=_count,
        default=8,
        metavar="N",
        help="prefixes, resume handles and scaffolds held at once; the least recently used goes (default 8)",
    )
    parser.add_argument(
        "--scaffold",
        dest="scaffolds",
        action="append",
        default=[],
        metavar="FILE[@LOOPS]",
        help="a prompt's beginning, built at the start for whoever's prompt begins so; repeatable",
    )
    parser.add_argument(
        "--speculation",
        choices=("auto", "off"),
        default="auto",
        help="auto: measured at the start, on where it pays",
    )
    parser.add_argument(
        "--calibration-prompts",
        default="",
        metavar="FILE",
        help="5 to 10 prompts to measure speculation on, one per line",
    )
    parser.add_argument(
        "--speculation-threshold",
        type=_factor,
        default=1.3,
        metavar="X",
        help="off unless it is more than X times as fast (default 1.3)",
    )
    parser.add_argument("--key", default="", metavar="FILE", help="our secret key, of `tinyloop keys new`")
    parser.add_argument(
        "--dispatcher-key",
        dest="dispatcher_keys",
        action="append",
        default=[],
        metavar="KEY",
        help="public key, or its .pub file, of a dispatcher that may connect over tcp; repeatable",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--device-share",
        type=_several,
        default=1,
        metavar="N",
        help="take at most 1/N of the device's own memory: N replicas are on it (default 1)",
    )
    parser.add_argument(
        "--weights", default="auto", metavar="W", help="fp16, bf16, int8, int4; default: the model's"
    )
    parser.add_argument(
        "--affinity", default="none", metavar="CPUS", help="none (default), auto, or a list such as 0,2-5"
    )
    parser.add_argument(
        "--drain-s", type=_seconds, default=2.0, metavar="S", help="for the run in progress at SIGTERM"
    )
    parser.add_argument(
        "--stall-s", type=_seconds, default=30.0, metavar="S", help="end when the engine hangs for so long"
    )
    parser.add_argument(
        "--die-with-parent",
        dest="parent",
        type=_count,
        default=0,
        metavar="PID",
        help="stop when PID is gone",
    )
    known, others = parser.parse_known_args(list(arguments))
    if others:
        raise ConfigFault(f"{others[0]}: not accepted; expected one of {', '.join(_names(parser))}")
    flags = vars(known)
    flags["name"] = flags["name"] or flags["endpoint"].rpartition("/")[2].removesuffix(".sock")
    for several in ("dispatcher_keys", "scaffolds"):
        flags[several] = tuple(flags[several])
    if bool(flags["key"]) != bool(flags["dispatcher_keys"]):
        raise ConfigFault("--key and --dispatcher-key belong together: who we are, and who may connect")
    if needs_keys(flags["endpoint"]) and not flags["key"]:
        raise ConfigFault(
            f"argument --endpoint: {flags['endpoint']!r} leaves this machine;"
            " expected ipc, loopback, or --key and --dispatcher-key to encrypt with"
        )
    return Config(**flags)


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(each.option_strings[-1] for each in parser._actions)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigFault(message)


def _endpoint(text: str) -> str:
    scheme, _, address = text.partition("://")
    if scheme == "ipc" and address.startswith("/"):
        if len(address.encode()) > IPC_PATH_BYTES:
            raise argparse.ArgumentTypeError(f"{text!r}: the path is longer than {IPC_PATH_BYTES} bytes")
        return text
    if scheme == "tcp" and address.rpartition(":")[0]:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not accepted; expected ipc:///absolute/path or tcp://host:port"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected a whole number from 0")
    return int(text)


def _several(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected a whole number from 1 to 1024")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected seconds from 0 to 86400")
    return seconds


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; expected a number from 0 to 1000")
    return factor
