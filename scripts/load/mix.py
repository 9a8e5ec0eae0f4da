"""Which requests a load asks: the `[load]` table of a TOML file, drawn from by a seed.

A fleet's configuration may have such a table; its processes do not read it. Equal mixes and seeds give equal
requests. Knows no clock and no fleet.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from scripts.load.asked import Asked
from tinyloop_serve.protocol.messages import Method

FIRST_TOKEN = 3  # those below are control tokens in the models that we have met
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Range = tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=1)]]
Loops = Annotated[int, msgspec.Meta(ge=1)]


class LoadFault(Exception):
    """The description of a load cannot be used; the message names the place, and what is accepted."""


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a list every entry is equally likely; of a [low, high] pair every number. Lengths in tokens."""

    prompt_tokens: Range = (8, 64)  # random ones, after the prefix
    prompts: tuple[str, ...] = ()  # texts to ask instead of random tokens
    max_tokens: Range = (16, 64)
    loops: tuple[Loops, ...] = ()  # none: the model's own
    temperature: tuple[float, ...] = (0.0,)
    repetition_penalty: tuple[float, ...] = (1.0,)
    cache_mode: tuple[str, ...] = ("fp16",)
    ignore_eos: bool = True
    method: Method = "plain"
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # 0 = none
    prefixes: Count = 0  # scaffolds that the fleet gets before the load
    prefix_tokens: Count = 0  # of each
    prefix_share: Share = 0.0  # of the requests that begin with one
    refine: tuple[Loops, ...] = ()  # a draft is refined at these loops, one after the other
    refine_share: Share = 0.0  # of the requests that are such drafts
    tenants: Annotated[int, msgspec.Meta(ge=1)] = 1  # each with a key of its own

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: [{low}, {high}] is not accepted; expected [low, high]")
        for name in ("temperature", "repetition_penalty", "cache_mode"):
            if not getattr(self, name):
                raise ValueError(f"{name}: [] is not accepted; expected at least one entry")
        if bool(self.prefix_share) != bool(self.prefixes and self.prefix_tokens):
            raise ValueError("prefixes, prefix_tokens and prefix_share belong together")
        if bool(self.refine_share) != bool(self.refine):
            raise ValueError("refine and refine_share belong together")
        if self.prompts and self.prefix_share:
            raise ValueError("prompts: texts are not accepted beside prefixes, which are tokens")

    def requests(self, seed: int, vocabulary: int) -> Iterator[Asked]:
        """Without end."""
        draw = random.Random(seed)
        number = 0
        while True:
            yield self._request(draw, number, vocabulary)
            number += 1

    def prefix(self, number: int, vocabulary: int) -> list[int]:
        """The tokens of a scaffold."""
        return random_tokens(random.Random(f"prefix {number}"), self.prefix_tokens, vocabulary)

    def _request(self, draw: random.Random, number: int, vocabulary: int) -> Asked:
        prompt: str | list[int]
        if self.prompts:
            prompt = draw.choice(self.prompts)
        else:
            prompt = random_tokens(draw, draw.randint(*self.prompt_tokens), vocabulary)
            if draw.random() < self.prefix_share:
                prompt = self.prefix(draw.randrange(self.prefixes), vocabulary) + prompt
        options: dict[str, Any] = {
            "max_tokens": draw.randint(*self.max_tokens),
            "temperature": draw.choice(self.temperature),
            "repetition_penalty": draw.choice(self.repetition_penalty),
            "cache_mode": draw.choice(self.cache_mode),
            "ignore_eos": self.ignore_eos,
            "seed": draw.getrandbits(64),
        }
        if self.loops:
            options["loops"] = draw.choice(self.loops)
        refine = self.refine if draw.random() < self.refine_share else ()
        if self.method != "plain" and not refine:
            options["method"] = self.method
        if self.deadline_s:
            options["deadline_s"] = self.deadline_s
        return Asked(number, prompt, options, tenant=draw.randrange(self.tenants), refine=refine)


def random_tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]


def read(path: Path) -> Mix:
    """The `[load]` table of a file; without one, the defaults. Raises `LoadFault`."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file).get("load", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LoadFault(f"{path}: {error}") from error
    return parse(table, str(path))


def parse(table: Any, where: str) -> Mix:
    """Raises `LoadFault`."""
    try:
        return msgspec.convert(table, Mix)
    except msgspec.ValidationError as error:
        raise LoadFault(f"{where}: load: {error}") from error
