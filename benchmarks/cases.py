"""What is measured. Each case returns rows; a ratio compares figures of one run on one machine."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import peers, subject
from benchmarks.records import write_files
from benchmarks.turns import round_off
from firnline.clock import monotonic

RUNS = 3  # the best of so many: the machine is shared


@dataclass(frozen=True)
class Row:
    """One figure. `ratio` is how many times better Firnline is than its peer, or what the aim speaks of.

    Raises:
        ValueError: A figure is zero, negative or no number: it was not measured, so no aim is met by it.
    """

    name: str
    firnline: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    aim: str = ""
    met: bool | None = None

    def __post_init__(self) -> None:
        for told, figure in (("figure", self.firnline), ("peer's figure", self.peer), ("ratio", self.ratio)):
            if figure is not None and not (math.isfinite(figure) and figure > 0):
                raise ValueError(f"the {told} of {self.name!r} is {figure}, which was never measured")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class World:
    """Inputs and sessions that cases share."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self.scale = scale

    @property
    def is_trial(self) -> bool:
        """Whether this only tries if the cases work: the figures of such small inputs mean nothing."""
        return self.scale < 0.1

    def rounds(self, wanted: int) -> int:
        """How often something is measured."""
        return 1 if self.is_trial else wanted

    @cached_property
    def spark(self) -> Any:
        spark = peers.open_spark(trial=self.is_trial)
        if self.is_trial:
            spark.conf.set("spark.databricks.delta.snapshotPartitions", "2")  # most of a small commit's time
        return spark

    @cached_property
    def engine(self) -> Any:
        assert self.spark is not None  # the same session serves both
        return subject.new_engine()

    @cached_property
    def big_files(self) -> Path:
        write_files(self.folder / "big", 8, max(1000, int(200_000 * self.scale)))
        return self.folder / "big"

    @cached_property
    def schema(self) -> Any:
        """The peer is given the schema: inference would read everything twice."""
        return self.spark.read.json(str(next(self.big_files.iterdir()))).schema


def _best(world: World, measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(world.rounds(RUNS)))


def throughput(world: World) -> list[Row]:
    """8 gz files of 200,000 nested records, both warm."""
    source, schema = world.big_files, world.schema
    warm = world.folder / "warm"
    if not world.is_trial:
        subject.ingest(world.engine, source, warm)
        peers.stream(world.spark, source, warm / "peer", schema)
    ours = _best(world, lambda: subject.ingest(world.engine, source, world.folder / "a")[0])
    theirs = _best(world, lambda: peers.stream(world.spark, source, world.folder / "b", schema))
    raw = sum(len(gzip.decompress(p.read_bytes())) for p in source.iterdir()) / 1e6
    rows = _count(world.folder / "a" / "table")
    assert rows == 8 * max(1000, int(200_000 * world.scale)), rows
    ratio = theirs / ours
    return [
        Row(
            f"throughput, {raw:.0f} MB raw in 8 gz files",
            round(ours, 2),
            "s",
            round(theirs, 2),
            ratio,
            ">= 5x",
            ratio >= 5,
        ),
        Row("throughput", round_off(raw / ours), "MB/s", round_off(raw / theirs), ratio),
    ]


def small_files(world: World) -> list[Row]:
    """10,000 files of 100 records."""
    files = max(100, int(10_000 * world.scale))
    source = world.folder / "small"
    source.mkdir(parents=True, exist_ok=True)
    first = next(world.big_files.iterdir())
    lines = gzip.decompress(first.read_bytes()).splitlines(keepends=True)
    for number in range(files):
        at = number * 100 % (len(lines) - 100)
        (source / f"{number:06}.ndjson.gz").write_bytes(gzip.compress(b"".join(lines[at : at + 100]), 1))
    if not world.is_trial:
        subject.ingest(world.engine, source, world.folder / "warm")
    ours = _best(world, lambda: subject.ingest(world.engine, source, world.folder / "a")[0])
    theirs = peers.stream(world.spark, source, world.folder / "b", world.schema)
    shutil.rmtree(source)
    ratio = theirs / ours
    name = f"{files} small files"
    return [
        Row(name, round(ours, 2), "s", round(theirs, 2), ratio, ">= 10x", ratio >= 10),
        Row("per small file", round(ours / files * 1000, 3), "ms", round(theirs / files * 1000, 3), ratio),
    ]


def commits(world: World) -> list[Row]:
    """1,000 epochs of one small file each: the commit step stays flat."""
    epochs = max(100, int(1000 * world.scale))
    source = world.folder / "tiny"
    source.mkdir(parents=True, exist_ok=True)
    for number in range(epochs):
        (source / f"{number:06}.ndjson").write_text(json.dumps({"id": number, "v": number / 3}) + "\n")
    from firnline.testing.local import LocalEngine

    times: list[float] = []
    with _timed_commits(times):
        subject.ingest(LocalEngine(), source, world.folder / "commits", max_files=1)
    assert len(times) == epochs, f"{len(times)} commits of {epochs} epochs"
    # Around commit 10 and at the end, each over two intervals between Delta's own checkpoints.
    early, late = statistics.median(times[2:42]), statistics.median(times[-40:])
    p50 = statistics.median(times)
    return [
        Row("commit step, p50", round_off(p50), "ms", aim="< 60 ms", met=p50 < 60),
        Row(
            f"commit {epochs} against commit 10",
            round_off(late),
            "ms",
            round_off(early),
            late / early,
            "<= 1.3x",
            late / early <= 1.3,
        ),
    ]


@contextmanager
def _timed_commits(times: list[float]) -> Iterator[None]:
    """Note the milliseconds of every commit step; a run tells whole ones only."""
    from firnline.run.steps import Steps

    real = Steps.commit

    def timed(steps: Steps, sink: str, epoch: int) -> Any:
        began = monotonic()
        found = real(steps, sink, epoch)
        times.append((monotonic() - began) * 1000)
        return found

    Steps.commit = timed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Steps.commit = real  # type: ignore[method-assign]


def state(world: World) -> list[Row]:
    """100,000 files processed: what the source remembers."""
    from datetime import UTC, datetime

    from firnline.checkpoint.codec import canonical
    from firnline.checkpoint.model import Checkpoint
    from firnline.sources.base import Limits
    from firnline.sources.files import planning
    from firnline.sources.files.position import FileState
    from firnline.storage import FileStat

    files = int(100_000 * max(world.scale, 0.05))
    limits = Limits(1000, 1 << 30, 5_000_000, 60_000, 10, 2)
    position = FileState("/data/in")
    began = monotonic()
    for start in range(0, files, 1000):
        now = datetime.now(UTC)
        names = (f"/data/in/2026/part-{n:08}.ndjson.gz" for n in range(start, start + 1000))
        listed = [FileStat(name, 1000, "e", now) for name in names]
        chosen = planning.choose(position, [], listed, limits)
        tasks = planning.deal(chosen, limits, "now")
        ended = [
            {"path": i["path"], "to": 10, "offset": 0, "line": 10, "finished": True} for t in tasks for i in t.inputs
        ]
        position, _ = planning.advance(chosen.base, tasks, ended, 3, start)
    seconds = monotonic() - began
    remembered = len(canonical(position.to_json()))
    checkpoint = Checkpoint(
        "bench", 100, 1, "r" * 16, "a" * 16, "2026-11-16T00:00:00+00:00", {"in": position.to_json()}
    )
    size = len(canonical(checkpoint.to_json()))
    return [
        Row(f"position of a source after {files} files", remembered, "bytes", aim="< 1024", met=remembered < 1024),
        Row("checkpoint", size, "bytes", aim="< 4096", met=size < 4096),
        Row("planning", round(seconds / files * 1e6, 1), "us/file"),
    ]


# A child's ru_maxrss begins at its parent's; the high-water mark of its own memory does not.
PEAK = "int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"

_LISTING = f"""
import sys
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.base import Limits
from firnline.sources.known import KnownFiles
from firnline.sources.files.source import FileSource
source = FileSource(FileSourceOptions(name="in", path=sys.argv[1]), once=True)
position = source.start(None)
limits = Limits(1000, 1 << 30, 5_000_000, 600_000, 10, 2)
known = KnownFiles((stat.name, stat.etag) for stat in source.list_inputs())
found = source.find_late(position, known)
assert source.plan(position, limits) is not None
assert source.backlog(position).files_outstanding == found.listed
print(found.listed, {PEAK})
"""


def listing(world: World) -> list[Row]:
    """1,000,000 files listed, planned and reconciled by one driver."""
    files = max(10_000, int(1_000_000 * world.scale))
    source = world.folder / "listing"
    for number in range(0, files, 1000):
        folder = source / f"day={number // 10_000:04}" / f"{number:08}"
        folder.mkdir(parents=True)
        for each in range(number, number + 1000):
            os.close(os.open(folder / f"part-{each:09}.ndjson.gz", os.O_CREAT))
    began = monotonic()
    out = subprocess.run([sys.executable, "-c", _LISTING, str(source)], capture_output=True, text=True, check=True)
    seconds = monotonic() - began
    listed, peak = (int(word) for word in out.stdout.split())
    assert listed == files
    shutil.rmtree(source)
    return [
        Row(f"driver memory, {files} files listed", round(peak / 1024), "MB", aim="< 500", met=peak / 1024 < 500),
        Row("listed three times over in", round(seconds, 1), "s"),
    ]


_MEMORY = f"""
import sys
from pathlib import Path
from benchmarks import subject
from firnline.testing.local import LocalEngine
subject.ingest(LocalEngine(), Path(sys.argv[1]), Path(sys.argv[2]))
print({PEAK})
"""


def memory(world: World) -> list[Row]:
    """One gz file of 1 GB raw in one worker."""
    source = world.folder / "huge"
    source.mkdir(parents=True, exist_ok=True)
    one = next(world.big_files.iterdir()).read_bytes()
    copies = max(1, round(20 * world.scale))
    with (source / "huge.ndjson.gz").open("wb") as out:
        for _ in range(copies):
            out.write(one)  # a gzip file may have many members
    work = [str(source), str(world.folder / "huge-out")]
    run = subprocess.run([sys.executable, "-c", _MEMORY, *work], capture_output=True, text=True, check=True)
    peak = int(run.stdout)
    raw = copies * len(gzip.decompress(one)) / 1e9
    shutil.rmtree(source)
    return [
        Row(f"worker peak, one file of {raw:.1f} GB raw", round(peak / 1024), "MB", aim="< 600", met=peak / 1024 < 600)
    ]


def fsync_cost(world: World) -> list[Row]:
    """What durability costs: the same ingestion with fsync turned off."""
    real = os.fsync
    with_fsync = _best(world, lambda: subject.ingest(_local(), world.big_files, world.folder / "a")[0])
    os.fsync = lambda fd: None  # noqa: ARG005  # the name is part of the signature
    try:
        without = _best(world, lambda: subject.ingest(_local(), world.big_files, world.folder / "a")[0])
    finally:
        os.fsync = real
    ratio = with_fsync / without
    return [Row("ingestion with fsync against without", round(with_fsync, 2), "s", round(without, 2), ratio)]


def _local() -> Any:
    from firnline.testing.local import LocalEngine

    return LocalEngine()


def recovery(world: World) -> list[Row]:
    """From start after a kill to the first new commit, in processes of their own."""
    source, table = world.big_files, world.folder / "killed" / "table"
    spec = world.folder / "killed" / "firnline.yml"
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(
        f"name: bench\nsources: {{records: {{type: files, path: {source}}}}}\n"
        f"sinks: [{{type: delta, table: {table}}}]\nbatch: {{max_files: 1}}\n"
    )
    command = [str(Path(sys.executable).parent / "firnline"), "run", str(spec), "--once"]
    log = table / "_delta_log"

    def versions() -> int:
        return len(list(log.glob("*.json"))) if log.exists() else 0

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while versions() < 3 and first.poll() is None:
        time.sleep(0.01)
    os.killpg(first.pid, 9)
    first.wait()
    before = versions()
    began = monotonic()
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while versions() < before + 2 and second.poll() is None:  # the claim, then the first new epoch
        time.sleep(0.005)
    seconds = monotonic() - began
    assert second.wait() == 0
    assert _count(table) == 8 * max(1000, int(200_000 * world.scale))
    return [Row("start after a kill to the first new commit", round(seconds, 2), "s")]


def _count(table: Path) -> int:
    """Rows of a Delta table, counted by DuckDB."""
    import duckdb
    from deltalake import DeltaTable

    files = DeltaTable(str(table)).file_uris()
    return int(duckdb.execute("select count(*) from read_parquet(?)", [files]).fetchall()[0][0])
