"""The book of handles: which there are, whose they are, which replicas hold them, and how they ended.

A replica's own store decides which handle has to go when it is full; this book follows it. A handle is
visible to its tenant, and to all if it is shared; for anybody else it does not exist, in no answer and in no
routing. One that is being made is an `Order` until the replica has built it:

    state       what it waits for                 left by
    HELD        the model                         TOKENIZING, WAITING
    TOKENIZING  token ids of its text             WAITING
    WAITING     a replica that builds nothing     BUILDING
    BUILDING    the replica's answer              the book, or a refusal; WAITING (the replica was lost)

This file must not know sockets, requests or what is sent to whom.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from tinyloop_serve.protocol.errors import HandleLost
from tinyloop_serve.protocol.messages import Build, HandleInfo, HeldHandle, Recipe, Sampling

REMEMBERED = 4096  # ended handles whose fate is still told


@dataclass(slots=True, eq=False)
class Held:
    """One handle. `recipe` has its tokens and its loops."""

    name: str
    tenant: str
    recipe: Recipe
    shared: bool
    detached: bool  # it outlives `owner`
    lease_s: float  # after `used`; 0 = as long as a replica holds it
    owner: bytes | None  # the client that made it; None: unknown, or it has left
    used: float  # seconds; also when it was renewed
    model: str = ""  # fingerprint, once it is built or being built
    holders: dict[str, int] = field(default_factory=dict)  # endpoint -> bytes; never empty in the book
    uses: int = 0

    @property
    def prompt(self) -> bytes:
        assert self.recipe.prompt_tokens is not None
        return self.recipe.prompt_tokens

    def visible(self, tenant: str) -> bool:
        return self.shared or self.tenant == tenant

    def info(self, tenant: str, replica: str, now: float) -> HandleInfo:
        return HandleInfo(
            handle=self.name,
            kind=self.recipe.kind,
            tokens=len(self.prompt) // 4,
            loops=self.recipe.loops,
            cache_mode=self.recipe.cache_mode,
            cache_window=self.recipe.cache_window,
            bytes=max(self.holders.values(), default=0),
            replica=replica,
            shared=self.shared,
            mine=self.tenant == tenant,
            uses=self.uses,
            idle_ms=max(0, round(1000 * (now - self.used))),
            lease_ms=round(1000 * self.lease_s),
        )


class OrderState(Enum):
    HELD = "held"
    TOKENIZING = "tokenizing"
    WAITING = "waiting"
    BUILDING = "building"


@dataclass(slots=True, eq=False)
class Order:
    """A handle to be built. `client` and `id` are who gets the answer; None: nobody waits for one."""

    held: Held
    recipe: Recipe  # as it was asked for: with its text, and without a model
    client: bytes | None
    id: str
    arrived: float
    state: OrderState = OrderState.HELD
    job: int = 0  # number of the `Tokenize` that is out
    replica: str = ""  # endpoint, while BUILDING
    losses: int = 0  # replicas that were lost while they built it

    def build(self) -> Build:
        held = self.held
        return Build(
            handle=held.name,
            kind=held.recipe.kind,
            prompt=held.prompt,
            loops=held.recipe.loops,
            cache_mode=held.recipe.cache_mode,
            cache_window=held.recipe.cache_window,
            tenant=held.tenant,
            shared=held.shared,
            detached=held.detached,
            lease_ms=round(1000 * held.lease_s),
        )


class _Ended(NamedTuple):
    held: Held  # without the prompt
    why: str
    final: bool  # a replica that comes back with it must drop it


class Handles:
    def __init__(self) -> None:
        self._all: dict[str, Held] = {}
        self._scaffolds: list[Held] = []  # the longest first
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self.orders: dict[str, Order] = {}  # name -> what is being made
        self._asked: dict[tuple[bytes, str], Order] = {}  # client, id -> the order that it waits for

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._all.values())

    # -- finding one

    def get(self, name: str) -> Held | None:
        return self._all.get(name)

    def find(self, name: str, tenant: str) -> Held | None:
        """The handle, if this tenant may know that it exists."""
        held = self._all.get(name)
        return held if held is not None and held.visible(tenant) else None

    def lost(self, name: str, tenant: str) -> HandleLost:
        """The error for a handle that `find` does not find: how it ended, if the tenant may know."""
        ended = self._ended.get(name)
        known = ended is not None and name not in self._all and ended.held.visible(tenant)
        why = ended.why if ended is not None and known else "there is no such handle"
        accepted = "a handle that lives, or its recipe beside it"
        return HandleLost(f"handle {name!r}: {why}", field="handle", value=name, accepted=accepted)

    def once(self, name: str) -> Held | None:
        """What the handle was before it ended (without its prompt)."""
        ended = self._ended.get(name)
        return ended.held if ended is not None else None

    def taken(self, name: str) -> bool:
        return name in self._all or name in self.orders

    def holds(self, endpoint: str, name: str) -> bool:
        held = self._all.get(name)
        return held is not None and endpoint in held.holders

    def scaffold(self, tenant: str, prompt: bytes, sampling: Sampling, model: str) -> Held | None:
        """The longest that the prompt begins with and that this sampling may use."""
        for held in self._scaffolds:
            fits = held.recipe.loops == sampling.loops and held.recipe.cache_mode == sampling.cache_mode
            if held.visible(tenant) and fits and held.model == model and prompt.startswith(held.prompt):
                return held
        return None

    def of(self, client: bytes) -> list[Held]:
        return [held for held in self if held.owner == client]

    def visible(self, tenant: str) -> list[Held]:
        return [held for held in self if held.visible(tenant)]

    def count(self, tenant: str) -> int:
        """What the tenant has, made or in the making."""
        orders = (order.held for order in self.orders.values())
        return sum(held.tenant == tenant for held in [*self, *orders])

    # -- orders

    def order(self, order: Order) -> None:
        """A handle is to be made; its name is free."""
        self.orders[order.held.name] = order
        if order.client is not None:
            self._asked[order.client, order.id] = order

    def close(self, order: Order) -> None:
        """It is built, or never will be."""
        del self.orders[order.held.name]
        if order.client is not None:
            del self._asked[order.client, order.id]

    def ordered(self, client: bytes, request_id: str) -> Order | None:
        return self._asked.get((client, request_id))

    def orders_of(self, client: bytes) -> list[Order]:
        return [order for order in self.orders.values() if order.held.owner == client]

    def orphan(self, order: Order) -> None:
        """Whoever waited for it has left; it is built all the same."""
        if order.client is not None:
            del self._asked[order.client, order.id]
        order.client = order.held.owner = None

    # -- their life

    def keep(self, held: Held, endpoint: str, size: int) -> None:
        """A replica holds it."""
        held.holders[endpoint] = size
        if held.name not in self._all:
            self._all[held.name] = held
            self._ended.pop(held.name, None)
            if held.recipe.kind == "scaffold":
                self._scaffolds.append(held)
                self._scaffolds.sort(key=lambda held: -len(held.prompt))

    def relearn(
        self, told: HeldHandle, endpoint: str, model: str, here: Callable[[bytes], bool], now: float
    ) -> bool:
        """A replica says that it holds this one from before; False: it must drop it. `here` tells whether a
        client is still connected."""
        build = told.build
        recipe = Recipe(
            kind=build.kind,
            prompt_tokens=build.prompt,
            loops=build.loops,
            cache_mode=build.cache_mode,
            cache_window=build.cache_window,
        )
        if build.handle in self.orders:
            return False  # it is being built again
        held, ended = self._all.get(build.handle), self._ended.get(build.handle)
        if held is None and (ended is None or not ended.final):
            owner = ended.held.owner if ended is not None else None
            if owner is not None and not build.detached and not here(owner):
                return False  # it went with its owner, while the replica was away
            held = Held(
                build.handle,
                build.tenant,
                recipe,
                shared=build.shared,
                detached=build.detached,
                lease_s=build.lease_ms / 1000,
                owner=owner,
                used=now,
                model=model,
            )
        here_so = held and (held.tenant, held.shared, held.recipe, held.model)
        if held is None or here_so != (build.tenant, build.shared, recipe, model):
            return False
        self.keep(held, endpoint, told.bytes)
        return True

    def use(self, held: Held | None, endpoint: str, now: float) -> str:
        """Notes a use there; returns the name, or "" where that replica does not hold it (any more)."""
        if held is None or self._all.get(held.name) is not held or endpoint not in held.holders:
            return ""
        held.uses += 1
        held.used = now
        return held.name

    def leave(self, held: Held, endpoint: str, why: str, *, final: bool) -> None:
        """That replica holds it no longer; the last one's reason is how it ended."""
        held.holders.pop(endpoint, None)
        if not held.holders and held.name in self._all:
            self.end(held, why, final=final)

    def end(self, held: Held, why: str, *, final: bool = True) -> None:
        """It is gone; the caller tells its holders."""
        del self._all[held.name]
        if held.recipe.kind == "scaffold":
            self._scaffolds.remove(held)
        held.recipe, held.holders = replace(held.recipe, prompt_tokens=b""), {}
        self._ended[held.name] = _Ended(held, why, final)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def held_by(self, endpoint: str) -> list[Held]:
        return [held for held in self if endpoint in held.holders]

    def excuse(self, seconds: float) -> None:
        """We were not running for so long: no lease pays for it."""
        for held in self:
            held.used += seconds

    def expired(self, now: float) -> list[Held]:
        return [held for held in self if held.lease_s and now - held.used > held.lease_s]

    def check(self) -> None:
        """Raises AssertionError unless the book is in order."""
        for held in self:
            assert held.holders, f"nobody holds {held.name}"
            assert held.name not in self._ended, f"{held.name} has ended"
            assert held.prompt, f"the tokens of {held.name}"
        scaffolds = [held for held in self if held.recipe.kind == "scaffold"]
        assert sorted(map(id, scaffolds)) == sorted(map(id, self._scaffolds)), "scaffolds"
        for name, order in self.orders.items():
            assert order.held.name == name and name not in self._all, f"order of {name}"
            assert bool(order.replica) == (order.state is OrderState.BUILDING), f"state of {name}"
        asked = [order for order in self.orders.values() if order.client is not None]
        assert sorted(map(id, asked)) == sorted(map(id, self._asked.values())), "who waits for orders"
