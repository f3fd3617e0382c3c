"""Bit rot in what the stores keep: told, with the last intact version, and never a wrong answer."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from firnline.errors import DamagedError, NewerFormatError
from firnline.storage import LocalStorage
from firnline.stores.base import CheckpointStore, decode, encode
from firnline.stores.file import FileStore
from firnline.stores.objects import ObjectStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.sqlite import SqliteStore
from firnline.testing.stores import sample_record

FLIPS = None if os.environ.get("FIRNLINE_PROOF") else 2_000  # of a database; None: every byte


def file_store(folder: Path) -> CheckpointStore:
    return FileStore(str(folder))


def object_store(folder: Path) -> CheckpointStore:
    return ObjectStore(LocalStorage(str(folder)))


def prepare(store: CheckpointStore, folder: Path, packed: bool) -> Path:
    """Two versions; returns the file of the newer."""
    store.open()
    store.put("orders", sample_record(1))
    store.compress_above_bytes = 1 if packed else 1_000_000
    store.put("orders", sample_record(2))
    newest = store.get_raw("orders")
    return next(p for p in folder.rglob("*") if p.is_file() and p.read_bytes() == newest)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [file_store, object_store])
def test_every_flipped_byte_is_found(tmp_path: Path, make: Callable[[Path], CheckpointStore], packed: bool) -> None:
    store = make(tmp_path)
    path = prepare(store, tmp_path, packed)
    whole = path.read_bytes()
    survived = 0
    for position in range(len(whole)):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            survived += is_answered(store)
    assert survived <= (8 if packed else 0)  # bits of a zstd frame that mean nothing


def is_answered(store: CheckpointStore) -> bool:
    """Whether there was an answer: then it is the right one; else the version before is named."""
    try:
        found = store.get("orders", CheckpointRecord)
    except DamagedError as error:
        if error.fields["intact"] != 1:
            raise
        return False
    assert found == sample_record(2)
    return True


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [file_store, object_store])
def test_every_cut_is_found(tmp_path: Path, make: Callable[[Path], CheckpointStore], packed: bool) -> None:
    store = make(tmp_path)
    path = prepare(store, tmp_path, packed)
    whole = path.read_bytes()
    for length in range(len(whole) - (0 if packed else 1)):  # without the newline at its end, JSON is still whole
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match="newest intact version is 1") as caught:
            store.get("orders", CheckpointRecord)
        assert caught.value.fields["intact"] == 1
        assert store.put_raw_versioned("orders/next", b"%d" % length, length) == length + 1


def test_json_that_is_never_written_is_damage() -> None:
    for text in (b'{"checksum":"0","value":1e999}', b'{"checksum":"0","value":"\\ud800"}', b"[" * 100_000):
        with pytest.raises(DamagedError):
            decode(text, "X", "it")


def test_a_frame_that_says_it_is_huge_is_not_unpacked() -> None:
    data = bytearray(encode({"x": "y" * 100_000}, "X"))
    data[4] = 0xE0  # an eight-byte content size, no dictionary
    data[5:13] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(DamagedError, match="more than"):
        decode(bytes(data), "X", "it")


def test_flipped_bytes_of_a_database_never_give_a_wrong_answer(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    records = [sample_record(epoch) for epoch in (1, 2, 3, 4)]
    with closing(SqliteStore(str(path))) as store:
        store.open()
        for record in records:
            store.put("orders", record)
            store.put("orders/part", record)
        store.prune("orders", 3)
        store.put_raw("gone", b"x")
        store.delete("gone")
    whole = path.read_bytes()
    positions = range(len(whole))
    refused = 0
    for position in positions if FLIPS is None else random.Random(7).sample(positions, FLIPS):
        damaged = bytearray(whole)
        damaged[position] ^= random.Random(position).choice([0x01, 0x10, 0x80, 0xFF])
        path.write_bytes(damaged)
        for leftover in (tmp_path / "store.db-wal", tmp_path / "store.db-shm"):
            leftover.unlink(missing_ok=True)
        with closing(SqliteStore(str(path))) as store:
            try:
                store.open()
            except (DamagedError, NewerFormatError, OSError):
                refused += 1
                continue
            refused += ask(store, records, position)
    assert refused > 100


def ask(store: SqliteStore, records: list[CheckpointRecord], position: int) -> int:
    """Every question is answered rightly, or refused; returns how many were refused."""
    questions: list[tuple[Callable[[], object], object]] = [
        (lambda: store.get("orders", CheckpointRecord), records[3]),
        (lambda: store.get("orders", CheckpointRecord, version=2), records[1]),
        (lambda: store.get("orders", CheckpointRecord, version=1), None),
        (lambda: store.get("orders/part", CheckpointRecord), records[3]),
        (lambda: store.latest_version("orders"), 4),
        (lambda: store.latest_version("gone"), 2),
        (lambda: store.get_raw("gone"), None),
        (lambda: [info.version for info in store.list_versions("orders")], [4, 3, 2]),
        (lambda: [*store.list()], ["orders", "orders/part"]),
    ]
    refused = 0
    for number, (question, answer) in enumerate(questions):
        try:
            assert question() == answer, (position, number)
        except (DamagedError, NewerFormatError, OSError):
            refused += 1
    return refused
