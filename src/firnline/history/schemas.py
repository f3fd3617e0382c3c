"""The schema history of a pipeline: every schema of a captured table, and from which epoch on it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from firnline.checkpoint.ledger import Fold
from firnline.errors import ConfigError
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.read_again import HistoryPart
from firnline.sources.cdc.chunks import sees_epoch
from firnline.sources.cdc.schemas import SILENT, VERSIONS, SchemaVersion, SilentChange
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class RecordedSchema:
    """A schema, and the epoch whose commit recorded it."""

    source: str
    number: int  # of the versions of its table, from 1
    epoch: int
    version: SchemaVersion

    def to_json(self) -> dict[str, Json]:
        at = self.version.committed_at
        return {
            "source": self.source,
            "table": self.version.table,
            "version": self.number,
            "fingerprint": self.version.fingerprint,
            "epoch": self.epoch,
            "position": self.version.position,
            "committed_at": datetime.fromtimestamp(at / 1e6, UTC).isoformat() if at else None,
            "columns": [one.to_json() for one in self.version.columns],
        }


def load_schema_history(pipeline: OpenPipeline, table: str = "", source: str = "") -> list[RecordedSchema]:
    """Return the schemas of captured tables, oldest first; those of epochs that a rollback undid are left out.

    Args:
        pipeline: Nothing in it is changed.
        table: Only this table, with or without its schema; empty: all of them.
        source: Only this source; empty: all of them.
    """
    counts: dict[tuple[str, str], int] = {}
    found = []
    for epoch, name, version in reversed(list(_recorded(pipeline))):
        key = (name, version.table)
        counts[key] = counts.get(key, 0) + 1
        if table in ("", version.table, version.table.partition(".")[2]) and source in ("", name):
            found.append(RecordedSchema(name, counts[key], epoch, version))
    return found


def find_silent_changes(pipeline: OpenPipeline) -> list[tuple[int, str, SilentChange]]:
    """Return epoch, source and change of captured rows that changed without being in the log, oldest first.

    Of servers that log statements, what these statements did; of others, what a new schema may mean. What came before
    the last snapshot of the whole table, or in the epoch where that began, is left out: that has read all rows again.
    """
    found: list[tuple[int, str, SilentChange]] = []
    read_again: dict[tuple[str, str], int] = {}  # by source and table: the last epoch that the last snapshot sees
    for epoch, source, record in _records(pipeline):
        found += [(epoch, source, SilentChange.from_json(value)) for value in reversed(record.get(SILENT) or [])]
        if "begins" in record and not record["begins"]["where"]:
            last = epoch if sees_epoch(record["begins"]) else epoch - 1
            read_again.setdefault((source, str(record["begins"]["table"])), last)
    known = [one for one in found if one[0] > read_again.get((one[1], one[2].table), 0)]
    return sorted(known, key=lambda one: one[0])


def change_facts(epoch: int, change: SilentChange) -> dict[str, Json]:
    """Return a change of rows that the log does not have, as `status` shows it."""
    return {"epoch": epoch, **change.to_json(), "command": "" if change.asked else change.command}


def _recorded(pipeline: OpenPipeline) -> Iterator[tuple[int, str, SchemaVersion]]:
    """Yield epoch, source and version, newest first."""
    for epoch, source, record in _records(pipeline):
        for value in reversed(record.get(VERSIONS) or []):
            yield epoch, source, SchemaVersion.from_json(value)


def _records(pipeline: OpenPipeline) -> Iterator[tuple[int, str, Mapping[str, Json]]]:
    """Yield epoch, source and input record, newest first; those that a rollback undid are left out."""
    edits = []
    for link in pipeline.ledger.chain(pipeline.load().entry):
        if isinstance(link, Fold) or link.is_history_edit:
            edits.append(link)
        part = HistoryPart.of(link)
        ordered = part.records if isinstance(link, Fold) else list(reversed(part.records))
        for source, record in ordered:
            epoch = int(record["epoch"])
            if any(edit.supersedes(epoch) for edit in edits):
                continue
            yield epoch, source, record


def in_force(history: list[RecordedSchema], epoch: int) -> list[RecordedSchema]:
    """Return the schemas that were in force after an epoch, by source and table."""
    newest: dict[tuple[str, str], RecordedSchema] = {}
    for one in history:
        if one.epoch <= epoch:
            newest[(one.source, one.version.table)] = one
    return [newest[key] for key in sorted(newest)]


def epoch_at(history: list[RecordedSchema], position: str) -> int:
    """Return the epoch of the last version that begins at or before a place in the log, in the database's words.

    Raises:
        ConfigError: no version begins there or before it.
    """
    wanted = _order(position)
    before = [one.epoch for one in history if _order(one.version.position) <= wanted]
    if not before:
        raise ConfigError(
            f"no schema was in force at {position}",
            hint="Positions are written as in the listing: firnline schema-history.",
        )
    return max(before)


def _order(position: str) -> tuple[int, ...]:
    """Return what orders places of one log: hexadecimal parts of PostgreSQL, file and position of MySQL."""
    try:
        if "/" in position:
            high, _, low = position.partition("/")
            return (int(high, 16), int(low, 16))
        file, _, place = position.rpartition(":")
        return (int(file.rpartition(".")[2]), int(place))
    except ValueError:
        raise ConfigError(
            f"{position!r} is no place in a log that can be compared",
            hint="Write it as the listing does: 0/16B3748 (PostgreSQL) or binlog.000002:4711 (MySQL).",
        ) from None


def describe_change(before: SchemaVersion | None, after: SchemaVersion) -> list[str]:
    """Return what a version changed, column by column."""
    if before is None:
        return [f"{len(after.columns)} columns"]
    old, new = {one.name: one for one in before.columns}, {one.name: one for one in after.columns}
    told = [f"+ {name} {one.native}" for name, one in new.items() if name not in old]
    told += [f"- {name} {one.native}" for name, one in old.items() if name not in new]
    for name in (name for name in new if name in old):
        if old[name].native != new[name].native:
            told.append(f"~ {name} {old[name].native} -> {new[name].native}")
        if old[name].is_key != new[name].is_key:
            told.append(f"~ {name} {'enters' if new[name].is_key else 'leaves'} the key")
    return told or ["the order of the columns"]
