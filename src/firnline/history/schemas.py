"""The schema history of a pipeline: every schema of a captured table, and the columns that epochs added to sinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Literal

from firnline.checkpoint.ledger import Fold
from firnline.errors import ConfigError, SourceError
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.read_again import HistoryPart
from firnline.sources.base import Source
from firnline.sources.cdc.chunks import sees_epoch
from firnline.sources.cdc.schemas import SILENT, VERSIONS, SchemaVersion, SilentChange, TableState
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class RecordedSchema:
    """A schema, and the epoch whose commit recorded it."""

    source: str
    number: int  # of the versions of its table, from 1
    epoch: int
    version: SchemaVersion
    left_in: int | None = None  # the epoch in which the spec no longer named the table, or another one took its name
    changed: tuple[str, ...] = ()  # what is other than in the version before, column by column

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
            "changed": list(self.changed),
            "columns": [one.to_json() for one in self.version.columns],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> RecordedSchema:
        """Parse the output of `to_json`."""
        at = value["committed_at"]
        micros = round(datetime.fromisoformat(at).timestamp() * 1e6) if at else 0
        version = SchemaVersion.from_json({**value, "committed_at": micros})
        changed = tuple(value.get("changed", ()))
        return cls(str(value["source"]), int(value["version"]), int(value["epoch"]), version, changed=changed)


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """The columns that rows of an epoch had for a sink, and rows before had not."""

    epoch: int
    sink: str
    created_at: str
    added: dict[str, Json]  # name -> type
    changed: dict[str, list[Json]]  # name -> the type before, and the type since


def load_column_changes(pipeline: OpenPipeline, epochs: int) -> list[ColumnChange]:
    """Return the changes of columns within the newest epochs, newest first; what the oldest of them has is no change.

    A history edit, such as a rollback, begins anew with the columns that the table had then.
    """
    entries = list(islice(pipeline.entries(pipeline.load().entry), epochs))
    known: dict[str, dict[str, Json]] = {}
    found: list[ColumnChange] = []
    for entry in reversed(entries):
        if entry.is_history_edit:
            known = {pipeline.deciding.name: {str(one["name"]): one["type"] for one in entry.schema}}
        for sink in (name for name, files in entry.staged.items() if files):
            columns = {str(one["name"]): one["type"] for one in entry.schema_of(sink)}
            before = known.get(sink)
            known[sink] = {**(before or {}), **columns}
            if before is None:
                continue
            added = {name: kind for name, kind in columns.items() if name not in before}
            changed = {name: [before[name], kind] for name, kind in columns.items() if before.get(name, kind) != kind}
            if added or changed:
                found.append(ColumnChange(entry.epoch, sink, entry.checkpoint.created_at, added, changed))
    return found[::-1]


def load_schema_history(pipeline: OpenPipeline, table: str = "", source: str = "") -> list[RecordedSchema]:
    """Return the schemas of captured tables, oldest first; those of epochs that a rollback undid are left out.

    Args:
        pipeline: Nothing in it is changed.
        table: Only this table, with or without its schema; empty: all of them.
        source: Only this source; empty: all of them.
    """
    newest: dict[tuple[str, str], RecordedSchema] = {}
    left: dict[tuple[str, str], int] = {}  # by source and table: when it was left, after the records so far
    recorded: list[tuple[int, str, SchemaVersion, int | None]] = []
    for epoch, name, record in _records(pipeline):  # newest first
        for value in reversed(record.get(VERSIONS) or []):
            version = SchemaVersion.from_json(value)
            recorded.append((epoch, name, version, left.get((name, version.table))))
        if "left" in record:
            left[(name, str(record["left"]["table"]))] = epoch
    found = []
    for epoch, name, version, left_in in reversed(recorded):
        before = newest.get((name, version.table))
        number, changed = (1, describe_change(None, version))
        if before is not None:
            number, changed = before.number + 1, describe_change(before.version, version)
        one = newest[(name, version.table)] = RecordedSchema(name, number, epoch, version, left_in, tuple(changed))
        if table in ("", version.table, version.table.partition(".")[2]) and source in ("", name):
            found.append(one)
    return found


def find_silent_changes(pipeline: OpenPipeline) -> list[tuple[int, str, SilentChange]]:
    """Return epoch, source and change of captured rows that changed without being in the log, oldest first.

    Of servers that log statements, what these statements did; of others, what a new schema may mean. What came before
    the last snapshot of the whole table, or in the epoch where that began, is left out: that has read all rows again.
    So is what came before a table was left: it is read anew when it is captured again.
    """
    found: list[tuple[int, str, SilentChange]] = []
    read_again: dict[tuple[str, str], int] = {}  # by source and table: the last epoch that the last snapshot sees
    for epoch, source, record in _records(pipeline):
        found += [(epoch, source, SilentChange.from_json(value)) for value in reversed(record.get(SILENT) or [])]
        if "begins" in record and not record["begins"]["where"]:
            last = epoch if sees_epoch(record["begins"]) else epoch - 1
            read_again.setdefault((source, str(record["begins"]["table"])), last)
        if "left" in record:
            read_again.setdefault((source, str(record["left"]["table"])), epoch)
    known = [one for one in found if one[0] > read_again.get((one[1], one[2].table), 0)]
    return sorted(known, key=lambda one: one[0])


def silent_facts(pipeline: OpenPipeline) -> dict[str, list[dict[str, Json]]]:
    """Return, by source, the changes of rows that the log does not have, as `status` shows them, with what mends them:
    asks the server whether a table is there and has a key."""
    changes = find_silent_changes(pipeline)
    found: dict[str, list[dict[str, Json]]] = {}
    for source in pipeline.sources:
        own = [(epoch, change) for epoch, name, change in changes if name == source.name]
        own = [(epoch, change) for epoch, change in own if source.table_name(change.table)]  # the spec names it
        states = _table_states(source) if own else None
        for epoch, change in own:
            state: TableState = "keyed" if states is None else states.get(change.table, "gone")
            way = change.way_out(source.name, state)
            facts = {"epoch": epoch, **change.to_json(), "command": way.command, "way": way.words}
            found.setdefault(source.name, []).append(facts)
    return found


def _table_states(source: Source) -> Mapping[str, Literal["keyed", "unkeyed"]] | None:
    """Return how the server has tables now; None if it does not answer."""
    try:
        return source.table_states()
    except (SourceError, ConfigError):
        return None


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
    found = [newest[key] for key in sorted(newest)]
    return [one for one in found if one.left_in is None or epoch < one.left_in]


def in_force_at(history: list[RecordedSchema], position: str) -> list[RecordedSchema]:
    """Return the schemas that were in force at a place in the log, in the database's words, by source and table.

    Raises:
        ConfigError: no version begins there or before it.
    """
    wanted = _order(position)
    if wanted is None:
        raise ConfigError(
            f"{position!r} is no place in a log that can be compared",
            hint="Write it as the listing does: 0/16B3748 (PostgreSQL) or binlog.000002:4711 (MySQL).",
        )
    orders = ((one, _order(one.version.position)) for one in history)
    # Places of another kind of log are not compared.
    before = [one for one, order in orders if order is not None and order[0] == wanted[0] and order <= wanted]
    if not before:
        raise ConfigError(
            f"no schema was in force at {position}",
            hint="Positions are written as in the listing: firnline schema-history.",
        )
    return in_force(before, max(one.epoch for one in before))


def _order(position: str) -> tuple[str, int, int] | None:
    """Return what orders places of one log: hexadecimal parts of PostgreSQL, file and position of MySQL."""
    try:
        if "/" in position:
            high, _, low = position.partition("/")
            return "lsn", int(high, 16), int(low, 16)
        file, _, place = position.rpartition(":")
        return "file", int(file.rpartition(".")[2]), int(place)
    except ValueError:
        return None


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
        elif old[name].number != new[name].number:
            told.append(f"~ {name} dropped and added again")
        if old[name].is_key != new[name].is_key:
            told.append(f"~ {name} {'enters' if new[name].is_key else 'leaves'} the key")
    return told or ["the order of the columns"]
