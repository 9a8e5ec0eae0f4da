"""Checks that the documents are true: links, paths, `make` targets and `tinyloop` commands in them exist.

A path is any code span that starts with an entry of the repository's top level and a slash; `*` and `{a,b}`
are expanded, `<placeholders>` skipped. Commands are read from code spans and from fenced shell blocks.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINYLOOP = Path(sys.executable).with_name("tinyloop")
SHELL = {"sh", "bash", "console", "shell"}
FOLDERS = ("protocol", "dispatcher", "replica", "native", "deploy")


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in sorted(set(listed.split("\0"))) if name and (path := ROOT / name).is_file()]


def check(document: Path) -> Iterator[str]:
    """Yields one complaint for each thing that the document names and the repository does not have."""
    fenced, prose = split_fences(document.read_text())
    yield from check_links(document, prose)
    spans = [s.strip() for s in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)]
    for span in spans:
        yield from check_path(span)
        yield from check_module(span)
    lines = [line for language, text in fenced if language in SHELL for line in command_lines(text)]
    for command in spans + lines:
        yield from check_command(command)


def split_fences(text: str) -> tuple[list[tuple[str, str]], str]:
    """-> ([(language, fenced text)], the rest)."""
    fence = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```[ \t]*$", re.M | re.S)
    return [(m[1], m[2]) for m in fence.finditer(text)], fence.sub("", text)


def command_lines(text: str) -> Iterator[str]:
    """The commands of a shell block: all its lines, or only those after `$ ` where it shows output too."""
    lines = text.replace("\\\n", " ").splitlines()
    prompted = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
    yield from prompted or lines


def check_links(document: Path, prose: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        if not path.exists():
            yield f"link to {target}: no such file"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"link to {target}: no such heading"


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    prose = split_fences(path.read_text())[1]
    heads = re.findall(r"^#+ +(.*?) *#*$", prose, re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads)


def check_path(span: str) -> Iterator[str]:
    first, slash, _ = span.partition("/")
    plain = slash and re.fullmatch(r"[\w./*{},+-]+", span)
    if not plain or first in ("", "build") or not (ROOT / first).exists():
        return
    for name in expand_braces(span):
        if not any(ROOT.glob(name.rstrip("/"))):
            yield f"`{span}`: no such path"


def expand_braces(text: str) -> list[str]:
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        return [text]
    return [
        one
        for part in found[1].split(",")
        for one in expand_braces(text[: found.start()] + part + text[found.end() :])
    ]


def check_module(span: str) -> Iterator[str]:
    """`tinyloop_serve.folder.name`: the folder is one of ours, it has the name or its `__init__` says it."""
    found = re.fullmatch(r"tinyloop_serve\.(\w+)(?:\.(\w+))?[\w.:()]*", span)
    if not found:
        return
    folder, name = found.groups()
    if folder not in FOLDERS:
        yield f"`{span}`: no package {folder}"
    elif name:
        at = ROOT / folder
        init = (at / "__init__.py").read_text() if (at / "__init__.py").exists() else ""
        if not any((at / (name + end)).exists() for end in ("", ".py", ".pyi")) and name not in init:
            yield f"`{span}`: no {name} in {folder}/"


def check_command(command: str) -> Iterator[str]:
    """`make TARGET`, `tinyloop SUBCOMMAND --flag`, `scripts/NAME`, `python -m MODULE`, or a chain of such."""
    for part in re.split(r"&&|\|\||[;|]|&(?= |$)", command):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue
        while words and re.match(r"\w+=|sudo$|time$", words[0]):
            words = words[1:]
        if len(words) < 2:
            continue
        program, rest = words[0], words[1:]
        if program == "make":
            targets = [w for w in rest if re.fullmatch(r"[a-z][\w-]*", w)]
            yield from (f"`{part.strip()}`: no target {w}" for w in targets if w not in make_targets())
        elif Path(program).name == "tinyloop":
            yield from (f"`{part.strip()}`: {complaint}" for complaint in check_tinyloop(rest))
        elif program.startswith("python") and rest[0] == "-m" and len(rest) > 1:
            yield from check_module(rest[1])
        elif program.startswith(("scripts/", ".ci/")) or (program in ("bash", "sh") or "python" in program):
            script = program if "/" in program and "python" not in program else rest[0]
            if re.match(r"(scripts|tests|\.ci)/", script) and not (ROOT / script).exists():
                yield f"`{part.strip()}`: no {script}"


@functools.cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def check_tinyloop(words: list[str]) -> Iterator[str]:
    """The subcommand answers `--help`, and its help names every flag that the document uses."""
    if words[0].startswith("-") or not re.fullmatch(r"[a-z][\w-]*", words[0]):
        return
    text = tinyloop_help(words[0])
    if text is None:
        yield f"no subcommand {words[0]}"
        return
    if words[1:] and re.fullmatch(r"[a-z][\w-]*", words[1]):  # `keys new`; else it is an argument
        text += tinyloop_help(*words[:2]) or ""
    for word in words[1:]:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", flag) and not re.search(rf"{flag}(?![\w-])", text):
            yield f"no flag {flag}"


@functools.cache
def tinyloop_help(*subcommand: str) -> str | None:
    """-> the subcommand's help, None if there is no such subcommand."""
    done = subprocess.run([TINYLOOP, *subcommand, "--help"], capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    checked = documents()
    found = [f"{d.relative_to(ROOT)}: {c}" for d in checked for c in dict.fromkeys(check(d))]
    print("\n".join(found) or f"{len(checked)} documents: every link, path and command exists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
