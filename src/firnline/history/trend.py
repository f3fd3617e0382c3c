"""The trend of a pipeline: durations, rows and lag of the last days, rolled up to a few hundred points, read-only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from firnline.errors import DamagedError, NewerFormatError
from firnline.run.trend import BUCKET_MINUTES, KEPT_DAYS, Bucket, read_day
from firnline.storage import Storage
from firnline.types import Json

POINTS = 400  # at most about so many points are shown
_MINUTES = (BUCKET_MINUTES, 10, 15, 30, 60, 120, 240)  # of one point


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """The epochs that were committed from `start` on, until the next point may begin."""

    start: datetime
    bucket: Bucket

    def to_json(self) -> dict[str, Json]:
        """Return the point with means in place of sums; null where there is no epoch to take the mean of."""
        one = self.bucket
        return {
            "start": self.start.isoformat(),
            "epochs": one.epochs,
            "records": one.records,
            "rows": one.rows,
            "quarantined": one.quarantined,
            "bytes_read": one.bytes_read,
            "restarts": one.restarts,
            "duration_ms": round(one.duration_ms / one.epochs) if one.epochs else None,
            "duration_ms_max": one.duration_ms_max if one.epochs else None,
            "durations_ms": {step: round(ms / one.epochs) for step, ms in one.steps_ms.items() if one.epochs},
            "lag_seconds": round(one.lag_seconds / one.epochs, 3) if one.epochs else None,
            "lag_seconds_max": one.lag_seconds_max if one.epochs else None,
            "epochs_behind_max": one.epochs_behind_max,
        }


@dataclass(frozen=True, slots=True)
class Trend:
    """The points of the last days, oldest first, without those in which nothing happened."""

    since: datetime
    until: datetime
    minutes: int  # of one point
    points: list[TrendPoint]
    damaged: list[str]  # days whose file cannot be read

    def to_json(self) -> dict[str, Json]:
        """Return the trend as the service answers."""
        return {
            "since": self.since.isoformat(),
            "until": self.until.isoformat(),
            "minutes": self.minutes,
            "points": [point.to_json() for point in self.points],
            "damaged": list(self.damaged),
        }


def load_trend(storage: Storage, pipeline: str, now: datetime, days: int = KEPT_DAYS) -> Trend:
    """Return the trend of the last `days` days up to `now`. Points are longer the more days there are."""
    days = max(1, min(days, KEPT_DAYS))
    minutes = next(one for one in _MINUTES if days * 24 * 60 / one <= POINTS)
    now = now.astimezone(UTC)
    since = now - timedelta(days=days)
    found: dict[datetime, Bucket] = {}
    damaged = []
    for back in range(days, -1, -1):
        day = now.date() - timedelta(days=back)
        midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
        try:
            buckets = read_day(storage, pipeline, day).buckets
        except (DamagedError, NewerFormatError):
            damaged.append(day.isoformat())
            continue
        for minute, bucket in sorted(buckets.items()):
            begins = midnight + timedelta(minutes=minute)
            if since - timedelta(minutes=BUCKET_MINUTES) < begins <= now:
                found.setdefault(midnight + timedelta(minutes=minute - minute % minutes), Bucket()).add(bucket)
    return Trend(since, now, minutes, [TrendPoint(start, bucket) for start, bucket in found.items()], damaged)
