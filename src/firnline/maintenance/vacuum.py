"""Deletes files that commits removed longer ago than the table's retention. Files that no log ever named stay.

Like delta-rs' lite mode, with three differences. Ages follow the storage's clock and the log's own files, not this
machine's clock. Pins and units, pending or set aside, keep their files. Deletions are declared in the log first
(`sweeps`), so that no rollback brings back a file that is about to be deleted. `gc` deletes orphans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from firnline.errors import ConfigError, SinkError
from firnline.maintenance.gc import Sweep, Swept, finished_notes
from firnline.maintenance.references import References
from firnline.maintenance.survey import Candidates, Progress, TableFile, is_inside, open_table, storage_now
from firnline.storage import Storage


@dataclass(frozen=True, slots=True)
class VacuumReport:
    """The result of `vacuum`; in a dry run, what it would do."""

    table: str
    dry_run: bool
    version: int
    retention_hours: float
    files: int
    size_bytes: int
    kept: dict[str, int]  # files that stay although a commit removed them, by reason
    stopped: bool = False
    notes: tuple[str, ...] = ()


def vacuum(
    table: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    retention_hours: float | None = None,
    allow_short_retention: bool = False,
    dry_run: bool = False,
    ledgers: Mapping[str, Storage] | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> VacuumReport:
    """Delete removed files whose retention is over.

    Raises:
        ConfigError: `retention_hours` is below the table's retention, without `allow_short_retention`.
        CheckpointError: a unit, an entry or a pin cannot be read, and might name a file; nothing was deleted.
        SinkError: the table or the storage cannot be read or written.
    """
    options = dict(storage_options or {})
    try:
        storage, handle = open_table(table, options)
        now = storage_now(storage)
        sweep = Sweep("vacuum", storage, handle, dry_run, progress, stop)
        sweep.finish_others()
        references = References(storage, handle, options, now, ledgers)
        references.retention = _retention(references.retention, retention_hours, allow_short_retention)
        candidates = _removed(storage, references, now)
        references.apply(candidates)
        sweep.delete_unnamed("data", candidates, references)
    except OSError as error:
        raise SinkError(f"cannot vacuum {table}: {error}", table=table) from error
    done = sweep.kinds.get("data", Swept())
    return VacuumReport(
        table=handle.uri,
        dry_run=dry_run,
        version=handle.version,
        retention_hours=references.retention / timedelta(hours=1),
        files=done.files,
        size_bytes=done.size_bytes,
        kept=dict(candidates.kept),
        stopped=sweep.stopped,
        notes=(*references.notes, *finished_notes(sweep.finished)),
    )


def _retention(of_table: timedelta, hours: float | None, allow_short: bool) -> timedelta:
    if hours is None:
        return of_table
    wanted = timedelta(hours=hours)
    if hours < 0 or (wanted < of_table and not allow_short):
        raise ConfigError(
            f"a retention of {hours:g} h is below the table's own, {of_table / timedelta(hours=1):g} h",
            hint="Readers of older versions may need these files; ask for a short retention expressly if none do.",
        )
    return wanted


def _removed(storage: Storage, references: References, now: datetime) -> Candidates:
    """Return every tombstone whose file still exists."""
    found = Candidates()
    tail = references.log.tail(now, references.retention)
    for key, tombstone in tail.tombstones.items():
        if not is_inside(storage, key):
            continue
        try:
            stat = storage.stat(key)
        except FileNotFoundError:
            continue
        found.files[key] = TableFile(key, stat.size_bytes or tombstone.size_bytes, stat.modified_at)
    return found
