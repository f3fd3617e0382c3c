"""Reads the log of a table for its readers: versions, their files, columns at a version. Writes nothing."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import DeltaError, TableNotFoundError

from firnline.clock import monotonic
from firnline.errors import SchemaError, SourceError, SourceGapError, SourceReplacedError
from firnline.names import commit_key
from firnline.sinks.delta.contents import list_contents
from firnline.sinks.delta.log import DeltaLog
from firnline.sources.delta.versions import (
    Kind,
    Version,
    check_inside,
    commit_info,
    counted_files,
    make_item,
    read_version,
)
from firnline.storage import is_remote, open_storage
from firnline.types import Json

KEPT_COMMITS = 16  # commits whose actions stay parsed
KEPT_COLUMNS = 64  # versions whose columns stay known
KEPT_VERSIONS = 100_000  # behind the reader
READ_AT_ONCE = 32  # commits on an object store
LIST_SECONDS = 300.0  # between two listings of an idle log, which find out whether it is idle


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table from one version on."""

    schema: str  # as the log has it
    partition_by: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for readers and the ledger."""
        return {"columns": self.schema, "partition_by": list(self.partition_by)}


def arrow_schema(text: str) -> pa.Schema:
    """Return the columns that the log describes.

    Raises:
        SchemaError: they have a type that is not known, or names that files do not have.
    """
    try:
        found = pa.schema(DeltaSchema.from_json(text).to_arrow())
    except (DeltaError, pa.ArrowException, ValueError, TypeError) as error:
        raise SchemaError(f"the columns of the table cannot be read: {error}") from error
    return found


class TableLog:
    """The log of one table. Its callers take turns."""

    def __init__(self, root: str, storage_options: Mapping[str, str]) -> None:
        self._options = dict(storage_options)
        self.storage = open_storage(root, self._options)
        self.root = self.storage.root
        self._log = DeltaLog(self.storage)
        self._versions: dict[int, Version] = {}
        self._actions: OrderedDict[int, list[dict[str, Json]]] = OrderedDict()
        self._columns: dict[int, TableColumns] = {}
        self._snapshots: dict[int, list[dict[str, Json]]] = {}
        self._newest = -1
        self._newest_etag = ""
        self._listed_at = -LIST_SECONDS
        self._table_id = ""
        self.is_checked = False  # whether the table, as its newest version describes it, can be read right

    # -- following ------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The newest version that is known; -1 if there is none."""
        return self._newest

    def refresh_newest(self) -> int:
        """Return the newest version; -1 if there is no table.

        Raises:
            SourceError: the log cannot be read now.
        """
        try:
            self._find_newest()
        except OSError as error:
            raise SourceError(f"cannot read the log of {self.root}: {error}", table=self.root) from error
        return self._newest

    def refresh(self, after: int, table_id: str | None) -> int:
        """Read the versions after a reader's, and return the newest one; -1 if there is no table.

        Raises:
            SourceGapError: a version after the reader's is no longer in the log.
            SourceReplacedError: the table has another id than the reader knows, or lost versions.
            SourceError: the log cannot be read now.
        """
        try:
            self._find_newest()
            if self._newest < 0:
                return -1
            if table_id is not None and self.table_id != table_id:
                raise self._replaced(f"its id is {self.table_id}, and {table_id} was read")
            if table_id is not None and after > self._newest:
                raise self._replaced(f"its newest version is {self._newest}, and version {after} was read")
            self._load(after + 1, self._newest)
        except OSError as error:
            raise SourceError(f"cannot read the log of {self.root}: {error}", table=self.root) from error
        for number in [n for n in self._versions if n < after - KEPT_VERSIONS]:
            del self._versions[number]
        return self._newest

    def _find_newest(self) -> None:
        before = self._newest
        if self._newest >= 0:
            self._follow()
        if self._newest == before and monotonic() - self._listed_at >= LIST_SECONDS:
            newest = self._log.newest_version()
            if newest < self._newest:
                raise self._replaced(f"its newest version is {newest}, and it was {self._newest}")
            self._newest, self._listed_at = newest, monotonic()
            if newest >= 0:
                self._newest_etag = self.storage.stat(commit_key(newest)).etag
            else:
                self._listed_at = -LIST_SECONDS

    def _follow(self) -> None:
        """Look for commits after the newest one that is known, which must still be what it was."""
        while True:
            following = self._newest + 1
            if self._read(following) is None:
                return
            if self.storage.stat(commit_key(self._newest)).etag != self._newest_etag:
                raise self._replaced(f"version {self._newest} is another one than before")
            self._newest, self._newest_etag = following, self.storage.stat(commit_key(following)).etag

    def _load(self, first: int, last: int) -> None:
        """Read the versions of a range that are not known yet."""
        missing = [number for number in range(first, last + 1) if number not in self._versions]
        if len(missing) > 1 and is_remote(self.root):
            with ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="firnline delta log") as pool:
                found = list(pool.map(self._read, missing))
        else:
            found = [self._read(number) for number in missing]
        gone = [number for number, version in zip(missing, found, strict=True) if version is None]
        if gone:
            raise SourceGapError(
                f"versions {gone[0]} to {gone[-1]} of {self.root} are no longer in its log, and were not read",
                hint="The log's retention (delta.logRetentionDuration) has passed. Restore the commit files from a "
                f"backup, or read on behind them, without their rows: `firnline position set SOURCE {gone[-1]}`.",
                table=self.root,
                version=gone[0],
            )

    def _replaced(self, reason: str) -> SourceReplacedError:
        return SourceReplacedError(
            f"the table {self.root} was replaced: {reason}",
            hint="Put the old table back, or read the new one into a pipeline of another name.",
            table=self.root,
        )

    # -- one version ----------------------------------------------------------------------------------

    def find(self, number: int) -> Version | None:
        """Return a version; None if it is no longer in the log."""
        return self._versions.get(number) or self._read(number)

    def get(self, number: int) -> Version:
        """Return a version. Raises SourceGapError if it is no longer in the log."""
        version = self.find(number)
        if version is None:
            raise self._cleaned(number)
        return version

    def _read(self, number: int) -> Version | None:
        actions = self._parse(number)
        if actions is None:
            return None
        version = self._versions[number] = read_version(number, actions)
        self.is_checked = self.is_checked and not any("protocol" in one or "metaData" in one for one in actions)
        self._actions[number] = actions
        if len(self._actions) > KEPT_COMMITS:
            self._actions.popitem(last=False)
        if self._table_id and version.table_id not in (None, self._table_id):
            raise self._replaced(f"version {number} names the id {version.table_id}, not {self._table_id}")
        if version.schema is not None:
            self._columns[number] = TableColumns(version.schema, version.partition_by)
        return version

    def _parse(self, number: int) -> list[dict[str, Json]] | None:
        """Return the actions of a commit; None if it is not in the log. A damaged commit is never read in part."""
        try:
            data = self.storage.get(commit_key(number))
        except FileNotFoundError:
            return None
        try:
            actions = [json.loads(line) for line in data.splitlines() if line.strip()]
        except ValueError as error:
            raise self._damaged(number, "a line of it is cut off") from error
        files = sum(1 for action in actions if "add" in action or "remove" in action)
        if files < counted_files(actions):
            raise self._damaged(number, f"it has {files} files and counts {counted_files(actions)}")
        return actions

    def _damaged(self, number: int, reason: str) -> SourceGapError:
        return SourceGapError(
            f"version {number} of {self.root} cannot be read: {reason}",
            hint=f"Restore {self.root}/{commit_key(number)} from a backup.",
            table=self.root,
            version=number,
        )

    def actions(self, number: int) -> list[dict[str, Json]]:
        """Return the actions of a version.

        Raises:
            SourceGapError: it is no longer in the log.
        """
        found = self._actions.get(number) or self._parse(number)
        if found is None:
            raise self._cleaned(number)
        return found

    def _cleaned(self, number: int) -> SourceGapError:
        return SourceGapError(
            f"version {number} of {self.root} is no longer in its log, and was not read to its end",
            hint="The log's retention (delta.logRetentionDuration) has passed. Restore the commit file from a backup.",
            table=self.root,
            version=number,
        )

    # -- the table at a version -----------------------------------------------------------------------

    @property
    def table_id(self) -> str:
        """Delta's id of the table, which changes if the table is deleted and created again."""
        if not self._table_id:
            self._table_id = self._find_id()
        return self._table_id

    def _find_id(self) -> str:
        known = [v.table_id for _, v in sorted(self._versions.items()) if v.table_id is not None]
        if known:
            return known[-1]
        try:
            return str(self._open(None).metadata().id)
        except SourceError:
            for commit in self._log.backwards(self._newest):  # a table that delta-rs refuses
                for action in commit.actions:
                    if "metaData" in action:
                        return str(action["metaData"]["id"])
            raise

    def schema_at(self, number: int) -> pa.Schema:
        """Return the columns of the table at a version, as Arrow types. Raises SchemaError."""
        return arrow_schema(self.columns_at(number).schema)

    def columns_at(self, number: int) -> TableColumns:
        """Return the columns of the table at a version; those of its newest one if that cannot be told any more."""
        last = max((n for n in self._columns if n <= number), default=None)
        if last is not None and all(n in self._versions for n in range(last + 1, number + 1)):
            found = self._columns[number] = self._columns[last]
            for old in sorted(self._columns)[:-KEPT_COLUMNS]:
                del self._columns[old]
            return found
        try:
            delta = self._open(number)
        except SourceError:
            logged = self._columns_of_log(number)
            if logged is not None:
                return logged
            delta = self._open(None)
        schema, partition_by = delta.schema().to_json(), tuple(delta.metadata().partition_columns)
        return self._columns.setdefault(number, TableColumns(schema, partition_by))

    def _columns_of_log(self, number: int) -> TableColumns | None:
        for commit in self._log.backwards(number):
            version = read_version(commit.version, commit.actions)
            if version.schema is not None:
                return self._columns.setdefault(number, TableColumns(version.schema, version.partition_by))
        return None

    def check_features(self) -> None:
        """Refuse a table whose rows lie elsewhere than in the columns of its data files.

        Raises:
            SchemaError: it names the feature.
        """
        try:
            mode = self._open(None).metadata().configuration.get("delta.columnMapping.mode")
        except SourceError as error:
            if "columnMapping" not in error.message:
                raise
            mode = "on"
        if mode not in (None, "none"):
            raise SchemaError(
                f"the table {self.root} uses column mapping, under which files have other column names",
                hint="Read a copy of it without delta.columnMapping.mode.",
                table=self.root,
            )

    def snapshot(self, number: int, *, origins: bool) -> list[dict[str, Json]]:
        """Return all files of the table at a version as inputs, in the order in which they were written.

        With `origins`, each one names the version that added it, as far as the log reaches back.

        Raises:
            SourceGapError: the version can no longer be told from the log.
            SchemaError: a file has a deletion vector, or lies outside the table.
        """
        if number not in self._snapshots:
            try:
                delta = self._open(number)
            except SourceError as error:
                raise SourceGapError(
                    f"version {number} of {self.root} can no longer be told from its log: {error.message}",
                    table=self.root,
                    version=number,
                ) from error
            self._snapshots = {number: self._list(delta, number, origins=origins)}
        return self._snapshots[number]

    def _list(self, delta: DeltaTable, number: int, *, origins: bool) -> list[dict[str, Json]]:
        vectors = delta.protocol().reader_features or []
        if "deletionVectors" in vectors and (found := pa.table(delta.deletion_vectors()).num_rows):
            raise SchemaError(
                f"{found} files of {self.root} have deletion vectors, which Firnline does not read",
                hint="Set delta.enableDeletionVectors to false on the table, and rewrite its files once: "
                "REORG TABLE ... APPLY (PURGE).",
                table=self.root,
            )
        files = sorted(list_contents(delta), key=lambda file: (file.modification_time, file.path))
        added = self._find_origins({file.path for file in files}, number) if origins else {}
        whole = Version(number, Kind.APPEND, number - 1, "snapshot", self._stamp(number))
        items = []
        for index, file in enumerate(files):
            check_inside(self.root, file.path)
            origin = added.get(file.path, whole)
            item = make_item(
                origin, index, file.path, size_bytes=file.size_bytes, rows=file.rows, values=file.partition_values
            )
            items.append({**item, "version": number, "added": origin.number, "stamp_ms": whole.stamp_ms})
        return items

    def _find_origins(self, paths: set[str], number: int) -> dict[str, Version]:
        """Return the versions that added files, as far as the log reaches back."""
        found: dict[str, Version] = {}
        for commit in self._log.backwards(number):
            version: Version | None = None
            for action in commit.actions:
                path = action.get("add", {}).get("path")
                if path in paths and action["add"].get("dataChange", True) and not _is_restore(commit.actions):
                    version = version or read_version(commit.version, commit.actions)
                    found[path] = version
            if len(found) == len(paths):
                break
        return found

    def _stamp(self, number: int) -> int | None:
        version = self.find(number)
        return version.stamp_ms if version is not None else None

    def _open(self, number: int | None) -> DeltaTable:
        try:
            return DeltaTable(self.root, version=number, storage_options=self._options or None)
        except TableNotFoundError as error:
            raise SourceError(f"there is no Delta table at {self.root}", table=self.root) from error
        except (DeltaError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise SourceError(f"cannot read the table {self.root}: {reason}", table=self.root) from error


def _is_restore(actions: list[dict[str, Json]]) -> bool:
    return commit_info(actions).get("operation") == "RESTORE"
