"""A hook of mkdocs: pages of the site that lie outside docs/, and the list of commands.

The pages stay where people look for them in the repository, with links that work there; the site gets them with links
that work here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {  # path in the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "examples/python/README.md": "examples/python.md",
    "examples/tracking/README.md": "examples/tracking.md",
    "examples/chain/README.md": "examples/chain.md",
    "examples/lakehouse/README.md": "examples/lakehouse.md",
    "examples/orders/README.md": "examples/orders.md",
}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the commands in place of their folder, in the order of `firnline --help`."""
    config.nav = [_expanded(item) for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=site_text(source)))
    files.get_file_from_path("license.md").inclusion = _not_in_nav()
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links of pages in docs/ to files outside it into links to pages of the site."""
    return markdown if page.file.generated_by else with_site_links(markdown, f"docs/{page.file.src_uri}")


def site_text(source: str) -> str:
    """The text of a file of the repository as a page of the site."""
    text = (ROOT / source).read_text()
    return f"# License\n\n```text\n{text}```\n" if source == "LICENSE" else with_site_links(text, source)


def with_site_links(text: str, source: str) -> str:
    """Replace each link between files of the repository by the same link between pages of the site."""
    here = posixpath.dirname(site_path(source))

    def link(found: re.Match[str]) -> str:
        before, target, anchor = found[1], found[2], found[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        page = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        return f"{before}{posixpath.relpath(page, here or '.')}{anchor})"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # code stays as it is
    return "".join(block if block.startswith("```") else LINK.sub(link, block) for block in blocks)


def site_path(source: str) -> str:
    """The path of a file of the repository on the site; a path outside it, which mkdocs reports, if it is not there."""
    return PAGES.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else f"../{source}")


def _expanded(item: Any) -> Any:
    if isinstance(item, dict):
        return {title: _expanded(value) for title, value in item.items()}
    if isinstance(item, list):
        return [_expanded(value) for value in item]
    return _command_pages() if item == "commands/" else item


def _command_pages() -> list[dict[str, str]]:
    from firnline.cli.main import COMMANDS

    return [{verb: f"commands/{verb}.md"} for verb, _, _ in COMMANDS]


def _not_in_nav() -> Any:
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV
