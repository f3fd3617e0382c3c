"""Homes of state: repaired from the remote tier, cached from object stores, the same for every worker."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from firnline.errors import StateDamagedError
from firnline.state import home as module
from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.keys import locate
from firnline.state.lookup import scan
from firnline.state.manifest import SegmentRef
from firnline.state.merge import merge_segments
from firnline.state.segments import OPEN, open_segment, write_segment
from tests.support.damage import cuts, flips
from tests.support.s3 import new_bucket, s3_options

LAYOUT = Layout(pa.schema([("id", pa.int64())]), pa.schema([("n", pa.int64())]))


def write(home: StateHome, count: int) -> SegmentRef:
    keys = pa.table({"id": np.arange(count)})
    table = LAYOUT.table(locate(keys, 1, 8).slots, keys, pa.table({"n": np.arange(count)}))
    return write_segment(home.storage, "cp/shard_0/op", table, LAYOUT, operator="op", epoch=1)


def read(home: StateHome, ref: SegmentRef) -> list[int]:
    found = [table["id"].to_numpy() for table in scan([open_segment(home, ref)], (0, 8), LAYOUT)]
    return sorted(int(i) for i in np.concatenate(found))


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[StateHome, SegmentRef, bytes]:
    """A home with one run, and a copy of it in the remote tier."""
    OPEN.clear()
    remote = StateHome(str(tmp_path / "remote"))
    home = StateHome(str(tmp_path / "home"), fallback=remote)
    ref = write(home, 20)
    data = (Path(home.root) / ref.path).read_bytes()
    remote.storage.put(ref.path, data)
    return home, ref, data


def test_a_home_travels_as_json(tmp_path: Path) -> None:
    remote = StateHome("s3://bucket/state", {"AWS_SECRET_ACCESS_KEY": "secret"}, cache=str(tmp_path / "cache"))
    home = StateHome(str(tmp_path), fallback=remote)
    assert StateHome.from_json(json.loads(json.dumps(home.to_json()))) == home
    assert "secret" not in repr(home)


def test_a_damaged_file_is_repaired_from_the_remote_tier(
    tiers: tuple[StateHome, SegmentRef, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    home, ref, data = tiers
    path = Path(home.root) / ref.path
    damaged = [flipped for _, flipped in flips(data, step=len(data) // 5)] + [cut for _, cut in cuts(data, step=400)]
    for number, bad in enumerate(damaged):
        path.write_bytes(bad)
        os.utime(path, ns=(number, number))
        with caplog.at_level(logging.WARNING):
            assert read(home, ref) == list(range(20))
        assert path.read_bytes() == data
    assert [r.message for r in caplog.records] == ["state repaired from the remote tier"] * len(damaged)
    assert not list(path.parent.glob(".*"))


def test_a_mapping_of_a_damaged_file_is_not_used_after_a_repair_within_the_same_tick(
    tiers: tuple[StateHome, SegmentRef, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, ref, data = tiers
    path, tick, rename = Path(home.root) / ref.path, (10**18, 10**18), os.replace

    def rename_in_that_tick(source: str, target: str) -> None:
        os.utime(source, ns=tick)
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_in_that_tick)
    os.utime(path, ns=tick)
    for _, bad in flips(data, step=41):
        OPEN.clear()
        assert read(home, ref) == list(range(20))  # mapped, with this time
        path.write_bytes(bad)  # the same inode: what is mapped changes with it
        os.utime(path, ns=tick)
        assert read(home, ref) == list(range(20))
        assert path.read_bytes() == data


def test_a_missing_folder_is_repaired_too(tiers: tuple[StateHome, SegmentRef, bytes]) -> None:
    home, ref, data = tiers
    path = Path(home.root) / ref.path
    path.unlink()
    path.parent.rmdir()
    assert read(home, ref) == list(range(20))
    assert path.read_bytes() == data


def test_a_damaged_copy_repairs_nothing(tiers: tuple[StateHome, SegmentRef, bytes]) -> None:
    home, ref, data = tiers
    path = Path(home.root) / ref.path
    assert home.fallback is not None
    path.unlink()
    for bad in (data[:-1], bytes([data[0] ^ 1]) + data[1:], b""):
        home.fallback.storage.put(ref.path, bad)
        with pytest.raises(StateDamagedError, match="remote tier") as caught:
            open_segment(home, ref)
        assert ref.path in caught.value.message
        assert not list(path.parent.iterdir())
    home.fallback.storage.delete(ref.path)
    with pytest.raises(StateDamagedError, match="missing"):
        open_segment(home, ref)


def test_an_intact_file_never_asks_the_remote_tier(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path / "home"))
    ref = write(home, 5)
    unreachable = StateHome("s3://nowhere/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"})
    assert read(StateHome(home.root, fallback=unreachable), ref) == list(range(5))


# -- on an object store -----------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3: str, tmp_path: Path) -> StateHome:
    return StateHome(f"s3://{new_bucket(s3)}/home", s3_options(s3), cache=str(tmp_path / "cache"))


@pytest.mark.s3
def test_runs_on_an_object_store_are_fetched_once(bucket: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [write(bucket, 1000), write(bucket, 10)]
    assert bucket.storage.stat(refs[0].path).size_bytes == refs[0].size_bytes
    fetched: list[str] = []
    original = module._fetch

    def noting(home: StateHome, ref: SegmentRef, path: str) -> None:
        fetched.append(ref.path)
        original(home, ref, path)

    monkeypatch.setattr(module, "_fetch", noting)
    for _ in range(2):
        OPEN.clear()
        assert [len(read(bucket, ref)) for ref in refs] == [1000, 10]
    assert fetched == [ref.path for ref in refs]
    merged = merge_segments(bucket, refs, (0, 8), "cp/shard_0/m", operator="op", epoch=2, with_oldest=True)
    assert merged is not None
    assert len(read(bucket, merged)) == 1000


@pytest.mark.s3
def test_a_damaged_copy_in_the_cache_is_fetched_again(bucket: StateHome) -> None:
    ref = write(bucket, 10)
    read(bucket, ref)
    (cached,) = Path(bucket.cache).iterdir()
    data = cached.read_bytes()
    cached.write_bytes(data[:-1])
    assert read(bucket, ref) == list(range(10))
    assert cached.read_bytes() == data


@pytest.mark.s3
def test_an_object_that_is_damaged_or_gone_is_found_and_repaired(bucket: StateHome, tmp_path: Path) -> None:
    ref = write(bucket, 10)
    data = bucket.storage.get(ref.path)
    copy = StateHome(str(tmp_path / "copy"))
    copy.storage.put(ref.path, data)
    for damaged in (True, False):
        if damaged:
            bucket.storage.put(ref.path, data[:-1])
        else:
            bucket.storage.delete(ref.path)
        with pytest.raises(StateDamagedError, match=ref.path):
            read(bucket, ref)
        home = StateHome(bucket.root, bucket.storage_options, fallback=copy, cache=bucket.cache)
        assert read(home, ref) == list(range(10))
        assert bucket.storage.get(ref.path) == data
        for cached in Path(bucket.cache).iterdir():
            cached.unlink()


@pytest.mark.s3
def test_the_cache_stays_within_its_bounds(bucket: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [write(bucket, 100) for _ in range(4)]
    monkeypatch.setattr(module, "CACHE_BYTES", int(2.5 * refs[0].size_bytes))
    for ref in (refs[0], refs[1], refs[0], refs[2]):
        read(bucket, ref)
    names = {Path(module._cache_path(bucket, ref)).name for ref in (refs[0], refs[2])}
    assert {path.name for path in Path(bucket.cache).iterdir()} == names
