"""Delta's durations, as table properties spell them: `interval 7 days`, `interval 1 week 2 hours`."""

from __future__ import annotations

import re
from datetime import timedelta

from firnline.errors import SinkError
from firnline.sinks.delta.table import Table

TRANSACTIONS = "delta.setTransactionRetentionDuration"
DELETED_FILES = "delta.deletedFileRetentionDuration"
DELETED_FILES_DEFAULT = timedelta(days=7)

_UNITS = {
    "nanosecond": timedelta(0),
    "microsecond": timedelta(microseconds=1),
    "millisecond": timedelta(milliseconds=1),
    "second": timedelta(seconds=1),
    "minute": timedelta(minutes=1),
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(weeks=1),
}
_PART = re.compile(rf"\s*(\d+)\s+({'|'.join(_UNITS)})s?\b")


def parse_interval(text: str) -> timedelta:
    """Read a duration; ValueError when it is none."""
    rest = text.strip().lower().removeprefix("interval")
    total, at = timedelta(0), 0
    while found := _PART.match(rest, at):
        total += int(found[1]) * _UNITS[found[2]]
        at = found.end()
    if not at or rest[at:].strip():
        raise ValueError(f"{text!r} is not an interval")
    return total


def find_interval(table: Table, key: str) -> timedelta | None:
    """A duration among the table's properties; None when it is not set.

    Raises:
        SinkError: it is set to something that cannot be read, so nothing can be built on it.
    """
    text = table.setting(key)
    try:
        return None if text is None else parse_interval(text)
    except ValueError as error:
        raise SinkError(f"the property {key} of {table.uri} is {error}") from error
