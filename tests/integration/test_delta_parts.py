"""A Delta sink with a template: the contract, parts, names, growth, keys, history edits, and parts that lost rows."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.checkpoint.ledger import Ledger
from firnline.errors import BadRowError, FencedError, SchemaError, SinkError, SinkWentBackError
from firnline.sinks.base import EpochCommit, KeepRows, ReplaceRows, RestoreVersion
from firnline.sinks.delta.kind import open_sink as open_delta
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.delta.parts import sink as parts_module
from firnline.sinks.delta.parts.sink import DeltaPartsSink
from firnline.sinks.delta.parts.table import PartTable
from firnline.sinks.known import COPY
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, OpenSink, ReadRows, SinkConformance, SinkDriver, open_in, rows
from tests.support.postgres_sink import read_all_letters
from tests.support.s3 import new_bucket, s3_options


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def parts_rows(lake: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every table below a folder, read by delta-rs, by the name of the table."""
    tables = sorted(log.parent for log in lake.glob("**/_delta_log"))
    return {str(table.relative_to(lake)): DeltaTable(str(table)).to_pyarrow_table().to_pylist() for table in tables}


def part_ids(lake: Path) -> dict[str, list[int]]:
    return {name: sorted(row["id"] for row in found) for name, found in parts_rows(lake).items()}


def drive(
    lake: Path, ledger: Ledger, *, template: str = "{region}", generation: int = 1, run: str = "", **settings: Any
) -> SinkDriver:
    """Begin a run of the pipeline `demo` into tables below `lake`."""
    name = settings.pop("name", "copy")
    options = DeltaPartsOptions(name, f"{lake}/{template}", **settings)
    changes = settings.get("write") == "upsert"
    return SinkDriver(lambda context: open_delta(options, context), ledger, generation=generation, run=run,
                      changes=changes)  # fmt: skip


def of(region: str | None, *ids: int, **columns: Any) -> list[dict[str, Any]]:
    return rows(*ids, region=region, **columns)


class TestAppend(SinkConformance):
    @pytest.fixture
    def open_sink(self, lake: Path) -> OpenSink:
        options = DeltaPartsOptions("copy", f"{lake}/{{id}}")
        return lambda context: open_delta(options, context)

    @pytest.fixture
    def read_rows(self, lake: Path) -> ReadRows:
        return lambda: [row for found in parts_rows(lake).values() for row in found]


class TestUpsert(TestAppend):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, lake: Path) -> OpenSink:
        options = DeltaPartsOptions("copy", f"{lake}/{{id}}", write="upsert", key=("id",))
        return lambda context: open_delta(options, context)


# -- parts ------------------------------------------------------------------------------------------------


def test_a_table_is_created_with_its_first_row_and_only_touched_ones_are_committed(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger)
    run.apply(of("eu", 1, 2) + of("us", 3))
    run.apply(of("eu", 4))
    run.apply(of("asia", 5))
    run.apply(of("us", 6))
    assert part_ids(lake) == {"asia": [5], "eu": [1, 2, 4], "us": [3, 6]}
    versions = {name: DeltaTable(str(lake / name)).version() for name in ("asia", "eu", "us")}
    assert versions == {"asia": 1, "eu": 2, "us": 2}
    assert DeltaTable(str(lake / "eu")).transaction_version("firnline:demo") == 2
    assert run.sink.load().epoch == 4
    assert run.sink.find_parts() == [str(lake / name) for name in ("asia", "eu", "us")]


def test_two_sinks_of_a_run_may_begin_at_once_in_the_same_folder(
    lake: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each proves for itself that nobody can overwrite a head there."""
    keys: list[str] = []
    monkeypatch.setattr(parts_module, "check_put_if_absent", lambda storage, key: keys.append(key))
    for name in ("one", "two"):
        drive(lake, ledger, template=f"{name}-{{region}}", name=name, run="run").apply(of("eu", 1))
    assert len(set(keys)) == 2
    assert part_ids(lake) == {"one-eu": [1], "two-eu": [1]}


@pytest.mark.parametrize(
    ("template", "row", "table"),
    [
        ("orders_{region}", {"region": "eu"}, "orders_eu"),
        ("{region}/{kind}", {"region": "eu", "kind": "orders"}, "eu/orders"),
        ("{region}/orders", {"region": "Nord-Ost.7"}, "Nord-Ost.7/orders"),
        ("{shard}", {"shard": 7}, "7"),
        ("{flag}", {"flag": True}, "true"),
        ("{day}", {"day": date(2024, 2, 29)}, "2024-02-29"),
    ],
)
def test_columns_of_several_types_name_a_table(
    lake: Path, ledger: Ledger, template: str, row: dict[str, Any], table: str
) -> None:
    drive(lake, ledger, template=template).apply([{"id": 1, **row}])
    assert part_ids(lake) == {table: [1]}


HOSTILE = [
    "", ".", "..", "../up", "/etc", "a/b", "a\\b", "a\0b", "a\nb", "a\x7fb", "_firnline", "_delta_log", ".hidden", "~",
    "a b", "a%2e", "s3://x", "{region}", "é", "-rf", "x" * 300, "a\u2028b", "CON:",
]  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTILE, None])
def test_a_name_that_does_not_match_stops_the_sink(lake: Path, ledger: Ledger, name: str | None) -> None:
    run = drive(lake, ledger)
    with pytest.raises(BadRowError, match="demo/1/numbers/1"):
        run.apply(of("eu", 1) + of(name, 2))
    assert part_ids(lake) == {}
    assert {path.name for path in lake.parent.iterdir()} == {"lake", "ledger"}


def test_rows_with_such_names_become_dead_letters_whatever_the_pattern_allows(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger, on_bad_row="dead_letter", parts_allowed="(?s).*")
    fine = ("é", "a b", "~", "-rf")  # by this pattern
    bad = [name for name in HOSTILE if name not in fine]
    run.apply([{"id": number, "region": name} for number, name in enumerate([*bad, None, *fine])])
    assert sum((Counter({name: len(ids)}) for name, ids in part_ids(lake).items()), Counter()) == Counter(fine)
    letters = read_all_letters(ledger)
    assert sorted(letter.row for letter in letters) == list(range(len(bad) + 1))
    assert {path.name for path in lake.parent.iterdir()} == {"lake", "ledger"}
    assert {path.name for path in lake.iterdir()} == {"_firnline", *fine}


def test_the_number_of_parts_is_bounded(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger, template="{id}", max_parts=3)
    run.apply(rows(1, 2))
    with pytest.raises(SinkError, match="max_parts is 3"):
        run.sink.commit(run.stage(rows(2, 3, 4)))
    with pytest.raises(SinkError, match="max_parts is 3"):
        run.sink.commit(run.stage(rows(3, 4, 5, 6)))
    assert part_ids(lake) == {"1": [1], "2": [2]}
    run.apply(rows(1, 2, 3))
    assert part_ids(lake) == {"1": [1, 1], "2": [2, 2], "3": [3]}


def test_a_column_that_cannot_name_a_table_is_refused(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger)
    with pytest.raises(SchemaError, match="no column 'region'"):
        run.apply(rows(1))
    with pytest.raises(SchemaError, match="'region', which is double"):
        run.apply(rows(1, region=1.5))


def test_a_table_that_somebody_else_owns_is_refused(lake: Path, ledger: Ledger, tmp_path: Path) -> None:
    """A sink of the same pipeline, another sink with a template, or another pipeline."""
    SinkDriver(lambda context: open_delta(DeltaSinkOptions("main", f"{lake}/eu"), context), ledger, generation=1).apply(
        rows(1)
    )
    elsewhere = Ledger(LocalStorage(str(tmp_path / "elsewhere")), PIPELINE)
    drive(lake, elsewhere, name="other").apply(of("us", 2))
    run = drive(lake, ledger, on_bad_row="dead_letter")
    run.apply(of("eu", 3) + of("us", 4) + of("asia", 5))
    assert part_ids(lake) == {"asia": [5], "eu": [1], "us": [2]}
    reasons = {letter.row: letter.reason for letter in read_all_letters(ledger)}
    assert reasons == {
        0: "table 'eu' belongs to another sink of this pipeline",
        1: "table 'us' belongs to sink 'other'",
    }


def test_a_table_of_a_person_may_be_a_part(lake: Path, ledger: Ledger) -> None:
    """Its rows stay, also after a rollback to before the first of ours."""
    write_deltalake(str(lake / "eu"), pa.table({"id": [100], "region": ["eu"]}))
    run = drive(lake, ledger)
    run.apply(of("us", 1))
    run.apply(of("eu", 2))
    assert part_ids(lake) == {"eu": [2, 100], "us": [1]}
    run.edit(run.stage_edit("rollback", to_epoch=1), RestoreVersion(run.sink.version_of(1)))
    assert part_ids(lake) == {"eu": [100], "us": [1]}


def test_columns_are_added_and_widened_per_part(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger)
    run.apply(of("eu", 1, n=1) + of("us", 2, n=2))
    run.apply(of("eu", 3, n=1.5, note="x"))
    assert [row["n"] for row in sorted(parts_rows(lake)["eu"], key=lambda row: row["id"])] == [1.0, 1.5]
    assert {row["id"]: row["note"] for row in parts_rows(lake)["eu"]} == {1: None, 3: "x"}
    assert [set(row) for row in parts_rows(lake)["us"]] == [{"id", "region", "n"}]
    run.apply(of("us", 4, n=2.5, note="y"))
    assert {row["id"]: (row["n"], row["note"]) for row in parts_rows(lake)["us"]} == {2: (2.0, None), 4: (2.5, "y")}


def test_a_copy_takes_the_place_of_all_rows(lake: Path, ledger: Ledger) -> None:
    """Also in tables that it has no rows for; and it goes back like any epoch."""
    run = drive(lake, ledger)
    run.apply(of("eu", 1, n=1) + of("us", 2, n=2))
    commit = run.stage(of("eu", 3, n=1.5) + of("asia", 4, n=2.0))
    run.commit(replace(commit, shape={**commit.shape, COPY: True}))
    assert part_ids(lake) == {"asia": [4], "eu": [3], "us": []}
    run.apply(of("us", 5, n=3.0))
    assert part_ids(lake) == {"asia": [4], "eu": [3], "us": [5]}
    run.edit(run.stage_edit("rollback", to_epoch=1), RestoreVersion(run.sink.version_of(1)))
    assert part_ids(lake) == {"asia": [], "eu": [1], "us": [2]}


# -- keys -------------------------------------------------------------------------------------------------


def test_records_are_upserted_within_their_part(lake: Path, ledger: Ledger) -> None:
    options = DeltaPartsOptions(
        "copy", f"{lake}/{{region}}", write="upsert", key=("id",), sequence_by="at", delete_when={"op": ("D",)}
    )
    run = SinkDriver(lambda context: open_delta(options, replace(context, input_is_source=True)), ledger, generation=1)
    run.apply(of("eu", 1, 2, at=5, op="I") + of("us", 1, at=5, op="I"))
    run.apply(of("eu", 1, at=6, op="D") + of("eu", 2, at=4, op="U") + of("us", 1, at=9, op="U"))
    found = {name: {row["id"]: row["at"] for row in rows} for name, rows in parts_rows(lake).items()}
    assert found == {"eu": {2: 5}, "us": {1: 9}}
    assert not list(lake.glob("*/_firnline/demo/changes/*.parquet")), "change rows go with their commit"


@pytest.mark.parametrize("write", ["append", "upsert"])
def test_every_part_goes_back_exactly(lake: Path, ledger: Ledger, write: str) -> None:
    settings: dict[str, Any] = {"write": write, **({"key": ("id",)} if write == "upsert" else {})}
    run = drive(lake, ledger, **settings)
    run.apply(of("eu", 1, v="a") + of("us", 2, v="a"))
    run.apply(of("us", 3, v="a"))
    before = parts_rows(lake)
    run.apply(of("eu", 1, 4, v="b", more=1) + of("asia", 5, v="b", more=1))
    run.apply(of("asia", 6, v="c"))
    plan, refused = run.sink.plan_return(2, ())
    assert (refused, plan.version_then) == ([], 2)
    if write == "append":
        assert plan.rows_removed == 4
    untouched = DeltaTable(str(lake / "us")).version()
    run.edit(run.stage_edit("rollback", to_epoch=2), RestoreVersion(run.sink.version_of(2)))
    assert parts_rows(lake) == {**before, "asia": []}
    assert DeltaTable(str(lake / "us")).version() == untouched
    run.apply(of("asia", 7, v="d") + of("us", 8, v="d"))
    assert part_ids(lake) == {"asia": [7], "eu": [1], "us": [2, 3, 8]}
    run.edit(run.stage_edit("fresh", truncate=True), ReplaceRows())
    assert part_ids(lake) == {"asia": [], "eu": [], "us": []}


# -- runs that die, sleep, meet ---------------------------------------------------------------------------


class Sleeper:
    """A run that stops at its second part, and goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._commit = PartTable.commit
        self._count = 0
        self.left: list[tuple[PartTable, EpochCommit]] = []
        monkeypatch.setattr(PartTable, "commit", lambda *arguments: self._first_only(*arguments))
        monkeypatch.setattr(parts_module, "WORKERS", 1)

    def _first_only(self, table: PartTable, commit: EpochCommit, run_tasks: Any = None) -> Any:
        self._count += 1
        if self._count > 1:
            self.left.append((table, commit))
            raise SinkError("asleep")
        return self._commit(table, commit, run_tasks)

    def wake(self) -> None:
        for table, commit in self.left:
            self._commit(table, commit)


def sleep_between_parts(monkeypatch: pytest.MonkeyPatch, run: SinkDriver, found: list[dict[str, Any]]) -> Any:
    with monkeypatch.context() as patch:
        sleeper = Sleeper(patch)
        commit = run.stage(found)
        with pytest.raises(SinkError, match="asleep"):
            run.sink.commit(commit)
    return sleeper, commit


def test_a_run_that_wakes_up_between_two_parts_changes_nothing(
    lake: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = drive(lake, ledger)
    old.apply(of("eu", 1) + of("us", 2))
    sleeper, commit = sleep_between_parts(monkeypatch, old, of("asia", 3) + of("eu", 4) + of("us", 5))
    assert part_ids(lake) == {"asia": [3], "eu": [1], "us": [2]}
    new = drive(lake, ledger, generation=2)
    assert (new.epoch, new.sink.load().partial) == (1, 2)
    new.commit(commit)
    complete = {"asia": [3], "eu": [1, 4], "us": [2, 5]}
    assert part_ids(lake) == complete
    sleeper.wake()  # it finds its rows
    with pytest.raises(FencedError):
        old.sink.commit(commit)
    new.apply(of("eu", 6))
    sleeper.wake()
    assert part_ids(lake) == {**complete, "eu": [1, 4, 6]}


@pytest.mark.parametrize("left", [False, True], ids=["rollback", "leave"])
def test_a_run_that_wakes_up_after_a_rollback_is_refused(
    lake: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    old = drive(lake, ledger)
    old.apply(of("eu", 1) + of("us", 2))
    sleeper, _ = sleep_between_parts(monkeypatch, old, of("asia", 3) + of("eu", 4) + of("new", 5) + of("us", 6))
    assert len(sleeper.left) == 3
    new = drive(lake, ledger, generation=2)
    effect = KeepRows() if left else RestoreVersion(new.sink.version_of(1))
    edit = new.stage_edit("rollback", epoch=3, to_epoch=1, left=["copy"] if left else [])
    new.edit(edit, effect)
    after = {"asia": [3] if left else [], "eu": [1], "us": [2]}
    assert {name: ids for name, ids in part_ids(lake).items() if name != "new"} == after
    for table, commit in sleeper.left:
        with pytest.raises(FencedError):
            table.commit(commit)
    new.apply(of("eu", 4) + of("new", 5))
    found = part_ids(lake)
    assert found == {**after, "eu": [1, 4], "new": [5]}


def test_an_untouched_part_does_not_lag(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger)
    run.apply(of("eu", 1))
    for number in range(2, 5):
        run.apply(of("us", number))
    sink = rejoin(lake, ledger)
    assert (sink.load().epoch, sink.load().partial) == (4, 0)


# -- parts that lost rows ---------------------------------------------------------------------------------


def rejoin(lake: Path, ledger: Ledger, **settings: Any) -> DeltaPartsSink:
    """Open the sink as a run does that is about to claim it."""
    options = DeltaPartsOptions("copy", f"{lake}/{{region}}", **settings)
    sink = open_in(ledger, lambda context: open_delta(options, context))
    assert isinstance(sink, DeltaPartsSink)
    sink.end_unfinished()
    return sink


@pytest.mark.parametrize("how", ["deleted", "old copy", "emptied and created anew"])
def test_a_part_that_went_back_gets_again_what_it_lost(lake: Path, ledger: Ledger, how: str, tmp_path: Path) -> None:
    run = drive(lake, ledger)
    commits = [run.stage(of("us", 1))]
    run.commit(commits[0])
    for number in range(2, 7):
        commits.append(run.stage(of("eu", number) + (of("us", number * 10) if number % 2 else [])))
        run.commit(commits[-1])
        if number == 3:
            shutil.copytree(lake / "eu", tmp_path / "backup")
    whole = part_ids(lake)
    shutil.rmtree(lake / "eu")
    if how == "old copy":
        shutil.copytree(tmp_path / "backup", lake / "eu")
    elif how == "emptied and created anew":
        write_deltalake(
            str(lake / "eu"), pa.table({"id": pa.array([], pa.int64()), "region": pa.array([], pa.string())})
        )
    commits.append(run.stage(of("eu", 7)))
    with pytest.raises(SinkWentBackError):
        run.sink.commit(commits[-1])
    sink = rejoin(lake, ledger)
    head = sink.load()
    assert (head.epoch, head.partial) == (3 if how == "old copy" else 1, 7)
    assert head.entry == commits[head.epoch - 1].entry
    head = sink.claim("again", 2)
    for commit in commits[head.epoch :]:
        assert sink.commit(commit).attempt == commit.checkpoint.attempt
    assert part_ids(lake) == {**whole, "eu": [*whole["eu"], 7]}
    assert (sink.load().epoch, sink.load().partial) == (7, 0)


def test_a_head_that_went_back_takes_nothing_twice(lake: Path, ledger: Ledger, tmp_path: Path) -> None:
    run = drive(lake, ledger)
    commits = [run.stage(of("eu", 1) + of("us", 2))]
    run.commit(commits[0])
    shutil.copytree(lake / "_firnline", tmp_path / "backup")
    for number in (3, 4, 5):
        commits.append(run.stage(of("eu", number)))
        run.commit(commits[-1])
    for backup in (tmp_path / "backup", None):
        shutil.rmtree(lake / "_firnline")
        if backup is not None:
            shutil.copytree(backup, lake / "_firnline")
        sink = rejoin(lake, ledger)
        assert sink.load().epoch == (1 if backup else 0)
        for commit in commits[sink.claim("again", 2).epoch :]:
            sink.commit(commit)
        assert part_ids(lake) == {"eu": [1, 3, 4, 5], "us": [2]}


def test_a_rollback_waits_for_a_part_that_went_back(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger)
    run.apply(of("us", 1))
    run.apply(of("eu", 2))
    run.apply(of("eu", 3))
    shutil.rmtree(lake / "eu")
    _, refused = run.sink.plan_return(1, ())
    assert "lost epoch 3" in refused[0].message


@pytest.mark.s3
def test_the_tables_may_lie_in_a_bucket(s3: str, ledger: Ledger) -> None:
    bucket, storage_options = new_bucket(s3), s3_options(s3)
    options = DeltaPartsOptions("copy", f"s3://{bucket}/{{region}}", storage_options=storage_options)
    run = SinkDriver(lambda context: open_delta(options, context), ledger, generation=1)
    run.apply(of("eu", 1) + of("us", 2))
    run.apply(of("eu", 3))
    tables = run.sink.find_parts()
    assert tables == [f"s3://{bucket}/eu", f"s3://{bucket}/us"]
    found = [
        DeltaTable(table, storage_options=storage_options).to_pyarrow_table()["id"].to_pylist() for table in tables
    ]
    assert [sorted(ids) for ids in found] == [[1, 3], [2]]
