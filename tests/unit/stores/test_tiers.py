"""Store and tiers: which copy counts, in which order they are written, and how far a tier is behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.checkpoint.codec import checksum, short_number
from firnline.checkpoint.model import Checkpoint
from firnline.errors import DamagedError, FirnlineError, StoreAheadError, StoreUnsafeError
from firnline.stores.base import CheckpointStore
from firnline.stores.file import FileStore
from firnline.stores.memory import MemoryStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.replicator import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Replication, TierWriter
from firnline.stores.tiers import CopyStore, NewestCopy, Tiers
from firnline.types import EntryRef
from tests.support.damage import cuts, flips


def record(epoch: int, generation: int = 1, pipeline: str = "demo", attempt: str = "a") -> CheckpointRecord:
    made = Checkpoint(pipeline, epoch, generation, "run", attempt, "2026-01-01T00:00:00+00:00", {"files": {"n": epoch}})
    name = f"{epoch:020d}-{attempt}.json"
    return CheckpointRecord(made, EntryRef(epoch, name, checksum(f"{epoch}-{generation}-{attempt}".encode())))


def digest(of: CheckpointRecord) -> int:
    return short_number(of.entry.checksum)


class Shaky(MemoryStore):
    """A store in memory that may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.lose_answer = False
        self.puts: list[int] = []

    def latest_version(self, key: str) -> int:
        if self.away:
            raise OSError("away")
        return super().latest_version(key)

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        if self.away:
            raise OSError("away")
        version = super().put_raw_versioned(key, data, expected, note)
        self.puts.append(version)
        if self.lose_answer:
            self.lose_answer = False
            raise OSError("answer lost")
        return version


def opener(store: CheckpointStore) -> Callable[[], CheckpointStore]:
    def open_it() -> CheckpointStore:
        store.open()
        return store

    return open_it


def store_of(store: CheckpointStore, tier: str = "local", keep: int = 10) -> CopyStore:
    return CopyStore(tier, store.place, opener(store), "demo", keep)  # type: ignore[arg-type]


def held_by(place: CopyStore) -> int:
    return place.read().epoch


# -- a store ------------------------------------------------------------------------------------------


def test_a_place_that_was_never_used_says_so() -> None:
    copy = store_of(MemoryStore()).read()
    assert (copy.record, copy.damaged, copy.unreachable, copy.version) == (None, "", "", 0)


def test_what_is_put_is_what_is_found() -> None:
    place = store_of(MemoryStore())
    assert place.put(record(1)) is None
    assert place.put(record(2)) is None
    assert place.read().record == record(2)
    assert place.read().version == 2


def test_an_older_record_never_replaces_a_newer_one() -> None:
    place = store_of(MemoryStore())
    assert place.put(record(5, generation=2)) is None
    assert place.put(record(4, generation=2)) == record(5, generation=2)
    assert place.put(record(9, generation=1)) == record(5, generation=2)
    assert held_by(place) == 5


def test_a_newer_generation_replaces_a_later_epoch() -> None:
    place = store_of(MemoryStore())
    assert place.put(record(12, generation=3)) is None
    assert place.put(record(11, generation=5)) is None
    assert held_by(place) == 11


def test_a_run_left_behind_does_not_overwrite_its_successor() -> None:
    store = MemoryStore()
    zombie, successor = store_of(store), store_of(store)
    assert zombie.put(record(3, generation=1)) is None
    assert successor.put(record(4, generation=2)) is None
    assert zombie.put(record(4, generation=1, attempt="z")) is not None
    assert successor.read().record == record(4, generation=2)


def test_two_that_record_the_same_epoch_agree() -> None:
    store = MemoryStore()
    one, other = store_of(store), store_of(store)
    assert one.put(record(3)) is None
    assert other.put(record(3)) is None
    assert store.latest_version("demo") == 1


def test_a_put_whose_answer_was_lost_is_not_doubled() -> None:
    store = Shaky()
    place = store_of(store)
    store.lose_answer = True
    with pytest.raises(OSError, match="answer lost"):
        place.put(record(1))
    assert place.put(record(1)) is None
    assert store.puts == [1]


def test_what_was_taken_back_is_replaced_when_told_to() -> None:
    place = store_of(MemoryStore())
    assert place.put(record(12)) is None
    assert place.put(record(10), replace=True) is None
    assert held_by(place) == 10


def test_a_place_that_cannot_be_reached_says_why() -> None:
    store = Shaky()
    store.away = True
    assert store_of(store).read().unreachable == "away"


def test_a_place_that_does_not_answer_counts_as_unreachable() -> None:
    answer = threading.Event()

    class Slow(MemoryStore):
        def latest_version(self, key: str) -> int:
            answer.wait(120)
            return super().latest_version(key)

    copy = store_of(Slow(), "remote").read_within(0.05)
    answer.set()
    assert "no answer" in copy.unreachable


def test_an_unsafe_place_is_refused_wherever_it_is_looked_at() -> None:
    class Unsafe(MemoryStore):
        def open(self) -> None:
            raise StoreUnsafeError("replaces what exists")

    with pytest.raises(StoreUnsafeError):
        store_of(Unsafe()).read()
    with pytest.raises(StoreUnsafeError):
        store_of(Unsafe()).read_within(5)


def test_an_unsafe_place_is_refused_before_it_exists(tmp_path: Path) -> None:
    def open_it() -> CheckpointStore:
        raise StoreUnsafeError("replaces what exists")

    place = CopyStore("store", str(tmp_path / "absent"), open_it, "demo", 10)
    assert place.read().version == 0
    with pytest.raises(StoreUnsafeError):
        place.read_within(120, prove=True)


def test_a_look_that_was_given_up_is_not_begun_again() -> None:
    asked: list[int] = []
    answer = threading.Event()

    class Slow(MemoryStore):
        def latest_version(self, key: str) -> int:
            asked.append(1)
            answer.wait(120)
            return super().latest_version(key)

    place = store_of(Slow(), "store")
    for _ in range(3):
        assert "no answer" in place.read_within(0.01).unreachable
    answer.set()
    assert place.read_within(120).unreachable == ""
    assert len(asked) <= 2


class Headless(MemoryStore):
    """A store whose newest number cannot be read."""

    broken = True

    def latest_version(self, key: str) -> int:
        if self.broken:
            raise DamagedError("the head is damaged")
        return super().latest_version(key)


def test_a_damaged_head_is_told_like_a_damaged_version() -> None:
    store = Headless()
    copy = store_of(store).read()
    assert (copy.damaged, copy.record, copy.unreachable) == ("the head is damaged", None, "")


def test_a_record_is_put_onto_a_damaged_head_where_the_store_can() -> None:
    store = Headless()
    store.put("demo", record(1))
    place = store_of(store)
    assert place.put(record(2)) is None
    store.broken = False
    assert store_of(store).read().record == record(2)


def test_old_versions_are_pruned() -> None:
    store = MemoryStore()
    place = store_of(store, keep=3)
    for epoch in range(1, 8):
        place.put(record(epoch))
    assert place.prune() == 4
    assert [v.version for v in store.list_versions("demo")] == [7, 6, 5]


# -- which copy counts --------------------------------------------------------------------------------


def two_tiers(local: CheckpointRecord | None, remote: CheckpointRecord | None) -> Tiers:
    tiers = Tiers(store_of(MemoryStore()), store_of(MemoryStore(), "remote"))
    for place, content in zip(tiers.stores, (local, remote), strict=True):
        if content is not None:
            place.put(content)
    return tiers


def test_local_comes_first() -> None:
    assert two_tiers(record(4), record(4)).find(4, digest(record(4))) == ("local", record(4))


def test_remote_stands_in_for_a_stale_local_copy(caplog: pytest.LogCaptureFixture) -> None:
    tiers = two_tiers(record(3), record(4))
    with caplog.at_level(logging.WARNING):
        assert tiers.find(4, digest(record(4))) == ("remote", record(4))
        tiers.find(4, digest(record(4)))
    told = [vars(r)["reason"] for r in caplog.records]
    assert told == ["it is out of date: epoch 3, the sink holds 4"]  # said once


def test_a_copy_of_another_entry_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert two_tiers(record(4, attempt="b"), None).find(4, digest(record(4))) is None
    assert "not the one that the sink holds" in vars(caplog.records[0])["reason"]


def test_a_copy_without_a_digest_to_match_does_not_count() -> None:
    assert two_tiers(record(4), record(4)).find(4, None) is None


def test_a_foreign_copy_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.put("demo", record(4, pipeline="other"))
    with caplog.at_level(logging.WARNING):
        assert Tiers(store_of(store)).find(4, digest(record(4))) is None
    assert "another pipeline" in vars(caplog.records[0])["reason"]


def test_an_older_version_is_the_last_resort() -> None:
    tiers = two_tiers(record(4), None)
    assert tiers.local is not None
    tiers.local.put(record(5))
    assert tiers.find(4, digest(record(4))) is None
    assert tiers.search(4, digest(record(4))) == ("local", record(4))
    assert tiers.search(4, digest(record(4, attempt="b"))) is None


@pytest.mark.parametrize("change", [flips, cuts])
def test_every_byte_of_a_local_copy(tmp_path: Path, change: Callable[[bytes], object]) -> None:
    """Damage is found: never another checkpoint than the one that was put."""
    place = store_of(FileStore(str(tmp_path)))
    place.put(record(4))
    (path,) = (tmp_path / "demo" / "checkpoint").glob("*.json")
    passed_over = 0
    for at, damaged in change(path.read_bytes()):  # type: ignore[attr-defined]
        path.write_bytes(damaged)
        found = Tiers(place).find(4, digest(record(4)))
        assert found in (("local", record(4)), None), at
        passed_over += found is None
    assert passed_over > len(path.read_bytes()) / 2


# -- a writer -----------------------------------------------------------------------------------------


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A writer without a thread: every turn is the test's."""

    def __init__(self, interval: float = 60.0) -> None:
        self.store, self.time = Shaky(), Time()
        self.told: list[Replication] = []
        self.place = store_of(self.store, "remote")
        self.writer = TierWriter(self.place, interval, self.time, self.told.append)

    @property
    def stored(self) -> int:
        return self.place.read().epoch


def test_the_first_record_is_written_at_once_and_the_next_after_the_interval() -> None:
    bench = Bench()
    bench.writer.offer(record(1))
    assert bench.writer.turn() is None
    bench.writer.offer(record(2))
    assert bench.writer.turn() == 60
    bench.time.now += 59
    assert bench.writer.turn() == 1
    assert bench.stored == 1
    bench.time.now += 1
    assert bench.writer.turn() is None
    assert bench.stored == 2


def test_the_newest_wins_within_an_interval() -> None:
    bench = Bench()
    for epoch in range(1, 6):
        bench.writer.offer(record(epoch))
    bench.writer.turn()
    assert bench.stored == 5
    assert bench.store.puts == [1]


def test_a_record_is_written_here_only_when_the_interval_has_passed() -> None:
    bench = Bench(interval=1.0)
    bench.writer.offer(record(1), here=True)
    assert bench.stored == 1
    bench.writer.offer(record(2), here=True)
    assert bench.stored == 1
    bench.time.now += 1
    bench.writer.offer(record(3), here=True)
    assert bench.stored == 3


def test_an_outage_is_tried_again_for_ever_with_a_back_off() -> None:
    bench = Bench()
    bench.store.away = True
    bench.writer.offer(record(1))
    waits = []
    for _ in range(12):
        wait = bench.writer.turn()
        assert wait is not None
        waits.append(wait)
        bench.time.now += wait
    assert waits[:3] == [FIRST_BACKOFF_SECONDS, 2 * FIRST_BACKOFF_SECONDS, 4 * FIRST_BACKOFF_SECONDS]
    assert waits[-1] == MAX_BACKOFF_SECONDS
    bench.store.away = False
    assert bench.writer.turn() is None
    assert bench.stored == 1


def test_the_lag_is_the_age_of_the_oldest_record_that_is_missing() -> None:
    bench = Bench()
    bench.writer.offer(record(1))
    bench.writer.turn()
    bench.store.away = True
    bench.time.now += 60
    bench.writer.offer(record(2))
    bench.writer.turn()
    bench.time.now += 10
    bench.writer.offer(record(3))
    bench.time.now += 5
    lag = bench.writer.replication()
    assert (lag.epoch, lag.epochs_behind, lag.lag_seconds(bench.time())) == (1, 2, 15)
    assert lag.reason == "away"
    bench.store.away = False
    bench.writer.turn()
    lag = bench.writer.replication()
    assert (lag.epoch, lag.epochs_behind, lag.lag_seconds(bench.time()), lag.reason) == (3, 0, 0, "")
    assert bench.told[-1] == lag


def test_a_record_that_is_on_its_way_does_not_count_as_held() -> None:
    bench = Bench()
    seen: list[tuple[int, int]] = []

    class Watching(Shaky):
        def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
            lag = bench.writer.replication()
            seen.append((bench.writer.epoch, lag.epochs_behind))
            return super().put_raw_versioned(key, data, expected, note)

    bench.writer = TierWriter(store_of(Watching(), "remote"), 60, bench.time)
    bench.writer.holds(6)
    bench.writer.offer(record(7))
    bench.writer.turn()
    assert seen == [(6, 1)]
    assert bench.writer.epoch == 7


def test_a_newer_runs_record_is_left_alone_and_does_not_count() -> None:
    bench = Bench()
    store_of(bench.store, "remote").put(record(9, generation=2))
    bench.writer.offer(record(8, generation=1))
    bench.writer.turn()
    assert bench.stored == 9
    bench.time.now += 7
    lag = bench.writer.replication()
    assert (lag.epoch, lag.epochs_behind, lag.lag_seconds(bench.time())) == (0, 1, 7)
    assert "epoch 9 of a newer run" in lag.reason
    assert not bench.writer.flush(600)


def test_an_older_record_of_the_same_run_is_there_already() -> None:
    bench = Bench(interval=0)
    for epoch in (3, 2):
        bench.writer.offer(record(epoch))
        assert bench.writer.turn() is None
    lag = bench.writer.replication()
    assert (bench.stored, lag.epoch, lag.epochs_behind) == (3, 3, 0)


def test_what_the_check_refuses_is_never_overwritten() -> None:
    bench = Bench()
    bench.place.put(record(9, generation=1))
    seen: list[int] = []

    def check(copy: NewestCopy) -> None:
        seen.append(copy.epoch)
        raise StoreAheadError("more than the sink holds")

    bench.writer = TierWriter(bench.place, 0, bench.time, check=check)
    bench.writer.offer(record(4, generation=2))
    assert bench.writer.turn() == FIRST_BACKOFF_SECONDS
    assert (seen, bench.stored, bench.writer.replication().reason) == ([9], 9, "more than the sink holds")


def test_an_unsafe_tier_is_told_and_not_tried_again() -> None:
    tries: list[int] = []

    class Unsafe(MemoryStore):
        def open(self) -> None:
            tries.append(1)
            raise StoreUnsafeError("replaces what exists")

    refused: list[FirnlineError] = []
    time = Time()
    writer = TierWriter(store_of(Unsafe(), "remote"), 0, time, refuse=refused.append)
    writer.offer(record(1))
    assert writer.turn() is None
    time.now += 3600
    assert writer.turn() is None
    assert not writer.flush(600)
    assert (len(tries), [e.code for e in refused]) == (1, ["store-unsafe"])
    assert writer.replication().reason == "replaces what exists"


def test_the_background_outlives_any_error() -> None:
    class Buggy(MemoryStore):
        tries = 0

        def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
            self.tries += 1
            if self.tries == 1:
                raise RuntimeError("a library's own mistake")
            return super().put_raw_versioned(key, data, expected, note)

    told: list[Replication] = []
    writer = TierWriter(store_of(Buggy(), "remote"), 0, Time(), told.append)
    writer.start()
    writer.offer(record(1))
    writer.flush(60)
    assert writer.flush(60)
    writer.close()
    assert (told[0].reason, told[-1].reason, writer.epoch) == ("a library's own mistake", "", 1)


def test_runs_of_one_record_each_prune_too() -> None:
    store = MemoryStore()
    for epoch in range(1, 50):
        writer = TierWriter(store_of(store, "remote"), 0, Time())
        writer.offer(record(epoch))
        writer.turn()
    assert len(store.list_versions("demo")) == 11  # 48 of them were cut to 10, and one followed


def test_a_record_counts_as_held_although_pruning_fails() -> None:
    class Full(Shaky):
        def prune(self, key: str, keep: int) -> int:
            raise DamagedError("the list of versions")

    store = Full()
    for epoch in range(1, 16):
        store.put("demo", record(epoch))
    writer = TierWriter(store_of(store, "remote"), 0, Time())
    writer.offer(record(16))
    assert writer.turn() is None
    assert writer.epoch == 16


def test_a_flush_writes_whatever_the_interval_says() -> None:
    bench = Bench()
    bench.writer.offer(record(1))
    bench.writer.turn()
    bench.writer.offer(record(2))
    assert bench.writer.flush(5)
    assert bench.stored == 2


def test_a_flush_gives_up_after_a_failed_try() -> None:
    bench = Bench()
    bench.store.away = True
    bench.writer.offer(record(1))
    assert not bench.writer.flush(600)


def test_a_flush_of_the_background_overrides_the_back_off() -> None:
    bench = Bench()
    bench.store.away = True
    bench.writer.offer(record(1))
    bench.writer.turn()
    bench.writer.start()
    assert not bench.writer.flush(600)
    bench.store.away = False
    assert bench.writer.flush(600)
    bench.writer.close()
    assert bench.stored == 1


def test_the_background_keeps_the_order_of_many_records() -> None:
    bench = Bench(interval=0)
    bench.writer.start()
    for epoch in range(1, 300):
        bench.writer.offer(record(epoch))
    assert bench.writer.flush(60)
    bench.writer.close()
    versions = [bench.store.get("demo", CheckpointRecord, version=n) for n in bench.store.puts]
    epochs = [v.epoch for v in versions if v is not None]
    assert epochs == sorted(set(epochs))
    assert bench.stored == 299


def test_a_closed_writer_writes_nothing_more() -> None:
    bench = Bench()
    bench.store.away = True
    bench.writer.offer(record(1))
    bench.writer.turn()
    bench.writer.close()
    bench.store.away = False
    bench.time.now += 3600
    assert bench.writer.turn() is None
    assert bench.stored == 0


def test_old_versions_of_a_tier_go_while_it_is_written() -> None:
    bench = Bench(interval=0)
    for epoch in range(1, 50):
        bench.writer.offer(replace(record(epoch)))
        bench.writer.turn()
    assert len(bench.store.list_versions("demo")) < 30
