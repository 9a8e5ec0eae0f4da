"""The machine, printed first by every benchmark: what it is, and the ceilings that `limits.cpp` measures.

Rates are to be read against these: on a core with wide multiply-adds a decode of one row waits for memory.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from measure.timing import say
from tinyloop_serve.native import simd_levels

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("limits.cpp")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DRAM_BYTES = 512 << 20  # beyond any cache


def report(threads: int) -> dict[str, Any]:
    """What it is and what it can do at most; also printed."""
    found = {**describe(), **ceilings(threads)}
    print(f"{found['cpu']}, {found['cores']} cores, {found['simd']}, {found['clock_ghz']} GHz")
    print("caches: " + ", ".join(f"{name} {size // 1024} KiB" for name, size in found["caches"].items()))
    print(f"measured on 1 and {threads} threads: {found['flop_per_cycle']} FLOP per cycle and core")
    for key, unit in (
        ("fma_gflops", "GFLOP/s fp32 multiply-add"),
        ("int8_gops", "Gop/s int8 multiply-add"),
        ("fp16_to_fp32_gelements", "G numbers/s from fp16 to fp32"),
        ("l2_gb_per_s", "GB/s read from L2"),
        ("l3_gb_per_s", "GB/s read from L3"),
        ("dram_gb_per_s", "GB/s read from DRAM"),
    ):
        if key in found:
            print(f"  {' / '.join(str(rate) for rate in found[key].values()):>15} {unit}")
    return found


def describe() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "simd": simd_levels()[0],
        "caches": caches(),
    }


def caches() -> dict[str, int]:
    """Bytes of each data cache of one core, the last one usually shared."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = int(size.removesuffix("K")) * 1024
    return found


def ceilings(threads: int) -> dict[str, Any]:
    """Working sets are half of an L2, and a quarter of the L3, which neighbours may share."""
    sizes = caches()
    l2, l3 = sizes.get("L2", 256 << 10), sizes.get("L3", 8 << 20)
    words = [str(number) for number in (threads, l2 // 2, l3 // 4, DRAM_BYTES)]
    say("measuring the machine, 10 s")
    return dict(json.loads(subprocess.check_output([compiled(), *words], text=True)))


def compiled() -> Path:
    """limits.cpp as a program for this machine, compiled again when the source is newer."""
    program = ROOT / "build" / "bench" / "limits"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        say("compiling " + SOURCE.name)
        program.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "c++")
        flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
        subprocess.run([compiler, *flags, "-o", program, SOURCE], check=True)
    return program
