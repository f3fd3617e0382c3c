"""Store and tiers while hosts, disks and networks fail: the way back is found, nothing is lost, nothing doubled."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.errors import StoreUnsafeError
from firnline.history.checkpoints import load_checkpoints
from firnline.history.status import load_status
from firnline.options import CheckpointOptions, LocalTierOptions, PipelineOptions, RemoteTierOptions, StoreOptions
from firnline.run.observer import EpochFacts
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.log import DeltaLog
from firnline.storage import LocalStorage, open_storage
from firnline.stores import open_store
from firnline.stores.record import CheckpointRecord
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.committers import commit_table
from tests.support.damage import break_info, commits_of, flips, ledger_files
from tests.support.pipelines import MakeOptions, Recorder, delta_table, file_source, run_once
from tests.support.processes import KILLED, Launcher, free_port
from tests.support.s3 import running_s3, s3_options
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

SIDES = ("before", "after")
POINTS = [f"tier.{tier}.{side}" for tier in ("local", "remote") for side in SIDES]


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """Four epochs to be made; a store and both tiers, written at every epoch."""
    for number in range(4):
        sample.add(f"a{number}.json", 5)
    made = make_options(max_files=1)
    return replace(
        made,
        checkpoint=CheckpointOptions(
            rollback_window=1,
            store=StoreOptions(type="file", path=str(tmp_path / "store")),
            local=LocalTierOptions(str(tmp_path / "local"), interval_ms=0),
            remote=RemoteTierOptions(str(tmp_path / "remote"), interval_ms=0),
        ),
    )


def with_checkpoint(options: PipelineOptions, **changes: Any) -> PipelineOptions:
    return replace(options, checkpoint=replace(options.checkpoint, **changes))


def table_of(options: PipelineOptions) -> Path:
    return Path(options.sinks[0].location)


def local_of(options: PipelineOptions) -> Path:
    assert options.checkpoint.local is not None
    return Path(options.checkpoint.local.path)


def remote_of(options: PipelineOptions) -> Path:
    assert options.checkpoint.remote is not None
    return Path(options.checkpoint.remote.uri)


def store_of(options: PipelineOptions) -> Path:
    assert options.checkpoint.store is not None
    return Path(options.checkpoint.store.path)


def local_file(options: PipelineOptions) -> Path:
    return max((local_of(options) / options.name / "checkpoint").glob("*.json"))


def stored(place: StoreOptions, name: str = "demo") -> list[int]:
    """Epochs of the versions in a store, oldest first."""
    store = open_store(place)
    versions = [store.get(name, CheckpointRecord, version=v.version) for v in store.list_versions(name, limit=1000)]
    return [v.epoch for v in reversed(versions) if v is not None]


def in_store(options: PipelineOptions) -> list[int]:
    assert options.checkpoint.store is not None
    return stored(options.checkpoint.store)


def in_local(options: PipelineOptions) -> list[int]:
    return stored(StoreOptions(type="file", path=str(local_of(options))))


def in_remote(options: PipelineOptions) -> list[int]:
    return stored(StoreOptions(type="object", uri=str(remote_of(options))))


def start(options: PipelineOptions, error_code: str = "") -> str:
    """Run once; returns where the checkpoint was read."""
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (int(bool(error_code)), error_code), run.result
    (path,) = {held.path for held in run.told.starts}
    return path


def go_on(options: PipelineOptions, sample: SampleInput, path: str) -> None:
    """A new file arrives: the run recovers the expected way, and everything is there once."""
    sample.add(f"z{len(sample.ids):04d}.json", 3)
    assert start(options) == path
    check(options, sample)


def check(options: PipelineOptions, sample: SampleInput) -> None:
    assert table_ids(table_of(options)) == sample.ids


def refuse(options: PipelineOptions, code: str, exit_code: int = 1) -> str:
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (exit_code, code), run.result
    assert run.result.error is not None
    assert run.result.error.hint
    return run.result.error.message


# -- the ways back ------------------------------------------------------------------------------------


def test_first_start_is_fresh_and_says_so(
    options: PipelineOptions, sample: SampleInput, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert start(options) == "fresh"
    first = [r.levelno for r in caplog.records if "knows this pipeline" in r.message]
    assert first == [logging.INFO]  # a first start is no reason to warn
    check(options, sample)
    assert in_store(options) == [1, 2, 3, 4]
    assert in_local(options)[-1] == 4
    assert in_remote(options)[-1] == 4


def test_a_normal_restart_is_local(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    go_on(options, sample, "local")


def test_a_lost_host_is_replaced_from_the_remote_tier(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    shutil.rmtree(local_of(options))
    go_on(options, sample, "remote")
    assert in_local(options)[-1] == 5


def test_the_log_knows_when_both_tiers_are_gone(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    shutil.rmtree(local_of(options))
    shutil.rmtree(remote_of(options))
    go_on(options, sample, "sink")
    assert (in_local(options)[-1], in_remote(options)[-1]) == (5, 5)


def test_a_run_that_has_nothing_to_do_brings_the_tiers_level(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    before = DeltaTable(str(table_of(options))).version()
    shutil.rmtree(local_of(options))
    shutil.rmtree(remote_of(options))
    shutil.rmtree(store_of(options))
    assert start(options) == "sink"
    assert in_store(options) == [1, 2, 3, 4]
    assert (in_local(options), in_remote(options)) == ([4], [4])
    assert DeltaTable(str(table_of(options))).version() == before  # without a claim


def test_status_and_checkpoints_tell_the_way(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    shutil.rmtree(local_of(options))
    go_on(options, sample, "remote")
    status = load_status(open_pipeline(options))
    assert status.recovery_path == "remote"
    assert [(c["path"], c["epoch"], c["epochs_behind"], c["problem"]) for c in status.copies] == [
        ("store", 5, 0, None),
        ("local", 5, 0, None),
        ("remote", 5, 0, None),
    ]
    rows = load_checkpoints(open_pipeline(options), 10).checkpoints
    assert {row["epoch"]: row["path"] for row in rows} == {5: None, 4: "remote", 3: None, 2: None, 1: None}


def test_what_was_recorded_tells_how_the_epoch_went(options: PipelineOptions) -> None:
    start(options)
    assert options.checkpoint.store is not None
    found = open_store(options.checkpoint.store).get("demo", CheckpointRecord)
    assert found is not None
    assert set(found.durations_ms) == {"plan", "run", "stage", "commit"}
    told = found.sinks["delta"]
    assert (told["rows"], told["attempt"]) == (5, found.checkpoint.attempt)
    assert told["version"] == DeltaTable(str(table_of(options))).version()
    assert found.checkpoint == open_pipeline(options).load().checkpoint


# -- copies that do not count -------------------------------------------------------------------------


def test_a_stale_local_copy_is_passed_over(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    start(options)
    shutil.copytree(local_of(options), tmp_path / "old")
    go_on(options, sample, "local")
    shutil.rmtree(local_of(options))
    shutil.move(tmp_path / "old", local_of(options))
    go_on(options, sample, "remote")
    assert in_local(options)[-1] == 6


def test_a_torn_local_copy_is_passed_over(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    path = local_file(options)
    for size in (0, 1, len(path.read_bytes()) // 2):
        path = local_file(options)
        path.write_bytes(path.read_bytes()[:size])
        go_on(options, sample, "remote")


def test_a_foreign_local_copy_is_passed_over(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    other_input = SampleInput(tmp_path / "in2")
    other_input.add("x.json", 2)
    other = replace(
        options,
        name="other",
        sources=(replace(file_source(options), path=str(other_input.folder)),),
        sinks=(replace(delta_table(options), table=str(tmp_path / "out2")),),
    )
    start(options)
    start(other)
    shutil.rmtree(local_of(options) / "demo")
    shutil.copytree(local_of(options) / "other", local_of(options) / "demo")
    go_on(options, sample, "remote")


def test_every_byte_of_the_local_copy(options: PipelineOptions) -> None:
    """The right checkpoint is found whatever is damaged; a damaged copy is never it."""
    start(options)
    true = open_pipeline(options).load()
    assert true.path == "local"
    path = local_file(options)
    paths = set()
    for at, damaged in flips(path.read_bytes(), step=7):
        path.write_bytes(damaged)
        found = open_pipeline(options).load()
        paths.add(found.path)
        assert (found.checkpoint, found.entry) == (true.checkpoint, true.entry), at
    assert paths == {"remote"}


def test_a_tier_rescues_what_the_table_lost(options: PipelineOptions, sample: SampleInput) -> None:
    """Ledger entry and commitInfo of the newest epoch are both damaged, and one tier holds newer versions besides."""
    start(options)
    ledger_files(table_of(options), options.name)[-1].write_bytes(b"{}")
    break_info(commits_of(table_of(options), options.name)[-1])
    assert refuse(with_checkpoint(options, local=None, remote=None, store=None), "checkpoint-lost")
    shutil.rmtree(local_of(options))
    sample.add("z.json", 3)
    assert start(options, "ledger-hole") == "remote"  # no tier has the entry's list of files
    check(options, sample)


# -- traces of more than the sink knows ---------------------------------------------------------------


def lose_table(options: PipelineOptions) -> None:
    shutil.rmtree(table_of(options))


@pytest.mark.parametrize("kept", ["store", "local", "remote"])
def test_a_lost_table_is_not_started_over(options: PipelineOptions, kept: str) -> None:
    start(options)
    lose_table(options)
    places = {"store": store_of(options), "local": local_of(options), "remote": remote_of(options)}
    for name, folder in places.items():
        if name != kept:
            shutil.rmtree(folder)
    message = refuse(options, "store-ahead")
    assert str(places[kept]) in message
    assert str(table_of(options)) in message
    assert "epoch 4" in message
    assert not (table_of(options) / "_delta_log").exists()


def test_traces_without_an_intact_checkpoint_are_refused(options: PipelineOptions) -> None:
    start(options)
    lose_table(options)
    for folder in (store_of(options), remote_of(options)):
        shutil.rmtree(folder)
    for path in (local_of(options) / "demo" / "checkpoint").glob("*.json"):
        path.write_bytes(b"")
    assert "traces" in refuse(options, "store-ahead")


def test_a_table_that_was_put_back_is_refused_by_both_epochs(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    backup = table_of(options).with_name("backup")
    shutil.copytree(table_of(options), backup)
    go_on(options, sample, "local")
    shutil.rmtree(table_of(options))
    shutil.move(backup, table_of(options))
    message = refuse(options, "store-ahead")
    assert "epoch 5" in message
    assert "epoch 4" in message


@pytest.mark.parametrize("starts_between", [0, 1])
def test_a_machine_that_was_put_back_is_refused_by_the_remote_tier(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, starts_between: int
) -> None:
    """Table and local tier agree; only the remote tier knows of a later epoch, which must not be made again."""
    options = with_checkpoint(options, store=None)
    start(options)
    for folder in (table_of(options), local_of(options)):
        shutil.copytree(folder, tmp_path / f"{folder.name}.old")
    go_on(options, sample, "local")
    for folder in (table_of(options), local_of(options)):
        shutil.rmtree(folder)
        shutil.move(tmp_path / f"{folder.name}.old", folder)
    for _ in range(1 + starts_between):
        message = refuse(options, "store-ahead")
        assert str(remote_of(options)) in message
        assert "holds epoch 5" in message
        assert open_pipeline(options).load().epoch == 4
    assert in_remote(options)[-1] == 5


@pytest.mark.parametrize("unsafe", ["store", "local", "remote"])
@pytest.mark.parametrize("exists", [True, False])
def test_an_unsafe_place_is_refused_at_the_start(
    options: PipelineOptions, monkeypatch: pytest.MonkeyPatch, unsafe: str, exists: bool
) -> None:
    places = {"store": store_of(options), "local": local_of(options), "remote": remote_of(options)}
    if exists:
        places[unsafe].mkdir()

    def prove(storage: LocalStorage, *_: object, **__: object) -> None:
        if storage.root.startswith(str(places[unsafe])):
            raise StoreUnsafeError(f"{storage.root} replaces what exists")

    for module in ("file", "objects"):
        monkeypatch.setattr(f"firnline.stores.{module}.prove_put_if_absent", prove)
    assert str(places[unsafe]) in refuse(options, "store-unsafe")
    assert not (table_of(options) / "_delta_log").exists()


def test_short_runs_prune_too(options: PipelineOptions, sample: SampleInput) -> None:
    assert options.checkpoint.store is not None
    options = with_checkpoint(options, store=replace(options.checkpoint.store, keep_versions=3))
    start(options)
    for number in range(6):
        sample.add(f"n{number}.json", 1)
        start(options)
    assert len(in_store(options)) <= 5
    assert in_store(options)[-1] == 10


def test_deleting_the_copies_starts_over(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    lose_table(options)
    for folder in (store_of(options), local_of(options), remote_of(options)):
        shutil.rmtree(folder)
    assert start(options) == "fresh"
    check(options, sample)


# -- what cannot be reached ---------------------------------------------------------------------------


class Away(LocalStorage):
    """A storage that is gone while its switch says so."""

    below = ""
    switch: Path

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "put", "put_new", "delete", "list", "stat"):
            cls = type(self)
            root = object.__getattribute__(self, "root")
            if cls.below and root.startswith(cls.below) and cls.switch.exists():
                raise OSError("the network is away")
        return object.__getattribute__(self, name)


@pytest.fixture
def remote_away(options: PipelineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: while it exists, the remote tier cannot be reached."""
    switch = tmp_path / "away"
    monkeypatch.setattr(Away, "below", str(remote_of(options)))
    monkeypatch.setattr(Away, "switch", switch, raising=False)
    monkeypatch.setattr("firnline.storage.LocalStorage", Away)
    remote_of(options).mkdir(exist_ok=True)
    return switch


def test_a_first_start_needs_every_tier(options: PipelineOptions, sample: SampleInput, remote_away: Path) -> None:
    remote_away.touch()
    message = refuse(options, "sink", exit_code=3)
    assert str(remote_of(options)) in message
    assert not (table_of(options) / "_delta_log").exists()
    remote_away.unlink()
    assert start(options) == "fresh"
    check(options, sample)


def test_remote_away_at_a_later_start(options: PipelineOptions, sample: SampleInput, remote_away: Path) -> None:
    start(options)
    shutil.rmtree(local_of(options))
    remote_away.touch()
    go_on(options, sample, "sink")
    remote_away.unlink()
    assert in_remote(options)[-1] == 4
    assert start(options) == "local"
    assert in_remote(options)[-1] == 5


def test_remote_away_from_the_first_epoch_on(options: PipelineOptions, sample: SampleInput, remote_away: Path) -> None:
    """The pipeline goes on; what is told of the lag is true, and the next run brings the tier level."""
    start(options)
    for number in range(3):
        sample.add(f"m{number}.json", 2)
    remote_away.touch()
    run = run_once(options)
    assert run.exit_code == 0
    check(options, sample)
    assert run.told.lags
    assert run.told.lags[-1].epochs_behind >= 1
    assert "away" in run.told.lags[-1].reason
    status = load_status(open_pipeline(options))
    assert [c["problem"] for c in status.copies if c["path"] == "remote"] == ["the network is away"]
    remote_away.unlink()
    status = load_status(open_pipeline(options))
    (behind,) = (c for c in status.copies if c["path"] == "remote")
    assert behind["epochs_behind"] == 3
    assert behind["lag_seconds"] >= 0
    start(options)
    assert in_remote(options)[-1] == 7


class Switcher(Recorder):
    """Makes the remote tier go away after one epoch, and come back after another."""

    def __init__(self, switch: Path, away: int, back: int) -> None:
        super().__init__()
        self._switch, self._away, self._back = switch, away, back

    def committed(self, facts: EpochFacts) -> None:
        super().committed(facts)
        if facts.epoch == self._away:
            self._switch.touch()
        if facts.epoch == self._back:
            self._switch.unlink()


def test_remote_away_in_the_middle_of_a_run(options: PipelineOptions, sample: SampleInput, remote_away: Path) -> None:
    for number in range(8):
        sample.add(f"m{number}.json", 2)
    told = Switcher(remote_away, 2, 10)
    result = Runner(open_pipeline(options, once=True), LocalEngine(1), told, once=True).run()
    assert result.exit_code == 0
    check(options, sample)
    assert in_remote(options)[-1] == 12
    assert in_remote(options) == sorted(set(in_remote(options)))
    assert not told.troubles  # nobody but the tier's own thread noticed
    assert told.lags[-1].epochs_behind == 0


def floors(options: PipelineOptions) -> dict[int, int]:
    """The floor that each commit names, read from the log."""
    log = DeltaLog(open_storage(str(table_of(options))))
    found = {}
    for path in commits_of(table_of(options), options.name):
        commit = log.read(int(path.stem))
        assert commit is not None
        info: Json = commit.info(options.name)
        found[int(info["epoch"])] = int(info["checkpoint"]["floor"])
    return found


def test_the_floor_stays_below_the_remote_tier(
    options: PipelineOptions, sample: SampleInput, remote_away: Path
) -> None:
    start(options)
    remote_away.touch()
    reached = in_remote_when_away(options, remote_away)
    before = floors(options)
    for number in range(6):
        sample.add(f"m{number}.json", 2)
    start(options)
    assert [floors(options)[epoch] for epoch in range(5, 11)] == [before[4]] * 6
    assert before[4] <= reached
    remote_away.unlink()
    for number in range(6):
        sample.add(f"n{number}.json", 2)
    start(options)
    start(options)
    sample.add("o.json", 2)
    start(options)
    risen = floors(options)
    assert risen[17] > before[4]
    assert list(risen.values()) == sorted(risen.values())
    check(options, sample)


def in_remote_when_away(options: PipelineOptions, switch: Path) -> int:
    switch.unlink()
    found = in_remote(options)[-1]
    switch.touch()
    return found


def s3_settings(port: int) -> dict[str, str]:
    return {**s3_options(f"http://127.0.0.1:{port}"), "timeout": "2s", "connect_timeout": "1s"}


@pytest.mark.s3
def test_an_object_store_that_stops_and_comes_back(options: PipelineOptions, sample: SampleInput) -> None:
    port = free_port()
    bucket = "b" + os.urandom(6).hex()
    settings = s3_settings(port)
    options = with_checkpoint(options, remote=RemoteTierOptions(f"s3://{bucket}/tier", 0, settings))
    place = StoreOptions(type="object", uri=f"s3://{bucket}/tier", storage_options=settings)
    with running_s3(port) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
        assert start(options) == "fresh"
        assert stored(place)[-1] == 4
    go_on(options, sample, "local")  # while the server is down
    with running_s3(port):
        assert stored(place)[-1] == 4
        assert start(options) == "local"
        assert stored(place)[-1] == 5
        shutil.rmtree(local_of(options))
        go_on(options, sample, "remote")


@pytest.mark.s3
def test_an_object_store_that_stops_while_a_run_goes_on(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    port, bucket = free_port(), "b" + os.urandom(6).hex()
    settings = s3_settings(port)
    options = with_checkpoint(options, remote=RemoteTierOptions(f"s3://{bucket}/tier", 0, settings))
    place = StoreOptions(type="object", uri=f"s3://{bucket}/tier", storage_options=settings)
    with running_s3(port) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
        child = launcher.start(options, once=False)
        child.wait_for("committed epoch 4")
    sample.add("m1.json", 3)
    child.wait_for("committed epoch 5")
    sample.add("m2.json", 3)
    child.wait_for("committed epoch 6")
    child.wait_for("tier not written")
    with running_s3(port):
        child.signal(signal.SIGTERM)
        assert child.wait().exit_code == 0
        assert stored(place)[-1] == 6
    check(options, sample)


# -- the store ----------------------------------------------------------------------------------------


def test_a_store_that_lags_is_brought_level(options: PipelineOptions, sample: SampleInput) -> None:
    start(with_checkpoint(options, store=None))
    assert start(options) == "local"
    assert in_store(options) == [1, 2, 3, 4]
    go_on(options, sample, "local")
    assert in_store(options) == [1, 2, 3, 4, 5]


def test_a_damaged_newest_version_is_put_again(options: PipelineOptions, sample: SampleInput) -> None:
    start(options)
    newest = max((store_of(options) / "demo" / "checkpoint").glob("*.json"))
    newest.write_bytes(b"{}")
    assert start(options) == "local"
    assert in_store_intact(options) == [1, 2, 3, 4]
    go_on(options, sample, "local")


def test_a_store_that_is_no_store_any_more_does_not_stop_a_run(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is the truth: it is warned, and a store in its place is caught up by the next run."""
    path = tmp_path / "checkpoints.db"
    options = with_checkpoint(options, store=StoreOptions(type="sqlite", path=str(path)))
    start(options)
    for leftover in tmp_path.glob("checkpoints.db-*"):
        leftover.unlink()
    path.write_bytes(b"rotten" * 4096)
    with caplog.at_level(logging.WARNING):
        go_on(options, sample, "local")
    told = {"store not read", "epoch not recorded in the store; going on, trying again"}
    assert told <= {r.message for r in caplog.records}
    path.unlink()
    go_on(options, sample, "local")
    assert in_store(options) == [1, 2, 3, 4, 5, 6]


def in_store_intact(options: PipelineOptions) -> list[int]:
    files = sorted((store_of(options) / "demo" / "checkpoint").glob("*.json"))
    store = open_store(StoreOptions(type="file", path=str(store_of(options))))
    found = [store.get("demo", CheckpointRecord, version=int(f.stem)) for f in files if f.read_bytes() != b"{}"]
    return [record.epoch for record in found if record is not None]


def test_a_store_that_fails_once(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording is tried again; no epoch is missing from the store, none from the table."""
    from firnline.stores.file import FileStore

    original = FileStore.put_raw_versioned
    left = {"failures": 1}

    def shaky(self: FileStore, key: str, data: bytes, expected: int, note: str = "") -> int:
        if self.place == str(store_of(options)) and expected == 2 and left["failures"]:
            left["failures"] -= 1
            raise OSError("the store is away")
        return original(self, key, data, expected, note)

    monkeypatch.setattr(FileStore, "put_raw_versioned", shaky)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert run.told.troubles == []
    check(options, sample)
    assert in_store(options) == [1, 2, 3, 4]


def test_a_store_that_is_away_for_good_loses_nothing(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on; strictly, it ends with exit code 3 once nothing but recording is left to do."""
    from firnline.stores.file import FileStore

    original = FileStore.put_raw_versioned

    def away(self: FileStore, key: str, data: bytes, expected: int, note: str = "") -> int:
        if self.place == str(store_of(options)):
            raise OSError("the store is away")
        return original(self, key, data, expected, note)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put_raw_versioned", away)
        pipeline = open_pipeline(options, once=True, strict_store=True)
        result = Runner(pipeline, LocalEngine(1), once=True).run()
        assert result.exit_code == 3
        assert result.error is not None
        assert str(store_of(options)) in result.error.message
        sample.add("later.json", 3)
        assert run_once(options).exit_code == 0
        check(options, sample)
        copy = load_status(open_pipeline(options)).copies[0]
        assert (copy["path"], copy["epochs_behind"]) == ("store", 5)
        assert copy["problem"] == "5 behind; cannot be written: the store is away"
    assert start(options) in ("local", "remote", "sink")
    check(options, sample)
    assert in_store(options) == [1, 2, 3, 4, 5]


# -- kills --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *((point, 1) for point in (*POINTS, "epoch.record.before", "epoch.record.after")),
        # The background takes only the newest: a third write to the remote tier is not certain.
        *(
            (point, 3)
            for point in ("tier.local.before", "tier.local.after", "epoch.record.before", "epoch.record.after")
        ),
    ],
)
def test_killed_while_a_copy_is_made(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput, point: str, count: int
) -> None:
    assert launcher.run(options, f"{point}:{count}:kill").exit_code == KILLED
    launcher.run_until_done(options)
    check(options, sample)
    assert in_store(options) == [1, 2, 3, 4]
    assert in_local(options)[-1] == in_remote(options)[-1] == 4
    assert in_remote(options) == sorted(set(in_remote(options)))


@pytest.mark.parametrize("point", POINTS)
def test_broken_while_a_copy_is_made(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput, point: str
) -> None:
    """A tier that fails once holds up nobody, and is level in the end."""
    assert launcher.run(options, f"{point}:1:raise").exit_code == 0
    check(options, sample)
    assert in_local(options)[-1] == in_remote(options)[-1] == 4


@pytest.mark.parametrize("call", ["store.put", "storage.put"])
@pytest.mark.parametrize("count", range(1, 9))  # more are not certain: the background takes only the newest
def test_killed_inside_a_copy(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput, call: str, count: int
) -> None:
    """Between a version's file and its hint, in the store and in the tiers alike."""
    assert launcher.run(options, f"{call}.after:{count}:kill").exit_code == KILLED
    launcher.run_until_done(options)
    check(options, sample)
    assert in_store(options) == [1, 2, 3, 4]
    assert in_local(options)[-1] == in_remote(options)[-1] == 4


def test_killed_with_a_long_interval_recovers_from_the_sink(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    """Tiers that are written seldom are stale after a kill: passed over."""
    seldom = with_checkpoint(
        options,
        local=replace(options.checkpoint.local or LocalTierOptions(""), interval_ms=3_600_000),
        remote=replace(options.checkpoint.remote or RemoteTierOptions(""), interval_ms=3_600_000),
    )
    assert launcher.run(seldom, "epoch.commit.after:4:kill").exit_code == KILLED
    assert in_local(seldom) == [1]
    go_on(seldom, sample, "sink")
    assert in_local(seldom)[-1] == in_remote(seldom)[-1] == 5  # a clean stop writes what waits


def test_a_clean_stop_drains(launcher: Launcher, options: PipelineOptions, sample: SampleInput) -> None:
    seldom = with_checkpoint(
        options,
        local=replace(options.checkpoint.local or LocalTierOptions(""), interval_ms=3_600_000),
        remote=replace(options.checkpoint.remote or RemoteTierOptions(""), interval_ms=3_600_000),
    )
    child = launcher.start(seldom, once=False)
    child.wait_for("committed epoch 4")
    child.signal(signal.SIGTERM)
    assert child.wait().exit_code == 0
    check(seldom, sample)
    assert in_local(seldom)[-1] == in_remote(seldom)[-1] == 4


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_stood_still_does_not_overwrite_its_successors_copies(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput, point: str
) -> None:
    if point.startswith("tier.remote"):  # a process that stands still in a file store holds its lock: see there
        options = with_checkpoint(options, store=None, local=None)

    def newest() -> list[int]:
        places = [in_remote] if options.checkpoint.local is None else [in_store, in_local, in_remote]
        return [find(options)[-1] for find in places]

    zombie = launcher.start(options, f"{point}:1:stop", once=False)
    zombie.wait_until_stopped()
    sample.add("m1.json", 3)
    launcher.run_until_done(options)
    check(options, sample)
    before = newest()
    assert len(set(before)) == 1
    sample.add("m2.json", 3)  # something to commit, which the sink refuses
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().exit_code == 5
    assert newest() == before
    launcher.run_until_done(options)
    check(options, sample)


def test_a_checkpoint_that_is_asked_for_is_in_both_tiers(options: PipelineOptions) -> None:
    """Without it they would be written much later."""
    seldom = with_checkpoint(
        options,
        local=replace(options.checkpoint.local or LocalTierOptions(""), interval_ms=3_600_000),
        remote=replace(options.checkpoint.remote or RemoteTierOptions(""), interval_ms=3_600_000),
    )
    runner = Runner(open_pipeline(seldom), LocalEngine(1))
    running = threading.Thread(target=runner.run)
    running.start()
    try:
        taken = 0
        while taken <= 1:  # what the interval alone lets through
            watch = runner.checkpoint()
            assert watch.done.wait(60)
            taken = watch.answer["epoch"]
        assert min(in_local(seldom)[-1], in_remote(seldom)[-1]) >= taken
    finally:
        runner.stop()
        running.join(60)


# -- staged tables ------------------------------------------------------------------------------------


def staged(options: PipelineOptions) -> PipelineOptions:
    return replace(options, sinks=(replace(delta_table(options), mode="staged"),))


def test_a_staged_table_recovers_to_its_newest_unit(options: PipelineOptions, sample: SampleInput) -> None:
    """What is only staged may still be taken back: no store and no tier is told of it before it is committed."""
    options = staged(options)
    start(options)
    assert open_pipeline(options).load().epoch == 4
    assert in_store(options) == in_local(options) == []
    commit_table(table_of(options))
    start(options)
    assert in_store(options) == [1, 2, 3, 4]
    assert start(options) == "local"
    shutil.rmtree(local_of(options))
    sample.add("z1.json", 3)
    assert start(options) == "remote"
    assert open_pipeline(options).load().epoch == 5
    assert in_store(options) == [1, 2, 3, 4]


def test_units_that_were_discarded_do_not_stop_their_writer(options: PipelineOptions, sample: SampleInput) -> None:
    from firnline.sinks.delta.table import Table
    from firnline.sinks.staged.discard import discard

    options = staged(options)
    start(options)
    discard(Table(str(table_of(options)), {}), LocalStorage(str(table_of(options))), "demo", 3, "0" * 16)
    start(options)
    commit_table(table_of(options))
    start(options)
    check(options, sample)
    assert in_store(options) == [1, 2, 3, 4]


def test_units_that_vanished_are_made_again(options: PipelineOptions, sample: SampleInput) -> None:
    options = staged(options)
    start(options)
    for path in (table_of(options) / "_staging" / "pending").iterdir():
        path.unlink()
    start(options)
    commit_table(table_of(options))
    check(options, sample)


# -- several sinks ------------------------------------------------------------------------------------


def test_a_deciding_table_that_was_lost_is_not_started_over(options: PipelineOptions, tmp_path: Path) -> None:
    """Without a store or tier too: the further sink would never be given its epochs again."""
    further = replace(delta_table(options), name="further", table=str(tmp_path / "out2"))
    options = replace(options, sinks=(*options.sinks, further), checkpoint=CheckpointOptions())
    start(options)
    lose_table(options)
    assert "'further' holds epoch 4" in refuse(options, "store-ahead")


def test_looking_writes_nothing(options: PipelineOptions, tmp_path: Path) -> None:
    def everything() -> dict[str, int]:
        folders = (local_of(options), remote_of(options))
        return {str(p): p.stat().st_mtime_ns for folder in folders for p in [folder, *folder.rglob("*")] if p.exists()}

    assert open_pipeline(options).load().path == "fresh"
    assert everything() == {}
    start(options)
    before = everything()
    assert open_pipeline(options).load().path == "local"
    shutil.rmtree(local_of(options))
    assert open_pipeline(options).load().path == "remote"
    assert everything() == {name: at for name, at in before.items() if not name.startswith(str(local_of(options)))}
