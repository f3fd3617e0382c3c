"""Recognises files that have another format than the spec says, by their first bytes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from firnline.ndjson import BrokenFileError, CountingStream, compression_of, open_pieces

PARQUET_MAGIC = b"PAR1"
_DELIMITERS = (",", ";", "\t", "|")
_SUFFIXES = (".csv", ".tsv")
MOST_FILES = 20  # that a guess looks into
MOST_LISTED = 1000
HEAD_BYTES = 4096
HEADER_LINES = 20  # that are compared with the first one
_WORDS = {
    "parquet": "is a Parquet file",
    "json": "holds a JSON array",
    "ndjson": "holds newline-delimited JSON",
    "csv": "looks like CSV",
}


def check_head(head: bytes, path: str, expected: str) -> None:
    """Compare the first bytes of a file with its format.

    Raises:
        BrokenFileError: they plainly have another format; the reason names the key to set.
    """
    found = recognise(head)
    if found is None:
        return
    name, more = found
    if name == expected or (name, expected) == ("ndjson", "json"):
        return
    raise BrokenFileError(path, f"{_WORDS[name]}, and the source reads {expected}: set format: {name}{more}")


def check_delimiter(head: bytes, path: str, delimiter: str) -> None:
    """Look at the first lines of a CSV file of one column.

    Raises:
        BrokenFileError: another delimiter plainly gives more columns; the reason names the key to set.
    """
    lines = [line for line in _decode(head).splitlines() if line.strip()]
    for other in _DELIMITERS:
        if other != delimiter and _is_csv(lines, other):
            key = f"csv: {{delimiter: {json.dumps(other)}}}"
            raise BrokenFileError(path, f"has one column, and several with another delimiter: set {key}")


_KINDS = {
    "number": re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"),
    "boolean": re.compile(r"true|false", re.IGNORECASE),
    "time": re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?|\d{1,2}[./]\d{1,2}[./](\d\d|\d{4})"),
}
_LABEL = re.compile(r"\d+")  # 1, 2, 3 or 2019, 2020 may be names of columns
_YEARS = range(1900, 2101)


def _kind(text: str) -> str | None:
    return next((kind for kind, form in _KINDS.items() if form.fullmatch(text.strip())), None)


def find_data(names: Sequence[str]) -> str | None:
    """Return the first name that looks like a value: a number, a time, a boolean; None if no one does."""
    return next((name for name in names if _kind(name)), None)


def no_header(name: str) -> str:
    """Return the reason to set a file aside whose first line has this value instead of a name."""
    return (
        f'its first line looks like a record, not like a header ("{name}"): add a line with the names, or set '
        "csv: {header: false}; if these are the names, set csv: {check_header: false}"
    )


def find_record(head: bytes, delimiter: str, quote: str) -> str | None:
    """Return a field of a CSV file's first line that plainly is a value, as in the lines after it; None: it has names.

    `head` has the first bytes of the file; its last line may be cut off.
    """
    lines = head.decode("utf-8", "replace").splitlines(keepends=True)[: HEADER_LINES + 1]
    quoting: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    try:
        first, *records = list(csv.reader(lines, delimiter=delimiter, **quoting))
    except (csv.Error, ValueError):
        return None
    has_labels = all(_LABEL.fullmatch(name.strip()) for name in first[1:])
    for number, name in enumerate(first):
        kind = _kind(name)
        if kind is None or (_LABEL.fullmatch(name.strip()) and (has_labels or int(name) in _YEARS)):
            continue
        below = [record[number] for record in records if len(record) == len(first) and record[number].strip()]
        if below and all(_kind(value) == kind for value in below):
            return name
    return None


def _decode(head: bytes) -> str:
    return head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").lstrip()


def recognise(head: bytes) -> tuple[str, str] | None:
    """Return the format that the first bytes of a file plainly have, and other keys to set; None if in doubt."""
    if head.startswith(PARQUET_MAGIC):
        return "parquet", ""
    text = _decode(head)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if text.startswith("{"):
        return ("ndjson", "") if isinstance(_parse(lines[0]), dict) else None
    if text.startswith("["):
        return None if _is_array_of_others(lines[0]) else ("json", "")
    if _parse(lines[0]) is not _NOT_JSON:
        return None
    for delimiter in _DELIMITERS:
        if _is_csv(lines, delimiter):
            return "csv", "" if delimiter == "," else f" and csv: {{delimiter: {json.dumps(delimiter)}}}"
    return None


def guess_format(folder: Path) -> tuple[str, str] | None:
    """Return the format of the files that lie in a folder, and the delimiter of CSV; None if nothing tells."""
    for path in sorted(islice(folder.rglob("*"), MOST_LISTED))[:MOST_FILES]:
        if path.is_file() and not path.name.startswith((".", "_")) and (found := _guess_file(path)) is not None:
            return found
    return None


def _guess_file(path: Path) -> tuple[str, str] | None:
    try:
        with path.open("rb") as stream:
            pieces = open_pieces(CountingStream(stream), str(path), compression_of(str(path)), HEAD_BYTES)
            head = next(pieces, b"")
    except (OSError, BrokenFileError):
        return None
    found = recognise(head)
    if found is not None and found[0] != "csv":
        return found[0], ","
    suffix = next((one for one in reversed(path.suffixes) if one in _SUFFIXES), "")
    if found is not None or suffix in (".csv", ".tsv"):
        first = head.decode("utf-8", "replace").partition("\n")[0]
        return "csv", max(_DELIMITERS, key=first.count) if any(map(first.count, _DELIMITERS)) else ","
    if head.lstrip().startswith(b"{"):
        return "json", ","  # an object over many lines
    return None


_NOT_JSON = object()


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _is_array_of_others(line: str) -> bool:
    """Return whether a line is an array that holds no object: no file of records starts like that."""
    value = _parse(line)
    return isinstance(value, list) and not any(isinstance(item, dict) for item in value)


def _is_csv(lines: list[str], delimiter: str) -> bool:
    """Return whether the first two lines are a header and a record with as many fields."""
    if len(lines) < 2 or any(line.lstrip().startswith(("{", "[")) for line in lines[:3]):
        return False
    try:
        header, record = list(csv.reader(lines[:2], delimiter=delimiter))[:2]
    except (csv.Error, ValueError):
        return False
    return 2 <= len(header) == len(record) and all(header) and len(set(header)) == len(header)
