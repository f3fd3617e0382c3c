"""A run warns of a partition column that no record has, once, whatever the kind of write."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.pipelines import pipeline_options, run_once


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.json").write_text(f'{{"id": {number}, "day": "2024-01-0{number + 1}"}}\n')
    return tmp_path


def options_of(folder: Path, *sinks: DeltaSinkOptions) -> PipelineOptions:
    return pipeline_options(str(folder / "in"), "", sinks=sinks, max_files=1)


def warnings_of(options: PipelineOptions, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "firnline"):
        assert run_once(options).exit_code == 0
    return [record.getMessage() for record in caplog.records if "partitioned" in record.getMessage()]


def test_a_run_of_several_epochs_names_the_column_and_its_sink_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = (
        DeltaSinkOptions("lake", str(folder / "lake"), partition_by=("dya",)),
        DeltaSinkOptions("good", str(folder / "good"), partition_by=("day",)),
        DeltaSinkOptions("newest", str(folder / "newest"), partition_by=("dya",), write="upsert", key=("id",)),
    )
    options = options_of(folder, *sinks)
    assert warnings_of(options, caplog) == [
        f"no record has dya, by which {sink} is partitioned: all rows go to one partition; correct partition_by"
        for sink in ("lake", "newest")
    ]
    (folder / "in" / "9.json").write_text('{"id": 9, "day": "2024-02-01"}\n')
    assert len(warnings_of(options, caplog)) == 2  # the next run says it again, though the tables have the column now


def test_a_column_that_some_record_has_is_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "in" / "0.json").write_text('{"id": 0}\n{"id": 10, "day": "2024-01-01"}\n')
    (folder / "in" / "5.json").write_text('{"id": 5}\n')
    (folder / "in" / "6.json").write_text("no record\n")
    assert (
        warnings_of(options_of(folder, DeltaSinkOptions("lake", str(folder / "lake"), partition_by=("day",))), caplog)
        == []
    )


def test_a_column_of_folder_names_is_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "in").rename(folder / "old")
    (folder / "in").mkdir()
    (folder / "old").rename(folder / "in" / "region=north")
    sink = DeltaSinkOptions("lake", str(folder / "lake"), partition_by=("region",))
    assert warnings_of(options_of(folder, sink), caplog) == []
