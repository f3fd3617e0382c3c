"""Spool files: what is written is read, and no damaged byte goes unnoticed."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from firnline.errors import DamagedError, SourceGapError
from firnline.names import spool_name
from firnline.sources.cdc.spool import Content, Mark, SpoolFile, follow, list_names, read_facts, read_file, write_file
from firnline.storage import LocalStorage

FOLDER = "spool"


def write(storage: LocalStorage, number: int, begin: Mark, end: Mark) -> SpoolFile:
    content = Content(b"context", b"frames" * number)
    return write_file(storage, FOLDER, number, begin, end, content, rows=number, transactions=1, committed_at=5)


def test_what_is_written_is_read_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    file = write(storage, 2, Mark(None), Mark({"lsn": "0/1"}))
    assert read_file(storage, FOLDER, file.name) == Content(b"context", b"framesframes")
    assert read_facts(storage, FOLDER, file.name) == file
    key = f"{FOLDER}/{file.name}"
    data = storage.get(key)
    for at in range(len(data)):
        storage.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedError):
            read_file(storage, FOLDER, file.name)
        with pytest.raises(DamagedError):
            read_facts(storage, FOLDER, file.name)
    storage.delete(key)
    with pytest.raises(SourceGapError):
        read_file(storage, FOLDER, file.name)


def test_files_whose_checksum_is_blake2_are_read(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    parts = (b"context", b"frames", b'{"begin": 1}')
    checksum = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
    name = spool_name(1, Mark(None).digest, Mark(1).digest, checksum)
    data = b"".join(parts) + struct.pack("<QQQ8s", *map(len, parts), b"FIRNSPL1")
    storage.put(f"{FOLDER}/{name}", data)
    assert read_file(storage, FOLDER, name) == Content(b"context", b"frames")
    for at in range(len(data)):
        storage.put(f"{FOLDER}/{name}", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedError):
            read_file(storage, FOLDER, name)


def test_the_chain_takes_the_way_that_leads_furthest(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    start, middle, end, elsewhere = Mark(None), Mark({"at": 1}), Mark({"at": 2}), Mark({"at": 3})
    first, second = write(storage, 1, start, middle), write(storage, 2, middle, end)
    names = [first.name, second.name, write(storage, 1, start, elsewhere).name]
    assert list(follow(names, 0, start)) == [first.name, second.name]
    assert list(follow(names, 1, middle)) == [second.name]
    assert list(follow(names, 2, end)) == []


def test_parts_of_a_transaction_that_two_runs_cut_elsewhere_are_never_mixed(tmp_path: Path) -> None:
    """The first run was killed before the transaction ended; the second one cut it at other places."""
    storage = LocalStorage(str(tmp_path))
    start, end = Mark({"at": 1}), Mark({"at": 2})

    def spool(*pieces: bytes, ends: bool) -> list[SpoolFile]:
        files, begin = list[SpoolFile](), start
        for number, frames in enumerate(pieces, 1):
            stop = end if ends and number == len(pieces) else begin.behind(frames)
            content = Content(b"", frames)
            file = write_file(storage, FOLDER, number, begin, stop, content, rows=1, transactions=0, committed_at=0)
            files.append(file)
            assert Mark.from_json(stop.to_json()) == stop
            begin = stop
        return files

    for killed in ([b"abc", b"de"], [b"a", b"bcd"], [b"abcd", b"ef"]):
        spool(*killed, ends=False)
    whole = spool(b"ab", b"cde", b"fgh", ends=True)
    names = list_names(storage, FOLDER)
    assert len(names) == 9
    assert list(follow(names, 0, start)) == [file.name for file in whole]
    assert b"".join(read_file(storage, FOLDER, file.name).frames for file in whole) == b"abcdefgh"
