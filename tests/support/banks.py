"""A bank on real pipelines: accounts in several of them, transfers as rows in the channels, deposits as files.

Whatever a member takes in, it keeps in part and passes on in part: balances plus what is on its way are the deposits.
The tables say so by themselves, whoever reads them; here it is delta-rs.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from deltalake import DeltaTable

from firnline.history.topology.restore import find_entry, find_snapshot_epochs
from firnline.history.topology.snapshot import Snapshots
from firnline.options import (
    FieldOptions,
    OperatorOptions,
    PipelineOptions,
    SchemaOptions,
    SinkOptions,
    SourceOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.counters import OPERATORS
from tests.support.operators.accounts import pass_on
from tests.support.pipelines import checkpoint_of, pipeline_options, run_to_end
from tests.support.samples import make_old
from tests.support.topologies import open_snapshots

Row: TypeAlias = dict[str, Any]
Transfers: TypeAlias = Counter[tuple[int, int, int]]  # the id, the hops and the amount of each

DEPOSITS = "deposits"
FIELDS = (FieldOptions("account", "string"), *(FieldOptions(name, "int64") for name in ("id", "amount", "hops")))
SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # each member, and who reads from it; `a` gets the deposits
    "chain": {"a": ("b",), "b": ("c",), "c": ()},
    "diamond": {"a": ("b", "c"), "b": ("d",), "c": ("d",), "d": ()},
    "cycle": {"a": ("b",), "b": ("a",)},
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the members stand, in a snapshot or now: the version of each table, and the positions of each source."""

    snapshot: str  # empty: now
    versions: Mapping[str, int]
    positions: Mapping[str, Mapping[str, Json]]


def find_cut(snapshots: Snapshots, snapshot: str) -> Cut:
    """The records of a completed snapshot."""
    _, records = find_snapshot_epochs(snapshots, snapshot)
    versions, positions = {}, {}
    for name, epoch in records.items():
        pipeline = snapshots.opened[name]
        positions[name] = find_entry(pipeline, epoch).checkpoint.positions
        versions[name] = pipeline.deciding.version_of(epoch)
    return Cut(snapshot, versions, positions)


@dataclass
class RealBank:
    """The pipelines of one shape, below a folder."""

    folder: Path
    shape: str
    files: int = 0
    hops: int = 8  # of a deposit, at most

    @property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Each member, and who reads from it."""
        return SHAPES[self.shape]

    @property
    def names(self) -> list[str]:
        return list(self.readers)

    def options(self, name: str) -> PipelineOptions:
        sources: list[SourceOptions] = [
            self.channel_source(writer, name) for writer in self.names if name in self.readers[writer]
        ]
        if name == "a":
            path = str(self.folder / DEPOSITS)
            sources.append(FileSourceOptions(DEPOSITS, path, poll_interval_secs=0.05, schema=SchemaOptions(FIELDS)))
        settings = {"keys": ["account"], "me": name, "to": list(self.readers[name])}
        operator = OperatorOptions("accounts", "accounts:Accounts", tuple(one.name for one in sources), settings)
        options = pipeline_options(
            "",
            "",
            name,
            sources=sources,
            operators=[operator],
            sinks=[DeltaSinkOptions(name, str(self.folder / name), input="accounts"), *self.channel_sinks(name)],
            max_files=1,
            shards=1,
        )
        return dataclasses.replace(options, operator_paths=(str(OPERATORS),))

    def channel_source(self, writer: str, reader: str) -> SourceOptions:
        """The source of a member that reads what another one writes; its name is that of the writer."""
        return DeltaSourceOptions(writer, str(self.folder / writer), poll_interval_secs=0.05)

    def channel_sinks(self, writer: str) -> list[SinkOptions]:
        """What a member writes beside its table."""
        return []

    def deposit(self, rows: int = 3) -> None:
        """Add a file of deposits."""
        self.files += 1
        folder = self.folder / DEPOSITS
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) for row in self._rows(self.files, rows)]
        hidden, path = folder / f".{self.files:05d}", folder / f"{self.files:05d}.json"
        hidden.write_text("\n".join(lines) + "\n")
        make_old(hidden)
        hidden.rename(path)

    def _rows(self, file: int, rows: int) -> list[dict[str, int | str]]:
        numbers = range(file * 100, file * 100 + rows)
        return [{"account": f"a{n % 3}", "id": n, "amount": 100 + n % 50, "hops": self.hops} for n in numbers]

    def open(self) -> Snapshots:
        return open_snapshots(self.folder, [self.options(name) for name in self.names])

    # -- what the tables say ----------------------------------------------------------------------------

    def audit(self, cut: Cut | None = None) -> int:
        """Check both invariants at a cut, or now; returns the total."""
        at = cut or self.find_now()
        rows: dict[str, list[Row]] = {
            name: DeltaTable(self.folder / name, version=at.versions[name]).to_pyarrow_table().to_pylist()
            for name in self.names
        }
        total = on_its_way = 0
        for writer, readers in self.readers.items():
            for reader in readers:
                sent = sent_to(reader, self.channel_rows(writer, reader, rows[writer], at))
                got = Counter(
                    (one["id"], one["hops"] + 1, one["taken"]) for one in rows[reader] if one["via"] == writer
                )
                assert max(sent.values(), default=1) == 1, f"{writer} sent a row to {reader} twice"
                assert not got - sent, f"{reader} has received what {writer} has not sent: {got - sent}"
                self.check_left(writer, reader, sent - got, at)
                on_its_way += sum(amount for _, _, amount in sent - got)
        for name, found in rows.items():
            for owner in {one["owner"] for one in found}:
                own = sorted((one for one in found if one["owner"] == owner), key=lambda one: int(one["number"]))
                assert [one["number"] for one in own] == list(range(1, len(own) + 1)), f"{owner} lost or doubled a row"
                assert own[-1]["balance"] == sum(one["kept"] for one in own), f"{owner} of {name}: its state is wrong"
                total += own[-1]["balance"]
        deposits = sum(one["taken"] for one in rows["a"] if one["via"] == DEPOSITS)
        assert total + on_its_way == deposits, f"{total} in accounts and {on_its_way} on its way are not {deposits}"
        return int(deposits)

    def find_now(self) -> Cut:
        """The newest version and position of each member; nobody may run."""
        versions = {name: DeltaTable(self.folder / name).version() for name in self.names}
        return Cut("", versions, {name: checkpoint_of(self.options(name)).positions for name in self.names})

    def channel_rows(self, writer: str, reader: str, table: list[Row], cut: Cut) -> list[Row]:
        """All rows that a channel has carried up to a cut; `table` is what the writer's table holds there."""
        return table

    def check_left(self, writer: str, reader: str, left: Transfers, cut: Cut) -> None:
        """Check that a channel holds these transfers for its reader, who has yet to read them."""

    def expected(self) -> Counter[str]:
        """The balances when everything has arrived."""
        found: Counter[str] = Counter()
        waiting = deque(row for file in range(1, self.files + 1) for row in self._rows(file, 3))
        while waiting:
            row = waiting.popleft()
            account, number, amount, hops = (row[field] for field in ("account", "id", "amount", "hops"))
            to, sent = pass_on(int(number), int(amount), int(hops), list(self.readers[str(account)[0]]))
            found[str(account)] += int(amount) - sent
            if to is not None:
                waiting.append({"account": to, "id": number, "amount": sent, "hops": int(hops) - 1})
        return found

    def balances(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name in self.names:
            for row in DeltaTable(self.folder / name).to_pyarrow_table(columns=["owner", "kept"]).to_pylist():
                found[row["owner"]] += row["kept"]
        return found

    def run_to_end(self) -> None:
        """Run every member, until nobody finds anything any more."""
        before: list[int] = []
        while True:
            self.run_each()
            now = [DeltaTable(self.folder / name).version() for name in self.names]
            if now == before:
                return
            before = now

    def run_each(self) -> None:
        """Run every member once: each has a table then."""
        for name in self.names:
            self.await_input(name)
            run_to_end(self.options(name))

    def await_input(self, name: str) -> None:
        """Wait until a member can read what was written before."""


def sent_to(reader: str, rows: Iterable[Row]) -> Transfers:
    """The transfers to the accounts of a member."""
    return Counter(
        (one["id"], one["hops"], one["amount"]) for one in rows if one["account"] and one["account"].startswith(reader)
    )


class Processes:
    """One process per member, which can be killed and started again at any time."""

    def __init__(self, bank: RealBank) -> None:
        self._bank = bank
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.warm"])
        self._running: dict[str, BaseProcess] = {}

    def __enter__(self) -> Processes:
        self.start_missing()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.kill(name)

    def start_missing(self) -> None:
        """Start every member that has no process."""
        for name in self._bank.names:
            if name not in self._running or not self._running[name].is_alive():
                process = self._context.Process(target=run_for_ever, args=(self._bank, name), daemon=True)
                process.start()
                self._running[name] = process

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.join()


def run_for_ever(bank: RealBank, name: str) -> None:
    Runner(open_pipeline(bank.options(name)), LocalEngine(1)).run()
