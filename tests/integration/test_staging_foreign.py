"""Files that other programs bring: committed once, checked before; set aside with their reason and put back whole."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.clock import SystemClock
from firnline.committer import committer as committer_module
from firnline.committer.committed import CommittedUnits
from firnline.committer.committer import Committer
from firnline.errors import SinkError
from firnline.sinks.delta.table import Table
from firnline.sinks.delta.upsert.rewrite import RangeFile
from firnline.sinks.staged.unit import retry
from firnline.storage import open_storage
from tests.support.committers import (
    PENDING,
    REJECTED,
    bring_file,
    commit_table,
    committer_launcher,
    pending_units,
    put_unit,
    rejected_reasons,
)
from tests.support.pipelines import pipeline_options, run_to_end
from tests.support.processes import KILLED
from tests.support.samples import SampleInput, table_ids

WEEK = {"delta.setTransactionRetentionDuration": "interval 7 days"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Somebody's table, without partitions, with one row."""
    path = tmp_path / "table"
    write_deltalake(str(path), pa.table({"id": pa.array([1])}), configuration=WEEK)
    return path


@pytest.fixture
def parted(tmp_path: Path) -> Path:
    path = tmp_path / "parted"
    rows = pa.table({"id": [1], "date": pa.array(["2026-11-01"]).cast(pa.date32()), "n": [7]})
    write_deltalake(str(path), rows, partition_by=["date", "n"])
    return path


def ids(table: Path) -> list[int]:
    return sorted(table_ids(table).elements())


def test_a_file_is_committed_with_its_statistics(table: Path) -> None:
    bring_file(table, "u1", {"id": [2, 3]}, says={"source_file": "elsewhere.csv"})
    report = commit_table(table)
    assert (report.units, report.files, report.rows, report.pending) == (1, 1, 2, 0)
    assert ids(table) == [1, 2, 3]
    actions = DeltaTable(str(table)).get_add_actions(flatten=True)
    rows = pa.table(actions).to_pylist()
    (added,) = [row for row in rows if row["path"] == "u1.parquet"]
    assert (added["num_records"], added["min.id"], added["max.id"]) == (2, 2, 3)


@pytest.mark.parametrize("pointer", [None, b"", b'{"version":', b'{"version": 1}', b'{"version": 99}'])
def test_what_a_cleaned_log_committed_is_known_whatever_the_pointer_says(table: Path, pointer: bytes | None) -> None:
    """`_last_checkpoint` is only a cache: missing, torn, stale or wrong, it neither stops a committer nor doubles."""
    body = bring_file(table, "u1", {"id": [2]})
    commit_table(table)
    write_deltalake(str(table), pa.table({"id": pa.array([3])}), mode="append")
    DeltaTable(str(table)).create_checkpoint()
    for commit in sorted((table / "_delta_log").glob("*.json"))[:-1]:
        commit.unlink()
    if pointer is None:
        (table / "_delta_log/_last_checkpoint").unlink()
    else:
        (table / "_delta_log/_last_checkpoint").write_bytes(pointer)
    put_unit(table, "u1", body)
    bring_file(table, "u2", {"id": [4]})
    assert commit_table(table).units == 1
    assert ids(table) == [1, 2, 3, 4]


def test_a_unit_is_committed_once_however_often_it_is_put(table: Path) -> None:
    body = bring_file(table, "u1", {"id": [2]})
    for _ in range(3):
        commit_table(table)
        put_unit(table, "u1", body)
    DeltaTable(str(table)).optimize.compact()
    report = commit_table(table)
    assert (report.units, pending_units(table)) == (0, [])
    assert ids(table) == [1, 2]


def test_a_unit_is_committed_once_across_deltas_own_checkpoint(table: Path) -> None:
    body = bring_file(table, "u1", {"id": [2]})
    commit_table(table)
    delta = DeltaTable(str(table))
    delta.create_checkpoint()
    for path in (table / "_delta_log").glob("*.json"):
        if int(path.stem) < delta.version():  # as a clean-up of the log would
            path.unlink()
    put_unit(table, "u1", body)
    assert commit_table(table).units == 0
    assert ids(table) == [1, 2]


def test_two_units_that_name_one_file_add_it_once(table: Path) -> None:
    body = bring_file(table, "u1", {"id": [2]})
    put_unit(table, "u2", body)
    commit_table(table)
    assert ids(table) == [1, 2]
    log = "".join(p.read_text() for p in (table / "_delta_log").glob("*.json"))
    assert log.count('"path":"u1.parquet"') == 1


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    ["delta.claim.after:1", "delta.commit.before:1", "delta.commit.after:1", "delta.sync.before:2"]
    + [f"staging.delete.{side}:{count}" for side in ("before", "after") for count in (1, 3)],
)
def test_the_committer_is_killed_anywhere(table: Path, tmp_path: Path, point: str) -> None:
    for number in range(2, 7):
        bring_file(table, f"u{number}", {"id": [number], "more": ["x"]})
    options = pipeline_options(path=str(tmp_path), table=str(table), mode="staged")
    launcher = committer_launcher(tmp_path / "children")
    assert launcher.run(options, f"{point}:kill").exit_code == KILLED
    assert launcher.run(options).exit_code == 0
    assert ids(table) == [1, 2, 3, 4, 5, 6]
    assert pending_units(table) == []
    assert rejected_reasons(table) == {}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"size": 5}, "size wrong"),
    ({"record_count": 9}, "rows, the unit says 9"),
    ({"path": "nothing.parquet"}, "file missing"),
    ({"path": "../u1.parquet"}, "not a data file"),
    ({"path": "a/../../u1.parquet"}, "not a data file"),
    ({"path": "./_delta_log/00000000000000000000.json"}, "not a data file"),
    ({"path": "/no-such-folder/u1.parquet"}, "not a data file"),
    ({"path": "_delta_log/00000000000000000000.json"}, "not a data file"),
    ({"path": "_staging/x.parquet"}, "not a data file"),
    ({"path": "_other/x.parquet"}, "not a data file"),
    ({"path": "file:///no-such-folder/u1.parquet"}, "not a data file"),
    ({"path": "file:/no-such-folder/u1.parquet"}, "not a data file"),
    ({"path": ""}, "not a data file"),
    ({"partition_values": {"date": "2026-11-01"}}, "partitioned by nothing"),
    ({"partition_values": ["x"]}, "lacks"),
    ({"size": None}, "lacks"),
    ({"record_count": float("nan")}, "lacks"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_is_not_as_described_is_set_aside(table: Path, change: dict[str, Any], reason: str) -> None:
    (table.parent / "u1.parquet").write_bytes(b"outside")
    bring_file(table, "u1", {"id": [2]}, says=change)
    bring_file(table, "u2", {"id": [3]})
    report = commit_table(table)
    assert ids(table) == [1, 3]
    assert [name for name, _ in report.rejected] == ["u1"]
    assert reason in rejected_reasons(table)["u1"]


@pytest.mark.parametrize("garbage", ["tail", "footer", "short", "text"])
def test_a_file_that_is_no_parquet_file_is_set_aside(table: Path, garbage: str) -> None:
    bring_file(table, "u1", {"id": [2]})
    data = (table / "u1.parquet").read_bytes()
    broken = {
        "tail": data[:-4] + b"XXXX",
        "footer": data[:-100] + b"\xff" * 92 + data[-8:],
        "short": b"PAR1",
        "text": b"x" * len(data),
    }[garbage]
    (table / "u1.parquet").write_bytes(broken)
    put_unit(table, "u1", {"path": "u1.parquet", "size": len(broken), "record_count": 1})
    bring_file(table, "u2", {"id": [3]})
    commit_table(table)
    assert ids(table) == [1, 3]
    assert set(rejected_reasons(table)) == {"u1"}


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"date": "2026-11-02", "n": "5"}, True),
        ({"date": None, "n": 5}, True),
        ({"date": "yesterday", "n": "5"}, False),
        ({"date": "2026-11-02", "n": "many"}, False),
        ({"date": "2026-11-02"}, False),
        ({"date": "2026-11-02", "n": "5", "more": "x"}, False),
        ({}, False),
    ],
)
def test_partition_values_must_fit_the_table(parted: Path, values: dict[str, Any], fits: bool) -> None:
    bring_file(parted, "u1", {"id": [2]}, at="date=x/u1.parquet", says={"partition_values": values})
    commit_table(parted)
    assert ids(parted) == ([1, 2] if fits else [1])
    assert DeltaTable(str(parted)).to_pyarrow_table().num_rows == (2 if fits else 1)
    assert len(rejected_reasons(parted)) == (0 if fits else 1)


@pytest.mark.parametrize("name", ["with space.parquet", "p=a%3Ab/ü#?.parquet"])
def test_odd_names_are_written_so_that_readers_find_them(table: Path, name: str) -> None:
    bring_file(table, "u1", {"id": [2]}, at=name)
    commit_table(table)
    assert DeltaTable(str(table)).to_pyarrow_table().num_rows == 2


@pytest.fixture
def checked(table: Path) -> Path:
    """A file of one page of values, with page checksums, and its unit; returns the file."""
    bring_file(table, "u1", {"id": [1]})
    path = table / "u1.parquet"
    rows = pa.table({"id": list(range(5000))})
    pq.write_table(rows, path, write_page_checksum=True, use_dictionary=False, compression="none")
    put_unit(table, "u1", {"path": "u1.parquet", "size": path.stat().st_size, "record_count": 5000})
    return path


@pytest.mark.parametrize("whole", [False, True])
def test_a_changed_value_is_found_by_option_if_pages_have_checksums(table: Path, checked: Path, whole: bool) -> None:
    data = bytearray(checked.read_bytes())
    data[len(data) // 2] ^= 1
    checked.write_bytes(data)
    report = commit_table(table, whole_file_checksums=whole)
    assert report.units == (0 if whole else 1)
    if whole:
        assert "u1.parquet is damaged" in rejected_reasons(table)["u1"]


def test_a_whole_file_that_cannot_be_read_now_is_not_set_aside(
    table: Path, checked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow tells of a damaged page and of a failed read by the same exception."""
    failing = True
    real = RangeFile.read

    def read(self: RangeFile, size: int | None = -1, /) -> bytes:
        if failing and self.tell() == 4:  # the first page; the footer could be read
            raise OSError("the network is down")
        return real(self, size)

    monkeypatch.setattr(RangeFile, "read", read)
    with pytest.raises(SinkError, match="the network is down"):
        commit_table(table, whole_file_checksums=True)
    assert (pending_units(table), rejected_reasons(table)) == (["u1"], {})
    failing = False
    assert commit_table(table, whole_file_checksums=True).units == 1
    assert len(ids(table)) == 5001


@pytest.mark.parametrize(
    ("retention", "days", "taken"),
    [
        ("interval 7 days", 3, True),
        ("interval 7 days", 4, False),
        ("interval 1 week 2 days", 4, True),
        ("interval 12 hours", 1, False),
        (None, 400, True),
    ],
)
def test_a_unit_older_than_half_the_retention_is_set_aside(
    tmp_path: Path, retention: str | None, days: int, taken: bool
) -> None:
    table = tmp_path / "t"
    configuration = {"delta.setTransactionRetentionDuration": retention} if retention else None
    write_deltalake(str(table), pa.table({"id": [1]}), configuration=configuration)
    bring_file(table, "u1", {"id": [2]})
    stamp = time.time() - days * 86_400
    os.utime(table / PENDING / "u1.meta.json", (stamp, stamp))
    commit_table(table)
    assert ids(table) == ([1, 2] if taken else [1])
    assert all(reason.startswith("too old") for reason in rejected_reasons(table).values())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{not json",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"path": NaN}',
        b'{"path": "\\ud800"}',
        b'{"raw": "eA=="}',
        b'{"rejected": 1}',
        b'{ "size" : 1,\n "path":"x.parquet" }',
        b'{"epoch": 3}',
        b"[" * 5000,
    ],
)
def test_what_cannot_be_read_is_set_aside_and_put_back_to_the_byte(table: Path, data: bytes) -> None:
    path = put_unit(table, "odd", data)
    commit_table(table)
    assert pending_units(table) == []
    assert list(rejected_reasons(table)) == ["odd"]
    retry(open_storage(str(table)), "odd")
    assert path.read_bytes() == data
    assert not list((table / REJECTED).glob("*"))


def test_a_unit_that_was_mended_is_taken_up_again(table: Path) -> None:
    bring_file(table, "u1", {"id": [2]})
    (table / "u1.parquet").rename(table / "away")
    commit_table(table)
    (table / "away").rename(table / "u1.parquet")
    retry(open_storage(str(table)), "u1")
    assert commit_table(table).units == 1
    assert ids(table) == [1, 2]


def test_columns_come_with_the_files_that_have_them(table: Path) -> None:
    """Each file its own columns, all before the commit of the data; what cannot be is set aside alone."""
    bring_file(table, "a", {"id": [2], "x": ["t"]})
    bring_file(table, "b", {"id": [3], "y": [1.5], "s": [{"deep": 1}]})
    bring_file(table, "c", {"id": [4], "s": [{"other": "z"}]})
    bring_file(table, "d", {"id": [5], "x": [7]})
    commit_table(table)
    found = DeltaTable(str(table)).to_pyarrow_table()
    assert sorted(found.column("id").to_pylist()) == [1, 2, 3, 4]
    assert sorted(f.name for f in found.schema.field("s").type) == ["deep", "other"]
    assert "schema incompatible" in rejected_reasons(table)["d"]


def test_memory_of_committed_units_follows_the_log(table: Path) -> None:
    """What the log forgets, the committer forgets."""
    bring_file(table, "u1", {"id": [2]})
    commit_table(table)
    followed = CommittedUnits(open_storage(str(table)))
    version = DeltaTable(str(table)).version()
    now = SystemClock().now()
    followed.follow(version, now.replace(year=now.year - 1))
    assert "u1" in followed
    followed.follow(version, now.replace(year=now.year + 1))
    assert len(followed) == 0


def test_memory_is_flat_over_many_units(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of units through one committer: the second half needs no more than the first."""
    monkeypatch.setattr(committer_module, "UNITS_PER_COMMIT", 250)
    units = 10_000 if os.environ.get("FIRNLINE_PROOF") else 2_000
    pq.write_table(pa.table({"id": [2]}), table / "one.parquet")
    size = (table / "one.parquet").stat().st_size
    made = Committer(Table(str(table), {}), open_storage(str(table)), "run", SystemClock())
    (table / PENDING).mkdir(parents=True)
    peaks = []
    for start in range(0, units, 500):
        for number in range(start, start + 500):
            shutil.copyfile(table / "one.parquet", table / f"f{number}.parquet")
            body = {"path": f"f{number}.parquet", "size": size, "record_count": 1}
            (table / PENDING / f"u{number}.meta.json").write_text(json.dumps(body))
        assert made.cycle().units == 500
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert table_ids(table)[2] == units
    assert peaks[-1] <= 1.2 * peaks[1], peaks


# -- where there is no table yet ----------------------------------------------------------------------


def test_the_first_units_make_the_table(tmp_path: Path) -> None:
    """Columns are the file's, partitions the unit's; a later unit may bring more columns."""
    table = tmp_path / "new"
    table.mkdir()
    says = {"partition_values": {"n": "7", "date": "2026-11-01"}}
    bring_file(table, "u1", {"id": [1, 2]}, at="date=2026-11-01/n=7/u1.parquet", says=says)
    bring_file(table, "u2", {"id": [3], "v": ["x"]}, at="date=2026-11-01/n=7/u2.parquet", says=says)
    bring_file(table, "u3", {"id": [4]}, at="date=2026-11-01/u3.parquet", says={"partition_values": {"date": "x"}})
    report = commit_table(table)
    assert (report.units, report.rows, report.pending) == (2, 3, 0)
    assert "partitioned by" in rejected_reasons(table)["u3"]
    delta = DeltaTable(str(table))
    assert delta.metadata().partition_columns == ["date", "n"]
    found = sorted(delta.to_pyarrow_table().to_pylist(), key=lambda row: row["id"])
    assert found == [
        {"id": number, "v": "x" if number == 3 else None, "date": "2026-11-01", "n": "7"} for number in (1, 2, 3)
    ]
    assert commit_table(table).units == 0


def test_a_unit_that_makes_no_table_is_set_aside_and_the_next_one_makes_it(tmp_path: Path) -> None:
    table = tmp_path / "new"
    table.mkdir()
    bring_file(table, "a1", {"id": pa.array([1], pa.duration("s"))})
    bring_file(table, "a2", {"id": pa.array([1], pa.timestamp("ns"))})
    bring_file(table, "a3", {"id": [1]}, says={"record_count": 9})
    assert commit_table(table).units == 0
    assert not (table / "_delta_log").exists()
    assert "is duration[s], which is no type of Delta" in rejected_reasons(table)["a1"]
    assert "is timestamp[ns], which is no type of Delta" in rejected_reasons(table)["a2"]
    assert "the unit says 9" in rejected_reasons(table)["a3"]
    bring_file(table, "b", {"id": [5]})
    commit_table(table)
    assert ids(table) == [5]


def test_no_table_is_made_where_a_pipeline_has_written(tmp_path: Path) -> None:
    """Its own table is still to come, or lost: a new one would start over its history."""
    sample = SampleInput(tmp_path / "in")
    sample.add("a.json", 3)
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "new"))
    run_to_end(options)
    shutil.rmtree(tmp_path / "new/_delta_log")
    bring_file(tmp_path / "new", "u1", {"id": [1]})
    report = commit_table(tmp_path / "new")
    assert (report.units, report.pending) == (0, 1)
    assert "demo wrote here" in report.alarms[0]
    assert not (tmp_path / "new/_delta_log").exists()


def test_two_committers_make_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "new"
    table.mkdir()
    bring_file(table, "u1", {"id": [1]})
    create = Table.create
    met: list[str] = []

    def other_first(self: Table, *arguments: Any) -> None:
        if not met:
            met.append(self.uri)
            assert Committer(Table(str(table), {}), open_storage(str(table)), "b", SystemClock()).cycle().units == 1
        create(self, *arguments)

    monkeypatch.setattr(Table, "create", other_first)
    commit_table(table)
    assert met
    assert ids(table) == [1]


@pytest.mark.parametrize("point", ["delta.create.before", "delta.create.after", "delta.claim.after"])
def test_a_committer_that_is_killed_while_it_makes_the_table_is_repeated(tmp_path: Path, point: str) -> None:
    table = tmp_path / "new"
    table.mkdir()
    bring_file(table, "u1", {"id": [1, 2]})
    options = pipeline_options(str(tmp_path / "in"), str(table), mode="staged")
    launcher = committer_launcher(tmp_path / "children")
    assert launcher.run(options, f"{point}:1:kill").exit_code == KILLED
    assert launcher.run(options).exit_code == 0
    assert ids(table) == [1, 2]


@pytest.mark.parametrize(("interop", "writes"), [("blizzard", True), ("auto", False), ("none", False)])
def test_progress_for_other_tools_is_written_where_the_spec_says_so(tmp_path: Path, interop: str, writes: bool) -> None:
    """Into somebody else's table, too, in two stages as in one."""
    sample = SampleInput(tmp_path / "in")
    sample.add("a.json", 3)
    table = tmp_path / "out"
    write_deltalake(str(table), pa.table({"id": pa.array([-1], pa.int64())}))
    run_to_end(pipeline_options(str(tmp_path / "in"), str(table), mode="staged", interop=interop))
    commit_table(table)
    log = "".join(path.read_text() for path in (table / "_delta_log").glob("*.json"))
    assert ('"blizzard:' in log) == writes
