"""Tables fit the screen: no line is wider than it, and what is cut has an ellipsis."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.cli.checkpoints import _change_lines
from firnline.cli.main import run_command
from firnline.cli.output import Output
from firnline.cli.table import Column, lay_out
from firnline.cli.text import text_width
from firnline.spec.build import load_options
from tests.support.keyed import KeyedInput
from tests.support.pipelines import run_once, run_to_end

MOMENT = "2026-11-17T05:58:01.275000+00:00"
VARIES = re.compile(r"\d\d-\d\d \d\d:\d\d(:\d\d)?Z|\d+(\.\d)? s\b( ago)?|just now")  # short times, and ages

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Mn", "Zs", "Zl", "Zp"]), max_size=90)
COLUMNS = st.lists(
    st.builds(
        Column,
        field=st.sampled_from("abcdefghij"),
        title=st.sampled_from(["", "a heading", "size"]),
        right=st.booleans(),
        drop=st.integers(0, 3),
        cut=st.sampled_from(["", "left", "right"]),
    ),
    min_size=1,
    max_size=10,
)
ROWS = st.lists(st.dictionaries(st.sampled_from("abcdefghij"), TEXTS | st.integers() | st.none()), max_size=5)


@given(COLUMNS, ROWS, st.sampled_from([60, 80, 120]))
def test_no_line_of_a_table_is_wider_than_the_screen(
    columns: list[Column], rows: list[dict[str, Any]], width: int
) -> None:
    layout = lay_out(columns, rows, width)
    assert len(layout.lines) == len(rows) + 1
    assert max(map(text_width, layout.lines)) <= width


@given(COLUMNS, ROWS)
def test_a_table_that_fits_is_not_changed(columns: list[Column], rows: list[dict[str, Any]]) -> None:
    whole = lay_out(columns, rows, None)
    needed = max(map(text_width, whole.lines))
    assert not whole.left_out
    assert lay_out(columns, rows, needed + 1).lines == whole.lines


def test_short_times_come_first_then_columns_go_then_texts_are_cut() -> None:
    columns = [
        Column("path", cut="left"),
        Column("at", time=True),
        Column("bytes", right=True, drop=2),
        Column("rows", right=True, drop=1),
    ]
    rows = [{"path": "/data/in/2026/11/17/flights-0001.json.gz", "at": MOMENT, "bytes": 1234567, "rows": 10}]

    def shown(width: int) -> str:
        return lay_out(columns, rows, width).lines[1]

    path = str(rows[0]["path"])
    assert shown(80) == f"{path}  2026-11-17T05:58:01Z  1,234,567    10"
    assert shown(75) == f"{path}  11-17 05:58:01Z  1,234,567    10"
    assert shown(60) == f"…{path[-28:]}  11-17 05:58Z  1,234,567    10"
    assert lay_out(columns, rows, 50).left_out == ["bytes"]
    assert lay_out(columns, rows, 40).left_out == ["bytes", "rows"]
    assert shown(40) == f"…{path[-25:]}  11-17 05:58Z"


def test_a_column_without_values_goes_first() -> None:
    columns = [Column("a", cut="right"), Column("b", drop=1), Column("c", drop=9)]
    assert lay_out(columns, [{"a": "x" * 40, "b": None, "c": "y" * 40}], 67).left_out == ["b"]


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = io.StringIO()
    Output(stream=stream).table(
        [Column("path", cut="left"), Column("rows", drop=1)], [{"path": "p" * 40, "rows": 1234567}]
    )
    assert stream.getvalue().splitlines() == ["path", f"…{'p' * 29}", "not shown, too wide: rows"]


def test_long_facts_go_on_below_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    Output(stream=stream).facts({"a": 1, "reason": "some words that are too many for a line of forty"})
    assert stream.getvalue().splitlines() == [
        "a       1",
        "reason  some words that are too many for",
        "        a line of forty",
    ]


STATEFUL = """\
name: demo
sources:
  files:
    path: in
    schema: {fields: [{name: k, type: string}, {name: v, type: int64}, {name: at, type: timestamp}]}
operators:
  - name: totals
    type: aggregate
    inputs: [files]
    keys: [k]
    aggregates:
      - {name: number_of_records_of_this_key, function: count}
      - {name: total_over_all_records_of_this_key, function: sum, column: v}
      - {name: largest, function: max, column: v}
sinks:
  - {type: delta, name: delta, table: out, input: totals, write: upsert}
state: {shards: 2}
"""

COMMANDS = (
    ["checkpoints"], ["checkpoints", "show", "1"], ["files"], ["quarantine"], ["status"], ["savepoint", "list"],
    ["dry-run"], ["checkpoints", "--audit"], ["rollback", "--to", "1", "--dry-run"],
)  # fmt: skip


def check_fits(
    tokens: list[str], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is wider than the screen; every cell of a table is whole, or cut with an ellipsis."""
    capsys.readouterr()
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run_command(tokens) == 0
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(width))
    assert run_command(tokens) == 0
    fitted = capsys.readouterr().out
    assert max(map(text_width, fitted.splitlines())) <= width, (tokens, fitted)
    words = {word for line in whole.splitlines() for word in line.split()}
    for line in fitted.splitlines():
        if line.startswith("not shown, too wide: ") or "+---" in line:  # an edge of a box
            continue
        parts = [word for word in VARIES.sub("", line).split() if word not in words and "…" not in word]
        # A fact that goes on in the next line may be broken inside a path; it has one or two cells.
        assert all(any(part in word for word in words) for part in parts), (tokens, line)
        assert not (parts and len(re.split(r"\s{2,}", line.strip())) > 2), (tokens, line)


@pytest.mark.parametrize("width", [80, 60])
def test_every_command_fits_the_screen(
    width: int, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["savepoint", "create"]) == 0
    for tokens in COMMANDS:
        check_fits(tokens, width, capsys, monkeypatch)


@pytest.mark.parametrize("width", [80, 60])
def test_staged_units_fit_the_screen(
    width: int, spec: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec.write_text(spec.read_text().replace("table: out}", "table: out, mode: staged}"))
    assert run_once(load_options(spec, environ={})).exit_code == 0
    check_fits(["staging", "firnline.yml"], width, capsys, monkeypatch)


@pytest.mark.parametrize("width", [80, 60])
def test_state_fits_the_screen(
    width: int, tmp_path: Path, keyed: KeyedInput, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "firnline.yml").write_text(STATEFUL)
    monkeypatch.chdir(tmp_path)
    keyed.add()
    run_to_end(load_options(tmp_path / "firnline.yml", environ={}))
    for tokens in (["state", "totals"], ["dry-run"], ["status"]):
        check_fits(tokens, width, capsys, monkeypatch)


def test_a_wrong_reason_is_answered_with_those_that_exist(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quarantine", "--reason", "not-jsn"]) == 0
    assert capsys.readouterr().out == "no record is quarantined as not-jsn; the reasons are: not-json (2)\n"


def test_changed_facts_of_a_position_are_words() -> None:
    before = {"shop": {"offset": 3, "open": True}, "tables": ["a"]}
    after = {"shop": {"offset": 5, "open": True}, "tables": ["a", "b"]}
    assert list(_change_lines("position", before, after)) == [
        "position shop offset: 3 -> 5",
        "position tables: a -> a, b",
    ]
    assert list(_change_lines("position", None, {"lsn": 7})) == ["position lsn: none -> 7"]
    assert not any(bracket in json.dumps(list(_change_lines("p", before, {"x": [{"y": 1}]})))[1:-1] for bracket in "{[")
