"""Quarantined records that are read again on request: which ones a slice takes, and what the ledger says of them.

They are an epoch of their own, so that a rollback of it undoes nothing else. The position names the requests that were
answered, so that each is answered once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from firnline.sources.base import Split
from firnline.types import Json

NO_LIMIT = 1 << 62
NOT_QUARANTINED = "no longer quarantined"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a slice takes of the requests: their names, inputs for tasks, and records of what needs no reading."""

    requests: list[str] = field(default_factory=list)
    inputs: list[dict[str, Json]] = field(default_factory=list)
    records: list[dict[str, Json]] = field(default_factory=list)


class Replays:
    """The requests of one source to read quarantined records again. Serves many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[tuple[Mapping[str, Json], ...], bool]] = {}

    def __contains__(self, request: str) -> bool:
        with self._lock:
            return request in self._waiting

    def add(self, request: str, files: Sequence[Mapping[str, Json]], *, discard: bool) -> None:
        """Add a request, or replace it; see `Source.replay_quarantined`."""
        with self._lock:
            self._waiting[request] = (tuple(files), discard)

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that are gone."""
        with self._lock:
            for request in requests:
                self._waiting.pop(request, None)

    def choose(self, answered: Collection[str], max_bytes: int) -> Chosen | None:
        """Return what the next slice takes of the requests that are not answered; None if there are none."""
        with self._lock:
            waiting = {request: one for request, one in self._waiting.items() if request not in answered}
        if not waiting:
            return None
        now, chosen = datetime.now(UTC).isoformat(timespec="seconds"), Chosen()
        for request, (files, discard) in sorted(waiting.items()):
            wanted = [_input(request, file, now, discard=discard) for file in files if file["rows"]]
            if chosen.requests and sum(int(one["size_bytes"]) for one in [*chosen.inputs, *wanted]) > max_bytes:
                break
            chosen.inputs.extend(item for item in wanted if not discard)
            chosen.records.extend(replayed_record(item) for item in wanted if discard)
            gone = [str(file["name"]) for file in files if not file["rows"]]
            chosen.records.extend(refused_record(request, name, NOT_QUARANTINED, now) for name in gone)
            chosen.requests.append(request)
        return chosen


def _input(request: str, file: Mapping[str, Json], now: str, *, discard: bool) -> dict[str, Json]:
    """Return the input of a task for the records of one file of the quarantine."""
    return {
        "path": str(file["name"]),
        "quarantine": str(file["name"]),
        "rows": list(file["rows"]),
        **({"folders": list(file["folders"])} if "folders" in file else {}),
        "size_bytes": int(file["size_bytes"]),
        "etag": "",
        "create_time": None,
        "discovery_time": now,
        "from": 0,
        "to": int(file["records"]),
        "request": request,
        **({"discarded": True} if discard else {}),
    }


def refused_record(request: str, path: str, reason: str, now: str) -> dict[str, Json]:
    """Return the ledger's record of a request that is answered without reading anything."""
    return {
        "path": path,
        "size_bytes": 0,
        "etag": "",
        "create_time": None,
        "discovery_time": now,
        "from": 0,
        "to": 0,
        "status": "refused",
        "reason": reason,
        "request": request,
    }


def replayed_record(item: Mapping[str, Json]) -> dict[str, Json]:
    """Return the ledger's record of quarantined records that were read again, or discarded."""
    dropped = ("offset", "line", "at", "former_roots")
    return {**{key: value for key, value in item.items() if key not in dropped}, "status": "replayed"}


def deal_again(inputs: list[dict[str, Json]], parallelism: int) -> list[Split]:
    """Return contiguous ranges, as many as tasks run at once; rows keep the order of the files."""
    size = max(1, -(-len(inputs) // max(1, parallelism)))
    ranges = [inputs[at : at + size] for at in range(0, len(inputs), size)]
    return [Split(files, NO_LIMIT, NO_LIMIT, NO_LIMIT) for files in ranges]
