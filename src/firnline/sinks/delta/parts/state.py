"""What a sink with a template knows of its parts, and what follows from it: pure decisions, without I/O.

The sink's head names, for each part, the entry that last touched it. A part is in sync when it holds that entry,
however old that is. Before an epoch is written to the first of its parts, the head names all of them as open: whoever
comes later knows which parts may hold rows of an epoch that the sink does not hold yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from firnline.rescued import Rescued, add_rescued
from firnline.types import Json


class Held(NamedTuple):
    """What the table of a part holds of the sink: its newest epoch, and the number of that entry (`short_number`)."""

    epoch: int = 0
    entry: int = 0


NOTHING = Held()


@dataclass(frozen=True, slots=True)
class Part:
    """A part, as the head of its sink knows it."""

    born: int  # the epoch of its first rows
    held: Held = NOTHING  # the entry that last touched it
    open: int = 0  # a later epoch that may be written to it at any moment; 0: none
    table: str = ""  # the captured table whose rows it has, if the sink has a part for each
    # Of a captured table that is upserted: what identifies a row; empty: it has no key, so the part is appended to.
    key: tuple[str, ...] | None = None
    # Once the key changed: by epoch, the key from there on. None: the part lost its rows, and those that come next say
    # their key; until then `key` is the old one.
    keys: tuple[tuple[int, tuple[str, ...] | None], ...] = ()

    def key_before(self, epoch: int) -> tuple[str, ...] | None:
        """Return the key that the part has when an epoch comes; None: the rows of the epoch say it."""
        return next((key for since, key in reversed(self._all_keys()) if since < epoch), None)

    def keys_before(self, epoch: int) -> list[tuple[str, ...]]:
        """Return the keys that the part had before an epoch, oldest first."""
        return [key for since, key in self._all_keys() if since < epoch and key is not None]

    def _all_keys(self) -> tuple[tuple[int, tuple[str, ...] | None], ...]:
        return self.keys or ((self.born, self.key),)

    def with_key(self, epoch: int, key: tuple[str, ...] | None) -> Part:
        """Return the part with a key from an epoch on."""
        if not self.keys and (self.key is None or (epoch == self.born and key is not None)):
            return replace(self, key=key)
        if (known := self.key_before(epoch)) == key or (known and key and set(known) == set(key)):
            return replace(self, keys=tuple(one for one in self.keys if one[0] != epoch))
        keys = sorted([*(one for one in self._all_keys() if one[0] != epoch), (epoch, key)], key=lambda one: one[0])
        newest = next((key for _, key in reversed(keys) if key is not None), None)
        return replace(self, key=newest, keys=tuple(keys))

    @property
    def newest(self) -> int:
        """The newest epoch whose rows it holds, or may hold."""
        return max(self.held.epoch, self.open)

    def to_json(self) -> list[Json]:
        captured = [self.table, _key_to_json(self.key)] if self.table else []
        keys = [[[epoch, _key_to_json(key)] for epoch, key in self.keys]] if self.keys else []
        return [self.born, *self.held, self.open, *captured, *keys]

    @classmethod
    def from_json(cls, value: Json) -> Part:
        born, epoch, entry, opened = (int(number) for number in value[:4])
        table, key, *more = value[4:] or ("", None)
        keys = tuple((int(since), _key_from_json(one)) for since, one in (more[0] if more else ()))
        return cls(born, Held(epoch, entry), opened, str(table), _key_from_json(key), keys)


def _key_to_json(key: tuple[str, ...] | None) -> Json:
    return list(key) if key is not None else None


def _key_from_json(value: Json) -> tuple[str, ...] | None:
    return tuple(value) if value is not None else None


Parts: TypeAlias = Mapping[str, Part]
Rescues: TypeAlias = Sequence[tuple[int, list[Rescued]]]  # by epoch, oldest first
MAX_EPOCHS = 20  # whose rescued values are counted one by one
Verdict: TypeAlias = Literal["write", "has", "went back", "other"]


def open_parts(
    parts: Parts,
    names: Collection[str],
    epoch: int,
    tables: Mapping[str, str] | None = None,
    keys: Mapping[str, tuple[str, ...] | None] | None = None,
) -> dict[str, Part]:
    """Return the parts before an epoch is written to those of these names; new ones are born with it.

    `tables` and `keys` have the captured tables and their keys from this epoch on, by part.
    """
    tables, keys = tables or {}, keys or {}
    opened = {name: parts.get(name, Part(epoch, table=tables.get(name, ""))) for name in names}
    opened = {name: part.with_key(epoch, keys[name]) if name in keys else part for name, part in opened.items()}
    return {**parts, **{name: replace(part, open=max(part.open, epoch)) for name, part in opened.items()}}


def close_parts(parts: Parts, names: Collection[str], entry: Held) -> dict[str, Part]:
    """Return the parts once those of these names hold an entry."""
    return {
        name: replace(
            part,
            held=entry if name in names and part.held.epoch < entry.epoch else part.held,
            open=part.open if part.open > entry.epoch else 0,
        )
        for name, part in parts.items()
    }


def judge(part: Part, found: Held, entry: Held) -> Verdict:
    """Return what to do with a part that an entry touches, by what its table holds.

    The epochs of one part come in order, so a table that holds a later one holds this one.
    """
    if found == entry or found.epoch > entry.epoch:
        return "has"
    if found == part.held:
        return "write"
    return "went back" if found.epoch < part.held.epoch else "other"


def newest_epoch(parts: Parts) -> int:
    """Return the newest epoch of which some part holds, or may hold, rows."""
    return max((part.newest for part in parts.values()), default=0)


def find_lost(parts: Parts, found: Mapping[str, Held]) -> dict[str, Held]:
    """Return the parts whose tables lost an entry that the sink knows them to have held, each with what it holds."""
    return {name: held for name, held in found.items() if held.epoch < parts[name].held.epoch}


def go_back_to(epoch: int, parts: Parts, lost: Mapping[str, Held]) -> tuple[int, dict[str, Part]]:
    """Return the epoch from which a sink at `epoch` goes on whose parts lost entries, and its parts there.

    The others hold later epochs: what they get again, they have. A table that is gone lost all since its birth. What a
    part lost may be written to it again at any moment, by whoever has not noticed the loss.
    """
    lowest = min(held.epoch or parts[name].born - 1 for name, held in lost.items())
    lowered = {name: replace(parts[name], held=held, open=parts[name].newest) for name, held in lost.items()}
    return min(epoch, lowest), {**parts, **lowered}


def parts_of(own: Mapping[str, Json]) -> dict[str, Part]:
    """Return the parts that a head names."""
    return {str(name): Part.from_json(value) for name, value in own.get("parts", {}).items()}


def own_of(parts: Parts, rescued: Rescues = ()) -> dict[str, Json]:
    """Return what a head keeps of its parts, and of the values that the sink rescued."""
    named = {"parts": {name: part.to_json() for name, part in parts.items()}} if parts else {}
    kept = [[epoch, [one.to_json() for one in found]] for epoch, found in rescued]
    return {**named, **({"rescued": kept} if kept else {})}


def rescued_of(own: Mapping[str, Json], up_to: int | None = None) -> list[tuple[int, list[Rescued]]]:
    """Return the values that a sink rescued itself, by epoch, oldest first; `up_to`: none of later epochs."""
    found = [(int(epoch), [Rescued.from_json(one) for one in values]) for epoch, values in own.get("rescued", ())]
    return found if up_to is None else [one for one in found if one[0] <= up_to]


def add_epoch(known: Rescues, epoch: int, found: Sequence[Rescued]) -> Rescues:
    """Return the counts with those of an epoch; the oldest epochs are counted together, so that a head stays small."""
    counts = [one for one in known if one[0] < epoch] + ([(epoch, list(found))] if found else [])
    while len(counts) > MAX_EPOCHS:
        (_, old), (since, more) = counts[:2]
        counts[:2] = [(since, add_rescued([*old, *more]))]
    return counts
