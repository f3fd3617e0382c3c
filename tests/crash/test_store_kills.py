"""Stores whose writer is killed at every fault point: what stands is whole, and the next put goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from firnline.errors import VersionConflictError
from firnline.faults import VARIABLE
from firnline.options import StoreOptions
from firnline.stores import open_store
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.testing.stores import sample_record
from tests.support.kills import kill_at_every_point
from tests.support.postgres import PostgresServer

pytestmark = [pytest.mark.crash, pytest.mark.postgres]

KINDS = ("file", "sqlite", "object", "postgres")
KEY = "orders"
# What a deletion and pruning do beside their own calls is done by the storage below them.
POINTS = {
    "open": ("store.put", "storage.put", "storage.publish", "storage.delete"),
    "put": ("store.put", "store.publish", "storage.put", "storage.publish"),
    "put_packed": ("store.put", "storage.put"),
    "delete": ("store.delete", "store.publish", "store.put", "store.prune", "storage.put", "storage.delete"),
    "prune": ("store.prune", "storage.put", "storage.delete"),
}


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], StoreOptions]:
    """Options of a new, empty store of a kind."""
    count = 0

    def new(kind: str) -> StoreOptions:
        nonlocal count
        count += 1
        folder = tmp_path / f"store-{count}"
        match kind:
            case "file":
                return StoreOptions(type="file", path=str(folder))
            case "sqlite":
                return StoreOptions(type="sqlite", path=f"{folder}.db")
            case "object":
                return StoreOptions(type="object", uri=str(folder))
        server: PostgresServer = request.getfixturevalue("started_postgres")
        server.clear()
        return StoreOptions(type="postgres", dsn=server.dsn)

    return new


def operate(operation: str, options: StoreOptions) -> None:
    with closing(open_store(options)) as store:
        match operation:
            case "put":
                store.put(KEY, sample_record(4), expected=3, note="four")
            case "put_packed":
                store.compress_above_bytes = 1
                store.put(KEY, sample_record(4), expected=3, note="four")
            case "delete":
                store.delete(KEY)
            case "prune":
                store.prune(KEY, 2)


def prepare(options: StoreOptions, operation: str) -> None:
    if operation == "open":
        return
    with closing(open_store(options)) as store:
        for epoch in (1, 2, 3):
            store.put(KEY, sample_record(epoch))
        store.put("other", sample_record(9))


def check_epochs(store: CheckpointStore, where: str) -> list[int]:
    """Every version that is told is there and whole; version n holds epoch n. Returns the versions."""
    versions = [info.version for info in store.list_versions(KEY)]
    for version in versions:
        assert store.get(KEY, CheckpointRecord, version=version) == sample_record(version), where
    newest = store.get(KEY, CheckpointRecord)
    assert newest == (sample_record(versions[0]) if versions else None), where
    assert (KEY in [*store.list()]) == bool(versions), where
    return versions


def check(operation: str, options: StoreOptions, where: str) -> None:
    with closing(open_store(options)) as store:
        if operation == "open":
            assert check_epochs(store, where) == []
            assert store.put(KEY, sample_record(1), expected=0) == 1
            return
        versions = check_epochs(store, where)
        assert store.get("other", CheckpointRecord) == sample_record(9), where
        if operation == "delete":
            check_deleted(store, versions, where)
        elif operation == "prune":
            assert versions in ([3, 2, 1], [3, 2]), where
            store.prune(KEY, 2)
            assert [info.version for info in store.list_versions(KEY)] == [3, 2], where
            assert store.put(KEY, sample_record(4), expected=3) == 4, where
        else:
            assert versions in ([3, 2, 1], [4, 3, 2, 1]), where
            store.compress_above_bytes = 1 if operation == "put_packed" else 1_000_000
            assert store.put(KEY, sample_record(4), expected=3, note="four") == 4, where  # the repeat
            with pytest.raises(VersionConflictError):
                store.put_raw_versioned(KEY, b"rival", 3)
            assert store.put(KEY, sample_record(5), expected=4) == 5, where
        versions = check_epochs(store, where)
        assert versions == [*range(versions[0], versions[-1] - 1, -1)], where


def check_deleted(store: CheckpointStore, versions: list[int], where: str) -> None:
    latest = store.latest_version(KEY)
    assert (versions, latest) in (([3, 2, 1], 3), ([], 4)), where
    assert store.delete(KEY) == bool(versions), where
    assert (store.latest_version(KEY), store.get_raw(KEY)) == (4, None), where
    assert [store.get_version_raw(KEY, n) for n in (1, 2, 3, 4)] == [None] * 4, where
    assert store.put(KEY, sample_record(5), expected=4) == 5, where


@pytest.mark.parametrize("operation", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_point(kind: str, operation: str, make: Callable[[str], StoreOptions]) -> None:
    def start_over() -> StoreOptions:
        options = make(kind)
        prepare(options, operation)
        return options

    points = {f"{call}.{side}" for call in POINTS[operation] for side in ("before", "after")}
    reached = kill_at_every_point(start_over, partial(operate, operation), partial(check, operation), points=points)
    assert len(points & reached.keys()) >= (0 if (kind, operation) == ("file", "open") else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_at_a_point_is_an_os_error(
    kind: str, make: Callable[[str], StoreOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the write nothing is there; after it the repeat finds what stands."""
    for nth, point in enumerate(("store.put.before", "store.put.after")):
        options = make(kind)
        prepare(options, "put")
        with closing(open_store(options)) as store:
            monkeypatch.setattr("firnline.faults._seen", {f"{point}": 0})
            monkeypatch.setenv(VARIABLE, f"{point}:1:raise")
            with pytest.raises(OSError, match="injected"):
                store.put(KEY, sample_record(4), expected=3)
            monkeypatch.delenv(VARIABLE)
            assert store.latest_version(KEY) == 3 + nth
            assert store.put(KEY, sample_record(4), expected=3) == 4
            assert store.latest_version(KEY) == 4
