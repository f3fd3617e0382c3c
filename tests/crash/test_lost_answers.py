"""The answer to a commit is lost, late or a lie of a retry: the log is read before anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from firnline.options import PipelineOptions
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    options: PipelineOptions = make_options(max_files=1)
    sample.add("a0.json", 3)
    assert run_once(options).exit_code == 0
    sample.add("a1.json", 3)
    sample.add("a2.json", 3, extra=1)
    sample.add("a3.json", 3)
    return options


class Lossy:
    """Stands before a method of delta-rs: the calls whose numbers are in `lost` go wrong."""

    def __init__(self, method: Callable[..., Any], lost: set[int], error: Exception, *, late: bool) -> None:
        self.method = method
        self.lost = lost
        self.error = error
        self.late = late
        self.calls = 0
        self.pending: list[Callable[[], Any]] = []

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return lambda *a, **k: self(instance, *a, **k)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        while self.pending:  # what was given up lands now, just before the next one
            try:
                self.pending.pop()()
            except DeltaError:
                continue
        if self.calls not in self.lost:
            return self.method(*args, **kwargs)
        if self.late:
            again = DeltaTable(args[0].table_uri, version=args[0].version())
            self.pending.append(lambda: self.method(again, *args[1:], **kwargs))
        else:
            self.method(*args, **kwargs)
        raise self.error


CALLS = [{1}, {2}, {3}, {4}, {1, 2}, {2, 3}, {2, 4}]
ERRORS = {
    "timeout": OSError("the request timed out"),
    "transport": DeltaError("Generic error: connection reset"),
    "its own first write": CommitFailedError("Transaction failed: version already exists"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("lost", CALLS, ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["committed", "lands-later"])
def test_commit(
    options: PipelineOptions,
    sample: SampleInput,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    lost: set[int],
    late: bool,
) -> None:
    """Claims and epochs alike: `create_write_transaction` writes both."""
    lossy = Lossy(DeltaTable.create_write_transaction, lost, ERRORS[error], late=late)
    monkeypatch.setattr(DeltaTable, "create_write_transaction", lossy)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert lossy.calls >= 4
    assert table_ids(options.sinks[0].location) == sample.ids
    monkeypatch.undo()
    again = run_once(options)
    assert (again.exit_code, again.result.epochs) == (0, 0)
    assert table_ids(options.sinks[0].location) == sample.ids


@pytest.mark.parametrize("error", ERRORS)
def test_add_columns(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    from deltalake.table import TableAlterer

    lossy = Lossy(TableAlterer.add_columns, {1}, ERRORS[error], late=False)
    monkeypatch.setattr(TableAlterer, "add_columns", lossy)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert lossy.calls >= 1
    assert table_ids(options.sinks[0].location) == sample.ids


@pytest.mark.parametrize("error", ERRORS)
def test_create(sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    options: PipelineOptions = make_options(max_files=1)
    sample.add("a0.json", 3)
    sample.add("a1.json", 3)
    create = DeltaTable.create
    calls = []

    def lossy(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        create(*args, **kwargs)
        raise ERRORS[error]

    monkeypatch.setattr(DeltaTable, "create", lossy)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert calls == [1]
    assert table_ids(options.sinks[0].location) == sample.ids


def test_for_ever_down_is_safe_to_run_again(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any, **__: Any) -> None:
        raise OSError("the store is down")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", down)
    run = run_once(options)
    assert run.exit_code == 3, run.result
    monkeypatch.undo()
    assert run_once(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids
