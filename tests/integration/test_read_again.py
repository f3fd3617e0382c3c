"""Input that is read once more: quarantined records (`quarantine --replay`) and finished files (`files --reread`)."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.cli import quarantine as cli
from firnline.cli.common import Common
from firnline.errors import BadRecordsError, ConfigError
from firnline.history.edits.rollback import Rollback
from firnline.history.quarantine import load_pending, load_quarantine, load_quarantine_files
from firnline.history.quarantine_requests import RecordFilter, ask_records, choose_records
from firnline.history.reread import plan_reread
from firnline.history.status import load_files
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.sources.files import reader
from firnline.sources.files.formats import csv_records
from firnline.sources.files.formats.base import QuarantinedRecord
from firnline.sources.files.formats.csv_records import CsvFormat
from firnline.sources.files.options import CsvOptions
from tests.support.pipelines import known_files, pipeline_options, run_once


class Inbox:
    """A folder of files, and the table that a pipeline writes."""

    def __init__(self, root: Path) -> None:
        self.folder, self.table = root / "in", str(root / "out")
        self.folder.mkdir()

    def put(self, name: str, *lines: str) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    def options(self, **settings: Any) -> PipelineOptions:
        return pipeline_options(str(self.folder), self.table, **{"lineage": True, **settings})

    def open(self, **settings: Any) -> OpenPipeline:
        return open_pipeline(self.options(**settings))

    def run(self, **settings: Any) -> None:
        run = run_once(self.options(**settings))
        assert run.exit_code == 0, run.result.error

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        rows = DeltaTable(self.table).to_pyarrow_table().to_pylist()
        return sorted((tuple(row.get(name) for name in columns) for row in rows), key=repr)

    def bad(self) -> list[tuple[str, int, str]]:
        found = [(Path(row["file"]).name, row["record"], row["reason"]) for row in load_quarantine(self.open())]
        return sorted(found)

    def records(self) -> list[dict[str, Any]]:
        pipeline = self.open()
        return [record for _, record in pipeline.ledger_files(pipeline.load().entry)]

    def epoch(self) -> int:
        return self.open().load().epoch

    def ask_replay(self, *, discard: bool = False, **settings: Any) -> int:
        """Request all quarantined records; returns how many."""
        pipeline = self.open(**settings)
        files = [file.describe([number for number, _ in file.rows]) for file in load_quarantine_files(pipeline)]
        if files:
            pipeline.requests.ask_replay("files", files, discard=discard, ids=pipeline.ids)
        return sum(int(file["records"]) for file in files)


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path)


BY_V: dict[str, Any] = {"write": "upsert", "key": ("v",)}


def strict(inbox: Inbox) -> None:
    """Two records lack `v`, the key in the first spec; one is no JSON under any spec."""
    inbox.put("a.json", '{"id": 1, "v": "x"}', '{"id": 2}', "broken")
    inbox.put("day=1/b.json", '{"id": 3, "v": "y"}', "", '{"id": 4}')
    inbox.run(**BY_V)
    assert inbox.bad() == [
        ("a.json", 1, "missing-required"),
        ("a.json", 2, "not-json"),
        ("b.json", 1, "missing-required"),
    ]


def test_quarantined_records_are_decoded_by_the_settings_of_today(inbox: Inbox) -> None:
    strict(inbox)
    before = inbox.epoch()
    assert inbox.ask_replay() == 3
    inbox.put("c.json", '{"id": 5}')
    inbox.run()
    assert inbox.rows("id", "v", "day") == [
        (1, "x", None), (2, None, None), (3, "y", "1"), (4, None, "1"), (5, None, None)
    ]  # fmt: skip
    lineage = {
        row[0]: (Path(row[1]).name, *row[2:])
        for row in inbox.rows("id", "_firnline_file", "_firnline_record", "_firnline_epoch")
    }
    assert lineage[2] == ("a.json", 1, before + 1)
    assert lineage[4] == ("b.json", 1, before + 1)
    assert lineage[5] == ("c.json", 0, before + 2)
    assert inbox.bad() == [("a.json", 2, "not-json")]  # bad again, and listed once
    (left,) = load_quarantine(inbox.open())
    assert (left["epoch"], left["line"], left["raw"]) == (before + 1, 3, b"broken")
    assert inbox.open().requests.load() == []


def test_a_second_replay_reads_none_of_them(inbox: Inbox) -> None:
    strict(inbox)
    inbox.ask_replay()
    inbox.run()
    rows = inbox.rows("id")
    assert inbox.ask_replay() == 1
    inbox.run()
    assert inbox.rows("id") == rows
    assert inbox.bad() == [("a.json", 2, "not-json")]


def test_a_rollback_gives_replayed_records_back(inbox: Inbox) -> None:
    strict(inbox)
    bad, rows, epoch = inbox.bad(), inbox.rows("id"), inbox.epoch()
    inbox.ask_replay()
    inbox.run()
    Rollback(inbox.open(), epoch).perform("test")
    assert (inbox.bad(), inbox.rows("id")) == (bad, rows)
    inbox.run()
    assert (inbox.bad(), inbox.rows("id")) == (bad, rows)
    inbox.ask_replay()
    inbox.run()
    assert [row[0] for row in inbox.rows("id")] == [1, 2, 3, 4]


def test_dropped_records_are_no_longer_listed_and_never_read(inbox: Inbox) -> None:
    strict(inbox)
    epoch, rows = inbox.epoch(), inbox.rows("id")
    assert inbox.ask_replay(discard=True) == 3
    inbox.run()
    assert (inbox.bad(), inbox.rows("id"), inbox.epoch()) == ([], rows, epoch + 1)
    Rollback(inbox.open(), epoch).perform("test")
    assert len(inbox.bad()) == 3


def test_records_that_are_all_bad_again_stop_no_run(inbox: Inbox) -> None:
    lines = [f"broken {n}" for n in range(150)]
    inbox.put("a.json", *lines)
    inbox.run(max_bad_ratio=1.0)
    inbox.ask_replay()
    inbox.run(max_bad_ratio=0.1, on_bad_record="fail")
    assert len(inbox.bad()) == 150


def test_a_replay_whose_stored_records_are_gone_is_answered_and_loses_nothing_else(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    strict(inbox)
    inbox.ask_replay()
    stored = {path: path.read_bytes() for path in Path(inbox.table).rglob("quarantine/*.parquet")}
    for path in stored:
        path.write_bytes(b"no parquet")
    inbox.put("c.json", '{"id": 5, "v": "z"}')
    inbox.run()
    assert [row[0] for row in inbox.rows("id")] == [1, 3, 5]
    assert "records not read again: they stay in quarantine" in caplog.messages
    assert inbox.open().requests.load() == []
    for path, data in stored.items():
        path.write_bytes(data)
    assert len(inbox.bad()) == 3


def test_too_many_bad_records_are_named_and_stay_readable(inbox: Inbox) -> None:
    inbox.put("a.json", '{"id": 1}')
    inbox.run()
    path = inbox.put("b.json", *(['{"id": 1'] * 120))
    run = run_once(inbox.options())
    error = run.result.error
    assert isinstance(error, BadRecordsError)
    assert f'{path} line 1: not-json: {{"id": 1' in error.message
    assert "quarantine --pending" in str(error.hint)
    pending = load_pending(inbox.open())
    assert [(row["line"], row["raw"]) for row in pending] == [(n + 1, b'{"id": 1') for n in range(120)]
    assert inbox.bad() == []
    inbox.run(max_bad_ratio=1.0)
    assert len(inbox.bad()) == 120
    assert load_pending(inbox.open()) == []


def test_a_replay_whose_epoch_was_rolled_back_reads_nothing(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    """The file itself is read again, so its quarantined record must not come from the undone quarantine, too."""
    inbox.put("a.json", '{"id": 1, "v": "x"}')
    inbox.run(**BY_V)
    epoch = inbox.epoch()
    inbox.put("b.json", '{"id": 2}', '{"id": 3, "v": "y"}')
    inbox.run(**BY_V)
    assert inbox.ask_replay() == 1
    Rollback(inbox.open(), epoch).perform("test")
    with caplog.at_level(logging.WARNING, "firnline"):
        inbox.run()
    assert inbox.rows("id") == [(1,), (2,), (3,)]
    assert "records not read again: they are no longer quarantined" in caplog.messages
    assert (inbox.bad(), inbox.open().requests.load()) == ([], [])
    refused = [record for record in inbox.records() if record["status"] == "refused"]
    assert [record["reason"] for record in refused] == ["no longer quarantined"]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_two_users_who_confirm_the_same_plan_replay_its_records_once(inbox: Inbox, side_by_side: bool) -> None:
    strict(inbox)
    chosen = [choose_records(inbox.open(), RecordFilter(None, None, None), discard=False) for _ in range(2)]
    ask_records(inbox.open(), chosen[0], "run", discard=False)
    if not side_by_side:
        inbox.run()
    ask_records(inbox.open(), chosen[1], "run", discard=False)
    inbox.run()
    assert inbox.rows("id") == [(1,), (2,), (3,), (4,)]
    assert inbox.bad() == [("a.json", 2, "not-json")]
    assert inbox.open().requests.load() == []


def test_a_replay_of_dropped_records_reads_nothing(inbox: Inbox) -> None:
    strict(inbox)
    chosen = choose_records(inbox.open(), RecordFilter(None, None, None), discard=False)
    inbox.ask_replay(discard=True)
    inbox.run()
    ask_records(inbox.open(), chosen, "run", discard=False)
    inbox.run()
    assert inbox.rows("id") == [(1,), (3,)]
    assert inbox.bad() == []


def test_a_replay_of_records_whose_file_was_read_again_reads_nothing(inbox: Inbox) -> None:
    strict(inbox)
    chosen = choose_records(inbox.open(), RecordFilter(None, "a.json", None), discard=False)
    ask_reread(inbox, "a.json")
    inbox.run()
    ask_records(inbox.open(), chosen, "run", discard=False)
    inbox.run()
    assert inbox.rows("id") == [(1,), (1,), (2,), (3,)]


# -- CSV ----------------------------------------------------------------------------------------------


def csv_inbox(inbox: Inbox) -> dict[str, Any]:
    """Returns settings of a CSV source; some records lack the key, or have a stray quote."""
    csv: dict[str, Any] = {"format": "csv"}
    inbox.put("a.csv", "id,v,note", "1,x,plain", '2,,"two', 'lines, one ""field"""', '3,y,"stray"quote', "4,,last")
    inbox.run(**csv, **BY_V)
    assert inbox.bad() == [
        ("a.csv", 1, "missing-required"),
        ("a.csv", 2, "stray-quote"),
        ("a.csv", 3, "missing-required"),
    ]
    return csv


def test_quarantined_csv_records_are_decoded_with_their_header_and_the_settings_of_today(inbox: Inbox) -> None:
    csv = csv_inbox(inbox)
    before = inbox.epoch()
    (inbox.folder / "a.csv").unlink()  # nothing of it is needed
    chosen = choose_records(inbox.open(**csv), RecordFilter(None, None, None), discard=False)
    assert (chosen.records.total(), chosen.left_out.total()) == (3, 0)
    assert inbox.ask_replay(**csv) == 3
    inbox.run(**csv)
    assert inbox.rows("id", "v", "note") == [
        (1, "x", "plain"), (2, None, 'two\nlines, one "field"'), (4, None, "last")
    ]  # fmt: skip
    lineage = {row[0]: row[1:] for row in inbox.rows("id", "_firnline_record", "_firnline_epoch")}
    assert (lineage[2], lineage[4]) == ((1, before + 1), (3, before + 1))
    (left,) = load_quarantine(inbox.open(**csv))
    assert (left["record"], left["line"], left["reason"]) == (2, 5, "stray-quote")
    assert left["raw"] == b'3,y,"stray"quote'
    # It is bad again, and still has its header: other settings can read it.
    plain = {**csv, "csv": CsvOptions(quote="")}
    assert inbox.ask_replay(**plain) == 1
    inbox.run(**plain)
    assert inbox.rows("id", "note")[2] == (3, '"stray"quote')
    assert inbox.bad() == []
    assert inbox.ask_replay(**csv) == 0


def test_a_rollback_gives_replayed_csv_records_back(inbox: Inbox) -> None:
    csv = csv_inbox(inbox)
    bad, rows, epoch = inbox.bad(), inbox.rows("id"), inbox.epoch()
    inbox.ask_replay(**csv)
    inbox.run(**csv)
    Rollback(inbox.open(**csv), epoch).perform("test")
    inbox.run(**csv)
    assert (inbox.bad(), inbox.rows("id")) == (bad, rows)
    inbox.ask_replay(**csv)
    inbox.run(**csv)
    assert inbox.rows("id") == [(1,), (2,), (4,)]


def test_csv_records_of_compressed_and_converted_files_without_a_header(inbox: Inbox) -> None:
    options = CsvOptions(delimiter=";", header=False, encoding="latin-1")
    csv: dict[str, Any] = {"format": "csv", "csv": options}
    (inbox.folder / "b.csv.gz").write_bytes(gzip.compress("1;ä;x\r\n2;ö\r\n3;ü;\r\n".encode("latin-1")))
    inbox.run(**csv, write="upsert", key=("column2",))
    assert inbox.bad() == [("b.csv.gz", 1, "wrong-field-count"), ("b.csv.gz", 2, "missing-required")]
    assert inbox.ask_replay(**csv) == 2
    inbox.run(**csv)
    assert inbox.rows("column0", "column1", "column2") == [(1, "ä", "x"), (3, "ü", None)]
    assert inbox.bad() == [("b.csv.gz", 1, "wrong-field-count")]


def test_every_csv_record_is_scanned_alone() -> None:
    raws = [
        b"id,v",  # the header today, which was a record before
        b'1,"open',
        b"2,y",
        b"3,x\n4,y",
        b'5,"a\nb"',
        b"6,cut here",
        b"7,z\r",
    ]
    reasons = ["does-not-fit"] * 5 + ["too-long", "does-not-fit"]
    records = [
        QuarantinedRecord(10 * n, n, reason, raw) for n, (reason, raw) in enumerate(zip(reasons, raws, strict=True))
    ]
    (block,) = CsvFormat({"format": "csv"}).scan_alone(records, b"id,v\r\n")
    assert [json.loads(line) for line in bytes(block.data).splitlines()] == [
        {"id": 2, "v": "y"}, {"id": 5, "v": "a\nb"}, {"id": 7, "v": "z\r"}
    ]  # fmt: skip
    assert [(one.record, one.line, one.reason) for one in block.refused] == [
        (0, 0, "does-not-fit"), (1, 10, "stray-quote"), (3, 30, "wrong-field-count"), (5, 50, "too-long")
    ]  # fmt: skip
    assert block.origins is not None
    assert block.origins.lines.tolist() == [20, 40, 60]
    assert [block.origins.raw(n) for n in range(3)] == [raws[2], raws[4], raws[6]]


def test_blocks_of_csv_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_records, "BLOCK_BYTES", 10)
    records = [QuarantinedRecord(n, n, "does-not-fit", raw) for n, raw in enumerate([b"1" * 25, b"2", b"3", b"4" * 9])]
    blocks = list(CsvFormat({"format": "csv"}).scan_alone(records, b"id\n"))
    assert [(block.first_record, block.records) for block in blocks] == [(0, 1), (1, 2), (3, 1)]


def test_csv_records_quarantined_without_their_header_are_refused(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    """As by an older version; and rows of Parquet files."""
    csv = csv_inbox(inbox)
    for path in Path(inbox.table).rglob("quarantine/*.parquet"):
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    chosen = choose_records(inbox.open(**csv), RecordFilter(None, None, None), discard=False)
    assert chosen.left_out == {"a record alone has no header; use `firnline files --reread`, or --export": 3}
    chosen = choose_records(inbox.open(format="parquet"), RecordFilter(None, None, None), discard=False)
    assert [text.partition(";")[0] for text in chosen.left_out] == ["a row of a Parquet file is not decoded alone"]
    rows, bad = inbox.rows("id"), inbox.bad()
    for settings in (csv, {"format": "parquet"}):
        inbox.ask_replay(**settings)  # of one who saw another spec
        inbox.run(**settings)
        assert (inbox.rows("id"), inbox.bad(), inbox.open().requests.load()) == (rows, bad, [])
    logged = [vars(record)["reason"] for record in caplog.records if "stay in quarantine" in record.getMessage()]
    ends = ("its header is not in the quarantine", "a row of a Parquet file is not decoded alone")
    assert [reason.partition(": ")[2] for reason in logged] == list(ends)


# -- files --------------------------------------------------------------------------------------------


def ask_reread(inbox: Inbox, path: str) -> None:
    pipeline = inbox.open()
    plan = plan_reread(pipeline, path)
    pipeline.requests.ask_reread(plan.path, plan.source, reading=plan.reading, ids=pipeline.ids)


def row_of(inbox: Inbox, path: str) -> dict[str, Any]:
    return next(row for row in load_files(inbox.open()) if row["path"] == path)


def test_a_finished_file_is_read_again_as_it_is_now(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    path = inbox.put("a.json", '{"id": 1}', '{"id": 2}', "broken")
    inbox.put("b.json", '{"id": 3}')
    inbox.run()
    inbox.put("a.json", '{"id": 1}', '{"id": 20}', '{"id": 21}', "bad still")
    plan = plan_reread(inbox.open(), "a.json")
    assert (plan.path, plan.changed, plan.epochs, plan.effect) == (path, True, ((1, 3),), "doubled")
    ask_reread(inbox, "a.json")
    assert row_of(inbox, path)["reread"] == "asked"
    with caplog.at_level(logging.WARNING, "firnline"):
        inbox.run()
    assert inbox.rows("id") == [(1,), (1,), (2,), (20,), (21,), (3,)]
    row = row_of(inbox, path)
    assert (row["status"], row["reread"], row["records"], row["epoch"]) == ("committed", "done", 4, 2)
    assert not [r for r in caplog.records if "late" in r.getMessage() or "changed" in r.getMessage()]
    assert inbox.bad() == [("a.json", 3, "not-json")]  # of the last reading only
    pipeline = inbox.open()
    (record,) = next(iter(pipeline.entries(pipeline.load().entry))).inputs["files"]
    assert record["reread"]
    assert "late" not in record
    found = pipeline.sources["files"].find_late(pipeline.load().checkpoint.positions["files"], _known(pipeline))  # type: ignore[union-attr]
    assert (found.late, found.changed) == ([], [])
    inbox.run()
    assert len(inbox.rows("id")) == 6


def _known(pipeline: OpenPipeline) -> Any:
    from firnline.run.ledger_files import LedgerFiles

    return LedgerFiles(pipeline).load(pipeline.load().entry)["files"]


def test_an_upsert_overwrites_the_rows_of_a_file_that_is_read_again(inbox: Inbox) -> None:
    settings: dict[str, Any] = {"write": "upsert", "key": ("id",)}
    inbox.put("a.json", '{"id": 1, "v": "a"}', '{"id": 2, "v": "a"}')
    inbox.run(**settings)
    inbox.put("a.json", '{"id": 1, "v": "corrected"}')
    pipeline = inbox.open(**settings)
    assert plan_reread(pipeline, "a.json").effect == "overwritten"
    ask_reread(inbox, "a.json")
    inbox.run(**settings)
    assert inbox.rows("id", "v") == [(1, "corrected"), (2, "a")]


def test_a_large_file_is_read_again_over_several_epochs_and_its_position_follows_from_the_ledger(inbox: Inbox) -> None:
    inbox.put("a.json", *(json.dumps({"id": n}) for n in range(10)))
    inbox.put("b.json", '{"id": 100}')
    inbox.run(max_events=4)
    ask_reread(inbox, "a.json")
    inbox.run(max_events=4)
    assert inbox.rows("id") == sorted([(n,) for n in range(10)] * 2 + [(100,)], key=repr)
    pipeline = inbox.open()
    entries = list(reversed(list(pipeline.entries(pipeline.load().entry))))
    position = pipeline.sources["files"].start(None)
    for entry in entries:
        position = pipeline.sources["files"].replay(position, entry.inputs["files"])
        wanted = entry.checkpoint.positions["files"]
        assert {k: position[k] for k in ("files", "last_committed_file")} == {
            k: wanted[k] for k in ("files", "last_committed_file")
        }
        assert set(position.get("answered", ())) >= set(wanted.get("answered", ()))
    assert known_files(pipeline, pipeline.load().entry).keys() == {str(inbox.folder / n) for n in ("a.json", "b.json")}


def test_only_a_file_that_was_read_to_its_end_is_read_again(inbox: Inbox) -> None:
    inbox.put("a.json", '{"id": 1}')
    inbox.run()
    path = inbox.put("b.json", '{"id": 2}')
    with pytest.raises(ConfigError, match="is not read to its end: it is pending"):
        plan_reread(inbox.open(), path)
    with pytest.raises(ConfigError, match="no file of the pipeline"):
        plan_reread(inbox.open(), "c.json")
    (inbox.folder / "a.json").unlink()
    with pytest.raises(ConfigError, match="is gone"):
        plan_reread(inbox.open(), "a.json")


def test_a_rollback_undoes_a_reread(inbox: Inbox) -> None:
    inbox.put("a.json", '{"id": 1}')
    inbox.run()
    ask_reread(inbox, "a.json")
    inbox.run()
    assert inbox.rows("id") == [(1,), (1,)]
    Rollback(inbox.open(), 1).perform("test")
    assert inbox.rows("id") == [(1,)]
    inbox.run()
    assert inbox.rows("id") == [(1,)]


@pytest.mark.parametrize("max_events", [1, 100])
def test_a_reread_whose_reading_was_rolled_back_reads_the_file_once(inbox: Inbox, max_events: int) -> None:
    """Also while the epoch that reads it is in flight, and the request is not deleted yet."""
    inbox.put("a.json", '{"id": 1}')
    inbox.run()
    inbox.put("b.json", '{"id": 2}', '{"id": 3}')
    inbox.run()
    ask_reread(inbox, "b.json")
    Rollback(inbox.open(), 1).perform("test")
    inbox.run(max_events=max_events)
    inbox.run()
    assert inbox.rows("id") == [(1,), (2,), (3,)]
    assert inbox.open().requests.load() == []
    refused = [record for record in inbox.records() if record["status"] == "refused"]
    assert [record["path"] for record in refused] == [str(inbox.folder / "b.json")]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_two_users_who_confirm_the_same_reread_get_one(inbox: Inbox, side_by_side: bool) -> None:
    path = inbox.put("a.json", '{"id": 1}')
    inbox.run()
    plans = [plan_reread(inbox.open(), path) for _ in range(2)]
    for plan in plans:
        pipeline = inbox.open()
        pipeline.requests.ask_reread(plan.path, plan.source, reading=plan.reading, ids=pipeline.ids)
        if not side_by_side:
            inbox.run()
    inbox.run()
    assert inbox.rows("id") == [(1,), (1,)]
    ask_reread(inbox, path)
    inbox.run()
    assert inbox.rows("id") == [(1,), (1,), (1,)]


def test_a_refused_request_follows_from_the_ledger(inbox: Inbox) -> None:
    path = inbox.put("a.json", '{"id": 1}')
    inbox.run()
    pipeline = inbox.open()
    pipeline.requests.ask_reread(path, "files", reading="1-another", ids=pipeline.ids)
    (request,) = pipeline.requests.load()
    before = pipeline.load()
    assert before.checkpoint is not None
    inbox.run()
    assert inbox.rows("id") == [(1,)]
    after = inbox.open().load()
    assert after.checkpoint is not None
    source, entry = inbox.open().sources["files"], next(iter(inbox.open().entries(after.entry)))
    rebuilt = source.replay(before.checkpoint.positions["files"], entry.inputs["files"])
    assert rebuilt == after.checkpoint.positions["files"]
    assert source.answered(rebuilt) == {request.id}


def test_a_line_break_inside_a_string_stays_bad(inbox: Inbox) -> None:
    (inbox.folder / "a.json").write_bytes(b'[{"id": 1,\n"v": "x\ny"}, {"id": 2,\n\n"v": "z"}]')
    inbox.run(format="json")
    assert [row[0] for row in inbox.rows("id")] == [2]
    assert inbox.ask_replay(format="json") == 1
    inbox.run(format="json")
    assert [row[0] for row in inbox.rows("id")] == [2]
    assert inbox.bad() == [("a.json", 0, "not-json")]


def test_a_reread_that_was_set_aside_and_retried_lists_its_bad_records_once(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inbox.put("a.json", '{"id": 1}', "bad")
    inbox.put("z.json", '{"id": 9}')
    inbox.run(file_attempts=1)
    inbox.put("m.json", '{"id": 5}')
    ask_reread(inbox, "a.json")
    open_once = reader._OpenFile._open_once

    def gone(self: Any) -> Any:
        if self._key == "a.json":
            raise FileNotFoundError(2, "gone")
        return open_once(self)

    with monkeypatch.context() as patch:
        patch.setattr(reader._OpenFile, "_open_once", gone)
        inbox.run(file_attempts=1)
    pipeline = inbox.open()
    pipeline.requests.ask_retry(path, changed=False, ids=pipeline.ids)
    inbox.run(file_attempts=1)
    assert [row[0] for row in inbox.rows("id")] == [1, 1, 5, 9]
    assert inbox.bad() == [("a.json", 1, "not-json")]


def test_the_command_that_an_export_names_drops_what_was_exported_and_nothing_else(
    inbox: Inbox, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox.put("a.json", '{"id": 1}', "bad one", "bad two")
    inbox.run()
    wanted = RecordFilter("not-json", None, None)
    assert cli._export(inbox.open(), wanted, str(inbox.folder.parent / "bad"), Common()) == 0
    assert (inbox.folder.parent / "bad").read_bytes() == b"bad one\nbad two\n"
    advice = capsys.readouterr().out.splitlines()[-1]
    assert advice == f"firnline quarantine --drop --reason not-json --until-epoch {inbox.epoch()}"
    inbox.put("b.json", '{"id": 2}', "bad three")
    inbox.run()
    chosen = choose_records(inbox.open(), replace(wanted, until_epoch=inbox.epoch() - 1), discard=True)
    ask_records(inbox.open(), chosen, "run", discard=True)
    inbox.run()
    assert inbox.bad() == [("b.json", 1, "not-json")]


# -- after the source moved ---------------------------------------------------------------------------


def move(inbox: Inbox, to: Path, **settings: Any) -> None:
    """Move the folder of files, and run once with `--source-moved`."""
    old, to = inbox.folder, to / "in"
    to.parent.mkdir(exist_ok=True)
    old.rename(to)
    inbox.folder = to
    run = run_once(inbox.options(**settings), moved=(str(old), str(to)))
    assert run.exit_code == 0, run.result.error


def test_records_replayed_after_a_move_have_the_folders_of_their_file(tmp_path: Path) -> None:
    """Folders above the source's root give no columns, before and after a move."""
    (tmp_path / "site=1").mkdir()
    inbox = Inbox(tmp_path / "site=1")
    strict(inbox)
    move(inbox, tmp_path / "site=2", **BY_V)
    assert inbox.ask_replay() == 3
    inbox.run()
    rows = [(1, "x", None, None), (2, None, None, None), (3, "y", "1", None), (4, None, "1", None)]
    assert inbox.rows("id", "v", "day", "site") == rows
    assert inbox.bad() == [("a.json", 2, "not-json")]
    replayed = {Path(row[1]) for row in inbox.rows("id", "_firnline_file") if row[0] in (2, 4)}
    assert replayed == {inbox.folder / "a.json", inbox.folder / "day=1/b.json"}


def test_a_file_read_again_after_a_move_has_no_old_bad_records(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    strict(inbox)
    asked = inbox.open()
    files = [file.describe([number for number, _ in file.rows]) for file in load_quarantine_files(asked)]
    move(inbox, tmp_path / "moved", **BY_V)
    pipeline = inbox.open()
    plan = plan_reread(pipeline, "a.json")
    pipeline.requests.ask_reread(plan.path, plan.source, reading=plan.reading, ids=pipeline.ids)
    inbox.run()
    assert inbox.rows("id", "v") == [(1, "x"), (1, "x"), (2, None), (3, "y")]
    assert inbox.bad() == [("a.json", 2, "not-json"), ("b.json", 1, "missing-required")]
    asked.requests.ask_replay("files", files, discard=False, ids=asked.ids)  # of one who saw the old list
    inbox.run()
    assert inbox.rows("id", "v") == [(1, "x"), (1, "x"), (2, None), (3, "y"), (4, None)]
    assert inbox.ask_replay() == 1
    inbox.run()
    assert inbox.rows("id", "v") == [(1, "x"), (1, "x"), (2, None), (3, "y"), (4, None)]


@pytest.mark.parametrize(("old", "new"), [("in", "in/in"), ("a/in", "a")])
def test_a_move_into_or_out_of_the_old_folder_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """A later file of the new folder would be taken for one of the old folder, and read again and again."""
    folder, target, table = tmp_path / old, tmp_path / new, str(tmp_path / "out")
    folder.mkdir(parents=True)
    (folder / "a.json").write_text('{"id": 1}\n')
    assert run_once(pipeline_options(str(folder), table)).exit_code == 0
    target.mkdir(exist_ok=True)
    (folder / "a.json").rename(target / "a.json")
    error = run_once(pipeline_options(str(target), table), moved=(str(folder), str(target))).result.error
    assert isinstance(error, ConfigError)
    assert "could not be told apart" in str(error)
    between = tmp_path / "between"
    target.rename(between)
    assert run_once(pipeline_options(str(between), table), moved=(str(folder), str(between))).exit_code == 0
    target.mkdir(parents=True)
    (between / "a.json").rename(target / "a.json")
    error = run_once(pipeline_options(str(target), table), moved=(str(between), str(target))).result.error
    assert isinstance(error, ConfigError)
    assert DeltaTable(table).to_pyarrow_table().column("id").to_pylist() == [1]
