"""Positions of a file source that a person chooses: a mark, the beginning or the end; a file to skip. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from firnline.errors import ConfigError, DamagedError
from firnline.sources.base import PositionChange, processed_record
from firnline.sources.files.planning import DONE
from firnline.sources.files.position import FileState, Progress, full_name
from firnline.storage import FileStat
from firnline.types import Json

WORDS = (
    "Write the name of a file, full or below the source's folder: it counts as read with all names before it, and "
    "every later one is read; or beginning, or end."
)
SKIPPED = "skipped by firnline position"


def choose(source: str, before: FileState, words: str, listed: Sequence[FileStat]) -> PositionChange:
    """Return the position that `words` ask for; `listed` has all files, in order.

    Raises:
        ConfigError: they mean nothing.
    """
    if words.lstrip().startswith("{"):
        after = _from_json(source, before, words)
    elif words == "beginning":
        after = _after(before, before.start_after)
    elif words == "end":
        after = _after(before, max((stat.name for stat in listed), key=str.encode, default=before.mark))
    else:
        mark = full_name(words, before.root)
        if not mark.startswith(f"{before.root}/"):
            raise ConfigError(f"source {source!r} reads {before.root}, and {words} is not in it", hint=WORDS)
        after = _after(before, mark)
    return _change(before, after, listed)


def skip(source: str, before: FileState, words: str, listed: Sequence[FileStat]) -> PositionChange:
    """Return the position that passes over one file. Raises like `choose`."""
    path = full_name(words, before.root)
    if path in before.set_aside:
        raise ConfigError(
            f"{path} is set aside: {before.set_aside[path].reason}", hint=f"Give it up: firnline files --drop {path}"
        )
    if path not in before.files and all(stat.name != path for stat in listed):
        raise ConfigError(
            f"source {source!r} has no file {path}", hint="List what there is: firnline files --status pending"
        )
    if before.knows(path):
        return PositionChange(before.to_json())
    # The mark passes no file that is not named: those before this one are named as begun, and none of them is lost.
    files = dict(before.files)
    for stat in listed:
        if stat.name.encode() < path.encode() and not before.knows(stat.name):
            files.setdefault(stat.name, Progress(size_bytes=stat.size_bytes, etag=stat.etag))
    after = replace(before, files={**files, path: DONE}).prune_finished()
    return _change(before, after, [stat for stat in listed if stat.name == path])


def _after(before: FileState, mark: str | None) -> FileState:
    """Return the position with this mark and nothing in progress. Files set aside below the mark stay set aside."""
    after = replace(before, mark=mark, files={})
    return replace(
        after, set_aside={path: one for path, one in before.set_aside.items() if not after.is_after_mark(path)}
    )


def _from_json(source: str, before: FileState, words: str) -> FileState:
    try:
        after = FileState.from_json(json.loads(words))
    except (ValueError, DamagedError) as error:
        message = error.message if isinstance(error, DamagedError) else str(error)
        hint = "`firnline position show --json` prints the position as it is. " + WORDS
        raise ConfigError(f"source {source!r}: this is no position of it: {message}", hint=hint) from error
    if after.root != before.root:
        raise ConfigError(
            f"source {source!r} reads {before.root}, and the position names {after.root}",
            hint="If the same files moved, run once with --source-moved OLD=NEW.",
        )
    return replace(after, answered=before.answered, former_roots=before.former_roots)


def _change(before: FileState, after: FileState, listed: Sequence[FileStat]) -> PositionChange:
    """Compare what was read with what will count as read, file by file.

    A file that is never read gets an input record: otherwise a search for late files would find it.
    """
    again: list[str] = []
    never: list[str] = []
    records: list[dict[str, Json]] = []
    for stat in listed:
        path = stat.name
        begun = before.files.get(path) or before.set_aside.get(path)
        records_read = begun.records if begun is not None else 0
        was_read = before.knows(path) and path not in before.set_aside
        will_be = after.knows(path) and path not in after.set_aside
        is_same = (after.files.get(path), after.set_aside.get(path)) == (
            before.files.get(path),
            before.set_aside.get(path),
        )
        if not will_be and (was_read or (records_read and not is_same)):
            again.append(path)
        elif not was_read and will_be:
            never.append(f"{path}, after record {records_read}" if records_read else path)
            records.append(
                {
                    **processed_record(stat),
                    "from": records_read,
                    "to": records_read,
                    "status": "dropped",
                    "reason": SKIPPED,
                }
            )
    return PositionChange(
        after.to_json(), tuple(again), tuple(never), len(again), len(never), unit="file", records=tuple(records)
    )
