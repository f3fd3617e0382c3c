"""Another decoder of `pgoutput`: plain Python, written from the protocol's description, to compare Firnline's with."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

MISSING = object()  # a large value that an update left unchanged

Values = dict[str, str | object | None]


@dataclass(frozen=True, slots=True)
class Change:
    """A change as the server sent it: `I`, `U`, `D` or `T`, values as text."""

    kind: str
    table: str
    new: Values = field(default_factory=dict)
    old: Values = field(default_factory=dict)
    old_is_key: bool = False
    xid: int = 0


@dataclass(slots=True)
class _Cursor:
    data: bytes
    at: int = 1

    def take(self, code: str) -> int:
        size = struct.calcsize(f"!{code}")
        (value,) = struct.unpack_from(f"!{code}", self.data, self.at)
        self.at += size
        return int(value)

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        text, self.at = self.data[self.at : end].decode(), end + 1
        return text

    def letter(self) -> str:
        self.at += 1
        return chr(self.data[self.at - 1])

    def values(self, columns: list[str]) -> Values:
        found: Values = {}
        assert self.take("h") == len(columns)
        for name in columns:
            sign = self.letter()
            if sign == "t":
                size = self.take("i")
                found[name] = self.data[self.at : self.at + size].decode()
                self.at += size
            else:
                found[name] = {"n": None, "u": MISSING}[sign]
        return found


def read_changes(messages: Iterable[bytes]) -> list[Change]:
    """Return the changes of messages, in their order."""
    tables: dict[int, tuple[str, list[str]]] = {}
    found: list[Change] = []
    xid = 0
    for message in messages:
        kind, cursor = chr(message[0]), _Cursor(message)
        if kind == "B":
            cursor.take("q"), cursor.take("q")
            xid = cursor.take("I")
        elif kind == "R":
            number, schema, name = cursor.take("I"), cursor.text(), cursor.text()
            cursor.letter()
            columns = []
            for _ in range(cursor.take("h")):
                cursor.take("b")
                columns.append(cursor.text())
                cursor.take("I"), cursor.take("i")
            tables[number] = (f"{schema}.{name}", columns)
        elif kind == "T":
            count = cursor.take("I")
            cursor.take("b")
            found += [Change("T", tables[cursor.take("I")][0], xid=xid) for _ in range(count)]
        elif kind in "IUD":
            table, columns = tables[cursor.take("I")]
            sign, old, old_is_key = cursor.letter(), Values(), False
            if sign in "KO":
                old, old_is_key = cursor.values(columns), sign == "K"
                sign = cursor.letter() if kind == "U" else ""
            new = cursor.values(columns) if sign == "N" else {}
            found.append(Change(kind, table, new, old, old_is_key, xid))
        else:
            assert kind in "CYO", kind
            continue
        assert kind in "BR" or cursor.at == len(message)
    return found
