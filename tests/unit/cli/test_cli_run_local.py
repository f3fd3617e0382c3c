"""`firnline run` in this process, with tasks that need no Spark: output, exit codes, signals, the terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli import long_task as signals
from firnline.cli.main import run_command
from firnline.cli.run_report import Lines, LiveDisplay, RunTotals, logging_to
from firnline.clock import SystemClock
from firnline.options import StoreOptions
from firnline.run.observer import EpochFacts
from firnline.sources.base import Backlog
from firnline.stores import open_store
from firnline.stores.lease import Lease
from tests.support.samples import SampleInput

pytestmark = pytest.mark.usefixtures("no_spark")

DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")


def test_a_run_logs_dated_lines_and_ends_with_one_result(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--once"]) == 0
    shown = capfd.readouterr()
    lines = shown.err.splitlines()
    assert all(DATED.match(line) for line in lines)
    texts = [line[21:] for line in lines]
    assert texts[:2] == ["starting fresh", "claimed generation 1"]  # the first words are no warning
    assert any(t.startswith("epoch 1 committed  10 rows  2 files  version 1") for t in texts)
    assert any(t.startswith("epoch 2 committed  5 rows  1 file  1 file failed  version 2") for t in texts)
    assert any(t.startswith("1 file set aside") for t in texts)
    assert shown.out.startswith("done after epoch 2: 15 rows from 3 files, 2 quarantined, ")
    left = shown.out.splitlines()[1:]
    assert left[0] == "1 file is set aside, because reading failed:"
    assert left[1].startswith(f"  {spec.parent}/in/b1.json.gz: ")
    assert left[2] == "  `firnline files --status set_aside` lists them all; --retry PATH reads one again"
    assert run_command(["run", "--once"]) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["nothing to do; the table is at epoch 2", *left]
    assert [line[21:] for line in shown.err.splitlines()] == ["resuming after epoch 2"]


def test_the_json_result_has_the_documented_fields(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from firnline.cli.run import EPILOGUE

    assert run_command(["run", "--once", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["status"], found["epoch"], found["rows"], found["quarantined"]) == ("done", 2, 15, {"not-json": 2})
    assert [key for key in found if key not in EPILOGUE] == []


def test_files_set_aside_end_a_run_with_7_if_asked(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--once", "--fail-on-set-aside"]) == 7
    shown = capfd.readouterr()
    assert shown.out.startswith("done after epoch 2: ")
    assert shown.err.splitlines()[-2] == "Error: 1 file set aside"
    assert run_command(["run", "--once", "--fail-on-set-aside", "--json"]) == 7
    found = json.loads(capfd.readouterr().out)
    assert (found["status"], found["exit_code"], found["set_aside"]) == ("done", 7, 1)
    assert found["error"]["code"] == "files-set-aside"
    assert [file["path"] for file in found["set_aside_files"]] == [f"{spec.parent}/in/b1.json.gz"]
    (spec.parent / "in" / "b1.json.gz").unlink()
    assert run_command(["files", "--drop", "*/b1.json.gz", "--yes"]) == 0
    assert run_command(["run", "--once", "--fail-on-set-aside"]) == 0


def test_a_run_that_only_delivers_to_a_further_sink_says_so(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sinks = (
        "  - {type: delta, table: out, mode: staged}\n  - {type: delta, name: archive, table: archive, mode: staged}"
    )
    spec.write_text(spec.read_text().replace("  - {type: delta, table: out}", sinks))
    assert run_command(["run", "--once"]) == 0
    assert run_command(["committer", "--once"]) == 0
    capfd.readouterr()
    assert run_command(["run", "--once"]) == 0
    said = capfd.readouterr().out.splitlines()[0]
    assert said == "2 epochs staged for archive; `firnline committer` commits what is staged"
    assert run_command(["committer", "--once"]) == 0
    assert DeltaTable(spec.parent / "archive").to_pyarrow_table().num_rows == 15
    capfd.readouterr()
    assert run_command(["run", "--once", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["delivered"] == {}


@pytest.mark.parametrize(
    "limits",
    ["{max_files: 15}", "{max_files: 4}", "{max_files: 15, max_events: 7}", "{max_files: 2, max_inflight: 2}"],
)
def test_files_are_counted_once_however_often_they_are_read(
    limits: str, spec: Path, sample: SampleInput, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files that fail and are tried again, that several epochs read, or that a plan names and no task reaches."""
    for number in range(11):
        sample.add(f"c{number:02}.json", 5)
    text = spec.read_text().replace("file_attempts: 1", "file_attempts: 3").replace("{max_files: 2}", limits)
    spec.write_text(text.replace("poll_interval_secs: 1,", "poll_interval_secs: 0.05,"))
    assert run_command(["run", "--once", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["files"], found["set_aside"]) == (14, 1)
    entries = [json.loads(path.read_text()) for path in (spec.parent / "out/_firnline/flights/ledger").glob("*.json")]
    touched = [
        (entry["checkpoint"]["epoch"], record["path"])
        for entry in entries
        for records in entry["inputs"]["sources"].values()
        for record in records
        if record["status"] != "pending"
    ]
    assert len({path for _, path in touched}) == 15
    assert len(touched) > 15  # the broken file was tried three times
    assert run_command(["checkpoints", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["checkpoints"]
    assert {row["epoch"]: row["files"] for row in listed} == dict(Counter(epoch for epoch, _ in touched))
    assert DeltaTable(spec.parent / "out").to_pyarrow_table().num_rows == found["rows"]


def test_a_failed_run_exits_with_the_code_of_its_error(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec.write_text(spec.read_text().replace("file_attempts: 1", "on_bad_record: fail"))
    assert run_command(["run", "--once", "--json"]) == 1
    shown = capfd.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "bad-records"
    assert [line.split(":")[0] for line in shown.err.splitlines()[-2:]] == ["Error", "Try"]


def test_a_signal_stops_a_run_cleanly(
    spec: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: RunTotals, facts: EpochFacts) -> None:
        committed(self, facts)
        os.kill(os.getpid(), signal.SIGTERM)

    committed: Callable[[RunTotals, EpochFacts], None] = RunTotals.committed
    monkeypatch.setattr(RunTotals, "committed", interrupt)
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("stopped at once"))
    spec.write_text(spec.read_text().replace("max_files: 2", "max_files: 4"))
    assert run_command(["run"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("stopped cleanly after epoch 1\n")
    assert "stopping after the epochs in flight" in shown.err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_signal_ends_the_process_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class ExitedError(Exception):
        pass

    def leave(code: int) -> None:
        calls.append(code)
        raise ExitedError

    monkeypatch.setattr("os._exit", leave)
    with signals.stop_on_signals(
        lambda: calls.append("stop"), lambda: calls.append("told"), lambda: calls.append("at once")
    ) as state:
        os.kill(os.getpid(), signal.SIGINT)
        assert state.asked
        with pytest.raises(ExitedError):
            os.kill(os.getpid(), signal.SIGINT)
    assert calls == ["stop", "told", "at once", 130]


def test_metrics_are_served_while_a_run_lasts(
    spec: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import urllib.request

    answers: list[str] = []

    def ask(self: RunTotals, facts: EpochFacts) -> None:
        committed(self, facts)
        url = re.search(r"http://127\.0\.0\.1:\d+/metrics", capfd.readouterr().err)
        if url is not None:
            answers.append(urllib.request.urlopen(url[0], timeout=60).read().decode())

    committed: Callable[[RunTotals, EpochFacts], None] = RunTotals.committed
    monkeypatch.setattr(RunTotals, "committed", ask)
    assert run_command(["run", "--once", "--metrics-port", "0"]) == 0
    assert 'firnline_epoch{pipeline="flights"}' in answers[0]


def test_metrics_with_a_token_file_need_the_token(
    spec: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import urllib.error
    import urllib.request

    answers: list[str] = []
    said: list[str] = []

    def ask(self: RunTotals, facts: EpochFacts) -> None:
        committed(self, facts)
        said.append(capfd.readouterr().err)
        url = re.search(r"http://127\.0\.0\.1:\d+/metrics", said[-1])
        if url is not None:
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(url[0], timeout=60)
            refused.value.close()
            token = (tmp_path / "token").read_text().strip()
            asked = urllib.request.Request(url[0], headers={"Authorization": f"Bearer {token}"})
            answers.append(urllib.request.urlopen(asked, timeout=60).read().decode())

    committed: Callable[[RunTotals, EpochFacts], None] = RunTotals.committed
    monkeypatch.setattr(RunTotals, "committed", ask)
    monkeypatch.setenv("FIRNLINE_METRICS_PORT", "0")
    monkeypatch.setenv("FIRNLINE_METRICS_TOKEN_FILE", str(tmp_path / "token"))
    assert run_command(["run", "--once"]) == 0
    assert 'firnline_epoch{pipeline="flights"}' in answers[0]
    assert "made a metrics token in" in said[0]
    shown = "".join([*said, *capfd.readouterr()])
    assert (tmp_path / "token").read_text().strip() not in shown


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (["--metrics-port", "0", "--metrics-host", "0.0.0.0"], "is not a loopback address, and needs a token"),
        (["--metrics-host", "0.0.0.0"], "belong to --metrics-port"),
        (["--metrics-port", "0", "--metrics-token-file", "no/folder/token"], "cannot be read or made"),
    ],
)
def test_metrics_for_others_need_a_port_and_a_token(
    spec: Path, capfd: pytest.CaptureFixture[str], tokens: list[str], error: str
) -> None:
    (spec.parent / "out").mkdir()
    for command in (["run", "--once"], ["committer", "out", "--once"]):
        assert run_command([*command, *tokens]) == 2
        assert error in capfd.readouterr().err


def test_a_busy_port_is_a_usage_error(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run_command(["run", "--once", "--metrics-port", str(taken.getsockname()[1])]) == 2
    assert "Try: Choose another --metrics-port" in capfd.readouterr().err


def test_log_records_become_lines_with_their_facts() -> None:
    stream = io.StringIO()
    with logging_to(Lines(stream), debug=False):
        logging.getLogger("firnline.x").warning("file failed", extra={"file": "a\x1bb", "reason": "truncated"})
        logging.getLogger("firnline.x").info("not shown")
        logging.getLogger("py4j.x").error("a page of tracebacks")
    assert stream.getvalue()[21:] == "warning: file failed  file=a\\x1bb  reason=truncated\n"


def test_the_live_block_shows_files_records_speed_epoch_backlog_and_time_left() -> None:
    from rich.console import Console

    tally = RunTotals(time.monotonic)
    tally.running(7)
    tally.backlog(Backlog(40, 8_000_000))
    tally.files, tally.records, tally.bytes_read, tally.epoch = 12, 60_000, 2_000_000, 6
    tally._recent.append((time.monotonic(), 2_000_000, 16_000_000))
    display = LiveDisplay(tally, io.StringIO())
    out = io.StringIO()
    Console(file=out, width=100).print(display.draw())
    text = out.getvalue()
    for part in (
        "12 files",
        "60,000 records",
        "MB/s",
        "epoch 6",
        "20 %",
        "backlog 40 files, 8.0 MB",
        "left",
        "epoch 7 runs",
    ):
        assert part in text
    display.stopping()
    Console(file=out, width=100).print(display.draw())
    assert "Ctrl-C again stops at once" in out.getvalue()


def tell_json(capfd: pytest.CaptureFixture[str], *tokens: str) -> Any:
    assert run_command([*tokens, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_store_that_cannot_be_written_stops_nothing(
    spec: Path, sample: SampleInput, capfd: pytest.CaptureFixture[str]
) -> None:
    (spec.parent / "data").touch()  # where the store's folder would be made
    assert tell_json(capfd, "dry-run")["copies"][0]["problem"] == "cannot be written"
    for _ in range(2):
        assert run_command(["run", "--once", "--json"]) == 0
        shown = capfd.readouterr()
        assert "the checkpoint store" in shown.err
        assert "going on, trying again" in shown.err
        assert "Not a directory" in json.loads(shown.out)["copies_failing"]["store"]
    copy = tell_json(capfd, "status")["copies"][0]
    assert (copy["epochs_behind"], "cannot be written" in copy["problem"]) == (2, True)
    sample.add("c.json", 1)
    assert run_command(["run", "--once", "--strict-store"]) == 3
    (spec.parent / "data").unlink()
    assert run_command(["run", "--once"]) == 0
    capfd.readouterr()
    copy = tell_json(capfd, "status")["copies"][0]
    assert (copy["epoch"], copy["epochs_behind"], copy["problem"]) == (3, 0, None)


def test_a_dry_run_refuses_the_copies_that_a_run_would_refuse(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = tell_json(capfd, "dry-run")
    assert [(c["path"], c["epoch"], c["writable"], c["problem"]) for c in found["copies"]] == [("store", 2, True, None)]
    assert found["lease"] is None
    shutil.rmtree(finished.parent / "out")
    ends = []
    for verb in (["dry-run"], ["run", "--once"]):
        code = run_command(verb)
        ends.append((code, [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error")]))
    assert ends[0] == ends[1]
    assert "knows nothing of it" in ends[0][1][0]


def test_a_dry_run_tells_who_holds_the_lease(finished: Path, run_json: Any) -> None:
    store = open_store(StoreOptions(type="file", path=str(finished.parent / "data" / "firnline_checkpoints")))
    lease = Lease(store, "flights", "abc", 15.0, SystemClock())
    assert lease.take(lease.read())
    found = run_json("dry-run")
    assert found["lease"]["holder"] == "abc"
    assert any("while it is alive a run is refused (exit code 6)" in warning for warning in found["warnings"])
    lease.release()
    assert not any("lease" in warning for warning in run_json("dry-run")["warnings"])


def test_an_upsert_counts_rows_inserted_updated_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "firnline.yml").write_text(
        "name: people\nsources:\n  people: {path: in, min_age_secs: 0}\n"
        "sinks:\n  - {table: out, write: upsert, key: [id], delete_when: {op: D}}\n"
    )

    def add(name: str, *records: str) -> None:
        (tmp_path / "in" / name).write_text("".join(f"{record}\n" for record in records))

    add("1.json", '{"id": 1, "op": "I"}', '{"id": 2, "op": "I"}', '{"id": 2, "op": "U"}', '{"id": 3, "op": "I"}')
    assert run_command(["run", "--once"]) == 0
    shown = capfd.readouterr()
    assert "epoch 1 committed  3 rows inserted  1 file" in shown.err
    assert shown.out.startswith("done after epoch 1: 3 rows inserted from 1 file, ")
    add("2.json", '{"id": 1, "op": "U"}', '{"id": 2, "op": "D"}', '{"id": 4, "op": "I"}', '{"id": 9, "op": "D"}')
    assert run_command(["run", "--once", "--json"]) == 0
    shown = capfd.readouterr()
    assert "epoch 2 committed  1 row inserted, 1 updated, 1 deleted  1 file" in shown.err
    found = json.loads(shown.out)
    assert (found["rows"], found["changes"]) == (4, {"inserted": 1, "updated": 1, "deleted": 1})
    assert DeltaTable(tmp_path / "out").to_pyarrow_table()["id"].sort().to_pylist() == [1, 3, 4]
    add("3.json", '{"id": 9, "op": "D"}')
    assert run_command(["run", "--once"]) == 0
    assert capfd.readouterr().out.startswith("done after epoch 3: no row changed from 1 file, ")
    assert run_command(["status"]) == 0
    assert "9 changes applied" in capfd.readouterr().out
