"""The docs as one site: it builds strictly, links and anchors resolve, and a browser loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT

pytest.importorskip("material", reason="`make install` installs mkdocs-material")

LOADS = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel="?canonical))\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    found = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages | {Path("index.html"), Path("contributing.html"), Path("changelog.html")} <= found


def test_a_browser_loads_nothing_from_another_host(site: Path) -> None:
    loaded = {found for page in site.rglob("*.html") for found in LOADS.findall(page.read_text())}
    assert loaded == set()
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet


def test_the_landing_page_is_the_readme_with_links_of_the_site(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert 'href="how-it-works.html"' in text
    assert 'href="docs/' not in text
