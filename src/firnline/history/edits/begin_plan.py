"""Plans what `firnline run` does before it runs: a fresh start, or the restore of a savepoint. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote

from firnline.errors import ConfigError, LedgerHoleError, SourceError
from firnline.history.edits.fresh_start import find_fresh_start
from firnline.history.edits.restore import plan_restore
from firnline.names import JOURNAL
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Sink
from firnline.sinks.delta.contents import list_contents
from firnline.sinks.delta.sink import as_delta
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What happens to one table. None: the number is not known."""

    name: str
    table: str
    rows_now: int | None
    rows_removed: int | None
    rows_restored: int | None
    rows_twice: int | None  # rows that stay, although their input is read again


@dataclass(frozen=True, slots=True)
class BeginPlan:
    """What happens before the run."""

    kind: str  # fresh-start or restore
    already: bool  # an earlier attempt of the same command did it
    from_epoch: int
    to_epoch: int  # 0: before the first
    tables: list[TablePlan]
    files_again: int | None  # the input that the run then finds: what was read before, and what is new
    bytes_again: int | None
    records_again: int | None  # of the input that was read before


def plan_fresh_start(pipeline: OpenPipeline, after_epoch: int, *, truncate: bool) -> BeginPlan:
    """Plan a fresh start.

    Raises:
        RollbackRefusedError: the table does not hold exactly that epoch, and was not started over after it.
    """
    done = find_fresh_start(pipeline, after_epoch)
    if done is not None:
        return BeginPlan("fresh-start", True, after_epoch, 0, [], None, None, None)
    upserts = {sink.name for sink in pipeline.options.sinks if getattr(sink, "write", None) == "upsert"}
    records = _records_read(pipeline)
    tables = []
    for sink in pipeline.sinks:
        if sink.name == JOURNAL:
            continue
        files = _files_of(sink)
        rows = None if files is None else sum(files.values())
        twice = 0 if truncate or sink.name in upserts else rows
        tables.append(TablePlan(sink.name, _location(sink), rows, rows if truncate else 0, 0, twice))
    found = _count_input(pipeline, {})
    return BeginPlan("fresh-start", False, after_epoch, 0, tables, *found, records)


def plan_from_savepoint(
    pipeline: OpenPipeline, path: str, storage_options: dict[str, str] | None, accept: Collection[str]
) -> BeginPlan:
    """Plan the restore of a savepoint, with every check that the restore makes before it changes anything.

    Raises:
        ConfigError: there is no savepoint.
        DamagedError: the savepoint, or a file of it, differs from what was saved.
        RollbackRefusedError: it does not fit this pipeline, files are gone, or rows of others would be lost.
    """
    planned = plan_restore(pipeline, path, storage_options, accept)
    if planned.already:
        return BeginPlan("restore", True, planned.from_epoch, planned.to_epoch, [], None, None, None)
    tables = []
    for plan in planned.sinks:
        if plan.sink.name == JOURNAL:
            continue
        now = _files_of(plan.sink) or {}
        then = {file.path: file.rows or 0 for file in plan.saved.files}
        kept = now.keys() & then.keys() if plan.version is not None else set()
        removed = sum(rows for name, rows in now.items() if name not in kept)
        restored = sum(rows for name, rows in then.items() if name not in kept)
        tables.append(TablePlan(plan.sink.name, plan.sink.table.uri, sum(now.values()), removed, restored, 0))
    found = _count_input(pipeline, planned.positions)
    return BeginPlan("restore", False, planned.from_epoch, planned.to_epoch, tables, *found, None)


def _files_of(sink: Sink) -> dict[str, int] | None:
    """Return the rows of each data file of a table; None if it is no Delta table."""
    try:
        table = as_delta(sink).table
    except ConfigError:
        return None
    if not table.refresh():
        return {}
    return {unquote(file.path): file.rows or 0 for file in list_contents(table.delta)}


def _location(sink: Sink) -> str:
    return sink.storage.root if sink.storage is not None else sink.name


def _records_read(pipeline: OpenPipeline) -> int | None:
    """Count the records of all input that the history names; None if a part of the ledger is lost."""
    try:
        return sum(
            int(record.get("to", 0)) - int(record.get("from", 0))
            for link in pipeline.ledger.chain(pipeline.deciding.load().entry)
            for records in link.inputs.values()
            for record in records
        )
    except LedgerHoleError:
        return None


def _count_input(pipeline: OpenPipeline, stored: dict[str, Json]) -> tuple[int | None, int | None]:
    """Count the input after some positions; None if it cannot be counted now."""
    try:
        backlog = pipeline.sources.backlog(pipeline.sources.start(stored))
    except (SourceError, OSError):
        return None, None
    return backlog.files_outstanding, backlog.bytes_outstanding
