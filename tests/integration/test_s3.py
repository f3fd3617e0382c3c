"""Source and table on S3, by moto's server: conditional put, kills, two runs."""

from __future__ import annotations

import dataclasses
import json
import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import pytest
from deltalake import DeltaTable

from firnline.errors import ConfigError, DamagedError
from firnline.history.edits.restore import restore_savepoint
from firnline.history.savepoints.catalog import dispose_savepoint, list_savepoints
from firnline.history.savepoints.create import create_savepoint
from firnline.options import Home, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions, journal_in
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.storage import Storage, open_storage
from tests.support.pipelines import MakeOptions, delta_table, file_source, run_once
from tests.support.processes import KILLED, Launcher, RunOrder
from tests.support.s3 import new_bucket, s3_options
from tests.support.samples import pack, table_ids

pytestmark = [pytest.mark.s3, pytest.mark.crash]


@pytest.fixture
def storage_options(s3: str) -> dict[str, str]:
    return s3_options(s3)


@pytest.fixture
def bucket(s3: str, tmp_path: Any) -> str:
    """A new bucket for each test."""
    return new_bucket(s3)


@pytest.fixture
def store(bucket: str, storage_options: dict[str, str]) -> Storage:
    return open_storage(f"s3://{bucket}/deep/er", storage_options)


class RemoteInput:
    """Files in the bucket, and the ids that were put into them."""

    def __init__(self, bucket: str, options: dict[str, str]) -> None:
        self.storage = open_storage(f"s3://{bucket}/in", options)
        self.ids: Counter[int] = Counter()

    def add(self, name: str, records: int) -> None:
        lines = []
        for _ in range(records):
            number = len(self.ids) + 1
            self.ids[number] += 1
            lines.append(json.dumps({"id": number, "month": f"2026-{number % 3 + 1:02d}"}))
        self.storage.put(name, pack(name, ("\n".join(lines) + "\n").encode()))


@pytest.fixture
def remote(bucket: str, storage_options: dict[str, str]) -> RemoteInput:
    return RemoteInput(bucket, storage_options)


@pytest.fixture
def options(bucket: str, storage_options: dict[str, str], make_options: MakeOptions) -> PipelineOptions:
    sink = DeltaSinkOptions(
        "delta", f"s3://{bucket}/tables/out", partition_by=("month",), storage_options=storage_options
    )
    found: PipelineOptions = make_options(
        path=f"s3://{bucket}/in", sinks=(sink,), storage_options=storage_options, max_files=2
    )
    return found


def ids(options: PipelineOptions) -> Counter[int]:
    home = options.home
    table = DeltaTable(home.root, storage_options=dict(home.storage_options)).to_pyarrow_table()
    return Counter(table.column("id").to_pylist())


def test_the_rest_of_an_object_that_grew_is_read_once(
    bucket: str, storage_options: dict[str, str], options: PipelineOptions
) -> None:
    """Who appends to an object writes it anew, longer: a few bytes of it prove that it is the same."""
    storage = open_storage(f"s3://{bucket}/in", storage_options)
    source = dataclasses.replace(file_source(options), on_growth="read_rest")
    options = dataclasses.replace(options, sources=(source,))
    data = b"".join(b'{"id": %d, "month": "2026-01"}\n' % number for number in range(1, 7))
    for size in (70, 95, len(data)):
        storage.put("a.json", data[:size])
        assert run_once(options).exit_code == 0
    assert run_once(options).result.epochs == 0
    assert ids(options) == Counter(range(1, 7))
    storage.put("a.json", b'{"id": 9, "month": "2026-01"}\n' * 20)
    assert run_once(options).result.epochs == 0
    assert ids(options) == Counter(range(1, 7))


def test_storage_contract(store: Storage) -> None:
    store.put("a/x", b"1")
    store.put("a/x", b"2")
    assert store.get("a/x") == b"2"
    with pytest.raises(FileExistsError):
        store.put_new("a/x", b"3")
    store.put_new("a/y", b"4")
    with pytest.raises(FileNotFoundError):
        store.get("a/none")
    with pytest.raises(FileNotFoundError):
        store.stat("a/none")
    with pytest.raises(FileNotFoundError):
        store.open_read("a/none").read(1)
    store.delete("a/none")
    store.delete("a/y")
    assert [s.name.rsplit("/", 1)[-1] for s in store.list("a")] == ["x"]
    writer = store.create("big")
    writer.write(b"x" * 6_000_000)
    writer.write(b"y" * 6_000_000)
    assert [s.name for s in store.list("big")] == []
    writer.close()
    assert store.stat("big").size_bytes == 12_000_000
    reader = store.open_read("big", 5_999_999)
    assert reader.read(2) == b"xy"
    reader.close()
    store.put_chunks("pieces", [b"a" * 6_000_000, b"b"])
    store.put_chunks("pieces", [b"c", b"d"])
    with pytest.raises(DamagedError):
        store.put_chunks("pieces", _broken_off())
    assert store.get("pieces") == b"cd"


def _broken_off() -> Iterator[bytes]:
    yield b"e"
    raise DamagedError("no more")


def test_listing_in_byte_order_after_a_name(store: Storage) -> None:
    names = ["a", "a b", "a%20b", "a/b", "a/b/c", "b=1/x", "z", "ä", "😀"]
    for name in names:
        store.put(name, b"1")
    listed = [s.name for s in store.list("")]
    assert listed == [f"{store.root}/{name}" for name in sorted(names, key=str.encode)]
    assert [s.name for s in store.list("", listed[3])] == listed[4:]
    for name in names:
        assert store.stat(name).name == f"{store.root}/{name}"


def test_errors_of_the_machine_are_os_errors(bucket: str, storage_options: dict[str, str]) -> None:
    down = open_storage(
        f"s3://{bucket}/x",
        {**storage_options, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "timeout": "1s", "connect_timeout": "1s"},
    )
    with pytest.raises(OSError):
        down.get("a")


def test_wrong_option_is_a_config_error(bucket: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(f"s3://{bucket}/x", {"no_such_key": "1"})


def test_runs_and_resumes(options: PipelineOptions, remote: RemoteInput) -> None:
    for number in range(5):
        remote.add(f"f{number}.json.gz", 20)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert ids(options) == remote.ids
    held = open_pipeline(options).load()
    assert held.checkpoint is not None
    assert held.checkpoint.positions["files"]["last_committed_file"] == f"{remote.storage.root}/f4.json.gz"
    remote.add("f9.json", 5)
    remote.add("f0a.json", 5)  # late
    again = run_once(options)
    assert (again.exit_code, again.told.late) == (0, 1)
    assert ids(options) == remote.ids
    assert run_once(options).result.epochs == 0


@pytest.mark.parametrize(
    "point",
    [
        "delta.create.after:1",
        "stage.file.after:2",
        "storage.put.after:2",
        "delta.commit.before:2",
        "delta.commit.after:2",
    ],
)
def test_killed(launcher: Launcher, options: PipelineOptions, remote: RemoteInput, point: str) -> None:
    for number in range(5):
        remote.add(f"f{number}.json.gz", 20)
    assert launcher.run(options, f"{point}:kill").exit_code == KILLED
    launcher.run_until_done(options)
    assert ids(options) == remote.ids


def test_two_at_once(launcher: Launcher, options: PipelineOptions, remote: RemoteInput) -> None:
    remote.add("a.json", 3)
    assert run_once(options).exit_code == 0
    for number in range(6):
        remote.add(f"f{number}.json.gz", 20)
    children = [launcher.start(options) for _ in range(2)]
    assert {child.wait(90).exit_code for child in children} <= {0, 5}
    launcher.run_until_done(options)
    assert ids(options) == remote.ids


def test_store_without_put_if_absent_is_refused(
    options: PipelineOptions, remote: RemoteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.add("a.json", 3)
    put = obstore.put

    def careless(store: Any, path: str, file: Any, **settings: Any) -> Any:
        settings.pop("mode", None)
        return put(store, path, file, **settings)

    monkeypatch.setattr(obstore, "put", careless)
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "store-unsafe")


def test_large_object_over_several_epochs(options: PipelineOptions, remote: RemoteInput) -> None:
    from dataclasses import replace

    options = replace(options, batch=replace(options.batch, max_events=150))
    remote.add("big.json.gz", 400)
    remote.add("big2.json", 400)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert ids(options) == remote.ids


def restore_from(place: str, order: RunOrder) -> int:
    """In a child: delta-rs holds the interpreter's lock while it restores a version, and the server needs it here."""
    restore_savepoint(open_pipeline(order.options), place, "test", dict(order.options.home.storage_options))
    return 0


@pytest.mark.parametrize("copy", [False, True])
def test_a_savepoint_in_another_bucket(
    options: PipelineOptions,
    remote: RemoteInput,
    storage_options: dict[str, str],
    s3: str,
    tmp_path: Path,
    copy: bool,
) -> None:
    for number in range(2):
        remote.add(f"a{number}.json.gz", 5)
        assert run_once(options).exit_code == 0
    before = ids(options)
    backup = "b" + os.urandom(6).hex()
    urllib.request.urlopen(urllib.request.Request(f"{s3}/{backup}", method="PUT")).close()
    place = f"s3://{backup}/deep/saved"
    create_savepoint(open_pipeline(options), place, copy=copy, storage_options=storage_options)
    remote.add("b.json.gz", 5)
    assert run_once(options).exit_code == 0
    assert [s.state for s in list_savepoints(open_pipeline(options), storage_options)] == ["complete"]
    new = dataclasses.replace(delta_table(options), table=f"s3://{backup}/tables/new")
    launcher = Launcher(tmp_path / "restores", partial(restore_from, place))
    for target in (options, dataclasses.replace(options, sinks=(new,))):
        assert launcher.run(target).exit_code == 0
        assert ids(target) == before
        assert run_once(target).exit_code == 0
        assert ids(target) == remote.ids
    dispose_savepoint(open_pipeline(options), place, storage_options=storage_options)
    assert list(open_storage(place, storage_options).list("")) == []
    assert list_savepoints(open_pipeline(options), storage_options) == []


def test_a_journal_lies_in_an_object_store_and_its_table_on_disk(
    bucket: str,
    storage_options: dict[str, str],
    options: PipelineOptions,
    remote: RemoteInput,
    tmp_path: Path,
) -> None:
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    journal = journal_in(Home(f"s3://{bucket}/home", storage_options))
    options = dataclasses.replace(options, sinks=(table,), journal=journal)
    for number in (1, 2):
        remote.add(f"a{number}.json", 3)
        assert run_once(options).exit_code == 0
    (tmp_path / "lake").rename(tmp_path / "away")
    (tmp_path / "lake").touch()
    remote.add("a3.json", 3)
    assert run_once(options).exit_code == 0
    (tmp_path / "lake").unlink()
    (tmp_path / "away").rename(tmp_path / "lake")
    assert run_once(options).exit_code == 0
    assert table_ids(tmp_path / "lake") == remote.ids
    assert DeltaTable(options.home.root, storage_options=storage_options).to_pyarrow_table().num_rows == 0


def test_a_table_in_a_bucket_is_a_source(
    remote: RemoteInput, options: PipelineOptions, bucket: str, storage_options: dict[str, str]
) -> None:
    source = DeltaSourceOptions("table", options.home.root, storage_options=storage_options)
    sink = DeltaSinkOptions("copy", f"s3://{bucket}/tables/copy", storage_options=storage_options)
    copy = dataclasses.replace(options, name="copy", sources=(source,), sinks=(sink,))
    for number in range(2):
        for part in range(3):
            remote.add(f"{number}-{part}.json", 5)
        assert run_once(options).exit_code == 0
        run = run_once(copy)
        assert run.exit_code == 0, run.result.error
        assert ids(copy) == ids(options) == remote.ids
