"""The trend of a pipeline: durations, rows and lag of its epochs, summed up in buckets of 5 minutes, one file per day.

The files lie in the home and outlive runs. They are for people: no decision depends on them, and a failed write is only
logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError, FirnlineError
from firnline.names import trend_day, trend_folder, trend_name
from firnline.run.observer import EpochFacts, Observer, SinkLag, took_ms
from firnline.sinks.base import Head
from firnline.storage import Storage
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

BUCKET_MINUTES = 5
KEPT_DAYS = 30
WRITE_SECONDS = 30.0
END_SECONDS = 5.0  # limit for the last write, when the run ends
STEPS = ("plan", "run", "stage", "commit", "checkpoint")


@dataclass(slots=True)
class Bucket:
    """The epochs that were committed within 5 minutes. Durations and lag are sums, those with `max` the highest."""

    epochs: int = 0
    records: int = 0
    rows: int = 0
    quarantined: int = 0
    bytes_read: int = 0
    restarts: int = 0
    duration_ms: int = 0
    duration_ms_max: int = 0
    steps_ms: dict[str, int] = field(default_factory=dict)
    lag_seconds: float = 0.0
    lag_seconds_max: float = 0.0
    epochs_behind_max: int = 0  # of the sink that was behind most

    @classmethod
    def from_json(cls, body: Mapping[str, Json]) -> Bucket:
        """Return the bucket of a file. Unknown fields are ignored."""
        whole = {name: int(body.get(name, 0)) for name in _WHOLE}
        steps = {str(step): int(ms) for step, ms in dict(body.get("steps_ms", {})).items()}
        lag, highest = float(body.get("lag_seconds", 0)), float(body.get("lag_seconds_max", 0))
        return cls(**whole, steps_ms=steps, lag_seconds=lag, lag_seconds_max=highest)

    def to_json(self) -> dict[str, Json]:
        """Return the bucket as the file has it."""
        return {**asdict(self), "lag_seconds": round(self.lag_seconds, 3)}

    def add(self, other: Bucket) -> None:
        """Add what another bucket counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HIGHEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for step, ms in other.steps_ms.items():
            self.steps_ms[step] = self.steps_ms.get(step, 0) + ms


_SUMS = ("epochs", "records", "rows", "quarantined", "bytes_read", "restarts", "duration_ms", "lag_seconds")
_HIGHEST = ("duration_ms_max", "lag_seconds_max", "epochs_behind_max")
_WHOLE = tuple(name for name in (*_SUMS, *_HIGHEST) if not name.startswith("lag_seconds"))

Buckets = dict[int, Bucket]  # by minutes since midnight


@dataclass(slots=True)
class TrendDay:
    """The trend of one day, and which write was the newest."""

    buckets: Buckets = field(default_factory=dict)
    run: str = ""
    write: int = 0


def read_day(storage: Storage, pipeline: str, day: date) -> TrendDay:
    """Return the trend of a day; empty if there is none.

    Raises:
        DamagedError: the file is damaged.
        NewerFormatError: a newer Firnline wrote it.
    """
    key = f"{trend_folder(pipeline)}/{trend_name(day)}"
    try:
        data = storage.get(key)
    except FileNotFoundError:
        return TrendDay()
    body = unseal(parse(data, key), key)
    try:
        found = {int(minute): Bucket.from_json(bucket) for minute, bucket in body["buckets"].items()}
        return TrendDay(found, str(body["run"]), int(body["write"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{key} has no buckets that can be read", what=key) from error


class TrendLog(Observer):
    """Observes a run and adds its epochs to the trend, on a thread of its own that never holds up the run."""

    def __init__(
        self,
        storage: Storage,
        pipeline: str,
        clock: Clock,
        *,
        write_seconds: float = WRITE_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._clock = clock
        self._write_seconds, self._end_seconds = write_seconds, end_seconds
        self._lock = threading.Lock()
        self._new: dict[date, Buckets] = {}  # counted since the last write, under the lock
        # These belong to the writer's thread.
        self._waiting: dict[date, Buckets] = {}
        self._tried: dict[date, tuple[int, Buckets]] = {}  # the write that failed, or whose answer was lost
        self._run = ""
        self._writes = 0
        self._pruned_on: date | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # -- events of the run ----------------------------------------------------------------------------

    def started(self, run: str, held: Head) -> None:
        self._run = run

    def committed(self, facts: EpochFacts) -> None:
        took = took_ms(facts.durations_ms)
        steps = {step: facts.durations_ms[step] for step in STEPS if step in facts.durations_ms}
        self._count(
            Bucket(
                epochs=1,
                records=facts.records,
                rows=facts.rows,
                quarantined=sum(facts.bad.values()),
                bytes_read=facts.bytes_read,
                duration_ms=took,
                duration_ms_max=took,
                steps_ms=steps,
                lag_seconds=facts.lag_seconds,
                lag_seconds_max=round(facts.lag_seconds, 3),
            )
        )
        if self._thread is None:  # from now on the home exists
            self._thread = threading.Thread(target=self._write_until_end, name="firnline trend", daemon=True)
            self._thread.start()

    def sinks(self, lags: Sequence[SinkLag]) -> None:
        behind = max((lag.epochs_behind for lag in lags if not lag.set_aside), default=0)
        if behind and self._thread is not None:
            self._count(Bucket(epochs_behind_max=behind))

    def resting(self, seconds: float, failures: int, optional: str = "") -> None:
        if not optional and self._thread is not None:
            self._count(Bucket(restarts=1))

    def stopped(self, exit_code: int) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(self._end_seconds)

    def _count(self, bucket: Bucket) -> None:
        now = self._clock.now().astimezone(UTC)
        minutes = now.hour * 60 + now.minute
        with self._lock:
            day = self._new.setdefault(now.date(), {})
            day.setdefault(minutes - minutes % BUCKET_MINUTES, Bucket()).add(bucket)

    # -- the writer's thread --------------------------------------------------------------------------

    def _write_until_end(self) -> None:
        while not self._ending.wait(self._write_seconds):
            self._write()
        self._write()

    def _write(self) -> None:
        """Add what was counted to the files of its days. What cannot be written is tried again at the next write."""
        with self._lock:
            counted, self._new = self._new, {}
        for day, buckets in counted.items():
            _merge(self._waiting.setdefault(day, {}), buckets)
        try:
            for day in sorted({*self._waiting, *self._tried}):
                self._write_day(day)
            self._prune()
        except Exception as error:  # statistics hold up no run
            reason = error.message if isinstance(error, FirnlineError) else str(error) or type(error).__name__
            logger.warning("trend not written", extra={"reason": reason})

    def _write_day(self, day: date) -> None:
        try:
            known = read_day(self._storage, self._pipeline, day)
        except DamagedError as error:
            logger.warning("trend of a day begins anew", extra={"day": day.isoformat(), "reason": error.message})
            known = TrendDay()
        write, buckets = self._tried.pop(day, (0, {}))
        if write and (known.run, known.write) == (self._run, write):
            buckets = {}  # it was written, and only the answer was lost
        _merge(buckets, self._waiting.pop(day, {}))
        if not buckets:
            return
        self._writes += 1
        self._tried[day] = (self._writes, buckets)
        _merge(known.buckets, buckets)
        body = {
            "day": day.isoformat(),
            "run": self._run,
            "write": self._writes,
            "buckets": {str(minute): bucket.to_json() for minute, bucket in sorted(known.buckets.items())},
        }
        self._storage.put(f"{trend_folder(self._pipeline)}/{trend_name(day)}", canonical(seal(body)))
        del self._tried[day]

    def _prune(self) -> None:
        """Delete, once a day, the files of days that are too old, or that a wrong clock put far into the future."""
        today = self._clock.now().astimezone(UTC).date()
        if self._pruned_on == today:
            return
        folder = trend_folder(self._pipeline)
        for stat in list(self._storage.list(folder)):
            day = trend_day(stat.name)
            if day is not None and abs((today - day).days) > KEPT_DAYS:
                self._storage.delete(f"{folder}/{trend_name(day)}")
        self._pruned_on = today


def _merge(into: Buckets, buckets: Buckets) -> None:
    """Add buckets to others, without sharing any."""
    for minute, bucket in buckets.items():
        into.setdefault(minute, Bucket()).add(bucket)
