"""Local storage: atomic puts, byte-ordered listings, durable files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.storage import LocalStorage, is_remote, normalise, open_storage

LETTERS = st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"])
NAMES = st.text(LETTERS, min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path))


def test_put_replaces_and_leaves_no_temporary_file(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("a/b.json", b"1")
    storage.put("a/b.json", b"2")
    assert storage.get("a/b.json") == b"2"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.json"]


def test_pieces_become_one_object_or_nothing(storage: LocalStorage, tmp_path: Path) -> None:
    def broken_off() -> Iterator[bytes]:
        yield b"x"
        raise ValueError

    storage.put_chunks("a/b", [b"1", b"2"])
    with pytest.raises(ValueError):  # what the pieces raise comes through as it is
        storage.put_chunks("a/b", broken_off())
    assert storage.get("a/b") == b"12"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_put_new_refuses_to_replace(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put_new("x", b"1")
    with pytest.raises(FileExistsError):
        storage.put_new("x", b"2")
    assert storage.get("x") == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_deleting_what_is_not_there_is_fine(storage: LocalStorage) -> None:
    storage.delete("nothing")
    with pytest.raises(FileNotFoundError):
        storage.get("nothing")


def test_listing_a_missing_folder_is_empty(storage: LocalStorage) -> None:
    assert list(storage.list("no/such")) == []


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=12), at=st.integers(0, 12))
def test_listings_are_in_byte_order_of_the_whole_name(
    names: list[list[str]], at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("walk")
    made = set()
    for parts in names:
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        except OSError:  # a folder and a file of one name: not both can exist
            continue
        made.add(str(path))
    expected = sorted((p for p in made if os.path.isfile(p)), key=os.fsencode)
    storage = LocalStorage(str(root))
    assert [s.name for s in storage.list("")] == expected
    after = expected[min(at, len(expected) - 1)] if expected else ""
    assert [s.name for s in storage.list("", after)] == [p for p in expected if os.fsencode(p) > os.fsencode(after)]


def test_a_created_file_is_whole_after_close(storage: LocalStorage, tmp_path: Path) -> None:
    stream = storage.create("p/q.bin")
    stream.write(b"abc")
    stream.close()
    stat = storage.stat("p/q.bin")
    assert (stat.size_bytes, stat.name) == (3, str(tmp_path / "p/q.bin"))
    reader = storage.open_read("p/q.bin", 1)
    assert reader.read(10) == b"bc"
    reader.close()


def test_the_etag_changes_with_the_content(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("f", b"1")
    before = storage.stat("f").etag
    storage.put("f", b"22")
    assert storage.stat("f").etag != before


def test_names_of_roots() -> None:
    assert normalise("file:///a/b/") == "/a/b"
    assert normalise("s3://bucket/x/") == "s3://bucket/x"
    assert is_remote("s3://b")
    assert not is_remote("/a")
    assert open_storage("/a").root == "/a"
