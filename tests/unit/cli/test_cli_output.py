"""What people see: formats, escapes, and failures in two lines."""

from __future__ import annotations

import io
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from firnline.cli.output import Output, brief, count_text, print_failure, safe_bytes, size_text, time_text
from firnline.cli.table import Column
from firnline.cli.text import safe
from firnline.clock import ago_text
from firnline.errors import FencedError, SinkError, SpecError


def test_failure_is_two_lines() -> None:
    stream = io.StringIO()
    print_failure(FencedError("generation 4 took over from 3"), debug=False, stream=stream)
    assert stream.getvalue() == (
        "Error: generation 4 took over from 3\n"
        "Try: Another run of this pipeline took over; see `firnline status`.\n"
    )  # fmt: skip


def test_every_problem_of_a_spec_is_told_before_the_hint() -> None:
    stream = io.StringIO()
    print_failure(SpecError("a.yml:1: x\na.yml:2: y", hint="Correct it."), debug=False, stream=stream)
    assert stream.getvalue() == "Error: a.yml:1: x\n       a.yml:2: y\nTry: Correct it.\n"


def test_a_bug_is_told_in_the_same_two_lines() -> None:
    stream = io.StringIO()
    print_failure(KeyError("x"), debug=False, stream=stream)
    assert stream.getvalue().startswith("Error: KeyError: 'x'\nTry: This is a bug in Firnline.")


def test_debug_shows_the_traceback_first() -> None:
    stream = io.StringIO()
    try:
        raise FencedError("taken over")
    except FencedError as error:
        print_failure(error, debug=True, stream=stream)
    assert stream.getvalue().startswith("Traceback (most recent call last):")
    assert stream.getvalue().splitlines()[-2] == "Error: taken over"


@pytest.mark.parametrize(
    ("tokens", "error", "hint"),
    [
        (["stats"], 'Error: Unknown command "stats". Did you mean "status"?', "Try: firnline --help"),
        (["status", "--foo"], "Error: Unknown option: --foo.", "Try: firnline status --help"),
        (
            ["checkpoints", "--limit", "x"],
            'Error: Invalid value for --limit: unable to convert "x" into int.',
            "Try: firnline checkpoints --help",
        ),
        (
            ["run", "--source-moved", "a"],
            "Error: --source-moved a: not OLD=NEW",
            "Try: firnline run --source-moved /old/in=/new/in",
        ),
        (["files", "--changed"], "Error: --changed belongs to --retry", "Try: firnline files --retry PATH --changed"),
        (
            ["status", "nowhere.yml"],
            "Error: nowhere.yml: no such file",
            "Try: `firnline init` writes one; or name the file.",
        ),
    ],
)  # fmt: skip
def test_wrong_usage_exits_2_with_two_lines(
    spec: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], error: str, hint: str
) -> None:
    assert run_command(tokens) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [error, hint]
    assert shown.out == ""


def test_a_wrong_key_is_told_with_file_and_line(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(spec.read_text().replace("table:", "tabel:"))
    assert run_command(["status"]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == 'Error: firnline.yml:5: sinks[0].tabel: unknown key (did you mean "table"?)'
    assert last == "Try: Write `table` instead of `tabel`."


def test_control_characters_are_escaped_and_other_text_is_kept() -> None:
    assert safe("Zürich 東京") == "Zürich 東京"
    assert safe("a\x1b[31mred\r\n\x07") == r"a\x1b[31mred\r\n\x07"
    assert safe("\udc80") == r"\udc80"


def test_raw_bytes_become_one_short_printable_line() -> None:
    assert safe_bytes(b'{"a": \xff\x00}\n', 80) == r'{"a": \xff\x00}\n'
    assert safe_bytes(b"x" * 100, 10) == "x" * 9 + "…"


def test_tables_in_a_pipe_are_aligned_and_whole() -> None:
    stream = io.StringIO()
    rows = [{"path": "a\x1b", "rows": 1234, "x": None}, {"path": "b" * 90, "rows": 5, "x": True}]
    Output(stream=stream).table([Column("path"), Column("rows", right=True), Column("x", "flag")], rows)
    head, first, second = stream.getvalue().splitlines()
    assert head.split() == ["path", "rows", "flag"]
    assert first.split() == [r"a\x1b", "1,234", "-"]
    assert second == "b" * 90 + "      5  yes"


S3_ERROR = """\
cannot read s3://lake/t: Generic S3 error: Error performing GET http://127.0.0.1:1/lake in 1.2s, after 2 retries

Debug source:
Generic {
    store: "S3",
    source: HttpError {
        kind: Connect,
    },
}"""


@pytest.mark.parametrize("after", ["", "; and more"])
def test_the_structures_behind_a_storage_error_are_not_shown(after: str) -> None:
    stream = io.StringIO()
    print_failure(SinkError(S3_ERROR + after, hint="Look."), debug=False, stream=stream)
    assert stream.getvalue() == f"Error: {S3_ERROR.splitlines()[0]}{after}\nTry: Look.\n"


def test_of_structures_that_have_another_shape_nothing_is_shown_either() -> None:
    assert brief("it failed\n\nDebug source:\nNotFound { path: 1 }\n more\nand more") == "it failed"
    assert brief("two\nlines") == "two\nlines"


def test_a_tree_of_causes_becomes_one_line() -> None:
    told = "Kernel error -> Generic S3 error\n   \x1b[31m↳\x1b[0m HTTP error \n    \x1b[31m↳\x1b[0m refused"
    assert brief(told) == "Kernel error -> Generic S3 error: HTTP error: refused"


def test_warnings_of_any_command_show_their_facts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: list[str]) -> int:
        assert logging.lastResort is not None
        record = logging.makeLogRecord(
            {"msg": "copy passed over", "levelno": logging.WARNING, "levelname": "WARNING", "reason": "it is\nold"}
        )
        logging.lastResort.handle(record)
        return 0

    before = logging.lastResort
    monkeypatch.setattr("firnline.cli.main.app", fail)
    assert run_command([]) == 0
    assert capsys.readouterr().err == "warning: copy passed over  reason=it is\\nold\n"
    assert logging.lastResort is before


def test_numbers_as_people_say_them() -> None:
    assert [size_text(n) for n in (0, 999, 1500, 2_000_000, 3.2e9, 5e12)] == [
        "0 B", "999 B", "1.5 KB", "2.0 MB", "3.2 GB", "5.0 TB",
    ]  # fmt: skip
    assert [time_text(s) for s in (0.26, 59.9, 65, 7269)] == ["0.3 s", "59.9 s", "1:05", "2:01:09"]
    assert [count_text(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    now = datetime(2026, 11, 17, 12, 0, 0, tzinfo=UTC)
    moments = {
        "2026-11-17T12:00:00+00:00": "just now",
        "2026-11-17T12:00:07+00:00": "just now",  # the clock of another machine
        "2026-11-17T11:59:18.5+00:00": "41 s ago",
        "2026-11-17T12:47:59+01:00": "12 min ago",
        "2026-11-16T13:00:00+00:00": "23 h ago",
        "2026-11-15T11:00:00+00:00": "2 days ago",
    }
    assert {moment: ago_text(moment, now) for moment in moments} == moments
