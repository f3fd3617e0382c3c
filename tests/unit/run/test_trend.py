"""The trend: what runs counted outlives them, whatever happens to a write, and its size has a bound."""

from __future__ import annotations

import json
import logging
import threading
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.history.trend import POINTS, TrendPoint, load_trend
from firnline.names import trend_folder, trend_name
from firnline.run.observer import EpochFacts, SinkLag
from firnline.run.trend import BUCKET_MINUTES, KEPT_DAYS, Bucket, TrendLog, read_day
from firnline.sinks.base import Head
from firnline.storage import LocalStorage
from tests.support.kills import kill_at_every_point

DAY = date(2026, 3, 10)
NEVER = 1e6  # seconds between writes: only the end of a run writes


class Clock(SystemClock):
    """A clock whose time of day is set by hand."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def now(self) -> datetime:
        return self.at


def at(hour: int, minute: int = 0, day: date = DAY) -> Clock:
    return Clock(datetime(day.year, day.month, day.day, hour, minute, 30, tzinfo=UTC))


def facts(epoch: int = 1, rows: int = 10, lag: float = 2.0, run_ms: int = 100) -> EpochFacts:
    return EpochFacts(
        epoch=epoch, attempt="a" * 16, sink="main", version=epoch, files=1, records=rows + 1, rows=rows,
        bad={"not json": 1}, bytes_read=1000, raw_bytes=2000, staged_files=1, staged_bytes=500, late_files=0,
        checkpoint_bytes=100, state_files=1, set_aside=0, lag_seconds=lag,
        durations_ms={"plan": 5, "run": run_ms, "stage": 10, "commit": 20},
    )  # fmt: skip


def trend_log(storage: LocalStorage, clock: Clock, seconds: float = NEVER) -> TrendLog:
    return TrendLog(storage, "p", clock, write_seconds=seconds, end_seconds=300)


def run_once(folder: Path, clock: Clock, *epochs: EpochFacts, run: str = "r" * 16) -> None:
    log = trend_log(LocalStorage(str(folder)), clock)
    log.started(run, Head(exists=True, version=0))
    for one in epochs:
        log.committed(one)
    log.stopped(0)


def file_of(folder: Path, day: date = DAY) -> Path:
    return folder / trend_folder("p") / trend_name(day)


def test_runs_of_a_day_add_up(tmp_path: Path) -> None:
    run_once(tmp_path, at(9, 3), facts(1, rows=10, lag=2.0, run_ms=100), facts(2, rows=5, lag=4.0, run_ms=300))
    run_once(tmp_path, at(9, 4), facts(3, rows=1, lag=1.0), run="s" * 16)
    run_once(tmp_path, at(23, 59), facts(4), run="t" * 16)
    body = json.loads(file_of(tmp_path).read_bytes())
    assert sorted(body["buckets"]) == ["1435", "540"]
    bucket = body["buckets"]["540"]
    assert (bucket["epochs"], bucket["rows"], bucket["quarantined"], bucket["records"]) == (3, 16, 3, 19)
    assert (bucket["duration_ms"], bucket["duration_ms_max"], bucket["steps_ms"]["run"]) == (605, 335, 500)
    assert (bucket["lag_seconds"], bucket["lag_seconds_max"]) == (7.0, 4.0)


def test_a_run_without_an_epoch_writes_nothing(tmp_path: Path) -> None:
    run_once(tmp_path, at(9))
    assert list(tmp_path.iterdir()) == []


def test_midnight_begins_a_new_file(tmp_path: Path) -> None:
    clock = at(23, 59)
    log = trend_log(LocalStorage(str(tmp_path)), clock)
    log.committed(facts(1))
    clock.at += timedelta(minutes=2)
    log.committed(facts(2, rows=7))
    log.stopped(0)
    storage = LocalStorage(str(tmp_path))
    assert read_day(storage, "p", DAY).buckets[1435].rows == 10
    assert read_day(storage, "p", DAY + timedelta(days=1)).buckets[0].rows == 7


def test_restarts_and_sinks_that_are_behind_are_counted(tmp_path: Path) -> None:
    log = trend_log(LocalStorage(str(tmp_path)), at(9))
    log.committed(facts())
    log.sinks([SinkLag("copy", 1, 3, 100), SinkLag("gone", 1, 90, 100, set_aside=True)])
    log.resting(1.0, 1)
    log.resting(1.0, 1, "copy")
    log.stopped(1)
    found = read_day(LocalStorage(str(tmp_path)), "p", DAY).buckets[540]
    assert (found.restarts, found.epochs_behind_max, found.epochs) == (1, 3, 1)


class Failing(LocalStorage):
    """Fails at writes: before they happen, or, with `lost`, after."""

    def __init__(self, root: str, *, lost: bool) -> None:
        super().__init__(root)
        self._lost = lost
        self.failures = 0
        self.is_broken = True
        self.has_failed = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if not self.is_broken:
            return super().put(key, data)
        if self._lost:
            super().put(key, data)
        self.failures += 1
        if self.failures >= 2:
            self.has_failed.set()
        raise OSError("no answer")


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_write_is_logged_and_made_up_for(tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: bool) -> None:
    """Whether the write or only its answer was lost: each epoch counts once."""
    storage = Failing(str(tmp_path), lost=lost)
    log = trend_log(storage, at(9), 0.01)
    log.started("r" * 16, Head(exists=True, version=0))
    with caplog.at_level(logging.WARNING):
        log.committed(facts(1))
        for number in range(2, 200):  # the writer fails with something to write, and again
            if storage.has_failed.wait(0.05):
                break
            log.committed(facts(number))
        storage.is_broken = False
        log.committed(facts(number))
        log.stopped(0)
    found = read_day(LocalStorage(str(tmp_path)), "p", DAY).buckets[540]
    assert (found.epochs, found.rows) == (number, 10 * number)
    assert "trend not written" in caplog.text


def test_a_storage_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    answers = threading.Event()

    class Hanging(LocalStorage):
        def get(self, key: str) -> bytes:
            answers.wait()
            return super().get(key)

    log = TrendLog(Hanging(str(tmp_path)), "p", at(9), write_seconds=0.01, end_seconds=0.05)
    for number in range(1000):
        log.committed(facts(number))
    log.stopped(0)
    assert not file_of(tmp_path).exists()
    answers.set()


def test_a_damaged_day_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_once(tmp_path, at(9), facts(1))
    file_of(tmp_path).write_bytes(file_of(tmp_path).read_bytes().replace(b'"rows":10', b'"rows":99'))
    assert load_trend(LocalStorage(str(tmp_path)), "p", at(10).now(), 1).damaged == [DAY.isoformat()]
    run_once(tmp_path, at(9), facts(2, rows=3))
    assert read_day(LocalStorage(str(tmp_path)), "p", DAY).buckets[540].rows == 3
    assert "begins anew" in caplog.text


def test_old_days_are_deleted_and_other_files_stay(tmp_path: Path) -> None:
    days = [DAY - timedelta(days=back) for back in (KEPT_DAYS + 1, KEPT_DAYS, 1)]
    for day in [*days, DAY + timedelta(days=400)]:
        file_of(tmp_path, day).parent.mkdir(parents=True, exist_ok=True)
        file_of(tmp_path, day).write_bytes(b"{}")
    file_of(tmp_path).with_name("README").write_text("mine")
    run_once(tmp_path, at(9), facts())
    left = sorted(path.name for path in file_of(tmp_path).parent.iterdir())
    assert left == sorted(["README", *(trend_name(day) for day in [*days[1:], DAY])])


def test_a_full_day_is_small(tmp_path: Path) -> None:
    clock = at(0)
    log = trend_log(LocalStorage(str(tmp_path)), clock)
    large = facts(10**9, rows=10**9, lag=123456.789, run_ms=10**7)
    for _ in range(24 * 60 // BUCKET_MINUTES):
        log.committed(large)
        clock.at += timedelta(minutes=BUCKET_MINUTES)
    clock.at -= timedelta(hours=1)
    log.stopped(0)
    assert len(read_day(LocalStorage(str(tmp_path)), "p", DAY).buckets) == 288
    assert file_of(tmp_path).stat().st_size < 100_000


@pytest.mark.parametrize("days", [1, 2, 7, 14, KEPT_DAYS])
def test_points_are_rolled_up_and_lose_nothing(tmp_path: Path, days: int) -> None:
    clock = at(0)
    log = trend_log(LocalStorage(str(tmp_path)), clock)
    for back in range(KEPT_DAYS, -1, -1):
        for hour in (0, 9, 23):
            clock.at = at(hour, day=DAY - timedelta(days=back)).at
            log.committed(facts(run_ms=100 * hour))
    log.stopped(0)
    found = load_trend(LocalStorage(str(tmp_path)), "p", at(23, 30).now(), days)
    assert sum(point.bucket.rows for point in found.points) == 10 * 3 * days
    assert len(found.points) <= days * 24 * 60 / found.minutes <= POINTS
    assert [point.start for point in found.points] == sorted({point.start for point in found.points})
    body = found.points[-1].to_json()
    assert (body["duration_ms"], body["lag_seconds"], body["durations_ms"]["run"]) == (2335, 2.0, 2300)
    assert found.damaged == []


def test_a_point_without_epochs_has_no_means() -> None:
    body = TrendPoint(at(9).now(), Bucket(restarts=2)).to_json()
    assert (body["restarts"], body["duration_ms"], body["lag_seconds"], body["durations_ms"]) == (2, None, None, {})


def _add_two(folder: Path) -> None:
    run_once(folder, at(9), facts(1))
    run_once(folder, at(9), facts(2), run="s" * 16)


@pytest.mark.crash
def test_a_kill_at_any_write_leaves_a_whole_file(tmp_path: Path) -> None:
    """The file is as before or as after; the next run adds to it."""
    numbers = iter(range(1000))

    def prepare() -> Path:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return folder

    def check(folder: Path, where: str) -> None:
        before = read_day(LocalStorage(str(folder)), "p", DAY).buckets.get(540, Bucket()).epochs
        assert before in ((2,) if where == "not killed" else (0, 1, 2)), where
        run_once(folder, at(9), facts(3), run="t" * 16)
        assert json.loads(file_of(folder).read_bytes())["buckets"]["540"]["epochs"] == before + 1, where

    reached = kill_at_every_point(prepare, _add_two, check)
    assert reached["storage.put.before"] >= 2
