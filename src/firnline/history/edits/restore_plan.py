"""Plans the restore of a savepoint for one sink: from a version that its log still has, or from copies of files."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from firnline.committer.validate import InvalidUnitError, footer_metadata, footer_schema, read_footer
from firnline.errors import DamagedError, RollbackRefusedError
from firnline.faults import fault_point
from firnline.history.savepoints.files import Progress, copy_file, each
from firnline.history.savepoints.format import SavedFile, SavedSink, Savepoint, kept_bytes, read_saved
from firnline.history.savepoints.pins import delete_restore_pin, put_restore_pin
from firnline.history.savepoints.state import pinned_refs
from firnline.maintenance.log_names import LogNames
from firnline.maintenance.survey import is_inside, storage_now
from firnline.names import LEDGER, QUARANTINE, data_name, pipeline_folder, saved_data_key
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_from_json
from firnline.sinks.delta.contents import find_key, list_contents, missing_fields, special_features
from firnline.sinks.delta.history_edit import changes_rows, find_owners, operation_of
from firnline.sinks.delta.log import LogCommit
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.stage import partition_folder
from firnline.sinks.delta.stats import file_stats
from firnline.storage import Storage, open_storage
from firnline.types import Json

NAMED = 3
_READERS = 16


@dataclass(frozen=True, slots=True)
class SinkRestore:
    """The plan for one sink. With a version, the log still has it and nothing is copied."""

    sink: DeltaSink
    saved: SavedSink
    planned_at: int  # the table's version at that time; -1: there is no table
    version: int | None
    source: Storage | None = None  # the source of the copies
    undone: list[str] = field(default_factory=list)  # later changes by others, which the restore undoes

    def key_of(self, file: SavedFile, *, copied: bool) -> str:
        """Return the path of a file in `source`."""
        return saved_data_key(self.sink.name, file.path) if copied else file.path


def plan_sink(sink: DeltaSink, savepoint: Savepoint, storage: Storage, accept: Collection[str]) -> SinkRestore:
    """Check one sink and the files that it needs. Writes nothing.

    Args:
        storage: The savepoint's folder.
        accept: Other pipelines and programs whose rows may be lost.

    Raises:
        RollbackRefusedError: files are gone, or rows of others would be lost.
        SchemaError: the table has other partitions, or columns of other types.
    """
    saved = savepoint.sinks[sink.name]
    wanted = list(sink.stage_target()["partition_by"])
    if saved.partition_by != wanted:
        raise RollbackRefusedError(
            f"{sink.name} was partitioned by {saved.partition_by} when it was saved, the spec says {wanted}",
            hint="Set partition_by as the savepoint has it.",
        )
    planned_at = sink.table.version if sink.table.refresh() else -1
    undone: list[str] = []
    if planned_at >= 0:
        sink.check()
        _check_plain(sink)
        undone = check_others(sink, savepoint, accept)
        version = _find_version(sink, saved)
        if version is not None:
            return SinkRestore(sink, saved, planned_at, version, undone=undone)
        missing_fields(sink.table.schema(), schema_of(saved))
    source = storage if savepoint.copied else open_storage(saved.table, sink.stage_target()["storage_options"])
    plan = SinkRestore(sink, saved, planned_at, None, source, undone)
    _check_source(plan, copied=savepoint.copied)
    return plan


def schema_of(saved: SavedSink) -> pa.Schema:
    """Return the saved columns of a sink."""
    return schema_from_json(saved.schema)


def _check_plain(sink: DeltaSink) -> None:
    special = special_features(sink.table.delta)
    if special:
        raise RollbackRefusedError(
            f"{sink.table.uri} uses {', '.join(special)}, under which its files are not all there is",
            hint="Restore into another table.",
        )


def _find_version(sink: DeltaSink, saved: SavedSink) -> int | None:
    """Return the saved version, if this is the same table, its log still has the version, and every file exists."""
    table = sink.table
    if str(table.delta.metadata().id) != saved.table_id or saved.version > table.version:
        return None
    try:
        then = DeltaTable(table.uri, version=saved.version, storage_options=table.storage_options)
        listed = [file.path for file in list_contents(then)]
    except (DeltaError, OSError, ValueError):
        return None
    known = {file.path for file in saved.files}
    if len(listed) != len(known) or not all(unquote(path) in known or path in known for path in listed):
        return None
    return None if _find_bad(sink.storage, [(file.path, file.size_bytes) for file in saved.files]) else saved.version


def _find_bad(storage: Storage, wanted: list[tuple[str, int]]) -> list[str]:
    """Return the files that are missing, have another size, or are behind a link."""

    def is_bad(one: tuple[str, int]) -> bool:
        key, size_bytes = one
        if not is_inside(storage, key):
            return True
        found = find_key(storage, key)
        return found is None or found != (key, size_bytes)

    with ThreadPoolExecutor(_READERS) as readers:
        return [key for (key, _), bad in zip(wanted, readers.map(is_bad, wanted), strict=True) if bad]


def _check_source(plan: SinkRestore, *, copied: bool) -> None:
    assert plan.source is not None
    bad = _find_bad(plan.source, [(plan.key_of(f, copied=copied), f.size_bytes) for f in plan.saved.files])
    if not bad:
        return
    shown = ", ".join(bad[:NAMED]) + (" ..." if len(bad) > NAMED else "")
    if copied:
        raise DamagedError(
            f"the savepoint lacks {len(bad)} file(s) of {plan.sink.name}, or they have another size: {shown}",
            hint="Copy the whole folder of the savepoint again.",
        )
    raise RollbackRefusedError(
        f"{plan.sink.name}: {len(bad)} file(s) of the savepoint are gone from {plan.saved.table}: {shown}",
        hint="It was made without --copy, so it needs the files of that table.",
    )


def check_others(sink: DeltaSink, savepoint: Savepoint, accept: Collection[str], since: int = -1) -> list[str]:
    """Refuse to lose rows of other programs. Returns the operations that the restore undoes anyway.

    In the table that was saved, a restore undoes what people did since (DELETE, a manual write). Other pipelines and
    programs that keep their progress in the table would never write their rows again. Versions up to `since` were
    checked before.
    """
    table, saved = sink.table, savepoint.sinks[sink.name]
    same = str(table.delta.metadata().id) == saved.table_id
    after = max(since, saved.version if same else -1)
    owners: set[str] = set()
    operations: set[str] = set()
    is_whole = True
    with ThreadPoolExecutor(_READERS) as readers:
        for commit in readers.map(sink.log.read, range(after + 1, table.version + 1)):
            if commit is None:
                is_whole = False
                continue
            found, operation = _author(commit, savepoint.pipeline)
            owners |= found
            if operation and not found:
                operations.add(operation)
    if not is_whole:
        owners |= _all_owners(sink, savepoint.pipeline)
        operations |= set() if same else {"unknown"}
    objecting = sorted((owners if same else owners | operations) - set(accept))
    if objecting:
        flags = " ".join(f"--accept {name}" for name in objecting)
        raise RollbackRefusedError(
            f"{sink.name}: {table.uri} has rows of others, which would be lost: {', '.join(objecting)}",
            hint=f"Restore into another table; or, if they may be lost: {flags}",
        )
    return sorted(operations)


def _author(commit: LogCommit, pipeline: str) -> tuple[set[str], str]:
    """Return the other pipelines and programs that changed rows in a commit, and its operation; empty for our own."""
    if not changes_rows(commit) or commit.find_info(pipeline) is not None:
        return set(), ""
    return set(find_owners((str(txn["appId"]) for txn in commit.txns()), pipeline)), operation_of(commit)


def _all_owners(sink: DeltaSink, pipeline: str) -> set[str]:
    """Return every owner of progress in the table: part of the log is gone, so any of them may have written since."""
    options = dict(sink.stage_target()["storage_options"])
    tail = LogNames(sink.storage, sink.table, options).tail(storage_now(sink.storage), timedelta(0))
    return set(find_owners(tail.app_ids, pipeline))


class Copies:
    """Copies of data files. Their names contain `attempt`, so that a sweep recognizes the files of a killed restore."""

    def __init__(
        self,
        saved: Savepoint,
        storage: Storage,
        attempt: str,
        progress: Progress | None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._saved = saved
        self._storage = storage
        self._attempt = attempt
        self._progress = progress
        self._stopping = stopping

    @contextlib.contextmanager
    def pinned(self, plans: Sequence[SinkRestore]) -> Iterator[Copies]:
        """Protect the copies and operator state from sweeps until a commit or the ledger names them."""
        state = pinned_refs(self._saved)
        storages = [plan.sink.storage for n, plan in enumerate(plans) if plan.version is None or (n == 0 and state)]
        facts: dict[str, Json] = {"savepoint": self._saved.id, "pipeline": self._saved.pipeline}
        try:
            for storage in storages:
                put_restore_pin(storage, self._attempt, **facts, **({"state": state} if state else {}))
            yield self
        finally:  # also after a failure: by then a staged entry names the copies that a commit may name
            for storage in storages:
                with contextlib.suppress(OSError):  # a pin left behind expires a day after this process
                    delete_restore_pin(storage, self._attempt)

    def copy_data(self, plans: Sequence[SinkRestore]) -> dict[str, list[dict[str, Json]]]:
        """Return the files that each sink's commit adds; none if the table's log still has the version."""
        return {plan.sink.name: self._copy(plan) for plan in plans}

    def _copy(self, plan: SinkRestore) -> list[dict[str, Json]]:
        if plan.version is not None:
            return []

        def copy(file: SavedFile) -> dict[str, Json]:
            return self._copy_one(plan, file)

        what, files = f"copying {plan.sink.name}", plan.saved.files
        return each(what, files, copy, lambda f: f.size_bytes, self._progress, self._stopping)

    def _copy_one(self, plan: SinkRestore, file: SavedFile) -> dict[str, Json]:
        """Copy a file and verify it: size, checksum if there is one, footer and rows."""
        assert plan.source is not None
        folders = [partition_folder(name, file.partition_values[name]) for name in plan.saved.partition_by]
        key = "/".join([*folders, data_name(self._attempt, uuid.uuid4().hex)])
        target = plan.sink.storage
        fault_point("restore.copy.before")
        size, sha256 = copy_file(plan.source, plan.key_of(file, copied=self._saved.copied), target, key)
        fault_point("restore.copy.after")
        try:
            if size != file.size_bytes or (file.sha256 and sha256 != file.sha256):
                raise DamagedError(f"{file.path} is not what was saved", hint="Bring the savepoint's file back.")
            rows, stats = read_stats(target, key, size)
            if file.rows is not None and rows != file.rows:
                raise DamagedError(f"{file.path} has {rows} rows; {file.rows} were saved")
        except InvalidUnitError as error:
            target.delete(key)
            raise DamagedError(f"{file.path} cannot be restored: {error}") from error
        except DamagedError:
            target.delete(key)
            raise
        return {
            "path": key,
            "size_bytes": size,
            "rows": rows,
            "partition_values": file.partition_values,
            "modification_time": int(time.time() * 1000),
            "stats": stats,
        }


def read_stats(storage: Storage, key: str, size_bytes: int) -> tuple[int, str]:
    """Return the rows of a data file, and its statistics for the log. Raises InvalidUnitError."""
    footer, _ = read_footer(storage, key, size_bytes)
    metadata = footer_metadata(footer, key)
    return metadata.num_rows, file_stats(metadata, footer_schema(metadata, key))


def copy_ledger(pipeline: OpenPipeline, storage: Storage, saved: Savepoint) -> None:
    """Copy ledger and quarantine files of a savepoint that the table lacks. Files of the same name must be identical.

    Raises:
        DamagedError: they differ, or the savepoint's file is not what was saved.
    """
    target, home = pipeline.storage, pipeline_folder(pipeline.options.name)  # their folders have the same names
    present = {
        stat.name.removeprefix(f"{target.root}/{home}/")
        for folder in (LEDGER, QUARANTINE)
        for stat in target.list(f"{home}/{folder}")
    }
    for key, one in kept_bytes(saved):
        data = read_saved(storage, key, one)
        if key not in present:
            target.put(f"{home}/{key}", data)
        elif target.get(f"{home}/{key}") != data:
            raise DamagedError(
                f"the table has another {key} than the savepoint; one of them is damaged",
                hint="Restore the savepoint into another table.",
            )
