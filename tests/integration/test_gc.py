"""Sweeping: orphans go after the grace period, and nothing that anything may name ever does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction

import firnline.checkpoint.ledger
import firnline.maintenance.gc
import firnline.maintenance.log_names
import firnline.maintenance.survey
from firnline.checkpoint.codec import canonical, seal
from firnline.cli.main import run_command
from firnline.cli.output import size_text
from firnline.clock import SystemClock
from firnline.committer.committer import Committer
from firnline.errors import CheckpointError, ConfigError, SinkError
from firnline.history.savepoints.create import create_savepoint
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc
from firnline.maintenance.references import References
from firnline.maintenance.survey import Survey
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.table import Table
from firnline.spec.build import load_options
from firnline.storage import open_storage
from tests.support.ageing import DAY, age_files, age_log
from tests.support.pipelines import known_files, run_once
from tests.support.samples import SampleInput, quarantined, table_ids

OWN = "0123456789abcdef-0000.parquet"


@pytest.fixture
def options(sample: SampleInput, make_options: Callable[..., PipelineOptions]) -> PipelineOptions:
    """A table of three epochs in three partitions, with quarantine."""
    sample.add("a1.json", 6)
    sample.add("a2.json", 6, bad=2)
    sample.add("a3.json", 6)
    options = make_options(max_files=1, partition_by=("month",))
    assert run_once(options).exit_code == 0
    return options


@pytest.fixture
def table(options: PipelineOptions) -> Path:
    root = Path(options.sinks[0].location)
    age_files(root, 2 * DAY)
    return root


def orphan(root: Path, name: str, seconds: float = 2 * DAY) -> Path:
    """A Parquet file that nobody names."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": pa.array([-1], pa.int64()), "v": [0.5]}), path)
    os.utime(path, (time.time() - seconds, time.time() - seconds))
    return path


def files(root: Path) -> set[str]:
    """Every file but the commits: a sweep declares in the log what it deletes."""
    found = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() or p.is_symlink()}
    return {name for name in found if not (name.startswith("_delta_log/") and name.endswith(".json"))}


def commit(root: Path, name: str) -> None:
    """Another writer makes a file true."""
    delta = DeltaTable(root)
    add = AddAction(name, (root / name).stat().st_size, {"month": "2026-01"}, 0, True, '{"numRecords":1}')
    delta.create_write_transaction([add], "append", delta.schema(), partition_by=["month"])


def unit(root: Path, folder: str, name: str, body: object, seconds: float = 0) -> Path:
    path = root / "_staging" / folder / f"{name}.meta.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
    os.utime(path, (time.time() - seconds, time.time() - seconds))
    return path


def foreign(path: str) -> dict[str, object]:
    return {"path": path, "size": 1, "record_count": 1, "partition_values": {"month": "2026-01"}}


def test_only_orphans_older_than_the_grace_period_go(table: Path, sample: SampleInput) -> None:
    kept = files(table)
    stay = [orphan(table, f"month=2026-01/young-{OWN}", 0), orphan(table, "_change_data/c.parquet")]
    stay += [orphan(table, "_delta_log/x.parquet"), orphan(table, "_staging/pending/p.parquet")]
    (table / "month=2026-01" / "notes.txt").write_text("not Parquet")
    gone = [orphan(table, f"month=2026-01/{OWN}"), orphan(table, "part-000.parquet"), orphan(table, "_odd=1/q.parquet")]
    sizes = sum(p.stat().st_size for p in gone)
    planned = gc(str(table), dry_run=True)
    assert all(p.exists() for p in gone)
    report = gc(str(table))
    assert (planned.files, planned.size_bytes) == (report.files, report.size_bytes) == (3, sizes)
    assert report.kinds["data"].files == 3
    assert files(table) == kept | {str(p.relative_to(table)) for p in stay} | {"month=2026-01/notes.txt"}
    assert table_ids(table) == sample.ids
    assert gc(str(table)).files == 0


def test_a_grace_period_below_zero_is_refused(table: Path) -> None:
    with pytest.raises(ConfigError):
        gc(str(table), grace_seconds=-1)


def test_a_folder_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = orphan(tmp_path, OWN)
    with pytest.raises(ConfigError, match="is no Delta table"):
        gc(str(tmp_path))
    assert path.exists()


def test_a_pipeline_goes_on_after_it_and_knows_every_file(
    table: Path, options: PipelineOptions, sample: SampleInput
) -> None:
    orphan(table, f"month=2026-01/{OWN}")
    gc(str(table), grace_seconds=0)
    sample.add("b1.json", 5, bad=1)
    run = run_once(options)
    assert (run.exit_code, run.told.late) == (0, 0)
    assert table_ids(table) == sample.ids
    assert quarantined(table, options.name) == sample.bad
    assert len(known_files(run.pipeline, run.pipeline.load().entry)) == 4


# -- clocks -------------------------------------------------------------------------------------------


class WrongClock:
    def __init__(self, wrong_by: timedelta) -> None:
        self._wrong_by = wrong_by

    def now(self) -> datetime:
        return datetime.now(UTC) + self._wrong_by

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None: ...


@pytest.mark.parametrize("days", [365, -1])
def test_the_machines_clock_decides_nothing(table: Path, days: int) -> None:
    young, old = orphan(table, f"young-{OWN}", DAY / 2), orphan(table, "old.parquet")
    report = gc(str(table), clock=WrongClock(timedelta(days=days)))
    assert young.exists()
    assert not old.exists()
    assert report.clock_skew_seconds == pytest.approx(days * DAY, abs=60)


def test_files_from_the_future_stay(table: Path) -> None:
    future = orphan(table, OWN, -DAY)
    report = gc(str(table), grace_seconds=0)
    assert future.exists()
    assert report.kept["from the future"] == 1


def test_a_storage_whose_clock_jumped_a_year_ahead_loses_only_orphans(table: Path, sample: SampleInput) -> None:
    kept = files(table)
    age_files(table, 365 * DAY)
    orphan(table, OWN, 365 * DAY)
    assert gc(str(table)).files == 1
    assert files(table) == kept
    assert table_ids(table) == sample.ids


# -- races --------------------------------------------------------------------------------------------


def test_a_file_that_is_committed_after_the_listing_stays(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan(table, f"month=2026-01/{OWN}")
    original = firnline.maintenance.survey.survey

    def survey(*args: object) -> Survey:
        found = original(*args)  # type: ignore[arg-type]
        assert len(found.data.files) > 1
        commit(table, f"month=2026-01/{OWN}")
        return found

    monkeypatch.setattr(firnline.maintenance.gc, "survey", survey)
    assert gc(str(table)).files == 0
    assert -1 in table_ids(table)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once references have been read for the first time."""
    original = References.apply
    done: list[object] = []

    def apply(self: References, candidates: object) -> None:
        original(self, candidates)  # type: ignore[arg-type]
        if not done:
            done.append(act())

    monkeypatch.setattr(References, "apply", apply)


def test_a_file_that_is_committed_right_before_its_deletion_stays(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan(table, f"month=2026-01/{OWN}")
    other = orphan(table, "other.parquet")
    meanwhile(monkeypatch, lambda: commit(table, f"month=2026-01/{OWN}"))
    assert gc(str(table)).files == 1
    assert not other.exists()
    assert -1 in table_ids(table)


def test_a_unit_that_is_put_right_before_the_deletion_keeps_its_file(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = orphan(table, f"month=2026-01/{OWN}")
    meanwhile(monkeypatch, lambda: unit(table, "pending", "u1", foreign(f"month=2026-01/{OWN}")))
    assert gc(str(table)).files == 0
    assert path.exists()


def test_it_stops_between_batches(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firnline.maintenance.gc, "BATCH_FILES", 1)
    for number in range(4):
        orphan(table, f"{number}.parquet")
    asked = iter([False, False, True])
    report = gc(str(table), stop=lambda: next(asked))
    assert report.stopped
    assert report.files == 2
    assert gc(str(table)).files == 2


# -- what names files ---------------------------------------------------------------------------------


def test_pending_units_keep_their_files(table: Path) -> None:
    path = orphan(table, "month=2026-01/f.parquet")
    unit(table, "pending", "u1", foreign("month=2026-01/f.parquet"), 90 * DAY)
    assert gc(str(table)).kept["pending"] == 1
    assert path.exists()


@pytest.mark.parametrize("body", [b"{not json", {"size": 1}, {"epoch": 3, "checksum": "0"}, b""])
def test_an_unreadable_pending_unit_stops_it(table: Path, body: object) -> None:
    path, temporary = orphan(table, OWN), orphan(table, f".{'0' * 32}.tmp")
    unit(table, "pending", "u1", body)
    with pytest.raises(CheckpointError, match="u1"):
        gc(str(table))
    assert path.exists()
    assert temporary.exists()


def test_units_set_aside_keep_their_files_for_a_month(table: Path) -> None:
    about = {"rejected": {"reason": "fork", "at": ""}}
    young, old = orphan(table, "young.parquet", 90 * DAY), orphan(table, "old.parquet", 90 * DAY)
    raw = orphan(table, "raw.parquet", 90 * DAY)
    unit(table, "rejected", "u1", {"files": [{"path": "young.parquet"}], **about}, 29 * DAY)
    gone = unit(table, "rejected", "u2", {**foreign("old.parquet"), **about}, 31 * DAY)
    unit(table, "rejected", "u3", b'{"path": "raw.parquet", oops', 1)
    report = gc(str(table))
    assert (young.exists(), old.exists(), raw.exists(), gone.exists()) == (True, False, True, False)
    assert (report.kinds["rejected"].files, report.kinds["data"].files) == (1, 1)


def test_a_damaged_unit_of_ours_that_was_set_aside_keeps_the_files_of_its_attempt(table: Path) -> None:
    path = orphan(table, f"month=2026-01/{OWN}")
    unit(table, "rejected", OWN[:16], {"raw": "AAAA", "rejected": {"reason": "not JSON", "at": ""}})
    gc(str(table))
    assert path.exists()


def test_pins_keep_versions_and_files(table: Path) -> None:
    named, held = orphan(table, "named.parquet"), orphan(table, f"month=2026-01/{OWN}")
    commit(table, f"month=2026-01/{OWN}")
    pinned = DeltaTable(table).version()
    DeltaTable(table).delete()
    age_log(table, 30 * DAY)
    put_pin(table, "a", {"format": 1, "files": ["named.parquet"]})
    put_pin(table, "b", {"format": 1, "versions": [pinned]})
    age_files(table, 30 * DAY)
    assert gc(str(table)).kept["pinned"] == 1 + len(DeltaTable(table, version=pinned).file_uris())
    assert named.exists()
    for pin in (table / "_firnline/pins").iterdir():
        pin.unlink()
    gc(str(table))
    assert not named.exists()
    assert not held.exists()


def put_pin(table: Path, name: str, body: object) -> Path:
    path = table / "_firnline" / "pins" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
    return path


@pytest.mark.parametrize(
    "body", [b"{", {"format": 1}, {"format": 1, "versions": ["x"]}, {"format": 1, "versions": [999]}, []]
)
def test_an_unreadable_pin_stops_it(table: Path, body: object) -> None:
    path = orphan(table, OWN)
    put_pin(table, "p", body)
    with pytest.raises((CheckpointError, SinkError)):
        gc(str(table))
    assert path.exists()


def test_removed_files_stay_within_the_retention_of_the_table(table: Path) -> None:
    before = {n for n in files(table) if n.endswith(".parquet")}
    DeltaTable(table).delete()
    age_files(table, 6 * DAY)
    assert gc(str(table)).kept["named by the log"] == len([n for n in before if not n.startswith("_firnline")])
    age_files(table, 8 * DAY)  # the log's files are old; the removal says that it happened today
    assert gc(str(table)).kept["removed within retention"] > 0
    assert before <= files(table)
    age_log(table, 8 * DAY)
    assert gc(str(table)).files == len([n for n in before if not n.startswith("_firnline")])


def test_a_removal_by_a_wrong_clock_counts_from_its_commit(table: Path) -> None:
    DeltaTable(table).delete()
    age_log(table, 365 * DAY)
    for path in (table / "_delta_log").iterdir():
        os.utime(path, None)
    assert gc(str(table)).files == 0


def test_tombstones_are_read_from_checkpoints_too(table: Path) -> None:
    DeltaTable(table).delete()
    DeltaTable(table).create_checkpoint()
    for path in (table / "_delta_log").glob("*[0-9].json"):
        path.unlink()
    age_files(table, 30 * DAY)
    report = gc(str(table))
    assert report.files == 0
    assert report.kept["removed within retention"] > 0


def test_a_damaged_line_in_the_log_stops_it(table: Path) -> None:
    path = orphan(table, OWN)
    DeltaTable(table).create_checkpoint()  # delta-rs needs the damaged commit no more
    damaged = table / "_delta_log" / f"{1:020d}.json"
    damaged.write_bytes(damaged.read_bytes() + b'\n{"add": {"pa')
    with pytest.raises(SinkError, match=damaged.name):
        gc(str(table))
    assert path.exists()


def test_files_of_other_writers_with_odd_names_are_recognised(tmp_path: Path) -> None:
    root = tmp_path / "odd"
    for value in ("a b", "c:d", "100%", "é", ""):
        write_deltalake(root, pa.table({"id": [1], "p": [value]}), mode="append", partition_by=["p"])
    spaced = root / "p=x y" / "a b.parquet"  # as Spark names it in the log: encoded once
    spaced.parent.mkdir()
    pq.write_table(pa.table({"id": [1]}), spaced)
    log = root / "_delta_log" / f"{5:020d}.json"
    add = {"path": "p=x%20y/a%20b.parquet", "partitionValues": {"p": "x y"}, "size": spaced.stat().st_size}
    log.write_text(json.dumps({"add": {**add, "modificationTime": 0, "dataChange": True}}))
    age_files(root, 2 * DAY)
    assert len(DeltaTable(root).file_uris()) == 6
    gone = orphan(root, "p=x y/c d.parquet")
    assert gc(str(root)).files == 1
    assert not gone.exists()
    assert DeltaTable(root).to_pyarrow_table().num_rows == 6


def test_entries_that_may_be_committed_keep_their_files(table: Path, options: PipelineOptions) -> None:
    path = orphan(table, f"month=2026-01/{OWN}")
    newest = sorted((table / "_firnline/demo/ledger").iterdir())[-1]
    body = json.loads(newest.read_bytes())
    epoch = body["checkpoint"]["epoch"] + 1
    entry = newest.parent / f"{epoch:020d}-{'f' * 16}.json"

    def stage(generation: int) -> None:
        checkpoint = {k: v for k, v in body["checkpoint"].items() if k not in ("checksum", "format")}
        checkpoint |= {"epoch": epoch, "generation": generation, "attempt": "f" * 16}
        staged = {"delta": [{"path": f"month=2026-01/{OWN}"}]}
        entry.write_bytes(canonical({**body, "checkpoint": seal(checkpoint), "staged": staged}))

    stage(1)
    assert gc(str(table)).kept["in flight"] == 1
    entry.write_bytes(entry.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=entry.name):
        gc(str(table))
    assert path.exists()
    stage(0)  # of a generation that was fenced: nobody can commit it any more
    assert gc(str(table)).files == 1


def test_a_running_writer_keeps_what_it_may_be_writing(table: Path, options: PipelineOptions) -> None:
    old = orphan(table, f"old-{OWN}", 3 * DAY)
    before = orphan(table, OWN, 3 * DAY)
    flying = orphan(table, f"month=2026-01/{OWN}", DAY + 600)
    run = sorted((table / "_firnline/demo/runs").iterdir())[-1]
    body = {k: v for k, v in json.loads(run.read_bytes()).items() if k not in ("checksum", "format")}
    body |= {"status": "running", "host": socket.gethostname(), "pid": os.getpid()}
    run.write_bytes(canonical(seal(body)))
    since_the_claim = len(DeltaTable(table).file_uris()) + 1  # all that is as old as the claim, and the one in flight
    assert gc(str(table)).kept["a run may be writing"] == since_the_claim
    assert (old.exists(), before.exists(), flying.exists()) == (False, False, True)
    with subprocess.Popen(["true"]) as ended:
        pass
    run.write_bytes(canonical(seal({**body, "pid": ended.pid})))
    gc(str(table))
    assert not flying.exists()


def test_a_table_whose_ledger_lies_elsewhere_keeps_staged_files(
    tmp_path: Path, sample: SampleInput, make_options: Callable[..., PipelineOptions]
) -> None:
    first = DeltaSinkOptions(name="one", table=str(tmp_path / "one"))
    second = DeltaSinkOptions(name="two", table=str(tmp_path / "two"), required=False)
    sample.add("a.json", 5)
    options = make_options(sinks=[first, second])
    assert run_once(options).exit_code == 0
    path = orphan(tmp_path / "two", OWN)
    report = gc(second.table)
    assert path.exists()
    assert report.kept["ledger in another table"] == 1
    assert "demo" in report.notes[0]
    assert gc(second.table, ledgers={"demo": open_storage(first.table)}).files == 1
    assert not path.exists()


@pytest.fixture
def two_tables(tmp_path: Path, sample: SampleInput, capsys: pytest.CaptureFixture[str]) -> Path:
    """The spec of a pipeline with two direct sinks, after a run; everything is two days old."""
    sample.add("a.json", 5)
    path = tmp_path / "pipe.yaml"
    path.write_text(
        f"name: demo\nsources: {{flights: {{type: files, path: {tmp_path / 'in'}}}}}\n"
        f"sinks:\n  - {{type: delta, name: one, table: {tmp_path / 'one'}}}\n"
        f"  - {{type: delta, name: two, table: {tmp_path / 'two'}, required: false}}\n"
    )
    assert run_once(load_options(path, environ={})).exit_code == 0
    age_files(tmp_path / "one", 2 * DAY)
    age_files(tmp_path / "two", 2 * DAY)
    capsys.readouterr()
    return path


def test_a_spec_stands_for_all_its_tables(
    two_tables: Path, sample: SampleInput, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_tables.parent
    paths = [orphan(root / name, OWN) for name in ("one", "two")]
    assert run_command(["gc", str(two_tables), "--dry-run"]) == 0
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if line.startswith(("/", "would"))] == [
        str(root / "one"), "would delete 1 file, " + size_text(paths[0].stat().st_size),
        str(root / "two"), "would delete 1 file, " + size_text(paths[1].stat().st_size),
    ]  # fmt: skip
    assert "deleting" not in told.err
    assert all(path.exists() for path in paths)
    assert run_command(["gc", str(two_tables), "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tables"]
    assert [(report["table"], report["files"], report["notes"]) for report in found] == [
        (str(root / "one"), 1, []), (str(root / "two"), 1, []),
    ]  # fmt: skip
    assert not any(path.exists() for path in paths)
    assert table_ids(root / "one") == table_ids(root / "two") == sample.ids


def test_compaction_of_a_spec_vacuums_all_its_tables(two_tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compact", str(two_tables), "--vacuum", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tables"]
    assert [Path(report["table"]).name for report in found] == ["one", "two"]
    assert [report["vacuum"]["notes"] for report in found] == [[], []]


def test_a_table_alone_is_reported_as_before(two_tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["gc", str(two_tables.parent / "one"), "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["table"] == str(two_tables.parent / "one")


def test_a_running_writer_keeps_what_it_may_be_writing_into_a_further_sink(two_tables: Path) -> None:
    one, two = two_tables.parent / "one", two_tables.parent / "two"
    flying = orphan(two, OWN, DAY + 600)
    run = sorted((one / "_firnline/demo/runs").iterdir())[-1]
    body = {k: v for k, v in json.loads(run.read_bytes()).items() if k not in ("checksum", "format")}
    run.write_bytes(canonical(seal({**body, "status": "running", "host": socket.gethostname(), "pid": os.getpid()})))
    ledgers = {"demo": open_storage(str(one))}
    since_the_claim = len(DeltaTable(two).file_uris()) + 1
    assert gc(str(two), ledgers=ledgers).kept["a run may be writing"] == since_the_claim
    assert flying.exists()
    run.write_bytes(canonical(seal(body)))
    assert gc(str(two), ledgers=ledgers).files == 1


# -- the rest -----------------------------------------------------------------------------------------


def test_temporary_files_go(table: Path) -> None:
    names = [f".{'a' * 32}.tmp", f"_firnline/demo/ledger/.{'b' * 32}.tmp", "month=2026-01/x.parquet#1"]
    gone = [orphan(table, name) for name in names]
    young = orphan(table, f".{'c' * 32}.tmp", 60)
    report = gc(str(table), grace_seconds=0)
    assert not any(p.exists() for p in gone)
    assert young.exists()
    assert report.kinds["temporary"].files == 3


def test_links_are_not_followed(table: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    kept = [orphan(outside, "a.parquet"), orphan(outside, OWN)]
    (table / "month=2026-07").symlink_to(outside)
    (table / f"9{OWN}").symlink_to(kept[0])
    (table / "loop").symlink_to(table)
    assert gc(str(table), grace_seconds=0).files == 0
    assert all(p.exists() for p in kept)
    assert (table / f"9{OWN}").is_symlink()


def test_a_table_behind_a_link_is_swept_like_any_other(table: Path, tmp_path: Path, sample: SampleInput) -> None:
    link = tmp_path / "link"
    link.symlink_to(table)
    gone = orphan(table, OWN)
    assert gc(str(link)).files == 1
    assert not gone.exists()
    assert table_ids(table) == sample.ids


def test_no_probe_is_left_behind(table: Path) -> None:
    before = files(table)
    gc(str(table), dry_run=True)
    gc(str(table))
    assert files(table) == before


def test_a_listing_without_any_file_of_the_log_stops_it(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = files(table)
    monkeypatch.setattr(firnline.maintenance.log_names.LogNames, "keys", lambda self, path: [f"elsewhere/{path}"])
    with pytest.raises(SinkError, match="not one file"):
        gc(str(table))
    assert files(table) == kept


def test_young_files_do_not_make_such_a_listing_plausible(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan(table, f"young-{OWN}", 0)
    kept = files(table)
    monkeypatch.setattr(firnline.maintenance.log_names.LogNames, "keys", lambda self, path: [f"elsewhere/{path}"])
    with pytest.raises(SinkError, match="not one file"):
        gc(str(table))
    assert files(table) == kept


def test_a_table_whose_live_files_are_all_pinned_is_swept(table: Path, options: PipelineOptions) -> None:
    create_savepoint(open_pipeline(options), None, copy=False, run="test")
    kept = files(table)
    path = orphan(table, OWN)
    age_files(table, 2 * DAY)
    report = gc(str(table))
    assert (report.files, report.kept["pinned"]) == (1, len(DeltaTable(table).file_uris()))
    assert not path.exists()
    assert files(table) == kept


def twelve_epochs(
    sample: SampleInput, make_options: Callable[..., PipelineOptions], monkeypatch: pytest.MonkeyPatch
) -> PipelineOptions:
    """Twelve epochs with a floor close behind, and an attempt that never committed."""
    for number in range(12):
        sample.add(f"f{number:02d}.json", 3, bad=1)
    options = make_options(max_files=1, rollback_window=2)
    assert run_once(options).exit_code == 0
    root = Path(options.sinks[0].location)
    ledger = root / "_firnline/demo/ledger"
    first = sorted(ledger.iterdir())[0]
    (ledger / f"{1:020d}-{'e' * 16}.json").write_bytes(first.read_bytes())
    orphan(root, f"_firnline/demo/quarantine/{1:020d}-{'e' * 16}-{'0' * 32}.parquet")
    orphan(root, f"_firnline/demo/quarantine/{99:020d}-{'e' * 16}-{'0' * 32}.parquet")
    age_files(root, 2 * DAY)
    monkeypatch.setattr(firnline.checkpoint.ledger, "FOLD_ENTRIES", 4)
    return options


def test_beside_a_live_run_neither_its_ledger_nor_rows_on_their_way_are_touched(
    sample: SampleInput, make_options: Callable[..., PipelineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folds its ledger itself, and reads the rows that its own jobs exchange."""
    options = twelve_epochs(sample, make_options, monkeypatch)
    root = Path(options.sinks[0].location)
    on_its_way = root / "_firnline/demo/exchange/0/rows.arrow"
    on_its_way.parent.mkdir(parents=True)
    on_its_way.write_bytes(b"rows")
    age_files(on_its_way.parent, 2 * DAY)
    run = sorted((root / "_firnline/demo/runs").iterdir())[-1]
    body = {k: v for k, v in json.loads(run.read_bytes()).items() if k not in ("checksum", "format")}
    run.write_bytes(canonical(seal({**body, "status": "running", "host": socket.gethostname(), "pid": os.getpid()})))
    entries = sorted(p.name for p in (root / "_firnline/demo/ledger").iterdir())
    report = gc(str(root))
    assert (report.entries_folded, report.entries_swept) == (0, 0)
    assert sorted(p.name for p in (root / "_firnline/demo/ledger").iterdir()) == entries
    assert on_its_way.exists()
    run.write_bytes(canonical(seal(body)))
    report = gc(str(root))
    assert report.entries_folded >= 4
    assert not on_its_way.exists()


def test_old_ledger_entries_are_folded_and_attempts_that_never_committed_swept(
    sample: SampleInput, make_options: Callable[..., PipelineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = twelve_epochs(sample, make_options, monkeypatch)
    root = Path(options.sinks[0].location)
    report = gc(str(root))
    assert report.entries_folded >= 4
    assert report.entries_swept == 1
    assert report.kinds["quarantine"].files == 1
    kept = [p.name for p in (root / "_firnline/demo/quarantine").iterdir()]
    assert len(kept) == 13
    assert f"{99:020d}-{'e' * 16}-{'0' * 32}.parquet" in kept
    sample.add("g.json", 2)
    run = run_once(options)
    assert (run.exit_code, run.told.late) == (0, 0)
    assert table_ids(root) == sample.ids
    assert len(known_files(run.pipeline, run.pipeline.load().entry)) == 13
    rows = duckdb.execute(
        f"select raw from read_parquet('{root}/_firnline/demo/quarantine/*.parquet', union_by_name=true)"
    )
    assert Counter(bytes(r[0]) for r in rows.fetchall() if r[0]) == sample.bad


def test_a_hole_in_the_ledger_leaves_quarantine_and_entries_alone(
    sample: SampleInput, make_options: Callable[..., PipelineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(twelve_epochs(sample, make_options, monkeypatch).sinks[0].location)
    sorted((root / "_firnline/demo/ledger").iterdir())[6].unlink()
    kept, path = files(root), orphan(root, OWN)
    report = gc(str(root))
    assert not path.exists()
    assert files(root) == kept
    assert "demo" in report.notes[0]


def test_progress_is_told(table: Path) -> None:
    orphan(table, OWN)
    told: list[tuple[str, int, int]] = []
    gc(str(table), dry_run=True, progress=lambda *facts: told.append(facts))
    assert told == []
    gc(str(table), progress=lambda *facts: told.append(facts))
    assert told == [("deleting", 1, 1)]


def test_staged_pipelines_lose_nothing_before_between_and_after_commits(
    sample: SampleInput, make_options: Callable[..., PipelineOptions]
) -> None:
    options = make_options(max_files=1, partition_by=("month",), mode="staged")
    root = Path(options.sinks[0].location)
    for number in range(3):
        sample.add(f"a{number}.json", 6)
        sample.add(f"b{number}.json", 6)
        assert run_once(options).exit_code == 0
        left = orphan(root, f"month=2026-01/{number}{OWN}")
        report = gc(str(root), grace_seconds=0)
        assert not left.exists()
        assert report.kinds["data"].files == 1
        assert report.kept["pending"] > 0
        Committer(Table(str(root), {}), open_storage(str(root)), "run", SystemClock()).cycle()
        assert gc(str(root), grace_seconds=0).files == 0
        compact(str(root))
        assert table_ids(root) == sample.ids
    assert gc(str(root), grace_seconds=0, dry_run=True).kept.get("pending", 0) == 0
