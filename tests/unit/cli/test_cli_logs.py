"""`--log-format json`: every line on stderr is one JSON object with time, level, message and fields."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from firnline.cli import logs
from firnline.cli.long_task import LongTask
from firnline.cli.main import run_command
from firnline.cli.output import FactsHandler


def parse(text: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert list(line) == ["time", "level", "message", "fields"]
        assert line["level"] in ("debug", "info", "warning", "error")
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    return lines


@pytest.mark.parametrize("chosen", ["option", "variable"])
def test_a_run_logs_one_object_a_line_with_its_numbers_as_fields(
    chosen: str, spec: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_spark: None
) -> None:
    if chosen == "variable":
        monkeypatch.setenv("FIRNLINE_LOG_FORMAT", "json")
    option = ["--log-format", "json"] if chosen == "option" else []
    assert run_command(["run", "--once", "--fail-on-set-aside", *option]) == 7
    shown = capfd.readouterr()
    lines = parse(shown.err)
    assert [line["message"] for line in lines[:2]] == ["starting fresh", "claimed"]
    committed = [line["fields"] for line in lines if line["message"] == "epoch committed"]
    assert [fields["epoch"] for fields in committed] == [1, 2]
    assert sum(fields["rows"] for fields in committed) == 15
    assert sum(sum(fields["quarantined"].values()) for fields in committed) == 2
    [failed] = [line for line in lines if line["message"] == "file failed"]
    assert failed["level"] == "warning"
    assert failed["fields"]["file"].endswith("/in/b1.json.gz")
    assert (lines[-1]["level"], lines[-1]["fields"]["code"], lines[-1]["fields"]["exit_code"]) == (
        "error", "files-set-aside", 7,
    )  # fmt: skip
    assert shown.out.startswith("done after epoch 2: ")  # the result stays what it is


def test_failures_of_other_commands_and_of_usage_are_one_line(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", "nowhere.yml", "--log-format=json"]) == 2
    [line] = parse(capsys.readouterr().err)
    assert (line["message"], line["fields"]["code"]) == ("nowhere.yml: no such file", "spec")
    assert run_command(["status", "--log-format", "json", "--foo"]) == 2
    [line] = parse(capsys.readouterr().err)
    assert (line["level"], line["fields"]["code"]) == ("error", "usage")
    assert run_command(["status", "nowhere.yml", "--log-format", "json", "--debug"]) == 2
    [line] = parse(capsys.readouterr().err)
    assert "Traceback (most recent call last)" in line["fields"]["traceback"]
    record = logging.makeLogRecord({"name": "x", "levelname": "WARNING", "msg": "copy passed over", "reason": "old"})
    with logs.using_format("json"):
        FactsHandler().handle(record)  # as `run_command` installs it
    [line] = parse(capsys.readouterr().err)
    assert (line["level"], line["message"], line["fields"]["reason"]) == ("warning", "copy passed over", "old")


def test_a_format_lasts_for_one_command(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", "nowhere.yml", "--log-format", "json"]) == 2
    assert run_command(["status", "nowhere.yml"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "Error: nowhere.yml: no such file"


def test_progress_is_lines_even_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with logs.using_format("json"):
        task = LongTask()
        task.progress("copied", 1, 2)
        task.clear()
    assert [line["message"] for line in parse(capsys.readouterr().err)] == ["copied: 1 of 2"]


def test_a_record_keeps_its_facts_and_its_traceback_whatever_they_hold() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "ERROR", "msg": "it\nfailed", "path": Path("/a"), "n": 3})
    try:
        raise ValueError("\udc80 ü")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = logs.record_line(record)
    assert text.isascii()
    [line] = parse(text)
    assert (line["message"], line["fields"]["path"], line["fields"]["n"]) == ("it\nfailed", "/a", 3)
    assert "ValueError" in line["fields"]["traceback"]
