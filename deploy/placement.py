"""Which replica runs on which device. Knows names only: whether a device is there is the replica's to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

DEVICE = re.compile(r"[a-z0-9_]+(:(0|[1-9][0-9]*))?")


@dataclass(frozen=True)
class Place:
    device: str
    share: int  # so many replicas are on the device: this one may take 1/share of its memory

    @property
    def flags(self) -> list[str]:
        return ["--device", self.device, "--device-share", str(self.share)]


def named(text: str) -> tuple[str, ...]:
    """The devices of "cuda:0,cuda:1"."""
    return tuple(name.strip() for name in text.split(","))


def placed(replicas: int, devices: Sequence[str]) -> list[Place]:
    """A place for every replica, the devices in turn. Raises ValueError, with what to change, for what cannot
    be a device, one that is named twice and one that would have no replica."""
    if bad := [name for name in devices if not DEVICE.fullmatch(name)]:
        raise ValueError(f"{bad[0]!r} is not accepted; expected cpu, cuda or cuda:N")
    text = ",".join(devices)
    if len({name if ":" in name else f"{name}:0" for name in devices}) < len(devices):
        raise ValueError(
            f"{text!r} is not accepted; expected each device once (cuda is cuda:0), and more replicas"
        )
    if replicas < len(devices):
        raise ValueError(f"{text!r} is not accepted; expected at most {replicas} devices, a replica each")
    turns = [devices[n % len(devices)] for n in range(replicas)]
    return [Place(device, turns.count(device)) for device in turns]
