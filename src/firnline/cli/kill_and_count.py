"""Shared by `firnline demo` and `drill`: kills a run in mid-run and starts it again; counts what arrived."""

from __future__ import annotations

import gzip
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from firnline.cli.long_task import terminable
from firnline.clock import monotonic
from firnline.errors import EngineError
from firnline.names import DELTA_LOG, HOME, epoch_txn
from firnline.storage import Storage

POLL_SECONDS = 0.05
KILL_DELAY_SECONDS = 0.5  # longest delay of a kill after a commit: the next epoch is then in the middle
AIM_SECONDS = 3.0
AIM_POLL_SECONDS = 0.004
QUIET_SECONDS = 180.0  # without a new commit, something is wrong


@dataclass(slots=True)
class LogWatch:
    """The newest epoch of one pipeline, read from the files of a Delta log, independent of the pipeline itself."""

    table: Path
    pipeline: str
    epoch: int = 0
    files: int = 0  # that commits have added
    _seen: set[str] = field(default_factory=set)

    def read_epoch(self) -> int:
        """Read the newest committed epoch."""
        wanted = re.compile(rf'"appId":"{re.escape(epoch_txn(self.pipeline))}","version":(\d+)')
        folder = self.table / DELTA_LOG
        names = {n for n in os.listdir(folder) if n.endswith(".json")} if folder.is_dir() else set()
        for name in sorted(names - self._seen):
            text = (folder / name).read_text(encoding="utf-8", errors="replace").replace(": ", ":")
            self.epoch = max([self.epoch, *(int(n) for n in wanted.findall(text))])
            self.files += sum(1 for line in text.splitlines() if line.startswith('{"add":'))
            self._seen.add(name)
        return self.epoch

    def uncommitted(self) -> int:
        """Count the Parquet files in the table's folder that no commit names yet."""
        return sum(1 for _ in parquet_files(self.table)) - self.files


def plain_environ() -> dict[str, str]:
    """Return the environment without variables that would break a further run: faults, a port in use, and a log whose
    last words could not be shown."""
    left_out = ("FIRNLINE_FAULT", "FIRNLINE_METRICS_PORT", "FIRNLINE_LOG_FORMAT")
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)}


def parquet_files(table: Path) -> Iterator[str]:
    """The data files below a local table, committed or not."""
    for folder, inner, names in os.walk(table):
        inner[:] = [name for name in inner if not name.startswith((HOME, DELTA_LOG))]
        yield from (os.path.join(folder, name) for name in names if name.endswith(".parquet"))


@dataclass(slots=True)
class KillReport:
    """The kills of a pipeline, and how fast it recovered."""

    kills: list[int] = field(default_factory=list)  # the newest epoch at each
    recovery_seconds: list[float] = field(default_factory=list)  # from a start after a kill to the first new commit
    epochs: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RunKiller:
    """Kills a run repeatedly."""

    command: Sequence[str]  # runs the pipeline until its input is exhausted
    table: Path
    pipeline: str
    log: Path  # what the runs write to stderr
    environ: Mapping[str, str]  # the whole environment of the runs
    rng: random.Random
    say: Callable[[str], None]

    def run(self, kills: int, *, commits_between: tuple[int, int] = (1, 3)) -> KillReport:
        """Run until the input is exhausted, and kill the process the given number of times on the way.

        Raises:
            EngineError: the pipeline failed by itself.
        """
        watch, report, began = LogWatch(self.table, self.pipeline), KillReport(), monotonic()
        with terminable():
            while True:
                wanted = self.rng.randint(*commits_between) if len(report.kills) < kills else None
                if self._one_run(watch, report, wanted):
                    break
        report.epochs = watch.read_epoch()
        report.seconds = monotonic() - began
        return report

    def _one_run(self, watch: LogWatch, report: KillReport, wanted: int | None) -> bool:
        """One process: killed after `wanted` new commits, or left alone. True when it came to the end."""
        start, base, litter = monotonic(), watch.read_epoch(), watch.uncommitted()
        changed_at, shown = start, base
        child = self._start()
        try:
            while child.poll() is None:
                time.sleep(POLL_SECONDS)
                epoch, now = watch.read_epoch(), monotonic()
                if epoch > shown:
                    if shown == base and report.kills:
                        report.recovery_seconds.append(round(now - start, 2))
                        self.say(f"back after {now - start:.1f} s: epoch {epoch} is committed")
                    changed_at, shown = now, epoch
                if wanted is not None and epoch >= base + wanted:
                    self._wait_for_the_middle(watch, aimed=len(report.kills) % 2 == 0)
                    break
                if now - changed_at > QUIET_SECONDS:
                    raise EngineError(f"no new commit for {QUIET_SECONDS:.0f} s", hint=f"See {self.log}.")
            if child.poll() is None:
                self._kill(child)
                report.kills.append(watch.read_epoch())
                left = watch.uncommitted() - litter
                rest = f"{left} files written that no commit names" if left else "the next under way"
                self.say(f"kill -9 number {len(report.kills)}, with epoch {watch.epoch} committed and {rest}")
                return False
        finally:
            self._kill(child)
        if child.returncode != 0:
            raise EngineError(
                f"the pipeline failed with exit code {child.returncode}: {self._last_words()}", hint=f"See {self.log}."
            )
        return True

    def _wait_for_the_middle(self, watch: LogWatch, *, aimed: bool) -> None:
        """Wait for a random moment of the next epoch or, aimed, until its files are written and not committed."""
        before = watch.uncommitted()
        deadline = monotonic() + self.rng.uniform(0, KILL_DELAY_SECONDS) + (AIM_SECONDS if aimed else 0)
        while monotonic() < deadline:
            time.sleep(AIM_POLL_SECONDS)
            watch.read_epoch()
            if aimed and watch.uncommitted() > before:
                break

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                list(self.command), env=dict(self.environ), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        """Kill the whole session of the child: driver and JVM; the workers end with the JVM."""
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error:")]
        return (errors or lines or ["it said nothing"])[-1]


_BOM = b"\xef\xbb\xbf"


def active_files(table: str) -> list[str]:
    """The Parquet files that the newest version of a table names."""
    from deltalake import DeltaTable

    return list(DeltaTable(table).file_uris())


def count_ids(table: str, inputs: list[str]) -> dict[str, int]:
    """Compare ids of JSON files with ids of a table: records_in, records_out, distinct_ids, lost, doubled."""
    import duckdb

    files = active_files(table)
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(
            """CREATE TABLE went_in AS
               SELECT id FROM read_json(?, columns = {'id': 'BIGINT'}, format = 'newline_delimited')""",
            [inputs],
        )
        connection.execute("CREATE TABLE came_out AS SELECT id FROM read_parquet(?)", [files])
        row = connection.execute(
            """SELECT (SELECT count(*) FROM went_in), (SELECT count(*) FROM came_out),
                      (SELECT count(DISTINCT id) FROM came_out),
                      (SELECT count(*) FROM went_in WHERE id NOT IN (SELECT id FROM came_out WHERE id IS NOT NULL))"""
        ).fetchone()
    records_in, records_out, distinct, lost = cast("tuple[int, int, int, int]", row)
    return {
        "records_in": records_in,
        "records_out": records_out,
        "distinct_ids": distinct,
        "lost": lost,
        "doubled": records_out - distinct,
    }


def count_by_file(table: str) -> dict[str, tuple[int, int]]:
    """Rows and distinct record numbers of each source file, from the lineage columns of a table."""
    import duckdb

    files = active_files(table)
    if not files:
        return {}
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        rows = connection.execute(
            """SELECT _firnline_file, count(*), count(DISTINCT _firnline_record)
               FROM read_parquet(?, union_by_name = true) GROUP BY 1""",
            [files],
        ).fetchall()
    return {str(path): (int(count), int(distinct)) for path, count, distinct in rows}


def compare_rows(table: str, expected: str) -> dict[str, int]:
    """Compare two tables row by row: rows, expected, lost (missing in `table`), doubled (there and not expected).

    Floating-point numbers are compared to nine digits: sums depend on the order of their rows.
    """
    import duckdb
    from deltalake import DeltaTable

    existing = [uri for uri in (table, expected) if DeltaTable.is_deltatable(uri)]
    if not existing:
        return {"rows": 0, "expected": 0, "lost": 0, "doubled": 0}
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        for name, uri in (("came_out", table), ("wanted", expected)):
            rows = DeltaTable(uri if uri in existing else existing[0]).to_pyarrow_dataset()
            connection.register(name, rows if uri in existing else rows.schema.empty_table())
        columns = connection.execute("DESCRIBE wanted").fetchall()
        shown = ", ".join(_comparable(str(column[0]), str(column[1])) for column in columns)
        row = connection.execute(  # the names of columns are quoted
            f"""SELECT (SELECT count(*) FROM came_out), (SELECT count(*) FROM wanted),
                       (SELECT count(*) FROM (SELECT {shown} FROM wanted EXCEPT ALL SELECT {shown} FROM came_out)),
                       (SELECT count(*) FROM (SELECT {shown} FROM came_out EXCEPT ALL SELECT {shown} FROM wanted))"""  # noqa: S608
        ).fetchone()
    return dict(zip(("rows", "expected", "lost", "doubled"), cast("tuple[int, int, int, int]", row), strict=True))


def _comparable(name: str, kind: str) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    return f"printf('%.9g', {quoted}::DOUBLE)" if kind in ("FLOAT", "DOUBLE") else quoted


def count_lines(storage: Storage, path: str) -> int:
    """How many lines of a file are not blank; the file is read to its end, whatever its compression."""
    key = path.removeprefix(storage.root).lstrip("/")
    stream: Any = storage.open_read(key)
    try:
        return sum(1 for line in _lines(stream, path) if line.strip(b" \t\r\n"))
    finally:
        stream.close()


def _lines(stream: Any, path: str) -> Iterator[bytes]:
    lower = path.lower()
    if lower.endswith((".gz", ".gzip")):
        stream = gzip.GzipFile(fileobj=stream)
    elif lower.endswith((".zst", ".zstd")):
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    rest = b""
    first = True
    while piece := stream.read(1 << 20):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removeprefix(_BOM) if first else line
            first = False
    yield rest.removeprefix(_BOM) if first else rest
