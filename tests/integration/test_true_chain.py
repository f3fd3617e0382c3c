"""Random histories of a table, read by the source at random moments, compared with what the table holds."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from firnline.errors import SourceUndoneError
from firnline.sources.delta.chain import find_path
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.testing.sources import LIMITS, SourceDriver
from firnline.types import Json

# Parents of versions: mostly the version before, sometimes any earlier one, or none.
PARENTS = st.lists(st.one_of(st.just(None), st.integers(0, 30)), max_size=30)


@given(PARENTS, st.data())
def test_the_path_of_a_reader_is_the_difference_of_two_chains(choices: list[int | None], data: st.DataObject) -> None:
    parents = [number - 1 if choice is None else choice % (number + 1) - 1 for number, choice in enumerate(choices)]

    def chain(version: int) -> list[int]:
        return [] if version < 0 else [*chain(parents[version]), version]

    reader = data.draw(st.integers(-1, len(parents) - 1))
    newest = data.draw(st.integers(-1, len(parents) - 1))
    path = find_path(lambda number: parents[number], reader, newest)
    assert path.ahead == [number for number in chain(newest) if number not in chain(reader)]
    assert path.undone[::-1] == [number for number in chain(reader) if number not in chain(newest)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 7)),
        st.tuples(st.just("append"), st.integers(1, 7)),
        st.tuples(st.just("compact"), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 20)),
        st.tuples(st.just("delete"), st.integers(0, 40)),
        st.tuples(st.just("read"), st.integers(1, 9)),
        st.tuples(st.just("read"), st.integers(1, 9)),
    ),
    min_size=3,
    max_size=14,
)


class Reader:
    """Reads a table as a pipeline does; its rows go back with its position."""

    def __init__(self, table: str, on_change: Literal["ignore", "change_feed"]) -> None:
        self._options = DeltaSourceOptions("table", table, on_change=on_change)
        self.on_change = on_change
        self.rows: list[tuple[str, int]] = []
        self.epochs: list[tuple[Json, int]] = []  # the position after each, and the rows until then

    def read(self, most: int, *, to_end: bool = False) -> None:
        """Read some slices, each in a process of its own, as it were; goes back if rows were undone."""
        while True:
            driver = SourceDriver(self._options)
            position = driver.source.start(self.epochs[-1][0] if self.epochs else None)
            try:
                plan = driver.source.plan(position, replace(LIMITS, max_events=most, parallelism=2))
            except SourceUndoneError as error:
                assert self.on_change == "ignore", "a reader of changes goes on"
                to = error.fields["to_epoch"]
                self.epochs = self.epochs[: int(str(to))] if to is not None else []
                del self.rows[self.epochs[-1][1] if self.epochs else 0 :]
                continue
            if plan is None:
                assert driver.source.backlog(position).files_outstanding == 0
                return
            rows: list[tuple[str, int]] = []
            outcomes: list[Json] = []
            for split in plan.splits:
                found, ended = driver.read(replace(plan, splits=[split]))
                outcomes += ended
                rows += _with_changes(found, split.inputs, ended)
            after, records = driver.source.advance(plan, outcomes, len(self.epochs) + 1)
            assert driver.source.replay(position, records) == after
            self.rows += rows
            self.epochs.append((after, len(self.rows)))
            if not to_end:
                return


def _with_changes(
    found: list[tuple[str, int]], inputs: list[dict[str, Json]], ended: list[Json]
) -> list[tuple[str, int]]:
    """Return what each row of a split does, and its id."""
    kinds: list[str] = []
    for item, outcome in zip(inputs, ended, strict=False):
        kinds += [str(item.get("change", "insert"))] * (int(outcome["to"]) - int(item["from"]))
    return [(kind, number) for kind, (_, number) in zip(kinds, found, strict=True)]


def contents(table: str) -> Counter[int]:
    return Counter(DeltaTable(table).to_pyarrow_table().column("id").to_pylist())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.sampled_from(["ignore", "change_feed"]))
@example([("append", 1), ("read", 1), ("restore", 0), ("read", 1), ("restore", 0)], "change_feed")
def test_a_reader_has_what_the_table_has(
    steps: list[tuple[str, int]], on_change: Literal["ignore", "change_feed"]
) -> None:
    """Appends, compactions and restores; deletes only where the reader takes them as changes."""
    with tempfile.TemporaryDirectory() as folder:
        table = str(Path(folder) / "table")
        reader, following = Reader(table, on_change), 0
        write_deltalake(table, pa.table({"id": pa.array([], pa.int64())}))
        for step, number in steps:
            delta = DeltaTable(table)
            if step == "append":
                write_deltalake(table, pa.table({"id": range(following, following + number)}), mode="append")
                following += number
            elif step == "compact":
                delta.optimize.compact()
            elif step == "restore" and delta.version() > 0:
                delta.restore(number % delta.version())
            elif step == "delete" and on_change == "change_feed":
                delta.delete(f"id = {number}")
            elif step == "read":
                reader.read(number)
        reader.read(5, to_end=True)
        held: Counter[int] = Counter()
        for kind, row in reader.rows:
            held[row] += 1 if kind == "insert" else -1
        assert +held == contents(table)
        assert not -held
