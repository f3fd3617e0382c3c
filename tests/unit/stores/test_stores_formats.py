"""What each format version wrote can be read by every later one: samples are kept in `tests/data/formats`.

A sample is never made anew: a new format gets a new folder.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import VersionConflictError
from firnline.sinks.staged.unit import Unit, parse_unit
from firnline.storage import LocalStorage
from firnline.stores.base import CheckpointStore, decode
from firnline.stores.file import FileStore
from firnline.stores.objects import ObjectStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.sqlite import SqliteStore
from firnline.testing.stores import Lsn, sample_record
from firnline.types import EntryRef

V1 = Path(__file__).parents[2] / "data" / "formats" / "v1"


def write_store(store: CheckpointStore) -> None:
    """How the samples of stores were made."""
    store.open()
    store.put("orders", sample_record(1))
    store.put("orders", sample_record(2, files=3), note="by hand")
    store.compress_above_bytes = 1
    store.put("orders", sample_record(3, files=300))
    store.prune("orders", 2)
    store.put("orders/lsn", Lsn(7, 42))
    store.put("gone", Lsn(1, 1))
    store.delete("gone")


def sample_entry() -> LedgerEntry:
    return LedgerEntry(
        checkpoint=sample_record(2).checkpoint,
        previous=EntryRef(1, f"{1:020d}-a.json", "d" * 64),
        inputs={"files": [{"path": "in/000001.json", "first": 0, "records": 3, "size_bytes": 99, "etag": "e"}]},
        staged={"delta": [{"path": "part-1.parquet", "size_bytes": 10, "rows": 3}]},
        quarantine=[],
        schema=[{"name": "id", "type": "long", "nullable": True}],
        durations_ms={"run": 12},
        previous_checkpoint="e" * 64,
    )


def sample_unit() -> Unit:
    file = {
        "path": "month=2026-01/part-1.parquet",
        "size_bytes": 10,
        "rows": 3,
        "modification_time": 1_700_000_000_000,
        "partition_values": {"month": "2026-01"},
        "stats": "{}",
    }
    return Unit(
        name="u1",
        checkpoint=sample_record(2).checkpoint,
        entry=EntryRef(2, f"{2:020d}-a.json", "c" * 64),
        previous=EntryRef(1, f"{1:020d}-a.json", "d" * 64),
        previous_checkpoint="e" * 64,
        files=[file],
        schema=[{"name": "id", "type": "long", "nullable": True}],
        claimed=3,
    )


@pytest.mark.parametrize(("name", "files"), [("payload.json", 3), ("payload.json.zst", 300)])
def test_payloads(name: str, files: int) -> None:
    value = decode((V1 / name).read_bytes(), "CheckpointRecord", name)
    assert CheckpointRecord.from_json(value) == sample_record(2, files=files)


def check_store(store: CheckpointStore) -> None:
    store.open()
    assert [*store.list()] == ["orders", "orders/lsn"]
    assert store.get("orders", CheckpointRecord) == sample_record(3, files=300)
    assert store.get("orders", CheckpointRecord, version=2) == sample_record(2, files=3)
    assert [(info.version, info.note) for info in store.list_versions("orders")] == [(3, ""), (2, "by hand")]
    assert store.get("orders/lsn", Lsn) == Lsn(7, 42)
    assert (store.latest_version("gone"), store.get_raw("gone")) == (2, None)
    with pytest.raises(VersionConflictError):
        store.put("gone", Lsn(1, 1), expected=0)
    assert store.put("orders", sample_record(4), expected=3) == 4
    assert store.rollback("orders", 2) == 5
    assert store.get("orders", CheckpointRecord) == sample_record(2, files=3)


def test_file_store(tmp_path: Path) -> None:
    shutil.copytree(V1 / "file-store", tmp_path / "store")
    check_store(FileStore(str(tmp_path / "store")))


def test_object_store(tmp_path: Path) -> None:
    shutil.copytree(V1 / "object-store", tmp_path / "store")
    check_store(ObjectStore(LocalStorage(str(tmp_path / "store"))))


def test_sqlite_store(tmp_path: Path) -> None:
    shutil.copyfile(V1 / "store.db", tmp_path / "store.db")
    with closing(SqliteStore(str(tmp_path / "store.db"))) as store:
        check_store(store)


def test_ledger_entry() -> None:
    data = (V1 / "ledger-entry.json").read_bytes()
    assert LedgerEntry.from_bytes(data, "the sample") == sample_entry()


def test_staging_unit() -> None:
    assert parse_unit("u1", (V1 / "unit.meta.json").read_bytes()) == sample_unit()
