"""Upserts against a model: whatever changes come, whoever writes beside us, the table holds what the changes say."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.errors import (
    CheckpointError,
    CommitConflictError,
    CommitUnknownError,
    ConfigError,
    FencedError,
    SchemaError,
    SinkError,
)
from firnline.faults import VARIABLE, _seen
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc
from firnline.run.commits import check_staged
from firnline.run.joining import plan_sink
from firnline.sinks.base import EpochCommit, RestoreVersion
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.upsert import rewrite as rewriting
from firnline.sinks.delta.upsert import sink as working
from firnline.sinks.delta.upsert.rewrite import run_in_threads
from firnline.sinks.delta.upsert.sink import UpsertSink
from firnline.sources.files.options import FileSourceOptions
from firnline.storage import open_storage
from firnline.types import Json
from tests.support.ageing import DAY, age_files
from tests.support.pipelines import pipeline_options, run_once, run_to_end
from tests.support.s3 import new_bucket, s3_options
from tests.support.samples import table_rows
from tests.support.upserts import UpsertDriver, changes, read_by_delta, read_by_duckdb, sink_context, tip_of

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
EXAMPLES = 200 if os.environ.get("FIRNLINE_PROOF") else 25


def rows_of(table: str | Path, columns: list[str] | None = None) -> list[tuple[Any, ...]]:
    """The rows of an unpartitioned table, by two readers that must agree."""
    names = columns or SCHEMA.names
    by_duckdb = sorted(read_by_duckdb(str(table), names), key=repr)
    assert by_duckdb == sorted(read_by_delta(str(table), names), key=repr)
    return by_duckdb


def last_info(table: str | Path) -> dict[str, Json]:
    raw = DeltaTable(str(table)).history(1)[0]["firnline"]
    found: dict[str, Json] = json.loads(raw)
    return found


def data_files(table: str | Path) -> set[str]:
    """The data files on disk, named by the log or not."""
    return {str(p.relative_to(table)) for p in Path(table).rglob("*.parquet") if "/_" not in f"/{p.relative_to(table)}"}


def before_commit(driver: UpsertDriver, act: Callable[[], object], times: int = 1) -> None:
    """Somebody acts after our files were written and before they are committed."""
    table, left = driver.sink.table, [times]
    original = table.exchange

    def hooked(*arguments: Any, **named: Any) -> int:
        if left[0]:
            left[0] -= 1
            act()
        return original(*arguments, **named)

    table.exchange = hooked  # type: ignore[method-assign]


def counted_orders(driver: UpsertDriver) -> list[list[str]]:
    """The files of every call for orders, as they are asked for."""
    calls: list[list[str]] = []

    def run(tag: str, orders: list[dict[str, Json]]) -> list[dict[str, Json]]:
        calls.append([str(file["path"]) for order in orders for file in order["files"]])
        reports = run_in_threads(tag, json.loads(json.dumps(orders)))
        return list(json.loads(json.dumps(reports)))

    driver.run_tasks = run
    return calls


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(tmp_path / "out")


@pytest.fixture
def driver(table: str) -> UpsertDriver:
    """Ten rows in two files: 0-4 and 5-9."""
    driver = UpsertDriver(table, ["id"])
    driver.apply(changes([{"id": n, "v": "old"} for n in range(5)], SCHEMA))
    driver.apply(changes([{"id": n, "v": "old"} for n in range(5, 10)], SCHEMA))
    return driver


# -- the model ----------------------------------------------------------------------------------------

WIDE = pa.schema([("a", pa.int64()), ("b", pa.string()), ("p", pa.string()), ("v", pa.int64())])
GROWN = pa.schema([*WIDE, ("extra", pa.string()), ("s", pa.struct([("x", pa.int64())]))])
Key = tuple[Any, Any]

rows_strategy = st.fixed_dictionaries(
    {
        "a": st.sampled_from([None, 0, 1, 2, 3]),
        "b": st.sampled_from([None, "", "x", "ä" * 40, "ä" * 40 + "b"]),
        "p": st.sampled_from([None, "", "left", "right side"]),
        "v": st.integers(0, 99),
        "extra": st.sampled_from([None, "e"]),
        "s": st.sampled_from([None, {"x": 1}]),
        "_op": st.sampled_from(["insert", "update", "update", "delete"]),
        "_sequence": st.integers(0, 3),
    }
)
event_strategy = st.sampled_from(["none", "none", "none", "optimize", "append", "append twice", "both", "restart"])
epoch_strategy = st.tuples(st.lists(st.lists(rows_strategy, max_size=6), max_size=3), event_strategy, st.booleans())


class Model:
    """What the table must hold: rows by key; others may append a key twice, a change leaves one of it."""

    def __init__(self, partition_by: tuple[str, ...]) -> None:
        self._partition_by = partition_by
        self.rows: dict[Key, list[tuple[Any, ...]]] = {}

    def _value(self, row: dict[str, Any], name: str) -> Any:
        value = row.get(name)
        return None if name in self._partition_by and value == "" else value  # Delta knows no empty partition value

    def _key(self, row: dict[str, Any]) -> Key:
        return self._value(row, "a"), self._value(row, "b")

    def apply(self, rows: list[dict[str, Any]], names: list[str]) -> None:
        newest: dict[Key, dict[str, Any]] = {}
        for row in rows:
            held = newest.get(self._key(row))
            if held is None or row["_sequence"] >= held["_sequence"]:
                newest[self._key(row)] = row
        for key, row in newest.items():
            kept = {n: row[n] for n in names}
            self.rows[key] = [] if row["_op"] == "delete" else [self._tuple(kept)]

    def append(self, row: dict[str, Any]) -> None:
        self.rows.setdefault(self._key(row), []).append(self._tuple(row))

    def _tuple(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._value(row, name) for name in GROWN.names)

    def counted(self) -> Counter[str]:
        return Counter(repr(row) for held in self.rows.values() for row in held)


@pytest.mark.parametrize("partition_by", [(), ("p",), ("b",), ("b", "p")], ids=str)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(epochs=st.lists(epoch_strategy, min_size=1, max_size=6))
def test_the_table_holds_what_the_changes_say(
    partition_by: tuple[str, ...], epochs: list[tuple[list[list[dict[str, Any]]], str, bool]]
) -> None:
    """Keys with nulls, rows that move between partitions, columns that come later, others who write in between."""
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/out"
        model = Model(partition_by)
        driver = UpsertDriver(table, ["a", "b"], partition_by=partition_by)
        driver.apply(changes([], WIDE))
        schema = WIDE
        for files, event, grows in epochs:
            schema = GROWN if grows else schema
            if event == "restart":
                driver = UpsertDriver(table, ["a", "b"], partition_by=partition_by)
            else:
                before_commit(driver, lambda e=event: disturb(table, e, model))  # type: ignore[misc]
            batches = [changes([only(row, schema) for row in rows], schema) for rows in files]
            driver.apply(*batches)
            model.apply([row for rows in files for row in rows], schema.names)
            check_model(table, partition_by, model)


def only(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    return {name: row[name] for name in [*schema.names, "_op", "_sequence"]}


def disturb(table: str, event: str, model: Model) -> None:
    if event in ("optimize", "both"):
        DeltaTable(table).optimize.compact()
    for number in range({"append": 1, "append twice": 2, "both": 1}.get(event, 0)):
        row = {"a": 1 + number, "b": "x", "p": "left", "v": -1, "extra": None, "s": None}
        model.append(row)
        schema = pa.schema(DeltaTable(table).schema().to_arrow())
        write_deltalake(table, pa.Table.from_pylist([{n: row[n] for n in schema.names}], schema=schema), mode="append")


def check_model(table: str, partition_by: tuple[str, ...], model: Model) -> None:
    for found in (read_by_duckdb(table, GROWN.names, partition_by), read_by_delta(table, GROWN.names)):
        assert Counter(repr(row) for row in found) == model.counted()


# -- what a commit does -------------------------------------------------------------------------------


def test_only_files_that_hold_a_changed_key_are_replaced(driver: UpsertDriver, table: str) -> None:
    before = set(DeltaTable(table).file_uris())
    driver.apply(changes([{"id": 6, "v": "new"}, {"id": 7, "_op": "delete"}, {"id": 20, "v": "new"}], SCHEMA))
    after = set(DeltaTable(table).file_uris())
    assert len(before & after) == 1
    assert len(after) == 3, "one as it was, one rewritten with the new version in its place, one with the new row"
    kept = [(n, "old") for n in (0, 1, 2, 3, 4, 5, 8, 9)]
    assert rows_of(table) == sorted([*kept, (6, "new"), (20, "new")], key=repr)
    info = last_info(table)
    counts = [info[name] for name in ("inserted", "updated", "deleted", "files_rewritten", "rows")]
    assert counts == [1, 1, 1, 1, 3]


def test_a_new_version_takes_the_place_of_the_old_one(driver: UpsertDriver, table: str) -> None:
    driver.apply(changes([{"id": 7, "v": "new"}, {"id": 6, "_op": "delete"}], SCHEMA))
    (path,) = [p for p in DeltaTable(table).file_uris() if pq.read_table(p).column("id").to_pylist()[0] == 5]
    assert pq.read_table(path).column("id").to_pylist() == [5, 7, 8, 9]


def test_a_file_of_which_nothing_is_left_goes(driver: UpsertDriver, table: str) -> None:
    driver.apply(changes([{"id": n, "_op": "delete"} for n in range(5)], SCHEMA))
    assert len(DeltaTable(table).file_uris()) == 1
    assert rows_of(table) == [(n, "old") for n in range(5, 10)]


def test_deletes_of_absent_and_inserts_of_present_keys_are_fine(driver: UpsertDriver, table: str) -> None:
    driver.apply(changes([{"id": 99, "_op": "delete"}, {"id": 3, "v": "again", "_op": "insert"}], SCHEMA))
    assert (3, "again") in rows_of(table)
    assert len(rows_of(table)) == 10


def test_an_epoch_without_changes_commits_as_ever(driver: UpsertDriver, table: str) -> None:
    files = DeltaTable(table).file_uris()
    receipt = driver.apply()
    assert (receipt.rows, receipt.epoch) == (0, 3)
    assert DeltaTable(table).file_uris() == files
    assert DeltaTable(table).transaction_version("firnline:demo") == 3


def test_the_commit_is_no_blind_append_and_changes_data(driver: UpsertDriver, table: str) -> None:
    driver.apply(changes([{"id": 1, "v": "new"}], SCHEMA))
    log = Path(table, "_delta_log", f"{DeltaTable(table).version():020d}.json").read_text()
    actions = [json.loads(line) for line in log.splitlines()]
    assert [a["commitInfo"]["isBlindAppend"] for a in actions if "commitInfo" in a] == [False]
    assert [a[kind]["dataChange"] for kind in ("remove", "add") for a in actions if kind in a] == [True, True]


def test_new_files_carry_statistics_of_the_key(driver: UpsertDriver, table: str) -> None:
    driver.apply(changes([{"id": 1, "v": "new"}, {"id": 50, "v": "new"}], SCHEMA))
    found = pa.table(DeltaTable(table).get_add_actions(flatten=True)).to_pylist()
    bounds = {(a["min.id"], a["max.id"], a["null_count.id"], a["num_records"]) for a in found}
    assert bounds == {(0, 4, 0, 5), (5, 9, 0, 5), (50, 50, 0, 1)}


def test_a_repeated_commit_answers_with_the_first_receipt_and_writes_nothing(driver: UpsertDriver, table: str) -> None:
    commit = driver.stage(changes([{"id": 1, "v": "new"}], SCHEMA))
    first = driver.commit(commit)
    files = data_files(table)
    assert driver.sink.commit(commit) == first
    assert (DeltaTable(table).version(), data_files(table)) == (first.version, files)


def test_the_ledger_entry_is_all_that_a_sink_needs(driver: UpsertDriver, table: str) -> None:
    """A sink that lags is given the same changes, by another process, from the entry alone."""
    commit = driver.stage(changes([{"id": 1, "v": "new"}], SCHEMA))
    entry = Ledger(open_storage(table), "demo").load(commit.entry)
    check_staged(driver.sink, entry)
    later = UpsertDriver(table, ["id"])
    again = EpochCommit(entry.checkpoint, commit.entry, entry.previous, entry.staged["delta"], SCHEMA)
    assert later.sink.commit(again).epoch == 3
    assert (1, "new") in rows_of(table)
    with pytest.raises(FencedError):
        driver.apply(changes([{"id": 2, "v": "zombie"}], SCHEMA))


def test_a_missing_change_file_is_told_before_the_commit(driver: UpsertDriver, table: str) -> None:
    commit = driver.stage(changes([{"id": 1, "v": "new"}], SCHEMA))
    Path(table, commit.files[0]["path"]).unlink()
    with pytest.raises(CheckpointError, match="is gone"):
        check_staged(driver.sink, Ledger(open_storage(table), "demo").load(commit.entry))


def test_a_key_that_others_doubled_is_one_row_afterwards(driver: UpsertDriver, table: str) -> None:
    for _ in range(3):
        write_deltalake(table, pa.table({"id": [1, 1, 77], "v": ["double"] * 3}, SCHEMA), mode="append")
    driver.apply(changes([{"id": 1, "v": "new"}], SCHEMA))
    assert [row for row in rows_of(table) if row[0] == 1] == [(1, "new")]
    assert [row for row in rows_of(table) if row[0] == 77] == [(77, "double")] * 3
    assert data_files(table) >= {Path(uri).name for uri in DeltaTable(table).file_uris()}


def test_many_rows_in_small_batches_and_orders(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "BATCH_ROWS", 7)
    monkeypatch.setattr(working, "INSERT_HERE", 10)
    monkeypatch.setattr(working, "INSERT_ROWS", 40)
    monkeypatch.setattr(working, "TASK_FILES", 2)
    schema = pa.schema([*SCHEMA, ("p", pa.string())])
    driver = UpsertDriver(table, ["id"], partition_by=("p",))
    calls = counted_orders(driver)
    driver.apply(changes([{"id": n, "v": "old", "p": f"p{n % 3}"} for n in range(200)], schema))
    moved = [{"id": n, "v": "new", "p": f"p{(n + n % 2) % 3}"} for n in range(0, 300, 3)]
    driver.apply(changes(moved, schema))
    wanted = {n: (n, "old", f"p{n % 3}") for n in range(200)} | {r["id"]: (r["id"], r["v"], r["p"]) for r in moved}
    for found in (read_by_duckdb(table, schema.names, ["p"]), read_by_delta(table, schema.names)):
        assert sorted(found) == sorted(wanted.values())
    assert len(calls) == 3, "inserts; files; inserts of what had no place"


def test_a_file_from_before_all_key_columns_is_met_by_null_keys(table: str) -> None:
    write_deltalake(table, pa.table({"v": ["foreign", "foreign"]}))
    delta = DeltaTable(table)
    from deltalake import Schema

    delta.alter.add_columns(Schema.from_arrow(pa.schema([("id", pa.int64())])).fields)
    driver = UpsertDriver(table, ["id"])
    driver.apply(changes([{"id": 1, "v": "new"}], SCHEMA))
    assert len(rows_of(table)) == 3
    driver.apply(changes([{"id": None, "v": "one"}], SCHEMA))
    assert rows_of(table) == [(1, "new"), (None, "one")]


def test_columns_that_the_changes_lack_become_null(driver: UpsertDriver, table: str) -> None:
    wide = pa.schema([*SCHEMA, ("w", pa.int64())])
    driver.apply(changes([{"id": 1, "v": "new", "w": 5}, {"id": 2, "v": "new", "w": 6}], wide))
    driver.apply(changes([{"id": 1, "v": "newer"}], SCHEMA))
    found = {row[0]: row[1:] for row in rows_of(table, ["id", "v", "w"])}
    assert (found[0], found[1], found[2]) == (("old", None), ("newer", None), ("new", 6))


# -- beside other writers -----------------------------------------------------------------------------


def test_optimize_in_between_loses_and_doubles_nothing(driver: UpsertDriver, table: str) -> None:
    before_commit(driver, lambda: DeltaTable(table).optimize.compact())
    orphans = data_files(table)
    receipt = driver.apply(changes([{"id": 1, "v": "new"}, {"id": 7, "_op": "delete"}, {"id": 30, "v": "n"}], SCHEMA))
    kept = [(n, "old") for n in (0, 2, 3, 4, 5, 6, 8, 9)]
    assert rows_of(table) == sorted([*kept, (1, "new"), (30, "n")], key=repr)
    in_log = {Path(uri).name for uri in DeltaTable(table).file_uris()}
    own = {name for name in data_files(table) if name.startswith(receipt.attempt)}
    assert own <= in_log, "what was written for the files that are gone is deleted"
    assert orphans <= data_files(table), "nobody else's file is"


def test_our_own_compaction_in_between_loses_and_doubles_nothing(driver: UpsertDriver, table: str) -> None:
    before_commit(driver, lambda: compact(table))
    driver.apply(changes([{"id": 1, "v": "new"}, {"id": 7, "_op": "delete"}], SCHEMA))
    assert len(rows_of(table)) == 9
    assert (1, "new") in rows_of(table)


def test_a_conflict_does_not_repeat_what_still_stands(driver: UpsertDriver, table: str) -> None:
    """However often others append, an upsert gets through: only their new files are looked at."""
    calls = counted_orders(driver)
    appended = iter(range(100, 200))

    def append() -> None:
        write_deltalake(table, pa.table({"id": [1, next(appended)], "v": ["x"] * 2}, SCHEMA), mode="append")

    before_commit(driver, append, times=5)
    driver.apply(changes([{"id": 1, "v": "new"}, {"id": 7, "v": "new"}], SCHEMA))
    assert [len(call) for call in calls] == [2, *[1, 1] * 5], (
        "each new file once, and once more to give way to the first"
    )
    assert [row for row in rows_of(table) if row[0] == 1] == [(1, "new")]
    assert len(rows_of(table)) == 15


def test_a_conflict_with_our_own_first_write_is_recognised(driver: UpsertDriver, table: str) -> None:
    """A retried request meets what it wrote itself: the receipt is ours, and no file of it is deleted."""
    original = driver.sink.table.exchange

    def twice(*arguments: Any, **named: Any) -> int:
        original(*arguments, **named)
        raise CommitConflictError("the version was taken")

    driver.sink.table.exchange = twice  # type: ignore[method-assign]
    receipt = driver.apply(changes([{"id": 1, "v": "new"}], SCHEMA))
    assert receipt.version == DeltaTable(table).version()
    assert (1, "new") in rows_of(table)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_lost_answer_is_unknown_and_nothing_is_deleted(
    driver: UpsertDriver, table: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = driver.stage(changes([{"id": 1, "v": "new"}, {"id": 7, "_op": "delete"}, {"id": 40, "v": "n"}], SCHEMA))
    _seen.clear()
    monkeypatch.setenv(VARIABLE, f"delta.commit.{side}:1:raise")
    with pytest.raises(CommitUnknownError):
        driver.commit(commit)
    written = data_files(table)
    assert (driver.sink.find_receipt(3) is not None) == (side == "after")
    receipt = driver.commit(commit)
    assert (receipt.epoch, data_files(table)) == (3, written), "the second try uses what the first one wrote"
    assert len(rows_of(table)) == 10


def test_a_failed_rewrite_leaves_nothing_behind_and_can_be_repeated(
    driver: UpsertDriver, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = driver.stage(changes([{"id": 1, "v": "new"}, {"id": 7, "v": "new"}], SCHEMA))
    before = data_files(table)
    _seen.clear()
    monkeypatch.setenv(VARIABLE, "upsert.rewrite.after:2:raise")
    with pytest.raises(SinkError) as failed:
        driver.commit(commit)
    assert failed.value.retryable
    assert data_files(table) == before
    driver.commit(commit)
    assert [row for row in rows_of(table) if row[1] == "new"] == [(1, "new"), (7, "new")]


def test_a_data_file_with_other_rows_than_the_log_says_stops_the_commit(table: str) -> None:
    write_deltalake(table, pa.table({"id": [1, 2], "v": ["a", "b"]}, SCHEMA))
    (path,) = DeltaTable(table).file_uris()
    driver = UpsertDriver(table, ["id"])
    pq.write_table(pa.table({"id": [1], "v": ["a"]}, SCHEMA), path)
    with pytest.raises(SinkError, match="holds 1 rows, the log says 2"):
        driver.apply(changes([{"id": 1, "v": "new"}], SCHEMA))


# -- what is refused ----------------------------------------------------------------------------------


def test_a_sink_without_a_key_is_refused(table: str) -> None:
    with pytest.raises(ConfigError, match="no column identifies a row"):
        UpsertDriver(table, [])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"delta.enableDeletionVectors": "true"}, "deletionVectors"),
        ({"delta.columnMapping.mode": "name"}, "columnMapping"),
        ({"delta.appendOnly": "true"}, "append-only"),
    ],
)
def test_tables_whose_rows_cannot_be_changed_are_refused(table: str, settings: dict[str, str], word: str) -> None:
    make_foreign(table, settings)
    with pytest.raises(SchemaError, match=word):
        UpsertDriver(table, ["id"])


def make_foreign(table: str, settings: dict[str, str]) -> None:
    """A table as another engine creates it, by its log alone: delta-rs does not write all of these features."""
    fields: list[dict[str, Json]] = [
        {"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("id", "long"), ("v", "string"))
    ]
    if "delta.columnMapping.mode" in settings:
        for number, one in enumerate(fields, 1):
            one["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
    mapped = "delta.columnMapping.mode" in settings
    features = ["columnMapping"] if mapped else ["deletionVectors"]
    protocol: dict[str, Json] = {"minReaderVersion": 1, "minWriterVersion": 2}
    if "delta.appendOnly" not in settings:
        protocol = {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": features,
            "writerFeatures": features,
        }
    schema = json.dumps({"type": "struct", "fields": fields})
    metadata: dict[str, Json] = {
        "id": "0" * 8,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema,
    }
    metadata |= {"partitionColumns": [], "configuration": settings, "createdTime": 0}
    log = Path(table, "_delta_log")
    log.mkdir(parents=True)
    lines = [{"protocol": protocol}, {"metaData": metadata}]
    (log / f"{0:020d}.json").write_text("\n".join(json.dumps(line) for line in lines))


def test_a_key_that_the_table_lacks_is_refused(table: str) -> None:
    write_deltalake(table, pa.table({"v": ["a"]}))
    with pytest.raises(SchemaError, match="'id'"):
        UpsertDriver(table, ["id"])


def test_a_file_whose_name_cannot_be_repeated_is_refused_and_stays(table: str) -> None:
    write_deltalake(table, pa.table({"id": [1], "v": ["a"]}, SCHEMA))
    file = Path(table, "odd_name.parquet")
    pq.write_table(pa.table({"id": [1], "v": ["odd"]}, SCHEMA), file)
    add = {"path": "odd%5Fname.parquet", "partitionValues": {}, "size": file.stat().st_size, "modificationTime": 0}
    Path(table, "_delta_log", f"{1:020d}.json").write_text(json.dumps({"add": {**add, "dataChange": True}}))
    driver = UpsertDriver(table, ["id"])
    with pytest.raises(SchemaError, match="cannot be replaced safely"):
        driver.apply(changes([{"id": 1, "v": "new"}], SCHEMA))
    assert sorted(read_by_delta(table, SCHEMA.names)) == [(1, "a"), (1, "odd")]


def test_changes_are_never_appended_as_rows(driver: UpsertDriver, table: str) -> None:
    """A spec that said upsert and now says append, with an epoch of changes still to come."""
    commit = driver.stage(changes([{"id": 1, "v": "new"}], SCHEMA))
    options = DeltaSinkOptions(name="delta", table=table)
    sink = DeltaSink(options, sink_context(driver.ledger))
    sink.claim("another")
    with pytest.raises(ConfigError, match="was made of changes"):
        sink.commit(commit)


def test_rows_that_were_staged_to_be_appended_still_are(driver: UpsertDriver, table: str) -> None:
    """A spec that said append and now says upsert, with an epoch of rows still to come."""
    from firnline.sinks.delta.stage import ParquetStager

    stager = ParquetStager(driver.sink.stage_target(), "ab" * 8)
    stager.write(pa.RecordBatch.from_pylist([{"id": 50, "v": "row"}], schema=SCHEMA))
    driver.commit(driver.stage_files(stager.close(), SCHEMA, "ab" * 8))
    assert (50, "row") in rows_of(table)


def test_columns_that_the_commit_does_not_name_are_not_dropped(driver: UpsertDriver) -> None:
    commit = driver.stage(changes([{"id": 1, "w": 1}], pa.schema([("id", pa.int64()), ("w", pa.int64())])))
    bare = EpochCommit(commit.checkpoint, commit.entry, commit.previous, commit.files, SCHEMA)
    with pytest.raises(SchemaError, match="the table lacks: w"):
        driver.sink.commit(bare)


# -- going back and sweeping --------------------------------------------------------------------------


def test_a_rollback_takes_rows_back_and_upserts_go_on_from_there(driver: UpsertDriver, table: str) -> None:
    then, tip_then = rows_of(table), tip_of(driver)
    wide = pa.schema([*SCHEMA, ("w", pa.int64())])
    driver.apply(changes([{"id": 1, "v": "undone", "w": 1}, {"id": 7, "_op": "delete"}], wide))
    driver.apply(changes([{"id": 90, "v": "undone"}, {"id": 1, "v": "undone twice"}], SCHEMA))
    plan, problems = plan_sink(driver.sink, 2, left=False, accept=[])
    assert (problems, plan.files_restored) == ([], 2)
    assert plan.version_then is not None
    onto = tip_of(driver)
    edit = {"to_epoch": 2}
    entry = LedgerEntry(driver.stage().checkpoint, tip_then, {}, kind="rollback", onto=onto, edit=edit)
    commit = EpochCommit(entry.checkpoint, driver.ledger.stage(entry), tip_then, [], SCHEMA, kind="rollback")
    driver.sink.edit(commit, RestoreVersion(plan.version_then), onto, plan.version_now)
    assert rows_of(table) == then
    later = UpsertDriver(table, ["id"])
    assert later.epoch == 5
    later.apply(changes([{"id": 1, "v": "right"}, {"id": 8, "_op": "delete"}], SCHEMA))
    wanted = {**dict(then), 1: "right"}
    del wanted[8]
    assert dict(rows_of(table)) == wanted


def change_files(table: str) -> set[str]:
    return {p.name for p in Path(table, "_firnline", "demo", "changes").glob("*.parquet")}


def test_change_files_are_swept_below_the_floor_only(table: str) -> None:
    driver = UpsertDriver(table, ["id"], floor_behind=2)
    named = {}
    for number in range(1, 7):
        commit = driver.stage(changes([{"id": number % 2, "v": str(number)}], SCHEMA))
        named[number] = {Path(file["path"]).name for file in commit.files}
        driver.commit(commit)
    flying = driver.stage(changes([{"id": 5, "v": "in flight"}], SCHEMA))
    age_files(table, 10 * DAY)
    planned = gc(table, dry_run=True)
    assert len(change_files(table)) == 7
    report = gc(table)
    assert planned.kinds == report.kinds
    assert report.kinds["changes"].files == 3
    assert change_files(table) == named[4] | named[5] | named[6] | {Path(f["path"]).name for f in flying.files}
    driver.commit(flying)
    assert (5, "in flight") in rows_of(table)


def test_young_change_files_stay(table: str) -> None:
    driver = UpsertDriver(table, ["id"], floor_behind=0)
    for number in range(4):
        driver.apply(changes([{"id": 1, "v": str(number)}], SCHEMA))
    assert "changes" not in gc(table).kinds
    assert len(change_files(table)) == 4


def test_change_files_of_a_ledger_elsewhere_follow_that_ledger(table: str, tmp_path: Path) -> None:
    """A further sink's changes lie in its own table, and are named by the deciding sink's ledger."""
    driver = UpsertDriver(table, ["id"], floor_behind=1)
    elsewhere = open_storage(str(tmp_path / "deciding"))
    driver.ledger = Ledger(elsewhere, "demo")
    options = driver.options
    driver.sink = UpsertSink(options, sink_context(driver.ledger))
    driver.sink.claim("run", generation=1)
    kept: list[str] = []
    for number in range(4):
        commit = driver.stage(changes([{"id": 1, "v": str(number)}], SCHEMA))
        kept.append(Path(commit.files[0]["path"]).name)
        driver.commit(commit)
    age_files(table, 10 * DAY)
    report = gc(table)
    assert change_files(table) == set(kept), "the ledger is not known here"
    assert "changes" not in report.kinds
    gc(table, ledgers={"demo": elsewhere})
    assert change_files(table) == set(kept[2:])


# -- on an object store -------------------------------------------------------------------------------


@pytest.mark.s3
def test_upserts_on_an_object_store(s3: str) -> None:
    table, options = f"s3://{new_bucket(s3)}/out", s3_options(s3)
    driver = UpsertDriver(table, ["id"], storage_options=options)
    driver.apply(changes([{"id": n, "v": "old"} for n in range(1000)], SCHEMA))
    driver.apply(changes([{"id": 1, "v": "new"}, {"id": 2, "_op": "delete"}, {"id": 5000, "v": "new"}], SCHEMA))
    found = {r["id"]: r["v"] for r in DeltaTable(table, storage_options=options).to_pyarrow_table().to_pylist()}
    wanted = {**dict.fromkeys(range(1000), "old"), 1: "new", 5000: "new"}
    del wanted[2]
    assert found == wanted


# -- tables and columns that are not plain ---------------------------------------------------------------


def put_change(folder: Path, number: int, **fields: Json) -> None:
    folder.mkdir(exist_ok=True)
    row = {"id": 7, "v": number, "_op": "update", "_sequence": number, **fields}
    (folder / f"f{number}.json").write_text(json.dumps(row) + "\n")


def test_a_table_that_was_created_before_its_first_row_takes_rows_later(tmp_path: Path) -> None:
    """Until then it has no key column, and is no table to refuse."""
    sources = tuple(FileSourceOptions(name, str(tmp_path / name), poll_interval_secs=0.05) for name in "ab")
    sinks = (
        DeltaSinkOptions("main", str(tmp_path / "main"), input="a"),
        DeltaSinkOptions("two", str(tmp_path / "two"), input="b", write="upsert", key=("id",), partition_by=("p",)),
    )
    options = pipeline_options("", "", sources=sources, sinks=sinks)
    (tmp_path / "b").mkdir()
    put_change(tmp_path / "a", 1)
    run_to_end(options)
    assert not table_rows(tmp_path / "two")
    put_change(tmp_path / "a", 2)
    run_to_end(options)
    for number in (1, 2):
        put_change(tmp_path / "b", number, p="x")
        run_to_end(options)
    assert [(row["id"], row["v"]) for row in table_rows(tmp_path / "two")] == [(7, 2)]


@pytest.mark.parametrize("column", ["größe", "my col", "a%20b", "p+q=r;s"])
def test_a_partition_column_may_have_any_name(tmp_path: Path, column: str) -> None:
    sink = DeltaSinkOptions("t", str(tmp_path / "t"), write="upsert", key=("id",), partition_by=(column,))
    options = pipeline_options(str(tmp_path / "in"), sink.table, sinks=(sink,))
    for number in (1, 2, 3):
        put_change(tmp_path / "in", number, **{column: f"wörd {number // 2}"})
        run_to_end(options)
        assert [(row["id"], row["v"]) for row in table_rows(tmp_path / "t")] == [(7, number)]


def test_why_an_epoch_is_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSinkOptions("t", str(tmp_path / "t"), write="upsert", key=("id",))
    options = pipeline_options(str(tmp_path / "in"), sink.table, sinks=(sink,))
    put_change(tmp_path / "in", 1)
    run_to_end(options)
    put_change(tmp_path / "in", 2)
    monkeypatch.setattr("firnline.sinks.delta.upsert.sink.find_removable", lambda _: None)
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (3, "schema")
    assert run.result.error is not None
    assert "cannot be replaced safely" in run.result.error.message
    assert "OPTIMIZE" in run.result.error.hint
    assert {error.code for error in run.told.troubles} == {"schema"}
