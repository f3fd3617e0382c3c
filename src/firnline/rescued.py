"""Counts of rescued values: those that do not fit their column and go to `_rescued_data`, by column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from firnline.types import Json

UNKNOWN_FIELDS = "(unknown fields)"  # fields that are no columns; no column can have this name
OTHER_COLUMNS = "(other columns)"
MAX_COLUMNS = 100  # counted one by one in an epoch; the others are counted together
MAX_TEXT = 80  # of the first value, as shown


@dataclass(frozen=True, slots=True)
class Rescued:
    """The values of one column that were rescued, and the first of them."""

    column: str
    values: int
    expected: str = ""  # the type of the column
    first: str = ""  # the first value as JSON text, cut if it is long
    file: str = ""  # the input of the first value
    line: int | None = None
    source: str = ""  # the port of the source
    table: str = ""  # the captured table, with its schema; empty for other sources
    wider: Mapping[str, int] = field(default_factory=dict)  # by type: values that a column of that type would hold

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON, for the driver and the ledger."""
        return {
            "source": self.source,
            **({"table": self.table} if self.table else {}),
            "column": self.column,
            "values": self.values,
            "expected": self.expected,
            "first": self.first,
            "file": self.file,
            "line": self.line,
            **({"wider": dict(self.wider)} if self.wider else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Rescued:
        """Parse the output of `to_json`."""
        line = value.get("line")
        return cls(
            column=str(value["column"]),
            values=int(value["values"]),
            expected=str(value.get("expected", "")),
            first=str(value.get("first", "")),
            file=str(value.get("file", "")),
            line=None if line is None else int(line),
            source=str(value.get("source", "")),
            table=str(value.get("table", "")),
            wider=dict(value.get("wider", {})),
        )

    @property
    def name(self) -> str:
        """The column, behind its table if it is one of a database: `shop.orders.due`."""
        return f"{self.table}.{self.column}" if self.table else self.column

    def text(self) -> str:
        """Return `1,000 values of price (expected int64, first: in/b.json line 1: 1.5)`."""
        count = f"{self.values:,} {'value' if self.values == 1 else 'values'}"
        of = {UNKNOWN_FIELDS: "unknown fields", OTHER_COLUMNS: "other columns"}.get(self.column, self.name)
        line = f" line {self.line}" if self.line is not None else ""
        place = f"{self.file}{line}: " if self.file else ""
        first = f"first: {place}{self.first}" if self.first else ""
        facts = ", ".join(([f"expected {self.expected}"] if self.expected else []) + ([first] if first else []))
        return f"{count} of {of} ({facts})" if facts else f"{count} of {of}"


def shorten(text: str) -> str:
    """Return a value's text, cut to a length that fits a message."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def add_rescued(found: Iterable[Rescued]) -> list[Rescued]:
    """Add up counts by source, table and column, in the order of their first values; at most `MAX_COLUMNS` columns."""
    totals: dict[tuple[str, str, str], Rescued] = {}
    for one in found:
        key = (one.source, one.table, one.column)
        if key not in totals and len(totals) >= MAX_COLUMNS:
            key = ("", "", OTHER_COLUMNS)
            one = Rescued(OTHER_COLUMNS, one.values)
        before = totals.get(key)
        if before is not None:
            wider = dict(Counter(before.wider) + Counter(one.wider))
            one = replace(before, values=before.values + one.values, wider=wider)
        totals[key] = one
    return list(totals.values())
