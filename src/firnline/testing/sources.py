"""The conformance suite of sources: a kind of source is done when it passes.

A test class inherits `SourceConformance` and gives three fixtures: `options`, what `open_source` opens; `elsewhere`,
the options of the same source at another location; and `add_records`, which adds records to the input, each call an
input (a file, a transaction) of its own. Both locations exist and are empty when a test begins. The kind must be
registered (`firnline.sources.KINDS`). A source with several ports spreads these records over them. Needs pytest.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from firnline.errors import ConfigError, DamagedError, SourceMovedError
from firnline.options import SourceOptions
from firnline.sources.base import Budget, Limits, RestartError, Rows, Source, SourcePlan, Split
from firnline.sources.columns import Columns
from firnline.sources.guard import GuardedSource
from firnline.sources.registry import describe, open_reader, open_source
from firnline.types import Json

__all__ = ["AddRecords", "SourceConformance", "SourceDriver"]

AddRecords: TypeAlias = Callable[[Sequence[dict[str, Any]]], None]

LIMITS = Limits(
    max_files=100, max_bytes=1 << 30, max_events=1_000_000, max_ms=10_000, max_output_files=100, parallelism=1
)
STATUSES = {"committed", "in_progress", "pending", "set_aside", "dropped"}


def records(first: int, count: int) -> list[dict[str, Any]]:
    """Records to put into the input: their `id`s count up."""
    return [{"id": number} for number in range(first, first + count)]


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """A slice that was planned, read and advanced over, as an epoch does."""

    before: Json
    plan: SourcePlan
    rows: list[tuple[str, int]]  # port and id, in the order of the input
    outcomes: list[Json]
    after: Json
    records: list[dict[str, Json]]

    @property
    def ids(self) -> list[int]:
        return [number for _, number in self.rows]


class SourceDriver:
    """Reads a source without an engine: plans, reads each split as a worker does, and advances.

    `ports` are those that are wanted; by default, all that the source knows by name.
    """

    def __init__(self, options: SourceOptions, ports: Sequence[str] = ()) -> None:
        self._options = options
        self.source: Source = open_source(options, once=True)
        self.ports = tuple(ports) or self.source.ports
        self._epoch = 0

    def read(
        self, plan: SourcePlan, ports: Sequence[str] = (), *, cut_first: bool = False
    ) -> tuple[list[tuple[str, int]], list[Json]]:
        """Return port and id of the rows of a plan, in order, and the outcomes. Everything travels as JSON, as to a
        worker.

        With `cut_first`, the budget of the first split is full after one record; the other splits have all they need.
        """
        rows: list[tuple[str, int]] = []
        outcomes: list[Json] = []
        for number, split in enumerate(plan.splits):
            travelled = Split.from_json(_through_json(split.to_json()))
            of_split, ended = self._read_split(travelled, ports or self.ports, is_cut=cut_first and number == 0)
            rows += of_split
            outcomes += ended
        return rows, _through_json(outcomes)

    def _read_split(
        self, split: Split, ports: Sequence[str], *, is_cut: bool
    ) -> tuple[list[tuple[str, int]], list[Json]]:
        columns = {port: Columns(pa.schema([]), frozenset(), {}) for port in ports}
        settings = _through_json(self.source.reader_settings())
        reader = open_reader(self._options.type, settings, split, columns)
        while True:
            budget = _CutBudget(split) if is_cut else Budget(split)
            try:
                groups = list(reader.read({port: one.decoded for port, one in columns.items()}, budget))
            except RestartError:
                continue
            parts = [part for group in groups for part in group]
            assert [len(part.record_numbers) for part in parts] == [part.batch.num_rows for part in parts]
            assert budget.records == sum(part.batch.num_rows + len(part.bad) for part in parts)
            end = reader.end()
            for part in (part for part in parts if part.port in ports and part.batch.num_rows):
                assert part.port in end.columns, "the end of a split tells the columns of every port with rows"
                assert set(part.batch.schema.names) <= set(end.columns[part.port].schema.names)
            return [row for group in groups for row in _in_order(group) if row[0] in ports], end.outcomes

    def step(self, position: Json, limits: Limits = LIMITS, *, cut_first: bool = False) -> ReadSlice | None:
        """Read the next slice; None when there is nothing to read. See `read` for `cut_first`."""
        plan = self.source.plan(position, limits)
        if plan is None:
            return None
        rows, outcomes = self.read(plan, cut_first=cut_first)
        self._epoch += 1
        after, records = self.source.advance(plan, outcomes, self._epoch)
        return ReadSlice(position, plan, rows, outcomes, _through_json(after), _through_json(records))

    def steps(self, position: Json, limits: Limits = LIMITS) -> Iterator[ReadSlice]:
        """Read until there is nothing more."""
        while (read := self.step(position, limits)) is not None:
            position = read.after
            yield read


class _CutBudget(Budget):
    """Full after one record, as when the task has written all the files that it may write."""

    def __init__(self, split: Split) -> None:
        super().__init__(split, lambda: self.records < 1)


def _in_order(group: Sequence[Rows]) -> list[tuple[str, int]]:
    """Return port and id of rows that were handed on together, in the order of the input; the order within a port must
    be that."""
    inputs = list(dict.fromkeys(part.origin for part in group))
    rows = [
        (inputs.index(part.origin), record, part.port, int(number))
        for part in group
        for record, number in zip(part.record_numbers.to_pylist(), part.batch.column("id").to_pylist(), strict=True)
    ]
    for port in {part.port for part in group}:
        of_port = [row[:2] for row in rows if row[2] == port]
        assert of_port == sorted(of_port), "the rows of a port are in the order of the input"
    return [(port, number) for _, _, port, number in sorted(rows)]


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


class SourceConformance:
    """What every kind of source promises."""

    is_atomic = False  # whether what one call of `add_records` adds must never be cut (a transaction)
    forgets = False  # whether acknowledged input is given up
    max_batch = 4000  # records that a reader may read before it checks `budget.is_full` again; an even number
    ports: Sequence[str] = ()  # where the records of `add_records` come out; empty: the ports that the source names

    @pytest.fixture
    def driver(self, options: SourceOptions) -> SourceDriver:
        return SourceDriver(options, self.ports)

    # -- positions ------------------------------------------------------------------------------------

    def test_an_empty_input_has_nothing_to_plan(self, driver: SourceDriver) -> None:
        position = driver.source.start(None)
        assert driver.source.plan(position, LIMITS) is None
        assert driver.source.backlog(position).files_outstanding == 0
        assert driver.source.find_unavailable(position, []) == []

    def test_positions_survive_json_and_another_process(
        self, driver: SourceDriver, options: SourceOptions, add_records: AddRecords
    ) -> None:
        position = driver.source.start(None)
        expected = []
        for number in range(4):
            add_records(records(10 * number, 5))
            expected += list(range(10 * number, 10 * number + 5))
        read: list[int] = []
        while True:
            position = _through_json(position)
            driver = SourceDriver(options, self.ports)  # every slice by a process of its own
            position = driver.source.start(position)
            found = driver.step(position, replace(LIMITS, max_files=1))
            if found is None:
                break
            read += found.ids
            position = found.after
        assert read == expected

    def test_a_position_of_another_location_is_refused(
        self, driver: SourceDriver, options: SourceOptions, elsewhere: SourceOptions, add_records: AddRecords
    ) -> None:
        add_records(records(0, 3))
        found = driver.step(driver.source.start(None))
        assert found is not None
        other = open_source(elsewhere, once=True)
        with pytest.raises(SourceMovedError):
            other.start(found.after)
        moved = open_source(elsewhere, once=True, moved=(driver.source.location, other.location))
        assert moved.start(found.after) is not None, "it is accepted when somebody says that the input moved"

    def test_a_position_of_another_kind_is_damaged(self, driver: SourceDriver) -> None:
        with pytest.raises(DamagedError):
            driver.source.start({"some": "thing"})

    def test_a_position_is_described_in_words(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 3))
        found = driver.step(driver.source.start(None))
        assert found is not None
        for position in (found.before, found.after):
            view = driver.source.describe(position)
            assert view.facts
            assert _through_json(view.facts) == view.facts
            assert describe(position) == view, "also when no source of the spec has it"
        assert driver.source.describe(found.before) != driver.source.describe(found.after)
        with pytest.raises(DamagedError):
            driver.source.describe({"some": "thing"})

    def test_an_earlier_position_can_be_set_by_hand_or_the_source_refuses_by_name(
        self, driver: SourceDriver, add_records: AddRecords
    ) -> None:
        for number in range(2):
            add_records(records(10 * number, 5))
        first, *later = driver.steps(driver.source.start(None), replace(LIMITS, max_files=1, max_events=5))
        newest = later[-1].after if later else first.after
        source = driver.source.inner if isinstance(driver.source, GuardedSource) else driver.source
        if type(source).set_position is Source.set_position:
            with pytest.raises(ConfigError, match=repr(source.name)):
                driver.source.set_position(newest, json.dumps(first.before))
            return
        change = driver.source.set_position(newest, json.dumps(first.before))
        assert change.again
        assert not change.never
        assert change.again_count >= 1
        position = driver.source.start(_through_json(change.position))
        assert [number for found in driver.steps(position) for number in found.ids] == [*range(5), *range(10, 15)]
        same = driver.source.set_position(newest, json.dumps(newest))
        assert (same.position, same.again, same.never) == (newest, (), ())
        forward = driver.source.set_position(first.before, json.dumps(newest))
        assert forward.never
        assert not forward.again
        assert driver.source.plan(driver.source.start(_through_json(forward.position)), LIMITS) is None
        with pytest.raises(ConfigError):
            driver.source.set_position(newest, '{"some": "thing"}')

    # -- planning -------------------------------------------------------------------------------------

    def test_everything_is_read_once_and_in_order(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 5))
        add_records(records(5, 5))
        position, read = driver.source.start(None), []
        for found in driver.steps(position):
            read += found.ids
            position = found.after
        assert read == list(range(10))
        assert driver.source.plan(position, LIMITS) is None
        assert driver.source.backlog(position).files_outstanding == 0
        add_records(records(10, 2))
        assert driver.source.backlog(position).files_outstanding >= 1
        assert [found.ids for found in driver.steps(position)] == [[10, 11]]

    def test_the_same_position_gives_a_slice_again(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 4))
        position = driver.source.start(None)
        first = driver.step(position)
        assert first is not None
        driver.source.give_back(first.plan)  # the epoch was lost
        second = driver.step(position)
        assert second is not None
        assert second.rows == first.rows
        after, _ = driver.source.advance(second.plan, second.outcomes, 1)  # under the number of the lost epoch
        assert _through_json(after) == first.after

    def test_a_plan_stands_on_a_position_that_is_not_committed(
        self, driver: SourceDriver, add_records: AddRecords
    ) -> None:
        for number in range(3):
            add_records(records(number, 1))
        slices = list(driver.steps(driver.source.start(None), replace(LIMITS, max_files=1, max_events=1)))
        again = driver.step(slices[0].after, replace(LIMITS, max_files=1, max_events=1))
        assert again is not None
        assert again.ids == slices[1].ids

    def test_a_slice_keeps_its_limits_and_is_cut_only_where_that_is_allowed(
        self, driver: SourceDriver, add_records: AddRecords
    ) -> None:
        batches = [records(10 * number, 10) for number in range(3)]
        for batch in batches:
            add_records(batch)
        limits = replace(LIMITS, max_events=4)
        slices = list(driver.steps(driver.source.start(None), limits))
        assert [number for found in slices for number in found.ids] == list(range(30))
        if self.is_atomic:
            ends = {batch[-1]["id"] for batch in batches}
            assert all(found.ids[-1] in ends for found in slices), "a transaction was cut"
            assert len(slices) == len(batches)
        else:
            assert all(found.ids for found in slices), "a slice without records was planned"
            sizes = [len(found.ids) for found in slices]
            assert max(sizes) <= limits.max_events, (
                f"a slice has {max(sizes)} records, and its limit is {limits.max_events}: "
                "a reader never reads more than `budget.records_left`"
            )

    def test_a_slice_is_plain_json(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 3))
        plan = driver.source.plan(driver.source.start(None), LIMITS)
        assert plan is not None
        assert plan.source == driver.source.name
        assert plan.files == sum(len(split.inputs) for split in plan.splits) >= 1
        for split in plan.splits:
            assert Split.from_json(_through_json(split.to_json())) == split
            assert all("path" in item for item in split.inputs)
        assert _through_json(driver.source.reader_settings()) == driver.source.reader_settings()

    # -- reading and advancing ------------------------------------------------------------------------

    def test_two_readings_of_a_split_give_the_same_rows(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 7))
        plan = driver.source.plan(driver.source.start(None), LIMITS)
        assert plan is not None
        first = driver.read(plan)
        add_records(records(7, 3))
        assert driver.read(plan) == first

    def test_advancing_depends_on_its_arguments_alone(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 7))
        found = driver.step(driver.source.start(None))
        assert found is not None
        kept = copy.deepcopy((found.plan, found.outcomes))
        add_records(records(7, 3))
        again = driver.source.advance(found.plan, found.outcomes, 1)
        assert _through_json(again[0]) == found.after
        assert [without_times(one) for one in again[1]] == [without_times(one) for one in found.records]
        assert (found.plan, found.outcomes) == kept

    def test_what_no_reader_reached_is_not_passed(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 4))
        add_records(records(4, 4))
        position = driver.source.start(None)
        plan = driver.source.plan(position, LIMITS)
        assert plan is not None
        after, _ = driver.source.advance(plan, [], 1)
        assert [number for found in driver.steps(_through_json(after)) for number in found.ids] == list(range(8))

    def test_a_reader_ends_soon_after_its_budget_is_full(self, driver: SourceDriver, add_records: AddRecords) -> None:
        batches = self._add_large_inputs(add_records, 4)
        plan = driver.source.plan(driver.source.start(None), LIMITS)
        assert plan is not None
        first = replace(plan, splits=plan.splits[:1])
        whole, cut = driver.read(first)[0], driver.read(first, cut_first=True)[0]
        assert cut == whole[: len(cut)], "a reader that ends early has read the beginning of its split"
        assert 1 <= len(cut) <= self.max_batch, (
            "the reader goes on for more than `max_batch` records after `budget.is_full`"
        )
        assert len(plan.splits[0].inputs) == 1 or len(cut) < len(whole)
        if self.is_atomic:
            assert cut[-1][1] in {batch[-1]["id"] for batch in batches}, "a transaction was cut"

    def test_a_split_that_ends_early_leaves_no_gap(
        self, driver: SourceDriver, options: SourceOptions, add_records: AddRecords
    ) -> None:
        """The first split ends early, later ones do not: every row is still read once, in this epoch or a later one."""
        batches = self._add_large_inputs(add_records, 6)
        expected = [int(record["id"]) for batch in batches for record in batch]
        limits = replace(LIMITS, parallelism=3)
        position, read = driver.source.start(None), []
        for _ in range(2):
            found = driver.step(position, limits, cut_first=True)
            if found is None:
                break
            read += found.ids
            missing = sorted(set(expected) - set(read))
            replayed = _through_json(driver.source.replay(position, found.records))
            for after, way in ((found.after, "advance"), (replayed, "replay")):
                later = SourceDriver(options, self.ports)
                rest = [number for one in later.steps(later.source.start(after), limits) for number in one.ids]
                assert sorted(rest) == missing, f"after `{way}` rows are lost, or read twice"
            again = driver.source.replan(found.after, found.records, 3)
            assert driver.read(again)[0] == found.rows, "`replan` is not what the epoch read"
            position = found.after
        for found in driver.steps(position, limits):
            read += found.ids
        assert sorted(read) == expected

    def _add_large_inputs(self, add_records: AddRecords, count: int) -> list[list[dict[str, Any]]]:
        size = self.max_batch // 2
        batches = [records(size * number, size) for number in range(count)]
        for batch in batches:
            add_records(batch)
        return batches

    def test_input_records_say_what_was_read(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 5))
        for found in driver.steps(driver.source.start(None), replace(LIMITS, max_events=2)):
            assert sum(int(one["to"]) - int(one["from"]) for one in found.records) == len(found.ids)
            assert {str(one["status"]) for one in found.records} <= STATUSES
            assert all(one["path"] for one in found.records)

    # -- ports ----------------------------------------------------------------------------------------

    def test_rows_come_on_ports_that_the_source_has(self, driver: SourceDriver, add_records: AddRecords) -> None:
        add_records(records(0, 20))
        assert all(driver.source.has_port(port) for port in (*driver.source.ports, *driver.ports))
        rows = [row for found in driver.steps(driver.source.start(None)) for row in found.rows]
        assert {port for port, _ in rows} == set(driver.ports), "records were to be added for every port"
        assert sorted(number for _, number in rows) == list(range(20))

    def test_a_port_gives_the_same_rows_whatever_other_ports_are_wanted(
        self, driver: SourceDriver, add_records: AddRecords
    ) -> None:
        add_records(records(0, 20))
        found = driver.step(driver.source.start(None))
        assert found is not None
        for port in driver.ports:
            rows, outcomes = driver.read(found.plan, [port])
            assert rows == [row for row in found.rows if row[0] == port]
            assert driver.source.advance(found.plan, outcomes, 1)[0] == found.after, "positions do not depend on ports"

    # -- replay ---------------------------------------------------------------------------------------

    def test_replayed_records_lead_to_the_same_place(self, driver: SourceDriver, add_records: AddRecords) -> None:
        """Whoever goes on from a replayed position reads what follows; the position itself may look different."""
        for number in range(3):
            add_records(records(10 * number, 5))
        limits = replace(LIMITS, max_events=4)
        slices = list(driver.steps(driver.source.start(None), limits))
        replayed = slices[0].before
        for number, found in enumerate(slices, start=1):
            replayed = _through_json(driver.source.replay(replayed, found.records))
            rest = [number for later in slices[number:] for number in later.ids]
            assert [number for later in driver.steps(replayed, limits) for number in later.ids] == rest

    def test_a_recorded_slice_is_read_again_as_it_was(
        self, driver: SourceDriver, options: SourceOptions, add_records: AddRecords
    ) -> None:
        for number in range(3):
            add_records(records(10 * number, 5))
        slices = list(driver.steps(driver.source.start(None), replace(LIMITS, max_events=4)))
        add_records(records(50, 5))
        later = SourceDriver(options, self.ports)
        assert later.source.find_unavailable(slices[-1].after, [one for s in slices for one in s.records]) == []
        for found in slices:
            for parallelism in (1, 3):
                plan = later.source.replan(found.after, found.records, parallelism)
                assert later.read(plan)[0] == found.rows, "the same rows come on the same ports"

    # -- after the commit -----------------------------------------------------------------------------

    def test_acknowledging_is_idempotent_and_takes_nothing_that_is_needed(
        self, driver: SourceDriver, options: SourceOptions, add_records: AddRecords
    ) -> None:
        for number in range(3):
            add_records(records(10 * number, 5))
        slices = list(driver.steps(driver.source.start(None), replace(LIMITS, max_files=1, max_events=5)))
        middle = slices[1]
        for position in (middle.before, middle.before, slices[0].before, middle.before):
            driver.source.acknowledge(position)
        later = SourceDriver(options, self.ports)
        position = later.source.start(middle.before)
        assert next(later.steps(position)).ids[: len(middle.ids)] == middle.ids
        assert later.source.find_unavailable(slices[-1].after, middle.records, middle.before) == []
        gone = later.source.find_unavailable(slices[-1].after, slices[0].records)
        assert bool(gone) == self.forgets, "what is given up is told, and only that"


def without_times(record: dict[str, Json]) -> dict[str, Json]:
    """An input record without the times at which something was done."""
    return {name: value for name, value in record.items() if not name.endswith("_time")}
