"""The code of docs/extending.md is run: the kinds in memory pass their suites, and a pipeline goes through both."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from firnline.options import FileSourceOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks import registry as sinks
from firnline.sources import registry as sources
from firnline.testing.local import LocalEngine
from tests.support.pipelines import pipeline_options
from tests.support.samples import SampleInput, table_ids

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
MODULES = ["memory_source", "test_memory_source", "memory_sink", "test_memory_sink", "run_in_memory"]
MOST_LINES = 130  # of an example, without the empty ones


def load_modules() -> dict[str, Any]:
    """The modules that the page shows, each named in its first line."""
    found: dict[str, Any] = {}
    for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        module = ModuleType(name)
        sys.modules[name] = found[name] = module
        exec(compile(text, f"{PAGE.name}: {name}.py", "exec"), module.__dict__)
    return found


SHOWN = load_modules()
TOPICS, TABLES = SHOWN["memory_source"].TOPICS, SHOWN["memory_sink"].TABLES


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what the two lines on the page do, for one test."""
    lines = re.findall(r"```python\nfrom (\S+) import KINDS\n\nKINDS\[\"(\w+)\"\] = \"(\w+)\"\n```", PAGE.read_text())
    assert [line[2] for line in lines] == ["memory_source", "memory_sink"]
    for module, kind, name in lines:
        monkeypatch.setitem({sources.__name__: sources, sinks.__name__: sinks}[module].KINDS, kind, name)
    TOPICS.clear()
    TABLES.clear()


class TestMemorySource(SHOWN["test_memory_source"].TestMemorySource):  # type: ignore[misc]
    pass


class TestMemorySink(SHOWN["test_memory_sink"].TestMemorySink):  # type: ignore[misc]
    pass


def test_the_page_shows_all_modules_and_they_are_small() -> None:
    assert list(SHOWN) == MODULES
    for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        assert len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES, name


def add(first: int, count: int) -> None:
    topic = TOPICS.setdefault("here", SHOWN["memory_source"].Topic())
    topic.records.extend({"id": number, "name": f"n{number}"} for number in range(first, first + count))


def test_a_pipeline_from_memory_to_a_table_and_to_memory(tmp_path: Path) -> None:
    run, table = SHOWN["run_in_memory"].run, tmp_path / "table"
    for first, count in ((0, 2500), (2500, 10), (2510, 0)):
        add(first, count)
        assert run(table) == 0
    assert sorted(table_ids(str(table))) == list(range(2510))
    assert sorted(row["id"] for row in TABLES["copy"].rows) == list(range(2510))
    assert {row["name"] for row in TABLES["copy"].rows} == {f"n{number}" for number in range(2510)}
    assert TABLES["copy"].commits[-1][1].epoch == 2


def test_a_pipeline_from_files_to_a_table_and_to_memory(tmp_path: Path, sample: SampleInput) -> None:
    """The further sink is optional, and catches up with what the table decided while it was away."""
    followed = SHOWN["memory_sink"].MemorySinkOptions("copy", required=False)
    alone = pipeline_options(str(tmp_path / "in"), str(tmp_path / "table"), max_files=1)
    options = replace(alone, sinks=(*alone.sinks, followed))
    for number in range(3):
        sample.add(f"f{number}.json", 3)
        assert Runner(open_pipeline(options, once=True), LocalEngine(), once=True).run().exit_code == 0
    assert isinstance(options.sources[0], FileSourceOptions)
    assert table_ids(str(tmp_path / "table")) == sample.ids
    assert sorted(int(row["id"]) for row in TABLES["copy"].rows) == sorted(sample.ids.elements())
