"""Positions of a Delta source that a person chooses: a version, the beginning or the end. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from firnline.errors import ConfigError, DamagedError
from firnline.sources.base import PositionChange
from firnline.sources.delta.position import DeltaPosition

WORDS = "Write the number of a version, which counts as read with all before it; or beginning, or end."


def parse(source: str, words: str, at: DeltaPosition, newest: int) -> DeltaPosition | None:
    """Return the position that `words` ask for; None: all rows that the table has now.

    Raises:
        ConfigError: they mean nothing, or the table has no such version.
    """
    if words.lstrip().startswith("{"):
        try:
            after = DeltaPosition.from_json(json.loads(words))
        except (ValueError, DamagedError) as error:
            message = error.message if isinstance(error, DamagedError) else str(error)
            hint = "`firnline position show --json` prints the position as it is. " + WORDS
            raise ConfigError(f"source {source!r}: this is no position of it: {message}", hint=hint) from error
        if (after.table, after.id) != (at.table, at.id):
            raise ConfigError(
                f"source {source!r} reads {at.table} with the id {at.id}, and the position names {after.table} with "
                f"the id {after.id}",
                hint=WORDS,
            )
        _check_version(source, after.reached, newest)
        return after
    if words == "beginning":
        return None
    if words != "end" and not words.removeprefix("-").isdecimal():
        raise ConfigError(f"source {source!r} has no position {words!r}", hint=WORDS)
    version = newest if words == "end" else int(words)
    _check_version(source, version, newest)
    return after_version(at, version)


def after_version(at: DeltaPosition, version: int) -> DeltaPosition:
    """Return the position behind a version, with what `at` remembers."""
    return DeltaPosition(at.table, at.id, version, since=min(at.since, version), ignored=at.ignored, trail=at.trail)


def _check_version(source: str, version: int, newest: int) -> None:
    if not -1 <= version <= newest:
        raise ConfigError(
            f"source {source!r}: the table has no version {version}; the newest is {newest}",
            hint=WORDS,
        )


def compare(
    before: DeltaPosition, after: DeltaPosition, old: Mapping[int, int], new: Mapping[int, int]
) -> PositionChange:
    """Return the change between two positions: `old` and `new` have the unread files of each version, by position."""
    again = {number: files - old.get(number, 0) for number, files in new.items() if files > old.get(number, 0)}
    never = {number: files - new.get(number, 0) for number, files in old.items() if files > new.get(number, 0)}
    if replace(after, trail=before.trail) == before:
        again, never = {}, {}
    return PositionChange(
        after.to_json(),
        tuple(f"version {number}" for number in sorted(again)),
        tuple(f"version {number}" for number in sorted(never)),
        sum(again.values()),
        sum(never.values()),
        unit="file",
    )
