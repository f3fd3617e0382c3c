"""The docs say what the code does: generated pages are fresh, links resolve, every thing has its place."""

from __future__ import annotations

import importlib.util
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
