"""Models for tests of checkpoint stores, and writers that use one store at once, in threads and processes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.model import Checkpoint
from firnline.errors import VersionConflictError
from firnline.options import StoreOptions
from firnline.stores import open_store
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.types import EntryRef, Json

__all__ = [
    "Lsn",
    "check_count",
    "count_in_process",
    "in_processes",
    "in_threads",
    "increment",
    "increments",
    "put_in_process",
    "sample_record",
]

PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Lsn:
    """A model that has nothing to do with Firnline's own: where a log of changes was read to."""

    segment: int
    offset: int

    def to_json(self) -> Json:
        return {"segment": self.segment, "offset": self.offset}

    @classmethod
    def from_json(cls, value: Json, what: str = "lsn") -> Lsn:  # noqa: ARG003
        return cls(int(value["segment"]), int(value["offset"]))


def sample_record(epoch: int = 1, pipeline: str = "orders", files: int = 1) -> CheckpointRecord:
    """A record as a run leaves it, with a position of `files` files."""
    positions = {
        "files": {"last_committed_file": None, "files": {f"in/{n:06d}.json": "Finished" for n in range(files)}}
    }
    checkpoint = Checkpoint(
        pipeline=pipeline,
        epoch=epoch,
        generation=3,
        run="run-1",
        attempt=f"attempt-{epoch}",
        created_at="2026-01-01T00:00:00+00:00",
        positions=positions,
        schema_fingerprint="f" * 64,
        schema_version=1,
    )
    return CheckpointRecord(checkpoint, EntryRef(epoch, f"{epoch:020d}-a.json", "c" * 64), durations_ms={"commit": 5})


def check_count(store: CheckpointStore, total: int) -> None:
    """Every increment is there exactly once, each standing on the one before."""
    infos = [*store.list_versions("count", limit=10 * total)]
    assert [info.version for info in infos] == [*range(total, 0, -1)]
    counts = [json.loads(store.get_version_raw("count", n) or b"null")["count"] for n in range(1, total + 1)]
    assert counts == [*range(1, total + 1)]


def increment(store: CheckpointStore, key: str, name: str) -> None:
    """Count one up by compare and set, as often as rivals make it necessary."""
    while True:
        expected = store.latest_version(key)
        before = store.get_version_raw(key, expected)
        count = json.loads(before)["count"] if before else 0
        data = canonical({"count": count + 1, "writer": name})
        try:
            store.put_raw_versioned(key, data, expected, name)
        except VersionConflictError:
            continue
        return


def increments(store: CheckpointStore, name: str, times: int) -> None:
    """Count up several times."""
    for _ in range(times):
        increment(store, "count", name)


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Do all of it at once; the first error is raised here."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def count_in_process(options: StoreOptions, name: str, times: int) -> list[int]:
    """In a child: increment a counter by compare and set."""
    with closing(open_store(options)) as store:
        increments(store, name, times)
    return []


def put_in_process(options: StoreOptions, name: str, times: int) -> list[int]:
    """In a child: put values whatever was there before; tells the versions."""
    with closing(open_store(options)) as store:
        return [store.put_raw("put", canonical({"writer": name, "nth": nth})) for nth in range(times)]


def in_processes(
    work: Callable[[StoreOptions, str, int], list[int]], options: StoreOptions, times: int, folder: Path
) -> dict[str, list[int]]:
    """Do `work` in several processes at once; returns what each told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["firnline.stores"])
    names = [f"process {n}" for n in range(PROCESSES)]
    children = [
        context.Process(target=_tell, args=(work, options, name, times, str(folder / name)), daemon=True)
        for name in names
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        if child.exitcode is None:
            child.kill()
            child.join()
    assert [child.exitcode for child in children] == [0] * PROCESSES
    return {name: json.loads((folder / name).read_text()) for name in names}


def _tell(
    work: Callable[[StoreOptions, str, int], list[int]], options: StoreOptions, name: str, times: int, path: str
) -> None:
    Path(path).write_text(json.dumps(work(options, name, times)))
