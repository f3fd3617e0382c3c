"""Checkpoint stores: what a version costs beside one raw durable write, and whether that stays so with many."""

from __future__ import annotations

import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.cases import Row, World
from benchmarks.servers import Bucket, running_s3
from benchmarks.turns import in_turns, p50, p99, round_off
from firnline.options import StoreOptions
from firnline.stores import open_store
from firnline.stores.base import PAGE, CheckpointStore, decode, encode
from tests.support.postgres import find_program, running_postgres

SIZES = {"500 B": 500, "20 KB": 20_000}
ROUNDS, EACH = 12, 20
Peer: TypeAlias = tuple[Callable[[bytes], object], Callable[[], object]]  # write, and read what was written last


@dataclass(frozen=True)
class Backend:
    """A store that is measured, and what lies under it. `aim` bounds a put, in times of the peer's."""

    name: str
    options: StoreOptions
    peer: Callable[[], AbstractContextManager[Peer]]
    aim: float | None = None
    pace: float = 1.0  # how many of the calls that a fast one gets


@contextmanager
def _backends(folder: Path) -> Iterator[list[Backend]]:
    with ExitStack() as stack:
        found = [
            Backend("memory", StoreOptions(type="memory"), _dict_peer),
            Backend("file", StoreOptions(type="file", path=str(folder / "file")), lambda: _file_peer(folder), 2.0),
            Backend(
                "sqlite",
                StoreOptions(type="sqlite", path=str(folder / "store.db")),
                lambda: _sqlite_peer(folder / "peer.db"),
                2.0,
            ),
        ]
        if find_program("initdb"):
            dsn = stack.enter_context(running_postgres()).dsn
            found.append(Backend("postgres", StoreOptions(type="postgres", dsn=dsn), lambda: _postgres_peer(dsn), 2.0))
        found.append(
            Backend(
                "object, folder",
                StoreOptions(type="object", uri=str(folder / "objects")),
                lambda: _file_peer(folder),
            )
        )
        bucket = stack.enter_context(running_s3())
        options = StoreOptions(type="object", uri=f"{bucket.uri}/store", storage_options=bucket.options)
        found.append(Backend("object, S3", options, lambda: _s3_peer(bucket), pace=0.25))
        yield found


def stores(world: World) -> list[Row]:
    """A put that expects a version, and a read of the newest, beside one raw durable write and one raw read."""
    rows: list[Row] = []
    folder = world.folder / "stores"
    folder.mkdir()
    with _backends(folder) as backends:
        for backend in backends:
            for label, size in SIZES.items():
                rows += _latency(world, backend, label, size)
    shutil.rmtree(folder)
    return rows


def _latency(world: World, backend: Backend, label: str, size: int) -> list[Row]:
    each, rounds = max(2, int(EACH * backend.pace)), world.rounds(ROUNDS)
    key = f"bench-{size}"
    with closing(open_store(backend.options)) as store, backend.peer() as (write, read):
        put, values = _putter(store, key, size), _payloads(size)
        ours, theirs = in_turns([put, lambda: write(next(values))], rounds=rounds, each=each)
        noted, beside = in_turns(
            [_putter(store, f"{key}-noted", size, "epoch 42"), lambda: write(next(values))],
            rounds=max(1, rounds // 2),
            each=each,
        )
        got, raw = in_turns([lambda: store.get_raw(key), read], rounds=rounds, each=each)
    ratio = p50(ours) / p50(theirs)
    aim = f"<= {backend.aim:g}x" if backend.aim else ""
    met = ratio <= backend.aim if backend.aim else None
    name = f"{backend.name}, {label}"
    return [
        Row(f"{name}: put p50", round_off(p50(ours)), "ms", round_off(p50(theirs)), ratio, aim, met),
        Row(f"{name}: put p99", round_off(p99(ours)), "ms", round_off(p99(theirs)), p99(ours) / p99(theirs)),
        Row(
            f"{name}: put with a note p50",
            round_off(p50(noted)),
            "ms",
            round_off(p50(beside)),
            p50(noted) / p50(beside),
        ),
        Row(f"{name}: get p50", round_off(p50(got)), "ms", round_off(p50(raw)), p50(got) / p50(raw)),
        Row(f"{name}: get p99", round_off(p99(got)), "ms", round_off(p99(raw)), p99(got) / p99(raw)),
        Row(f"{name}: versions", round(1000 * len(ours) / sum(ours)), "per s", round(1000 * len(theirs) / sum(theirs))),
    ]


def _payloads(size: int) -> Iterator[bytes]:
    """Values in the durable form, of about that size; no two are the same, and making one takes no time."""
    files = [uuid.uuid4().hex for _ in range(max(1, (size - 170) // 35))]
    text = encode({"epoch": 42, "files": files}, "Checkpoint", compress_above_bytes=1 << 30)
    while True:
        yield text.replace(files[0].encode(), uuid.uuid4().hex.encode(), 1)


def _putter(store: CheckpointStore, key: str, size: int, note: str = "") -> Callable[[], object]:
    """Puts a version onto the one that it put before, as the only writer of a pipeline does."""
    latest = store.latest_version(key)
    values = _payloads(size)

    def put() -> None:
        nonlocal latest
        latest = store.put_raw_versioned(key, next(values), latest, note)

    return put


# -- what lies under a store ------------------------------------------------------------------------------


@contextmanager
def _dict_peer() -> Iterator[Peer]:
    kept: dict[int, bytes] = {}

    def write(data: bytes) -> None:
        kept[len(kept)] = data

    yield write, lambda: kept[len(kept) - 1]


@contextmanager
def _file_peer(folder: Path) -> Iterator[Peer]:
    """A temporary file, fsync, rename, fsync of the folder."""
    place = folder / f"peer-{uuid.uuid4().hex}"
    place.mkdir()
    count = 0

    def write(data: bytes) -> None:
        nonlocal count
        temporary = f"{place}/.{uuid.uuid4().hex}.tmp"
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        count += 1
        os.rename(temporary, f"{place}/{count:020d}.json")
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    yield write, lambda: Path(f"{place}/{count:020d}.json").read_bytes()


@contextmanager
def _sqlite_peer(path: Path) -> Iterator[Peer]:
    """One INSERT in a WAL database with synchronous=FULL."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        newest = "SELECT data FROM versions ORDER BY version DESC LIMIT 1"
        yield (
            lambda data: db.execute("INSERT INTO versions (data) VALUES (?)", (data,)),
            lambda: db.execute(newest).fetchone(),
        )


@contextmanager
def _postgres_peer(dsn: str) -> Iterator[Peer]:
    """One INSERT and its commit."""
    import psycopg

    with psycopg.connect(dsn) as db:
        db.execute(
            "CREATE TABLE IF NOT EXISTS peer (version bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea)"
        )
        db.commit()

        def write(data: bytes) -> None:
            db.execute("INSERT INTO peer (data) VALUES (%s)", (data,))
            db.commit()

        def read() -> object:
            row = db.execute("SELECT data FROM peer ORDER BY version DESC LIMIT 1").fetchone()
            db.commit()
            return row

        yield write, read


@contextmanager
def _s3_peer(bucket: Bucket) -> Iterator[Peer]:
    """One conditional PUT."""
    import obstore
    import obstore.store

    config: Any = {key: value for key, value in bucket.options.items() if key != "AWS_ALLOW_HTTP"}
    place = obstore.store.from_url(bucket.uri, config=config, client_options={"allow_http": True})
    names = [""]

    def write(data: bytes) -> None:
        names[0] = f"peer/{uuid.uuid4().hex}"
        obstore.put(place, names[0], data, mode="create")

    yield write, lambda: bytes(obstore.get(place, names[0]).bytes())


# -- many versions ----------------------------------------------------------------------------------------


def growth(world: World) -> list[Row]:
    """The same calls on a key with 100,000 versions and on a new one, and pages of the list.

    The versions are built in the backend's own format, without fsync and in bulk. S3 is left out: moto sorts every
    object of the bucket for each listing, so its time says nothing of the store.
    """
    count = max(1000, int(100_000 * world.scale))
    rows: list[Row] = []
    folder = world.folder / "growth"
    folder.mkdir()
    with _backends(folder) as backends:
        for backend in backends:
            if backend.name == "object, S3":
                continue
            with closing(open_store(backend.options)) as full, closing(open_store(backend.options)) as empty:
                _build(backend, full, count)
                os.sync()  # else the disk is still busy with what was built
                rows += _grown(world, backend, full, full if backend.name == "memory" else empty, count)
    shutil.rmtree(folder)
    return rows


def _grown(world: World, backend: Backend, full: CheckpointStore, empty: CheckpointStore, count: int) -> list[Row]:
    assert full.latest_version("full") == count
    empty.put_raw("empty", next(_payloads(500)))
    rows = []
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "latest_version": (lambda: full.latest_version("full"), lambda: empty.latest_version("empty")),
        "get_raw": (lambda: full.get_raw("full"), lambda: empty.get_raw("empty")),
        "put": (_putter(full, "full", 500), _putter(empty, "empty", 500)),
    }
    for name, works in calls.items():
        many, one = in_turns(works, rounds=world.rounds(ROUNDS), each=EACH)
        ratio = p50(many) / p50(one)
        told = f"{backend.name}, {count} versions against 1: {name}"
        rows.append(Row(told, round_off(p50(many)), "ms", round_off(p50(one)), ratio))
    first, middle = in_turns(
        [lambda: full.list_versions("full"), lambda: full.list_versions("full", before=count // 2)], rounds=5, each=2
    )
    assert full.list_versions("full", before=count // 2)[0].version == count // 2 - 1
    told = f"{backend.name}: a page of {PAGE}, in the middle against the first"
    rows.append(Row(told, round_off(p50(middle)), "ms", round_off(p50(first)), p50(middle) / p50(first)))
    return rows


def _build(backend: Backend, store: CheckpointStore, count: int) -> None:
    """Fill the key `full`: by the store itself without fsync, or in bulk where that is quicker."""
    if backend.name == "postgres":
        import psycopg

        with psycopg.connect(backend.options.dsn) as server:
            server.execute("INSERT INTO firnline.heads (key, latest, deleted) VALUES ('full', %s, false)", (count,))
            server.execute(
                "INSERT INTO firnline.versions (key, version, note, data)"
                " SELECT 'full', n, 'epoch ' || n, convert_to(repeat(md5(n::text), 16), 'UTF8')"
                " FROM generate_series(1, %s) n",
                (count,),
            )
        return
    data = next(_payloads(500))
    if backend.name == "sqlite":
        from firnline.checkpoint.codec import checksum
        from firnline.stores.base import timestamp
        from firnline.stores.sqlite import _sum

        at, digest = timestamp(), checksum(data)
        with closing(sqlite3.connect(backend.options.path)) as db, db:
            lines = (
                ("full", n, at, f"epoch {n}", len(data), data, _sum("full", n, digest)) for n in range(1, count + 1)
            )
            db.executemany("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)", lines)
            head = ("full", 1, count, 0)
            db.execute("INSERT INTO heads VALUES (?, ?, ?, ?, ?)", (*head, _sum(*head)))
    elif backend.name == "file":
        place = Path(backend.options.path, "full", "checkpoint")
        place.mkdir(parents=True)
        for number in range(1, count + 1):
            (place / f"{number:020d}.json").write_bytes(data)
        (place / "HEAD").write_bytes(b"%d\n" % count)
    elif backend.name == "object, folder":
        from firnline.stores.objects import _name

        for number in range(1, count + 1):
            path = Path(backend.options.uri, _name("full/checkpoint", number))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    else:
        for number in range(count):
            store.put_raw_versioned("full", data, number)


# -- large values -----------------------------------------------------------------------------------------


def packing(world: World) -> list[Row]:
    """A position with 20,000 files in progress: what zstd saves, and what it costs."""
    import json

    from firnline.checkpoint.codec import canonical, seal
    from firnline.checkpoint.model import Checkpoint
    from firnline.sources.files.position import FileState, Progress

    files = max(1000, int(20_000 * world.scale))
    progress = {
        f"/data/in/2026/11/16/part-{n:08}.ndjson": Progress(
            n * 37 % 99_991, False, n * 9_973, n * 37 % 99_991, n * 9_991, uuid.uuid4().hex
        )
        for n in range(files)
    }
    position = FileState("/data/in", files=progress)
    checkpoint = Checkpoint("bench", 9, 1, "r" * 16, "a" * 16, "2026-11-16T00:00:00+00:00", {"in": position.to_json()})
    value = checkpoint.to_json()
    plain = canonical(seal({"type": "Checkpoint", "value": value}))
    packed = encode(value, "Checkpoint")
    assert decode(packed, "Checkpoint", "bench") == value == json.loads(plain)["value"]
    unpacked = encode(value, "Checkpoint", 1 << 30)
    written, plainly = in_turns(
        [lambda: encode(value, "Checkpoint"), lambda: encode(value, "Checkpoint", 1 << 30)], rounds=4, each=2
    )
    read, readily = in_turns(
        [lambda: decode(packed, "Checkpoint", "bench"), lambda: decode(unpacked, "Checkpoint", "bench")],
        rounds=4,
        each=2,
    )
    saved = 100 * (1 - len(packed) / len(unpacked))
    name = f"a position with {files} files in progress"
    return [
        Row(f"{name}, packed", len(packed), "bytes", len(unpacked), len(unpacked) / len(packed)),
        Row("saved by packing", round(saved, 1), "%"),
        Row(
            "encode, packed against plain",
            round_off(p50(written)),
            "ms",
            round_off(p50(plainly)),
            p50(written) / p50(plainly),
        ),
        Row(
            "decode, packed against plain",
            round_off(p50(read)),
            "ms",
            round_off(p50(readily)),
            p50(read) / p50(readily),
        ),
    ]
