"""Random schedules of commits, visibility, chunks and epochs: the sink ends with what the database holds.

The model has one table of a key and two values. A transaction enters the log when it commits, and becomes visible some
time later, in any order but that of two transactions with a row in common. Each chunk is one SELECT in one snapshot.
Epochs take what the log and the chunks have, by the rules of `sources.cdc`. Planted bugs show that the search sees.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from firnline.sources.cdc import chunks as c
from firnline.sources.cdc.log import Changes, ChunkRows, Column, Op, TableSchema

SCHEMA = TableSchema(
    "t", (Column("k", pa.int64(), "bigint", True), Column("a", pa.int64(), "bigint"), Column("b", pa.int64(), "bigint"))
)
KEYS = 6
SEEDS = range(20_000 if os.environ.get("FIRNLINE_PROOF") else 400)

Row = dict[str, int | None]


class Change(NamedTuple):
    op: Op
    key: int
    values: Row  # that the log has
    moved: bool = False  # from another key, whose delete stands before it


@dataclass
class Transaction:
    """A committed transaction of the log."""

    changes: list[Change]
    keys: set[int]
    is_visible: bool = False


@dataclass
class Chunk:
    rows: dict[int, Row]
    sees: set[int]  # numbers of transactions in the log
    high: int  # the end of the log, read after the SELECT
    last: int | None  # the last key; None: the end of the table


@dataclass
class Rules:
    """What the search varies to plant bugs."""

    waits_for_high: bool = True
    window: Callable[[Sequence[int], set[int]], list[int]] = lambda window, sees: [n for n in window if n not in sees]
    lay_under: Callable[..., c.Remaining] = c.lay_under
    find_again: Callable[..., str] = c.find_again
    has_barrier: bool = True
    restarts: bool = True
    trims_unseen: bool = False


@dataclass
class World:
    """The database, its log, and the sink."""

    random: random.Random
    rules: Rules
    rows: dict[int, Row] = field(default_factory=dict)  # with all that is committed
    log: list[Transaction] = field(default_factory=list)
    sink: dict[int, dict[str, int | None]] = field(default_factory=dict)
    read: int = 0  # transactions of the log that epochs have given on
    window: list[int] = field(default_factory=list)
    began: int | None = None  # where the log was when the snapshot began
    after: int | None = None
    done: bool = False
    is_running: bool = True
    taken: list[Chunk] = field(default_factory=list)
    seen: set[int] | None = None  # what all chunks see that are read from now on
    number: int = 0

    def commit(self) -> None:
        """One transaction: it is in the log now, and visible later."""
        held = {key for transaction in self.log if not transaction.is_visible for key in transaction.keys}
        free = [key for key in range(KEYS) if key not in held]  # others wait for a lock
        if not free:
            return
        changes: list[Change] = []
        keys: set[int] = set()
        for key in self.random.sample(free, min(len(free), self.random.randint(1, 2))):
            keys.add(key)
            changes += self._change(key, [other for other in free if other not in keys], keys)
        if changes:
            self.log.append(Transaction(changes, keys))

    def _change(self, key: int, others: list[int], keys: set[int]) -> list[Change]:
        self.number += 1
        if key not in self.rows:
            if self.number % 5 == 0:  # b gets its default, null, and the log leaves it out
                self.rows[key] = {"a": self.number, "b": None}
                return [Change(Op.INSERT, key, {"a": self.number})]
            self.rows[key] = {"a": self.number, "b": -self.number}
            return [Change(Op.INSERT, key, dict(self.rows[key]))]
        kind = self.random.random()
        if kind < 0.25:
            del self.rows[key]
            return [Change(Op.DELETE, key, {})]
        if kind < 0.4 and (free := [other for other in others if other not in self.rows]):
            new = self.random.choice(free)
            keys.add(new)
            self.rows[new] = {**self.rows.pop(key), "a": self.number}
            whole = self.random.random() < 0.5  # else b is large, and the log leaves it out
            values: Row = dict(self.rows[new]) if whole else {"a": self.number}
            return [Change(Op.DELETE, key, {}), Change(Op.INSERT, new, values, moved=True)]
        changed: Row = {"a": self.number} if self.random.random() < 0.7 else {"a": self.number, "b": -self.number}
        self.rows[key].update(changed)
        return [Change(Op.UPDATE, key, changed)]

    def become_visible(self) -> None:
        hidden = [one for one in self.log if not one.is_visible]
        if hidden:
            self.random.choice(hidden).is_visible = True

    def begin(self) -> None:
        if self.began is None:
            self.began = len(self.log)
            self.read = max(self.read, self.began)

    def select(self) -> None:
        """Take the next chunk, behind the last one that was taken."""
        if self.began is None or self.done or len(self.taken) > 1:
            return
        sees = {number for number, one in enumerate(self.log) if one.is_visible}
        if self.rules.has_barrier and not sees.issuperset(range(self.began)):
            return  # the first chunk sees everything before the snapshot began; so do all later ones
        if self.taken and self.taken[-1].last is None:
            return
        after = self.taken[-1].last if self.taken else self.after
        visible = self._visible_rows()
        found = sorted(key for key in visible if after is None or key > after)[:2]
        last = found[-1] if len(found) == 2 else None
        self.taken.append(Chunk({key: visible[key] for key in found}, sees, len(self.log), last))

    def find_seen(self) -> None:
        """Ask what later chunks see, while none waits."""
        if self.began is not None and not self.taken:
            self.seen = {number for number, one in enumerate(self.log) if one.is_visible}

    def _visible_rows(self) -> dict[int, Row]:
        """The rows that a snapshot taken now has: all commits but those that are not visible, undone."""
        rows: dict[int, Row] = {}
        for one in self.log:
            if one.is_visible:
                self._apply_to_database(rows, one)
        return rows

    @staticmethod
    def _apply_to_database(rows: dict[int, Row], transaction: Transaction) -> None:
        gone: Row = {}
        for op, key, values, moved in transaction.changes:
            if op == Op.DELETE:
                gone = rows.pop(key)
            elif op == Op.INSERT:
                rows[key] = {"a": None, "b": None, **(gone if moved else {}), **values}
            else:
                rows[key].update(values)

    def epoch(self) -> None:
        """Give on chunks, then the log up to some place."""
        if self.began is None:
            return
        end = self.random.randint(self.read, len(self.log))
        seen = 0
        while self.taken and (not self.rules.waits_for_high or self.taken[0].high <= end):
            chunk = self.taken[0]
            unseen = self.rules.window(self.window, chunk.sees)
            prefix = next((i for i, number in enumerate(self.window) if number not in chunk.sees), len(self.window))
            seen = max(seen, prefix)
            if self.give_on(chunk, unseen):
                self.taken.clear()  # read again
                break
            self.taken.pop(0)
            self.after, self.done = chunk.last, chunk.last is None
        if self.seen is not None and not self.taken:
            unseen = [i for i, number in enumerate(self.window) if number not in self.seen]
            seen = max(seen, unseen[0] if unseen and not self.rules.trims_unseen else len(self.window))
        self.seen = None
        has_moved = False
        for number in range(self.read, end):
            gone: dict[str, int | None] = {}
            for op, key, values, moved in self.log[number].changes:
                if op == Op.DELETE:
                    gone = self.sink.get(key, {})
                if moved and len(values) < 2:  # the sink has the rest, unless its row is still to be read
                    values = {**{name: value for name, value in gone.items() if value is not None}, **values}
                    has_moved = True
                self.upsert(op, key, values)
        if has_moved and self.is_running and self.rules.restarts:
            self.after, self.done = None, False
            self.taken.clear()
        self.is_running = not self.done
        self.window = [] if self.done else [*self.window[seen:], *range(self.read, end)]
        self.read = end

    def is_true(self) -> bool:
        """Return whether the sink, once the table is read, has what the database held where the epoch ends."""
        rows: dict[int, Row] = {}
        for one in self.log[: self.read]:
            self._apply_to_database(rows, one)
        return not self.done or self.sink == rows

    def give_on(self, chunk: Chunk, unseen: list[int]) -> bool:
        """Give the rows of a chunk on; True: it must be read again."""
        changes = [as_changes(self.log[number].changes) for number in unseen]
        batch = pa.RecordBatch.from_pydict(
            {
                "k": pa.array(list(chunk.rows), pa.int64()),
                "a": pa.array([row["a"] for row in chunk.rows.values()], pa.int64()),
                "b": pa.array([row["b"] for row in chunk.rows.values()], pa.int64()),
            }
        )
        if self.rules.find_again(ChunkRows(SCHEMA, batch), changes):
            return True
        left = self.rules.lay_under(batch, ("k",), changes)
        for place, row in enumerate(left.rows.to_pylist()):
            lacks = {name for name, mask in zip("kab", left.missing, strict=True) if mask is not None and mask[place]}
            self.upsert(Op.READ, row["k"], {name: row[name] for name in "ab" if name not in lacks})
        return False

    def upsert(self, op: Op, key: int, values: Row) -> None:
        """What an upsert sink does with a change row; values that are not there stay."""
        if op == Op.DELETE:
            self.sink.pop(key, None)
        else:
            self.sink[key] = {"a": None, "b": None, **self.sink.get(key, {}), **values}


def as_changes(changes: Sequence[Change]) -> Changes:
    count = len(changes)
    columns = {"k": pa.array([one.key for one in changes], pa.int64())}
    missing: list[np.ndarray | None] = [None]
    for name in "ab":
        columns[name] = pa.array([one.values.get(name) for one in changes], pa.int64())
        missing.append(np.array([one.op != Op.DELETE and name not in one.values for one in changes]))
    return Changes(
        SCHEMA,
        np.array([one.op for one in changes], np.uint8),
        pa.RecordBatch.from_pydict(columns),
        missing,
        np.arange(count),
        np.zeros(count, np.int32),
        moved=np.array([one.moved for one in changes]),
    )


def ends_right(seed: int, rules: Rules) -> bool:
    """Run one schedule to its end; returns whether the sink equals the database."""
    world = World(random.Random(seed), rules)
    steps = [world.commit, world.commit, world.become_visible, world.select, world.epoch]
    steps += [world.find_seen] * (seed % 2)
    for _ in range(4):
        world.commit()
        world.random.choice((world.become_visible, world.commit))()
    world.begin()
    for _ in range(40):
        world.random.choice(steps)()
        if not world.is_true():
            return False
    for _ in range(200):  # nobody writes any more
        world.become_visible()
        world.select()
        world.epoch()
        if not world.is_true():
            return False
        if world.done and world.read == len(world.log):
            break
    assert world.done, seed
    return world.sink == world.rows


def test_every_schedule_ends_with_what_the_database_holds() -> None:
    assert [seed for seed in SEEDS if not ends_right(seed, Rules())] == []


def test_a_snapshot_may_see_more_than_it_surely_sees() -> None:
    """As of MySQL: what became visible after the list of commits was read may count as newer than the chunk."""
    rules = Rules(window=lambda window, sees: [n for n in window if n not in sees or n > window[len(window) // 2]])
    assert [seed for seed in SEEDS if not ends_right(seed, rules)] == []


def test_an_insert_that_lacks_values_moves_nothing() -> None:
    """Its columns got their defaults: a chunk under it counts, however many such inserts come."""
    chunk = ChunkRows(SCHEMA, pa.RecordBatch.from_pydict({name: pa.array([1], pa.int64()) for name in "kab"}))
    plain, moved = (as_changes([Change(Op.INSERT, 9, {"a": 1}, moved=moved)]) for moved in (False, True))
    assert c.find_again(chunk, [plain]) == ""
    assert "a row moved to another key" in c.find_again(chunk, [plain, moved])


def _whole_rows(batch: pa.RecordBatch, key: Sequence[str], window: Sequence[Changes]) -> c.Remaining:
    """Planted: a row that was updated in the window counts with none of its values."""
    whole = [replace(changes, missing=[None] * 3) for changes in window]
    return c.lay_under(batch, key, whole)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(waits_for_high=False), id="given-on-before-high"),
        pytest.param(Rules(window=lambda window, sees: []), id="no-window"),
        pytest.param(Rules(lay_under=_whole_rows), id="not-column-by-column"),
        pytest.param(Rules(find_again=lambda chunk, window: ""), id="moved-rows-are-not-read-again"),
        pytest.param(Rules(has_barrier=False), id="no-barrier"),
        pytest.param(Rules(restarts=False), id="a-row-moves-behind-the-last-chunk"),
        pytest.param(Rules(trims_unseen=True), id="the-window-loses-what-chunks-do-not-see"),
    ],
)
def test_a_planted_bug_is_found(rules: Rules) -> None:
    assert any(not ends_right(seed, rules) for seed in SEEDS)
