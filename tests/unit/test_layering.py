"""The architecture as a test: who may import whom, and under which name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"protocol", "native", "replica", "dispatcher", "deploy"}
MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "native": set(),
    "dispatcher": {"protocol"},
    "replica": {"protocol", "native"},
    "deploy": FOLDERS,
}
NEVER = {"scripts", "tests"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported, wherever in the file; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def complaints(folder: str, source: str) -> list[str]:
    """What the source, as a file of this folder, imports and may not."""
    allowed = MAY_IMPORT[folder] | {folder}
    found = []
    for name in imported(ast.parse(source)):
        parts = name.split(".")
        if name.startswith("."):
            found.append(f"relative import {name}")
        elif parts[0] in FOLDERS | NEVER:
            found.append(f"import {name}: not under tinyloop_serve")
        elif parts[0] == "tinyloop_serve" and (len(parts) < 2 or parts[1] not in allowed):
            found.append(f"import {name}: {folder} may import {sorted(allowed)}")
    return found


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_imports_only_what_the_layering_allows(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {str(f.relative_to(ROOT)): c for f in files if (c := complaints(folder, f.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("protocol", "import tinyloop_serve.native"),
        ("dispatcher", "from tinyloop_serve import protocol, replica"),
        ("dispatcher", "def late():\n    from tinyloop_serve.native.errors import TinyLoopError"),
        ("replica", "import importlib\nimportlib.import_module('tinyloop_serve.deploy.cli')"),
        ("replica", "from protocol.messages import Token"),
        ("deploy", "from .cli import main"),
        ("native", "import tests.conftest"),
    ],
)
def test_the_check_sees_every_way_to_break_the_layering(folder: str, source: str) -> None:
    assert complaints(folder, source)
