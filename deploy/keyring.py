"""`tinyloop keys`: CURVE keys in a directory. Their format and their use are protocol/keys.py's."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tinyloop_serve.deploy.outcome import CommandFault
from tinyloop_serve.protocol import keys


def default_directory() -> str:
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "tinyloop/keys")


def new(name: str, directory: str, *, as_json: bool) -> int:
    """Makes a pair; prints its public key, and on standard error nothing but what went wrong."""
    try:
        path, public = keys.create(name, Path(directory))
    except OSError as error:
        raise CommandFault(f"cannot write to {directory}: {error.strerror}") from None
    print(json.dumps({"public": public, "path": str(path)}) if as_json else f"{public}  {path}")
    return 0


def show(directory: str, *, as_json: bool) -> int:
    """A line for each key: public key, name, and whether its secret half is here."""
    try:
        found = keys.found(Path(directory))
    except OSError as error:
        why = f"cannot read {directory}: {error.strerror}"
        raise CommandFault(f"{why}; `tinyloop keys new NAME` makes keys, --dir says where they are") from None
    if as_json:
        listed = [{"name": name, "public": public, "secret": secret} for name, public, secret in found]
        print(json.dumps({"directory": directory, "keys": listed}))
        return 0
    for name, public, secret in found:
        print(f"{public}  {name}{'' if secret else '  (public half only)'}")
    return 0
