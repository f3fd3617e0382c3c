"""Two-stage tables: what staging costs the writer, how fast the committer is, how late a row is seen."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import firnline
from benchmarks.cases import RUNS, Row, World
from firnline.clock import SystemClock, monotonic
from firnline.committer.committer import Committer
from firnline.committer.service import CommitterService, TableRef
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.table import Table
from firnline.storage import open_storage
from firnline.testing.local import LocalEngine


def _pipeline(source: Path, table: Path, mode: str, **batch: Any) -> firnline.Pipeline:
    return firnline.Pipeline(
        name="bench",
        sources={"records": {"type": "files", "path": str(source), "poll_interval_secs": 1}},
        sinks=[{"type": "delta", "table": str(table), "mode": mode}],
        batch=batch,
        checkpoint={"store": {"type": "file", "path": f"{table}-store"}},
    )


def _ingest(source: Path, work: Path) -> float:
    shutil.rmtree(work, ignore_errors=True)  # the table and its store
    options = _pipeline(source, work / "table", "staged", max_files=1).options
    began = monotonic()
    result = Runner(open_pipeline(options, once=True), LocalEngine(), once=True).run()
    if result.error is not None:
        raise result.error
    return monotonic() - began


@contextmanager
def _committer(table: Path, poll: float) -> Iterator[None]:
    """A committer in a process of its own, as it is run."""
    command = [str(Path(sys.executable).parent / "firnline"), "commit", str(table), "--poll-interval-secs", str(poll)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1.5)  # started, and idle
        yield
    finally:
        process.terminate()
        process.wait()


def staged_ingest(world: World) -> list[Row]:
    """Ingestion, one file an epoch, with the committer stopped and with it running."""
    source, work = world.big_files, world.folder / "staged"
    _ingest(source, work)
    stopped, running = [], []
    for _ in range(world.rounds(RUNS)):  # in turns: the machine is shared
        stopped.append(_ingest(source, work))
        with _committer(work / "table", 1):
            running.append(_ingest(source, work))
    ratio = min(running) / min(stopped)
    name = "staged ingestion, committer stopped against running"
    return [Row(name, round(min(stopped), 2), "s", round(min(running), 2), ratio, ">= 0.95", ratio >= 0.95)]


_COMMIT_ALL = """
import sys
from firnline.clock import SystemClock, monotonic
from firnline.sinks.delta.table import Table
from firnline.committer.committer import Committer
from firnline.storage import open_storage

def resident():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * 4 / 1024

first = []
def progress(units):
    if units >= 1000 and not first:
        first.append(resident())

table = sys.argv[1]
committer = Committer(Table(table, {}), open_storage(table), "bench", SystemClock())
began = monotonic()
report = committer.cycle(progress)
seconds = monotonic() - began
print(report.units, seconds, first[0] if first else resident(), resident())
"""


def units(world: World) -> list[Row]:
    """Pending single-file units, of another program and of a pipeline, committed by one fresh committer."""
    count = max(2000, int(10_000 * world.scale))
    rows = []
    for name, prepare in (("foreign", _put_foreign), ("own", _put_own)):
        table = world.folder / f"units-{name}"
        prepare(table, count)
        run = subprocess.run(
            [sys.executable, "-c", _COMMIT_ALL, str(table)], capture_output=True, text=True, check=True
        )
        done, seconds, first, last = (float(word) for word in run.stdout.split())
        assert done == count, run.stdout
        speed, growth = done / seconds, last / first
        rows += [
            Row(f"{count} {name} units committed", round(speed), "units/s", aim=">= 2,000", met=speed >= 2000),
            Row(f"RSS after {count} {name} units", round(last), "MB", round(first), growth, "<= 1.2x", growth <= 1.2),
        ]
        shutil.rmtree(table)
    return rows


def _put_foreign(table: Path, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import write_deltalake

    columns = {"id": [1], "name": ["x"], "value": [1.5]}
    write_deltalake(str(table), pa.table(columns))
    pq.write_table(pa.table(columns), table / "one")
    data = (table / "one").read_bytes()
    pending = table / "_staging" / "pending"
    pending.mkdir(parents=True)
    for number in range(count):
        (table / f"{number:06}.parquet").write_bytes(data)
        body = {"path": f"{number:06}.parquet", "size": len(data), "record_count": 1}
        (pending / f"{number:06}.meta.json").write_text(json.dumps(body))


def _put_own(table: Path, count: int) -> None:
    """A pipeline's units, made from its first one: entries and checkpoints of their own, in a chain."""
    from firnline.checkpoint.codec import canonical, checksum, seal, unseal

    source = table.parent / "units-in"
    source.mkdir(exist_ok=True)
    (source / "a.ndjson").write_text('{"id": 1, "name": "x", "value": 1.5}\n')
    result = Runner(
        open_pipeline(_pipeline(source, table, "staged").options, once=True), LocalEngine(), once=True
    ).run()
    assert result.exit_code == 0
    pending = table / "_staging" / "pending"
    (first,) = list(pending.iterdir())
    body = {key: value for key, value in unseal(json.loads(first.read_bytes()), "unit").items() if key != "format"}
    data = (table / body["files"][0]["path"]).read_bytes()
    for epoch in range(2, count + 1):
        attempt = f"{epoch:016x}"
        (table / f"{attempt}.parquet").write_bytes(data)
        inner = {key: value for key, value in unseal(body["checkpoint"], "unit").items() if key != "format"}
        checkpoint = seal({**inner, "epoch": epoch, "attempt": attempt})
        before = {"entry": body["entry"], "epoch": epoch - 1, "checkpoint_checksum": body["checkpoint"]["checksum"]}
        body = {
            **body,
            "epoch": epoch,
            "attempt": attempt,
            "checkpoint": checkpoint,
            "entry": {"epoch": epoch, "name": f"{attempt}.json", "checksum": checksum(attempt.encode())},
            "previous": before,
            "files": [{**body["files"][0], "path": f"{attempt}.parquet"}],
        }
        (pending / f"{attempt}.meta.json").write_bytes(canonical(seal(body)))


def poll(world: World) -> list[Row]:
    """One look at an empty staging folder."""
    table = world.folder / "poll"
    _put_foreign(table, 1)
    committer = Committer(Table(str(table), {}), open_storage(str(table)), "bench", SystemClock())
    committer.cycle()
    times = []
    for _ in range(200):
        began = monotonic()
        committer.cycle()
        times.append((monotonic() - began) * 1000)
    median = statistics.median(times)
    return [Row("poll of an empty staging folder", round(median, 3), "ms", aim="< 10", met=median < 10)]


def latency(world: World) -> list[Row]:
    """From a file's arrival to its rows in the log, both sides polling once a second."""
    rows = []
    for name, mode in (("single-stage", "direct"), ("two-stage", "staged")):
        seen = sorted(_latencies(world.folder / f"latency-{mode}", mode, max(10, int(40 * world.scale))))
        p50, p95 = statistics.median(seen), seen[min(len(seen) - 1, int(len(seen) * 0.95))]
        rows += [
            Row(f"arrival to visibility, {name}, p50", round(p50, 2), "s"),
            Row(f"arrival to visibility, {name}, p95", round(p95, 2), "s"),
        ]
    return rows


def _latencies(work: Path, mode: str, files: int) -> list[float]:
    source, table = work / "in", work / "table"
    source.mkdir(parents=True)
    (source / "00000.ndjson").write_text('{"id": 0}\n')
    runner = Runner(open_pipeline(_pipeline(source, table, mode).options), LocalEngine())
    threads = [threading.Thread(target=runner.run)]
    service = CommitterService([TableRef(str(table))], "bench", SystemClock(), poll_interval_secs=1)
    if mode == "staged":
        threads.append(threading.Thread(target=service.run))
    for thread in threads:
        thread.start()
    while 0 not in _visible(table):
        time.sleep(0.05)
    arrived = {}
    for number in range(1, files + 1):
        path = source / f"{number:05}.ndjson"
        path.with_suffix(".part").write_text(json.dumps({"id": number}) + "\n")
        path.with_suffix(".part").rename(path)
        arrived[number] = time.time()
        time.sleep(0.37)  # never in step with the polls
    while not arrived.keys() <= _visible(table).keys():
        time.sleep(0.1)
    runner.stop()
    service.stop()
    for thread in threads:
        thread.join()
    seen = _visible(table)
    return [seen[number] - at for number, at in arrived.items()]


def _visible(table: Path) -> dict[int, float]:
    """Every id that a commit added, and when its log file appeared."""
    import pyarrow.parquet as pq

    found: dict[int, float] = {}
    for path in sorted((table / "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            add = json.loads(line).get("add")
            if add is not None:
                ids = pq.read_table(table / add["path"], columns=["id"]).column("id").to_pylist()
                found.update((number, path.stat().st_mtime) for number in ids)
    return found
