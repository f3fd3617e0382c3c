"""The tutorial and the pages by task run as they stand there, and the tables hold what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.cli.main import run_command
from firnline.testing.local import LocalEngine
from tests.support.pages import ROOT, FirnlineCommand, run_page
from tests.support.samples import SampleInput, table_ids

PAGES = ROOT / "docs"
SPEC = """\
name: orders
sources:
  orders: {type: files, path: in}
sinks:
  - {type: delta, table: out}
batch: {max_files: 1}
"""


@pytest.fixture
def firnline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> FirnlineCommand:
    """The command in this process, without Spark, in the test's folder."""
    monkeypatch.setattr("firnline.jobs.spark.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)

    def run(words: list[str]) -> tuple[int, str]:
        code = run_command(words)
        streams = capfd.readouterr()
        return code, streams.out + streams.err

    return run


@pytest.fixture
def orders(tmp_path: Path, sample: SampleInput, firnline: FirnlineCommand) -> SampleInput:
    """A pipeline that has read three files in three epochs."""
    (tmp_path / "firnline.yml").write_text(SPEC)
    for number in (1, 2, 3):
        sample.add(f"day-{number}.json", 4)
    assert firnline(["run", "--once"])[0] == 0
    return sample


def test_the_tutorial(tmp_path: Path, firnline: FirnlineCommand) -> None:
    run_page(PAGES / "tutorial.md", tmp_path, firnline)
    assert sorted(table_ids(str(tmp_path / "orders" / "out")).elements()) == [1, 2, 3, 4, 5, 7, 8]


def test_one_table_per_value(tmp_path: Path, firnline: FirnlineCommand) -> None:
    run_page(PAGES / "how-to" / "one-table-per-value.md", tmp_path, firnline)
    found = {log.parent.name: sorted(table_ids(log.parent)) for log in (tmp_path / "lake").glob("*/_delta_log")}
    assert found == {"asia": [6], "eu": [1, 3], "us": [2, 5]}


def test_go_back(tmp_path: Path, firnline: FirnlineCommand, orders: SampleInput) -> None:
    run_page(PAGES / "how-to" / "go-back.md", tmp_path, firnline)
    assert table_ids(str(tmp_path / "out")).total() == 8
    assert firnline(["run", "--once"])[0] == 0
    assert table_ids(str(tmp_path / "out")) == orders.ids


def test_move_a_folder(tmp_path: Path, firnline: FirnlineCommand, orders: SampleInput) -> None:
    run_page(PAGES / "how-to" / "move-a-folder.md", tmp_path, firnline)
    orders.folder = tmp_path / "archive"
    orders.add("day-4.json", 4)
    assert firnline(["run", "--once"])[0] == 0
    assert table_ids(str(tmp_path / "lake" / "orders")) == orders.ids


def test_run_two_stage(tmp_path: Path, firnline: FirnlineCommand, sample: SampleInput) -> None:
    page = PAGES / "how-to" / "run-two-stage.md"
    _, _, rest = page.read_text().partition("```yaml\n")
    (tmp_path / "firnline.yml").write_text(
        "".join(f"{line[4:]}\n" for line in rest.partition("    ```")[0].splitlines())
    )
    sample.add("day-1.json", 4)
    run_page(page, tmp_path, firnline)
    assert table_ids(str(tmp_path / "out")) == sample.ids
