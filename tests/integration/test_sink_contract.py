"""A pipeline over sinks that are no Delta tables: run, jobs and history edits need the contract alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from firnline.cli.compact import compact
from firnline.cli.gc import gc
from firnline.errors import RollbackRefusedError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.rollback import Rollback
from firnline.history.epoch import load_epoch
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.pipelines import MakeOptions, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.shelf import ShelfOptions, register_shelf, shelved


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    register_shelf(monkeypatch)


@pytest.fixture(params=["decides", "further", "optional"])
def options(request: pytest.FixtureRequest, make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A shelf beside a table; it decides, or is given what the table decided."""
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    shelf = ShelfOptions("shelf", str(tmp_path / "shelf"), required=request.param != "optional")
    sinks = (shelf, table) if request.param == "decides" else (table, shelf)
    return make_options(max_files=1, sinks=sinks)


def test_every_sink_gets_every_row_once(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    assert shelved() == table_ids(tmp_path / "table") == sample.ids
    pipeline = open_pipeline(options)
    status, view = load_status(pipeline), load_epoch(pipeline, None, 2)
    assert [(sink["epoch"], sink["error"]) for sink in status.sinks] == [(3, None), (3, None)]
    assert [sink.holds for sink in view.sinks] == [True, True]
    decides = options.deciding.name == "shelf"
    assert status.table == ("shelf:shelf" if decides else str(tmp_path / "table"))
    assert [copy.where for copy in view.copies] == ["ledger"] + ["commitInfo"] * (not decides), "a shelf has no log"


def test_a_rollback_names_the_sink_that_cannot_go_back(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    for number in (1, 2):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    with pytest.raises(RollbackRefusedError, match="shelf cannot take rows back") as refused:
        Rollback(open_pipeline(options), 1).perform("person")
    decides = options.deciding.name == "shelf"
    assert refused.value.hint is not None
    assert refused.value.hint.endswith("--fresh-after 2" if decides else "--leave shelf"), "a command that is accepted"
    with pytest.raises(RollbackRefusedError, match="shelf cannot take rows back"):
        start_over(open_pipeline(options), 2, "person", truncate=True)
    if not decides:
        Rollback(open_pipeline(options), 1, leave=["shelf"]).perform("person")
        assert sum(table_ids(tmp_path / "table").values()) == 3
        run_to_end(options)
        assert table_ids(tmp_path / "table") == sample.ids
        assert shelved() - sample.ids == Counter(dict.fromkeys((4, 5, 6), 1)), "left as it was, and given again"


def test_a_rollback_names_all_sinks_that_cannot_go_back(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    shelves = [ShelfOptions(name, str(tmp_path / name)) for name in ("upper", "lower")]
    options = make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), *shelves))
    for number in (1, 2):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    for leave in ([], ["lower"]):
        with pytest.raises(RollbackRefusedError) as refused:
            Rollback(open_pipeline(options), 1, leave=leave).perform("person")
        assert refused.value.hint == "Leave the rows as they are: --leave lower --leave upper"
    Rollback(open_pipeline(options), 1, leave=["lower", "upper"]).perform("person")


@pytest.mark.parametrize(("command", "nothing"), [(gc, "nothing to collect"), (compact, "nothing to compact")])
def test_commands_about_tables_leave_other_kinds_alone(
    options: PipelineOptions,
    sample: SampleInput,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[str], int],
    nothing: str,
) -> None:
    sample.add("f1.json", 3)
    run_to_end(options)
    monkeypatch.setattr("firnline.cli.common.load_options", lambda _, **__: options)
    assert command("pipeline.yml") == 0
    assert f"shelf (shelf): {nothing} in a sink of this kind" in capsys.readouterr().out


def test_a_fresh_start_reaches_every_sink(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    sample.add("f1.json", 3)
    run_to_end(options)
    start_over(open_pipeline(options), 1, "person")
    run_to_end(options)
    twice = Counter(dict.fromkeys(sample.ids, 2))
    assert shelved() == table_ids(tmp_path / "table") == twice
