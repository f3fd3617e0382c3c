"""What going back means for one sink: versions, files and rows then and now, and what stands in the way."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import unquote

from firnline.engine.jump_entries import version_of
from firnline.errors import RollbackRefusedError, SinkError
from firnline.sinks.delta import DeltaSink
from firnline.sinks.delta.jump import TableFiles, find_strangers, read_files
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
    missing = find_missing(sink.storage, restored)
    if missing:
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
