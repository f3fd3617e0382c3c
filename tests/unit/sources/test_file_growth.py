"""What proves that a file has grown, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.sources.base import Split
from firnline.sources.files.growth import (
    MAX_PROOFS,
    TAIL_BYTES,
    Change,
    FileEnd,
    GrownFiles,
    Growth,
    ReadFile,
    describe_tail,
    find_growth,
    has_open_line,
    read_tail,
)
from firnline.sources.files.planning import advance, replay
from firnline.sources.files.position import FileState, Progress
from firnline.storage import FileStat, LocalStorage


def read_of(folder: Path, data: bytes) -> ReadFile:
    """A file as it was read to its end."""
    (folder / "a.json").write_bytes(data)
    tail = read_tail(LocalStorage(str(folder)), "a.json", len(data))
    end = FileEnd(len(data), data.count(b"\n"), describe_tail(tail), has_open_line(tail))
    return ReadFile("e1", len(data), 2, end)


def growth_of(folder: Path, read: ReadFile, data: bytes) -> Growth:
    (folder / "a.json").write_bytes(data)
    return find_growth(LocalStorage(str(folder)), "a.json", len(data), read)


BEFORE = b'{"a": 1}\n{"a": 2}\n'
LONG = b'{"a": 1}\n' * TAIL_BYTES


@pytest.mark.parametrize("before", [b"", BEFORE, LONG])
def test_what_was_read_is_still_there_and_more_follows(tmp_path: Path, before: bytes) -> None:
    read = read_of(tmp_path, before)
    assert growth_of(tmp_path, read, before + b"{") == Growth(Change.GROWN, len(before))
    assert growth_of(tmp_path, read, before) == Growth(Change.REPLACED)
    assert growth_of(tmp_path, read, before[:-1]) == Growth(Change.REPLACED)


@pytest.mark.parametrize("now", [b"x" + BEFORE, BEFORE.replace(b"2", b"3") + b"{}\n", b'{"b": 1}\n' * 9])
def test_anything_else_was_replaced(tmp_path: Path, now: bytes) -> None:
    assert growth_of(tmp_path, read_of(tmp_path, BEFORE), now).change is Change.REPLACED


def test_bytes_before_the_tail_are_not_proven(tmp_path: Path) -> None:
    """The limit of the proof, as documented."""
    read = read_of(tmp_path, LONG)
    assert growth_of(tmp_path, read, b'{"a": 7}\n' + LONG[9:] + b"{}\n").change is Change.GROWN


@pytest.mark.parametrize(
    ("added", "growth"),
    [
        (b"\n", Growth(Change.GROWN, 9)),
        (b" \r\n{", Growth(Change.GROWN, 11)),
        (b" " * 200_000 + b"\n{", Growth(Change.GROWN, 8 + 200_001)),
        (b"  ", Growth(Change.BLANK)),
        (b"}\n", Growth(Change.CONTINUED)),
        (b" " * 200_000 + b"}", Growth(Change.CONTINUED)),
    ],
)
def test_an_open_line_may_only_end(tmp_path: Path, added: bytes, growth: Growth) -> None:
    read = read_of(tmp_path, b'{"a": 1}')
    assert read.end is not None
    assert read.end.open_line
    assert growth_of(tmp_path, read, b'{"a": 1}' + added) == growth


@pytest.mark.parametrize(
    ("tail", "is_open"),
    [(b"", False), (b"{}\n", False), (b"{}", True), (b"{}\n  ", False), (b"{}\n{", True), (b" " * TAIL_BYTES, True)],
)
def test_open_lines(tail: bytes, is_open: bool) -> None:
    assert has_open_line(tail) is is_open


def test_a_file_of_which_no_end_is_known_grew_by_its_size_alone(tmp_path: Path) -> None:
    found = GrownFiles(lambda *_: pytest.fail("nothing to look into"))
    stat = FileStat("/in/a.gz", 10, "e2", None)  # type: ignore[arg-type]
    assert found.add(stat, ReadFile("e1", 9, 2, None))
    assert not found.add(stat, ReadFile("e1", 10, 2, None))
    assert not found.add(stat, ReadFile.from_text("e1", ""))
    assert (found.grown, found.rest) == (["/in/a.gz"], {})


def test_a_comparison_looks_into_a_bounded_number_of_files() -> None:
    looked = []

    def find(stat: FileStat, _: ReadFile) -> Growth:
        looked.append(stat.name)
        return Growth(Change.GROWN)

    found = GrownFiles(find)
    for number in range(MAX_PROOFS + 5):
        stat = FileStat(f"/in/{number}", 10, "e2", None)  # type: ignore[arg-type]
        assert found.add(stat, ReadFile("e1", 9, 2, FileEnd(9)))
    assert len(looked) == len(found.rest) == MAX_PROOFS
    assert len(found.grown) == MAX_PROOFS + 5


def test_a_text_keeps_everything() -> None:
    read = ReadFile("e1", 12, 3, FileEnd(9, 2, "9:abc", open_line=True))
    assert ReadFile.from_text("e1", read.to_text()) == read
    left = ReadFile("e1", 12, 3, FileEnd(9, 2, "9:abc", incomplete_line=True))
    assert ReadFile.is_incomplete(left.to_text())
    assert not ReadFile.is_incomplete(read.to_text())


def test_a_replay_of_the_ledger_gives_the_same_position() -> None:
    end = FileEnd(90, 5, "90:abc").to_json()
    base = FileState("/in")
    item = {"size_bytes": 100, "etag": "e", "create_time": "", "discovery_time": "", "from": 0}
    splits = [Split([{"path": path, **item} for path in ("/in/a.json", "/in/b.json")], 9, 9, 9)]
    outcomes = [
        {"path": "/in/a.json", "to": 5, "offset": 90, "line": 5, "finished": False, "end": end},
        {"path": "/in/b.json", "to": 2, "offset": 20, "line": 2, "finished": True, "end": end},
    ]
    after, records = advance(base, splits, outcomes, 3, 1)
    assert after.files["/in/a.json"] == Progress(5, False, 90, 5, 100, "e", tail="90:abc")
    assert replay(base, records) == after
