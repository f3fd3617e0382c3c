"""The dashboard in a real browser: every page and action, kills, many pipelines, hostile names and records.

`FIRNLINE_SCREENSHOTS=docs/dashboard python -m pytest tests/integration/test_dashboard.py -k screenshots` makes the
pictures of the docs anew.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from firnline.pipeline import Pipeline
from firnline.service.access.sessions import COOKIE
from firnline.service.dashboard.pipeline_pages import TABS
from firnline.service.supervise.supervisor import Seen
from firnline.testing.local import run_locally
from tests.support.browser import Browser, Page
from tests.support.dashboards import STATEFUL, Served, add_input, serving, write_pipeline
from tests.support.receiver import Reply, running_receiver

HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
SCREENSHOTS = os.environ.get("FIRNLINE_SCREENSHOTS")


def find_epoch(seen: Seen) -> int:
    control = seen.glance.control if seen.glance else None
    return int(control["epoch"]) if control else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """`flights` runs with state and a bad record; `orders` has a sink that refused rows and one that is away."""
    with running_receiver() as receiver:
        receiver.behaviour = lambda _, number: Reply(422, text=f"refused {HOSTILE}") if number == 0 else None
        write_pipeline(folder, "flights", **STATEFUL)
        sinks = [
            {"type": "delta", "table": "out"},
            {"type": "http", "name": "webhook", "url": receiver.url, "on_bad_row": "dead_letter", "required": False},
            {"type": "http", "name": "pager", "url": "http://127.0.0.1:9/", "required": False},
        ]
        write_pipeline(folder, "orders", sinks=sinks)
        write_pipeline(folder, "clicks")
        (folder / "pipelines" / f"{HOSTILE.replace('/', '')}.yml").write_text("name: [")
        for number in range(4):
            add_input(folder, "flights", number, 60 + number, bad=f"not json {HOSTILE}" if number == 1 else "")
        for number in range(3):
            add_input(folder, "orders", number, 20)
        with serving(folder) as found:
            try:
                for name in ("flights", "orders"):
                    found.service.supervisor.wish(name, "running", "ann")
                for name in ("flights", "orders"):
                    found.wait_for(name, lambda seen: bool(seen.glance and (seen.glance.control or {}).get("epoch")))
                found.wait_for(
                    "flights", lambda seen: bool(((seen.glance and seen.glance.control) or {})["epoch"] >= 4)
                )
                yield found
            finally:
                for name in ("flights", "orders", "clicks"):
                    found.service.supervisor.wish(name, "stopped", "ann")
                for name in ("flights", "orders", "clicks"):
                    found.wait_for(
                        name,
                        lambda seen: all(one.ended_at for one in (seen.glance.launches if seen.glance else [])),
                    )


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """A tab that nobody is logged in with. No page may log an error, or ask another host for anything."""
    found = browser.open()
    found.set_look()
    yield found
    assert not found.logged
    assert {urlsplit(url).netloc for url in found.requested if not url.startswith("about:")} <= {
        urlsplit(served.url).netloc
    }
    assert found.evaluate("document.title") != "hacked"
    found.close()


def log_in(page: Page, url: str, role: str = "admin", path: str = "/") -> None:
    page.goto(f"{url}/login?next={path}")
    page.click("#token")
    page.type(f"token-of-{role}")
    page.click("button.main")
    page.wait_for(f"location.pathname === {json.dumps(path)} && document.readyState === 'complete'")


def test_log_in_and_out(page: Page, served: Served) -> None:
    page.goto(f"{served.url}/p/flights/sinks")
    assert page.evaluate("location.pathname + location.search") == "/login?next=/p/flights/sinks"
    page.click("#token")
    page.type("wrong")
    page.press("Enter", 13)
    page.wait_for("document.querySelector('[role=alert].problem') !== null")
    assert "The token is not valid." in page.text()
    assert [one for one in page.logged if "401" not in one] == []
    page.logged.clear()
    page.click("#token")
    page.type("token-of-read")
    page.press("Enter", 13)
    page.wait_for("location.pathname === '/p/flights/sinks'")
    cookie = next(one for one in page.call("Network.getCookies")["cookies"] if one["name"] == COOKIE)
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
    assert 11.9 < (cookie["expires"] - time.time()) / 3600 <= 12.1
    page.click("header form button")
    page.wait_for("location.pathname === '/login'")
    page.goto(served.url)
    assert page.evaluate("location.pathname") == "/login"
    page.goto(f"{served.url}/login?next=//evil.example/")
    assert page.evaluate("document.querySelector('[name=next]').value") == "/"


@pytest.mark.parametrize("name", ["flights", "orders", "clicks"])
def test_every_page(page: Page, served: Served, name: str) -> None:
    log_in(page, served.url, path=f"/p/{name}")
    for part, text in TABS:
        page.goto(f"{served.url}/p/{name}{'/' if part else ''}{part}")
        assert page.text("h1") == name
        assert page.text(".tabs [aria-current]") == text
        assert "Cannot be shown" not in page.text()
        assert page.count("#live [data-read]") >= 1
        assert page.count("[style]:not(.uplot *):not(.uplot)") + page.count("script:not([src])") == 0
        assert page.evaluate("[...document.querySelectorAll('th:not(.uplot th)')].every(one => one.scope)")


def test_what_pages_of_a_pipeline_show(page: Page, served: Served) -> None:
    log_in(page, served.url)
    page.goto(f"{served.url}/p/flights")
    for text in ("readings", "totals", "totals-table", "readings-table"):
        assert text in page.text("svg.graph")
    assert page.count("svg.bar rect.s-run") >= 4
    assert page.count("svg.bar rect.s-commit") >= 1
    page.goto(f"{served.url}/p/flights/checkpoints")
    page.click("tbody th a")
    page.wait_for("location.pathname.startsWith('/p/flights/checkpoints/')")
    page.wait_for("document.body?.innerText.includes('Copies of the checkpoint')")
    page.goto(f"{served.url}/p/flights/state")
    assert page.count("tbody tr") == 4
    page.goto(f"{served.url}/p/orders/sinks")
    page.wait_for("document.querySelector('main')?.innerText?.includes('cannot be reached')")
    page.goto(f"{served.url}/p/flights/epochs")
    page.wait_for("document.querySelectorAll('.uplot canvas').length === 2")
    page.goto(f"{served.url}/p/flights/trend?days=7")
    page.goto(f"{served.url}/p/flights/files?status=committed")
    assert page.count("tbody tr") >= 4


def test_hostile_names_and_records_are_text(page: Page, served: Served) -> None:
    log_in(page, served.url)
    assert HOSTILE.replace("/", "") in page.text("tr.person th")
    assert page.text("tr.person .state") == "invalid"
    page.goto(f"{served.url}/p/flights/quarantine")
    assert f"not json {HOSTILE}" in page.text("pre.raw")
    page.goto(f"{served.url}/p/orders/dead-letters")
    assert HOSTILE in page.text("tbody")
    for path in ("/p/%3Cscript%3E", "/p/..%2Fetc", "/nothing", "/p/flights/checkpoints/0x", "/p/flights/nothing"):
        page.goto(f"{served.url}{path}")
        assert page.text(".problem")
        assert page.count("main script") == 0
    assert all("40" in one or "422" in one for one in page.logged)
    page.logged.clear()


def test_rights(page: Page, served: Served) -> None:
    launch = served.wait_for("flights", lambda seen: bool(seen.glance and seen.glance.launches)).glance
    assert launch is not None
    log = f"/p/flights/launches/{launch.launches[-1].id}"
    log_in(page, served.url, "read")
    page.goto(f"{served.url}/p/flights")
    assert page.count(".actions a") == 0
    page.goto(f"{served.url}/p/flights/quarantine")
    assert "not-json" in page.text("tbody")
    assert HOSTILE not in page.text()
    page.goto(f"{served.url}/p/orders/dead-letters")
    assert "sensor-0" not in page.text()
    for path in (log, "/p/flights/act/stop"):
        page.goto(f"{served.url}{path}")
        assert "Forbidden" in page.text("h1")
    assert len(page.logged) == 2
    page.logged.clear()
    page.call("Network.clearBrowserCookies")
    log_in(page, served.url, "admin")
    page.goto(f"{served.url}{log}")
    assert "of flights" in page.text("pre.log")


def act(page: Page, served: Served, action: str, verb: str, name: str = "clicks") -> None:
    page.click(f"#act-{action}")
    page.wait_for("document.querySelector('dialog')?.open")
    assert page.text("dialog button.main, dialog button.danger") == f"{verb} {name}"
    assert page.text("dialog code").endswith(" firnline.yml")  # without the folder, which only an admin sees
    page.click("#confirm")
    page.wait_for(f"location.search === '?did={action}' && document.readyState === 'complete'")


def test_actions_show_their_plan_and_need_a_click_that_names_the_pipeline(page: Page, served: Served) -> None:
    log_in(page, served.url, "operate")
    page.goto(f"{served.url}/p/clicks")
    act(page, served, "start", "Start")
    page.wait_for("document.querySelector('.state')?.innerText === 'running'")  # the page follows by itself
    act(page, served, "pause", "Pause")
    page.wait_for("document.querySelector('.state')?.innerText === 'paused'")
    assert "by operate" in page.text(".facts")
    page.click("#act-resume")
    page.wait_for("document.querySelector('dialog')?.open")
    page.press("Escape", 27)
    page.wait_for("document.querySelector('dialog')?.open === false")
    act(page, served, "resume", "Resume")
    page.wait_for("document.querySelector('.state')?.innerText === 'running'")
    act(page, served, "stop", "Stop")
    page.wait_for("document.querySelector('#act-start') !== null")
    seen = served.wait_for("clicks", lambda seen: bool(seen.glance and seen.glance.launches[-1].ended_at))
    assert seen.glance is not None
    assert [one.code for one in seen.glance.launches] == [0]
    assert seen.glance.wish is not None
    assert (seen.glance.wish.wanted, seen.glance.wish.by) == ("stopped", "operate")


def test_a_rollback_and_a_retry_show_their_plan_first(browser: Browser, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "tides", batch={"max_files": 1})
    for number in range(3):
        add_input(tmp_path, "tides", number, 5, bad=f"not json {HOSTILE}" if number == 0 else "")
    run_locally(Pipeline.load(tmp_path / "pipelines" / "tides" / "firnline.yml").options)
    with serving(tmp_path, only_watches=True) as served:
        page = browser.open()
        served.wait_for_state("tides", "done")
        log_in(page, served.url)
        page.goto(f"{served.url}/p/tides/quarantine")
        page.click("form.inline button")
        page.wait_for("document.querySelector('#confirm') !== null")
        assert "firnline quarantine" in page.text("code")
        page.click("#confirm")
        page.wait_for("document.querySelector('[role=status].notice')?.innerText === 'Done.'")
        page.goto(f"{served.url}/p/tides/checkpoints/2")
        page.click("form.inline button")
        page.wait_for("document.querySelector('#confirm')?.innerText === 'Roll back tides'")
        assert "firnline rollback --to 2" in page.text("code")
        assert served.service.open("tides").load().epoch == 3
        plan = page.evaluate("location.pathname")
        page.click("#confirm")
        page.wait_for("document.querySelector('[role=status].notice')?.innerText === 'Done.'")
        assert served.service.open("tides").load().epoch == 4
        page.goto(f"{served.url}{plan}")  # once done, there is no button
        assert page.count("#confirm") == 0
        page.goto(f"{served.url}/p/tides/savepoints")
        page.click("form.inline button")
        page.wait_for("document.querySelector('#confirm')?.innerText === 'Make a savepoint of tides'")
        assert page.text("code").startswith("firnline savepoint create -f ")
        assert served.service.jobs.all("tides") == []
        page.click("#confirm")
        page.wait_for("document.querySelector('tbody th') !== null")
        page.click("tbody form button")
        page.wait_for("document.querySelector('#confirm')?.innerText === 'Delete the savepoint of tides'")
        assert not page.logged
        page.close()


def test_a_refresh_keeps_focus(page: Page, served: Served) -> None:
    log_in(page, served.url)
    page.goto(f"{served.url}/p/flights/schemas")
    page.evaluate("document.querySelector('.tabs a:nth-child(4)').focus()")
    for _ in range(2):
        page.evaluate("document.querySelector('#live').dataset.old = '1'")
        page.wait_for("document.querySelector('#live')?.dataset.old === undefined")
        assert page.evaluate("document.activeElement.innerText") == "Checkpoints"


def test_a_run_that_is_killed_while_somebody_watches(page: Page, served: Served) -> None:
    log_in(page, served.url)
    page.goto(f"{served.url}/p/flights")
    page.evaluate("window.sameAsBefore = true")
    seen = served.wait_for("flights", lambda seen: bool(seen.glance and seen.glance.control))
    assert seen.glance is not None
    assert seen.glance.launches[-1].run is not None
    pid = seen.glance.launches[-1].run.pid
    page.wait_for(f"document.querySelector('.facts')?.innerText.includes('{pid}')")
    os.kill(pid, signal.SIGKILL)
    page.wait_for(f"document.querySelector('.facts')?.innerText.includes('{pid}') === false")
    page.wait_for("document.querySelector('.state')?.innerText === 'running'")
    assert page.evaluate("window.sameAsBefore")  # nobody loaded the page again
    page.goto(f"{served.url}/p/flights/runs")
    page.wait_for("document.body?.innerText.includes('signal 9') && document.body?.innerText.includes('started again')")


def test_without_scripts_pages_can_be_read_and_actions_taken(page: Page, served: Served) -> None:
    page.set_scripts(on=False)
    log_in(page, served.url, "operate")
    assert page.count("table.overview tbody tr") == 4
    page.goto(f"{served.url}/?q=FLIGHT")
    assert page.text("table.overview tbody tr th") == "flights"
    page.goto(f"{served.url}/p/orders")
    page.click("#act-checkpoint")
    page.wait_for("location.pathname === '/p/orders/act/checkpoint' && document.readyState === 'complete'")
    page.click("#confirm")
    page.wait_for("location.search === '?did=checkpoint' && document.readyState === 'complete'")
    assert "Asked to checkpoint orders." in page.text("[role=status]")


def test_figures_turn_grey_and_a_service_that_is_gone_is_said_to_be(browser: Browser, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "flights")
    page = browser.open()
    with serving(tmp_path, only_watches=True) as served:
        served.wait_for_state("flights", "new")
        log_in(page, served.url)
        page.wait_for("document.querySelector('tbody tr') !== null")
        assert page.count("tr.stale") == 0
        page.evaluate("(() => { const now = Date.now; Date.now = () => now() + 60000; })()")
        page.wait_for("document.querySelectorAll('tr.stale').length === 1")
    page.wait_for("document.querySelector('#offline')?.hidden === false")
    assert "The service does not answer" in page.text("#offline")
    page.close()


def test_a_thousand_pipelines(browser: Browser, tmp_path: Path) -> None:
    pipelines = tmp_path / "pipelines"
    pipelines.mkdir()
    for number in range(1000):
        (pipelines / f"{number:04d}.yml").write_text(
            f"name: flights-{number:04d}\nsources:\n  in: {{type: files, path: in}}\n"
            f"sinks:\n  - {{type: delta, table: out-{number:04d}}}\n"
        )
    (pipelines / "zz.yml").write_text("name: [")
    page = browser.open()
    with serving(tmp_path, only_watches=True, look_seconds=5.0) as served:
        served.wait_for_state("flights-0999", "new")
        log_in(page, served.url)
        size = page.evaluate("fetch('/').then(answer => answer.text()).then(text => text.length)")
        assert size < 200_000
        assert page.text("tbody tr:first-child th") == "zz"  # it needs a person
        assert page.count("tbody tr") == 100
        assert "1 to 100 of 1,001" in page.text(".pages")
        page.press("/")
        page.type("0777")
        page.wait_for("document.querySelectorAll('tbody tr').length === 1")
        assert page.text("tbody th") == "flights-0777"
        assert page.evaluate("location.search") == "?q=0777"
        page.goto(f"{served.url}/?start=1000&order=name")
        assert page.text("tbody th") == "zz"
        assert not page.logged
    page.close()


def test_screenshots(browser: Browser, tmp_path: Path) -> None:
    """Make the pictures of the docs; without `FIRNLINE_SCREENSHOTS`, only see that the pages can be drawn."""
    target = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
    target.mkdir(exist_ok=True, parents=True)
    pager = {"type": "http", "name": "pager", "url": "http://127.0.0.1:9/", "required": False}
    write_pipeline(tmp_path, "flights", **STATEFUL)
    write_pipeline(tmp_path, "orders", sinks=[{"type": "delta", "name": "orders-table", "table": "out"}, pager])
    write_pipeline(tmp_path, "clicks")
    write_pipeline(tmp_path, "payments", state={"shards": -1})
    page = browser.open()
    with serving(tmp_path, only_watches=not SCREENSHOTS) as served:
        if SCREENSHOTS:
            make_history(tmp_path, served)
        log_in(page, served.url)
        for name, path, dark in (
            ("overview", "/", False),
            ("pipeline", "/p/flights", False),
            ("sinks", "/p/orders/sinks", True),
            ("stop", "/p/flights/act/stop", False),
        ):
            page.set_look(width=1180, height=600, dark=dark)
            page.goto(f"{served.url}{path}")
            page.wait_for("document.querySelector('#live, #plan') !== null")
            page.screenshot(target / f"{name}.png")
            assert 5_000 < (target / f"{name}.png").stat().st_size < 200_000
        for name in ("flights", "orders", "clicks") if SCREENSHOTS else ():
            served.service.supervisor.wish(name, "stopped", "ann")
            served.wait_for(name, lambda seen: bool(seen.glance and seen.glance.launches[-1].ended_at))
    page.close()


def make_history(folder: Path, served: Served) -> None:
    """Run pipelines for two minutes, so that there is something to see."""
    for name in ("flights", "orders", "clicks"):
        served.service.supervisor.wish(name, "running", "ann")
    for number in range(60):
        add_input(folder, "flights", number, 400 + 300 * (number % 7))
        if number % 6 == 0:
            add_input(folder, "orders", number, 900)
        time.sleep(2)
    served.service.supervisor.wish("clicks", "paused", "bob")
    served.wait_for_state("clicks", "paused")
