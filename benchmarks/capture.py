"""Change capture: a database's log is read, decoded and committed, beside the client that comes with the server and
throws the log away; memory over a large transaction; latency from COMMIT to a visible row."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from benchmarks.captured import Database, Postgres, running_database
from benchmarks.cases import PEAK, Row, World
from benchmarks.debezium import find_debezium, read_changes
from benchmarks.kafka_source import Commits
from benchmarks.turns import costs_in_turns, in_turns, p50
from firnline.clock import monotonic
from firnline.options import PipelineOptions
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sources.cdc.log import LogDecoder, LogStream, Piece
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.postgres.decode import PostgresDecoder

SERVERS = ("postgres", "mysql")
ROWS, SNAPSHOT_ROWS, DEBEZIUM_ROWS, ROUNDS = 1_000_000, 5_000_000, 500_000, 3
TRANSACTION_ROWS, SMALLER = 5_000_000, 5  # a fifth fills all buffers already: what more rows add is growth
PIECE, FILE = 1 << 20, 16 << 20  # as the spool reads, and keeps
COMMITS = 30
AIM_DECODE, AIM_BACKLOG, AIM_STREAM, AIM_SNAPSHOT, AIM_FLAT = 1_000_000, 150_000, 0.9, 0.8, 1.25
AIM_DEBEZIUM = 5
DECODERS: dict[str, Callable[[], LogDecoder]] = {"postgres": PostgresDecoder, "mysql": MySqlDecoder}


def capture_decode(world: World) -> list[Row]:
    """A million rows of 6 columns and about 150 bytes: decoded, and read from the server in turns with its client."""
    count = max(10_000, int(ROWS * world.scale))
    rows: list[Row] = []
    for name in SERVERS:
        with running_database(name) as database:
            start = _begin(database)
            transactions = database.fill_many(count)
            files = _read(database, start, transactions)

            def read(database: Database = database, start: Any = start, many: int = transactions) -> None:
                for _ in _pieces(database, start, many):  # thrown away, as the client does
                    pass

            works = [read, *([database.throw_away] if database.client else [])]
            read_ms, *thrown_ms = in_turns(works, rounds=world.rounds(ROUNDS), each=1)

        def decode(files: list[Any] = files, name: str = name) -> None:
            found = sum(DECODERS[name]().decode(context, frames).count for context, frames in files)
            assert found == count, f"{found} rows of {count}"

        (cost,) = costs_in_turns([decode], rounds=world.rounds(ROUNDS))
        decoded, size = count * 1000 / cost.cpu_ms, sum(len(frames) for _, frames in files) / count
        rows.append(
            Row(f"{database.name} log: decode rows of {size:.0f} bytes", round(decoded), "per s of CPU", None, None,
                f">= {AIM_DECODE:g} per s", decoded >= AIM_DECODE)
        )  # fmt: skip
        rows.append(_beside(f"{database.name} log: read rows", database, count, read_ms, thrown_ms))
    return rows


def capture_backlog(world: World) -> list[Row]:
    """A backlog of a million rows into a Delta history table on Spark, in turns with the client that throws it away."""
    count = max(10_000, int(ROWS * world.scale))
    rows: list[Row] = []
    for name in SERVERS:
        folder, saved = world.folder / f"capture-{name}", world.folder / f"capture-{name}-begin"
        with running_database(name) as database:
            options = database.pipeline(folder)
            _run(options, world.engine)  # records where reading begins
            shutil.copytree(folder, saved)
            database.keep()
            database.fill_many(count)
            seconds: list[float] = []

            def capture(
                database: Database = database, options: Any = options, folder: Path = folder, saved: Path = saved,
                seconds: list[float] = seconds,
            ) -> None:  # fmt: skip
                shutil.rmtree(folder)
                shutil.copytree(saved, folder)
                database.rewind()
                began = monotonic()
                _run(options, world.engine)
                seconds.append(monotonic() - began)
                found = DeltaTable(str(folder / "history")).to_pyarrow_dataset().count_rows()
                assert found == count, f"{found} rows of {count}"

            works = [capture, *([database.throw_away] if database.client else [])]
            _, *thrown_ms = in_turns(works, rounds=world.rounds(ROUNDS), each=1)
        ours_ms = [one * 1000 for one in seconds[1:]]  # the first round is not counted
        shutil.rmtree(folder)
        shutil.rmtree(saved)
        speed = count * 1000 / p50(ours_ms)
        rows.append(
            Row(f"{database.name} backlog into a Delta history table", round(speed), "rows per s", None, None,
                f">= {AIM_BACKLOG:g} per s", speed >= AIM_BACKLOG)
        )  # fmt: skip
        rows.append(_beside(f"{database.name} backlog into a Delta history table", database, count, ours_ms, thrown_ms))
    return rows


def capture_debezium(world: World) -> list[Row]:
    """A backlog of PostgreSQL into a Delta history table on Spark, beside Debezium's embedded engine, which hands each
    batch of changes to a Python function that throws it away. The start of neither counts."""
    count = max(10_000, int(DEBEZIUM_ROWS * world.scale))
    folder, saved = world.folder / "capture-debezium", world.folder / "capture-debezium-begin"
    with running_database("postgres") as database:
        assert isinstance(database, Postgres)
        options = database.pipeline(folder)
        _run(options, world.engine)  # records where reading begins
        shutil.copytree(folder, saved)
        database.keep()
        database.fill_many(count)
        _run(options, world.engine)  # is not counted
        shutil.rmtree(folder)
        saved.rename(folder)
        database.rewind()
        began = monotonic()
        _run(options, world.engine)
        ours = count / (monotonic() - began)
        python = find_debezium(may_install=world.scale >= 0.1)
        seconds = read_changes(python, database.debezium(), count, folder / "debezium") if python is not None else None
    shutil.rmtree(folder)
    title = "postgres backlog into a Delta history table"
    if seconds is None:
        return [Row(f"{title}; Debezium's engine is missing", round(ours), "rows per s")]
    theirs = count / seconds
    return [
        Row(f"{title}, beside Debezium's embedded engine that throws it away", round(ours), "rows per s", round(theirs),
            ours / theirs, f">= {AIM_DEBEZIUM:g}x", ours / theirs >= AIM_DEBEZIUM)
    ]  # fmt: skip


def capture_snapshot(world: World) -> list[Row]:
    """The rows of a table into a Delta history table on Spark, in turns with the client that reads them and throws them
    away."""
    count = max(10_000, int(SNAPSHOT_ROWS * world.scale))
    rows: list[Row] = []
    for name in SERVERS:
        folder = world.folder / f"capture-snapshot-{name}"
        with running_database(name) as database:
            database.fill_many(count)

            def read(database: Database = database, folder: Path = folder) -> None:
                shutil.rmtree(folder, ignore_errors=True)
                database.forget()
                _run(database.pipeline(folder, snapshot="initial"), world.engine)
                found = DeltaTable(str(folder / "history")).to_pyarrow_dataset().count_rows()
                assert found == count, f"{found} rows of {count}"

            works = [read, *([database.dump] if database.dumper else [])]
            ours_ms, *dumped_ms = in_turns(works, rounds=world.rounds(ROUNDS), each=1)
        shutil.rmtree(folder)
        ours = count * 1000 / p50(ours_ms)
        title = f"{database.name} snapshot of {count:,} rows into a Delta history table"
        if not dumped_ms:
            rows.append(Row(f"{title}; the client to read them is missing", round(ours), "rows per s"))
            continue
        dumped = count * 1000 / p50(dumped_ms[0])
        ratio = ours / dumped
        rows.append(
            Row(f"{title}, beside {database.dumper}", round(ours), "rows per s", round(dumped), ratio,
                f">= {AIM_SNAPSHOT:g}x", ratio >= AIM_SNAPSHOT)
        )  # fmt: skip
    return rows


def capture_memory(world: World) -> list[Row]:
    """The peak of one process that reads, decodes and writes one transaction: of five million rows, and of a fifth."""
    count = max(20_000, int(TRANSACTION_ROWS * world.scale))
    rows: list[Row] = []
    for name in SERVERS:
        folder = world.folder / f"capture-memory-{name}"
        few, peaks = count // SMALLER, []
        with running_database(name) as database:
            source = database.source()
            _run_alone(source, folder)  # records where reading begins
            for first, many in ((0, few), (few, count)):
                database.fill(first, many)
                peaks.append(_run_alone(source, folder) / 1024)
        assert DeltaTable(str(folder / "history")).to_pyarrow_dataset().count_rows() == few + count
        shutil.rmtree(folder)
        ratio = peaks[1] / peaks[0]
        rows.append(
            Row(f"{name}: peak over a transaction of {count:,} rows, beside a fifth of it", round(peaks[1]), "MB",
                round(peaks[0]), ratio, f"<= {AIM_FLAT:g}x", ratio <= AIM_FLAT)
        )  # fmt: skip
    return rows


def capture_latency(world: World) -> list[Row]:
    """From the answer to COMMIT to the row in a Delta table, on Spark."""
    rows: list[Row] = []
    for name in SERVERS:
        folder = world.folder / f"capture-latency-{name}"
        with running_database(name) as database:
            found = _latencies(database, folder, world.engine, world.rounds(COMMITS))
        shutil.rmtree(folder)
        tail = statistics.quantiles(found, n=20)[-1] if len(found) > 1 else found[0]
        middle = p50(found)
        rows.append(Row(f"{name}: COMMIT to a visible row, p50", round(middle), "ms", aim="< 1000", met=middle < 1000))
        rows.append(Row(f"{name}: COMMIT to a visible row, p95", round(tail), "ms"))
    return rows


def _beside(name: str, database: Database, count: int, ours_ms: list[float], thrown_ms: list[list[float]]) -> Row:
    """A row beside the client of the server, if there is one."""
    ours = count * 1000 / p50(ours_ms)
    if not thrown_ms:
        return Row(f"{name}; the client to throw them away is missing", round(ours), "per s")
    thrown = count * 1000 / p50(thrown_ms[0])
    ratio = ours / thrown
    return Row(f"{name}, beside {database.client} that throws them away", round(ours), "per s", round(thrown), ratio,
               f">= {AIM_STREAM:g}x", ratio >= AIM_STREAM)  # fmt: skip


def _begin(database: Database) -> Any:
    """Return where reading begins."""
    start = database.stream().begin()
    database.keep()
    return start


def _pieces(database: Database, start: Any, transactions: int) -> Iterator[tuple[LogStream, Piece, bool]]:
    """Read whole transactions, as the spool does: the stream, each piece, and whether it is the last one."""
    database.rewind()
    stream = database.stream()
    stream.open(start)
    cuts = 0
    while cuts < transactions:
        piece = stream.read(PIECE, 10.0)
        cuts += len(piece.cuts)
        yield stream, piece, cuts == transactions
    stream.close()


def _read(database: Database, start: Any, transactions: int) -> list[tuple[bytes, bytes]]:
    """Read whole transactions; returns context and frames of every file, as the spool keeps them."""
    found: list[tuple[bytes, bytes]] = []
    frames, context = bytearray(), b""
    for stream, piece, is_last in _pieces(database, start, transactions):
        frames += piece.frames
        if len(frames) >= FILE or is_last:
            found.append((context, bytes(frames)))
            frames, context = bytearray(), stream.context(at_cut=False)
    return found


def _run(options: PipelineOptions, engine: Any) -> None:
    result = Runner(open_pipeline(options, once=True), engine, Observer(), once=True).run()
    if result.error is not None:
        raise result.error


_ALONE = f"""
import json, sys
import firnline
from benchmarks.capture import _run
from firnline.testing.local import LocalEngine
source, folder = json.loads(sys.argv[1]), sys.argv[2]
sinks = [{{"type": "delta", "table": folder + "/history", "input": "shop.orders"}}]
store = {{"store": {{"type": "file", "path": folder + "/store"}}}}
_run(firnline.Pipeline(name="bench", sources={{"shop": source}}, sinks=sinks, checkpoint=store).options, LocalEngine(1))
print({PEAK})
"""


def _run_alone(source: dict[str, Any], folder: Path) -> int:
    """Run the pipeline in a process of its own; returns the peak of its memory in KiB."""
    command = [sys.executable, "-c", _ALONE, json.dumps(source), str(folder)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _latencies(database: Database, folder: Path, engine: Any, commits: int) -> list[float]:
    """Milliseconds from the answer to COMMIT until the epoch with the row is committed; one is not counted."""
    seen, found = Commits(), list[float]()
    runner = Runner(open_pipeline(database.pipeline(folder)), engine, seen)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    seen.wait_for_epochs(1)  # reading has begun
    for number in range(commits + 1):
        database.fill(number, 1)
        began = monotonic()
        seen.wait_for(number + 1)
        if number:
            found.append((monotonic() - began) * 1000)
        time.sleep(0.3)  # the run is idle again
    runner.stop()
    thread.join(60)
    return found
