"""What the ledger knows against a full listing, in bounded memory: the answer is that of a dictionary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import SourceError
from firnline.sources import known as module
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.position import FileState
from firnline.sources.files.source import FileSource
from firnline.sources.known import KnownFiles
from firnline.storage import FileStat, LocalStorage

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/."), min_size=1, max_size=3)
FILES = st.lists(st.tuples(NAMES, st.sampled_from(["", "e1", "e2"])), max_size=40)


@given(FILES, st.integers(1, 12))
def test_each_file_is_told_once_in_byte_order_as_it_was_read_last(files: list[tuple[str, str]], held: int) -> None:
    expected: dict[str, str] = {}
    for path, etag in files:
        expected.setdefault(path, etag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "IN_MEMORY", held)
        patch.setattr(module, "_PAGE", 3)
        known = KnownFiles(files)
    assert list(known) == sorted(expected.items(), key=lambda pair: pair[0].encode())
    assert list(known) == list(known)
    moved = known.renamed(lambda path: f"x{path}")
    assert dict(moved) == {f"x{path}": etag for path, etag in expected.items()}
    known.close()


@given(FILES, FILES, FILES, st.integers(1, 12))
def test_of_two_names_that_become_one_the_newer_file_counts(
    newest: list[tuple[str, str]], middle: list[tuple[str, str]], below: list[tuple[str, str]], held: int
) -> None:
    expected: dict[str, str] = {}
    for path, etag in [*newest, *middle, *below]:
        expected.setdefault(path.upper(), etag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "IN_MEMORY", held)
        patch.setattr(module, "_PAGE", 3)
        known = KnownFiles(middle, below=KnownFiles(below))
        for path, etag in reversed(newest):
            known.add_newer(path, etag)
        moved = known.renamed(str.upper)
        assert dict(moved) == expected
        assert len(list(moved)) == len(expected)


@given(st.lists(NAMES, max_size=12, unique=True), st.lists(NAMES, max_size=12, unique=True))
def test_late_is_what_is_listed_and_not_known(listed: list[str], read: list[str]) -> None:
    class Listing(LocalStorage):
        def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
            yield from (FileStat(f"/in/{n}", 1, "new", MOMENT) for n in sorted(listed, key=str.encode))

    source = FileSource(FileSourceOptions("s", "/in"), storage=Listing("/in"))
    position = FileState("/in", mark="/in/" + "\U0010ffff" * 4).to_json()
    found = source.find_late(position, KnownFiles((f"/in/{name}", "old") for name in read))
    assert {stat.name for stat in found.late} == {f"/in/{name}" for name in set(listed) - set(read)} - _hidden(listed)
    assert set(found.changed) == {f"/in/{name}" for name in set(listed) & set(read)} - _hidden(listed)


def _hidden(names: list[str]) -> set[str]:
    return {f"/in/{name}" for name in names if name.startswith("_")}


def test_a_listing_in_another_order_is_refused(tmp_path: Path) -> None:
    """Merged with the ledger it would make processed files late."""

    class Backwards(LocalStorage):
        def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
            yield from reversed([*super().list(prefix, after)])

    for name in "ab":
        (tmp_path / name).write_text("{}\n")
    source = FileSource(FileSourceOptions("s", str(tmp_path)), storage=Backwards(str(tmp_path)))
    with pytest.raises(SourceError, match="listed after"):
        source.find_late(FileState(str(tmp_path), mark=os.path.join(str(tmp_path), "z")).to_json(), KnownFiles())
