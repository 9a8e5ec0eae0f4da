"""Debian's packages for the emulated machine, downloaded and unpacked under build/, never installed.

It must not know what they are for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

EMULATOR = ("bochs", "bochs-term", "bochsbios", "vgabios", "genisoimage", "isolinux", "syslinux-common")
KERNEL = "linux-image-cloud-amd64"  # LZ4, so it unpacks itself in seconds; hardly a driver


class MissingPackage(Exception):
    """A package that apt does not offer here; the message says which and what to do."""


def unpacked(root: Path) -> Path:
    """The folder with the packages' files, filled at the first call."""
    if (root / "complete").exists():
        return root
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise MissingPackage(f"needs apt-get and dpkg (Debian), to download {', '.join(EMULATOR)}")
    shutil.rmtree(root, ignore_errors=True)
    archives = root / "archives"
    archives.mkdir(parents=True)
    names = sorted({*EMULATOR, *libraries(), kernel_image()})
    print(f"avx512: downloading {len(names)} packages", flush=True)
    offered(["apt-get", "download", "--quiet", *names], archives)
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive, root], check=True)
    shutil.rmtree(archives)
    (root / "complete").touch()
    return root


def libraries() -> set[str]:
    """What the emulator needs and this machine lacks."""
    plan = offered(["apt-get", "install", "--simulate", "--no-install-recommends", *EMULATOR])
    return set(re.findall(r"^Inst (\S+)", plan, re.M))


def kernel_image() -> str:
    found = re.search(r"Depends: (linux-image-\S+)", offered(["apt-cache", "depends", KERNEL]))
    if not found:
        raise MissingPackage(f"{KERNEL} names no kernel here")
    return found[1]


def offered(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise MissingPackage("\n".join([*reason, "perhaps the lists are old: apt-get update (as root)"]))
    return done.stdout
