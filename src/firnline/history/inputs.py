"""The input of a pipeline, source by source: position, backlog, and how it differs from what was read. Read-only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from firnline.errors import AccessError, ConfigError, LedgerHoleError, SourceError
from firnline.history.schemas import in_force, load_schema_history, silent_facts
from firnline.history.snapshots import load_progress
from firnline.run.ledger_files import LedgerFiles
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.base import LogLag, PositionView, Source
from firnline.sources.cdc.log import UNREADABLE
from firnline.sources.known import KnownFiles
from firnline.types import Json

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SourceInput:
    """The input of one source. The counts are valid unless `error` says why the source cannot be listed."""

    name: str
    location: str
    view: PositionView
    files: int = 0  # that wait to be read, late ones included
    size_bytes: int = 0
    grown: int = 0
    changed: int = 0
    incomplete: int = 0
    log: LogLag | None = None  # of a source that reads the log of a server
    schemas: list[dict[str, Json]] = field(default_factory=list)  # of its tables, as they are in force
    silent: list[dict[str, Json]] = field(default_factory=list)  # changes of rows that the log does not have
    snapshots: list[dict[str, Json]] = field(default_factory=list)  # of its tables: how far their rows have been read
    unread: list[str] = field(default_factory=list)  # tables whose rows are still to be read
    unreadable: list[dict[str, Json]] = field(default_factory=list)  # those of them that cannot be, with the reason
    error: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the source as `status` shows it."""
        listed = self.error is None
        return {
            "name": self.name,
            "location": self.location,
            "position": self.view.facts,
            "files_in_progress": len(self.view.in_progress),
            "files_set_aside": len(self.view.set_aside),
            "files_outstanding": self.files if listed else None,
            "bytes_outstanding": self.size_bytes if listed else None,
            "log": self.log.to_json() if self.log is not None else None,
            "schemas": self.schemas,
            "silent_changes": self.silent,
            "snapshots": self.snapshots,
            "unread_tables": self.unread,
            "unreadable_tables": self.unreadable,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input of all sources."""

    sources: list[SourceInput] = field(default_factory=list)

    def total(self, count: str) -> int | None:
        """Return the sum of a count over all sources; None if a source cannot be listed."""
        if any(source.error is not None for source in self.sources):
            return None
        return sum(int(getattr(source, count)) for source in self.sources)

    def set_aside(self, limit: int) -> list[dict[str, Json]]:
        """Return the first files that are set aside, with their reasons."""
        rows = [
            {"source": source.name, "path": path, "reason": reason}
            for source in self.sources
            for path, reason in source.view.set_aside.items()
        ]
        return rows[:limit]


def load_inputs(pipeline: OpenPipeline, head: Head) -> Inputs:
    """Compare the input of every source with what was read. A source that cannot be listed hides no other one."""
    held = head.checkpoint.positions if head.checkpoint else {}
    described = pipeline.sources.describe(held)
    found = [
        SourceInput(source.name, source.location, described.get(source.name) or PositionView({}, by_input=True))
        for source in pipeline.sources
    ]
    _add_schemas(pipeline, head, found)
    _add_snapshots(pipeline, head, found)
    with contextlib.closing(LedgerFiles(pipeline)) as ledger:
        try:
            known: Mapping[str, KnownFiles] | None = ledger.load(head.entry)
        except LedgerHoleError:  # `ledger_hole` says so; what is late or has grown is unknown behind it
            known = None
        for source, one in zip(pipeline.sources, found, strict=True):
            try:
                position = held.get(source.name) or source.start(None)
                if source.has_log:  # what the check refuses does not hide it
                    one.log = source.log_lag(position)
                    _add_unread(source, position, one)
                _check(source)
                _count(source, position, known, one)
            except (OSError, SourceError, ConfigError, AccessError) as error:
                logger.warning("the source cannot be listed", extra={"reason": str(error)})
                one.error = str(error)
    return Inputs(found)


def _add_unread(source: Source, position: Json, found: SourceInput) -> None:
    """Add the tables whose rows are still to be read; none if the server does not say, since the check tells why."""
    try:
        unread = source.find_unread(position)
    except (SourceError, ConfigError):
        return
    found.unread = list(unread)
    found.unreadable = [
        {"table": table, "reason": why.message, "hint": why.hint} for table, why in unread.items() if why is not None
    ]


def _check(source: Source) -> None:
    """Check a source, apart from rights to single tables: the others can be read."""
    try:
        source.check()
    except ConfigError as error:
        if UNREADABLE not in error.fields:
            raise


def _add_schemas(pipeline: OpenPipeline, head: Head, found: list[SourceInput]) -> None:
    """Add the schemas in force to sources that capture tables."""
    if not any(source.has_log for source in pipeline.sources):
        return
    try:
        current = in_force(load_schema_history(pipeline), head.epoch)
        silent = silent_facts(pipeline)
    except LedgerHoleError:
        return
    for source, one in zip(pipeline.sources, found, strict=True):
        one.schemas = [
            {"table": known.version.table, "version": known.number, "fingerprint": known.version.fingerprint}
            for known in current
            if known.source == one.name and source.table_name(known.version.table)  # the spec names it
        ]
        one.silent = silent.get(one.name, [])


def _add_snapshots(pipeline: OpenPipeline, head: Head, found: list[SourceInput]) -> None:
    """Add how far the tables have been read to sources that capture them."""
    if not any(source.has_log for source in pipeline.sources):
        return
    by_name = {one.name: one for one in found}
    for progress in load_progress(pipeline, head):
        facts = progress.to_json()
        by_name[facts.pop("source")].snapshots.append(facts)


def _count(source: Source, position: Json, known: Mapping[str, KnownFiles] | None, found: SourceInput) -> None:
    after = source.backlog(position)
    found.files, found.size_bytes = after.files_outstanding, after.bytes_outstanding
    if known is None or source.reconcile_interval_secs is None:
        return
    compared = source.find_late(position, known[source.name])
    if source.late_files != "ignore":
        found.files, found.size_bytes = found.files + compared.late_count, found.size_bytes + compared.late_bytes
    found.files, found.size_bytes = found.files + compared.rest, found.size_bytes + compared.rest_bytes
    found.grown, found.changed = len(compared.grown), len(compared.changed)
    found.incomplete = compared.incomplete
