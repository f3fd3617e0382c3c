"""The Delta log as a checkpoint store: what a table's commits hold, and that nothing can be written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from firnline.errors import DamagedError, StoreReadOnlyError
from firnline.options import PipelineOptions
from firnline.sinks.delta.view import DeltaLogStore
from firnline.storage import LocalStorage
from firnline.stores.record import CheckpointRecord
from firnline.testing.store_writers import sample_record
from firnline.testing.stores import ODD_KEYS
from tests.support.pipelines import run_once
from tests.support.samples import SampleInput


@pytest.fixture
def table(sample: SampleInput, make_options: Callable[..., PipelineOptions]) -> Path:
    """Four epochs of `demo`, with the claim of a second run in between."""
    options = make_options(max_files=1)
    for name in ("a1", "a2"):
        sample.add(f"{name}.json", 3)
    assert run_once(options).exit_code == 0
    for name in ("b1", "b2"):
        sample.add(f"{name}.json", 3)
    assert run_once(options).exit_code == 0
    return Path(options.sinks[0].table)


def view(table: Path, pipeline: str = "demo") -> DeltaLogStore:
    store = DeltaLogStore(LocalStorage(str(table)), pipeline)
    store.open()
    return store


def commits(table: Path) -> dict[int, dict[str, object]]:
    """What the log's own files say: version -> the facts of an epoch."""
    found = {}
    for path in sorted((table / "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            raw = json.loads(line).get("commitInfo", {}).get("firnline")
            info = json.loads(raw) if isinstance(raw, str) else raw
            if info and "checkpoint" in info:
                found[int(path.stem)] = info
    return found


def test_one_version_per_commit_with_a_checkpoint(table: Path) -> None:
    store = view(table)
    truth = commits(table)
    infos = store.list_versions("demo")
    assert len(truth) == 4
    assert [info.version for info in infos] == sorted(truth, reverse=True)
    assert [info.note for info in infos] == ["epoch 4", "epoch 3", "epoch 2", "epoch 1"]
    assert all(info.created_at.endswith("+00:00") for info in infos)
    for info in infos:
        record = store.get("demo", CheckpointRecord, version=info.version)
        assert record is not None
        assert (record.kind, record.checkpoint.to_json()) == ("epoch", truth[info.version]["checkpoint"])
        assert record.entry.to_json() == truth[info.version]["entry"]
        assert info.size_bytes == len(store.get_version_raw("demo", info.version) or b"")
    newest = store.get("demo", CheckpointRecord)
    assert newest is not None
    assert newest.epoch == 4
    assert store.latest_version("demo") == max(truth)
    assert [*store.list()] == [*store.list("de")] == ["demo"]
    assert [*store.list("x")] == []


def test_pages_and_what_is_not_there(table: Path) -> None:
    store = view(table)
    versions = [info.version for info in store.list_versions("demo")]
    assert [info.version for info in store.list_versions("demo", limit=2)] == versions[:2]
    assert [info.version for info in store.list_versions("demo", before=versions[1])] == versions[2:]
    assert [info.version for info in store.list_versions("demo", before=10**9, limit=1)] == versions[:1]
    assert not store.list_versions("demo", limit=0)
    for version in (-1, 99, max(set(range(versions[0])) - set(versions))):
        assert store.get_version_raw("demo", version) is None
    assert store.get_raw("demo/audit") is None
    other = view(table, "other")
    assert (other.latest_version("other"), other.get_raw("other"), [*other.list()]) == (0, None, [])


def test_a_cleaned_log_is_told_as_far_as_it_goes(table: Path) -> None:
    oldest = min(commits(table))
    (table / "_delta_log" / f"{oldest:020d}.json").unlink()
    store = view(table)
    assert [info.note for info in store.list_versions("demo")] == ["epoch 4", "epoch 3", "epoch 2"]


@pytest.mark.parametrize("pointer", ['{"version": 3}', '{"version": 99}', "garbage", '{"version": "x"}'])
def test_deltas_pointer_is_only_a_hint(table: Path, pointer: str) -> None:
    newest = max(commits(table))
    (table / "_delta_log" / "_last_checkpoint").write_text(pointer)
    assert view(table).latest_version("demo") == newest


def test_a_damaged_newest_is_told_with_the_last_intact(table: Path) -> None:
    versions = sorted(commits(table))
    path = table / "_delta_log" / f"{versions[-1]:020d}.json"
    whole = path.read_text()
    for broken in (
        whole.replace("last_committed_file", "last_committed_fool"),
        whole.replace('"commitInfo"', '"commit'),
    ):
        path.write_text(broken)
        with pytest.raises(DamagedError, match=f"newest intact version is {versions[-2]}"):
            view(table).get("demo", CheckpointRecord)
    path.write_text(whole)
    assert view(table).get("demo", CheckpointRecord) is not None


def test_nothing_can_be_written(table: Path) -> None:
    store = view(table)
    assert (store.writable, store.held_by, store.kind) == (False, "delta", "delta")
    before = sorted(p.name for p in table.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: store.put_raw("demo", b"x"),
        lambda: store.put_raw_versioned("demo", b"x", store.latest_version("demo")),
        lambda: store.put("demo", sample_record()),
        lambda: store.delete("demo"),
        lambda: store.prune("demo", 1),
        lambda: store.rollback("demo", 1),
    ]
    for call in calls:
        with pytest.raises(StoreReadOnlyError):
            call()
    assert sorted(p.name for p in table.rglob("*")) == before


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    store = view(tmp_path / "none")
    assert (store.get_raw("demo"), store.latest_version("demo"), [*store.list()]) == (None, 0, [])
    with pytest.raises(Exception, match="no key"):
        store.get_raw(ODD_KEYS[2])
