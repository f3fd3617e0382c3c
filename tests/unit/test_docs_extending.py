"""docs/extending.md works as printed: the suites pass, the script runs, and pipelines go through both kinds."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.sinks import registry as sinks
from firnline.sources import registry as sources
from firnline.sources.files.options import FileSourceOptions
from firnline.spec.build import load_options
from firnline.testing.faults import reached_points
from firnline.testing.local import run_locally
from tests.support.pipelines import pipeline_options
from tests.support.samples import SampleInput, table_ids

DOCS = Path(__file__).parents[2] / "docs"
SUITES = ["test_memory_source", "test_shop_source", "test_memory_sink"]
MODULES = [
    "memory_source",
    "test_memory_source",
    "shop_source",
    "shop_config",
    "test_shop_source",
    "memory_sink",
    "test_memory_sink",
    "memory_config",
    "run_in_memory",
]
MOST_LINES = 130  # of an example, without the empty ones


def save_blocks(folder: Path, page: str = "extending.md") -> list[str]:
    """Save the blocks of a page under the names in their first lines, as a reader does; return the names."""
    blocks = re.findall(r"```(?:python|yaml)\n(# (\S+)\.(py|yml)\n.*?)```", (DOCS / page).read_text(), re.DOTALL)
    for text, name, suffix in blocks:
        path = folder / f"{name}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [name for _, name, suffix in blocks if suffix == "py"]


def run_python(folder: Path, *words: str) -> str:
    """Run a child in the folder, which knows nothing but what lies there and the package; return what it prints."""
    source = Path(sources.__file__).parents[2]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**kept, "PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules of the page, imported; what they register and leave behind is gone after the test."""
    (tmp_path / "page").mkdir()
    names = save_blocks(tmp_path / "page")
    monkeypatch.syspath_prepend(str(tmp_path / "page"))
    for registry in (sources, sinks):
        monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))
    yield {name: importlib.import_module(name) for name in names if not name.startswith("test_")}
    for name in names:
        sys.modules.pop(name, None)


def test_the_suites_pass_as_printed(tmp_path: Path) -> None:
    save_blocks(tmp_path)
    options = ("-q", "-p", "no:cacheprovider")
    said = run_python(tmp_path, "-m", "pytest", *options, *(f"{name}.py" for name in SUITES))
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 50
    for name in SUITES:  # each alone, too
        run_python(tmp_path, "-m", "pytest", *options, "-k", "plan or receipt", f"{name}.py")


def test_the_script_prints_what_the_page_shows(tmp_path: Path) -> None:
    save_blocks(tmp_path)
    shown = re.search(r"\$ python run_in_memory\.py\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    assert shown is not None
    assert run_python(tmp_path, "run_in_memory.py") == shown[1]


def test_the_suite_of_the_operator_passes_as_printed(tmp_path: Path) -> None:
    assert save_blocks(tmp_path, "operators.md") == ["operators/spread", "operators/test_spread"]
    run_python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "operators/test_spread.py")


def test_the_page_shows_all_modules_and_they_are_small(tmp_path: Path) -> None:
    assert save_blocks(tmp_path) == MODULES
    for path in tmp_path.glob("*.py"):
        assert len([line for line in path.read_text().splitlines() if line.strip()]) <= MOST_LINES, path.name


def add(shown: dict[str, Any], first: int, count: int) -> None:
    source = shown["memory_source"]
    topic = source.TOPICS.setdefault("here", source.Topic())
    topic.records.extend({"id": number, "name": f"n{number}"} for number in range(first, first + count))


def test_a_pipeline_from_memory_to_a_table_and_to_memory(tmp_path: Path, shown: dict[str, Any]) -> None:
    run, page, tables = shown["run_in_memory"].run, tmp_path / "page", shown["memory_sink"].TABLES
    for first, count in ((0, 2500), (2500, 10), (2510, 0)):
        add(shown, first, count)
        assert run(page / "numbers.yml").rows == count
    assert sorted(table_ids(str(page / "table"))) == list(range(2510))
    assert sorted(row["id"] for row in tables["copy"].rows) == list(range(2510))
    assert {row["name"] for row in tables["copy"].rows} == {f"n{number}" for number in range(2510)}
    assert tables["copy"].commits[-1][1].epoch == 2


def test_a_pipeline_that_reads_ports_of_an_own_source(tmp_path: Path, shown: dict[str, Any]) -> None:
    """A spec may read ports that only the opened source knows, and the rows of each port go to their table."""
    sources.KINDS["shop"] = "shop_source"
    page, memory = tmp_path / "page", shown["memory_source"]
    changes = [{"table": ("orders", "users")[number % 2], "row": {"id": number}} for number in range(10)]
    memory.TOPICS["changes"] = memory.Topic(changes)
    assert run_locally(load_options(page / "shop.yml", environ={})).records == 10
    assert sorted(table_ids(str(page / "orders"))) == [0, 2, 4, 6, 8]
    assert sorted(table_ids(str(page / "users"))) == [1, 3, 5, 7, 9]


def test_the_suite_finds_the_fault_points_of_an_own_sink(tmp_path: Path, shown: dict[str, Any]) -> None:
    memory = shown["memory_source"]
    memory.TOPICS["here"] = memory.Topic([{"id": 1}])
    with reached_points() as reached:
        shown["run_in_memory"].run(tmp_path / "page" / "numbers.yml")
    assert reached["memory.commit.before"] == reached["memory.commit.after"] == 1
    assert reached["delta.commit.before"] > 0


def test_the_spec_of_the_page_builds_the_options_of_both_kinds(tmp_path: Path, shown: dict[str, Any]) -> None:
    options = load_options(tmp_path / "page" / "numbers.yml", environ={"COPY_PASSWORD": "guess"})
    assert options.sources == (shown["memory_source"].MemorySourceOptions("numbers", "here"),)
    assert options.sinks[1] == shown["memory_sink"].MemorySinkOptions("copy", password="guess", input="numbers")
    assert "guess" not in repr(options)


def test_a_pipeline_from_files_to_a_table_and_to_memory(
    tmp_path: Path, sample: SampleInput, shown: dict[str, Any]
) -> None:
    """The further sink is optional, and catches up with what the table decided while it was away."""
    followed = shown["memory_sink"].MemorySinkOptions("copy", required=False)
    alone = pipeline_options(str(tmp_path / "in"), str(tmp_path / "table"), max_files=1)
    options = replace(alone, sinks=(*alone.sinks, followed))
    for number in range(3):
        sample.add(f"f{number}.json", 3)
        assert run_locally(options).exit_code == 0
    assert isinstance(options.sources[0], FileSourceOptions)
    assert table_ids(str(tmp_path / "table")) == sample.ids
    assert sorted(int(row["id"]) for row in shown["memory_sink"].TABLES["copy"].rows) == sorted(sample.ids.elements())
