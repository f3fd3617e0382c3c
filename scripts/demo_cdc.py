"""`make demo-cdc`: captures a PostgreSQL database that is being written, kills the pipeline twice, and compares.

Starts a PostgreSQL server of its own, on 127.0.0.1 and a free port, in a temporary folder, with 10,000 rows in a table.
`firnline run`, in a process of its own, reads them and captures the changes of a writer, who goes on for 20 seconds, or
longer if the pipeline is not back by then: it is killed with SIGKILL twice, and started again. At the end the Delta
tables, read by delta-rs, are compared with the database and with what the writer committed. The exit code is 1 if they
differ. `--seconds` and `--seed` change how long and what is written.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for the test server

import psycopg  # noqa: E402
from deltalake import DeltaTable  # noqa: E402

from firnline.cli.kill_and_count import LogWatch, plain_environ  # noqa: E402
from firnline.cli.long_task import terminable  # noqa: E402
from firnline.cli.output import Output, say  # noqa: E402
from firnline.clock import monotonic  # noqa: E402
from tests.support.postgres import running_postgres  # noqa: E402

FOLDER = Path("demo-cdc")
MARKER = ".firnline-demo-cdc"
KILLS = 2
ROWS = 10_000  # in the table before the pipeline begins
PATIENCE_SECONDS = 300.0  # without a new commit, something is wrong
POLL_SECONDS = 0.05
TABLE = """CREATE TABLE orders (id bigint PRIMARY KEY, version int NOT NULL, customer text, amount numeric(12,2),
           changed_at timestamptz DEFAULT clock_timestamp())"""
COLUMNS = ("id", "version", "customer", "amount", "changed_at")
SPEC = """\
# Made by `make demo-cdc`; its server is gone with the demo.
name: shop
sources:
  shop: {type: postgres, dsn: "${env:SHOP_DSN}", tables: [orders]}
sinks:
  - {name: history, type: delta, table: lake/orders_history, input: shop.orders}   # a row per change
  - {name: orders, type: delta, table: lake/orders, input: shop.orders, write: upsert}
"""

Change = tuple[str, int, int | None]  # what happened, id and version (of a delete, the log has the key alone)
Row = tuple[object, ...]


@dataclass
class Writer:
    """Changes the table in random transactions, and keeps count of what it committed."""

    dsn: str
    rng: random.Random
    committed: Counter[Change] = field(default_factory=Counter)
    transactions: int = 0
    rolled_back: int = 0
    failure: BaseException | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    _versions: dict[int, int] = field(default_factory=dict)
    _next_id: int = 1

    def run(self) -> None:
        try:
            with psycopg.connect(self.dsn) as db:
                while not self.stopping.is_set():
                    self._transaction(db)
                    time.sleep(0.004)
        except Exception as error:  # the main thread raises it
            self.failure = error

    def fill(self, count: int) -> None:
        """Insert rows that are there before anybody captures changes."""
        with psycopg.connect(self.dsn) as db:
            db.execute(
                "INSERT INTO orders SELECT n, 1, 'customer ' || n %% 97, n FROM generate_series(1, %s) n", (count,)
            )
        self._versions = dict.fromkeys(range(1, count + 1), 1)
        self._next_id = count + 1

    def write_last(self) -> int:
        """Insert one more row; returns its id."""
        with psycopg.connect(self.dsn) as db:
            number = self._next_id
            db.execute("INSERT INTO orders VALUES (%s, 1, 'the last one', 0)", (number,))
        self.committed[("insert", number, 1)] += 1
        self.transactions += 1
        return number

    def _transaction(self, db: psycopg.Connection[Row]) -> None:
        """Change 1 to 20 rows; one of ten transactions is rolled back, and must leave nothing."""
        changes: list[Change] = []
        versions = dict(self._versions) if self.rng.random() < 0.1 else self._versions
        is_kept, next_id = versions is self._versions, self._next_id
        for _ in range(self.rng.randint(1, 20)):
            kind, number = self.rng.random(), self.rng.randint(1, next_id)
            if kind < 0.5 or number not in versions:
                number, next_id = next_id, next_id + 1
                db.execute(
                    "INSERT INTO orders VALUES (%s, 1, %s, %s)", (number, f"customer {number % 97}", kind * 1000)
                )
                versions[number] = 1
                changes.append(("insert", number, 1))
            elif kind < 0.85:
                versions[number] += 1
                db.execute(
                    "UPDATE orders SET version = %s, amount = amount + 1, changed_at = clock_timestamp() WHERE id = %s",
                    (versions[number], number),
                )
                changes.append(("update", number, versions[number]))
            else:
                db.execute("DELETE FROM orders WHERE id = %s", (number,))
                del versions[number]
                changes.append(("delete", number, None))
        if is_kept:
            db.commit()
            self._next_id = next_id
            self.committed.update(changes)
            self.transactions += 1
        else:
            db.rollback()
            self.rolled_back += 1


@dataclass
class Pipeline:
    """`firnline run` in a session of its own, started again after each kill."""

    folder: Path
    writer: Writer
    kills: int = 0
    recovery_seconds: list[float] = field(default_factory=list)
    _child: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.watch = LogWatch(self.folder / "lake" / "orders_history", "shop")

    def start(self) -> None:
        with (self.folder / "run.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "firnline.cli", "run", str(self.folder / "firnline.yml")],
                env={**plain_environ(), "SHOP_DSN": self.writer.dsn}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._started = monotonic()

    def wait_for(self, epoch: int) -> None:
        """Wait until an epoch is committed."""
        deadline = monotonic() + PATIENCE_SECONDS
        while self.watch.read_epoch() < epoch:
            if self.writer.failure is not None:
                raise self.writer.failure
            if self._child is None or self._child.poll() is not None or monotonic() > deadline:
                raise SystemExit(
                    f"Error: the pipeline stopped, or does not commit.\nTry: see {self.folder / 'run.log'}"
                )
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill driver and JVM at once."""
        assert self._child is not None
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self.kills += 1
        say(f"kill -9 number {self.kills}, with epoch {self.watch.read_epoch()} committed")

    def start_again(self) -> None:
        before = self.watch.read_epoch()
        self.start()
        self.wait_for(before + 1)
        self.recovery_seconds.append(monotonic() - self._started)
        say(f"back after {self.recovery_seconds[-1]:.1f} s: epoch {self.watch.epoch} is committed")

    def stop(self) -> None:
        """End it in an orderly way; after that nothing of it is left."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Capture a database, kill the pipeline twice, compare.")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the writer writes")
    parser.add_argument("--seed", type=int, default=None, help="repeat the changes of an earlier demo")
    args = parser.parse_args()
    began, folder = monotonic(), FOLDER.absolute()
    make_folder(folder)
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    with terminable(), running_postgres() as server:
        with psycopg.connect(server.dsn, autocommit=True) as db:
            db.execute(TABLE)
            version = db.info.parameter_status("server_version") or ""
        writer = Writer(server.dsn, random.Random(seed))
        writer.fill(ROWS)
        say(
            f"PostgreSQL {version.split()[0]} runs on 127.0.0.1:{server.port}, with {ROWS:,} rows in the table `orders`"
        )
        pipeline = Pipeline(folder, writer)
        try:
            capture(pipeline, args.seconds, seed)
            held = read_database(server.dsn)
        finally:
            writer.stopping.set()
            pipeline.stop()
    return compare(pipeline, held, monotonic() - began)


def make_folder(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise SystemExit(f"Error: {folder} is not empty and was not made by a demo.\nTry: move it away.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    (folder / "firnline.yml").write_text(SPEC, encoding="utf-8")


def capture(pipeline: Pipeline, seconds: float, seed: int) -> None:
    """Write, capture and kill, until the tables hold the last row of the writer."""
    writer = pipeline.writer
    pipeline.start()
    pipeline.wait_for(1)  # from here on, every change is captured
    say(
        f"the pipeline reads it and captures its changes; now a writer changes it, for at least {seconds:g} s (seed {seed})"
    )
    thread, end = threading.Thread(target=writer.run, daemon=True), monotonic() + seconds
    thread.start()
    for _ in range(KILLS):
        pipeline.wait_for(pipeline.watch.read_epoch() + 2)
        time.sleep(writer.rng.uniform(0.0, 1.0))
        pipeline.kill()
        pipeline.start_again()
    while monotonic() < end:
        time.sleep(POLL_SECONDS)
    writer.stopping.set()
    thread.join()
    last = writer.write_last()
    say(f"the writer ends after {writer.transactions:,} transactions, {writer.rolled_back:,} more were rolled back")
    while last not in {row[0] for row in read_delta(pipeline.folder / "lake" / "orders", ("id",))}:
        pipeline.wait_for(pipeline.watch.read_epoch() + 1)


def read_database(dsn: str) -> Counter[Row]:
    with psycopg.connect(dsn) as db:
        return Counter(db.execute(f"SELECT {', '.join(COLUMNS)} FROM orders").fetchall())


def read_delta(table: Path, columns: tuple[str, ...]) -> list[Row]:
    """Rows of a Delta table, by delta-rs."""
    if not DeltaTable.is_deltatable(str(table)):
        return []
    found = DeltaTable(str(table))
    if not set(columns) <= {one.name for one in found.schema().fields}:
        return []  # no row yet
    values = found.to_pyarrow_table(columns=list(columns)).to_pydict()
    return list(zip(*(values[name] for name in columns), strict=True))


def compare(pipeline: Pipeline, held: Counter[Row], seconds: float) -> int:
    """Compare tables with the database and the writer; show it; return the exit code."""
    folder, writer = pipeline.folder, pipeline.writer
    rows = Counter(read_delta(folder / "lake" / "orders", COLUMNS))
    different = sum((rows - held).values()) + sum((held - rows).values())
    found: Counter[Row] = Counter(
        (op, number, None if op == "delete" else version)
        for op, number, version in read_delta(folder / "lake" / "orders_history", ("_op", "id", "version"))
        if op != "read"  # a row that was there before
    )
    expected: Counter[Row] = Counter({**writer.committed})
    lost, doubled = sum((expected - found).values()), sum((found - expected).values())
    recovery = ", ".join(f"{s:.1f} s" for s in pipeline.recovery_seconds)
    Output().card(
        {
            "transactions": f"{writer.transactions:,}  (and {writer.rolled_back:,} rolled back)",
            "changes written": f"{expected.total():,}",
            "changes captured": f"{found.total():,}  (lake/orders_history, read by delta-rs)",
            "lost": f"{lost:,}",
            "doubled": f"{doubled:,}",
            "rows in PostgreSQL": f"{held.total():,}",
            "rows in lake/orders": f"{rows.total():,}",
            "rows that differ": f"{different:,}",
            "kill -9": f"{pipeline.kills}",
            "recovery": f"{recovery}  (start to first commit, Spark's start included)",
            "epochs": f"{pipeline.watch.read_epoch()}",
            "time": f"{seconds:.0f} s",
            "folder": str(folder),
        }
    )
    if lost or doubled or different or not found:
        print(f"Error: table and database differ.\nTry: keep {folder} and report it.", file=sys.stderr)
        return 1
    print("table and database are equal; every change arrived once")
    print("next: firnline init --template postgres-to-delta, to capture a database of your own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
