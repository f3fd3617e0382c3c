"""Delta tables as sources, in pipelines: chains, rollbacks upstream, changes, lineage, and what stops a reader."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.errors import SchemaError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.position import PositionEdit
from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.testing.sources import SourceDriver
from tests.support.duck import execute
from tests.support.pipelines import LocalRun, make_epochs, pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids


class Chain:
    """A pipeline that writes a table, and one that reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sample = SampleInput(folder / "in")
        self.up, self.down = str(folder / "bronze"), str(folder / "silver")
        self.epochs = 0

    def bronze(self, **settings: Any) -> PipelineOptions:
        return pipeline_options(str(self.sample.folder), self.up, "bronze", **settings)

    def silver(self, *, sink: dict[str, Any] | None = None, batch: dict[str, Any] | None = None, **source: Any) -> Any:
        return pipeline_options(
            "",
            self.down,
            "silver",
            sources=[DeltaSourceOptions("bronze", self.up, **source)],
            sinks=[DeltaSinkOptions("silver", self.down, **(sink or {}))],
            **(batch or {}),
        )

    def write(self, epochs: int = 1) -> None:
        make_epochs(self.sample, self.bronze(), epochs, first=self.epochs + 1)
        self.epochs += epochs

    def is_same(self) -> bool:
        return ids(self.down) == ids(self.up)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def ids(table: str) -> Counter[int]:
    """The ids in a table, read by DuckDB."""
    files = DeltaTable(table).file_uris()
    if not files:
        return Counter()
    rows = execute("SELECT id FROM read_parquet($files, union_by_name := true)", {"files": files}).fetchall()
    return Counter(row[0] for row in rows)


def roll_back(options: PipelineOptions, to: int) -> None:
    Rollback(open_pipeline(options), to).perform("test")


def failed(options: PipelineOptions) -> Any:
    run = run_once(options)
    assert run.result.error is not None, "the run was to fail"
    return run.result.error


def epochs_of(run: LocalRun) -> int:
    assert run.exit_code == 0, run.result.error
    return len(run.told.epochs)


# -- a chain ------------------------------------------------------------------------------------------


def test_rows_pass_once_whenever_the_reader_runs(chain: Chain) -> None:
    assert run_once(chain.silver()).exit_code == 0, "a run waits for a table that does not exist"
    for _ in range(3):
        chain.write(2)
        assert epochs_of(run_once(chain.silver())) == 1
        assert chain.is_same()
    assert ids(chain.down) == chain.sample.ids
    assert epochs_of(run_once(chain.silver())) == 0


def test_versions_without_rows_cause_no_epoch(chain: Chain) -> None:
    chain.write(3)
    run_to_end(chain.silver())
    for _ in range(2):
        run_to_end(chain.bronze())  # a claim
    DeltaTable(chain.up).optimize.compact()
    assert epochs_of(run_once(chain.silver())) == 0
    chain.write(1)
    assert epochs_of(run_once(chain.silver())) == 1
    assert chain.is_same()


def test_a_large_version_is_spread_over_epochs_and_tasks(chain: Chain) -> None:
    table = pa.table({"id": range(20_000), "text": ["x" * 50] * 20_000})
    for number in range(3):
        write_deltalake(chain.up, table.slice(number * 7_000, 7_000), mode="append")
    silver = chain.silver(batch={"max_events": 1_900}, start=0)
    assert epochs_of(run_once(silver, threads=3)) == 11
    assert chain.is_same()


@pytest.mark.parametrize(("start", "expected"), [("beginning", 9), ("now", 0), (3, 6)])
def test_a_first_run_starts_where_the_spec_says(chain: Chain, start: Any, expected: int) -> None:
    chain.write(1)  # versions 0 (create) and 1
    first = DeltaTable(chain.up).version()
    chain.write(2)
    silver = chain.silver(start=first + 1 if start == 3 else start)
    run_to_end(silver)
    assert sum(ids(chain.down).values()) == expected
    chain.write(1)
    run_to_end(silver)
    assert sum(ids(chain.down).values()) == expected + 3


# -- rollbacks upstream -------------------------------------------------------------------------------


def test_a_reader_that_lags_skips_what_was_undone(chain: Chain) -> None:
    chain.write(2)
    run_to_end(chain.silver())
    chain.write(2)
    roll_back(chain.bronze(), 2)
    run_to_end(chain.bronze())  # reads the files of the undone epochs again
    run_to_end(chain.silver())
    assert chain.is_same()
    assert ids(chain.down) == chain.sample.ids


def test_a_reader_of_undone_rows_names_the_epoch_to_go_back_to(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.silver())
    chain.write(1)
    run_to_end(chain.silver())
    roll_back(chain.bronze(), 1)
    error = failed(chain.silver())
    assert (error.code, error.exit_code, error.fields["to_epoch"]) == ("source-undone", 1, 1)
    assert "epoch 2 of pipeline 'bronze'" in error.message
    assert "in epoch 2" in error.message
    assert "firnline rollback --to 1" in error.hint
    roll_back(chain.silver(), 1)
    run_to_end(chain.silver())
    assert chain.is_same()
    run_to_end(chain.bronze())
    run_to_end(chain.silver())
    assert chain.is_same()
    assert ids(chain.down) == chain.sample.ids


def test_a_reader_beyond_the_target_that_read_no_undone_row_goes_on(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.bronze())  # a claim after the rows
    run_to_end(chain.silver())
    chain.write(1)
    roll_back(chain.bronze(), 1)
    run_to_end(chain.silver())
    assert chain.is_same()


def test_a_restore_of_delta_itself_is_followed(chain: Chain) -> None:
    for number in range(3):
        write_deltalake(chain.up, pa.table({"id": [number]}), mode="append")
    run_to_end(chain.silver())
    DeltaTable(chain.up).restore(0)
    error = failed(chain.silver())
    assert (error.code, error.fields["to_epoch"]) == ("source-undone", None)
    assert "--fresh-after 1" in error.hint
    assert "versions 1 to 2" in error.message


def test_a_fresh_start_upstream_takes_back_what_was_read(chain: Chain) -> None:
    chain.write(2)
    run_to_end(chain.silver())
    start_over(open_pipeline(chain.bronze()), 2, "test", truncate=True)
    error = failed(chain.silver())
    assert error.code == "source-undone"
    start_over(open_pipeline(chain.silver()), 1, "test", truncate=True)
    run_to_end(chain.bronze())
    run_to_end(chain.silver())
    assert chain.is_same()
    assert ids(chain.down) == chain.sample.ids


def test_a_reader_of_changes_takes_the_undoing_as_deletes(chain: Chain) -> None:
    silver = chain.silver(on_change="change_feed", sink=UPSERT)
    chain.write(2)
    run_to_end(silver)
    chain.write(1)
    run_to_end(silver)
    roll_back(chain.bronze(), 1)
    run_to_end(silver)
    assert chain.is_same()
    assert sum(ids(chain.down).values()) == 3
    run_to_end(chain.bronze())
    run_to_end(silver)
    assert chain.is_same()
    assert ids(chain.down) == chain.sample.ids


# -- changes ------------------------------------------------------------------------------------------

UPSERT = {"write": "upsert", "key": ("id",), "delete_when": {"_change_type": ("delete", "update_preimage")}}


def contents(table: str) -> list[tuple[Any, ...]]:
    files = DeltaTable(table).file_uris()
    query = "SELECT id, v FROM read_parquet($files, union_by_name := true) ORDER BY ALL"
    rows: list[tuple[Any, ...]] = execute(query, {"files": files}).fetchall()
    return rows


def change(table: str, *, feed: bool) -> None:
    """Rows, updates, deletes, and a merge, by delta-rs."""
    settings = {"delta.enableChangeDataFeed": "true"} if feed else {}
    rows = pa.table({"id": pa.array(range(10), pa.int64()), "v": pa.array(range(10), pa.int64())})
    write_deltalake(table, rows, configuration=settings)
    write_deltalake(table, pa.table({"id": [10, 11], "v": [10, 11]}), mode="append")


def change_more(table: str) -> None:
    delta = DeltaTable(table)
    delta.delete("id = 3")
    delta.update(updates={"v": "v + 100"}, predicate="id < 6")
    new = pa.table({"id": pa.array([5, 20], pa.int64()), "v": pa.array([-5, -20], pa.int64())})
    merge = delta.merge(new, "t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    write_deltalake(table, pa.table({"id": [30], "v": [30]}), mode="append")


def test_commits_that_change_rows_stop_a_reader_by_default(chain: Chain) -> None:
    change(chain.up, feed=False)
    run_to_end(chain.silver())
    change_more(chain.up)
    error = failed(chain.silver())
    assert (error.code, error.fields["version"]) == ("source-changed", 2)
    assert "DELETE" in error.message


def test_rows_before_a_change_are_committed_before_it_stops_the_reader(chain: Chain) -> None:
    change(chain.up, feed=False)
    DeltaTable(chain.up).delete("id = 3")
    error = failed(chain.silver(start=0))
    assert error.code == "source-changed"
    assert sum(ids(chain.down).values()) == 12


def test_ignored_changes_are_counted_and_logged(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    change(chain.up, feed=False)
    run_to_end(chain.silver(on_change="ignore"))
    change_more(chain.up)
    run = run_once(chain.silver(on_change="ignore"))
    assert epochs_of(run) == 1
    assert ids(chain.down) == Counter([*range(12), 30])
    checkpoint = run.pipeline.deciding.load().checkpoint
    assert checkpoint is not None
    assert checkpoint.positions["bronze"]["ignored"] == 3
    assert caplog.text.count("commit ignored") == 3


@pytest.mark.parametrize("feed", [True, False])
@pytest.mark.parametrize("most", [1_000, 2])
def test_changes_are_read_as_rows(chain: Chain, feed: bool, most: int) -> None:
    silver = chain.silver(on_change="change_feed", sink=UPSERT, batch={"max_events": most})
    change(chain.up, feed=feed)
    run_to_end(silver)
    assert contents(chain.down) == contents(chain.up)
    change_more(chain.up)
    run_to_end(silver)
    assert contents(chain.down) == contents(chain.up)
    names = DeltaTable(chain.down).schema().to_arrow()
    assert {"_change_type", "_commit_version", "_commit_timestamp"} <= set(pa.schema(names).names)


def test_change_rows_are_those_of_deltas_own_reader(chain: Chain) -> None:
    change(chain.up, feed=True)
    change_more(chain.up)
    run_to_end(chain.silver(on_change="change_feed", start=0))
    query = "SELECT id, v, _change_type, _commit_version FROM {} ORDER BY ALL"
    found = execute(query.format("read_parquet($f)"), {"f": DeltaTable(chain.down).file_uris()}).fetchall()
    feed = pa.table(DeltaTable(chain.up).load_cdf(starting_version=0))
    wanted = feed.select(["id", "v", "_change_type", "_commit_version"]).to_pylist()
    assert found == sorted(tuple(row.values()) for row in wanted)


def test_an_upsert_upstream_reaches_a_reader_of_changes(chain: Chain, tmp_path: Path) -> None:
    """delta-rs writes no change files for Firnline's upserts: removed and added files tell the changes."""
    sink = DeltaSinkOptions("bronze", chain.up, write="upsert", key=("id",))
    bronze = pipeline_options(str(chain.sample.folder), "", "bronze", sinks=[sink])
    silver = chain.silver(on_change="change_feed", sink=UPSERT)
    for number in range(4):
        lines = [json.dumps({"id": n, "v": number * 100 + n}) for n in range(number, number + 5)]
        chain.sample.path(f"{number}.json").write_text("\n".join(lines) + "\n")
        run_to_end(pipeline_options(str(chain.sample.folder), "", "bronze", sinks=[sink], min_age_secs=0.0))
        run_to_end(silver)
        assert contents(chain.down) == contents(chain.up)
    assert bronze.name == "bronze"


# -- columns ------------------------------------------------------------------------------------------


def test_partition_values_come_from_the_log(chain: Chain) -> None:
    rows = pa.table(
        {
            "id": [1, 2, 3],
            "day": pa.array(["2024-05-01", "2024-05-02", None]).cast(pa.date32()),
            "at": pa.array(["2024-05-01 12:30:00", None, "2024-05-01 12:30:01"])
            .cast(pa.timestamp("us"))
            .cast(pa.timestamp("us", "UTC")),
            "place": ["a b/ü=%", "x", None],
            "n": pa.array([1, 2, None], pa.int32()),
        }
    )
    write_deltalake(chain.up, rows, partition_by=["day", "at", "place", "n"])
    run_to_end(chain.silver())
    found = DeltaTable(chain.down).to_pyarrow_table().select(rows.schema.names).sort_by("id")
    assert found.to_pylist() == rows.to_pylist()
    assert found.schema.types == rows.schema.types


def test_columns_that_upstream_adds_and_widens_arrive(chain: Chain) -> None:
    def put(number: int, record: dict[str, Any]) -> None:
        chain.sample.path(f"{number}.json").write_text(json.dumps({"id": number, **record}) + "\n")

    bronze = chain.bronze(min_age_secs=0.0)
    put(1, {"v": 1})
    run_to_end(bronze)
    run_to_end(chain.silver())
    put(2, {"v": 1.5, "new": "text"})
    run_to_end(bronze)
    run = run_once(chain.silver())
    assert run.exit_code == 0, run.result.error
    query = "SELECT id, v, new FROM read_parquet($f, union_by_name := true) ORDER BY id"
    for table in (chain.up, chain.down):
        assert execute(query, {"f": DeltaTable(table).file_uris()}).fetchall() == [(1, 1.0, None), (2, 1.5, "text")]


def test_rescued_values_and_lineage_of_upstream_pass_unchanged(chain: Chain) -> None:
    chain.write(1)
    chain.sample.path("x.json").write_text('{"id": 77, "month": {"odd": 1}, "v": 1}\n')
    run_to_end(chain.bronze(lineage=True, min_age_secs=0.0))
    run_to_end(chain.silver())
    query = "SELECT id, _rescued_data, _firnline_file, _firnline_epoch FROM read_parquet($f, union_by_name := true)"
    query += " ORDER BY id"
    up, down = (execute(query, {"f": DeltaTable(t).file_uris()}).fetchall() for t in (chain.up, chain.down))
    assert up == down
    assert json.loads(down[-1][1]) == {"month": {"odd": 1}}


def test_lineage_names_version_pipeline_and_epoch(chain: Chain) -> None:
    chain.write(2)
    run_to_end(chain.silver(lineage=True))
    chain.write(1)
    run_to_end(chain.silver(lineage=True))
    query = """SELECT id, _firnline_file, _firnline_record, _firnline_upstream_version, _firnline_upstream_pipeline,
        _firnline_upstream_epoch, _firnline_epoch FROM read_parquet($f) ORDER BY id"""
    rows = execute(query, {"f": DeltaTable(chain.down).file_uris()}).fetchall()
    assert [row[5] for row in rows] == [1] * 3 + [2] * 3 + [3] * 3, "also for rows of the first snapshot"
    assert {row[4] for row in rows} == {"bronze"}
    assert [row[6] for row in rows] == [1] * 6 + [2] * 3
    for number, file, record, version, *_ in rows:
        assert execute("SELECT id FROM read_parquet($f)", {"f": file}).fetchall()[record] == (number,)
        assert file in DeltaTable(chain.up, version=version).file_uris()
    run_to_end(pipeline_options("", str(chain.folder / "gold"), "gold", sources=[
        DeltaSourceOptions("silver", chain.down, lineage=True)
    ], lineage=True))  # fmt: skip
    gold = execute("SELECT * FROM read_parquet($f)", {"f": DeltaTable(str(chain.folder / "gold")).file_uris()})
    assert {row[0] for row in gold.fetchall()} == set(chain.sample.ids)


# -- what stops a reader ------------------------------------------------------------------------------


def test_a_vacuumed_file_names_version_and_way_out(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.silver())
    chain.write(2)
    version = DeltaTable(chain.up).version()
    DeltaTable(chain.up).optimize.compact()
    delta = DeltaTable(chain.up)
    assert delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    error = failed(chain.silver())
    assert error.code == "source-gap"
    assert "vacuumed" in error.message
    assert "delta.deletedFileRetentionDuration" in error.hint
    assert error.fields["version"] < version


def test_a_cleaned_log_names_the_gap(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.silver())
    first = DeltaTable(chain.up).version() + 1
    chain.write(3)
    DeltaTable(chain.up).create_checkpoint()
    for number in range(first + 2):
        Path(chain.up, f"_delta_log/{number:020d}.json").unlink()
    error = failed(chain.silver())
    assert error.code == "source-gap"
    assert f"versions {first} to {first + 1}" in error.message
    assert f"firnline position set SOURCE {first + 1}" in error.hint
    PositionEdit(open_pipeline(chain.silver()), "set", "bronze", str(first + 1)).perform("person")
    run_to_end(chain.silver())
    assert ids(chain.down) < ids(chain.up), "the rows of the gap are missing, and nothing else"


def test_a_damaged_commit_is_never_read_in_part(chain: Chain) -> None:
    chain.write(2)
    commit = Path(chain.up, f"_delta_log/{DeltaTable(chain.up).version():020d}.json")
    commit.write_text("\n".join(line for line in commit.read_text().splitlines() if '"add"' not in line) + "\n")
    error = failed(chain.silver(start=0))
    assert error.code == "source-gap"
    assert "counts 1" in error.message


def test_a_replaced_table_is_refused(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.silver())
    shutil.rmtree(chain.up)
    for _ in range(5):
        write_deltalake(chain.up, pa.table({"id": [1]}), mode="append")
    error = failed(chain.silver())
    assert error.code == "source-replaced"
    assert DeltaTable(chain.up).metadata().id in error.message


def test_a_table_that_is_gone_is_waited_for(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.silver())
    shutil.move(chain.up, chain.up + ".away")
    error = failed(chain.silver())
    assert (error.code, error.retryable) == ("source", True)
    shutil.move(chain.up + ".away", chain.up)
    run_to_end(chain.silver())


def test_a_shallow_clone_and_a_deletion_vector_are_refused_by_name(chain: Chain) -> None:
    chain.write(1)
    commit = Path(chain.up, f"_delta_log/{DeltaTable(chain.up).version():020d}.json")
    text = commit.read_text()
    for old, new, word in (
        (
            '"dataChange":true',
            '"deletionVector":{"storageType":"u","pathOrInlineDv":"ab^-aqEH.-t@S}K{vb[*k^","offset":4,"sizeInBytes":40,"cardinality":1},"dataChange":true',
            "deletion vector",
        ),
        ('"add":{"path":"', '"add":{"path":"s3://elsewhere/', "outside the table"),
    ):
        commit.write_text(text.replace(old, new))
        error = failed(chain.silver(start=0))
        assert error.code == "schema"
        assert word in error.message


@pytest.mark.parametrize("renamed", [True, False])
def test_column_mapping_that_begins_while_a_reader_follows_is_refused(chain: Chain, renamed: bool) -> None:
    """Files have the old name of a renamed column: its values would be null."""
    chain.write(1)
    driver = SourceDriver(DeltaSourceOptions("bronze", chain.up))
    first = driver.step(driver.source.start(None))
    assert first is not None
    table, name = DeltaTable(chain.up), "_delta_log/{:020d}.json"
    fields = json.loads(table.schema().to_json())["fields"]
    for number, field in enumerate(fields):
        mapping = {"delta.columnMapping.id": number + 1, "delta.columnMapping.physicalName": field["name"]}
        field.update(metadata=mapping, name=field["name"] + ("_new" if renamed and field["name"] != "id" else ""))
    columns = json.dumps({"type": "struct", "fields": fields})
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": 1, "operation": "RENAME COLUMN"}},
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {"metaData": {
            "id": str(table.metadata().id), "format": {"provider": "parquet", "options": {}}, "createdTime": 1,
            "schemaString": columns, "partitionColumns": [], "configuration": {"delta.columnMapping.mode": "name"},
        }},
    ]  # fmt: skip
    Path(chain.up, name.format(table.version() + 1)).write_text("".join(f"{json.dumps(one)}\n" for one in actions))
    source = Path(chain.up, name.format(table.version()))  # one more append, of the same rows
    Path(chain.up, name.format(table.version() + 2)).write_text(source.read_text())
    with pytest.raises(SchemaError, match="column mapping"):
        driver.step(first.after)


def test_a_rollback_of_the_reader_reads_the_same_rows_again(chain: Chain) -> None:
    for _ in range(3):
        chain.write(1)
        run_to_end(chain.silver())
    roll_back(chain.silver(), 1)
    run_to_end(chain.silver())
    assert chain.is_same()


def test_a_moved_table_is_read_on(chain: Chain) -> None:
    chain.write(1)
    run_to_end(chain.silver())
    moved = chain.up + "-moved"
    shutil.move(chain.up, moved)
    chain.up = moved
    assert failed(chain.silver()).code == "source-moved"
    for _ in range(2):
        chain.write(1)
        run = run_once(chain.silver(), moved=(moved.removesuffix("-moved"), moved))
        assert run.exit_code == 0, run.result.error
    assert table_ids(chain.down) == chain.sample.ids
