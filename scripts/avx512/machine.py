"""A PC with one AVX-512 processor (Skylake X), emulated by Bochs; what it says is its serial port.

It must not know what the machine runs.
"""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

CONFIG = """
plugin_ctrl: serial=1, parallel=0, gameport=0, speaker=0, extfpuirq=0, iodebug=0
config_interface: textconfig
display_library: term
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest=256, host=256
romimage: file={packages}/usr/share/bochs/BIOS-bochs-latest, options=fastboot
vgaromimage: file={packages}/usr/share/vgabios/vgabios.bin
vga: update_freq=1
ata0-master: type=cdrom, path={cd}, status=inserted
boot: cdrom
clock: sync=none, time0=utc
com1: enabled=1, mode=file, dev={folder}/serial.log
log: {folder}/bochs.log
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
"""


def environment(packages: Path) -> dict[str, str]:
    """In which the programs of `packages` find their libraries."""
    libraries = packages / "usr/lib/x86_64-linux-gnu"
    plugins = libraries / "bochs/plugins"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{packages}/lib/x86_64-linux-gnu",
        "LTDL_LIBRARY_PATH": str(plugins),
        "TERM": "xterm",
    }


def lines_of(
    cd: Path, packages: Path, folder: Path, limit_s: float
) -> Generator[tuple[float, str], None, None]:
    """Starts the machine -> (seconds, line of its serial port), to its end or the limit; close() ends it."""
    serial = folder / "serial.log"
    for stale in (serial, Path(f"{cd}.lock")):
        stale.unlink(missing_ok=True)
    (folder / "bochsrc").write_text(CONFIG.format(packages=packages, cd=cd, folder=folder))
    (folder / "bochs.rc").write_text("c\n")  # Debian's build starts in its debugger: continue
    started = time.monotonic()
    keyboard, terminal = pty.openpty()  # its debugger and its screen want one
    with (folder / "terminal.log").open("wb") as screen:
        machine = subprocess.Popen(
            [packages / "usr/bin/bochs-bin", "-q", "-f", folder / "bochsrc", "-rc", folder / "bochs.rc"],
            stdin=terminal,
            stdout=screen,
            stderr=subprocess.STDOUT,
            env=environment(packages),
            start_new_session=True,
        )
    try:
        shown, running = 0, True
        while running and time.monotonic() - started < limit_s:
            time.sleep(0.2)
            running = machine.poll() is None
            text = serial.read_text(errors="replace") if serial.exists() else ""
            whole = text.split("\n")[:-1]
            for line in whole[shown:]:
                yield time.monotonic() - started, line.rstrip("\r")
            shown = len(whole)
    finally:
        machine.kill()
        machine.wait()
        os.close(keyboard)
        os.close(terminal)
