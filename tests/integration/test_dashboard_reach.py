"""The dashboard for people without a mouse, with a screen reader, or in the dark; and every action of its pages.

The pipelines have run before, and nobody runs them: what a page shows does not change under a test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.pipeline import Pipeline
from firnline.service.dashboard.pipeline_pages import TABS
from firnline.service.dashboard.plan_pages import FORMS
from firnline.testing.local import LocalEngine, run_locally
from tests.integration.test_dashboard import log_in
from tests.support.browser import Browser, Page
from tests.support.dashboards import STATEFUL, Served, add_input, serving, write_pipeline
from tests.support.receiver import Reply, running_receiver

PARTS = [*(key for key, _ in TABS), "checkpoints/1", "act/stop", "savepoints/make"]
TOPOLOGIES = ["/t", "/t/lake"]
TAB, ENTER = ("Tab", 9), ("Enter", 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reach")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """`flights` has state and a bad record; `tides` can be broken; `daily`, which never ran, reads from `flights`.

    `flights` and `daily` are the topology `lake`; the file `lost-topology.yml` cannot be used.
    """
    for name, spec in (("flights", STATEFUL), ("tides", {})):
        path = write_pipeline(folder, name, **spec)
        for number in range(2):
            add_input(folder, name, number, 10, bad="not json" if number == 1 else "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
            Pipeline.load(path).run(once=True)
    write_pipeline(folder, "daily", sources={"rows": {"type": "delta", "table": "../flights/all"}})
    for name, file, members in (
        ("lake", "topology.yml", ["flights/firnline.yml", "daily/firnline.yml"]),
        ("lost", "lost-topology.yml", ["nowhere.yml"]),
    ):
        (folder / "pipelines" / file).write_text(json.dumps({"name": name, "pipelines": members}))
    with serving(folder, only_watches=True) as found:
        for name in ("flights", "tides"):
            found.wait_for_state(name, "done")
        found.wait_for_state("daily", "new")
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    found = browser.open()
    found.set_look()
    yield found
    assert not found.logged
    found.close()


def refresh(page: Page) -> None:
    """Wait until the page has refreshed itself."""
    page.evaluate("document.querySelector('#live').dataset.old = '1'")
    page.wait_for("document.querySelector('#live')?.dataset.old === undefined")


def test_a_refresh_keeps_ticks_focus_and_what_is_open(page: Page, served: Served) -> None:
    log_in(page, served.url)
    page.goto(f"{served.url}/p/flights/checkpoints/1")
    page.click("[name=take_over]")
    page.evaluate("document.querySelector('form.inline button').focus()")
    refresh(page)
    assert page.evaluate("document.querySelector('[name=take_over]').checked")
    assert page.evaluate("document.activeElement.innerText") == "Plan a rollback to epoch 1"
    page.goto(f"{served.url}/p/flights/files")
    page.evaluate("document.querySelectorAll('form.inline button')[1].focus()")
    focused = page.evaluate("document.activeElement.ariaLabel")
    assert focused.startswith("Read again: ")
    refresh(page)
    assert page.evaluate("document.activeElement.ariaLabel") == focused
    page.goto(f"{served.url}/p/flights/trend")
    page.click("summary")
    refresh(page)
    assert page.evaluate("document.querySelector('details').open")


def test_a_change_is_said_once(page: Page, served: Served, folder: Path) -> None:
    path = folder / "pipelines" / "tides" / "firnline.yml"
    spec = path.read_text()
    log_in(page, served.url, path="/p/tides")
    try:
        refresh(page)
        assert page.text("#said") == ""  # nothing changed
        page.evaluate(
            "(() => { window.times = 0; new MutationObserver(all => { window.times += all.length; })"
            ".observe(document.getElementById('said'), {childList: true, characterData: true, subtree: true}); })()"
        )
        path.write_text("name: [")
        page.wait_for("document.querySelector('#said').textContent.includes('needs a person')")
        refresh(page)
        refresh(page)
        assert page.evaluate("window.times") == 1
    finally:
        path.write_text(spec)
        served.wait_for_state("tides", "done")


def ax_tree(page: Page) -> list[dict[str, Any]]:
    """What a screen reader gets of the page: role and name of everything."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    return [
        {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
        for node in nodes
        if not node["ignored"]
    ]


def test_what_a_screen_reader_gets(page: Page, served: Served) -> None:
    log_in(page, served.url)
    for path in ("/", *TOPOLOGIES, *(f"/p/flights/{part}".rstrip("/") for part in PARTS)):
        page.goto(f"{served.url}{path}")
        page.wait_for("document.querySelector('#live, #plan, #main table') !== null")
        found = ax_tree(page)
        roles = [one["role"] for one in found]
        assert {"banner", "main", "contentinfo", "navigation"} <= set(roles), path
        controls = ("link", "button", "textbox", "searchbox", "checkbox", "DisclosureTriangle")
        assert [one for one in found if one["role"] in controls and not one["name"].strip()] == [], path
        names = [one["name"] for one in found if one["role"] == "button"]
        assert sorted(set(names)) == sorted(names), path
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(one => +one.tagName[1])")
        assert levels.count(1) == 1, path
        assert all(after - before <= 1 for before, after in pairwise(levels)), (path, levels)
        assert page.evaluate("document.documentElement.lang") == "en"
        # What is replaced every few seconds would be read aloud every few seconds.
        assert page.count("#live [role=alert], #live [role=status], #live [aria-live]") == 0, path


CONTRAST = """
(() => {
  const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = one => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement;
    const text = texts.currentNode.textContent.trim();
    if (!text || !one.checkVisibility() || one.closest(".unseen, .uplot, svg, script")) continue;
    const [a, b] = [light(parse(getComputedStyle(one).color)), light(behind(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${one.className} ${text.slice(0, 40)}`);
  }
  return [...new Set(poor)];
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(page: Page, served: Served, *, dark: bool) -> None:
    page.set_look(dark=dark)
    log_in(page, served.url)
    shades = set()
    for path in (
        "/",
        "/p/flights",
        "/p/flights/quarantine",
        "/p/flights/files",
        "/p/flights/act/stop",
        "/p/flights/runs",
        *TOPOLOGIES,
    ):
        page.goto(f"{served.url}{path}")
        page.wait_for("document.querySelector('#live, #plan, #main table') !== null")
        assert page.evaluate(CONTRAST) == [], path
        shades.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert shades == {"rgb(18, 22, 28)" if dark else "rgb(245, 246, 248)"}


def focus(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus, as somebody without a mouse does; it must be seen there."""
    for _ in range(100):
        page.press(*TAB)
        if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"Tab does not reach {selector}")


def test_an_action_without_a_mouse(page: Page, served: Served) -> None:
    page.goto(f"{served.url}/login?next=/p/flights/checkpoints")
    page.type("token-of-admin")  # the field has the focus
    page.press(*ENTER)
    page.wait_for("location.pathname === '/p/flights/checkpoints' && document.readyState === 'complete'")
    page.press(*TAB)
    assert page.evaluate("document.activeElement.className") == "skip"
    page.press(*ENTER)
    assert page.evaluate("document.activeElement.id") == "main"
    focus(page, "tbody tr:nth-child(2) th a")
    page.press(*ENTER)
    page.wait_for("location.pathname === '/p/flights/checkpoints/1' && document.readyState === 'complete'")
    focus(page, "form.inline button")
    page.press(*ENTER)
    page.wait_for("document.querySelector('#confirm') !== null && document.readyState === 'complete'")
    focus(page, "#confirm")
    page.goto(f"{served.url}/p/flights")
    focus(page, "#act-start")
    page.press(*ENTER)
    page.wait_for("document.querySelector('dialog')?.open")
    for _ in range(6):  # Tab does not leave the dialog for the page behind it
        assert page.evaluate(
            "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
        )
        page.press(*TAB)
    page.press("Escape", 27)
    page.wait_for("document.querySelector('dialog')?.open === false")
    assert page.evaluate("document.activeElement.id") == "act-start"


def test_a_topology_without_a_mouse(page: Page, served: Served) -> None:
    page.goto(f"{served.url}/login?next=/t")
    page.type("token-of-read")
    page.press(*ENTER)
    page.wait_for("location.pathname === '/t' && document.readyState === 'complete'")
    focus(page, "a[href='/t/lake']")
    page.press(*ENTER)
    page.wait_for("location.pathname === '/t/lake' && document.querySelector('svg.graph') !== null")
    graph = [one for one in ax_tree(page) if "the table below holds the same figures" in one["name"]]
    assert len(graph) == 1
    assert "flights → daily" in page.text()  # what the graph shows is in the table


# -- every action that has a plan ----------------------------------------------------------------------


def confirm(page: Page, served: Served, name: str, kind: str, button: str = "") -> None:
    """Press the button that makes a plan, look at the plan, and confirm it."""
    form = f"form[action='/p/{name}/plans/make/{kind}'] button"
    page.wait_for(f"document.querySelector({json.dumps(form)}) !== null")
    page.click(form)
    page.wait_for("document.querySelector('#confirm') !== null")
    assert page.text("#confirm") == f"{FORMS[kind].verb} {name}"
    assert page.text(".command code").startswith("firnline ")
    page.click("#confirm")
    page.wait_for("document.querySelector('[role=status].notice')?.innerText === 'Done.'")


def rows(folder: Path, name: str, table: str = "out") -> int:
    return int(DeltaTable(str(folder / "pipelines" / name / table)).to_pyarrow_table().num_rows)


def test_every_action_with_a_plan(page: Page, tmp_path: Path) -> None:
    with running_receiver() as receiver:
        hook = {"type": "http", "name": "hook", "url": receiver.url, "on_bad_row": "dead_letter", "required": False}
        delta = {"type": "delta", "name": "table", "table": "out"}
        path = write_pipeline(tmp_path, "tides", sinks=[delta, hook])
        inputs = path.parent / "in"
        for number in range(3):
            add_input(tmp_path, "tides", number, 5, bad="not json" if number == 0 else "")
        for name in ("bad1.ndjson.gz", "bad2.ndjson.gz"):
            (inputs / name).write_bytes(b"no gzip")
        receiver.behaviour = lambda _, number: Reply(422, text="refused") if number < 2 else None
        run_locally(Pipeline.load(path).options)
        assert rows(tmp_path, "tides") == 15
        done = set()
        with serving(tmp_path, only_watches=True) as served:
            served.wait_for_state("tides", "done")
            log_in(page, served.url)

            def act(part: str, kind: str) -> None:
                page.goto(f"{served.url}/p/tides/{part}")
                confirm(page, served, "tides", kind)
                done.add(kind)

            act("quarantine", "quarantine-replay")
            act("dead-letters", "dead-letters-retry")
            act("files", "files-retry")
            act("files", "files-drop")
            act("files", "files-reread")
            run_locally(Pipeline.load(path).options)
            assert rows(tmp_path, "tides") == 20  # one file of five rows was read once more
            act("quarantine", "quarantine-drop")
            receiver.behaviour = lambda _, __: Reply(422, text="refused")
            add_input(tmp_path, "tides", 9, 1)
            run_locally(Pipeline.load(path).options)
            act("dead-letters", "dead-letters-drop")
            page.goto(f"{served.url}/p/tides/savepoints")
            page.click("form.inline button")
            page.wait_for("document.querySelector('#confirm')?.innerText === 'Make a savepoint of tides'")
            page.click("#confirm")
            page.wait_for("document.querySelector('tbody th') !== null")
            act("savepoints", "savepoint-dispose")
            write_pipeline(tmp_path, "tides", sinks=[delta])
            served.wait_for("tides", lambda seen: "hook" not in str(seen.registered.usable.sinks))
            act("sinks", "sinks-forget")
            act("checkpoints/1", "rollback")
        assert rows(tmp_path, "tides") < 20
        shutil.rmtree(tmp_path / "pipelines" / "tides" / "in")
        assert done == FORMS.keys() - {"sinks-resync", "sinks-resume"}
