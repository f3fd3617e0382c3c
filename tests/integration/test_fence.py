"""A write lands on the version that its checks were made under, or nowhere; every table handle serves one thread."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.clock import SystemClock
from firnline.committer.committer import Committer
from firnline.errors import ConfigError, FencedError, SchemaError
from firnline.history.edits.rollback import Rollback
from firnline.maintenance.compact import compact
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.discard import discard
from firnline.sources.files.options import FileSourceOptions
from firnline.storage import open_storage
from tests.support.committers import commit_table
from tests.support.pipelines import MakeOptions, make_epochs, pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids, table_rows


def interrupt(patch: pytest.MonkeyPatch, method: str, point: str, meanwhile: Callable[[], object]) -> list[str]:
    """Before the first write at `point`, do something else; then refresh the handle, as another thread may have done.

    This is what a process sees that is stopped between check and write, and wakes up in another order. Every write of
    the table handle goes through `method`.
    """
    met: list[str] = []
    write = getattr(Table, method)

    def stopped(self: Table, *arguments: Any, **named: Any) -> Any:
        if not met and (not point or arguments[0] == point):
            met.append(method)
            meanwhile()
            self.refresh()
        return write(self, *arguments, **named)

    patch.setattr(Table, method, stopped)
    return met


def generation(table: str | Path) -> int | None:
    return DeltaTable(str(table)).transaction_version("firnline-gen:demo")


@pytest.mark.parametrize("method", ["transact", "add_columns"])
def test_an_epoch_that_was_checked_before_a_takeover_is_refused(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 1)
    sample.add("g1.json", 3, **({"extra": 1} if method == "add_columns" else {}))
    point = "delta.commit" if method == "transact" else ""
    met = interrupt(monkeypatch, method, point, lambda: run_to_end(options))
    zombie = run_once(options)
    assert met
    assert zombie.error_code == "fenced"
    assert table_ids(options.deciding.location) == sample.ids
    assert generation(options.deciding.location) == 3


def test_an_upsert_that_was_checked_before_a_takeover_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DeltaSinkOptions("delta", str(tmp_path / "out"), write="upsert", key=("id",))
    options = pipeline_options(str(tmp_path / "in"), sink.table, sinks=(sink,))
    (tmp_path / "in").mkdir()

    def put(number: int) -> None:
        row = {"id": 1, "v": number, "_op": "insert", "_sequence": number}
        (tmp_path / "in" / f"f{number}.json").write_text(json.dumps(row) + "\n")

    put(1)
    run_to_end(options)
    put(2)
    met = interrupt(monkeypatch, "transact", "delta.commit", lambda: run_to_end(options))
    assert run_once(options).error_code == "fenced"
    assert met
    assert [row["v"] for row in table_rows(sink.table)] == [2]


def test_a_claim_that_was_made_before_another_takes_a_number_of_its_own(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 1)
    sample.add("g1.json", 3)
    met = interrupt(monkeypatch, "transact", "delta.claim", lambda: run_to_end(options))
    run_to_end(options)
    assert met
    assert generation(options.deciding.location) == 3, "one of the successor, and a later one of ours"
    assert table_ids(options.deciding.location) == sample.ids


def test_a_rollback_that_was_checked_before_a_takeover_is_refused(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    sample.add("g1.json", 3)
    met = interrupt(monkeypatch, "restore", "delta.jump", lambda: run_to_end(options))
    with pytest.raises(FencedError):
        Rollback(open_pipeline(options), 2).perform("test")
    assert met
    assert table_ids(options.deciding.location) == sample.ids


def test_units_that_another_committer_committed_meanwhile_are_committed_once(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, mode="staged")
    table = options.deciding.location
    make_epochs(sample, options, 1)
    commit_table(table)
    make_epochs(sample, options, 2, first=2)
    other = Committer(Table(table, {}), open_storage(table), "other", SystemClock())
    met = interrupt(monkeypatch, "transact", "delta.commit", lambda: other.cycle())
    assert commit_table(table).units == 0
    assert met
    assert table_ids(table) == sample.ids


def test_units_that_are_committed_meanwhile_are_not_discarded(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, mode="staged")
    table = options.deciding.location
    make_epochs(sample, options, 1)
    commit_table(table)
    make_epochs(sample, options, 1, first=2)
    met = interrupt(monkeypatch, "transact", "delta.claim", lambda: commit_table(table))
    with pytest.raises(ConfigError, match="is committed"):
        discard(Table(table, {}), open_storage(table), "demo", 2, "person")
    assert met
    run_to_end(options)
    commit_table(table)
    assert table_ids(table) == sample.ids


def test_files_that_are_replaced_meanwhile_are_not_compacted(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    table = options.deciding.location
    met = interrupt(monkeypatch, "transact", "delta.compact", lambda: DeltaTable(table).optimize.compact())
    compact(table)
    assert met
    assert table_ids(table) == sample.ids


def test_every_table_handle_of_a_run_serves_one_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the table changes under an epoch and the columns of all sinks are looked at again."""
    threads: dict[Table, set[str]] = defaultdict(set)
    refresh, evolve = Table.refresh, DeltaSink._evolve

    def noted(self: Table) -> bool:
        threads[self].add(threading.current_thread().name)
        return refresh(self)

    altered: list[str] = []

    def alter(self: DeltaSink, *arguments: Any) -> bool:
        if self.name == "main" and not altered:  # somebody gives a column another type
            altered.append(self.name)
            raise SchemaError("a column has another type now")
        return evolve(self, *arguments)

    monkeypatch.setattr(Table, "refresh", noted)
    sources = [FileSourceOptions(name, str(tmp_path / name), poll_interval_secs=0.05) for name in "abc"]
    sinks = (
        DeltaSinkOptions("main", str(tmp_path / "main"), input="a"),
        DeltaSinkOptions("two", str(tmp_path / "two"), input="b", required=False, write="upsert", key=("id",)),
        DeltaSinkOptions("three", str(tmp_path / "three"), input="c", mode="staged"),
    )
    options = pipeline_options("", "", sources=sources, sinks=sinks, max_files=1)
    for number in (1, 2):
        for name in "abc":
            row = {"id": number, "_op": "insert", "_sequence": number} if name == "b" else {"id": number}
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"f{number}.json").write_text(json.dumps(row) + "\n")
        run_to_end(options)
        monkeypatch.setattr(DeltaSink, "_evolve", alter)
    assert altered
    assert {len(lanes) for lanes in threads.values()} == {1}, [
        (table.uri, lanes) for table, lanes in threads.items() if len(lanes) > 1
    ]
