"""A CD that boots Linux with one process, /init, and the programs that it shall run.

It must not know which machine boots it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# For xsaves Bochs reports another size of the registers than the kernel computes, which would then give AVX
# up. A preset clock, no ACPI and no APIC make it boot in 600 million instructions.
OPTIONS = (
    "console=ttyS0 quiet mitigations=off nokaslr panic=-1 acpi=off noapic nolapic lpj=1000000 tsc=reliable "
    "no_timer_check cryptomgr.notests noxsaves clearcpuid=xsaves,xsavec "
    "TINYLOOP_TESTS_IN_BOCHS=1"  # goes into the programs' environment
)


def write_cd(path: Path, packages: Path, programs: list[Path], environment: dict[str, str]) -> None:
    """programs: static; the first is /init, which gets the names of the others as arguments."""
    tree = path.with_suffix(".tree")
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "isolinux").mkdir(parents=True)
    shutil.copy(packages / "usr/lib/ISOLINUX/isolinux.bin", tree / "isolinux")
    shutil.copy(packages / "usr/lib/syslinux/modules/bios/ldlinux.c32", tree / "isolinux")
    shutil.copy(next(packages.glob("boot/vmlinuz-*")), tree / "vmlinuz")
    names = " ".join(f"/{program.name}" for program in programs[1:])
    (tree / "isolinux/isolinux.cfg").write_text(
        f"DEFAULT t\nPROMPT 0\nLABEL t\nKERNEL /vmlinuz\nINITRD /initrd\nAPPEND {OPTIONS} -- {names}\n"
    )
    (tree / "initrd").write_bytes(archive(programs))
    boot = "-b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table"
    subprocess.run(
        [packages / "usr/bin/genisoimage", "-quiet", "-R", *boot.split(), "-o", path, tree],
        env=environment,
        check=True,
    )


def archive(programs: list[Path]) -> bytes:
    """The kernel's initial files, in cpio's "newc" format (initramfs in the kernel's documentation)."""
    files = [entry("dev", 0o40755), entry("dev/console", 0o20600, device=(5, 1))]
    for place, program in enumerate(programs):
        files.append(entry(program.name if place else "init", 0o100755, program.read_bytes()))
    return b"".join([*files, entry("TRAILER!!!", 0)])


def entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    text = name.encode() + b"\0"
    numbers = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(text), 0)
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + text
    return b"".join(part + b"\0" * (-len(part) % 4) for part in (head, data))
