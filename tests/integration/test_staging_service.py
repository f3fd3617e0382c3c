"""The committer at work: columns, bad units, gaps, storage that fails, back-pressure, alarms, its place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.checkpoint.codec import canonical, seal, unseal
from firnline.clock import SystemClock
from firnline.committer import committer as committer_module
from firnline.committer.committer import Committer
from firnline.committer.service import CommitterLock, CommitterService, TableRef, find_holder
from firnline.errors import CommitUnknownError, FencedError, SinkError
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.status import load_runs
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.table import Table, parse_interval
from firnline.sinks.staged.unit import retry
from firnline.storage import LocalStorage, open_storage
from firnline.testing.faults import Faults, faulty_storage
from tests.support.committers import (
    PENDING,
    bring_file,
    commit_table,
    pending_units,
    put_unit,
    rejected_reasons,
)
from tests.support.pipelines import pipeline_options, run_once
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, table_ids


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "out"


def staged(sample: SampleInput, table: Path, **settings: Any) -> PipelineOptions:
    given = {"path": str(sample.folder), "table": str(table), "mode": "staged", "max_files": 1}
    return pipeline_options(**{**given, **settings})


def stage(sample: SampleInput, options: PipelineOptions, *names: str, **fields: Any) -> None:
    for name in names:
        sample.add(f"{name}.json", 4, **fields)
    assert run_once(options).exit_code == 0


def units(table: Path) -> dict[int, Path]:
    """Epoch -> pending file."""
    found = {}
    for path in (table / PENDING).iterdir():
        found[int(json.loads(path.read_bytes())["epoch"])] = path
    return found


def rewrite_unit(path: Path, **changes: Any) -> None:
    body = {k: v for k, v in unseal(json.loads(path.read_bytes()), path.name).items() if k != "format"}
    path.write_bytes(canonical(seal({**body, **changes})))


# -- columns ----------------------------------------------------------------------------------------------


def test_columns_are_added_in_the_middle_of_a_batch(sample: SampleInput, table: Path) -> None:
    options = staged(sample, table)
    stage(sample, options, "a")
    stage(sample, options, "b", extra={"deep": 1})
    stage(sample, options, "c", extra={"other": "x"}, note="y")
    report = commit_table(table)
    assert (report.commits, report.units) == (1, 3)
    found = DeltaTable(str(table)).to_pyarrow_table()
    assert sorted(f.name for f in found.schema.field("extra").type) == ["deep", "other"]
    assert found.num_rows == sample.ids.total()
    log = sorted((table / "_delta_log").glob("*.json"))
    adds = [p for p in log if '"add":{' in p.read_text()]
    assert all(p <= adds[0] for p in log if '"metaData"' in p.read_text()), "no column later than its data"


def test_columns_of_every_file_of_a_unit_are_added(sample: SampleInput, table: Path) -> None:
    """Two files in one unit, the second with a column that the unit's own schema does not tell."""
    options = staged(sample, table, max_files=10)
    stage(sample, options, "a")
    path = units(table)[1]
    body = unseal(json.loads(path.read_bytes()), "unit")
    (first,) = body["files"]
    rows = pq.read_table(table / first["path"])
    wider = rows.append_column("only_here", [["x"] * rows.num_rows])
    pq.write_table(wider, table / "second.parquet")
    second = {**first, "path": "second.parquet", "size_bytes": (table / "second.parquet").stat().st_size}
    del second["footer_checksum"], second["crc32"]
    rewrite_unit(path, files=[first, second])
    commit_table(table)
    assert DeltaTable(str(table)).to_pyarrow_table().column("only_here").null_count == rows.num_rows


def test_an_incompatible_unit_holds_up_only_its_own_pipeline(sample: SampleInput, table: Path, tmp_path: Path) -> None:
    other = SampleInput(tmp_path / "other")
    other._next = iter(range(1000, 2000))  # type: ignore[assignment]
    one, two = staged(sample, table), staged(other, table, name="two", path=str(other.folder))
    stage(sample, one, "a")
    stage(other, two, "a")
    commit_table(table)
    stage(sample, one, "b", kind=1)
    before = Counter(other.ids)
    stage(other, two, "b", kind="text")
    stage(other, two, "c")
    report = commit_table(table)
    assert (report.units, len(report.rejected)) == (1, 1)
    assert "schema incompatible" in report.rejected[0][1]
    assert report.waiting == {"two": (2, 2)}
    stage(sample, one, "c")
    assert commit_table(table).units == 1
    assert table_ids(table) == sample.ids + before
    # A new run of the other stands on the log: its input is read again, now with the table's types.
    assert run_once(two).exit_code == 0
    commit_table(table)
    assert pending_units(table) == []
    assert table_ids(table) == sample.ids + other.ids


# -- what is wrong with a unit ----------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("where", ["footer", "data"])
def test_a_changed_file_is_found(sample: SampleInput, table: Path, where: str, whole: bool) -> None:
    """The footer always; the rest of the file by option."""
    options = staged(sample, table)
    stage(sample, options, "a", "b")
    path = table / json.loads(units(table)[2].read_bytes())["files"][0]["path"]
    data = bytearray(path.read_bytes())
    data[10 if where == "data" else -20] ^= 1
    path.write_bytes(data)
    report = commit_table(table, whole_file_checksums=whole)
    if where == "footer" or whole:
        assert report.units == 1
        assert "checksum wrong" in report.rejected[0][1]
    else:
        assert report.units == 2


@pytest.mark.parametrize("missing", ["size_bytes", "rows", "partition_values", "stats", "modification_time", "path"])
def test_a_unit_without_a_field_is_set_aside(sample: SampleInput, table: Path, missing: str) -> None:
    options = staged(sample, table)
    stage(sample, options, "a")
    path = units(table)[1]
    files = unseal(json.loads(path.read_bytes()), "unit")["files"]
    rewrite_unit(path, files=[{k: v for k, v in f.items() if k != missing} for f in files])
    report = commit_table(table)
    assert missing in report.rejected[0][1]
    assert run_once(options).exit_code == 0
    commit_table(table)
    assert table_ids(table) == sample.ids


def test_a_unit_of_a_newer_format_raises_an_alarm_and_stays(sample: SampleInput, table: Path) -> None:
    options = staged(sample, table)
    stage(sample, options, "a")
    body = {**json.loads(units(table)[1].read_bytes()), "format": 99}
    del body["checksum"]
    from firnline.checkpoint.codec import checksum

    put_unit(table, "newer", canonical({**body, "checksum": checksum(canonical(body))}))
    report = commit_table(table)
    assert (report.units, report.rejected) == (1, [])
    assert "99" in report.alarms[0]
    assert pending_units(table) == ["newer"]


def test_a_gap_is_waited_for_and_shown(sample: SampleInput, table: Path) -> None:
    options = staged(sample, table)
    stage(sample, options, *"abcd")
    hidden = units(table)[2]
    away = table / "away.json"
    hidden.rename(away)
    report = commit_table(table)
    assert (report.units, report.rejected, report.waiting, report.pending) == (1, [], {"demo": (2, 2)}, 2)
    report = commit_table(table)
    assert (report.units, report.rejected, report.waiting) == (0, [], {"demo": (2, 2)})
    away.rename(hidden)
    report = commit_table(table)
    assert (report.units, report.waiting) == (3, {})
    assert table_ids(table) == sample.ids


def test_a_retried_unit_goes_on_where_it_was(sample: SampleInput, table: Path) -> None:
    options = staged(sample, table)
    stage(sample, options, *"abc")
    file = table / json.loads(units(table)[2].read_bytes())["files"][0]["path"]
    file.rename(table / "away")
    commit_table(table)
    ((name, reason),) = rejected_reasons(table).items()
    assert "file missing" in reason
    (table / "away").rename(file)
    retry(open_storage(str(table)), name)
    assert commit_table(table).units == 2
    assert table_ids(table) == sample.ids


def test_more_units_than_one_commit_takes_from_an_earlier_run(
    sample: SampleInput, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adopted tip lies beyond the first batch."""
    monkeypatch.setattr(committer_module, "UNITS_PER_COMMIT", 2)
    monkeypatch.setattr(committer_module, "MAX_ROUNDS", 50)
    options = staged(sample, table)
    stage(sample, options, *"abcde")
    stage(sample, options, "f")
    report = commit_table(table)
    assert (report.units, report.commits) == (6, 3)
    assert table_ids(table) == sample.ids


# -- storage that fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["failed", "answer-lost"])
def test_an_io_error_is_never_a_rejection(sample: SampleInput, tmp_path: Path, after: bool) -> None:
    """Every storage call of a cycle fails once: nothing is set aside, the next cycle finishes."""
    source = tmp_path / "source"
    stage(sample, staged(sample, source), "a", "b", extra=1)
    bring_file(source, "foreign", {"id": [900]})
    with faulty_storage(Faults()) as counted:
        shutil.copytree(source, tmp_path / "count")
        commit_table(tmp_path / "count")
    step = 1 if os.environ.get("FIRNLINE_PROOF") else 2
    for nth in range(1, len(counted.calls) + 1, step):
        table = tmp_path / f"t{nth}"
        shutil.copytree(source, table)
        with faulty_storage(Faults(nth=nth, after=after)):
            try:
                commit_table(table)
            except SinkError:
                commit_table(table)
        assert rejected_reasons(table) == {}, counted.calls[nth - 1]
        if pending_units(table):
            commit_table(table)
        assert pending_units(table) == []
        assert sorted(table_ids(table)) == [*sorted(sample.ids), 900]
        shutil.rmtree(table)


def test_a_log_that_cannot_be_written_ends_the_cycle(
    sample: SampleInput, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not spin: the next poll tries again."""
    stage(sample, staged(sample, table), "a")
    tries = []

    def fail(self: Table, *_: Any, **__: Any) -> int:
        tries.append(1)
        raise CommitUnknownError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Table, "append", fail)
        with pytest.raises(SinkError, match="disk full"):
            commit_table(table)
    assert len(tries) <= 5
    commit_table(table)
    assert table_ids(table) == sample.ids


def test_a_failing_pipeline_holds_up_no_other(
    sample: SampleInput, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SampleInput(tmp_path / "other")
    stage(sample, staged(sample, table, name="a"), "a")
    stage(other, staged(other, table, name="b", path=str(other.folder)), "a")
    original = Table.add_columns

    def fail(self: Table, *_: Any, **__: Any) -> None:
        raise CommitUnknownError("columns cannot be added")

    monkeypatch.setattr(Table, "add_columns", fail)
    stage(sample, staged(sample, table, name="a"), "b", late=1)
    stage(other, staged(other, table, name="b", path=str(other.folder)), "b")
    with pytest.raises(SinkError):
        commit_table(table)
    assert len(pending_units(table)) == 2, "those of the other pipeline are committed"
    monkeypatch.setattr(Table, "add_columns", original)
    commit_table(table)
    assert pending_units(table) == []
    assert table_ids(table) == sample.ids + other.ids


# -- back-pressure ----------------------------------------------------------------------------------------


def test_a_writer_waits_for_the_committer(sample: SampleInput, table: Path, launcher: Launcher) -> None:
    options = staged(sample, table, max_pending_units=2)
    for name in "abcdef":
        sample.add(f"{name}.json", 4)
    writer = launcher.start(options)
    writer.wait_for("waiting for the committer")
    assert len(pending_units(table)) in (2, 3)  # one more may have been in flight
    deadline = time.monotonic() + 120
    while not load_runs(LocalStorage(str(table)), options.name)[0]["waiting_for"]:  # what `status` shows
        assert time.monotonic() < deadline, writer.log()
        time.sleep(0.02)
    while writer.is_alive:
        assert time.monotonic() < deadline, writer.log()
        commit_table(table)
        time.sleep(0.05)
    assert writer.wait().exit_code == 0
    commit_table(table)
    assert table_ids(table) == sample.ids


def test_a_waiting_writer_stops_cleanly(sample: SampleInput, table: Path, launcher: Launcher) -> None:
    options = staged(sample, table, max_pending_bytes=1)
    for name in "abcdef":
        sample.add(f"{name}.json", 4)
    writer = launcher.start(options, once=False)
    writer.wait_for("waiting for the committer")
    writer.signal(signal.SIGTERM)
    assert writer.wait().exit_code == 0
    done = threading.Event()

    def keep_committing() -> None:
        while not done.wait(0.05):
            commit_table(table)

    committer = threading.Thread(target=keep_committing)
    committer.start()
    try:
        assert run_once(options).exit_code == 0
    finally:
        done.set()
        committer.join()
    commit_table(table)
    assert table_ids(table) == sample.ids


# -- alarms, housekeeping, place --------------------------------------------------------------------------


@pytest.mark.parametrize(("days", "alarm"), [(3, False), (4, True)])
def test_a_unit_that_waits_for_too_long_raises_an_alarm(
    sample: SampleInput, table: Path, days: int, alarm: bool
) -> None:
    """Half of what the table keeps deleted files: 7 days unless it says otherwise."""
    options = staged(sample, table)
    stage(sample, options, *"abc")
    found = units(table)
    found[2].rename(table / "away.json")
    stamp = time.time() - days * 86_400
    os.utime(found[3], (stamp, stamp))
    report = commit_table(table)
    assert report.oldest_pending_seconds == pytest.approx(days * 86_400, abs=60)
    assert any("VACUUM" in text for text in report.alarms) == alarm


def test_intervals_are_read_as_delta_writes_them() -> None:
    assert parse_interval("interval 7 days") == timedelta(days=7)
    assert parse_interval("INTERVAL 1 week 2 hours") == timedelta(days=7, hours=2)
    assert parse_interval("30 minutes") == timedelta(minutes=30)
    for text in ("", "interval", "interval 7", "7 moons", "interval 7 days ago"):
        with pytest.raises(ValueError, match="interval"):
            parse_interval(text)


def test_repeated_single_rounds_write_deltas_own_checkpoint(sample: SampleInput, table: Path) -> None:
    """Writers leave the log to the committer, also when that is run by cron."""
    options = staged(sample, table)
    for number in range(8):
        stage(sample, options, f"a{number}")
        commit_table(table)
    assert (table / "_delta_log/_last_checkpoint").exists()


def test_a_long_cycle_shows_signs_of_life(table: Path) -> None:
    storage = open_storage(str(table))
    clock = SystemClock()
    place = CommitterLock(storage, "one", clock, takeover_seconds=0.0)
    assert place.take()
    before = find_holder(storage)
    place.beat()
    after = find_holder(storage)
    assert before is not None
    assert after is not None
    assert after["beat"] == before["beat"] + 1
    other = CommitterLock(storage, "two", clock, takeover_seconds=0.0)
    other.take()
    assert other.take()  # the first one's beat stood still
    place.beat()
    holder = find_holder(storage)
    assert holder is not None
    assert holder["run"] == "two", "a beat takes nothing back"


def test_a_second_committer_once_is_refused_and_the_other_tables_had_their_turn(
    sample: SampleInput, table: Path, tmp_path: Path
) -> None:
    stage(sample, staged(sample, table), "a")
    second = tmp_path / "second"
    stage(sample, staged(sample, second, name="other"), "b")
    clock = SystemClock()
    holder = CommitterLock(open_storage(str(table)), "holder", clock, 30)
    assert holder.take()
    service = CommitterService([TableRef(str(table)), TableRef(str(second))], "me", clock)
    with pytest.raises(FencedError, match="another committer"):
        service.run_once()
    assert pending_units(second) == []
    assert len(pending_units(table)) == 1
    holder.release()
    service.run_once()
    assert pending_units(table) == []


def test_terms_fence_two_committers_in_turn(sample: SampleInput, table: Path) -> None:
    """Without regard to the heartbeat: whoever claimed last goes on, the other is told."""
    options = staged(sample, table)
    clock = SystemClock()
    first, second = (Committer(Table(str(table), {}), open_storage(str(table)), run, clock) for run in "ab")
    stage(sample, options, "a")
    assert first.cycle().units == 1
    stage(sample, options, "b")
    assert second.cycle().units == 1
    stage(sample, options, "c")
    with pytest.raises(FencedError):
        first.cycle()
    assert table_ids(table).total() == 8
    assert second.cycle().units == 1
    assert table_ids(table) == sample.ids


# -- further sinks ----------------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("point", ["staging.put.before:2", "staging.put.after:2", "staging.put.before:3"])
def test_two_staged_tables_of_one_pipeline(
    sample: SampleInput, table: Path, tmp_path: Path, launcher: Launcher, point: str
) -> None:
    """A later run puts an earlier run's epoch into the sink that lags: no fork, nothing twice, nothing left."""
    second = tmp_path / "second"
    sinks = (
        DeltaSinkOptions("one", str(table), mode="staged"),
        DeltaSinkOptions("two", str(second), mode="staged"),
    )
    options = pipeline_options(path=str(sample.folder), table=str(table), sinks=sinks, max_files=1)
    for name in "abc":
        sample.add(f"{name}.json", 4)
    launcher.run(options, f"{point}:kill")
    for _ in range(2):
        assert run_once(options).exit_code == 0
        for each in (table, second):
            if (each / "_delta_log").exists():
                commit_table(each)
    for each in (table, second):
        assert table_ids(each) == sample.ids
        assert pending_units(each) == []
        assert rejected_reasons(each) == {}


def test_what_a_writer_holds_is_the_newest_of_log_and_units(sample: SampleInput, table: Path) -> None:
    options = staged(sample, table)
    stage(sample, options, "a", "b")
    held = open_pipeline(options).load()
    assert held.epoch == 2
    commit_table(table)
    stage(sample, options, "c")
    held = open_pipeline(options).load()
    assert held.epoch == 3
    assert DeltaTable(str(table)).transaction_version("firnline:demo") == 2
