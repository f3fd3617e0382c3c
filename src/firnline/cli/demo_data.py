"""Makes realistic flight records in gz files, fast and the same every time."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

AIRPORTS = (
    ("FRA", 50.033, 8.571), ("OSL", 60.194, 11.1), ("LHR", 51.47, -0.454), ("JFK", 40.641, -73.778),
    ("NRT", 35.772, 140.393), ("GRU", -23.436, -46.473), ("SYD", -33.946, 151.177), ("CPT", -33.97, 18.602),
    ("ZRH", 47.458, 8.555), ("KEF", 63.985, -22.606), ("YVR", 49.195, -123.184), ("SIN", 1.364, 103.991),
)  # fmt: skip
CARRIERS = ("LH", "SK", "BA", "DL", "NH", "LA", "QF", "LX", "FI", "SQ")
AIRCRAFT = ("A320", "A21N", "A359", "B38M", "B789", "E190", "CRJ9")
STATUSES = ("landed",) * 17 + ("diverted", "cancelled", "delayed")


def write_flights(folder: Path, records: int, files: int, made: Callable[[int], None] | None = None) -> int:
    """Write `records` records with ids 0, 1, 2, ... into `files` gz files; returns their size in bytes.

    `made` is called after each file with the records written so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(20261101)
    size = done = 0
    for number in range(files):
        until = records * (number + 1) // files
        path = folder / f"flights-{number:04d}.json.gz"
        lines = [flight(rng, i) for i in range(done, until)]
        path.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=1, mtime=0))
        size += path.stat().st_size
        done = until
        if made is not None:
            made(done)
    return size


def flight(rng: random.Random, number: int) -> str:
    """One record as a line of JSON: nested, with lists, optional fields and text beyond ASCII."""
    pick = rng.random
    origin, lat, lon = AIRPORTS[int(pick() * 12)]
    target, target_lat, target_lon = AIRPORTS[int(pick() * 12)]
    status = STATUSES[int(pick() * 20)]
    minute = number % 1440
    day = number // 1440 % 28 + 1
    delay = f'"delay_minutes":{int(pick() * 90)},' if pick() < 0.3 else ""
    note = '"note":"Gate geändert, bitte beachten",' if pick() < 0.02 else ""
    economy, business = pick() * 400 + 40, pick() * 2000 + 300
    return (
        f'{{"id":{number},"flight":"{CARRIERS[int(pick() * 10)]}{int(pick() * 9000) + 100}","status":"{status}",'
        f'"departure":"2026-10-{day:02d}T{minute // 60:02d}:{minute % 60:02d}:00Z",'
        f'"from":{{"iata":"{origin}","lat":{lat},"lon":{lon}}},'
        f'"to":{{"iata":"{target}","lat":{target_lat},"lon":{target_lon}}},'
        f'{delay}{note}"aircraft":"{AIRCRAFT[int(pick() * 7)]}","passengers":{int(pick() * 300)},'
        f'"fares":[{{"class":"Y","price":{economy:.2f}}},{{"class":"C","price":{business:.2f}}}]}}\n'
    )
