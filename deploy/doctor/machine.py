"""The machine and the installation: packages, the engine, variables, directories, limits, devices."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from importlib import metadata, util

from tinyloop_serve.deploy import environment
from tinyloop_serve.deploy.doctor.finding import Finding, fault, ok, warning

PYTHON = (3, 11)
DISTRIBUTION = "tinyloop-serve"
NEEDED = ("msgspec", "zmq", "numpy", "tokenizers", "psutil")  # modules
EXTRAS = {  # module -> (extra, what it is for)
    "jinja2": ("chat", "chat templates"),
    "llguidance": ("grammar", "grammars"),
    "gguf": ("import", "reading GGUF files"),
}
FEW_FILES = 256
SPARE_FILES = 64  # of a dispatcher that has no clients yet


def installation() -> Iterator[Finding]:
    """Imports nothing that may be missing."""
    yield from _python()
    yield from _packages()


def surroundings() -> Iterator[Finding]:
    yield from _environment()
    yield from _directory()
    yield from _files()


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= PYTHON:
        yield ok("python", found)
    else:
        needed = ".".join(map(str, PYTHON))
        yield fault("python", f"{found} is too old", f"install Python {needed} or newer")


def _packages() -> Iterator[Finding]:
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    for name in missing:
        yield fault("packages", f"{name} is missing", f"pip install {DISTRIBUTION}")
    old = list(_too_old())
    for text in old:
        yield fault("packages", text, f"pip install --upgrade {DISTRIBUTION}")
    if not missing and not old:
        yield ok("packages", "all that serving needs")
    for name, (extra, what) in EXTRAS.items():
        if util.find_spec(name) is None:
            yield ok("packages", f"no {what}: {name} is not installed (pip install {DISTRIBUTION}[{extra}])")


def _too_old() -> Iterator[str]:
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # runs from its sources: nobody wrote down what it needs
        return
    for requirement in requirements:
        if not (named := re.match(r"([\w.-]+)\s*[^;]*?>=\s*([\d.]+)[^;]*$", requirement)):
            continue  # of an extra, or any version
        name, least = named.groups()
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # said above
        if _numbers(found) < _numbers(least):
            yield f"{name} {found} is too old; expected {least} or newer"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def engine() -> Iterator[Finding]:
    try:
        from tinyloop_serve import native
    except ImportError as error:
        remedy = f"pip install --force-reinstall --no-cache-dir {DISTRIBUTION}, on this machine"
        yield fault("engine", f"does not load: {error}", remedy)
        return
    levels = native.simd_levels()
    try:
        with native.Model(native.demo_model_path(), threads=1) as model:
            model.generate([1, 2, 3], native.GenerateConfig(loops=1, max_tokens=2, ignore_eos=True))
    except (native.TinyLoopError, OSError) as error:
        yield fault("engine", f"does not run the demo model: {error}", f"reinstall {DISTRIBUTION}")
        return
    if levels == ["portable"]:
        yield warning("engine", "runs, without AVX2: several times slower", "use a processor that has it")
    else:
        yield ok("engine", f"runs, with {levels[0]} (this machine can do {', '.join(levels)})")
    for device in native.devices():
        name, why = device["name"], device["reason"]
        if why:
            yield ok("devices", f"{name}: off, {why}")
        elif device["total_bytes"]:
            yield ok("devices", f"{name}: {device['description']}, {device['total_bytes'] >> 20} MiB")


def _environment() -> Iterator[Finding]:
    faults = list(environment.faults(os.environ))
    for name, text in faults:
        yield fault("environment", f"{name}: {text}", f"unset {name}, or set it right")
    for name, variable in environment.VARIABLES.items():
        if value := os.environ.get(name):
            yield ok("environment", f"{name}={value}: {variable.meaning}")
        else:
            yield ok("environment", f"{name} is not set ({variable.default}): {variable.meaning}")


def _directory() -> Iterator[Finding]:
    from tinyloop_serve.deploy import endpoints

    directory = endpoints.runtime_directory()
    try:
        endpoints.check_private(directory)
    except endpoints.UnsafeDirectory as error:
        yield fault("directory", str(error), f"chmod 700 {directory}, if it is yours")
        return
    parent = directory if os.path.isdir(directory) else os.path.dirname(directory)
    if not os.access(parent, os.W_OK | os.X_OK):
        yield fault("directory", f"{parent} cannot be written to", "set XDG_RUNTIME_DIR to one of yours")
        return
    yield ok("directory", f"sockets lie in {directory}")
    wanted = os.environ.get("XDG_RUNTIME_DIR")
    if wanted and not directory.startswith(wanted.rstrip("/") + "/"):
        text = f"XDG_RUNTIME_DIR={wanted} is not used: it is not there, or too long for a socket's path"
        yield warning("directory", text, "set it to a directory with a short path")


def _files() -> Iterator[Finding]:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # a dispatcher takes what it may
    text = f"{limit} open files: about {max(0, limit - SPARE_FILES)} clients"
    if limit < FEW_FILES:
        yield fault("files", text, "a higher hard limit (ulimit -Hn; LimitNOFILE in a unit)")
    else:
        yield ok("files", text)
