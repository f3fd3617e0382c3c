"""What a run records, and what it makes of copies that do not agree with the sink."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import firnline.stores as stores
from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.clock import SystemClock
from firnline.errors import DamagedError, SinkError, StoreAheadError, StoreUnsafeError
from firnline.options import LocalTierOptions, RemoteTierOptions, StoreOptions
from firnline.run import copies
from firnline.run import recorder as recording
from firnline.run.recorder import Recorder
from firnline.sinks.base import Head
from firnline.storage import LocalStorage
from firnline.stores.base import CheckpointStore
from firnline.stores.memory import MemoryStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.replicator import TierWriter
from firnline.types import EntryRef, Receipt
from tests.support.pipelines import pipeline_options

NOT_RECORDED = "epoch not recorded in the store; going on, trying again"


class Shaky(MemoryStore):
    """A store in memory that may be away, or have rivals."""

    away = False

    def latest_version(self, key: str) -> int:
        if self.away:
            raise OSError("away")
        return super().latest_version(key)

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        if self.away:
            raise OSError("away")
        return super().put_raw_versioned(key, data, expected, note)


class World:
    """A ledger with epochs, what the sink holds of them, and the store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.ledger = Ledger(LocalStorage(str(folder)), "demo")
        self.store = Shaky()
        self.tiers = {"local": Shaky(), "remote": Shaky()}
        self.made: dict[int, tuple[LedgerEntry, EntryRef]] = {}
        self.tip: EntryRef | None = None
        monkeypatch.setattr(stores, "open_store", self.open_store)

    def open_store(self, options: StoreOptions, *, held_by: str = "", read_only: bool = False) -> CheckpointStore:
        assert held_by == "delta"
        if options.type == "object":
            return self._open(self.tiers["remote"])
        return self._open(self.tiers["local"] if options.path.endswith("near") else self.store)

    def _open(self, store: Shaky) -> Shaky:
        if store.away:
            raise OSError("away")
        return store

    def recorder(self, *, tiers: bool = False, keep_versions: int = 10_000, strict: bool = False) -> Recorder:
        settings: dict[str, Any] = {"store": StoreOptions(type="memory", keep_versions=keep_versions)}
        if tiers:
            near = self.folder / "near"
            near.mkdir(exist_ok=True)
            settings |= {"local": LocalTierOptions(str(near), 0), "remote": RemoteTierOptions("s3://far/away", 0)}
        options = pipeline_options("/in", "/out", **settings)
        return Recorder(options, self.ledger, SystemClock(), "/out", strict_store=strict)

    def epochs(self, upto: int, generation: int = 1) -> Head:
        """Make epochs up to a number; what the sink holds then."""
        for epoch in range(max(self.made, default=0) + 1, upto + 1):
            self.make(epoch, generation)
        return self.held(upto, generation)

    def make(self, epoch: int, generation: int) -> None:
        checkpoint = Checkpoint(
            "demo",
            epoch,
            generation,
            "run",
            f"{generation}a{epoch}",
            "2026-01-01T00:00:00+00:00",
            {"files": {"n": epoch}},
        )
        before = self.made[epoch - 1][1] if epoch > 1 else None
        entry = LedgerEntry(checkpoint, before, {"files": []}, durations_ms={"plan": 1, "run": 2})
        self.made[epoch] = (entry, self.ledger.stage(entry))

    def held(self, epoch: int, generation: int) -> Head:
        entry, ref = self.made[epoch]
        return Head(True, epoch, generation, epoch, ref, entry.checkpoint)

    def record_of(self, epoch: int) -> CheckpointRecord:
        entry, ref = self.made[epoch]
        return CheckpointRecord(entry.checkpoint, ref)

    def stored(self, store: MemoryStore | None = None) -> list[int]:
        store = store or self.store
        versions = reversed(store.list_versions("demo", limit=5000))
        found = [store.get("demo", CheckpointRecord, version=v.version) for v in versions]
        return [v.epoch for v in found if v is not None]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def begin(recorder: Recorder, held: Head) -> int | None:
    recorder.read_copies()
    return recorder.begin(held)


NOTHING = Head(exists=False, version=-1)


# -- at the start -------------------------------------------------------------------------------------


def test_nothing_configured_records_nothing(world: World) -> None:
    recorder = Recorder(pipeline_options("/in", "/out"), world.ledger, SystemClock(), "/out")
    assert begin(recorder, world.epochs(3)) is None
    recorder.record(3, world.held(3, 1), {})
    assert recorder.remote_epoch is None
    assert recorder.flush()
    recorder.close(drain=True)
    assert world.stored() == []


def test_a_store_that_lags_is_brought_level_oldest_first(world: World) -> None:
    world.epochs(2)
    world.store.put("demo", world.record_of(1))
    world.store.put("demo", world.record_of(2))
    assert begin(world.recorder(), world.epochs(6)) == 6
    assert world.stored() == [1, 2, 3, 4, 5, 6]
    assert world.store.list_versions("demo")[0].note == "epoch 6, caught up"


def test_a_store_that_is_level_is_not_written(world: World) -> None:
    held = world.epochs(2)
    world.store.put("demo", world.record_of(2))
    assert begin(world.recorder(), held) == 2
    assert world.stored() == [2]


@pytest.mark.parametrize(("most", "keep"), [(5, 10_000), (1000, 5)])
def test_only_the_newest_epochs_are_brought(
    world: World, monkeypatch: pytest.MonkeyPatch, most: int, keep: int
) -> None:
    monkeypatch.setattr(recording, "CATCH_UP_EPOCHS", most)
    assert begin(world.recorder(keep_versions=keep), world.epochs(40)) == 40
    assert world.stored() == [36, 37, 38, 39, 40]


def test_a_hole_in_the_ledger_costs_the_epochs_before_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    held = world.epochs(6)
    (world.folder / world.ledger.folder / world.made[3][1].name).unlink()
    with caplog.at_level(logging.WARNING):
        assert begin(world.recorder(), held) == 6
    assert world.stored() == [4, 5, 6]
    assert any("hole" in r.message for r in caplog.records)


def test_a_tip_known_from_another_copy_than_its_entry_is_recorded(world: World) -> None:
    held = world.epochs(3)
    (world.folder / world.ledger.folder / world.made[3][1].name).unlink()
    assert begin(world.recorder(), held) == 3
    assert world.stored() == [3]


def test_a_store_ahead_is_refused_by_name(world: World) -> None:
    world.epochs(7)
    world.store.put("demo", world.record_of(7))
    with pytest.raises(StoreAheadError, match=r"memory holds epoch 7 .* /out holds epoch 5"):
        begin(world.recorder(), world.held(5, 2))


def test_a_staged_table_whose_units_were_discarded_goes_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.epochs(7)
    world.store.put("demo", world.record_of(7))
    with caplog.at_level(logging.WARNING):
        assert begin(world.recorder(), replace(world.held(5, 2), committed=5)) == 5
    assert world.stored() == [7, 5]
    assert any("rolled back" in r.message for r in caplog.records)


def test_a_staged_table_whose_units_vanished_is_refused(world: World) -> None:
    world.epochs(7)
    world.store.put("demo", world.record_of(7))
    with pytest.raises(StoreAheadError) as caught:
        begin(world.recorder(), replace(world.held(5, 1), committed=5))
    assert "--discard-from 6" in caught.value.hint


def test_another_epoch_of_the_same_number_counts_by_its_generation(world: World) -> None:
    world.epochs(4)
    world.store.put("demo", world.record_of(4))
    world.make(4, generation=3)
    assert begin(world.recorder(), world.held(4, 3)) == 4
    found = world.store.get("demo", CheckpointRecord)
    assert found is not None
    assert found.checkpoint.generation == 3
    world.make(4, generation=2)
    with pytest.raises(StoreAheadError, match="another one"):
        begin(world.recorder(), world.held(4, 2))


def test_a_damaged_newest_version_is_put_again(world: World) -> None:
    held = world.epochs(3)
    world.store.put("demo", world.record_of(3))
    world.store.put_raw("demo", b"{}")
    assert begin(world.recorder(), held) == 3
    assert world.store.get("demo", CheckpointRecord) is not None
    assert world.store.latest_version("demo") == 3


def test_a_sink_that_knows_nothing_and_traces_are_refused(world: World) -> None:
    begin(world.recorder(), NOTHING)
    world.store.put_raw("demo", b"torn")
    with pytest.raises(StoreAheadError, match="traces"):
        begin(world.recorder(), NOTHING)
    world.epochs(2)
    world.store.put("demo", world.record_of(2))
    with pytest.raises(StoreAheadError, match="epoch 2"):
        begin(world.recorder(), NOTHING)
    world.store.delete("demo")
    begin(world.recorder(), NOTHING)


def test_a_store_that_does_not_answer_does_not_hold_up_a_start(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    held = world.epochs(3)
    monkeypatch.setattr(copies, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(copies, "STORE_SECONDS", 0.05)
    monkeypatch.setattr(world.store, "latest_version", lambda key: int(answer.wait(60)) - 1)
    recorder = world.recorder()
    with caplog.at_level(logging.WARNING):
        assert begin(recorder, held) is None
    assert any("no answer" in str(vars(r).get("reason")) for r in caplog.records)
    later = world.epochs(5)
    for epoch in (4, 5):
        recorder.record(epoch, later, world.made)  # given up, and not waited for again
    lag = recorder.lags()[0]
    assert (lag.tier, lag.epochs_behind, lag.reason) == ("store", 5, "no answer for 0.05 s")
    answer.set()


@pytest.mark.parametrize("unsafe", ["store", "local", "remote"])
def test_an_unsafe_place_is_refused_at_the_start(world: World, monkeypatch: pytest.MonkeyPatch, unsafe: str) -> None:
    def open_store(options: StoreOptions, *, held_by: str = "", read_only: bool = False) -> CheckpointStore:
        found = world.open_store(options, held_by=held_by, read_only=read_only)
        if found is (world.store if unsafe == "store" else world.tiers[unsafe]) and not read_only:
            raise StoreUnsafeError("replaces what exists")
        return found

    monkeypatch.setattr(stores, "open_store", open_store)
    held = world.epochs(3)
    recorder = world.recorder(tiers=True)
    (world.folder / "near").rmdir()
    with pytest.raises(StoreUnsafeError):
        begin(recorder, held)


def test_an_unsafe_remote_tier_is_refused_although_the_local_one_fits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_store(options: StoreOptions, *, held_by: str = "", read_only: bool = False) -> CheckpointStore:
        if options.type == "object":
            raise StoreUnsafeError("replaces what exists")
        return world.open_store(options, held_by=held_by, read_only=read_only)

    monkeypatch.setattr(stores, "open_store", open_store)
    held = world.epochs(3)
    world.tiers["local"].put("demo", world.record_of(3))
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    with pytest.raises(StoreUnsafeError):
        recorder.before_claim(lambda: held)
    with pytest.raises(StoreUnsafeError):
        recorder.record(3, held, world.made)
    recorder.close(drain=False)


def test_a_damaged_head_does_not_refuse_a_run(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise DamagedError("the head is damaged")

    held = world.epochs(3)
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "latest_version", broken)
        assert begin(world.recorder(), held) == 3
        assert world.stored() == [3]
        patch.setattr(world.store, "put_raw", broken)
        recorder = world.recorder()
        with caplog.at_level(logging.WARNING):
            assert begin(recorder, held) is None
            recorder.record(4, world.epochs(4), world.made)
        assert [r.message for r in caplog.records if "not recorded" in r.message] == [NOT_RECORDED]
    recorder.catch_up(now=True)
    assert world.stored() == [3, 4]


@pytest.mark.parametrize("place", ["store", "local", "remote"])
def test_a_live_run_that_commits_after_the_sink_was_read_is_not_ahead(world: World, place: str) -> None:
    held = world.epochs(5)
    later = world.epochs(6)
    (world.store if place == "store" else world.tiers[place]).put("demo", world.record_of(6))
    recorder = world.recorder(tiers=True)
    recorder.read_copies()
    assert recorder.confirm(held, lambda: later) == later
    assert recorder.begin(later) == 6
    recorder.close(drain=True)
    assert [world.stored(tier)[-1] for tier in world.tiers.values()] == [6, 6]


def test_a_live_first_run_is_no_lost_table(world: World) -> None:
    later = world.epochs(1)
    world.tiers["remote"].put("demo", world.record_of(1))
    recorder = world.recorder(tiers=True)
    recorder.read_copies()
    with pytest.raises(StoreAheadError, match="knows nothing"):
        recorder.confirm(NOTHING, lambda: NOTHING)
    assert recorder.confirm(NOTHING, lambda: later) == later


@pytest.mark.parametrize("away", ["store", "local", "remote"])
def test_a_first_start_needs_every_answer(world: World, away: str) -> None:
    (world.store if away == "store" else world.tiers[away]).away = True
    with pytest.raises(SinkError, match="cannot be asked") as caught:
        begin(world.recorder(tiers=True), NOTHING)
    assert (caught.value.retryable, caught.value.exit_code) == (True, 3)


# -- after the commit ---------------------------------------------------------------------------------


def test_every_settled_epoch_gets_its_version_with_what_is_known_of_it(world: World) -> None:
    recorder = world.recorder()
    begin(recorder, world.epochs(2))
    held = world.epochs(5)
    recorder.note_receipt(Receipt("delta", 5, 1, "run", "1a5", "c", 17, 100, 2000))
    recorder.note_durations(5, {"stage": 3, "commit": 4})
    recorder.record(5, held, {5: world.made[5]})
    assert world.stored() == [1, 2, 3, 4, 5]
    found = world.store.get("demo", CheckpointRecord)
    assert found is not None
    assert found.durations_ms == {"plan": 1, "run": 2, "stage": 3, "commit": 4}
    told = {"version": 17, "rows": 100, "size_bytes": 2000, "run": "run", "attempt": "1a5"}
    assert found.sinks == {"delta": told}
    assert world.store.list_versions("demo")[0].note == ""


def test_recording_is_repeatable(world: World) -> None:
    recorder = world.recorder()
    held = world.epochs(2)
    begin(recorder, held)
    for _ in range(3):
        recorder.record(2, held, world.made)
    assert world.stored() == [1, 2]


def test_what_is_decided_but_not_settled_is_not_recorded_twice(world: World) -> None:
    recorder = world.recorder()
    held = world.epochs(5)
    begin(recorder, held)
    recorder.record(4, held, world.made)
    world.store.away = True
    recorder.record(4, held, world.made)
    world.store.away = False
    recorder.record(5, held, world.made)
    assert world.stored() == [1, 2, 3, 4, 5]


def test_an_outage_stops_nobody_and_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    recorder = world.recorder()
    begin(recorder, world.epochs(1))
    world.store.away = True
    with caplog.at_level(logging.WARNING):
        for epoch in (2, 3, 4):
            recorder.record(epoch, world.epochs(epoch), {epoch: world.made[epoch]})
    assert [r.message for r in caplog.records] == [NOT_RECORDED]
    assert [(lag.epoch, lag.epochs_behind, lag.reason) for lag in recorder.lags()] == [(1, 3, "away")]
    world.store.away = False
    recorder.catch_up(now=True)
    assert [(lag.epoch, lag.epochs_behind, lag.reason) for lag in recorder.lags()] == [(4, 0, "")]
    recorder.record(5, world.epochs(5), {5: world.made[5]})
    assert world.stored() == [1, 2, 3, 4, 5]


def test_a_clean_stop_tries_the_store_once_more(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for is_back in (False, True):
        recorder = world.recorder()
        begin(recorder, world.epochs(1))
        world.store.away = True
        recorder.record(2, world.epochs(2), world.made)
        world.store.away = not is_back
        recorder.close(drain=True)
        world.store.away = False
        assert world.stored() == ([1, 2] if is_back else [1])
    assert [r.message for r in caplog.records].count("store is behind; the next run brings it in sync") == 1


def test_a_store_that_can_be_read_but_not_written_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_store(options: StoreOptions, *, held_by: str = "", read_only: bool = False) -> CheckpointStore:
        if not read_only:
            raise PermissionError("read-only file system")
        return world.open_store(options, held_by=held_by, read_only=read_only)

    monkeypatch.setattr(stores, "open_store", open_store)
    begin(world.recorder(), NOTHING)  # it surely holds nothing, so this is a first start
    recorder = world.recorder()
    assert begin(recorder, world.epochs(2)) is None
    assert [lag.reason for lag in recorder.lags()] == ["read-only file system"]
    world.epochs(7)
    world.store.put("demo", world.record_of(7))
    with pytest.raises(StoreAheadError):
        begin(world.recorder(), world.held(5, 2))


def test_strictly_an_outage_is_an_error_that_can_be_repeated(world: World) -> None:
    recorder = world.recorder(strict=True)
    begin(recorder, world.epochs(1))
    world.store.away = True
    held = world.epochs(3)
    for epoch in (2, 3):
        with pytest.raises(SinkError, match=f"epoch {epoch} is committed, but cannot be recorded in memory") as caught:
            recorder.record(epoch, held, world.made)
        assert caught.value.retryable
    world.store.away = False
    recorder.record(3, held, world.made)
    assert world.stored() == [1, 2, 3]


def test_a_store_that_is_away_at_the_start_is_brought_level_later(world: World) -> None:
    world.store.away = True
    recorder = world.recorder()
    held = world.epochs(3)
    assert begin(recorder, held) is None
    recorder.record(3, held, {})
    world.store.away = False
    recorder.catch_up(now=True)
    assert world.stored() == [1, 2, 3]


def test_a_newer_runs_record_is_left_to_the_fence(world: World, caplog: pytest.LogCaptureFixture) -> None:
    recorder = world.recorder()
    begin(recorder, world.epochs(2))
    world.make(3, generation=2)
    world.store.put("demo", world.record_of(3))
    world.make(3, generation=1)
    with caplog.at_level(logging.WARNING):
        recorder.record(3, world.held(3, 1), world.made)
        recorder.record(3, world.held(3, 1), world.made)
    found = world.store.get("demo", CheckpointRecord)
    assert found is not None
    assert found.checkpoint.generation == 2
    assert any("left as it is" in r.message for r in caplog.records)


def test_a_store_that_turns_out_to_be_ahead_stops_the_run(world: World) -> None:
    world.epochs(9)
    world.store.put("demo", world.record_of(9))
    world.store.away = True
    recorder = world.recorder()
    begin(recorder, world.held(4, 1))
    world.store.away = False
    with pytest.raises(StoreAheadError):
        recorder.record(5, world.held(5, 1), world.made)


def test_a_newer_run_that_is_met_after_an_outage_is_left_alone(world: World) -> None:
    world.store.away = True
    recorder = world.recorder()
    begin(recorder, world.epochs(2))
    world.store.away = False
    world.make(3, generation=2)
    world.store.put("demo", world.record_of(3))
    world.make(3, generation=1)
    recorder.record(3, world.held(3, 1), world.made)
    assert world.stored() == [3]


def test_old_versions_go_now_and_then(world: World) -> None:
    recorder = world.recorder(keep_versions=20)
    begin(recorder, world.epochs(1))
    due = []
    for epoch in range(2, 2 + copies.PRUNE_EVERY):
        recorder.record(epoch, world.epochs(epoch), world.made)
        due.append(recorder.prune_due())
    assert due.count(True) == 1
    recorder.prune()
    assert len(world.stored()) == 20


def test_runs_of_one_epoch_each_prune_too(world: World) -> None:
    for epoch in range(1, 14):
        recorder = world.recorder(keep_versions=5)
        begin(recorder, world.epochs(epoch))
        recorder.close(drain=True)
    assert world.stored() == list(range(6, 14))  # ten were cut to five, and three followed


@pytest.mark.parametrize("error", [OSError("away"), DamagedError("the list of versions")])
def test_pruning_never_ends_a_run(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(world.store, "prune", fail)
    with caplog.at_level(logging.WARNING):
        world.recorder().prune()
    assert [r.message for r in caplog.records] == ["old versions not deleted"]


# -- tiers --------------------------------------------------------------------------------------------


def test_tiers_are_written_although_the_store_is_away(world: World) -> None:
    recorder = world.recorder(tiers=True)
    begin(recorder, world.epochs(1))
    world.store.away = True
    recorder.record(2, world.epochs(2), world.made)
    assert recorder.flush()
    assert [world.stored(tier)[-1] for tier in world.tiers.values()] == [2, 2]
    recorder.close(drain=True)


def test_the_remote_epoch_is_what_is_there_and_not_what_is_on_its_way(world: World) -> None:
    recorder = world.recorder(tiers=True)
    begin(recorder, world.epochs(3))
    assert recorder.flush()
    assert recorder.remote_epoch == 3
    world.tiers["remote"].away = True
    recorder.record(4, world.epochs(4), world.made)
    assert not recorder.flush()
    assert recorder.remote_epoch == 3
    lag = recorder.replication()
    assert lag is not None
    assert (lag.epochs_behind, lag.reason) == (1, "away")
    world.tiers["remote"].away = False
    assert recorder.flush()
    assert recorder.remote_epoch == 4
    recorder.close(drain=False)


def test_the_remote_tier_counts_for_nothing_before_it_has_answered(world: World) -> None:
    world.tiers["remote"].away = True
    world.tiers["local"].put("demo", CheckpointRecord(*_tip(world, 3)))
    recorder = world.recorder(tiers=True)
    begin(recorder, world.held(3, 1))
    assert recorder.remote_epoch == 0
    recorder.close(drain=False)


def _tip(world: World, epoch: int) -> tuple[Checkpoint, EntryRef]:
    held = world.epochs(epoch)
    assert held.checkpoint is not None
    assert held.entry is not None
    return held.checkpoint, held.entry


def test_a_clean_stop_says_what_it_waits_for_and_gives_up_in_the_end(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = world.recorder(tiers=True)
    begin(recorder, world.epochs(1))
    assert recorder.flush()
    world.tiers["remote"].away = True
    recorder.record(2, world.epochs(2), world.made)
    told: list[str] = []
    with caplog.at_level(logging.WARNING):
        recorder.close(drain=True, on_drain=lambda lag: told.append(f"{lag.tier} {lag.location} {lag.epochs_behind}"))
    assert told == ["remote s3://far/away 1"]
    assert any("tier is behind" in r.message for r in caplog.records)


@pytest.mark.parametrize("tier", ["local", "remote"])
def test_a_tier_ahead_of_the_sink_is_refused(world: World, tier: str) -> None:
    world.epochs(7)
    world.tiers[tier].put("demo", world.record_of(7))
    with pytest.raises(StoreAheadError, match=f"the {tier} tier"):
        begin(world.recorder(tiers=True), world.held(5, 1))


def test_a_remote_tier_ahead_is_found_although_the_local_one_fits(world: World) -> None:
    held = world.epochs(5)
    world.tiers["local"].put("demo", world.record_of(5))
    world.epochs(9)
    world.tiers["remote"].put("demo", world.record_of(9))
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    with pytest.raises(StoreAheadError, match=r"the remote tier .* holds epoch 9 .* /out holds epoch 5") as caught:
        recorder.before_claim(lambda: held)
    assert not caught.value.retryable
    recorder.close(drain=False)


def test_a_live_run_that_replicates_before_the_claim_is_not_ahead(world: World) -> None:
    held = world.epochs(5)
    world.tiers["local"].put("demo", world.record_of(5))
    later = world.epochs(6)
    world.tiers["remote"].put("demo", world.record_of(6))
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    recorder.before_claim(lambda: later)
    recorder.claimed(replace(later, generation=2), "next")
    world.make(7, generation=2)
    recorder.record(7, world.held(7, 2), world.made)
    assert recorder.flush()
    assert world.stored(world.tiers["remote"]) == [6, 7]
    recorder.close(drain=False)


@pytest.mark.parametrize("committed", [None, 3], ids=["direct", "staged"])
@pytest.mark.parametrize("theirs", [1, 2])
def test_a_remote_tier_that_turns_out_to_be_ahead_ends_the_run(
    world: World, theirs: int, committed: int | None
) -> None:
    """Whether the lost run's generation was lower than this one's, or is given out a second time."""
    held = replace(world.epochs(3), committed=committed)
    world.tiers["local"].put("demo", world.record_of(3))
    world.make(4, generation=theirs)
    world.tiers["remote"].put("demo", world.record_of(4))
    world.tiers["remote"].away = True
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    recorder.before_claim(lambda: held)
    recorder.claimed(replace(held, generation=2), "next")
    world.made[4] = _made_by(world, 4, 2, "next")
    recorder.record(4, world.held(4, 2), world.made)
    world.tiers["remote"].away = False  # not earlier: the tier's writer retries by itself, and would find it first
    assert not recorder.flush()
    with pytest.raises(StoreAheadError, match="holds epoch 4"):
        recorder.record(4, world.held(4, 2), world.made)
    assert world.stored(world.tiers["remote"]) == [4]  # what it told of is still there
    assert recorder.remote_epoch == 0
    recorder.close(drain=False)


def _made_by(world: World, epoch: int, generation: int, run: str) -> tuple[LedgerEntry, EntryRef]:
    world.make(epoch, generation)
    entry = world.made[epoch][0]
    entry = replace(entry, checkpoint=replace(entry.checkpoint, run=run, attempt=f"{run}{epoch}"))
    return entry, world.ledger.stage(entry)


def test_what_this_run_recorded_itself_is_not_ahead(world: World) -> None:
    held = world.epochs(3)
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    recorder.before_claim(lambda: held)
    recorder.claimed(replace(held, generation=2), "next")
    for epoch in (4, 5):
        world.made[epoch] = _made_by(world, epoch, 2, "next")
        recorder.record(epoch, world.held(epoch, 2), world.made)
        assert recorder.flush()
    recorder.record(4, world.held(5, 2), world.made)  # repeated late
    assert recorder.flush()
    assert (world.stored()[-1], world.stored(world.tiers["remote"])[-1], recorder.remote_epoch) == (5, 5, 5)
    recorder.close(drain=False)


def test_a_newer_run_in_the_remote_tier_leaves_the_lag(world: World) -> None:
    held = world.epochs(3)
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    assert recorder.flush()
    recorder.claimed(replace(held, generation=2), "next")
    world.make(4, generation=3)
    world.tiers["remote"].put("demo", world.record_of(4))
    world.made[4] = _made_by(world, 4, 2, "next")
    recorder.record(4, world.held(4, 2), world.made)
    assert not recorder.flush()
    lag = recorder.replication()
    assert lag is not None
    assert (lag.epoch, lag.epochs_behind) == (3, 1)
    recorder.record(4, world.held(4, 2), world.made)  # the fence ends this run, not the tier
    recorder.close(drain=False)


@pytest.mark.parametrize(("chain", "known"), [("this", 3), ("another", 0)])
def test_only_what_is_of_the_sinks_chain_counts_as_held(
    world: World, monkeypatch: pytest.MonkeyPatch, chain: str, known: int
) -> None:
    world.epochs(3)
    ours = world.made[3]
    if chain == "another":
        world.made[3] = _made_by(world, 3, 1, "other")
    world.tiers["remote"].put("demo", world.record_of(3))
    world.made[3] = ours
    held = world.epochs(5)
    monkeypatch.setattr(TierWriter, "start", lambda self: None)
    recorder = world.recorder(tiers=True)
    begin(recorder, held)
    assert recorder.remote_epoch == known
    assert recorder.flush()
    assert recorder.remote_epoch == 5
    recorder.close(drain=False)
