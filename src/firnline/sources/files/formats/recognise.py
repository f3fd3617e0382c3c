"""Recognises files that have another format than the spec says, by their first bytes."""

from __future__ import annotations

import csv
import json
from typing import Any

from firnline.ndjson import BrokenFileError

PARQUET_MAGIC = b"PAR1"
_DELIMITERS = (",", ";", "\t", "|")
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


def recognise(head: bytes) -> tuple[str, str] | None:
    """Return the format that the first bytes of a file plainly have, and other keys to set; None if in doubt."""
    if head.startswith(PARQUET_MAGIC):
        return "parquet", ""
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").lstrip()
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
