"""Settings of followers that name columns: what does not fit is refused before an epoch keeps it, and never in silence.

Also what a run, `status` and `sinks list` say about rows and sinks that were left behind.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.history.sinks import load_sinks
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


def options_of(make_options: MakeOptions, folder: Path, **settings: object) -> PipelineOptions:
    copy = SqliteSinkOptions("copy", str(folder / "copy.db"), **settings)  # type: ignore[arg-type]
    return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(folder / "table")), copy))


def edited(options: PipelineOptions, **settings: object) -> PipelineOptions:
    table, copy = options.sinks
    return replace(options, sinks=(table, replace(copy, **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"where": "idd > 5"}, "sink 'copy': where: the condition 'idd > 5' does not fit the rows"),
        ({"where": "id > month::date"}, "sink 'copy': where: the condition 'id > month::date' does not fit the rows"),
        ({"key": ("idd",)}, "sink 'copy': key names the column 'idd', and its rows have"),
        ({"key": ("id",), "exclude": ("id",)}, "sink 'copy': key names the column 'id', and its rows have"),
    ],
)
def test_settings_that_do_not_fit_the_rows_are_refused_before_an_epoch_keeps_them(
    make_options: MakeOptions,
    sample: SampleInput,
    tmp_path: Path,
    settings: dict[str, object],
    message: str,
    required: bool,
) -> None:
    options = options_of(make_options, tmp_path, required=required, **settings)
    sample.add("f1.json", 10)
    result = run_once(options).result
    assert result.exit_code == 1
    assert result.error is not None
    assert result.error.message.startswith(message)
    assert open_pipeline(options).load().epoch == 0
    corrected = edited(options, where="id > 5", key=(), exclude=())
    run_to_end(corrected)
    assert sqlite_ids(tmp_path / "copy.db") == Counter(number for number in sample.ids if number > 5)
    assert table_ids(tmp_path / "table") == sample.ids


def test_a_condition_on_a_column_that_later_files_lack_leaves_their_rows_out(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, where="amount > 1", mask={"amount": "null"})
    sample.add("f1.json", 2, amount=5)
    run_to_end(options)
    sample.add("f2.json", 2)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == Counter([1, 2])


def test_columns_that_no_row_has_are_logged_once_with_the_one_that_was_meant(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_of(make_options, tmp_path, mask={"mnoth": "hash"}, exclude=("elsewhere",))
    sample.add("f1.json", 10)
    sample.add("f2.json", 10)
    with caplog.at_level(logging.WARNING):
        run_to_end(options)
    texts = [record.getMessage() for record in caplog.records if "of sink copy names" in record.getMessage()]
    assert texts == [
        "exclude of sink copy names 'elsewhere', and its rows have no such column: nothing is left out",
        "mask of sink copy names 'mnoth', and its rows have no such column: nothing is masked (did you mean 'month'?)",
    ]
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_dead_letters_are_logged_and_counted_where_people_look(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_of(make_options, tmp_path, refused=3, on_bad_row="dead_letter")
    sample.add("f1.json", 10)
    with caplog.at_level(logging.WARNING):
        run_to_end(options)
    (text,) = [record.getMessage() for record in caplog.records if "dead letters" in record.getMessage()]
    assert text.startswith("sink copy refused 1 row of epoch 1: ")
    assert text.endswith("kept as dead letters, see `firnline dead-letters list --sink copy`")
    _, (table, copy) = load_sinks(open_pipeline(options))
    assert (table["dead_letters"], copy["dead_letters"], copy["state"]) == (0, 1, "in sync")
    assert [sink["dead_letters"] for sink in load_status(open_pipeline(options)).sinks] == [0, 1]
    (letters,) = (tmp_path / "table/_firnline/demo/dead-letters/copy").iterdir()
    letters.write_bytes(b"{")
    assert load_sinks(open_pipeline(options))[1][1]["dead_letters"] is None


def test_a_required_sink_that_ended_the_run_is_listed_with_its_error(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, refused=3)
    sample.add("f1.json", 10)
    assert run_once(options).exit_code == 1
    _, (_, copy) = load_sinks(open_pipeline(options))
    assert copy["state"] == "fails"
    assert copy["error"].startswith("sink 'copy' cannot hold row demo/1/")


def test_a_sink_behind_without_an_error_waits_for_a_run(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, required=False)
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    sample.add("f1.json", 10)
    run_to_end(options)
    down.unlink()
    for record in (tmp_path / "table/_firnline/demo/runs").iterdir():
        record.unlink()  # the only place that knows why
    _, (_, copy) = load_sinks(open_pipeline(options))
    assert (copy["state"], copy["epochs_behind"]) == ("waits for a run", 1)
    run_to_end(options)
    assert load_sinks(open_pipeline(options))[1][1]["state"] == "in sync"


def test_retries_of_an_optional_sink_are_no_restarts(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = options_of(make_options, tmp_path, required=False)
    (tmp_path / f"copy.db{DOWN}").touch()
    sample.add("f1.json", 10)
    run_to_end(options)
    status = load_status(open_pipeline(options))
    assert status.restarts == 0
    assert "copy.db" in json.dumps(status.last_error)
    assert sqlite_rows(tmp_path / "copy.db") == []
