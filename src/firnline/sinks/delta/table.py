"""One Delta table through delta-rs: conditional commits, durable on return, errors classified.

Every commit names the version that it is made onto (`onto`): the one under which the caller checked its fence. A handle
at another version is a conflict, and so is a version that another writer took (`max_commit_retries=0`): delta-rs would
rebase a commit over another writer's without asking us, and it accepts a transaction version older than the one it
holds. After a conflict the caller checks again and repeats.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake import Field as DeltaField
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from firnline.clock import SystemClock
from firnline.errors import CommitConflictError, CommitUnknownError, SinkError, StoreUnsafeError, TableLostError
from firnline.faults import InjectedFaultError, fault_point
from firnline.names import COUNTS_KEY, INFO_KEY
from firnline.sinks.delta.durable import DurableLog, count_actions, find_unreadable
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.delta.log_cleanup import declare_clean_up, delete_expired
from firnline.storage import Storage, is_remote, make_folders, open_storage
from firnline.types import Json

_CONSTRAINT = "delta.constraints."
_COLUMN_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity.start")
UNCHANGED = "unchanged"  # of a file that replaces others: it has their rows
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
# What a table of ours is created with. Interchange ids differ in every commit, so they must expire.
CREATED_WITH = {
    "delta.setTransactionRetentionDuration": "interval 7 days",
    "delta.checkpointInterval": "20",  # reading a snapshot replays what came after its checkpoint
}


class Table:
    """A handle on the newest version.

    It serves one thread: only then all reads between two refreshes belong to one version. A write is safe anyway, since
    it takes the version of its checks, and no refresh comes between that comparison and the commit.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str]) -> None:
        self.uri = uri
        self._options = dict(storage_options)
        self._delta: DeltaTable | None = None
        self._described: tuple[int, tuple[pa.Schema, list[str], dict[str, Any]]] | None = None
        self._durable = DurableLog(uri)
        self._moving = threading.RLock()  # its holder may move the handle, or write onto its version

    def refresh(self) -> bool:
        """Move to the newest version. Returns False if there is no table."""
        with self._moving:
            try:
                if self._delta is None:
                    self._delta = DeltaTable(self.uri, storage_options=self._options or None)
                else:
                    self._delta.update_incremental()
            except TableNotFoundError:
                self._delta = None
                self._durable.forget()
                return False
            except (DeltaError, OSError) as error:
                at = self.version if self._delta is not None else -1
                self._delta = None
                raise self._why_unreadable(error, at) from error
            return True

    def at(self, version: int) -> DeltaTable:
        """Return a handle of its own on an older version."""
        return DeltaTable(self.uri, version=version, storage_options=self._options or None)

    def reopen(self) -> bool:
        """Open the table anew: somebody may have replaced it by an older one. Returns False if there is no table."""
        with self._moving:
            self._delta = None
            self._durable.forget()
            return self.refresh()

    def _why_unreadable(self, error: Exception, at: int) -> SinkError:
        """Return the error for a failure of delta-rs, for a handle at a version, or at none (-1)."""
        with contextlib.suppress(OSError):
            storage = open_storage(self.uri, self._options)
            if DeltaLog(storage).newest_version() < at:
                return TableLostError(
                    f"the table {self.uri} is gone: its log no longer has version {at}", table=self.uri
                )
            torn = find_unreadable(storage)
            if torn is not None:
                return torn
        reason = str(error).partition("\n")[0]  # a backtrace of delta-rs may follow
        return SinkError(f"cannot read the table {self.uri}: {reason}", table=self.uri)

    def make_durable(self) -> None:
        """Make the version that was read durable, with all before it. Call it before anything builds on that version.

        Raises:
            NotDurableError: an fsync failed; nothing may build on this version.
        """
        self._durable.sync(self.version)

    @property
    def storage_options(self) -> dict[str, str] | None:
        return self._options or None

    @property
    def delta(self) -> DeltaTable:
        assert self._delta is not None, "refresh() said that there is no table"
        return self._delta

    @property
    def version(self) -> int:
        return int(self.delta.version())

    @property
    def id(self) -> str:
        """Delta's id of the table, which changes if the table is deleted and created again."""
        return str(self.delta.metadata().id)

    def txn(self, app_id: str) -> int | None:
        """Return the newest transaction version of an application; None if it has none."""
        try:
            found = self.delta.transaction_version(app_id)
        except (DeltaError, OSError) as error:  # a handle reads the log only when it is asked
            raise self._why_unreadable(error, self.version) from error
        return None if found is None else int(found)

    def schema(self) -> pa.Schema:
        return self._about()[0]

    def partition_columns(self) -> list[str]:
        return self._about()[1]

    def setting(self, key: str) -> str | None:
        """Return a table property."""
        found = self._about()[2].get(key)
        return None if found is None else str(found)

    def rules(self) -> list[str]:
        """Return the names of rules that every writer of this table would have to compute or check per row."""
        found = [f"constraint {key[len(_CONSTRAINT) :]}" for key in self._about()[2] if key.startswith(_CONSTRAINT)]
        for field in self.delta.schema().fields:
            found += [f"{key} of column {field.name}" for key in _COLUMN_RULES if key in field.metadata]
        return found

    def _about(self) -> tuple[pa.Schema, list[str], dict[str, Any]]:
        """Return columns, partition columns and properties, read once per version."""
        if self._described is None or self._described[0] != self.version:
            metadata = self.delta.metadata()
            columns = pa.schema(self.delta.schema().to_arrow())
            about = (columns, list(metadata.partition_columns), dict(metadata.configuration))
            self._described = (self.version, about)
        return self._described[1]

    def create(
        self,
        schema: pa.Schema,
        partition_by: list[str],
        info: Json,
        txns: Mapping[str, int],
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Create the table as version 0, with some properties or our own. Raises CommitConflictError if another writer
        did."""
        if not is_remote(self.uri):
            make_folders(self.uri)

        def write() -> None:
            DeltaTable.create(
                self.uri,
                DeltaSchema.from_arrow(schema),
                mode="error",
                partition_by=partition_by or None,
                configuration=dict(CREATED_WITH if properties is None else properties),
                storage_options=self._options or None,
                commit_properties=_properties(info, txns),
                post_commithook_properties=_NO_HOOKS,
            )

        self._write("delta.create", write, onto=-1)
        self._delta = None
        self.refresh()

    def add_columns(self, fields: pa.Schema, *, onto: int) -> None:
        """Add new columns or new nested fields to the schema."""

        def write() -> None:
            self.delta.alter.add_columns(
                DeltaSchema.from_arrow(fields).fields,
                commit_properties=CommitProperties(max_commit_retries=0),
                post_commithook_properties=_NO_HOOKS,
            )

        self._write("delta.evolve", write, onto)

    def append(
        self,
        point: str,
        files: Sequence[dict[str, Json]],
        info: Json,
        txns: Mapping[str, int],
        expiring: Mapping[str, int],
        *,
        onto: int,
        replace: bool = False,
    ) -> int:
        """Commit files and transaction ids onto the version `onto`. Returns the new version.

        With `replace`, they replace every file of the table.
        """
        mode: Literal["append", "overwrite"] = "overwrite" if replace else "append"
        properties = _properties(info, txns, expiring, len(files))
        return self.transact(point, [add_action(f) for f in files], properties, mode, onto=onto)

    def replace_all(
        self,
        point: str,
        types: Mapping[str, pa.DataType],
        files: Sequence[dict[str, Json]],
        info: Json,
        txns: Mapping[str, int],
        expiring: Mapping[str, int],
        *,
        onto: int,
    ) -> int:
        """Replace every file, and give some columns other types, in one commit onto the version `onto`."""
        fields = [
            DeltaField(field.name, _delta_type(types[field.name]), nullable=field.nullable, metadata=field.metadata)
            if field.name in types
            else field
            for field in self.delta.schema().fields
        ]
        properties = _properties(info, txns, expiring, len(files), isBlindAppend=False)

        def write() -> None:
            self.delta.create_write_transaction(
                [add_action(file, data_change=not file.get(UNCHANGED, False)) for file in files],
                "overwrite",
                DeltaSchema(fields),
                partition_by=self.partition_columns() or None,
                commit_properties=properties,
                post_commithook_properties=_NO_HOOKS,
            )

        return self._write(point, write, onto)

    def exchange(
        self,
        point: str,
        removed: Sequence[RemoveAction],
        files: Sequence[dict[str, Json]],
        info: Json,
        txns: Mapping[str, int],
        expiring: Mapping[str, int],
        *,
        onto: int,
    ) -> int:
        """Commit files in place of others, with transaction ids, onto the version `onto`."""
        properties = _properties(info, txns, expiring, len(removed) + len(files), isBlindAppend=False)
        return self.transact(point, [*removed, *(add_action(f) for f in files)], properties, onto=onto)

    def restore(
        self,
        point: str,
        to_version: int,
        info: Json,
        txns: Mapping[str, int],
        expiring: Mapping[str, int],
        *,
        onto: int,
    ) -> int:
        """Take data and columns back to an earlier version, with transaction ids, onto the version `onto`."""

        def write() -> None:
            try:
                self.delta.restore(
                    to_version,
                    commit_properties=_properties(info, txns, expiring),
                    post_commithook_properties=_NO_HOOKS,
                )
            except DeltaError as error:
                if "missing file" not in str(error):
                    raise
                # delta-rs checks before it writes: a file is gone since the caller checked, who has to check again.
                raise CommitConflictError(f"version {to_version} of {self.uri} lost a file: {error}") from error

        return self._write(point, write, onto)

    def transact(
        self,
        point: str,
        actions: Sequence[AddAction | RemoveAction],
        properties: CommitProperties,
        mode: Literal["append", "overwrite"] = "append",
        *,
        onto: int,
    ) -> int:
        """Commit actions onto the version `onto`. Returns the new version."""

        def write() -> None:
            self.delta.create_write_transaction(
                list(actions),
                mode,
                self.delta.schema(),
                partition_by=self.partition_columns() or None,
                commit_properties=properties,
                post_commithook_properties=_NO_HOOKS,
            )

        return self._write(point, write, onto)

    def _write(self, point: str, write: Callable[[], None], onto: int) -> int:
        """Call delta-rs between the fault points, make the commit file durable, classify errors.

        Returns the new version, the one after `onto`; without a table, `onto` is -1.
        """
        version = onto + 1
        try:
            self._durable.sync(version - 1)
            fault_point(f"{point}.before")
            with self._moving:
                self._check_at(onto)
                write()
            fault_point(f"{point}.after")
            self._durable.sync(version, written=True)
        except CommitFailedError as error:
            raise CommitConflictError(f"version {version} of {self.uri} was taken", version=version) from error
        except InjectedFaultError as error:
            raise CommitUnknownError(f"the answer to a commit was lost: {error}", version=version) from error
        except (DeltaError, OSError) as error:
            if "already exists" in str(error):
                raise CommitConflictError(f"version {version} of {self.uri} was taken", version=version) from error
            raise CommitUnknownError(f"a commit to {self.uri} failed: {error}", version=version) from error
        return version

    def _check_at(self, onto: int) -> None:
        """Refuse to write if the handle is not at the version of the writer's fence check."""
        at = self.version if self._delta is not None else -1
        if at != onto:
            raise CommitConflictError(
                f"the handle of {self.uri} moved from version {onto} to {at} since the fence was checked", version=at
            )

    def checkpoint(self) -> None:
        """Write Delta's own checkpoint and delete expired log files."""
        try:
            self.make_durable()
            fault_point("delta.checkpoint.before")
            self.delta.create_checkpoint()
            fault_point("delta.checkpoint.sync.before")
            self._durable.sync_checkpoint(self.version)
            fault_point("delta.checkpoint.sync.after")
            cleans = (self.setting("delta.enableExpiredLogCleanup") or "true").lower() != "false"
            if cleans:
                self._clean_up_log()
            fault_point("delta.checkpoint.after")
            # A handle keeps replaying what came after the checkpoint it was opened on; a new one starts at this one.
            self._delta = None
            self.refresh()
        except (DeltaError, OSError) as error:
            raise SinkError(f"cannot write a checkpoint of {self.uri}: {error}", table=self.uri) from error

    def _clean_up_log(self) -> None:
        """Delete expired log files; with snapshots of topologies, only those that no snapshot needs."""
        storage = open_storage(self.uri, self._options)
        with declare_clean_up(storage, self.version) as needed:
            fault_point("delta.cleanup.before")
            if needed is None:
                self.delta.cleanup_metadata()
            else:
                delete_expired(storage, needed, SystemClock().now() - find_log_retention(self))
            fault_point("delta.cleanup.after")


def _delta_type(kind: pa.DataType) -> Any:
    """Return the Delta type of an Arrow type."""
    return DeltaSchema.from_arrow(pa.schema([("x", kind)])).fields[0].type


def add_action(file: dict[str, Json], *, data_change: bool = True) -> AddAction:
    """Return the Add action of a staged file."""
    return AddAction(
        path=str(file["path"]),
        size=int(file["size_bytes"]),
        partition_values=dict(file["partition_values"]),
        modification_time=int(file["modification_time"]),
        data_change=data_change,
        stats=str(file["stats"]),
    )


def _properties(
    info: Json, txns: Mapping[str, int], expiring: Mapping[str, int] | None = None, files: int = 0, **facts: Json
) -> CommitProperties:
    transactions = [Transaction(app_id, version) for app_id, version in txns.items()]
    for app_id, at_ms in (expiring or {}).items():
        transactions.append(Transaction(app_id, txns[next(iter(txns))], at_ms))
    metadata = {INFO_KEY: info, COUNTS_KEY: count_actions(files, len(transactions)), **facts}
    return CommitProperties(custom_metadata=metadata, max_commit_retries=0, app_transactions=transactions)


def check_put_if_absent(storage: Storage, key: str) -> None:
    """Refuse a storage on which two writers could both create the same log file; `key` is used briefly.

    Raises:
        StoreUnsafeError: it replaced an existing object.
        SinkError: it cannot be written.
    """
    try:
        storage.put(key, b"probe")
        storage.put_new(key, b"probe again")
    except FileExistsError:
        return
    except OSError as error:
        raise SinkError(f"cannot write to {storage.root}: {error}", table=storage.root) from error
    finally:
        storage.delete(key)
    raise StoreUnsafeError(f"{storage.root} lies on a store without put-if-absent")


TRANSACTIONS = "delta.setTransactionRetentionDuration"
DELETED_FILES = "delta.deletedFileRetentionDuration"
DELETED_FILES_DEFAULT = timedelta(days=7)

_UNITS = {
    "nanosecond": timedelta(0),
    "microsecond": timedelta(microseconds=1),
    "millisecond": timedelta(milliseconds=1),
    "second": timedelta(seconds=1),
    "minute": timedelta(minutes=1),
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(weeks=1),
}
_PART = re.compile(rf"\s*(\d+)\s+({'|'.join(_UNITS)})s?\b")


def parse_interval(text: str) -> timedelta:
    """Parse a duration. Raises ValueError if it is invalid."""
    rest = text.strip().lower().removeprefix("interval")
    total, at = timedelta(0), 0
    while found := _PART.match(rest, at):
        total += int(found[1]) * _UNITS[found[2]]
        at = found.end()
    if not at or rest[at:].strip():
        raise ValueError(f"{text!r} is not an interval")
    return total


def find_log_retention(table: Table) -> timedelta:
    """Return how long a table keeps old versions in its log; 30 days by default."""
    found = find_interval(table, "delta.logRetentionDuration")
    return found if found is not None else timedelta(days=30)


def find_interval(table: Table, key: str) -> timedelta | None:
    """Return a duration from the table's properties; None if it is not set.

    Raises:
        SinkError: its value cannot be parsed, so nothing may depend on it.
    """
    text = table.setting(key)
    try:
        return None if text is None else parse_interval(text)
    except ValueError as error:
        raise SinkError(f"the property {key} of {table.uri} is {error}") from error
