"""What going back, or a restore, means for one sink: versions, files and rows, and what stands in the way."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import unquote

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import RollbackRefusedError, SinkError
from firnline.run.edit_entries import version_of
from firnline.sinks.delta import DeltaSink
from firnline.sinks.delta.history_edit import TableFiles, find_strangers, read_files
from firnline.sinks.delta.sweeps import SweepLog
from firnline.storage import Storage

NAMED = 3
_READERS = 16


@dataclass(frozen=True, slots=True)
class SinkReturn:
    """One sink's part of a rollback. Without `version_then` its rows stay as they are."""

    name: str
    table: str
    epoch: int
    version_now: int | None
    version_then: int | None = None
    files_removed: int = 0
    rows_removed: int = 0
    files_restored: int = 0
    rows_restored: int = 0
    columns_removed: list[str] = field(default_factory=list)
    properties_changed: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # who else changed rows since
    left: bool = False
    restored: tuple[str, ...] = ()  # the files that come back


def plan_sink(
    sink: DeltaSink, pipeline: str, to: int, *, left: bool, accept: Collection[str]
) -> tuple[SinkReturn, list[RollbackRefusedError]]:
    """Look at one sink, under the version that it is at; reads the log and looks files up, opens no data file."""
    table = sink.table
    try:
        exists = table.refresh()
    except SinkError as error:
        problem = RollbackRefusedError(f"{sink.name} cannot be read: {error.message}", hint=_leave_hint(sink))
        return SinkReturn(sink.name, table.uri, 0, None, left=left), [] if left else [problem]
    epoch = sink.find_holder()[0] if exists else 0
    unchanged = SinkReturn(sink.name, table.uri, epoch, table.version if exists else None, left=left)
    if left or epoch <= to:
        return unchanged, []
    try:
        version = version_of(sink, pipeline, to)
        now, then = read_files(table), read_files(table, version)
        strangers = find_strangers(sink.log, pipeline, version, table.version)
    except RollbackRefusedError as error:
        return unchanged, [error]
    removed, restored = now.rows.keys() - then.rows.keys(), then.rows.keys() - now.rows.keys()
    plan = SinkReturn(
        name=sink.name,
        table=table.uri,
        epoch=epoch,
        version_now=table.version,
        version_then=version,
        files_removed=len(removed),
        rows_removed=sum(now.rows[path] for path in removed),
        files_restored=len(restored),
        rows_restored=sum(then.rows[path] for path in restored),
        columns_removed=[name for name in now.schema.names if name not in then.schema.names],
        properties_changed=_changed(now, then),
        others=[f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in strangers],
        restored=tuple(sorted(restored)),
    )
    problems = []
    if now.properties.get("delta.appendOnly", "false").lower() == "true":
        problems.append(
            RollbackRefusedError(
                f"{sink.name}: the table is append-only, and rows would be removed",
                hint="Set its property delta.appendOnly to false, if that may be.",
            )
        )
    doomed = find_doomed(sink, restored, f"of version {version}")
    missing = find_missing(sink.storage, restored)  # after the look at sweeps: what one has ended is gone by now
    if doomed is not None:
        problems.append(doomed)
    elif missing:
        problems.append(
            RollbackRefusedError(
                f"{sink.name}: {len(missing)} file(s) of version {version} are vacuumed: {', '.join(missing[:NAMED])}",
                hint="Go back less far, or restore a savepoint: `firnline savepoint list`.",
            )
        )
    unaccepted = [s for s in strangers if s.name not in accept]
    if unaccepted:
        names = ", ".join(f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in unaccepted)
        flags = " ".join(f"--accept {s.name}" for s in unaccepted)
        problems.append(
            RollbackRefusedError(
                f"{sink.name}: others changed rows since, and their changes would be lost: {names}",
                hint=f"If they may be lost: {flags}",
            )
        )
    return plan, problems


def check_restored(sink: DeltaSink, pipeline: str, entry: LedgerEntry, deciding: str) -> int:
    """Look whether a further sink can be brought through a restore; returns the version that this was found under.

    Without a table that is -1: one that somebody else creates meanwhile is looked at first.

    Raises:
        RollbackRefusedError: others changed rows since the restore was planned, or files that it needs are gone.
    """
    jump = entry.jump
    to, again = int(jump["to_epoch"]), f"firnline run --from-savepoint {jump['path']}"
    leave = f"Or take {sink.name} out of the spec."
    if deciding in jump["versions"] and entry.checkpoint.floor <= to:
        leave = f"Or leave it as it is: firnline rollback --to {to} --leave {sink.name}"
    check_unchanged(sink, pipeline, entry, jump.get("accepted", []), f"{again}{{flags}}. {leave}")
    version = sink.table.version if sink.table.refresh() else -1
    missing = find_lacking(sink, entry)
    if missing:
        raise RollbackRefusedError(
            f"{sink.name} cannot follow the restore to epoch {to}: {len(missing)} file(s) that it needs are gone:"
            f" {', '.join(missing[:NAMED])}",
            hint=f"Restore once more, with copies of them: {again}. {leave}",
        )
    return version


def check_unchanged(sink: DeltaSink, pipeline: str, entry: LedgerEntry, accept: Collection[str], way_out: str) -> None:
    """Refuse when others changed rows of a sink since a restore was planned; `way_out` takes `{flags}`.

    An entry of before plans were dated says nothing of that, and is not looked at.
    """
    planned_at = entry.jump.get("planned_at", {}).get(sink.name)
    if planned_at is None or not sink.table.refresh():
        return
    after = int(planned_at) if sink.table.version >= int(planned_at) else -1  # -1: another table by now
    try:
        strangers = [s for s in find_strangers(sink.log, pipeline, after, sink.table.version) if s.name not in accept]
    except RollbackRefusedError as error:
        raise RollbackRefusedError(f"{sink.name}: {error.message}", hint=way_out.replace("{flags}", "")) from error
    if strangers:
        names = ", ".join(f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in strangers)
        flags = "".join(f" --accept {s.name}" for s in strangers)
        raise RollbackRefusedError(
            f"{sink.name}: others changed rows since the restore was planned, and they would be lost: {names}",
            hint="If they may be lost: " + way_out.replace("{flags}", flags),
        )


def find_lacking(sink: DeltaSink, entry: LedgerEntry) -> list[str]:
    """Files that a restore brings into a sink and that are not stored any more."""
    version = entry.jump["versions"].get(sink.name)
    exists = sink.table.refresh()
    if version is None:
        wanted = {str(file["path"]) for file in entry.staged.get(sink.name, [])}
    elif not exists:
        return [f"version {version} of {sink.table.uri}"]
    else:
        try:
            wanted = read_files(sink.table, int(version)).rows.keys() - read_files(sink.table).rows.keys()
        except RollbackRefusedError as error:
            return [error.message]
    doomed = find_doomed(sink, wanted, "that come back") if exists else None
    return [doomed.message] if doomed is not None else find_missing(sink.storage, wanted)


def find_doomed(sink: DeltaSink, paths: Collection[str], which: str) -> RollbackRefusedError | None:
    """Why files cannot be named again under the version that the table is at: a sweep has declared that they go."""
    found = SweepLog(sink.storage, sink.table).find_covering({key for path in paths for key in (path, unquote(path))})
    if found is None:
        return None
    intent, doomed = found
    shown = ", ".join(sorted(doomed)[:NAMED])
    finish = f"A sweep that died is finished by: firnline gc {sink.table.uri} --yes"
    return RollbackRefusedError(
        f"{sink.name}: {len(doomed)} file(s) {which} are being deleted by {intent}: {shown}",
        hint=f"Go back less far, or restore a savepoint. {finish}",
        sweep=intent.name,
    )


def find_missing(storage: Storage, paths: Iterable[str]) -> list[str]:
    """Which files are not stored any more. Paths are as the log spells them, percent-encoded or not."""

    def is_missing(path: str) -> bool:
        for key in dict.fromkeys((unquote(path), path)):
            with contextlib.suppress(FileNotFoundError):
                storage.stat(key)
                return False
        return True

    ordered = sorted(paths)
    with ThreadPoolExecutor(_READERS) as readers:
        return [path for path, gone in zip(ordered, readers.map(is_missing, ordered), strict=True) if gone]


def _changed(now: TableFiles, then: TableFiles) -> list[str]:
    keys = sorted(now.properties.keys() | then.properties.keys())
    return [key for key in keys if now.properties.get(key) != then.properties.get(key)]


def _leave_hint(sink: DeltaSink) -> str:
    return f"Repair it, or leave its rows as they are: --leave {sink.name}"
