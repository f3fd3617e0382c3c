"""Files that grow after they were read: reported, read to their new end exactly once, or refused."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import RollbackRefusedError
from firnline.history.edits.rollback import Rollback
from firnline.history.quarantine import load_quarantine
from firnline.history.status import load_files, load_status
from firnline.options import PipelineOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.files import reader
from firnline.sources.files.growth import TAIL_BYTES
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.pipelines import LocalRun, MakeOptions, file_source, run_once, run_until_epoch
from tests.support.samples import SampleInput, make_old, pack, quarantined, table_ids

LONG = bool(os.environ.get("FIRNLINE_PROOF"))


def done(options: PipelineOptions) -> LocalRun:
    run = run_once(options)
    assert run.exit_code == 0, run.result
    return run


def ids(options: PipelineOptions) -> Counter[int]:
    return table_ids(options.sinks[0].location)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
    make_old(path)


def rows(options: PipelineOptions) -> dict[str, dict[str, Any]]:
    return {Path(row["path"]).name: row for row in load_files(open_pipeline(options))}


def whole(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


# -- growth while something else happens ---------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_events": 1}, {"max_files": 1}], ids=["events", "files"])
def test_a_grown_file_whose_rest_waits_for_its_turn_may_grow_again(
    sample: SampleInput, make_options: MakeOptions, limit: dict[str, int]
) -> None:
    options = make_options(on_growth="read_rest")
    paths = [sample.add("a.json", 1), sample.add("b.json", 1)]
    done(options)
    for path in paths:
        append(path, whole(sample.lines(2)))
    run_until_epoch(make_options(on_growth="read_rest", **limit), 2)  # one epoch: a rest waits
    append(paths[1], whole(sample.lines(1)))
    done(options)
    assert load_status(open_pipeline(options)).files_set_aside == 0
    assert ids(options) == sample.ids


def test_a_file_that_grows_between_plan_and_read_is_read_to_its_end(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(on_growth="read_rest")
    path = sample.add("a.json", 1)
    sample.add("z.json", 1)
    done(options)
    append(path, whole(sample.lines(1)))
    late, open_once = [whole(sample.lines(1))], reader._OpenFile._open_once

    def open_after_an_append(self: Any) -> Any:
        if self._key == "a.json" and late:
            append(path, late.pop())
        return open_once(self)

    monkeypatch.setattr(reader._OpenFile, "_open_once", open_after_an_append)
    done(options)
    assert not late
    assert load_status(open_pipeline(options)).files_set_aside == 0
    assert ids(options) == sample.ids


def test_a_file_of_blank_lines_that_is_replaced_while_its_rest_waits_is_read_from_its_beginning(
    sample: SampleInput, make_options: MakeOptions
) -> None:
    options = make_options(on_growth="read_rest")
    path, blank = sample.add("a.json", 1), sample.path("b.json")
    append(blank, b"\n" * 14)
    sample.add("z.json", 1)
    done(options)
    append(path, whole(sample.lines(1)))
    append(blank, whole(lines := sample.lines(1)))
    run_until_epoch(make_options(on_growth="read_rest", max_files=1), 2)
    blank.write_bytes(whole(sample.lines(3)))
    make_old(blank)
    sample.forget(lines)
    done(options)
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == Counter()


@pytest.mark.parametrize("folder", ["new", "a-new"], ids=["after", "before"])
def test_a_file_that_grows_after_its_folder_moved_is_read_once(
    tmp_path: Path, make_options: MakeOptions, folder: str
) -> None:
    old = SampleInput(tmp_path / "old")
    old.add("a.json", 1)
    old.add("z.json", 1)
    first = make_options(path=str(old.folder), on_growth="read_rest")
    done(first)
    moved = old.folder.rename(tmp_path / folder)
    options = make_options(path=str(moved), on_growth="read_rest")
    append(moved / "a.json", whole(old.lines(1)))
    run = run_once(options, moved=(str(old.folder), str(moved)))
    assert run.exit_code == 0, run.result
    for _ in range(2):
        done(options)
        assert ids(options) == old.ids
    append(moved / "a.json", whole(old.lines(1)))
    done(options)
    assert ids(options) == old.ids


def test_a_grown_file_that_is_read_again_on_request_is_not_continued(
    sample: SampleInput, make_options: MakeOptions
) -> None:
    options = make_options(on_growth="read_rest")
    before = sample.lines(2)
    path = sample.path("a.json")
    path.write_bytes(whole(before))
    make_old(path)
    done(options)
    append(path, whole(sample.lines(2)))
    pipeline = open_pipeline(options)
    pipeline.requests.ask_reread(str(path), options.sources[0].name, ids=pipeline.ids)
    done(options)
    sample.expect(before)  # the records of the first reading come again; the appended ones come once
    assert ids(options) == sample.ids


# -- reporting ----------------------------------------------------------------------------------------


def test_a_file_that_grew_is_reported_and_not_read(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options()
    path = sample.add("a.json", 3)
    done(options)
    before = path.stat().st_size
    lines = sample.lines(2)
    append(path, whole(lines))
    sample.forget(lines)
    run = done(options)
    assert (run.told.grown, run.told.changed, run.result.epochs) == ([str(path)], [], 0)
    assert ids(options) == sample.ids
    row = rows(options)["a.json"]
    assert (row["status"], row["records"]) == ("grown", 3)
    assert row["reason"] == f"grew from {before} to {path.stat().st_size} bytes after it was read"
    status = load_status(open_pipeline(options))
    assert (status.files_grown, status.files_changed, status.files_outstanding) == (1, 0, 0)


@pytest.mark.parametrize("growth", ["report", "read_rest", "fail"])
def test_a_file_that_is_larger_but_another_one_was_replaced(
    sample: SampleInput, make_options: MakeOptions, growth: str
) -> None:
    """Replaced files are reported and never read again by themselves, whatever `on_growth` says."""
    options = make_options(on_growth=growth)
    path = sample.add("a.json", 3)
    done(options)
    path.write_bytes(b'{"id": 77}\n' * 100)
    make_old(path)
    run = done(options)
    assert (run.told.grown, run.told.changed, run.result.epochs) == ([], [str(path)], 0)
    assert ids(options) == sample.ids
    assert rows(options)["a.json"]["status"] == "changed"
    status = load_status(open_pipeline(options))
    assert (status.files_grown, status.files_changed) == (0, 1)


def test_a_compressed_file_that_grew_is_reported_only(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(on_growth="read_rest")
    path = sample.add("a.json.gz", 3)
    done(options)
    append(path, pack("a.json.gz", b'{"id": 77}\n'))
    run = done(options)
    assert (run.told.grown, run.result.epochs) == ([str(path)], 0)
    assert ids(options) == sample.ids
    assert "cannot be read alone" in rows(options)["a.json.gz"]["reason"]


def test_fail_stops_the_run_and_names_the_file(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(on_growth="fail")
    path = sample.add("a.json", 3)
    done(options)
    append(path, b'{"id": 77}\n')
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "grown-file")
    assert run.result.error is not None
    assert str(path) in run.result.error.message
    assert "on_growth: read_rest" in run.result.error.hint
    assert ids(options) == sample.ids


# -- reading the rest ---------------------------------------------------------------------------------


@pytest.mark.parametrize("late_files", ["ingest", "ignore"])
def test_the_rest_is_read_once(sample: SampleInput, make_options: MakeOptions, late_files: str) -> None:
    options = make_options(on_growth="read_rest", late_files=late_files)
    path = sample.add("a.json", 3)
    sample.add("b.json", 3)
    done(options)
    for bad in (1, 0, 0):
        append(path, whole(sample.lines(2, bad)))
        status = load_status(open_pipeline(options))
        assert (status.files_grown, status.files_outstanding) == (1, 1)
        run = done(options)
        assert [epoch.records for epoch in run.told.epochs] == [2 + bad]
        assert done(options).result.epochs == 0
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad
    (bad_record,) = load_quarantine(open_pipeline(options))
    assert (bad_record["line"], bad_record["record"]) == (6, 5)
    assert rows(options)["a.json"]["status"] == "committed"


def test_an_empty_file_that_grew_is_read(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(on_growth="read_rest")
    path = sample.path("a.json")
    append(path, b"")
    sample.add("b.json", 1)
    done(options)
    append(path, whole(sample.lines(2)))
    done(options)
    assert ids(options) == sample.ids


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_an_incomplete_last_line_is_left_until_it_is_complete(
    sample: SampleInput, make_options: MakeOptions, cut: int
) -> None:
    options = make_options(on_growth="read_rest", on_bad_record="fail")
    path = sample.path("a.json")
    first, second, third = sample.lines(3)
    append(path, first + b"\n" + second[:cut])
    done(options)
    assert ids(options) == Counter({1: 1})
    row = rows(options)["a.json"]
    assert (row["status"], row["records"], row["reason"]) == ("committed", 1, "its last line (2) is incomplete")
    assert load_status(open_pipeline(options)).files_incomplete == 1
    assert done(options).result.epochs == 0, "it is left in peace"
    append(path, second[cut : cut + 2])
    done(options)
    assert ids(options) == Counter({1: 1})
    append(path, second[cut + 2 :] + b"\n" + third)
    done(options)
    assert ids(options) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == Counter()
    assert load_status(open_pipeline(options)).files_incomplete == 0


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \t\n", b" " * (TAIL_BYTES + 10) + b"\n"])
def test_a_complete_last_line_without_line_feed_is_a_record_and_stays_one(
    sample: SampleInput, make_options: MakeOptions, end: bytes
) -> None:
    options = make_options(on_growth="read_rest")
    path = sample.path("a.json")
    append(path, b"\n".join(sample.lines(2)))
    done(options)
    assert ids(options) == sample.ids
    append(path, end[:-1])  # nothing to read yet, except for a line feed alone
    done(options)
    append(path, end[-1:] + b"{broken\n" + whole(sample.lines(2)))
    done(options)
    assert ids(options) == sample.ids
    assert [(bad["line"], bad["record"]) for bad in load_quarantine(open_pipeline(options))] == [(3, 2)]


def test_a_line_that_was_read_and_then_continued_is_set_aside(sample: SampleInput, make_options: MakeOptions) -> None:
    """Half a record is never read twice: a person decides."""
    options = make_options(on_growth="read_rest")
    path = sample.path("a.json")
    append(path, b"\n".join(sample.lines(2)))
    done(options)
    append(path, b'{"id": 77}\n{"id": 78}\n')
    done(options)
    assert ids(options) == sample.ids
    row = rows(options)["a.json"]
    assert row["status"] == "set_aside"
    assert row["reason"] == "grew in the middle of line 2, which had been read as a record"
    append(path, b'{"id": 79}\n')
    assert done(options).result.epochs == 0
    assert ids(options) == sample.ids


def test_half_a_line_in_quarantine_is_not_read_again(sample: SampleInput, make_options: MakeOptions) -> None:
    """`report` reads what is there; then the setting changes."""
    path = sample.path("a.json")
    (first,) = sample.lines(1)
    append(path, first + b'\n{"id": 7')
    done(make_options())
    append(path, b'7}\n{"id": 78}\n')
    options = make_options(on_growth="read_rest")
    done(options)
    assert ids(options) == sample.ids
    assert rows(options)["a.json"]["status"] == "set_aside"
    assert quarantined(options.sinks[0].location, options.name) == Counter({b'{"id": 7': 1})


def test_a_file_that_grows_while_it_is_half_read(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(on_growth="read_rest", max_events=4, max_inflight=1)
    path = sample.add("a.json", 10)
    run_until_epoch(options, 1)
    append(path, whole(sample.lines(3)))
    done(options)
    assert ids(options) == sample.ids


# -- going back, and reading again --------------------------------------------------------------------


def test_a_rollback_reads_the_rest_again(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(on_growth="read_rest")
    path = sample.add("a.json", 3)
    done(options)
    for _ in range(3):
        append(path, whole(sample.lines(2)))
        done(options)
    for epoch in (2, 1):
        Rollback(open_pipeline(options), epoch).perform("test")
        append(path, whole(sample.lines(1)))
        done(options)
        assert ids(options) == sample.ids


def test_a_rollback_before_a_file_that_was_replaced_is_refused(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(on_growth="read_rest")
    sample.add("a.json", 1)
    done(options)
    path = sample.add("b.json", 3)
    done(options)
    path.write_bytes(b'{"id": 77}\n' * 100)
    with pytest.raises(RollbackRefusedError, match=r"b\.json"):
        Rollback(open_pipeline(options), 1).perform("test")


@pytest.mark.parametrize("lines", [1, 3])
def test_state_is_rebuilt_from_a_file_that_has_grown(tmp_path: Path, lines: int) -> None:
    """State is kept every hundred epochs: every run reads the epochs before it again, from the grown file."""
    source = CounterInput(tmp_path / "in")
    spare = CounterInput(tmp_path / "spare")
    options = counter_options(source.folder, tmp_path / "table", trigger=TriggerOptions(every_epochs=100))
    options = dataclasses.replace(options, sources=(dataclasses.replace(file_source(options), on_growth="read_rest"),))
    path = source.folder / "log.json"
    for number in range(1, 5):
        spare.add(rows=lines)
        data = (spare.folder / f"f{number:05d}.json").read_bytes()
        with path.open("ab") as file:
            file.write(data if number % 2 else data[:-1])
        done(options)
        if not number % 2:
            append(path, b"\n")
    assert read_counts(options.sinks[0].location) == spare.expected()


class Appender:
    """Programs that append to files at random, in pieces that end anywhere, and a pipeline that reads along."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.sample = SampleInput(folder / "in")
        self.unwritten: dict[Path, bytes] = {}
        self.trace: list[Any] = [("seed", seed)]
        self.folder = folder

    def options(self, make_options: MakeOptions) -> PipelineOptions:
        return make_options(
            on_growth="read_rest",
            max_events=self.random.choice([3, 8, 1000]),
            max_files=self.random.choice([1, 5]),
            late_files=self.random.choice(["ingest", "ingest", "ignore"]),
        )

    def write(self) -> None:
        path = self.sample.path(f"{self.random.choice('abc')}.json")
        data = self.unwritten.get(path, b"") + whole(self.sample.lines(self.random.randrange(4)))
        data += self.random.choice([b"", b"", b"\n", b"  \r\n"])
        cut = self.random.choice([len(data), self.random.randrange(len(data) + 1)])
        if data[:cut]:  # a new time alone says that the file changed
            append(path, data[:cut])
        self.unwritten[path] = data[cut:]
        self.trace.append(("write", path.name, data[:cut]))

    def finish(self) -> None:
        for path, data in self.unwritten.items():
            if data:
                append(path, data)
        self.unwritten = {}

    def rollback(self, options: PipelineOptions) -> None:
        pipeline = open_pipeline(options)
        head = pipeline.load()
        if head.checkpoint is None:
            return
        known = [entry.epoch for entry in pipeline.entries(head.entry) if head.checkpoint.floor <= entry.epoch]
        known = [epoch for epoch in known if 0 < epoch < head.epoch]
        if known:
            to = self.random.choice(known)
            self.trace.append(("rollback", to))
            Rollback(pipeline, to).perform("test")


@pytest.mark.parametrize("seed", range(200 if LONG else 12))
def test_whatever_is_appended_arrives_once(
    tmp_path: Path, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = Appender(tmp_path, seed)
    for name in "abc":  # so that no file is late, which `late_files: ignore` would skip
        append(world.sample.path(f"{name}.json"), b"")
    done(make_options(on_growth="read_rest"))
    for _ in range(12):
        act = world.random.choice(["write", "write", "run", "fail", "rollback"])
        options = world.options(make_options)
        if act == "write":
            world.write()
        elif act == "rollback":
            world.rollback(options)
        else:
            with monkeypatch.context() as patch:
                if act == "fail":
                    point = world.random.choice(["epoch.stage.before", "delta.commit.before", "delta.commit.after"])
                    patch.setenv("FIRNLINE_FAULT", f"{point}:1:raise")
                    patch.setattr("firnline.faults._seen", Counter())
                run = run_once(options)
            world.trace.append((act, run.exit_code))
            assert act == "fail" or run.exit_code == 0, world.trace
    world.finish()
    options = world.options(make_options)
    done(options)
    assert ids(options) == world.sample.ids, world.trace
    assert quarantined(options.sinks[0].location, options.name) == Counter(), world.trace
    assert load_status(open_pipeline(options)).files_set_aside == 0, world.trace
