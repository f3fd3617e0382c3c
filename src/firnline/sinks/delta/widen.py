"""Gives columns of a table a wider type: rewrites the table's files, for a commit that replaces all of them.

Delta's own type widening (the table feature `typeWidening`) keeps the old files, but delta-rs, which reads and writes
for Firnline, refuses such tables, and it does not know int64 to float64. A rewritten table is plain: every reader of
the old one reads it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import SchemaError, SinkError
from firnline.faults import fault_point
from firnline.sinks.base import RunTasks
from firnline.sinks.delta.contents import ListedFile, bundles, find_key, list_contents, special_features
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.stage import ParquetStager
from firnline.sinks.delta.table import Table
from firnline.sinks.delta.upsert.rewrite import open_data_file
from firnline.storage import Storage, is_remote, open_storage
from firnline.types import Json

MAX_BYTES = 10 * 1024**3  # a larger table is not rewritten in a commit
EXACT = 2**53  # integers up to this are exact in a double
BATCH_ROWS = 131_072
TASK_BYTES = 64 * 1024 * 1024
TASK_FILES = 32


def find_obstacles(table: Table, types: Mapping[str, pa.DataType]) -> dict[str, str]:
    """Return which columns cannot get the given type, with the reason. Reads the log, no data file."""
    obstacle = _find_obstacle(table)
    if obstacle:
        return dict.fromkeys(types, obstacle)
    actions = pa.table(table.delta.get_add_actions(flatten=True))
    size = sum(actions.column("size_bytes").to_pylist())
    if size > MAX_BYTES:
        return dict.fromkeys(types, f"the table has {size:,} bytes, more than the {MAX_BYTES:,} that a commit rewrites")
    partitions, found = table.partition_columns(), {}
    for name, kind in types.items():
        if name in partitions:
            found[name] = "it is a partition column"
        elif pa.types.is_floating(kind) and not _is_exact(actions, name):
            found[name] = "the table may hold integers beyond 2^53, which float64 does not represent exactly"
    return found


def _find_obstacle(table: Table) -> str:
    """Return why the files of a table cannot be replaced; empty if they can."""
    features = special_features(table.delta)
    if features:
        return f"the table uses {', '.join(features)}"
    if (table.setting("delta.appendOnly") or "").lower() == "true":
        return "the table is append-only"
    rules = table.rules()
    return f"the table has {rules[0]}" if rules else ""


def _is_exact(actions: pa.Table, name: str) -> bool:
    """Return whether the statistics of all files show that a double represents every integer of a column."""
    columns = ["num_records", f"null_count.{name}", f"min.{name}", f"max.{name}"]
    if any(column not in actions.column_names for column in columns):
        return False
    for rows, nulls, least, most in zip(*(actions.column(column).to_pylist() for column in columns), strict=True):
        if rows is not None and nulls == rows:
            continue
        if least is None or most is None or least < -EXACT or most > EXACT:
            return False
    return True


class Widening:
    """The rewritten files of one attempt. After a conflict only files that are new in the table are rewritten."""

    def __init__(
        self, attempt: str, types: Mapping[str, pa.DataType], storage: Storage, options: DeltaSinkOptions
    ) -> None:
        self.attempt = attempt
        self.types = dict(types)
        self._storage = storage
        self._options = options
        self._done: dict[str, list[dict[str, Json]]] = {}  # by the path in the log

    def rewrite(
        self, table: Table, run_tasks: RunTasks | None, replaced: Collection[str] = ()
    ) -> list[dict[str, Json]]:
        """Rewrite the files at the version of the handle. Returns the staged files: durable, named by no commit.

        Files in `replaced`, by their path in the log, are left out: others take their place.

        Raises:
            SchemaError: a value does not fit the wider type without loss.
            SinkError: a file cannot be read, or its row count differs from the log.
        """
        obstacle = _find_obstacle(table)
        if obstacle:
            raise SchemaError(f"cannot change the type of a column: {obstacle}", table=table.uri)
        files = [file for file in list_contents(table.delta) if file.path not in replaced]
        left = [file for file in files if file.path not in self._done]
        tasks = [self._task(bundle) for bundle in bundles(left, TASK_BYTES, TASK_FILES)]
        reports = (run_tasks or run_in_threads)(self.attempt, tasks) if tasks else []
        for report in reports:
            self._done |= report["files"]
        return [staged for file in files for staged in self._done[file.path]]

    def _task(self, files: Sequence[ListedFile]) -> dict[str, Json]:
        schema = pa.schema(list(self.types.items()))
        return {
            "kind": "commit",
            "type": self._options.type,
            "attempt": self.attempt,
            "table": self._storage.root,
            "storage_options": dict(self._options.storage_options),
            "file_size_bytes": self._options.file_size,
            "widen": base64.b64encode(schema.serialize().to_pybytes()).decode(),
            "files": [{"path": f.path, "rows": f.rows, "partition_values": f.partition_values} for f in files],
        }


def run_in_threads(tag: str, tasks: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Run tasks in this process; all of them end before the first failure is raised."""
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix=f"widen {tag}") as pool:
        futures = [pool.submit(run_widen, task) for task in tasks]
    return [future.result() for future in futures]


def run_widen(task: dict[str, Json]) -> dict[str, Json]:
    """Rewrite files in a worker. Returns `files`: by path, the files staged in its place; all of them are durable.

    After a failure its staged files are deleted.
    """
    storage = open_storage(str(task["table"]), dict(task["storage_options"]))
    types = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(task["widen"])))
    done: dict[str, list[dict[str, Json]]] = {}
    try:
        for file in task["files"]:
            done[str(file["path"])] = _rewrite(storage, task, types, file)
    except BaseException as error:
        for staged in (one for files in done.values() for one in files):
            storage.delete(str(staged["path"]))
        if isinstance(error, pa.ArrowException | OSError):
            raise SinkError(f"cannot rewrite files of {storage.root}: {error}", table=storage.root) from error
        raise
    return {"files": done}


def _rewrite(
    storage: Storage, task: dict[str, Json], types: pa.Schema, file: Mapping[str, Json]
) -> list[dict[str, Json]]:
    """Write the rows of one file again, some columns with a wider type."""
    path, values = str(file["path"]), dict(file["partition_values"])
    key = find_key(storage, path)
    if key is None:
        raise SinkError(f"{path}, which the log of {storage.root} names, is missing", file=path)
    target = {**task, "partition_by": list(values)}
    stager = ParquetStager(target, str(task["attempt"]), storage)
    fault_point("widen.rewrite.before")
    try:
        with open_data_file(storage, *key) as source:
            parquet = pq.ParquetFile(source, pre_buffer=is_remote(storage.root))
            rows = parquet.metadata.num_rows
            for batch in parquet.iter_batches(BATCH_ROWS):
                stager.write_to(values, _cast(batch, types, path))
        staged = stager.close()
        if rows != sum(int(one["rows"]) for one in staged) or (file["rows"] is not None and rows != file["rows"]):
            raise SinkError(f"rewriting {path} lost rows, or the log counts others; nothing was committed", file=path)
        fault_point("widen.rewrite.after")
    except BaseException:
        stager.discard()
        raise
    return staged


def _cast(batch: pa.RecordBatch, types: pa.Schema, path: str) -> pa.RecordBatch:
    """Return the rows with wider columns; columns that the file lacks stay away."""
    for field in types:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            continue
        try:
            column = batch.column(index).cast(field.type)  # refuses integers that a double may not represent
        except pa.ArrowInvalid as error:
            raise SchemaError(f"{path}: column {field.name} does not fit {field.type}: {error}") from error
        batch = batch.set_column(index, batch.schema.field(index).with_type(field.type), column)
    return batch
