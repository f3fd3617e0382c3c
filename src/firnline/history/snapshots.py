"""The snapshots of captured tables: how far the rows have been read that were there before their changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firnline.errors import ConfigError
from firnline.history.store import on_record
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.base import SnapshotProgress
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class TableProgress:
    """How far the snapshot of a table has come."""

    source: str
    table: str
    snapshot: SnapshotProgress | None  # None: it has not begun
    asked: bool  # somebody asked for another one, or it is due, and it has not begun

    @property
    def state(self) -> str:
        """One of asked, running, done."""
        if self.asked or self.snapshot is None:
            return "asked"
        return "done" if self.snapshot.done else "running"

    def to_json(self) -> dict[str, Json]:
        known = self.snapshot
        return {
            "source": self.source,
            "table": self.table,
            "state": self.state,
            "rows": known.rows if known is not None else 0,
            "estimate": known.estimate or None if known is not None and not known.done else None,
            "chunks": known.chunks if known is not None else 0,
        }


def load_progress(pipeline: OpenPipeline, head: Head | None = None) -> list[TableProgress]:
    """Return the snapshots of all captured tables that have begun or that somebody asked for.

    Args:
        head: What the deciding sink holds, if the caller has read it.
    """
    checkpoint = (head or pipeline.load()).checkpoint
    requests = [request for request in pipeline.requests.load() if request.kind == "snapshot"]
    found: list[TableProgress] = []
    for source in pipeline.sources:
        position = checkpoint.positions.get(source.name) if checkpoint is not None else None
        known = source.snapshots(position) if position is not None else {}
        begun = {one.request for one in known.values()}
        asked = {one.path for one in requests if one.source == source.name and one.id not in begun}
        due = {table for table, one in known.items() if one.is_due}
        for table in sorted({*known, *asked}):
            found.append(TableProgress(source.name, table, known.get(table), table in asked or table in due))
    return found


def ask_snapshot(pipeline: OpenPipeline, source: str, table: str, *, where: str = "", empties: bool = False) -> None:
    """Ask the run that is alive, or the next one, to read a table again, and record it in the audit trail.

    Raises:
        SinkError: the trail cannot be written; then nothing is asked for.
    """
    run, newest = pipeline.ids.new(), pipeline.load().epoch
    facts: dict[str, Json] = {"source": source, "table": table, "where": where, "empty": empties}
    with on_record(pipeline, "snapshot", run, from_epoch=newest, to_epoch=None, **facts):
        pipeline.requests.ask_snapshot(table, source, where=where, empties=empties, ids=pipeline.ids)


def find_readable(
    pipeline: OpenPipeline, table: str, source: str = "", option: Callable[[str], str] = "--source {}".format
) -> tuple[str, str]:
    """Return the name of the source that captures a table which can be read again, and the table's full name.

    Raises:
        ConfigError: none does, or several do; or the server does not have the table, or its rows would come twice.
        SourceError: the server does not answer.
    """
    owner, name = find_table(pipeline, table, source, option)
    pipeline.sources[owner].check_snapshot(name)
    return owner, name


def find_table(
    pipeline: OpenPipeline, table: str, source: str = "", option: Callable[[str], str] = "--source {}".format
) -> tuple[str, str]:
    """Return the name of the source that captures a table, and the table's full name.

    Args:
        option: How a person names one of several sources; gets its name.

    Raises:
        ConfigError: none does, or several do.
    """
    found = [
        (one.name, name)
        for one in pipeline.sources
        if source in ("", one.name) and (name := one.table_name(table)) is not None
    ]
    if not found:
        raise ConfigError(
            f"no source captures the table {table}",
            hint="Add it to `tables` of a source. firnline snapshot lists the tables that have been read.",
        )
    if len(found) > 1:
        raise ConfigError(f"several sources capture the table {table}", hint=f"Name one: {option(found[0][0])}")
    return found[0]
