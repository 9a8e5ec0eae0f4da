"""`make avx512`: the AVX-512 kernels against the portable ones, bit for bit, on an emulated processor.

    scripts/avx512_check.py [--limit 900]

The C++ tests are linked static and run alone on a small Linux in Bochs, which emulates a whole PC instruction
by instruction: what runs is the machine code that ships. Everything is downloaded and made under build/. The
last line says "avx512: N tests, M checks, passed", or the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.avx512.image import write_cd
from scripts.avx512.machine import environment, lines_of
from scripts.avx512.packages import MissingPackage, unpacked
from scripts.avx512.verdict import judge

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/native"  # that of scripts/cpp-tests
PLACE = ROOT / "build/avx512"
TESTS = ("integers_test", "kernels_test")


def main() -> int:
    parser = argparse.ArgumentParser(description="The AVX-512 kernels on an emulated processor.")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the machine (default: 900)")
    limit_s = parser.parse_args().limit
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the machine ends too
    PLACE.mkdir(parents=True, exist_ok=True)
    try:
        packages = unpacked(PLACE / "packages")
    except MissingPackage as error:
        print(f"avx512: failed: {error}", file=sys.stderr)
        return 1
    cd = PLACE / "boot.iso"
    write_cd(cd, packages, static_programs(), environment(packages))
    with closing(lines_of(cd, packages, PLACE, limit_s)) as lines:
        checks, faults = judge(TESTS, shown(lines))
    for fault in faults:
        print(f"avx512: failed: {fault}", file=sys.stderr)
    if not faults:
        print(f"avx512: {len(TESTS)} tests, {checks} checks, passed")
    return 1 if faults else 0


def static_programs() -> list[Path]:
    """init and the tests, linked with all that they need; the compiler's flags are the project's."""
    print("avx512: building the tests", flush=True)
    targets = [f"{name}_static" for name in TESTS]
    quietly(["cmake", "-G", "Ninja", "-S", ROOT / "native", "-B", BUILD, "-DTINYLOOP_SANITIZE="])
    quietly(["cmake", "--build", BUILD, "--target", *targets])
    init = PLACE / "init"
    quietly([os.environ.get("CXX", "c++"), "-O2", "-static", ROOT / "scripts/avx512/init.cpp", "-o", init])
    for name, target in zip(TESTS, targets, strict=True):
        quietly(["strip", "-o", PLACE / name, BUILD / target])
    return [init, *(PLACE / name for name in TESTS)]


def quietly(command: list[str | Path]) -> None:
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # cmake, ninja
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=tools)
    if done.returncode:
        sys.exit(f"{done.stdout}\navx512: failed: {' '.join(map(str, command))}")


def shown(lines: Iterable[tuple[float, str]]) -> Iterator[str]:
    for seconds, line in lines:
        print(f"avx512: {seconds:4.0f} s: {line}", flush=True)
        yield line


if __name__ == "__main__":
    sys.exit(main())
