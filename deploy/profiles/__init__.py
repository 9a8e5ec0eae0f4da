"""Ready configuration files, one per way to use the pool (docs/patterns.md).

Each is a whole fleet's: `[fleet]`, `[dispatcher]`, `[replica]`, and `[load]`, the requests that
scripts/loadtest.py asks of it.
"""

from __future__ import annotations

from pathlib import Path

from tinyloop_serve.deploy.tables import BadConfig

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def path(name: str) -> str:
    """Of the file. Raises `BadConfig` for a name that is none of `names()`."""
    if name not in names():
        raise BadConfig(f"profile: {name!r} is not accepted; expected one of {', '.join(names())}")
    return str(FOLDER / f"{name}.toml")
