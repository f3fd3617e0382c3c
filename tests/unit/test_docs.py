"""The docs say what the code does: generated pages are fresh, links resolve, every thing has its place."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh() -> None:
    assert generator().stale() == [], "run: python scripts/generate_docs.py"


def test_the_map_names_every_package_and_module_with_its_purpose() -> None:
    source = ROOT / "src" / "firnline"
    folders = {f"{path.parent.name}/" for path in source.rglob("__init__.py")} - {"firnline/"}
    modules = {path.name for path in source.glob("*.py")} - {"__init__.py"}
    rows = [line.split(maxsplit=1) for line in generator().folder_map().splitlines()[2:]]
    assert {row[0] for row in rows} == folders | modules
    for row in rows:
        assert len(row) == 2, f"{row[0]} has no docstring"
        assert row[1].endswith("."), f"{row[0]}: {row[1]}"


def test_the_map_lies_between_its_markers() -> None:
    docs = generator()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert text.count(docs.MAP_BEGIN) == text.count(docs.MAP_END) == 1
    assert docs.folder_map() in text


def test_the_spec_page_is_headed_by_sections_of_the_file_with_defaults_in_yaml() -> None:
    text = (ROOT / "docs" / "spec.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    for section in ("sources.NAME", "sources.NAME.schema.fields[]", "sinks[]", "batch", "checkpoint.store"):
        assert f"`{section}`" in headings
    for default in re.findall(r"^\| `\w+` \| `(.*?)` \|", text, re.MULTILINE):
        json.loads(default)  # JSON is YAML, too


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_links_every_command() -> None:
    from firnline.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text()
    for verb, _, _ in COMMANDS:
        assert f"docs/commands/{verb}.md" in text, verb


def test_the_readmes_spec_loads(tmp_path: Path) -> None:
    from firnline.spec.build import load_options

    found = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "firnline.yml").write_text(found[1])
    options = load_options(tmp_path, environ={})
    assert options.name == "flights"
    assert options.deciding.partition_by == ("month",)


def test_the_readmes_first_screen_is_short() -> None:
    first = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert len(first.splitlines()) <= 40


def test_every_fault_step_has_a_row_in_the_crash_table() -> None:
    from firnline.faults import STEPS

    text = (ROOT / "docs" / "if-it-dies-here.md").read_text()
    for step in STEPS:
        assert step.removeprefix("epoch.") in text, step
