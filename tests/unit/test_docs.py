"""The docs say what the code does: generated pages are fresh, links resolve, every thing has its place."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from ruamel.yaml import YAML

from tests.support.pages import page_commands
from tests.support.pipelines import delta_table

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
SINKS = sorted((ROOT / "docs" / "sinks").glob("*.md"))


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
    sections = (
        "sources.NAME`, `type: files",
        "sources.NAME.schema.fields[]",
        "sinks[]`, `type: delta",
        "batch",
        "checkpoint.store",
    )
    for section in sections:
        assert f"`{section}`" in headings
    for default in re.findall(r"^\| `\w+` \| `(.*?)` \|", text, re.MULTILINE):
        json.loads(default)  # JSON is YAML, too


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_anchors_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", page.read_text()):
        if "://" not in target:
            assert anchor in anchors(page.parent / target if target else page), (
                f"{page.name} links to {target}#{anchor}"
            )


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_on_a_page_is_one_that_firnline_takes(page: Path) -> None:
    from firnline.cli.main import ALIASES, app
    from firnline.cli.remote import take_server

    for command in page_commands(page, "console|sh"):
        words = shlex.split(command.line, comments=True)
        if words[0] == "firnline":
            ends = [words.index(word) for word in ("|", ">", ";", "&&") if word in words]
            _, tokens = take_server(words[1 : min(ends, default=len(words))])
            app.parse_args([ALIASES.get(tokens[0], tokens[0]), *tokens[1:]], exit_on_error=False, print_error=False)


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
    assert delta_table(options).partition_by == ("month",)


@pytest.mark.parametrize("page", HOW_TO, ids=lambda p: p.name)
def test_the_spec_of_a_page_by_task_loads(page: Path, tmp_path: Path) -> None:
    from firnline.spec.build import load_options

    for number, block in enumerate(re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)):
        spec = YAML(typ="safe").load(textwrap.dedent(block))
        if spec.keys() & {"livenessProbe", "volumeMounts", "scrape_configs"}:  # of Kubernetes and Prometheus
            continue
        whole = {"name": "orders", "sources": {"orders": {"path": "in"}}, "sinks": [{"table": "out"}], **spec}
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "firnline.yml").write_text(json.dumps(whole))  # JSON is YAML, too
        assert load_options(folder, environ={}).name == "orders"


@pytest.mark.parametrize("page", SINKS, ids=lambda p: p.name)
def test_the_pages_of_sinks_have_the_same_headings_and_an_example_that_loads(page: Path, tmp_path: Path) -> None:
    from firnline.spec.build import load_options

    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert headings == ["Guarantee", "Options", "What is written", "When it fails", "Example"]
    example = re.search(r"^```yaml\n(.*?)^```", page.read_text().split("## Example")[1], re.DOTALL | re.MULTILINE)
    assert example is not None
    (tmp_path / "firnline.yml").write_text(example[1])
    names = re.findall(r"\$\{env:(\w+)\}", example[1])
    assert load_options(tmp_path, environ=dict.fromkeys(names, f"{page.stem}://host")).sinks


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "sources").glob("*.md")), ids=lambda p: p.name)
def test_the_pages_of_sources_have_the_same_headings_and_examples_that_load(page: Path, tmp_path: Path) -> None:
    from firnline.spec.build import load_options

    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    if page.stem in ("mysql", "postgres"):  # servers that must be prepared
        headings.remove("The first hour")
        headings.remove("Failover")
    assert headings == ["Guarantee", "Options", "What is read", "When it fails", "Example"]
    examples = re.findall(r"^```yaml\n(.*?)^```", page.read_text().split("## Example")[1], re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        (tmp_path / "firnline.yml").write_text(example)
        names = re.findall(r"\$\{env:(\w+)\}", example)
        assert load_options(tmp_path, environ=dict.fromkeys(names, f"{page.stem}://host")).sources


@pytest.mark.parametrize("page", HOW_TO, ids=lambda p: p.name)
def test_metrics_on_a_page_by_task_exist(page: Path) -> None:
    known = set(re.findall(r"^\| `(firnline_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?<!/)\bfirnline_\w+", page.read_text())) <= known


def test_the_picture_of_the_screen_is_on_the_readme_and_asks_no_other_host() -> None:
    """It is drawn by the screen's own code; `test_generated_pages_are_fresh` fails when the screen has changed."""
    picture = (ROOT / "docs" / "screen.svg").read_text()
    assert not re.search(r"url\(.?http|href=|@import", picture)
    assert "committed" in picture
    assert "](docs/screen.svg)" in (ROOT / "README.md").read_text()


def test_the_glossary_has_the_usual_word_beside_each_of_ours() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    words = [word.strip() for row in rows for word in row[0].split(",") if row[0] != "word"]
    assert len(words) == len(set(words)), "a word stands twice"
    assert {"epoch", "fence", "deciding sink", "floor", "head", "split", "segment", "tier", "ledger"} <= set(words)
    assert {"store", "set aside", "settled", "history edit", "lease", "quarantine"} <= set(words)


def test_the_readmes_first_screen_is_short() -> None:
    first = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert len(first.splitlines()) <= 40


def test_every_fault_step_has_a_row_in_the_crash_table() -> None:
    from firnline.faults import STEPS

    text = (ROOT / "docs" / "if-it-dies-here.md").read_text()
    for step in STEPS:
        assert step.removeprefix("epoch.") in text, step
