"""`write: upsert` straight from a source: the newest record of every key is the table's row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.errors import SchemaError, SinkError
from firnline.history.edits.rollback import Rollback
from firnline.history.quarantine import load_quarantine, load_quarantine_files
from firnline.options import FieldOptions, PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.base import Stager
from firnline.sinks.delta import kind
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.upsert.sink import UpsertSink
from firnline.types import Json, Receipt
from tests.support.pipelines import pipeline_options, run_once
from tests.support.upserts import read_by_duckdb


class People:
    """A folder of files, and the table that a pipeline upserts."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.table = root, root / "in", str(root / "out")
        self.folder.mkdir()
        self._files = 0

    def add(self, *rows: dict[str, Any], name: str = "") -> str:
        self._files += 1
        path = self.folder / (name or f"{self._files:03}.json")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def options(self, **settings: Any) -> PipelineOptions:
        return pipeline_options(str(self.folder), self.table, **{"write": "upsert", "key": ("id",), **settings})

    def run(self, *rows: dict[str, Any], threads: int = 1, **settings: Any) -> None:
        if rows:
            self.add(*rows)
        run = run_once(self.options(**settings), threads=threads)
        assert run.exit_code == 0, run.result.error

    def read(self, *columns: str, partition_by: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
        return sorted(read_by_duckdb(self.table, columns, partition_by), key=repr)

    def info(self) -> dict[str, Any]:
        """What the newest commit says of itself."""
        history = DeltaTable(self.table).history(1)[0]
        found: dict[str, Any] = json.loads(history["firnline"])
        return found


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


def test_the_later_record_of_a_key_counts(people: People) -> None:
    people.add({"id": 1, "v": "b"}, {"id": 2, "v": "x"}, {"id": 1, "v": "c"}, name="b.json")
    people.add({"id": 1, "v": "z"}, {"id": 3, "v": "a"}, name="a.json")
    people.run(threads=2)
    assert people.read("id", "v") == [(1, "c"), (2, "x"), (3, "a")]
    people.run({"id": 2, "v": "new"})
    assert people.read("id", "v") == [(1, "c"), (2, "new"), (3, "a")]


def test_sequence_by_counts_within_an_epoch_and_across_epochs(people: People) -> None:
    newer = {"id": 1, "at": 9, "v": "newest"}
    people.run(newer, {"id": 1, "at": 3, "v": "old"}, {"id": 2, "at": 5, "v": "b"}, sequence_by="at")
    people.run({"id": 1, "at": 8, "v": "late"}, {"id": 2, "at": 5, "v": "the same time"}, sequence_by="at")
    assert people.read("id", "at", "v") == [(1, 9, "newest"), (2, 5, "the same time")]
    assert people.info()["older"] == 1
    people.run({"id": 1, "v": "no time"}, {"id": 2, "at": 6, "v": "c"}, {"id": 3, "v": "no time"}, sequence_by="at")
    assert people.read("id", "at", "v") == [(1, 9, "newest"), (2, 6, "c"), (3, None, "no time")]


def test_a_record_deletes_its_key_unless_the_table_holds_a_newer_row(people: People) -> None:
    settings: dict[str, Any] = {"sequence_by": "at", "delete_when": {"op": ("D", "delete")}}
    people.run({"id": 1, "at": 1, "op": "I"}, {"id": 2, "at": 7, "op": "I"}, {"id": 3, "at": 1, "op": "I"}, **settings)
    people.run({"id": 1, "at": 2, "op": "D"}, {"id": 2, "at": 6, "op": "delete"}, {"id": 9, "op": "D"}, **settings)
    assert people.read("id", "at") == [(2, 7), (3, 1)]
    people.run({"id": 3, "at": 3, "op": "I"}, {"id": 3, "at": 2, "op": "D"}, **settings)
    assert people.read("id", "at") == [(2, 7), (3, 3)]


def test_records_without_a_key_are_quarantined_with_their_bytes(people: People) -> None:
    people.run({"id": 1, "v": "a"}, {"v": "none"}, {"id": None, "v": "null"})
    assert people.read("id", "v") == [(1, "a")]
    people.run({"id": "seven", "v": "no number"}, {"id": 2, "v": "b"}, {"v": "none again"})
    assert people.read("id", "v") == [(1, "a"), (2, "b")]
    bad = [
        (row["reason"], row["record"], json.loads(row["raw"])["v"])
        for row in load_quarantine(open_pipeline(people.options()))
    ]
    assert sorted(bad) == [
        ("missing-required", 0, "no number"),
        ("missing-required", 1, "none"),
        ("missing-required", 2, "none again"),
        ("missing-required", 2, "null"),
    ]
    assert DeltaTable(people.table).schema().fields[0].nullable


def test_no_record_has_the_key(people: People) -> None:
    people.add({"v": 1})
    run = run_once(people.options())
    assert isinstance(run.result.error, SchemaError)
    assert "001.json, record 0: no value in the key column 'id'" in str(run.result.error)


def test_records_that_are_change_rows_stay_what_they_are(people: People) -> None:
    people.run(
        {"id": 1, "v": "a", "_op": "insert", "_sequence": 2}, {"id": 1, "v": "b", "_op": "update", "_sequence": 1}
    )
    people.run({"id": 2, "v": "c"})
    assert people.read("id", "v") == [(1, "a"), (2, "c")]
    people.run({"id": 1, "_op": "delete"}, {"id": 3, "v": "d"})
    assert people.read("id", "v") == [(2, "c"), (3, "d")]
    assert DeltaTable(people.table).to_pyarrow_table().column_names == ["id", "v"]


def test_a_key_column_gets_a_wider_type(people: People) -> None:
    people.run(*({"id": n, "p": "a", "v": "one"} for n in range(4)), partition_by=("p",))
    people.run({"id": 2.0, "p": "b", "v": "moved"}, {"id": 2.5, "p": "a", "v": "new"}, partition_by=("p",))
    assert pa.schema(DeltaTable(people.table).schema().to_arrow()).field("id").type == pa.float64()
    rows = people.read("id", "p", "v", partition_by=("p",))
    assert rows == [
        (0.0, "a", "one"), (1.0, "a", "one"), (2.0, "b", "moved"), (2.5, "a", "new"), (3.0, "a", "one")
    ]  # fmt: skip


def test_an_order_column_gets_a_wider_type_and_others_come_later(people: People) -> None:
    people.run({"id": 1, "at": 5}, {"id": 2, "at": 5}, sequence_by="at")
    people.run({"id": 1, "at": 4.5, "w": "x"}, {"id": 2, "at": 5.5, "w": "y"}, sequence_by="at")
    assert people.read("id", "at", "w") == [(1, 5.0, None), (2, 5.5, "y")]


def test_a_table_that_has_a_key_twice_keeps_its_newest_row(people: People) -> None:
    people.run({"id": 1, "at": 5}, sequence_by="at")
    twin = pa.table(
        {"id": [1], "at": [2]},
        schema=pa.schema(DeltaTable(people.table).schema().to_arrow()).empty_table().select(["id", "at"]).schema,
    )
    write_deltalake(people.table, twin, mode="append")
    people.run({"id": 1, "at": 3}, sequence_by="at")
    assert people.read("id", "at") == [(1, 5)]
    assert people.info()["older"] == 1


def test_a_rollback_gives_back_the_rows_of_that_epoch(people: People) -> None:
    settings: dict[str, Any] = {"sequence_by": "at", "delete_when": {"op": ("D",)}}
    people.run({"id": 1, "at": 1}, {"id": 2, "at": 1}, **settings)
    people.run({"id": 1, "at": 2}, {"id": 2, "at": 2, "op": "D"}, {"id": 3, "at": 2}, **settings)
    assert people.read("id", "at") == [(1, 2), (3, 2)]
    Rollback(open_pipeline(people.options(**settings)), 1).perform("test")
    assert people.read("id", "at") == [(1, 1), (2, 1)]
    people.run(**settings)
    assert people.read("id", "at") == [(1, 2), (3, 2)]


def test_a_sink_behind_the_deciding_one_takes_the_same_records(people: People) -> None:
    other = str(people.root / "copy")
    sinks = (
        DeltaSinkOptions("all", people.table),
        DeltaSinkOptions("newest", other, write="upsert", key=("id",), sequence_by="at", required=False),
    )
    people.add({"id": 1, "at": 2}, {"id": 1, "at": 1}, {"id": 2, "at": 1})
    assert run_once(pipeline_options(str(people.folder), "", sinks=sinks)).exit_code == 0
    assert len(read_by_duckdb(people.table, ["id"])) == 3
    assert sorted(read_by_duckdb(other, ["id", "at"])) == [(1, 2), (2, 1)]


# -- records that do not fit --------------------------------------------------------------------------


def quarantined(people: People, **settings: Any) -> list[tuple[str, int, int, bytes]]:
    rows = load_quarantine(open_pipeline(people.options(**settings)))
    return sorted((row["reason"], row["line"], row["record"], row["raw"]) for row in rows)


def test_a_record_with_an_unknown_operation_is_quarantined(people: People) -> None:
    people.run({"id": 1, "v": "a"})
    path = people.folder / "b.json"
    path.write_text('{"id":2,"_op":"c"}\r\n\n{"id":3,"v":"b"}\n{"id":4,"_op":"D"}\n{"id":5,"_op":"insert"}\n')
    people.run()
    assert people.read("id") == [(1,), (3,), (5,)]
    assert quarantined(people) == [
        ("does-not-fit", 1, 0, b'{"id":2,"_op":"c"}'),
        ("does-not-fit", 4, 2, b'{"id":4,"_op":"D"}'),
    ]
    people.run({"id": 1, "_op": 7}, {"id": 3, "_op": "delete"}, {"id": 6, "_op": {"a": 1}})
    assert people.read("id") == [(1,), (5,)]
    assert len(quarantined(people)) == 4


@pytest.mark.parametrize("value", ["c", 1.5, {"a": 1}, [1], 2**70])
def test_a_record_with_a_sequence_that_is_no_number_is_quarantined(people: People, value: Any) -> None:
    people.run({"id": 2, "_sequence": value, "v": "b"}, {"id": 1, "_sequence": 1, "v": "a"}, {"id": 3, "v": "c"})
    assert people.read("id", "v") == [(1, "a"), (3, "c")]
    assert [bad[:3] for bad in quarantined(people)] == [("does-not-fit", 1, 0)]
    people.run({"id": 1, "_sequence": value, "v": "b"})
    assert people.read("id", "v") == [(1, "a"), (3, "c")]
    assert len(quarantined(people)) == 2


def test_only_bad_records_come_first(people: People) -> None:
    people.run({"id": 2, "_sequence": "c", "v": "b"})
    people.run({"id": 2, "_op": "c", "v": "b"})
    people.run({"id": 1, "v": "a"})
    assert people.read("id", "v") == [(1, "a")]


def test_delete_when_may_name_the_operation(people: People) -> None:
    settings: dict[str, Any] = {"delete_when": {"_op": ("D",)}}
    people.run({"id": 1, "_op": "I"}, {"id": 2, "_op": "I"}, **settings)
    people.run({"id": 1, "_op": "D"}, {"id": 2, "_op": "U"}, {"id": 3, "_op": "I"}, **settings)
    assert people.read("id") == [(2,), (3,)]


def test_a_record_whose_order_does_not_fit_is_quarantined(people: People) -> None:
    people.run({"id": 1, "at": "2026-01-01T00:00:00Z", "v": "old"}, sequence_by="at")
    people.run(
        {"id": 1, "at": "2026-01-02T00:00:00.123456789Z", "v": "new"},
        {"id": 2, "at": None, "v": "no time"},
        {"id": 3, "at": "soon", "v": "no time stamp"},
        {"id": 4, "at": "2026-01-02T00:00:00Z", "v": "d"},
        sequence_by="at",
    )
    assert people.read("id", "v") == [(1, "old"), (2, "no time"), (4, "d")]
    assert [bad[:3] for bad in quarantined(people)] == [("does-not-fit", 1, 0), ("does-not-fit", 3, 2)]


def test_rows_of_parquet_that_do_not_fit_are_quarantined(people: People) -> None:
    settings: dict[str, Any] = {"sequence_by": "at", "format": "parquet"}
    first = {"id": [1], "at": [1], "_op": ["insert"], "_sequence": [1]}
    pq.write_table(pa.table(first), people.folder / "a.parquet")
    people.run(**settings)
    later = {"id": [2, 3, 4, 5], "at": ["x", None, None, None], "_op": ["update", "c", None, "insert"]}
    pq.write_table(pa.table(later), people.folder / "b.parquet")
    people.run(**settings)
    assert people.read("id") == [(1,), (4,), (5,)]
    assert [bad[:3] for bad in quarantined(people)] == [("does-not-fit", 1, 0), ("does-not-fit", 2, 1)]


def test_records_of_csv_that_do_not_fit_are_quarantined(people: People) -> None:
    settings: dict[str, Any] = {"sequence_by": "at", "format": "csv"}
    (people.folder / "a.csv").write_text("id,at,_op\n1,1,insert\n")
    people.run(**settings)
    (people.folder / "b.csv").write_text("id,at,_op\n2,x,update\n3,2,c\n4,,\n5,3,insert\n")
    people.run(**settings)
    assert people.read("id") == [(1,), (4,), (5,)]
    assert [(bad[0], bad[3]) for bad in quarantined(people)] == [
        ("does-not-fit", b"2,x,update"),
        ("does-not-fit", b"3,2,c"),
    ]


# -- deletes by a value of any type -------------------------------------------------------------------

NEVER = "9999-12-31T00:00:00Z"
VALUES: dict[str, tuple[str, Any, Any, tuple[str, ...]]] = {  # type, value of a delete, another, how the spec spells it
    "timestamp": ("", NEVER, "2026-01-01T00:00:00Z", (NEVER, "9999-12-31", "9999-12-31 02:00:00+02:00")),
    "date": ("date", "2026-01-01", "2026-01-02", ("2026-01-01",)),
    "number": ("", 1.0, 1.5, ("1", "1.0")),
    "int32": ("int32", 1, 2, ("1",)),
    "float32": ("float32", 0.1, 0.2, ("0.1",)),
    "decimal": ("decimal(10,4)", 1.5, 2, ("1.5", "1.50")),
    "boolean": ("", True, False, ("true",)),
    "binary": ("binary", "/w==", "YQ==", ("/w==",)),
    "json": ("json", "D", 1, ("D",)),
    "json number": ("json", 1, "D", ("1",)),
    "text of a number": ("string", 1, "D", ("1",)),
}


@pytest.mark.parametrize("case", list(VALUES))
def test_a_delete_is_recognised_by_value_whatever_the_type_of_the_column(people: People, case: str) -> None:
    kind, gone, stays, spellings = VALUES[case]
    declared = {"schema": SchemaOptions((FieldOptions("d", kind),))} if kind else {}
    for spelled in spellings:
        settings: dict[str, Any] = {"delete_when": {"d": ("other", spelled)}, **declared}
        people.run({"id": 1, "d": stays}, {"id": 2, "d": stays}, {"id": 3, "d": None}, {"id": 4, "d": gone}, **settings)
        assert people.read("id") == [(1,), (2,), (3,)], spelled
        people.run({"id": 2, "d": gone}, {"id": 4, "d": stays}, **settings)
        assert people.read("id") == [(1,), (3,), (4,)], spelled


def test_a_value_that_does_not_fit_the_column_of_deletes_is_quarantined(people: People) -> None:
    settings: dict[str, Any] = {"delete_when": {"d": ("gone", NEVER)}}
    people.run({"id": 1, "d": "2026-01-01T00:00:00Z"}, {"id": 2, "d": "2026-01-01T00:00:00Z"}, **settings)
    people.run({"id": 1, "d": "gone"}, {"id": 2, "d": NEVER}, {"id": 3}, **settings)
    assert people.read("id") == [(1,), (3,)]
    assert [(bad[0], json.loads(bad[3])["id"]) for bad in quarantined(people)] == [("does-not-fit", 1)]


# -- columns in folder names --------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["ndjson", "csv", "parquet"])
def test_records_of_a_file_outside_the_folders_of_the_key_are_quarantined(people: People, file_format: str) -> None:
    settings: dict[str, Any] = {"key": ("day", "id"), "format": file_format, "max_bad_ratio": 1.0}

    def add(name: str, *rows: dict[str, Any]) -> None:
        path = people.folder / name
        path.parent.mkdir(exist_ok=True)
        table = pa.Table.from_pylist(list(rows))
        if file_format == "ndjson":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif file_format == "csv":
            csv.write_csv(table, path)
        else:
            pq.write_table(table, path)

    add("day=1/a", {"id": 1, "v": "a"}, {"id": 2, "v": "b"})
    add("outside", {"id": 1, "v": "no day"}, {"id": 3, "v": "no day"})
    add("z=1/other", {"id": 1, "v": "no day"})
    people.run(**settings)
    assert people.read("id", "v") == [(1, "a"), (2, "b")]
    assert [bad[:3] for bad in quarantined(people)] == [
        ("missing-required", line, record) for line, record in lines_of(file_format)
    ]
    add("day=2/b", {"id": 1, "v": "c"})
    add("zz", {"id": 1, "day": "1", "v": "no folder"})
    people.run(**settings)
    assert people.read("id", "v") == [(1, "a"), (1, "c"), (2, "b")]
    assert len(quarantined(people)) == 4
    add("zzz", {"id": 9, "v": "alone"})
    people.run(**settings)
    assert people.read("id", "v") == [(1, "a"), (1, "c"), (2, "b")]
    assert len(quarantined(people)) == 5


def lines_of(file_format: str) -> list[tuple[int, int]]:
    """Line and number of three records: two of one file, then one of another."""
    first = 2 if file_format == "csv" else 1
    return sorted([(first, 0), (first + 1, 1), (first, 0)])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"key": ("day", "id")}, "missing-required"), ({"key": ("id",), "sequence_by": "day"}, "does-not-fit")],
)
def test_records_whose_folder_does_not_fit_are_quarantined(
    people: People, settings: dict[str, Any], reason: str
) -> None:
    settings = {**settings, "schema": SchemaOptions((FieldOptions("day", "date"),)), "max_bad_ratio": 1.0}
    for name, number in (("day=2026-01-01", 1), ("day=soon", 2), ("day=2026-01-02", 3)):
        (people.folder / name).mkdir()
        people.add({"id": number}, name=f"{name}/a.json")
    people.run(**settings)
    assert people.read("id") == [(1,), (3,)]
    assert [bad[0] for bad in quarantined(people)] == [reason]


def test_quarantined_records_of_a_file_outside_the_folders_stay_quarantined(people: People) -> None:
    settings: dict[str, Any] = {"key": ("day", "id"), "max_bad_ratio": 1.0}
    (people.folder / "day=1").mkdir()
    people.add({"id": 1}, {"v": "no id"}, name="day=1/a.json")
    people.add({"id": 2}, {"v": "no id"}, name="outside.json")
    people.run(**settings)
    assert len(quarantined(people)) == 3
    pipeline = open_pipeline(people.options(**settings))
    files = [file.describe([number for number, _ in file.rows]) for file in load_quarantine_files(pipeline)]
    pipeline.requests.ask_replay("files", files, discard=False, ids=pipeline.ids)
    people.run(**settings)
    assert people.read("id") == [(1,)]
    assert len(quarantined(people)) == 3


# -- another key in the spec --------------------------------------------------------------------------


def follower(people: People, key: tuple[str, ...], *, required: bool = False, **settings: Any) -> PipelineOptions:
    upsert: dict[str, Any] = {"write": "upsert", "key": key, "required": required, **settings}
    sinks = (
        DeltaSinkOptions("all", people.table),
        DeltaSinkOptions("newest", str(people.root / "copy"), **upsert),
    )
    return pipeline_options(str(people.folder), "", sinks=sinks)


def refuse_to_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kind.open_stager

    def open_stager(target: dict[str, Json], attempt: str) -> Stager:
        if target["sink"] == "newest":
            raise OSError("no room")
        return real(target, attempt)

    monkeypatch.setattr(kind, "open_stager", open_stager)


def refuse_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Receipt:
        raise SinkError("down")

    monkeypatch.setattr(UpsertSink, "commit", fail)


def test_another_key_is_refused_and_the_old_one_loses_nothing(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    people.add({"id": 1, "k": "x"})
    assert run_once(follower(people, ("id",))).exit_code == 0
    people.add({"id": 2}, {"id": 3}, {"id": 4})
    with monkeypatch.context() as down:
        refuse_commits(down)
        run_once(follower(people, ("id",)))
    run_once(follower(people, ("k",)))
    assert sorted(read_by_duckdb(str(people.root / "copy"), ["id"])) == [(1,)]
    error = run_once(follower(people, ("k",), required=True)).result.error
    assert isinstance(error, SchemaError)
    assert "were upserted by the key id, and the spec upserts with k" in str(error)
    assert run_once(follower(people, ("id",))).exit_code == 0
    assert sorted(read_by_duckdb(str(people.root / "copy"), ["id"])) == [(1,), (2,), (3,), (4,)]


def test_an_epoch_is_applied_with_the_key_that_it_was_made_with(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    people.add({"id": 1, "k": "x"}, {"id": 2}, {"id": 3}, {"id": 2, "k": "y"})
    with monkeypatch.context() as down:
        refuse_commits(down)
        run_once(follower(people, ("id",)))
    run_once(follower(people, ("k",)))
    assert sorted(read_by_duckdb(str(people.root / "copy"), ["id", "k"])) == [(1, "x"), (2, "y"), (3, None)]


@pytest.mark.parametrize(
    "later",
    [
        {"key": ("k",)},
        {"key": ("id",), "sequence_by": "v"},
        {"key": ("id",), "sequence_by": "at", "delete_when": {"op": ("I",)}},
        {"key": ("id",)},
    ],
    ids=["key", "order", "deletes", "neither"],
)
def test_parked_rows_are_staged_with_the_settings_that_their_epoch_was_made_with(
    people: People, monkeypatch: pytest.MonkeyPatch, later: dict[str, Any]
) -> None:
    made_with: dict[str, Any] = {"sequence_by": "at", "delete_when": {"op": ("D",)}}
    people.add(
        {"id": 1, "k": "x", "at": 2, "v": 1, "op": "I"},
        {"id": 1, "k": "y", "at": 1, "v": 2, "op": "I"},
        {"id": 2, "k": "z", "at": 1, "v": 1, "op": "I"},
        {"id": 2, "k": "z", "at": 2, "v": 1, "op": "D"},
        {"id": 3, "k": "z", "at": 1, "v": 1, "op": "I"},
    )
    with monkeypatch.context() as broken:
        refuse_to_stage(broken)
        assert run_once(follower(people, ("id",), **made_with)).exit_code == 0
    assert list(Path(people.table).rglob("parked-*"))
    run_once(follower(people, **later))
    assert sorted(read_by_duckdb(str(people.root / "copy"), ["id", "k"])) == [(1, "x"), (3, "z")]


def test_parked_rows_of_an_epoch_that_appended_are_appended(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    people.add({"id": 1, "k": "x"}, {"id": 1, "k": "y"})
    with monkeypatch.context() as broken:
        refuse_to_stage(broken)
        assert run_once(follower(people, (), write="append")).exit_code == 0
    run_once(follower(people, ("id",)))
    assert sorted(read_by_duckdb(str(people.root / "copy"), ["id", "k"])) == [(1, "x"), (1, "y")]


def test_the_order_of_the_key_columns_does_not_matter(people: People) -> None:
    people.run({"id": 1, "k": "x", "v": 1}, key=("id", "k"))
    people.run({"id": 1, "k": "x", "v": 2}, key=("k", "id"))
    assert people.read("v") == [(2,)]


# -- against a model ----------------------------------------------------------------------------------


def expected(options: PipelineOptions, key: tuple[str, ...] = ("id",)) -> dict[Any, dict[str, Any]]:
    """The rows by key: epoch after epoch, from the record ranges in the ledger."""
    pipeline = open_pipeline(options)
    rows: dict[Any, dict[str, Any]] = {}
    for entry in reversed(list(pipeline.entries(pipeline.load().entry))):
        newest: dict[Any, dict[str, Any]] = {}
        inputs = sorted(entry.inputs.get("files", []), key=lambda one: str(one["path"]).encode())
        for item in inputs:
            lines = Path(str(item["path"])).read_text().splitlines()[int(item["from"]) : int(item["to"])]
            for row in map(json.loads, lines):
                of_row = tuple(row[name] for name in key)
                if of_row not in newest or rank(row) >= rank(newest[of_row]):
                    newest[of_row] = row
        for of_row, row in newest.items():
            if of_row in rows and rank(row) < rank(rows[of_row]):
                continue
            rows[of_row] = row
            if row["op"] == "D":
                del rows[of_row]
    return rows


def rank(row: dict[str, Any]) -> float:
    return -1 if row["at"] is None else float(row["at"])


@pytest.mark.parametrize("seed", range(6))
def test_random_files_give_the_rows_of_a_model(people: People, seed: int) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "sequence_by": "at",
        "delete_when": {"op": ("D",)},
        "partition_by": ("p",),
        "max_events": 25,
        "max_files": 3,
    }
    made = 0
    for _ in range(6):
        for _ in range(rng.randint(1, 4)):
            rows = [
                {
                    "id": rng.randint(0, 30),
                    "at": rng.choice([None, *range(8)]),
                    "p": f"p{rng.randint(0, 2)}",
                    "op": rng.choice("UUUUD"),
                    "v": (made := made + 1),
                }
                for _ in range(rng.randint(1, 30))
            ]
            people.add(*rows, name=f"{rng.randint(0, 99):02}-{made}.json")  # often late: any order of names
        people.run(threads=rng.choice([1, 2]), **settings)
        wanted = expected(people.options(**settings)).values()
        columns = ("id", "at", "p", "op", "v")
        rows_wanted = sorted((tuple(row[name] for name in columns) for row in wanted), key=repr)
        assert people.read(*columns, partition_by=("p",)) == rows_wanted


KEYS: dict[str, list[Any]] = {  # by type: values, of which none equals another
    "timestamp": [
        "2026-01-01T00:00:00Z",
        "2026-01-01T00:00:00.5Z",
        "2026-01-01T00:00:00.000001Z",
        "1969-12-31T23:59:59Z",
    ],
    "date": ["2026-01-01", "1969-12-31", "0001-01-01"],
    "decimal(38,10)": ["1.5", "-0.01", "0.0000000001", "12345678901234567890.5"],
    "float64": [0.1, -1.5, 1e20, 1e-7, 100000.0, 0.0],
    "float32": [0.5, -1.5, 1e30],
    "int32": [-1, 0, 7],
    "bool": [True, False],
    "string": ["a b/%2F=\u00fc", "a", "A", "1", "2026-01-01 00:00:00"],
    "binary": ["YQ==", "YWI="],
}


@pytest.mark.parametrize("key", [("k",), ("id", "k")])
@pytest.mark.parametrize("type_name", list(KEYS))
def test_random_keys_of_a_type_that_is_a_partition_give_the_rows_of_a_model(
    people: People, type_name: str, key: tuple[str, ...]
) -> None:
    rng = random.Random(type_name)
    settings: dict[str, Any] = {
        "key": key,
        "sequence_by": "at",
        "delete_when": {"op": ("D",)},
        "partition_by": ("k",),
        "schema": SchemaOptions((FieldOptions("k", type_name),)),
    }
    made = 0
    for _ in range(3):
        rows = [
            {
                "id": rng.randint(0, 3),
                "k": rng.choice(KEYS[type_name]),
                "at": rng.choice([None, *range(4)]),
                "op": rng.choice("UUUUD"),
                "v": (made := made + 1),
            }
            for _ in range(12)
        ]
        people.run(*rows, **settings)
        wanted = expected(people.options(**settings), key).values()
        assert people.read("id", "at", "v") == sorted(((r["id"], r["at"], r["v"]) for r in wanted), key=repr)


def test_both_zeros_are_one_key_of_a_partition(people: People) -> None:
    settings: dict[str, Any] = {"key": ("k",), "partition_by": ("k",)}
    people.run({"k": -0.0, "v": "a"}, {"k": 0.5, "v": "b"}, **settings)
    people.run({"k": 0.0, "v": "c"}, **settings)
    assert people.read("v") == [("b",), ("c",)]
    people.run({"k": -0.0, "v": "d"}, **settings)
    assert people.read("v") == [("b",), ("d",)]
