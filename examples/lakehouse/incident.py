"""Breaks gold by a bad deployment, and takes the whole lakehouse back to the instant before.

Needs nothing but Firnline and DuckDB. With FIRNLINE_BROKERS (host:port), gold also writes to Kafka.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import duckdb
from deltalake import DeltaTable

from firnline.clock import monotonic

PATIENCE_SECONDS = 600.0  # without a commit: several runs start Spark at once, perhaps on a busy machine
GOOD, BAD = "function: sum, column: cents", "function: sum, column: order_id"
Rows = list[tuple[object, ...]]

# Each table, and what the orders that have arrived say it must hold.
EXPECTED = {
    "bronze": "SELECT order_id, customer, cents FROM input",
    "silver": "SELECT DISTINCT order_id, customer, cents FROM input",
    "gold": "SELECT customer, count(*), sum(cents)::BIGINT FROM (SELECT DISTINCT order_id, customer, cents FROM input) "
    "GROUP BY customer",
}
HELD = dict.fromkeys(("bronze", "silver"), "SELECT order_id, customer, cents FROM held")
HELD["gold"] = "SELECT customer, orders, cents FROM held"


class Run(Protocol):
    """A run of a pipeline."""

    def has_ended(self) -> bool: ...

    def stop(self) -> None: ...


class ProcessRun:
    """`firnline run`, in a process of its own."""

    def __init__(self, folder: Path, file: str) -> None:
        words = [sys.executable, "-m", "firnline", "run", file]
        with (folder / f"{Path(file).stem}.log").open("ab") as log:
            self._process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


class Lakehouse:
    """The pipelines of this folder, or of a copy of it."""

    def __init__(self, folder: Path, brokers: str = "") -> None:
        self.folder = folder
        self.topology = "kafka-topology.yml" if brokers else "topology.yml"
        self.gold = "gold-kafka.yml" if brokers else "gold.yml"
        self.leave = ["--leave", "changes"] if brokers else []  # a topic does not go back
        self._files = 0

    def firnline(self, *words: str) -> str:
        """Run a command; returns its output."""
        return subprocess.run(
            [sys.executable, "-m", "firnline", *words], cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def start(self, file: str) -> Run:
        """Start a run of a pipeline."""
        return ProcessRun(self.folder, file)

    # -- input and tables -------------------------------------------------------------------------------

    def add_orders(self, count: int = 100) -> None:
        """Let a file of orders arrive; a tenth of them has arrived before."""
        first = self._files * count
        self._files += 1
        draw = random.Random(self._files)
        numbers = [*range(first, first + count), *draw.sample(range(first + count), count // 10)]
        orders = (
            {"order_id": n, "customer": f"c{random.Random(n).randrange(20):02d}", "cents": 100 + n * 37 % 9900}
            for n in numbers
        )
        folder = self.folder / "in"
        folder.mkdir(exist_ok=True)
        hidden = folder / f".{self._files:04d}"
        hidden.write_text("".join(json.dumps(order) + "\n" for order in orders))
        hidden.rename(folder / f"{self._files:04d}.json")

    def read(self, table: str) -> Rows:
        """Read a table, with DuckDB."""
        return self._query(table, HELD[table])

    def expected(self, table: str) -> Rows:
        """Compute from all input what a table must hold."""
        return self._query(table, EXPECTED[table])

    def _query(self, table: str, query: str) -> Rows:
        with duckdb.connect() as connection:
            connection.read_json(str(self.folder / "in" / "*.json")).create_view("input")
            files = DeltaTable(str(self.folder / "out" / table)).file_uris()
            connection.read_parquet(files, union_by_name=True).create_view("held")
            return sorted(connection.sql(query).fetchall())

    def is_right(self, table: str) -> bool:
        """Whether a table holds what it must."""
        return self.read(table) == self.expected(table)

    def has_all(self) -> bool:
        """Whether every order has reached gold."""
        return sum(int(str(row[1])) for row in self.read("gold")) == len(self.expected("silver"))

    def wait_until(self, is_so: Callable[[], bool], runs: Iterable[Run]) -> None:
        """Wait for the tables, which these runs write, as long as some of them go on."""
        commits, deadline = -1, 0.0
        while not (all((self.folder / "out" / name / "_delta_log").exists() for name in HELD) and is_so()):
            found = len(list(self.folder.glob("out/*/_delta_log/*.json")))
            if found != commits:
                commits, deadline = found, monotonic() + PATIENCE_SECONDS
            if monotonic() > deadline or any(run.has_ended() for run in runs):
                raise SystemExit(f"the tables do not get there; see the logs in {self.folder}")
            time.sleep(0.2)

    def deploy(self, old: str, new: str) -> None:
        """Change a line of gold's file."""
        path = self.folder / self.gold
        path.write_text(path.read_text().replace(old, new))


def tell(lake: Lakehouse, title: str) -> None:
    """Print which tables are right."""
    words = [f"{table} {'is right' if lake.is_right(table) else 'IS WRONG'}" for table in HELD]
    print(f"{title}: {', '.join(words)}", flush=True)


def main(lake: Lakehouse) -> None:
    """The incident, from beginning to end."""
    lake.deploy(BAD, GOOD)  # a former incident may have been interrupted
    files = ["bronze.yml", "silver.yml", lake.gold]
    lake.add_orders()
    print("starting three runs; each starts Spark, which takes a minute or more", file=sys.stderr, flush=True)
    runs = {file: lake.start(file) for file in files}
    try:
        lake.wait_until(lambda: all(lake.is_right(table) for table in HELD), runs.values())
        tell(lake, "1. a normal day")

        snapshot = json.loads(lake.firnline("topology", "snapshot", lake.topology, "--json"))
        then = {table: lake.read(table) for table in HELD}
        print(f"2. snapshot {snapshot['id']}: {len(snapshot['members'])} members, none of them stopped", flush=True)

        runs.pop(lake.gold).stop()
        lake.deploy(GOOD, BAD)
        runs[lake.gold] = lake.start(lake.gold)
        lake.add_orders()
        lake.wait_until(lake.has_all, runs.values())
        tell(lake, "3. after a bad deployment of gold")
    finally:
        for run in runs.values():
            run.stop()

    lake.deploy(BAD, GOOD)
    lake.firnline("topology", "restore", snapshot["id"], lake.topology, "--yes", *lake.leave)
    for table, rows in then.items():
        if lake.read(table) != rows:
            raise SystemExit(f"{table} is not what it was")
    print("4. restored: bronze, silver and gold are what they were at the snapshot", flush=True)

    runs = {file: lake.start(file) for file in files}
    try:
        lake.wait_until(lambda: all(lake.is_right(table) for table in HELD), runs.values())
        tell(lake, "5. the good gold again, with the orders since")
    finally:
        for run in runs.values():
            run.stop()


if __name__ == "__main__":
    main(Lakehouse(Path(__file__).parent, os.environ.get("FIRNLINE_BROKERS", "")))
