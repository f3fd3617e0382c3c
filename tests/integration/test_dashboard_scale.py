"""The dashboard in a real browser when there is much of everything: 10,000 checkpoints, 1,000 pipelines, and kills.

Nothing here is timed: pages must be bounded, and show what is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from firnline.pipeline import Pipeline
from firnline.service.dashboard.pipeline_pages import TABS
from firnline.stores import CheckpointRecord, open_store
from firnline.testing.local import run_locally
from tests.integration.test_dashboard import log_in
from tests.support.browser import Browser, Page
from tests.support.dashboards import LOCAL_RUN, STATEFUL, Served, add_input, serving, write_pipeline
from tests.support.kills import PROOF

CHECKPOINTS = 10_000
PAGE_BYTES = 200_000
ARRIVED = "!window.left && document.readyState === 'complete' && document.querySelector('tbody th') !== null"
SIZE = "fetch(location.href).then(answer => answer.text()).then(text => text.length)"


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    found = browser.open()
    found.set_look()
    yield found
    assert not found.logged
    found.close()


def make_checkpoints(folder: Path, name: str, count: int) -> None:
    """Run one epoch, and have its store hold so many; the table is gone, so the store alone has them."""
    write_pipeline(folder, name, checkpoint={"store": {"type": "sqlite", "path": "store.db"}})
    add_input(folder, name, 0, 3)
    home = folder / "pipelines" / name
    options = Pipeline.load(home / "firnline.yml").options
    run_locally(options)
    assert options.checkpoint.store is not None
    with closing(open_store(options.checkpoint.store)) as store:
        first = store.get(name, CheckpointRecord)
        assert first is not None
        store._connect().execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined]
        for epoch in range(first.epoch + 1, count + 1):
            store.put(name, replace(first, checkpoint=replace(first.checkpoint, epoch=epoch)))
    shutil.rmtree(home / "out")


def epochs(page: Page) -> list[int]:
    texts = page.evaluate("[...document.querySelectorAll('tbody th a')].map(one => one.innerText)")
    return [int(text.replace(",", "")) for text in texts]


def test_ten_thousand_checkpoints(page: Page, tmp_path: Path) -> None:
    make_checkpoints(tmp_path, "flights", CHECKPOINTS)
    with serving(tmp_path, only_watches=True) as served:
        served.wait_for("flights", lambda seen: seen.glance is not None)
        log_in(page, served.url)
        page.goto(f"{served.url}/p/flights/checkpoints")
        seen = epochs(page)
        assert seen[0] == CHECKPOINTS
        for _ in range(3):  # as a person does: page by page, each as small as the first
            assert page.evaluate(SIZE) < PAGE_BYTES
            page.evaluate("window.left = true")
            page.click(".pages a[rel=next]")
            page.wait_for(ARRIVED)
            seen += epochs(page)
        assert seen == list(range(CHECKPOINTS, CHECKPOINTS - len(seen), -1))
        page.click("tbody th a")
        page.wait_for("location.pathname.startsWith('/p/flights/checkpoints/') && document.readyState === 'complete'")
        assert page.evaluate(SIZE) < PAGE_BYTES
        for part, _ in TABS:
            page.goto(f"{served.url}/p/flights/{part}".rstrip("/"))
            assert page.evaluate(SIZE) < PAGE_BYTES, part
        # A page reads the store from its newest version on, so that all of them are slow: two, and all in long proofs.
        rows = CHECKPOINTS if PROOF else 1000
        assert list(islice(all_pages(page), rows)) == list(range(CHECKPOINTS, CHECKPOINTS - rows, -1))


def all_pages(page: Page) -> Iterator[int]:
    """Every checkpoint over REST, by `next`, as a script in the page asks for them; one call per page of rows."""
    after: str | None = ""
    while after is not None:
        at = f"/api/v1/pipelines/flights/checkpoints?limit=500{after}"
        text = page.evaluate(f"fetch({json.dumps(at)}).then(answer => answer.text())")
        answer = json.loads(text)
        yield from (row["epoch"] for row in answer["checkpoints"])
        after = answer["next"] and f"&next={answer['next']}"


def test_a_thousand_pipelines_page_by_page(page: Page, tmp_path: Path) -> None:
    pipelines = tmp_path / "pipelines"
    pipelines.mkdir()
    for number in range(1000):
        (pipelines / f"{number:04d}.yml").write_text(
            f"name: flights-{number:04d}\nsources:\n  in: {{type: files, path: in}}\n"
            f"sinks:\n  - {{type: delta, table: out-{number:04d}}}\n"
        )
    with serving(tmp_path, only_watches=True, look_seconds=5.0) as served:
        served.wait_for_state("flights-0999", "new")
        log_in(page, served.url)
        page.goto(f"{served.url}/?order=name")
        names: list[str] = []
        while True:
            names += page.evaluate("[...document.querySelectorAll('tbody th')].map(one => one.innerText)")
            assert page.evaluate(SIZE) < PAGE_BYTES
            if not page.count(".pages a[rel=next]"):
                break
            page.evaluate("window.left = true")
            page.click(".pages a[rel=next]")
            page.wait_for(ARRIVED)
        assert names == [f"flights-{number:04d}" for number in range(1000)]
        page.click("tbody tr:last-child th a")
        page.wait_for("location.pathname === '/p/flights-0999' && document.readyState === 'complete'")


def test_a_run_that_nobody_starts_again_is_killed_while_somebody_watches(
    page: Page, browser: Browser, tmp_path: Path
) -> None:
    path = write_pipeline(tmp_path, "flights")
    add_input(tmp_path, "flights", 0, 20)
    overview = browser.open()
    run = subprocess.Popen([*LOCAL_RUN, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with serving(tmp_path, only_watches=True) as served:
            served.wait_for_state("flights", "running")
            log_in(overview, served.url)
            log_in(page, served.url, path="/p/flights")
            for one in (page, overview):
                one.evaluate("window.sameAsBefore = true")
                one.wait_for("document.querySelector('.state')?.innerText === 'running'")
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            for one in (page, overview):
                one.wait_for("document.querySelector('.state')?.innerText === 'died'")
                assert one.evaluate("window.sameAsBefore")  # nobody loaded the page again
            assert str(run.pid) not in page.text(".facts")
            page.goto(f"{served.url}/p/flights/runs")
            page.wait_for("document.querySelector('#live')?.innerText.includes('died')")
        assert not overview.logged
    finally:
        run.kill()
        run.wait()
        overview.close()


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pipeline with state, checkpoints and a bad record, that nobody runs."""
    folder = tmp_path_factory.mktemp("ages")
    path = write_pipeline(folder, "flights", **STATEFUL)
    for number in range(3):
        add_input(folder, "flights", number, 20, bad="not json" if number == 1 else "")
    run_locally(Pipeline.load(path).options)
    with serving(folder, only_watches=True) as served:
        served.wait_for_state("flights", "done")
        yield served


@pytest.mark.parametrize("part", [*(key for key, _ in TABS), "checkpoints/2"])
def test_every_figure_bears_its_age_and_turns_grey(page: Page, stateful: Served, part: str) -> None:
    log_in(page, stateful.url)
    page.goto(f"{stateful.url}/p/flights/{part}".rstrip("/"))
    page.wait_for("document.querySelector('#live') !== null")
    holders = (
        "[...document.querySelectorAll('main .card, main dl.facts, main .state')]"
        ".filter(one => one.matches('.facts, .state') || one.querySelector('table, dl, svg, pre, .charts, .empty'))"
        ".filter(one => !one.querySelector('.problem[role=alert]'))"
    )
    assert page.evaluate(f"{holders}.length") >= 2
    bare = f"{holders}.filter(one => !one.closest('[data-figures]')).map(one => one.outerHTML.slice(0, 300))"
    assert page.evaluate(bare) == []
    ageless = (
        "[...document.querySelectorAll('main [data-figures]')]"
        ".filter(one => !(one.dataset.read || one.querySelector('[data-read]:not([data-read=\"\"])')))"
        ".map(one => one.outerHTML.slice(0, 300))"
    )
    assert page.evaluate(ageless) == []
    assert page.count("main .stale") == 0
    page.evaluate("(() => { window.fetch = () => Promise.reject(new Error('no network')); })()")
    page.evaluate("(() => { const now = Date.now; Date.now = () => now() + 60000; })()")
    page.wait_for(
        "document.querySelectorAll('main [data-figures]').length > 0"
        " && [...document.querySelectorAll('main [data-figures]')].every(one => one.classList.contains('stale'))"
    )
