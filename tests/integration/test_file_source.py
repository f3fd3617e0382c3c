"""Promises of the file source, on real files and a real table, without Spark."""

from __future__ import annotations

import gzip
import os
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from firnline.history.status import load_files
from firnline.options import PipelineOptions
from firnline.run.observer import Comparison
from firnline.run.open_pipeline import open_pipeline
from firnline.types import RandomIds
from tests.support.pipelines import LocalRun, MakeOptions, run_once, run_until_epoch
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, pack, quarantined, table_ids, unpack_lines


def done(options: PipelineOptions, **settings: Any) -> LocalRun:
    run = run_once(options, **settings)
    assert run.exit_code == 0, run.result
    return run


def ids(options: PipelineOptions) -> Counter[int]:
    return table_ids(options.sinks[0].location)


def statuses(options: PipelineOptions) -> dict[str, str]:
    return {Path(row["path"]).name: row["status"] for row in load_files(open_pipeline(options))}


def reasons(options: PipelineOptions) -> dict[str, str | None]:
    return {Path(row["path"]).name: row["reason"] for row in load_files(open_pipeline(options))}


def position(options: PipelineOptions) -> dict[str, Any]:
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    found: dict[str, Any] = checkpoint.positions["files"]
    return found


def retry(options: PipelineOptions, path: Path, *, changed: bool = False) -> None:
    open_pipeline(options).requests.ask_retry(str(path), changed=changed, ids=RandomIds())


def test_a_file_that_a_full_task_did_not_reach_is_read_next(sample: SampleInput, make_options: MakeOptions) -> None:
    """Two tasks, each exactly full after its first file: the first left a file below what the other ended."""
    for name in ("a.json", "b.json", "c.json", "d.json"):
        sample.add(name, 5)
    options = make_options(max_files=4, max_events=10)
    run = done(options, threads=2)
    assert [epoch.records for epoch in run.told.epochs] == [10, 10]
    assert sum(epoch.files - epoch.files_again for epoch in run.told.epochs) == 4
    assert ids(options) == sample.ids
    assert run.told.late == 0
    again = done(options, threads=2)
    assert (again.told.late, again.result.epochs) == (0, 0)


# -- late files ---------------------------------------------------------------------------------------


def test_late_file_is_ingested(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options()
    sample.add("b.json", 3)
    done(options)
    sample.add("a.json", 3)
    sample.add("c.json", 3)
    run = done(options)
    assert run.told.late == 1
    assert ids(options) == sample.ids
    assert statuses(options) == dict.fromkeys(["a.json", "b.json", "c.json"], "committed")
    assert done(options).told.late == 0


def test_late_file_over_several_epochs(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_events=4, max_files=1)
    sample.add("b.json", 3)
    done(options)
    sample.add("a.json", 10)
    sample.add("a2.json.gz", 10)
    run = done(options)
    assert len(run.told.epochs) == 6
    assert sum(epoch.files - epoch.files_again for epoch in run.told.epochs) == 2, "each file is counted once"
    assert ids(options) == sample.ids
    assert position(options)["last_committed_file"] == str(sample.path("b.json"))


def test_late_file_is_ignored(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(late_files="ignore")
    sample.add("b.json", 3)
    done(options)
    lines = sample.lines(3)
    sample.path("a.json").write_bytes(b"\n".join(lines))
    sample.forget(lines)
    run = done(options)
    assert run.told.late == 1
    assert ids(options) == sample.ids
    assert statuses(options)["a.json"] == "late"


def test_late_file_fails_the_run(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(late_files="fail")
    sample.add("b.json", 3)
    done(options)
    before = ids(options)
    sample.add("a.json", 3)
    sample.add("c.json", 3)
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "late-file")
    assert ids(options) == before


def test_late_file_of_a_lost_epoch_is_found_again(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRNLINE_FAULT", "epoch.stage.before:1:raise")
    monkeypatch.setattr("firnline.faults._seen", Counter({"epoch.stage.before": -1}))
    options = make_options()
    sample.add("b.json", 3)
    done(options)
    sample.add("a.json", 3)
    run = done(options)  # the epoch that takes it up fails once
    assert run.told.troubles
    assert ids(options) == sample.ids


def test_reconcile_while_an_epoch_settles(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What commits while the ledger is being read is neither lost nor taken for late."""
    from firnline.run.ledger_files import LedgerFiles
    from firnline.run.runner import Runner
    from firnline.testing.local import LocalEngine
    from tests.support.pipelines import Recorder

    load = LedgerFiles.load

    def slowly(self: LedgerFiles, *args: Any) -> Any:
        found = load(self, *args)
        time.sleep(0.15)  # epochs in flight commit meanwhile
        return found

    monkeypatch.setattr(LedgerFiles, "load", slowly)
    options = make_options(max_files=1, reconcile_interval_secs=0.02, poll_interval_secs=0.01)
    for number in range(10):
        sample.add(f"a{number}.json", 3)

    class UntilRead(Recorder):
        """Stops the run once every file is read and a few more reconciles have been made."""

        after = 0

        def reconciled(self, found: Comparison) -> None:
            super().reconciled(found)
            self.after += len(self.epochs) >= 10
            if self.after == 3:
                runner.stop()

    told = UntilRead()
    runner = Runner(open_pipeline(options), LocalEngine(1), told)
    assert runner.run().exit_code == 0
    assert told.late == 0
    assert ids(options) == sample.ids


# -- files that change --------------------------------------------------------------------------------


def test_half_read_file_that_changes_is_set_aside(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_events=4)
    lines = sample.lines(10)
    path = sample.path("a.json")
    path.write_bytes(b"\n".join(lines) + b"\n")
    first = make_options(max_events=4, attempts=0)
    os.environ["FIRNLINE_FAULT"] = ""
    run_until_epoch(first, 1)
    path.write_bytes(b"\n".join(reversed(lines)) + b"\n\n")
    sample.add("b.json", 3)
    done(options)
    assert reasons(options)["a.json"] == "changed while it was half read"
    sample.forget(lines[4:])
    assert ids(options) == sample.ids
    assert position(options)["set_aside"][str(path)]["records"] == 4


def test_changed_file_is_taken_up_only_when_that_is_accepted(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_events=4, max_inflight=1)
    lines = sample.lines(10)
    path = sample.path("a.json")
    path.write_bytes(b"\n".join(lines) + b"\n")
    run_until_epoch(options, 1)
    path.write_bytes(b"\n".join(lines) + b"\n\n\n")
    sample.add("b.json", 3)
    done(options)
    assert statuses(options)["a.json"] == "set_aside"
    retry(options, path)
    sample.add("c.json", 3)
    done(options)
    assert statuses(options)["a.json"] == "set_aside"
    retry(options, path, changed=True)
    done(options)
    assert statuses(options)["a.json"] == "committed"
    assert ids(options) == sample.ids


def test_processed_file_that_changes_is_reported_not_read(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options()
    path = sample.add("a.json", 3)
    done(options)
    path.write_bytes(path.read_bytes().replace(b'"id": 1', b'"id": 9'))
    run = done(options)
    assert run.told.changed == [str(path)]
    assert statuses(options)["a.json"] == "changed"
    assert run.result.epochs == 0
    assert ids(options) == sample.ids


def test_file_that_changes_while_it_is_read(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of it counts for nothing: it is read again as it is then."""
    from firnline.storage import LocalStorage

    options = make_options()
    path = sample.add("a.json", 3)
    more = sample.lines(2)
    open_read = LocalStorage.open_read
    seen: list[str] = []

    def replaced_meanwhile(self: LocalStorage, key: str, offset: int = 0) -> Any:
        stream = open_read(self, key, offset)
        if key == "a.json" and not seen:
            seen.append(key)
            new = path.with_suffix(".new")
            new.write_bytes(path.read_bytes() + b"\n".join(more) + b"\n")
            new.replace(path)
        return stream

    monkeypatch.setattr(LocalStorage, "open_read", replaced_meanwhile)
    done(options)
    assert ids(options) == sample.ids


def test_vanished_file_is_set_aside(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_events=4, max_inflight=1)
    lines = sample.lines(10)
    path = sample.path("a.json")
    path.write_bytes(b"\n".join(lines) + b"\n")
    sample.add("b.json", 3)
    run_until_epoch(options, 1)
    path.unlink()
    done(options)
    assert position(options)["set_aside"][str(path)]["reason"] == "missing"
    sample.forget(lines[4:])
    assert ids(options) == sample.ids


# -- broken files -------------------------------------------------------------------------------------


def test_truncated_file_is_set_aside_and_holds_up_nobody(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(file_attempts=3, max_files=2)
    sample.add("a.json.gz", 3)
    whole = sample.add_truncated("b.json.gz", 300)
    sample.add("c.json.gz", 3)
    sample.add("d.json.gz", 3)
    done(options)
    assert ids(options) == sample.ids
    assert statuses(options)["b.json.gz"] == "set_aside"
    assert "ends in the middle" in str(reasons(options)["b.json.gz"])
    assert done(options).result.epochs == 0

    sample.path("b.json.gz").write_bytes(whole)  # nothing was read of it: replaced and asked for
    retry(options, sample.path("b.json.gz"))
    done(options)
    sample.expect(unpack_lines(whole))
    assert ids(options) == sample.ids
    assert statuses(options)["b.json.gz"] == "committed"
    assert open_pipeline(options).requests.load() == []


def test_retry_of_a_file_that_is_still_broken(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(file_attempts=2)
    sample.add_truncated("b.json.gz")
    done(options)
    retry(options, sample.path("b.json.gz"))
    done(options)
    assert statuses(options)["b.json.gz"] == "set_aside"
    assert open_pipeline(options).requests.load() == []


@pytest.mark.parametrize("after", [None, "c.json.gz"], ids=["the-newest", "passed-by-the-mark"])
def test_a_file_that_is_given_up_is_never_read_again(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, after: str | None
) -> None:
    """Also when the epoch that gives it up is lost once, and the file is put right later."""
    options = make_options(file_attempts=1)
    sample.add("a.json.gz", 3)
    whole = sample.add_truncated("b.json.gz", 300)
    if after:
        sample.add(after, 3)
    done(options)
    before = position(options)
    assert list(before["set_aside"]) == [str(sample.path("b.json.gz"))]
    pipeline = open_pipeline(options)
    pipeline.requests.ask_drop(str(sample.path("b.json.gz")), ids=pipeline.ids)
    monkeypatch.setenv("FIRNLINE_FAULT", "epoch.stage.before:1:raise")
    monkeypatch.setattr("firnline.faults._seen", Counter())
    run = done(options)
    assert run.told.troubles
    assert run.result.epochs == 1
    assert position(options)["set_aside"] == {}
    assert (statuses(options)["b.json.gz"], reasons(options)["b.json.gz"]) == ("dropped", run_reason(before))
    assert open_pipeline(options).requests.load() == []
    rebuilt = pipeline.sources["files"].replay(
        before, next(iter(pipeline.entries(pipeline.load().entry))).inputs["files"]
    )
    assert rebuilt == position(options)
    sample.path("b.json.gz").write_bytes(whole)
    again = done(options)
    assert (again.result.epochs, again.told.late) == (0, 0)
    assert ids(options) == sample.ids


def run_reason(stored: dict[str, Any]) -> str:
    """Why the one file of a position is set aside."""
    (aside,) = stored["set_aside"].values()
    return str(aside["reason"])


def test_truncated_file_that_is_completed_in_time(
    sample: SampleInput, make_options: MakeOptions, launcher: Launcher
) -> None:
    """A file that is still being copied: retried, then read whole."""
    options = make_options(file_attempts=1000, poll_interval_secs=0.05)
    whole = sample.add_truncated("b.json.gz", 300)
    running = launcher.start(options, once=False)
    running.wait_for("file failed")
    sample.path("b.json.gz").write_bytes(whole)
    sample.expect(unpack_lines(whole))
    deadline = time.monotonic() + 120
    while ids(options) != sample.ids:
        assert time.monotonic() < deadline, running.log()[-3000:]
        time.sleep(0.05)
    running.signal(15)
    assert running.wait().exit_code == 0


def test_broken_large_file_leaves_no_rows(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a file too large to hold are written before its end is seen; when it is broken, none may stay."""
    monkeypatch.setattr("firnline.sources.files.reader.HOLD_BYTES", 1000)
    monkeypatch.setattr("firnline.ndjson.reader.BLOCK_BYTES", 4000)
    options = make_options(file_attempts=1)
    sample.add("a.json.gz", 50, bad=2)
    sample.add_truncated("b.json.gz", 3000)
    sample.add("c.json.gz", 50, bad=2)
    done(options)
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad


def test_gzip_with_several_members_is_read_whole(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options()
    pipeline = [b"\n".join(sample.lines(4)) + b"\n" for _ in range(3)]
    sample.path("a.json.gz").write_bytes(b"".join(gzip.compress(p) for p in pipeline))
    done(options)
    assert ids(options) == sample.ids


def test_unreadable_file_is_set_aside(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    from firnline.storage import LocalStorage

    options = make_options(file_attempts=2)
    sample.add("a.json", 3)
    lines = sample.lines(3)
    sample.path("b.json").write_bytes(b"\n".join(lines))
    sample.forget(lines)
    open_read = LocalStorage.open_read

    def forbidden(self: LocalStorage, key: str, offset: int = 0) -> Any:
        if key == "b.json":
            raise PermissionError(13, "Permission denied")
        return open_read(self, key, offset)

    monkeypatch.setattr(LocalStorage, "open_read", forbidden)
    done(options)
    assert statuses(options)["b.json"] == "set_aside"
    assert ids(options) == sample.ids


# -- large, small, empty, odd -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.zst"])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_file_over_several_epochs(
    sample: SampleInput, make_options: MakeOptions, name: str, threads: int
) -> None:
    options = make_options(max_events=70, lineage=True)
    sample.add(name, 500, bad=7)
    sample.add("b.json", 40)
    run = done(options, threads=threads)
    assert run.result.epochs >= 8
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad
    records = table_ids(options.sinks[0].location, column="_firnline_record")
    assert max(records) >= 499


def test_large_file_over_several_epochs_with_kills(
    sample: SampleInput, make_options: MakeOptions, launcher: Launcher
) -> None:
    options = make_options(max_events=70)
    sample.add("a.json.gz", 400, bad=7)
    sample.add("b.json", 400)
    for point in ("epoch.commit.before:2", "delta.commit.after:2", "epoch.stage.after:2"):
        assert launcher.run(options, f"{point}:kill").exit_code == -9
    launcher.run_until_done(options)
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad


def test_blank_lines_bom_crlf_and_no_last_newline(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_events=3)
    lines = sample.lines(8)
    sample.path("a.json").write_bytes(b"\xef\xbb\xbf\r\n\n" + b"\r\n\n  \n".join(lines))
    sample.path("b.json.gz").write_bytes(pack("b.json.gz", b"\xef\xbb\xbf" + b"\r\n".join(sample.lines(5))))
    done(options)
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == Counter()


@pytest.mark.parametrize("partition_by", [(), ("month",)])
def test_only_empty_files(sample: SampleInput, make_options: MakeOptions, partition_by: tuple[str, ...]) -> None:
    options = make_options(partition_by=partition_by)
    sample.path("a.json").write_bytes(b"")
    sample.path("b.json.gz").write_bytes(gzip.compress(b""))
    sample.path("c.json").write_bytes(b"\n\n \r\n")
    done(options)
    assert statuses(options) == dict.fromkeys(["a.json", "b.json.gz", "c.json"], "committed")
    sample.add("d.json", 3)
    done(options)
    assert ids(options) == sample.ids


@pytest.mark.parametrize("partition_by", [(), ("month",)])
def test_first_epoch_has_only_a_broken_file(
    sample: SampleInput, make_options: MakeOptions, partition_by: tuple[str, ...]
) -> None:
    options = make_options(partition_by=partition_by, file_attempts=1)
    sample.add_truncated("a.json.gz")
    done(options)
    sample.add("d.json", 3)
    done(options)
    assert ids(options) == sample.ids


def test_only_bad_records(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(partition_by=("month",))
    sample.add("a.json", 0, bad=3)
    done(options)
    assert quarantined(options.sinks[0].location, options.name) == sample.bad


def test_many_small_files(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=400)
    for number in range(1000):
        sample.add(f"{number % 7}/{number:04d}.json", 1)
    run = done(options, threads=2)
    assert run.result.epochs == 3
    assert max(facts.staged_files for facts in run.told.epochs) <= 2
    assert ids(options) == sample.ids
    assert position(options)["files"] == {}


def test_names_with_odd_characters(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=2, lineage=True)
    for name in ("ä ö.json", "a%20b.json", "a=b/c=ü/x y.json", "😀.json", "'quote\".json", "a#b?.json", "z;&.json"):
        sample.add(name, 2)
    done(options)
    assert ids(options) == sample.ids
    assert done(options).result.epochs == 0


def test_name_that_is_not_text_is_no_trap(sample: SampleInput, make_options: MakeOptions) -> None:
    """Such a name cannot be written down: the file is left alone, and said so; the rest goes on."""
    options = make_options()
    sample.add("a.json", 2)
    with open(os.fsencode(str(sample.folder)) + b"/b\xff.json", "wb") as file:
        file.write(b'{"id":99}\n')
    sample.add("c.json", 2)
    done(options)
    assert ids(options) == sample.ids


# -- where to start, where it lies --------------------------------------------------------------------


def test_start_after_a_name(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(start_after="b.json")
    for name in ("a.json", "b.json"):
        sample.add(name, 3)
    sample.ids.clear()
    sample.add("b2.json", 3)
    sample.add("c.json", 3)
    run = done(options)
    assert run.told.late == 0
    assert done(options).told.late == 0
    assert ids(options) == sample.ids


def test_start_after_a_time(sample: SampleInput, make_options: MakeOptions) -> None:
    old = (datetime.now(UTC) - timedelta(days=2)).timestamp()
    for name in ("a.json", "z.json"):
        os.utime(sample.add(name, 3), (old, old))
    sample.ids.clear()
    moment = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    options = make_options(start_after=moment)
    sample.add("m.json", 3)
    run = done(options)
    assert run.told.late == 0
    sample.add("n.json", 3)
    assert done(options).told.late == 0
    assert ids(options) == sample.ids


def test_another_root_is_refused(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    sample.add("a.json", 3)
    done(make_options())
    before = ids(make_options())
    sample.folder.rename(tmp_path / "in2")
    run = run_once(make_options(path=str(tmp_path / "in2")))
    assert (run.exit_code, run.error_code) == (1, "source-moved")
    assert "--source-moved" in run.result.error.hint  # type: ignore[union-attr]
    assert ids(make_options()) == before


def test_source_moved(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = make_options(max_events=4, max_inflight=1)
    sample.add("a.json", 3)
    sample.add("b.json.gz", 10)
    run_until_epoch(options, 2)
    old, new = sample.folder, tmp_path / "in2"
    old.rename(new)
    sample.folder = new
    sample.add("c.json", 3)
    moved = make_options(path=str(new), max_events=4)
    run = done(moved, moved=(str(old), str(new)))
    assert run.told.late == 0
    assert ids(moved) == sample.ids
    sample.add("a0.json", 3)
    again = done(moved)  # the ledger still tells processed files from late ones
    assert again.told.late == 1
    assert ids(moved) == sample.ids
    assert done(moved).result.epochs == 0
