"""The backends that need no server: the conformance suite, and what is each one's own."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from firnline import stores
from firnline.errors import ConfigError, DamagedError, NewerFormatError, StoreUnsafeError, VersionConflictError
from firnline.options import StoreOptions
from firnline.storage import FileStat, LocalStorage
from firnline.stores import base as common
from firnline.stores import file as file_module
from firnline.stores import open_store
from firnline.stores import sqlite as sqlite_module
from firnline.stores.base import MAX_VALUE_BYTES, CheckpointStore
from firnline.stores.file import FileStore
from firnline.stores.objects import DELETED, ObjectStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.sqlite import SqliteStore
from firnline.testing.stores import StoreConformance, sample_record


@pytest.fixture
def store(options: StoreOptions) -> Iterator[CheckpointStore]:
    with closing(open_store(options)) as store:
        yield store


class TestMemory(StoreConformance):
    @pytest.fixture
    def options(self) -> StoreOptions:
        return StoreOptions(type="memory")


class TestFile(StoreConformance):
    @pytest.fixture
    def options(self, tmp_path: Path) -> StoreOptions:
        return StoreOptions(type="file", path=str(tmp_path / "store"))


class TestSqlite(StoreConformance):
    @pytest.fixture
    def options(self, tmp_path: Path) -> StoreOptions:
        return StoreOptions(type="sqlite", path=str(tmp_path / "deep" / "er" / "store.db"))


class TestObject(StoreConformance):
    @pytest.fixture
    def options(self, tmp_path: Path) -> StoreOptions:
        return StoreOptions(type="object", uri=str(tmp_path / "store"))


# -- opening ------------------------------------------------------------------------------------------


def test_memory_warns_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_warned", set())
    with caplog.at_level(logging.WARNING):
        open_store(StoreOptions(type="memory"))
        open_store(StoreOptions(type="memory"))
    assert [r.message for r in caplog.records] == ["checkpoints are kept in memory: gone when this process ends"]


@pytest.mark.parametrize(
    ("kind", "needs"), [("file", "path"), ("sqlite", "path"), ("postgres", "dsn"), ("object", "uri")]
)
def test_a_store_without_a_place_is_a_config_error(kind: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=needs):
        open_store(StoreOptions(type=kind))  # type: ignore[arg-type]


def test_values_and_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(StoreOptions(type="memory"))

    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_VALUE_BYTES + 1

    with pytest.raises(ConfigError, match="up to"):
        store.put_raw("p", Huge())
    with pytest.raises(ConfigError, match="up to"):
        store.put_raw_versioned("p", Huge(), 0)


class Careless(LocalStorage):
    """A storage whose put_new replaces what is there."""

    def put_new(self, key: str, data: bytes) -> None:
        self.put(key, data)


class Liar(Careless):
    """Says that it refused, but replaced."""

    def put_new(self, key: str, data: bytes) -> None:
        self.put(key, data)
        raise FileExistsError(key)


@pytest.mark.parametrize("storage", [Careless, Liar])
def test_a_storage_without_put_if_absent_is_refused(tmp_path: Path, storage: type[LocalStorage]) -> None:
    with pytest.raises(StoreUnsafeError):
        ObjectStore(storage(str(tmp_path))).open()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_disk_without_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.storage._link_new", os.replace)
    with pytest.raises(StoreUnsafeError):
        FileStore(str(tmp_path)).open()


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.stores.file.fcntl.flock", lambda *_: None)
    with pytest.raises(StoreUnsafeError, match="lock"):
        FileStore(str(tmp_path)).open()


# -- file ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path / "store"))
    store.open()
    return store


def test_files_can_be_read_without_firnline(files: FileStore, tmp_path: Path) -> None:
    files.put("orders", sample_record(1), note="by hand")
    files.put("orders", sample_record(2, files=2_000))
    files.put("orders/audit", sample_record(1))
    folder = tmp_path / "store" / "orders" / "checkpoint"
    plain = json.loads((folder / "00000000000000000001.json").read_text())
    packed = json.loads(zstandard.decompress((folder / "00000000000000000002.json.zst").read_bytes()))
    assert [p["value"]["checkpoint"]["epoch"] for p in (plain, packed)] == [1, 2]
    assert (folder / "00000000000000000001.note").read_text() == "by hand\n"
    assert (tmp_path / "store" / "orders" / "parts" / "audit" / "00000000000000000001.json").exists()


@pytest.mark.parametrize("hint", [b"", b"3\n", b"1", b"1\n", b"99\n", b"garbage", b"-5\n", b"\0" * 9, b"9" * 40, None])
def test_a_hint_is_only_a_hint(files: FileStore, tmp_path: Path, hint: bytes | None) -> None:
    for number in range(1, 6):
        files.put_raw("p", b"%d" % number)
    head = tmp_path / "store" / "p" / "checkpoint" / "HEAD"
    assert head.read_bytes() == b"5\n"
    head.unlink()
    if hint is not None:
        head.write_bytes(hint)
    assert (files.latest_version("p"), files.get_raw("p")) == (5, b"5")
    assert files.put_raw_versioned("p", b"6", 5) == 6
    assert head.read_bytes() == b"6\n"


def test_a_hint_far_behind_or_before_a_hole(files: FileStore, tmp_path: Path) -> None:
    for number in range(1, 101):
        files.put_raw("p", b"%d" % number)
    folder = tmp_path / "store" / "p" / "checkpoint"
    (folder / "HEAD").write_bytes(b"1\n")
    assert files.latest_version("p") == 100
    (folder / "HEAD").write_bytes(b"97\n")
    (folder / f"{98:020d}.json").unlink()  # somebody took a damaged one away
    assert files.put_raw("p", b"101") == 101
    assert [info.version for info in files.list_versions("p", limit=5)] == [101, 100, 99, 97, 96]


def test_a_number_belongs_to_one_file_whatever_its_suffix(files: FileStore, tmp_path: Path) -> None:
    packed = zstandard.compress(b"x")
    assert files.put_raw_versioned("p", packed, 0) == 1
    with pytest.raises(VersionConflictError):
        files.put_raw_versioned("p", b"x", 0)
    assert files.put_raw_versioned("p", b"x", 1) == 2
    names = sorted(p.name for p in (tmp_path / "store" / "p" / "checkpoint").glob("0*"))
    assert names == ["00000000000000000001.json.zst", "00000000000000000002.json"]


def test_what_killed_writers_left_is_ignored_and_swept(files: FileStore, tmp_path: Path) -> None:
    files.put_raw("p", b"1")
    old, young = (tmp_path / "store" / ".tmp" / f"{name}.tmp" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    then = time.time() - 2 * file_module.SWEEP_AFTER_SECONDS
    os.utime(old, (then, then))
    (tmp_path / "store" / "p" / "checkpoint" / f"{2:020d}.note").write_text("of a put that was killed\n")
    assert (files.get_raw("p"), list(files.list())) == (b"1", ["p"])
    files.open()
    assert (old.exists(), young.exists()) == (False, True)
    files.put_raw("p", b"2")
    assert files.list_versions("p")[0].note == ""


def test_a_lock_that_is_never_let_go_is_an_os_error(files: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files.put_raw("p", b"1")
    monkeypatch.setattr(file_module, "LOCK_SECONDS", 0.05)
    who = f"locked by process {os.getpid()} on {socket.gethostname()}, which does not go on; .*kill -9 {os.getpid()}"
    with files._locked(files._folder("p")), pytest.raises(OSError, match=who):
        files.put_raw("p", b"2")
    assert files.get_raw("p") == b"1"  # readers need no lock
    lock = Path(files._folder("p"), ".lock")
    lock.write_bytes(b"")  # of a writer that did not say who it is
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="locked by another process"):
            files.put_raw("p", b"2")
    lock.write_bytes(b"4194304 some-host-with-a-long-name\n")
    assert files.put_raw("p", b"2") == 2
    assert lock.read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_strange_folders_are_no_keys(files: FileStore, tmp_path: Path) -> None:
    files.put_raw("p", b"1")
    (tmp_path / "store" / "not a key" / "checkpoint").mkdir(parents=True)
    (tmp_path / "store" / "p" / "parts" / "also not").mkdir(parents=True)
    (tmp_path / "store" / "README").write_text("by hand")
    assert list(files.list()) == ["p"]


def test_the_newest_file_is_found_without_listing(files: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        files.put_raw("p", b"%d" % number)

    def forbidden(*_: object) -> dict[int, set[str]]:
        raise AssertionError("listed")

    monkeypatch.setattr(files, "_numbers", forbidden)
    assert files.latest_version("p") == 5
    assert files.put_raw("p", b"6") == 6
    assert [info.version for info in files.list_versions("p", before=5, limit=2)] == [4, 3]


# -- objects ------------------------------------------------------------------------------------------


class Counting(LocalStorage):
    """Counts what a listing gave."""

    listed = 0

    def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
        for stat in super().list(prefix, after):
            self.listed += 1
            yield stat


def test_the_newest_object_is_the_first_listed(tmp_path: Path) -> None:
    storage = Counting(str(tmp_path))
    store = ObjectStore(storage)
    store.open()
    for number in range(1, 30):
        store.put_raw("p", b"%d" % number)
        store.put_raw("p/part", b"%d" % number)
    storage.listed = 0
    assert (store.latest_version("p"), store.get_raw("p")) == (29, b"29")
    assert storage.listed == 2
    assert list(store.list()) == ["p", "p/part"]
    assert storage.listed <= 7


def test_the_version_names_stay_in_order_over_many_numbers() -> None:
    from firnline.stores.objects import _name

    names = [_name("p", version) for version in (1, 9, 10, 99, 999, 1000, 1001, 99_999, 100_000, 10**17)]
    assert names == sorted(names, reverse=True)


def test_a_put_that_was_sent_twice_meets_its_own_first_try(tmp_path: Path) -> None:
    class Twice(LocalStorage):
        def put_new(self, key: str, data: bytes) -> None:
            super().put_new(key, data)
            if "probe" not in key:
                raise FileExistsError(key)

    store = ObjectStore(Twice(str(tmp_path)))
    assert store.put_raw_versioned("p", b"a", 0) == 1
    assert store.put_raw("p", b"b") == 2
    assert store.latest_version("p") == 2


def test_a_writer_that_stood_still_cannot_bring_back_a_pruned_number(tmp_path: Path) -> None:
    """It read that 1 is the newest; meanwhile 2 to 5 were put, and all but the newest pruned."""
    rival = ObjectStore(LocalStorage(str(tmp_path)))

    class Slow(LocalStorage):
        def put_new(self, key: str, data: bytes) -> None:
            if data == b"late":
                for number in range(2, 6):
                    rival.put_raw("p", b"%d" % number)
                rival.prune("p", 1)
            super().put_new(key, data)

    rival.put_raw("p", b"1")
    with pytest.raises(OSError, match="pruned"):
        ObjectStore(Slow(str(tmp_path))).put_raw_versioned("p", b"late", 1)
    assert rival.get_version_raw("p", 2) is None
    assert [info.version for info in rival.list_versions("p")] == [5]
    with pytest.raises(VersionConflictError):
        rival.put_raw_versioned("p", b"late", 1)
    assert rival.put_raw("p", b"6") == 6
    assert rival.prune("p", 1) == 2  # the late one is swept with the next
    assert sorted(p.name for p in tmp_path.rglob("*-2")) == []


def test_what_marks_a_deletion_cannot_be_put(tmp_path: Path) -> None:
    store = ObjectStore(LocalStorage(str(tmp_path)))
    with pytest.raises(ConfigError):
        store.put_raw("p", DELETED)
    same_size = b"x" * len(DELETED)
    store.put_raw("p", same_size)
    assert (store.get_raw("p"), list(store.list()), len(store.list_versions("p"))) == (same_size, ["p"], 1)


def test_strange_objects_are_no_keys(tmp_path: Path) -> None:
    store = ObjectStore(LocalStorage(str(tmp_path)))
    store.put_raw("p", b"1")
    for name in ("README", "a b/checkpoint/x", "p/other/y", "p/checkpoint/version/zzz", "zz/checkpoint/huh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("by hand")
    assert list(store.list()) == ["p"]
    assert store.put_raw("p", b"2") == 2


# -- sqlite -------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(str(tmp_path / "store.db"))) as store:
        store.open()
        yield store


def test_the_file_is_plain_sqlite(database: SqliteStore, tmp_path: Path) -> None:
    database.put("orders", sample_record(1), note="by hand")
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        row = db.execute("SELECT key, version, note, data FROM versions").fetchone()
        settings = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "user_version")]
    assert row[:3] == ("orders", 1, "by hand")
    assert json.loads(row[3])["value"]["checkpoint"]["epoch"] == 1
    assert settings == ["wal", 1]


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as db:
        db.execute("CREATE TABLE things (x)")
    with pytest.raises(DamagedError, match="not, or no longer"):
        SqliteStore(str(tmp_path / "theirs.db")).open()


def test_a_newer_database_is_refused_by_name(database: SqliteStore, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(NewerFormatError, match="format 2"):
        SqliteStore(str(tmp_path / "store.db")).open()


def test_what_is_no_database_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"this is not a database at all" * 100)
    with pytest.raises(DamagedError) as caught:
        SqliteStore(str(tmp_path / "store.db")).open()
    assert "backup" in caught.value.hint


def test_a_place_that_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(OSError, match="unable to open"):
        SqliteStore(str(tmp_path / "folder.db")).open()


def test_a_file_that_stays_busy_is_an_os_error(
    database: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.put_raw("p", b"1")
    monkeypatch.setattr(sqlite_module, "BUSY_SECONDS", 0.05)
    with closing(SqliteStore(str(tmp_path / "store.db"))) as other:
        other.open()
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            with pytest.raises(OSError, match="locked"):
                other.put_raw("p", b"2")
            assert other.get_raw("p") == b"1"
            db.execute("ROLLBACK")
        assert other.put_raw("p", b"2") == 2


def test_a_forked_child_opens_a_connection_of_its_own(database: SqliteStore) -> None:
    database.put_raw("p", b"parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if database.put_raw("p", b"child") == 2 and database.get_raw("p") == b"child" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert database.get_raw("p") == b"child"
    assert database.put_raw("p", b"parent again") == 3


def test_stores_that_are_gone_leave_nothing_behind(tmp_path: Path) -> None:
    gc.collect()
    before = len(common._connected)
    stores = [SqliteStore(str(tmp_path / "store.db")) for _ in range(5)]
    assert len(common._connected) == before + 5
    stores.clear()
    gc.collect()
    assert len(common._connected) == before


def held_in(store: CheckpointStore) -> tuple[object, ...]:
    return (
        store.get_raw("p"), list(store.list()), store.latest_version("p"), store.get_version_raw("p", 1),
        list(store.list_versions("p")),
    )  # fmt: skip


@pytest.mark.parametrize("there", ["missing", "empty"])
def test_looking_at_a_database_makes_nothing(tmp_path: Path, there: str) -> None:
    path = tmp_path / "a folder? 100%" / "store.db"
    if there == "empty":
        path.parent.mkdir()
        path.touch()
    options = StoreOptions(type="sqlite", path=str(path))
    with closing(open_store(options, read_only=True)) as looking:
        assert held_in(looking) == (None, [], 0, None, [])
        assert list(tmp_path.rglob("*")) == ([] if there == "missing" else [path.parent, path])
        assert not path.exists() or path.read_bytes() == b""
        with closing(open_store(options)) as store:
            store.put_raw("p", b"1")
            assert held_in(looking)[:4] == (b"1", ["p"], 1, b"1")
    with closing(open_store(options, read_only=True)) as again:
        assert held_in(again)[:4] == (b"1", ["p"], 1, b"1")


def test_looking_at_what_is_no_store_says_so(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"some other file, and long enough to be read as one" * 20)
    with pytest.raises(DamagedError):
        open_store(StoreOptions(type="sqlite", path=str(path)), read_only=True)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM heads",
        "UPDATE heads SET latest = 2",
        "UPDATE heads SET deleted = 1",
        "DELETE FROM versions WHERE version = 3",
        "UPDATE versions SET data = (SELECT data FROM versions WHERE version = 1) WHERE version = 3",
        "UPDATE versions SET version = 7 WHERE version = 3",
        "UPDATE versions SET key = 'other' WHERE version = 3",
    ],
)
def test_rows_that_do_not_fit_together_are_damage(database: SqliteStore, tmp_path: Path, change: str) -> None:
    for epoch in (1, 2, 3):
        database.put("orders", sample_record(epoch))
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        db.execute(change)
        db.commit()
    with pytest.raises(DamagedError):
        database.get("orders", CheckpointRecord)
