"""Writes the reports of three sensors about the same objects: NDJSON files per sensor, for some seconds of event time.

The same seed gives the same bytes. Reports jitter, arrive out of order, and a few arrive up to a minute late.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

BEGIN_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
LATE_SECONDS = (20.0, 60.0)  # the delay of late reports: shortest, longest
TARGET_SECONDS = 10  # a camera follows an object this long
SILENT_PART = 0.25  # the fraction of links that are silent in any minute

Numbers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class World:
    """The size of the generated data. `radar`, `link` and `optical` are reports per second of event time."""

    seconds: int = 60
    seed: int = 0
    objects: int = 1000
    radar: int = 5000
    link: int = 100
    optical: int = 50
    file_seconds: int = 5
    late_part: float = 0.002  # the fraction of late reports of each sensor

    def generator(self, sensor: str) -> np.random.Generator:
        """Return the random numbers of one sensor. The rate of one sensor does not change the data of the others."""
        return np.random.default_rng([self.seed, *sensor.encode()])


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports of one sensor: object, event time and arrival time, in seconds from the start."""

    objects: Numbers
    at: Seconds
    arrived: Seconds


def radar(world: World) -> Reports:
    """Return reports of all objects in turn."""
    count = world.seconds * world.radar
    at = np.arange(count) / world.radar
    return _arrive(world, "radar", np.arange(count, dtype=np.int64) % world.objects, at, 0.3)


def link(world: World) -> Reports:
    """Return reports that objects send themselves. Each object is silent at times."""
    random = world.generator("links")
    talkers = random.permutation(world.objects)[: max(1, min(world.link, world.objects // 4))]
    count = world.seconds * world.link
    at, chosen = np.arange(count) / world.link, np.empty(count, np.int64)
    for minute in range(world.seconds // 60 + 1):
        heard = talkers[random.random(len(talkers)) >= SILENT_PART]
        turns = np.flatnonzero(at // 60 == minute)
        chosen[turns] = (heard if heard.size else talkers)[turns % max(1, heard.size)]
    return _arrive(world, "link", chosen, at, 1.0)


def optical(world: World) -> Reports:
    """Return reports of a few cameras. Each follows one object for some seconds, then another."""
    random = world.generator("cameras")
    cameras = max(1, world.optical // 10)
    targets = random.integers(0, world.objects, (cameras, world.seconds // TARGET_SECONDS + 1))
    count = world.seconds * world.optical
    at = np.arange(count) / world.optical
    seen = targets[np.arange(count) % cameras, (at // TARGET_SECONDS).astype(np.int64)]
    return _arrive(world, "optical", seen, at, 2.0)


def _arrive(world: World, sensor: str, objects: Numbers, at: Seconds, delay: float) -> Reports:
    """Add jitter to the times and a delay to the arrivals, a long one now and then; sorted by arrival."""
    random = world.generator(sensor)
    at = np.clip(at + random.normal(0, 0.02, at.size), 0, None).round(3)
    late = random.random(at.size) < world.late_part
    waited = np.where(late, random.uniform(*LATE_SECONDS, at.size), random.exponential(delay, at.size).clip(max=5.0))
    order = np.argsort(at + waited, kind="stable")
    return Reports(objects[order], at[order], (at + waited)[order])


# -- files ----------------------------------------------------------------------------------------------------


def _radar_lines(reports: Reports, speed: Seconds) -> Iterator[str]:
    knots = (speed * 3600 / 1852).round(1)
    for number, ms, kn in zip(reports.objects.tolist(), _millis(reports).tolist(), knots.tolist(), strict=True):
        yield f'{{"track":"T{number:04d}","t_ms":{ms},"speed_kn":{kn}}}\n'


def _link_lines(reports: Reports, speed: Seconds) -> Iterator[str]:
    times = np.datetime_as_string(_millis(reports).astype("datetime64[ms]"), unit="ms")
    for number, time, kmh in zip(
        reports.objects.tolist(), times.tolist(), (speed * 3.6).round(1).tolist(), strict=True
    ):
        yield f'{{"id":"T{number:04d}","time":"{time}Z","kmh":{kmh},"callsign":"C{number % 97:02d}"}}\n'


def _optical_lines(reports: Reports, speed: Seconds) -> Iterator[str]:
    for number, ms, mps in zip(
        reports.objects.tolist(), _millis(reports).tolist(), speed.round(2).tolist(), strict=True
    ):
        yield f'{{"target":"T{number:04d}","seen":{ms / 1000:.3f},"mps":{mps}}}\n'


def _millis(reports: Reports) -> Numbers:
    return BEGIN_MS + (reports.at * 1000).round().astype(np.int64)


SENSORS: dict[
    str, tuple[Callable[[World], Reports], Callable[[Reports, Seconds], Iterator[str]]]
] = {
    "radar": (radar, _radar_lines),
    "link": (link, _link_lines),
    "optical": (optical, _optical_lines),
}  # fmt: skip


def write(world: World, folder: Path) -> dict[str, int]:
    """Write the files of every sensor, split by arrival time. Returns the number of rows of each."""
    counts = {}
    for sensor, (report, lines) in SENSORS.items():
        reports = report(world)
        speed = 100 + (reports.objects * 37 % 200) + 5 * np.sin(reports.at / 7)
        target = folder / sensor
        target.mkdir(parents=True, exist_ok=True)
        text = list(lines(reports, speed))
        last = int(reports.arrived[-1]) // world.file_seconds if text else -1
        cuts = np.searchsorted(reports.arrived, np.arange(last + 2) * world.file_seconds).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            if start < stop:
                (target / f"{sensor}-{number:05d}.ndjson").write_text("".join(text[start:stop]))
        counts[sensor] = len(text)
    return counts


def main() -> None:
    """Write the files and print how many rows they have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="seconds of event time [default: 60]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers [default: 0]")
    parser.add_argument("--objects", type=int, default=1000, help="objects in the sky [default: 1000]")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "in", help="folder [default: in, beside this file]"
    )
    given = parser.parse_args()
    world = World(seconds=given.seconds, seed=given.seed, objects=given.objects)
    print(json.dumps({"folder": str(given.out), "rows": write(world, given.out)}))


if __name__ == "__main__":
    main()
