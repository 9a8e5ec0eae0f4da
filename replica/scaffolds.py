"""The scaffolds that a replica has from its start: beginnings of prompts that the operator knows beforehand.

Every replica names a scaffold by what it is, so that a dispatcher sees one handle with several holders. They
are everybody's and have no lease; the least recently used handle still goes first when the cap is reached.
"""

from __future__ import annotations

from tinyloop_serve.native import Model, errors
from tinyloop_serve.protocol.codec import tokens_to_bytes
from tinyloop_serve.protocol.messages import Build
from tinyloop_serve.replica.config import Config, ConfigFault
from tinyloop_serve.replica.handles import HandleStore
from tinyloop_serve.replica.text import Vocabulary


def register(config: Config, model: Model, vocabulary: Vocabulary | None, handles: HandleStore) -> None:
    """Builds them all, in the order of the flags. Raises `ConfigFault` naming the file."""
    if len(config.scaffolds) > config.max_handles:
        count = f"{len(config.scaffolds)} scaffolds"
        raise ConfigFault(f"--scaffold: {count}, but only {config.max_handles} handles fit: --max-handles")
    for place in config.scaffolds:
        path, loops = _split(place)
        try:
            tokens = _tokens(path, model, vocabulary)
            loops = loops or model.config["loops"]
            name = _name(model.fingerprint, tokens, loops)
            handles.build(Build(name, "scaffold", tokens, loops, shared=True, detached=True, lease_ms=0))
        except (errors.LimitError, errors.ConfigError) as error:
            raise ConfigFault(f"--scaffold {place}: {error}") from error


def _name(fingerprint: str, tokens: bytes, loops: int) -> str:
    import hashlib  # brings in OpenSSL, which a replica without scaffolds need not hold

    return "scaffold-" + hashlib.sha256(f"{fingerprint} {loops} ".encode() + tokens).hexdigest()[:32]


def _split(place: str) -> tuple[str, int]:
    """FILE or FILE@LOOPS; 0 = the model's default."""
    path, at, loops = place.rpartition("@")
    return (path, int(loops)) if at and loops.isdecimal() else (place, 0)


def _tokens(path: str, model: Model, vocabulary: Vocabulary | None) -> bytes:
    if vocabulary is None:
        raise ConfigFault(f"--scaffold {path}: this model has no tokenizer")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFault(f"--scaffold {path}: {error}") from error
    if not text:
        raise ConfigFault(f"--scaffold {path}: it is empty; expected the beginning of a prompt")
    first = [model.config["bos_id"]] if model.config.get("add_bos") else []
    return tokens_to_bytes(first + vocabulary.encode(text))
