"""Compaction and vacuum: fewer files, the same rows, nobody disturbed."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction, RemoveAction

import firnline.maintenance.compact
from firnline import faults
from firnline.errors import CommitConflictError, CommitUnknownError, ConfigError, SinkError
from firnline.maintenance.compact import CompactTable, compact
from firnline.maintenance.gc import gc, vacuum
from firnline.options import PipelineOptions
from firnline.sinks.delta.contents import find_removable
from tests.support.ageing import DAY, age_table
from tests.support.pipelines import known_files, run_once
from tests.support.samples import SampleInput, quarantined, table_ids

MakeOptions = Callable[..., PipelineOptions]


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    """Eight epochs of small files in three partitions, with a column and a nested field that come later."""
    for number in range(4):
        sample.add(f"a{number}.json", 6, deep={"x": 1})
    for number in range(4):
        sample.add(f"b{number}.json", 6, bad=number % 2, deep={"x": 2, "y": "later"}, note="n")
    options = make_options(max_files=1, partition_by=("month",))
    assert run_once(options).exit_code == 0
    return options


@pytest.fixture
def table(options: PipelineOptions) -> Path:
    return Path(options.sinks[0].location)


def rows(table: Path) -> Counter[str]:
    """Every row, read by DuckDB from the files that delta-rs finds in the log."""
    delta = DeltaTable(table)
    names = sorted(f.name for f in delta.schema().fields)
    uris = delta.file_uris()
    listed = ", ".join(f'"{n}"' for n in names)
    query = f"select {listed} from read_parquet({uris!r}, union_by_name=true, hive_partitioning=true)"
    return Counter(repr(row) for row in duckdb.execute(query).fetchall())


def log(table: Path, version: int) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (table / "_delta_log" / f"{version:020d}.json").read_text().splitlines()]


def data_files(table: Path) -> set[str]:
    return {str(p.relative_to(table)) for p in table.rglob("*.parquet") if not str(p).count("/_")}


def test_small_files_become_one_per_partition_with_the_same_rows(table: Path) -> None:
    before, count, version = rows(table), len(DeltaTable(table).file_uris()), DeltaTable(table).version()
    report = compact(str(table))
    assert rows(table) == before
    assert (report.files_removed, report.files_added, report.commits) == (count, 3, 1)
    assert (report.version, report.rows) == (version + 1, before.total())
    assert len(DeltaTable(table).file_uris()) == 3
    actions = log(table, version + 1)
    assert {a[k]["dataChange"] for a in actions for k in ("add", "remove") if k in a} == {False}
    assert not list((table / "_firnline/pins").iterdir())
    assert compact(str(table)).commits == 0


def test_transactions_survive(table: Path) -> None:
    ids = [f"firnline{part}:demo" for part in ("", "-gen", "-entry")]
    before = [DeltaTable(table).transaction_version(i) for i in ids]
    compact(str(table))
    assert [DeltaTable(table).transaction_version(i) for i in ids] == before
    DeltaTable(table).create_checkpoint()
    assert [DeltaTable(table).transaction_version(i) for i in ids] == before


def test_statistics_are_those_of_the_rows(table: Path) -> None:
    compact(str(table))
    adds = pa.table(DeltaTable(table).get_add_actions(flatten=True)).to_pylist()
    assert len(adds) == 3
    for add in adds:
        query = f"select count(*), min(id), max(id), count(*) - count(note) from read_parquet('{table / add['path']}')"
        found = duckdb.execute(query).fetchall()[0]
        assert found == (add["num_records"], add["min.id"], add["max.id"], add["null_count.note"])


def test_a_pipeline_goes_on_before_and_after(table: Path, options: PipelineOptions, sample: SampleInput) -> None:
    for number in range(3):
        compact(str(table))
        gc(str(table), grace_seconds=0)
        vacuum(str(table), retention_hours=0, allow_short_retention=True)
        sample.add(f"c{number}.json", 4, bad=1)
        run = run_once(options)
        assert (run.exit_code, run.told.late) == (0, 0)
        assert table_ids(table) == sample.ids
        assert quarantined(table, options.name) == sample.bad
        assert len(known_files(run.pipeline, run.pipeline.load().entry)) == 9 + number


def test_only_the_chosen_partitions_change(table: Path) -> None:
    report = compact(str(table), partitions=[("month", "=", "2026-02")])
    assert report.files_added == 1
    folders = Counter(Path(uri).parent.name for uri in DeltaTable(table).file_uris())
    assert folders["month=2026-02"] == 1
    assert min(folders["month=2026-01"], folders["month=2026-03"]) > 1
    assert compact(str(table), partitions=[("month", "in", ["2026-01", "2026-02"])]).files_added == 1
    assert compact(str(table), partitions=[("month", ">", "2026-02"), ("month", "!=", "2026-01")]).files_added == 1


@pytest.mark.parametrize("wanted", [("id", "=", 1), ("month", "~", "x")])
def test_a_filter_that_makes_no_sense_is_refused(table: Path, wanted: tuple[str, str, object]) -> None:
    with pytest.raises(ConfigError):
        compact(str(table), partitions=[wanted])


def test_large_files_stay_and_bins_do_not_exceed_the_target(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for number in range(6):
        size = 100_000 if number == 2 else 15_000
        values = [os.urandom(8).hex() for _ in range(size)]
        write_deltalake(root, pa.table({"id": range(size), "v": values}), mode="append")
    sizes = pa.table(DeltaTable(root).get_add_actions())["size_bytes"].to_pylist()
    large = max(sizes)
    assert large > 0.75 * 1024 * 1024 > sorted(sizes)[-2]
    before = rows(root)
    report = compact(str(root), target_bytes=1024 * 1024)
    assert rows(root) == before
    assert (report.files_removed, report.files_added) == (4, 2)  # pairs; the fifth finds no partner
    kept = pa.table(DeltaTable(root).get_add_actions())["size_bytes"].to_pylist()
    assert large in kept


def test_odd_partition_values_and_files_of_other_writers(tmp_path: Path) -> None:
    root = tmp_path / "t"
    values = ["a b", "c:d", "100%", "é/x", None]
    for number in range(3):
        rows_in = pa.table({"id": range(number, number + 5), "p": pa.array(values), "q": [1, 2, 3, 4, None]})
        write_deltalake(root, rows_in, mode="append", partition_by=["p", "q"])
    before = DeltaTable(root).to_pyarrow_table().sort_by([("id", "ascending"), ("p", "ascending")]).to_pylist()
    report = compact(str(root))
    delta = DeltaTable(root)
    assert delta.to_pyarrow_table().sort_by([("id", "ascending"), ("p", "ascending")]).to_pylist() == before
    assert (report.files_removed, report.files_added, report.files_skipped) == (15, 5, 0)
    assert len(delta.file_uris()) == 5


def test_files_whose_names_cannot_be_repeated_exactly_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_deltalake(root, pa.table({"id": [0]}))
    for number in range(1, 4):
        path = root / f"a_b{number}.parquet"
        pq.write_table(pa.table({"id": [number]}), path)
        add = {"path": f"a%5Fb{number}.parquet", "partitionValues": {}, "size": path.stat().st_size}
        text = json.dumps({"add": {**add, "modificationTime": 0, "dataChange": True}})
        (root / "_delta_log" / f"{number:020d}.json").write_text(text)
    report = compact(str(root))
    assert (report.files_skipped, report.commits) == (3, 0)
    assert rows(root) == Counter({f"({n},)": 1 for n in range(4)})


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("p=1/a.parquet", "p=1/a.parquet"),
        ("p=a%2520b/a.parquet", "p=a%20b/a.parquet"),
        ("p=a%20b/a.parquet", "p=a b/a.parquet"),
        ("p=a+b/a.parquet", "p=a+b/a.parquet"),
        ("p=a b/a.parquet", None),
        ("p=%c3%a9/a.parquet", None),
        ("p=%C3%A9/a.parquet", "p=é/a.parquet"),
        ("p=%C3/a.parquet", None),
        ("file:/other/a.parquet", None),
        ("p=%41/a.parquet", None),
        ("p=a%253ab/a.parquet", "p=a%3ab/a.parquet"),
        ("p=é/a.parquet", None),
        ("/other/a.parquet", None),
        ("s3://other/a.parquet", None),
    ],
)
def test_names_that_can_be_repeated(path: str, wanted: str | None) -> None:
    assert find_removable(path) == wanted


def test_delta_rs_spells_every_name_as_we_expect(tmp_path: Path) -> None:
    """A Remove under another spelling than the Add removes nothing, and the rows would be there twice."""
    root = tmp_path / "t"
    write_deltalake(root, pa.table({"id": [1]}))
    before = set(DeltaTable(root).file_uris())
    odd = [chr(code) for code in range(32, 128)] + list("\täöß€漢😀")
    names = [f"größe=a b/x{c}{number}.parquet" for number, c in enumerate(odd) if c not in "/:"]
    delta: Any = DeltaTable(root)
    delta.create_write_transaction([AddAction(name, 1, {}, 1, True, "{}") for name in names], "append", delta.schema())
    spelled = pa.table(DeltaTable(root).get_add_actions()).column("path").to_pylist()
    removable = [find_removable(path) for path in spelled]
    assert set(names) <= set(removable)
    delta = DeltaTable(root)
    removed = [RemoveAction(name, True, 1, 1, {}) for name in names]
    delta.create_write_transaction(removed, "append", delta.schema())
    assert set(DeltaTable(root).file_uris()) == before


def test_a_table_with_features_beyond_rows_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_deltalake(root, pa.table({"id": [1]}), configuration={"delta.columnMapping.mode": "name"})
    write_deltalake(tmp_path / "u", pa.table({"id": [1]}))
    text = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7}}
    text["protocol"] |= {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}  # type: ignore[dict-item]
    (tmp_path / "u" / "_delta_log" / f"{1:020d}.json").write_text(json.dumps(text))
    for place, feature in ((root, "columnMapping"), (tmp_path / "u", "deletionVectors")):
        with pytest.raises((ConfigError, SinkError), match=feature):
            compact(str(place))


def test_a_file_that_lacks_rows_stops_it_and_nothing_changes(table: Path) -> None:
    delta = DeltaTable(table)
    victim = Path(delta.file_uris()[0])
    columns = pq.read_table(victim)
    pq.write_table(columns.slice(0, columns.num_rows - 1), victim)
    files = data_files(table)
    with pytest.raises(SinkError, match="the log says"):
        compact(str(table))
    assert DeltaTable(table).version() == delta.version()
    assert data_files(table) == files
    assert not list((table / "_firnline/pins").iterdir())


def test_it_stops_between_commits(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firnline.maintenance.compact, "BATCH_BINS", 1)
    before, asked = rows(table), iter([False, True])
    report = compact(str(table), stop=lambda: next(asked))
    assert (report.stopped, report.commits) == (True, 1)
    assert rows(table) == before
    told: list[tuple[str, int, int]] = []
    assert compact(str(table), progress=lambda *facts: told.append(facts)).commits == 2
    assert [name for name, _, _ in told] == ["compacting"] * 2
    assert rows(table) == before


# -- others at work -----------------------------------------------------------------------------------


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], times: int = 1) -> None:
    """Do something when the new files are written and the commit is about to be made."""
    original = CompactTable.swap
    done: list[object] = []

    def swap(self: CompactTable, *args: Any, **named: Any) -> int:
        if len(done) < times:
            done.append(act())
        return original(self, *args, **named)

    monkeypatch.setattr(CompactTable, "swap", swap)


def test_an_append_in_between_costs_a_conflict_and_no_second_rewrite(
    table: Path, options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.add("c.json", 5)
    meanwhile(monkeypatch, lambda: run_once(options))
    report = compact(str(table))
    assert (report.conflicts, report.commits, len(report.attempts)) == (1, 1, 1)
    assert table_ids(table) == sample.ids


def test_files_that_others_removed_in_between_are_not_brought_back(
    table: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda: DeltaTable(table).delete("id = 1"))
    report = compact(str(table))
    assert table_ids(table) == sample.ids - Counter({1: 1})
    assert len(report.attempts) == 1
    assert gc(str(table), grace_seconds=0).kinds.get("data") is None  # the void attempt left nothing


def test_another_compaction_in_between_doubles_nothing(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(table)
    meanwhile(monkeypatch, lambda: DeltaTable(table).optimize.compact())
    assert compact(str(table)).files_added == 0
    assert rows(table) == before


def test_columns_that_come_in_between_are_kept(
    table: Path, options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.add("c.json", 5, fresh="new")
    meanwhile(monkeypatch, lambda: run_once(options))
    compact(str(table))
    assert table_ids(table) == sample.ids
    fresh = DeltaTable(table).to_pyarrow_table().column("fresh")
    assert len(fresh) - fresh.null_count == 5


def test_it_gives_way_when_others_always_commit_first(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firnline.maintenance.compact, "COMMIT_TRIES", 3)
    before, files = rows(table), data_files(table)

    def interfere() -> None:
        metadata = CommitProperties(custom_metadata={"other": "x"})
        delta = DeltaTable(table)
        delta.create_write_transaction([], "append", delta.schema(), partition_by=["month"], commit_properties=metadata)

    meanwhile(monkeypatch, interfere, times=99)
    with pytest.raises(CommitConflictError) as caught:
        compact(str(table))
    assert (caught.value.exit_code, caught.value.retryable) == (3, True)
    assert rows(table) == before
    assert data_files(table) == files
    assert not list((table / "_firnline/pins").iterdir())


def test_ingestion_never_fails_because_of_it(
    table: Path, options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firnline.maintenance.compact, "BATCH_BINS", 1)
    done, problems, compactions = threading.Event(), [], []

    def work() -> None:
        while not done.is_set():
            try:
                compactions.append(compact(str(table)))
                gc(str(table), grace_seconds=0)
                vacuum(str(table), retention_hours=0, allow_short_retention=True)
            except CommitConflictError:
                continue
            except Exception as error:
                problems.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(6):
            sample.add(f"d{number}.json", 6)
            sample.add(f"e{number}.json", 6)
            run = run_once(options)
            assert (run.exit_code, run.told.troubles) == (0, [])
    finally:
        done.set()
        thread.join()
    assert problems == []
    assert sum(c.commits for c in compactions) > 0
    assert table_ids(table) == sample.ids
    assert run_once(options).exit_code == 0


def test_a_sweep_without_grace_leaves_its_files_alone(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, kept = rows(table), []
    meanwhile(monkeypatch, lambda: kept.append(gc(str(table), grace_seconds=0).kept["being compacted"]))
    compact(str(table))
    assert kept == [3]
    assert rows(table) == before


@pytest.mark.parametrize("point", ["delta.compact.before", "delta.compact.after", "delta.sync.after"])
def test_a_lost_answer_is_looked_up(table: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    before, version = rows(table), DeltaTable(table).version()
    faults._seen.clear()
    monkeypatch.setenv(faults.VARIABLE, f"{point}:1:raise")
    report = compact(str(table))
    assert (report.commits, report.version) == (1, version + 1)
    assert rows(table) == before


def test_an_answer_that_stays_lost_deletes_nothing(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firnline.maintenance.compact, "COMMIT_TRIES", 2)
    before, count = rows(table), len(data_files(table))

    def swap(self: CompactTable, *args: Any, **named: Any) -> int:
        raise CommitUnknownError("no answer")

    monkeypatch.setattr(CompactTable, "swap", swap)
    with pytest.raises(CommitUnknownError):
        compact(str(table))
    assert len(data_files(table)) == count + 3
    assert rows(table) == before
    assert gc(str(table), grace_seconds=0).kept["being compacted"] == 3


# -- vacuum -------------------------------------------------------------------------------------------


def test_vacuum_deletes_removed_files_after_the_retention_and_no_orphans(table: Path) -> None:
    before = rows(table)
    removed = compact(str(table)).files_removed
    stray = table / "stray.parquet"
    pq.write_table(pa.table({"id": [1]}), stray)
    assert vacuum(str(table)).files == 0
    age_table(table, 8 * DAY)
    planned = vacuum(str(table), dry_run=True)
    assert (planned.files, len(data_files(table))) == (removed, removed + 4)
    report = vacuum(str(table))
    assert (report.files, report.size_bytes, report.retention_hours) == (removed, planned.size_bytes, 168)
    assert data_files(table) == {str(Path(u).relative_to(table)) for u in DeltaTable(table).file_uris()} | {stray.name}
    assert rows(table) == before
    assert vacuum(str(table)).files == 0


def test_vacuum_refuses_less_than_the_retention_of_the_table(table: Path) -> None:
    compact(str(table))
    with pytest.raises(ConfigError, match="168"):
        vacuum(str(table), retention_hours=1)
    assert vacuum(str(table), retention_hours=1, allow_short_retention=True).files == 0
    assert vacuum(str(table), retention_hours=0, allow_short_retention=True).files > 0


def test_vacuum_follows_the_retention_that_the_table_asks_for(table: Path) -> None:
    DeltaTable(table).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 2 days"})
    removed = compact(str(table)).files_removed
    age_table(table, 3 * DAY)
    assert vacuum(str(table)).files == removed


def test_vacuum_keeps_what_is_pinned_or_pending(table: Path) -> None:
    version = DeltaTable(table).version()
    names = sorted(data_files(table))
    before = rows(table)
    compact(str(table))
    age_table(table, 30 * DAY)
    pins = table / "_firnline" / "pins"
    (pins / "v.json").write_text(json.dumps({"format": 1, "versions": [version]}))
    assert vacuum(str(table)).files == 0
    assert DeltaTable(table, version=version).to_pyarrow_table().num_rows == before.total()
    (pins / "v.json").write_text(json.dumps({"format": 1, "files": names[:1]}))
    pending = table / "_staging" / "pending" / "u.meta.json"
    pending.parent.mkdir(parents=True)
    pending.write_text(json.dumps({"path": names[1], "size": 1, "record_count": 1}))
    assert vacuum(str(table)).files == len(names) - 2
    assert {names[0], names[1]} <= data_files(table)


def test_vacuum_reads_removals_from_checkpoints(table: Path) -> None:
    removed = compact(str(table)).files_removed
    age_table(table, 8 * DAY)
    DeltaTable(table).update_incremental()
    assert vacuum(str(table), dry_run=True).files == removed
    DeltaTable(table).create_checkpoint()  # expired removals leave the log: from here on the files are orphans
    assert vacuum(str(table)).files == 0
    assert gc(str(table)).kinds["data"].files == removed
