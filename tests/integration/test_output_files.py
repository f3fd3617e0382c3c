"""`max_output_files`: the Parquet files that one epoch stages for one table, of any size and from any task."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from tests.support.damage import commits_of
from tests.support.pipelines import LocalRun, MakeOptions, run_once
from tests.support.samples import table_ids


def write(folder: Path, files: int, days: list[list[int]]) -> Counter[int]:
    """Files of records whose `p` is drawn from the list that is the file's own."""
    folder.mkdir(exist_ok=True)
    ids: Counter[int] = Counter()
    for number in range(files):
        mine = days[number % len(days)]
        rows = [{"id": number * 60 + n, "p": mine[n % len(mine)]} for n in range(60)]
        ids.update(int(row["id"]) for row in rows)
        (folder / f"f{number:02d}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ids


def staged(options: PipelineOptions) -> list[int]:
    """How many files each commit adds, by the log's own words."""
    lines = [path.read_text().splitlines() for path in commits_of(options.deciding.location, options.name)]
    return [sum("add" in json.loads(line) for line in found) for found in lines]


def read_all(options: PipelineOptions, threads: int, expected: Counter[int]) -> LocalRun:
    run = run_once(options, threads=threads)
    assert run.exit_code == 0, run.result
    assert table_ids(options.deciding.location) == expected
    return run


def test_no_more_tasks_than_files(tmp_path: Path, make_options: MakeOptions) -> None:
    expected = write(tmp_path / "in", 40, [[1]])
    options = make_options(max_output_files=10)
    read_all(options, 16, expected)
    assert staged(options) == [10]


def test_an_epoch_closes_before_its_tasks_open_more_partitions(tmp_path: Path, make_options: MakeOptions) -> None:
    """Each file has a day of its own: one task or several, there are never more files than asked for."""
    expected = write(tmp_path / "in", 24, [[day] for day in range(24)])
    options = make_options(partition_by=("p",), max_output_files=6)
    read_all(options, 2, expected)
    assert max(staged(options)) <= 6 + 2, "a task notices it with the file that is one too many"
    assert sum(staged(options)) == 24


def test_where_every_file_is_in_every_partition_one_task_reads_from_then_on(
    tmp_path: Path, make_options: MakeOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit cannot be kept, is told, and makes no further small files."""
    expected = write(tmp_path / "in", 40, [list(range(30))])
    options = make_options(partition_by=("p",), max_output_files=10, max_files=20)
    with caplog.at_level(logging.WARNING):
        read_all(options, 2, expected)
    assert staged(options) == [60, 30]
    assert "more files staged" in caplog.text
