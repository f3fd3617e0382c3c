"""CSV and JSON files: the same records as Python's own readers find, wherever reading stops and continues."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.ndjson import BrokenFileError
from firnline.sources.columns import Columns
from firnline.sources.files.formats import scanning
from firnline.sources.files.formats.base import Place
from firnline.sources.files.formats.recognise import find_record, guess_format
from tests.support.formats import read_bytes

JSON = {"format": "json"}
CSV = {"format": "csv"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks in every file, so that records lie across their borders."""
    monkeypatch.setattr(scanning, "BLOCK_BYTES", 64)


def in_parts(data: bytes, read_as: dict[str, Any], size: int, path: str = "f") -> list[dict[str, Any]]:
    """Read a file `size` records at a time, each time from the place where the last reading ended."""
    place, rows = Place(max_records=size), []
    while True:
        read = read_bytes(data, read_as, place, path=path)
        rows += read.rows
        assert not read.bad
        if read.finished:
            return rows
        place = replace(read.place, max_records=size)


# -- JSON ---------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=12)
objects = st.lists(st.fixed_dictionaries({"k": texts, "n": st.integers(-5, 5)}), max_size=12)
layouts = st.sampled_from([None, 1, "\t"])


@settings(max_examples=60, deadline=None)
@given(objects, layouts, st.booleans(), st.sampled_from(["", " ", "\n", "\r\n"]), st.integers(1, 5))
def test_json_is_read_as_python_reads_it(
    records: list[dict[str, Any]], indent: Any, is_array: bool, between: str, size: int
) -> None:
    if is_array:
        text = json.dumps(records, indent=indent, ensure_ascii=False)
    else:
        text = between.join(json.dumps(record, indent=indent) for record in records)
    assert read_bytes(text.encode(), JSON).rows == records
    assert in_parts(text.encode(), JSON, size) == records
    assert in_parts(gzip.compress(text.encode()), JSON, size, "f.json.gz") == records


def test_bad_values_of_a_json_file_keep_their_lines_and_bytes() -> None:
    data = b'[\n {"a": 1,\n  "b": 2},\n 5, , {"a": 2} {},\n {"a": "x\ny"},\n  {"a": 3}\n]\n'
    read = read_bytes(data, JSON)
    assert [row["a"] for row in read.rows] == [1, 3]
    assert read.numbers == [0, 5]
    assert read.bad == [
        (1, 4, "not-an-object", b"5"),
        (2, 4, "not-json", b","),
        (3, 4, "not-json", b'{"a": 2} {}'),
        (4, 5, "not-json", b'{"a": "x\ny"}'),
    ]


def test_text_between_json_objects_is_a_bad_record() -> None:
    read = read_bytes(b'{"a": 1}, {"a": 2}\nfoo [1]\n{"a": 3} bar', JSON)
    assert [row["a"] for row in read.rows] == [1, 2, 3]
    assert [(line, raw) for _, line, _, raw in read.bad] == [(1, b","), (2, b"foo [1]"), (3, b"bar")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'[{"a": 1},\n {"a"', "the JSON array ends in the middle, at line 2"),
        (b'[{"a": 1}', "the JSON array ends in the middle, at line 1"),
        (b'{"a": 1}\n{"a": [2}', "the JSON object that starts at line 2 has no end"),
        (b'[{"a": 1}]\n[{"a": 2}]', "has more after the end of its array, at line 2"),
    ],
)
def test_a_json_file_that_is_cut_is_broken(data: bytes, reason: str) -> None:
    with pytest.raises(BrokenFileError) as caught:
        read_bytes(data, JSON)
    assert caught.value.reason == reason


def test_every_cut_of_a_json_array_is_found() -> None:
    whole = json.dumps([{"a": "x]}"}, {"a": [1, {}]}, {}], indent=1).encode()
    for size in range(1, len(whole)):
        with pytest.raises(BrokenFileError):
            read_bytes(whole[:size], JSON)
    assert len(read_bytes(whole, JSON).rows) == 3


def test_every_cut_between_json_objects_gives_whole_objects_or_is_found() -> None:
    records = [{"a": "x}"}, {"a": "{"}, {"a": "y"}]
    whole = b"".join(json.dumps(record, indent=1).encode() + b"\n" for record in records)
    exact = 0
    for size in range(len(whole)):
        try:
            read = read_bytes(whole[:size], JSON)
        except BrokenFileError:
            continue
        assert read.rows == records[: len(read.rows)]
        assert not read.bad
        exact += 1
    assert exact < 12, "most cuts lie inside an object"


@pytest.mark.parametrize("form", ["array", "sequence"])
def test_a_json_value_that_is_too_long_is_one_bad_record(form: str) -> None:
    long = json.dumps({"a": ["}]", {"b": "y" * 1000}]}, indent=1)
    parts = ['{"a": 1}', long, '{"a": 2}']
    text = f"[{','.join(parts)}]" if form == "array" else "\n".join(parts)
    read = read_bytes(text.encode(), JSON, Place(max_record_bytes=100))
    assert [row["a"] for row in read.rows] == [1, 2]
    assert read.numbers == [0, 2]
    assert [(record, reason) for record, _, reason, _ in read.bad] == [(1, "too-long")]


# -- CSV ----------------------------------------------------------------------------------------------

fields = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)
words = st.sampled_from(["007", "+1", "x", "1,5", 'a "b"', "line\nbreak", "crlf\r\nbreak", " 5", "1.", ".5", "TRUE"])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(words | fields, words | fields), max_size=12),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.integers(1, 4),
)
def test_csv_is_read_as_python_reads_it(
    rows: list[tuple[str, str]], delimiter: str, line_end: str, all_quoted: bool, size: int
) -> None:
    text = io.StringIO(newline="")
    quoting: Literal[0, 1] = csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL
    csv.writer(text, delimiter=delimiter, lineterminator=line_end, quoting=quoting).writerows([("a", "b"), *rows])
    data = text.getvalue().encode()
    read_as = {"format": "csv", "delimiter": delimiter}
    first = read_bytes(data, read_as)
    # As a task does, read again with the types of the last block: those of earlier blocks may be narrower.
    read = read_bytes(data, read_as, columns=Columns(first.schema, frozenset(), {}))
    assert not read.bad
    # New columns of mixed kinds are JSON text until the kinds are counted.
    assert len(read.rows) == len(rows)
    for row, texts in zip(read.rows, rows, strict=True):
        for name, written in zip("ab", texts, strict=True):
            value = row.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):  # a number has many spellings: 0E0
                assert value == json.loads(written)
            else:
                assert as_text(read, name, row) == written
    parts = in_parts(data, read_as, size)
    assert len(parts) == len(rows)


def as_text(read: Any, name: str, row: dict[str, Any]) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value)
    is_json = (read.schema.field(name).metadata or {}).get(b"firnline.type") == b"json"
    found = json.loads(value, parse_int=str, parse_float=str) if is_json else value
    return found if isinstance(found, str) else json.dumps(found)


@pytest.mark.parametrize("after", [0, 3])
def test_a_long_csv_record_is_judged_by_its_own_length(after: int) -> None:
    """However much is read behind it: where reading starts decides that, and a replay starts elsewhere."""
    size, limit = 3 * scanning.BLOCK_BYTES // 8, scanning.BLOCK_BYTES // 2
    data = b"id,v\n1,%s\n" % (b"x" * size) + b"2,%s\n" % (b"y" * (limit // 2)) * after
    read = read_bytes(data, CSV, Place(max_record_bytes=limit))
    assert not read.bad
    assert len(read.rows) == 1 + after
    assert read_bytes(data, CSV, Place(max_record_bytes=size // 2)).bad[0][2] == "too-long"


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_csv_with_another_delimiter_is_named(delimiter: str) -> None:
    data = "\n".join(delimiter.join(row) for row in [("id", "name"), ("1", "a, b"), ("2", "c")]).encode()
    with pytest.raises(BrokenFileError, match=re.escape(f"set csv: {{delimiter: {json.dumps(delimiter)}}}")):
        read_bytes(data, CSV)
    assert len(read_bytes(data, {**CSV, "delimiter": delimiter}).rows) == 2
    assert read_bytes(b"note\na;b\nc\n", CSV).rows == [{"note": "a;b"}, {"note": "c"}]


def test_csv_fields_become_the_kinds_that_json_has() -> None:
    data = b"i,f,b,t,z,n\n1,1.50,true,x,007,\n-2,2e3,false,y,042,\n"
    read = read_bytes(data, CSV)
    assert read.rows == [
        {"i": 1, "f": 1.5, "b": True, "t": "x", "z": "007"},
        {"i": -2, "f": 2000.0, "b": False, "t": "y", "z": "042"},
    ]


def test_csv_of_windows_with_a_mark_and_blank_lines() -> None:
    read = read_bytes(b'\xef\xbb\xbfid,t\r\n\r\n1,"a\r\nb"\r\n\r\n2,c', CSV)
    assert read.rows == [{"id": 1, "t": "a\r\nb"}, {"id": 2, "t": "c"}]
    assert read.place.line == 5


def test_a_csv_record_with_another_number_of_fields_is_bad() -> None:
    read = read_bytes(b'a,b\n1,2\n3\n4,5,6\n7,"8"x\n9,10\n', CSV)
    assert read.rows == [{"a": 1, "b": 2}, {"a": 9, "b": 10}]
    assert read.numbers == [0, 4]
    assert read.bad == [
        (1, 3, "wrong-field-count", b"3"),
        (2, 4, "wrong-field-count", b"4,5,6"),
        (3, 5, "stray-quote", b'7,"8"x'),
    ]


def test_csv_text_that_is_not_utf8_is_a_bad_record_unless_its_encoding_is_set() -> None:
    data = "a,b\n1,Käse\n2,x\n".encode("latin-1")
    assert read_bytes(data, CSV).bad == [(0, 2, "invalid-utf8", "1,Käse".encode("latin-1"))]
    assert read_bytes(data, {**CSV, "encoding": "latin-1"}).rows[0] == {"a": 1, "b": "Käse"}
    wide = "a,b\n1,Käse\n2,x\n".encode("utf-16")
    assert in_parts(wide, {**CSV, "encoding": "utf-16"}, 1) == [{"a": 1, "b": "Käse"}, {"a": 2, "b": "x"}]


def test_csv_null_values_are_null_quoted_or_not() -> None:
    data = b'a,b\nNA,\n"NA",""\nx,y\n'
    assert read_bytes(data, {**CSV, "null_values": ["NA"]}).rows == [
        {"a": None, "b": ""}, {"a": None, "b": ""}, {"a": "x", "b": "y"},
    ]  # fmt: skip
    assert [row["b"] for row in read_bytes(data, CSV).rows] == [None, None, "y"]


def test_declared_csv_columns_take_numbers_and_booleans_as_people_write_them() -> None:
    data = b"n,b,t\n007,True,007\n+1.50,FALSE,x\n 5 ,true,y\n1-2,1,z\n"
    schema = pa.schema([("n", pa.float64()), ("b", pa.bool_()), ("t", pa.string())])
    columns = Columns(schema, frozenset(schema.names), {})
    read = read_bytes(data, {**CSV, "numbers": ["n"], "booleans": ["b"]}, columns=columns)
    assert [row["n"] for row in read.rows] == [7, 1.5, 5, None]
    assert [row["b"] for row in read.rows] == [True, False, True, None]
    assert [row["t"] for row in read.rows] == ["007", "x", "y", "z"]
    assert read.rows[-1]["_rescued_data"] == '{"n":"1-2","b":1}'


def test_csv_without_a_header_takes_declared_names_and_then_numbers() -> None:
    read_as = {**CSV, "header": False, "names": ["id"]}
    assert read_bytes(b"1,x,y\n2,z,\n", read_as).rows == [
        {"id": 1, "column1": "x", "column2": "y"},
        {"id": 2, "column1": "z", "column2": None},
    ]
    assert len(in_parts(b"1,x,y\n2,z,\n3,a,b", read_as, 1)) == 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"a,,c\n1,2,3\n", "its header has no name for column 2 of 3"),
        (b"a,b,a\n1,2,3\n", 'its header has the name "a" twice'),
        (b'a,"b\n1,2\n', "its first line is no CSV: unexpected end of data"),
        (b'a,b\n1,2\n3,"4\n5,6\n', "ends inside a quoted field of the record that starts at line 3"),
    ],
)
def test_a_broken_csv_file_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(BrokenFileError) as caught:
        read_bytes(data, CSV)
    assert caught.value.reason == reason


def test_every_cut_of_a_csv_file_gives_its_first_records_or_is_found() -> None:
    """A cut inside the last line cannot be told from a last line without a line break: only whole lines are sure."""
    rows = [{"a": "x,\ny", "b": "z1"}, {"a": 'q"', "b": "z2"}, {"a": "c", "b": "z3"}]
    lines = [b"a,b\n", b'"x,\ny",z1\n', b'"q""",z2\n', b"c,z3\n"]
    whole = b"".join(lines)
    ends = {len(b"".join(lines[: count + 1])): count for count in range(len(lines))}
    for size in range(len(whole) + 1):
        complete = max((count for end, count in ends.items() if end <= size), default=0)
        try:
            read = read_bytes(whole[:size], CSV)
        except BrokenFileError:
            continue
        assert read.rows[:complete] == rows[:complete]
        assert len(read.rows) + len(read.bad) <= complete + 1


@pytest.mark.parametrize("quoted", [True, False])
def test_a_csv_record_that_is_too_long_is_one_bad_record(quoted: bool) -> None:
    long = '"' + "y,\n" * 300 + '"' if quoted else "y" * 900
    read = read_bytes(f"a,b\n1,x\n2,{long}\n3,z\n".encode(), CSV, Place(max_record_bytes=100))
    assert read.rows == [{"a": 1, "b": "x"}, {"a": 3, "b": "z"}]
    assert read.numbers == [0, 2]
    assert [(record, line, reason) for record, line, reason, _ in read.bad] == [(1, 3, "too-long")]


# -- another format than the spec says --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "read_as", "words"),
    [
        (b"PAR1\0\0", {}, "is a Parquet file, and the source reads ndjson: set format: parquet"),
        (b"PAR1\0\0", CSV, "is a Parquet file, and the source reads csv: set format: parquet"),
        (b'[\n{"a": 1}]', {}, "holds a JSON array, and the source reads ndjson: set format: json"),
        (b'[{"a": 1}]', CSV, "holds a JSON array, and the source reads csv: set format: json"),
        (b"id,name\n1,x\n2,y\n", {}, "looks like CSV, and the source reads ndjson: set format: csv"),
        (b"i;n\n1;x\n", JSON, 'looks like CSV, and the source reads json: set format: csv and csv: {delimiter: ";"}'),
        (b'{"a": 1}\n{"a": 2}\n', CSV, "holds newline-delimited JSON, and the source reads csv: set format: ndjson"),
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_recognised(data: bytes, read_as: dict[str, Any], words: str) -> None:
    for content, path in ((data, "f"), (gzip.compress(data), "f.gz")):
        with pytest.raises(BrokenFileError) as caught:
            read_bytes(content, read_as, path=path)
        assert caught.value.reason == words


@pytest.mark.parametrize("data", [b"[1, 2]\n{}\n", b"oops, what\n{}\n", b"1,2\n{}\n", b'"a,b"\n"c,d"\n', b"null\n"])
def test_a_bad_first_line_makes_no_other_format(data: bytes) -> None:
    assert read_bytes(data, {}).bad


def test_json_lines_are_read_as_json_too() -> None:
    assert read_bytes(b'{"a": 1}\n{"a": 2}\n', JSON).rows == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.parquet", b"PAR1", ("parquet", ",")),
        ("a.json", b'[\n {"a": 1}\n]', ("json", ",")),
        ("a.json", b'{\n "a": 1\n}', ("json", ",")),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0), ("ndjson", ",")),
        ("a.csv", b"a;b\n1;2\n", ("csv", ";")),
        ("a.tsv", b"a\tb\n", ("csv", "\t")),
        ("a.csv", b"a\n", ("csv", ",")),
        ("_a.csv", b"a,b\n1,2\n", None),
        ("a.txt", b"hello\n", None),
    ],
)
def test_the_format_is_guessed_from_what_lies_in_a_folder(
    tmp_path: Path, name: str, data: bytes, expected: tuple[str, str] | None
) -> None:
    (tmp_path / name).write_bytes(data)
    assert guess_format(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,Ann,paris\n2,Bob,rome\n", "1"),
        ("Ann,12.5\nBob,7\n", "12.5"),
        ("Ann,-3\nBob,4\n", "-3"),
        ("Ann,true\nBob,FALSE\n", "true"),
        ("Ann,2024-01-31T10:00:00Z\nBob,2024-02-01\n", "2024-01-31T10:00:00Z"),
        ("Ann,1,x\nBob,,y\nCid,3,z", "1"),
        ("id,name\n1,Ann\n", None),
        ("country,2019,2020\nItaly,1,2\n", None),  # years as columns
        ("country,code,2019,2020\nItaly,IT,1,2\n", None),
        (",0,1,2\na,1,2,3\n", None),  # as pandas numbers columns
        ("0,1\n5,6\n", None),
        ("Province,1/22/20,1/23/20\nHubei,444,500\n", None),  # a value is of another kind than its label
        ("Ann,12.5\nBob,none\n", None),
        ("Ann,1\n", None),  # one line
        ("", None),
        ('"a,1",b\n"x\ny",2\n', None),
    ],
)
def test_a_first_line_that_is_a_record_is_found(text: str, value: str | None) -> None:
    assert find_record(text.encode(), ",", '"') == value
