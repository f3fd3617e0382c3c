"""Topologies in the service: topology files and derived ones, over REST and in a browser; a snapshot over REST."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firnline.service.topology_snapshots import PeriodicSnapshots
from firnline.spec.build import load_options
from firnline.testing.local import run_locally
from tests.support.browser import Browser
from tests.support.dashboards import PATIENCE_SECONDS, Served, serving

HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bronze` and `silver` are in a topology file, `left` and `right` in none; one file cannot be used."""
    found = tmp_path_factory.mktemp("topologies")
    pipelines = found / "pipelines"
    (pipelines / "in").mkdir(parents=True)
    (pipelines / "in" / "a.ndjson").write_text('{"a": 1}\n{"a": 2}\n')
    for name, reads in {"bronze": "", "silver": "bronze", "left": "", "right": "left"}.items():
        source = {"type": "delta", "table": f"out/{reads}"} if reads else {"type": "files", "path": "in"}
        body = {"name": name, "sources": {"rows": source}, "sinks": [{"type": "delta", "table": f"out/{name}"}]}
        (pipelines / f"{name}.yml").write_text(json.dumps(body))
    (pipelines / "topology.yml").write_text("name: lake\npipelines: [bronze.yml, silver.yml]\n")
    (pipelines / "bad-topology.yml").write_text(json.dumps({"name": HOSTILE, "pipelines": ["nowhere.yml"]}))
    for name in ("bronze", "silver", "left", "right"):
        run(found, name)
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, only_watches=True) as found:
        for name in ("bronze", "silver", "left", "right"):
            found.wait_for(name, lambda seen: seen.glance is not None)
        yield found


def run(folder: Path, name: str) -> None:
    run_locally(load_options(folder / "pipelines" / f"{name}.yml", environ=os.environ))


def ask(served: Served, path: str, role: str = "read", body: object = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{served.url}/api/v1{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer token-of-{role}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_topologies_are_those_of_the_files_and_of_the_other_pipelines(served: Served) -> None:
    _, found = ask(served, "/topologies")
    rows = {row["topology"]: row for row in found["topologies"]}
    assert rows["lake"]["members"] == ["bronze", "silver"]
    assert rows["derived"]["members"] == ["left", "right"]
    assert rows["derived"]["file"] is None
    assert rows["bad-topology.yml"]["problem"]
    _, listed = ask(served, "/pipelines")
    assert {row["pipeline"] for row in listed["pipelines"]} == {"bronze", "silver", "left", "right"}
    _, shown = ask(served, "/topologies/lake")
    assert [(one["writer"], one["reader"], one["files_behind"]) for one in shown["channels"]] == [
        ("bronze", "silver", 0)
    ]
    assert ask(served, "/topologies/nothing")[0] == 404
    assert ask(served, "/topologies/derived/snapshots", "operate", {})[0] == 409
    assert ask(served, "/topologies/lake/snapshots", "read", {})[0] == 403


def test_a_snapshot_over_rest_and_its_pages(served: Served, folder: Path, browser: Browser) -> None:
    status, job = ask(served, "/topologies/lake/snapshots", "operate", {})
    assert status == 202
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not job["progress"] and job["status"] in ("waiting", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        _, job = ask(served, f"/topologies/lake/jobs/{job['job']}")
    for name in ("bronze", "silver"):
        run(folder, name)
    while job["status"] in ("waiting", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        _, job = ask(served, f"/topologies/lake/jobs/{job['job']}")
    assert job["status"] == "done", job
    _, found = ask(served, "/topologies/lake/snapshots")
    assert [(one["id"], one["status"], one["acknowledged"]) for one in found["snapshots"][:1]] == [
        (job["result"]["id"], "COMPLETED", "2/2")
    ]
    page = browser.open()
    page.goto(f"{served.url}/login?next=/t")
    page.click("#token")
    page.type("token-of-read")
    page.click("button.main")
    page.wait_for("location.pathname === '/t' && document.readyState === 'complete'")
    text = page.text()
    assert "bad-topology.yml" in text
    assert "left, right" in text
    page.click("a[href='/t/lake']")
    page.wait_for("location.pathname === '/t/lake' && document.readyState === 'complete'")
    text = page.text()
    assert job["result"]["id"] in text
    assert "2/2" in text
    assert "then from its copy" not in text, "the snapshot has no copy"
    assert page.evaluate("document.querySelectorAll('svg.graph .box').length") == 2
    assert str(folder) not in text, "the folders of the machine are not for readers"
    assert not page.logged
    assert page.evaluate("document.title") != "hacked"
    page.close()


def wait_for(served: Served, job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of a job of the topology `lake`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while job["status"] in ("waiting", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        _, job = ask(served, f"/topologies/lake/jobs/{job['job']}")
    return job


def test_a_snapshot_over_rest_does_what_the_topology_file_says(served: Served, folder: Path) -> None:
    """No member has a run, and the file wants stopped members to be recorded, one snapshot to be kept, and a copy."""
    file = folder / "pipelines" / "topology.yml"
    before = file.read_text()
    file.write_text(before + "snapshots: {include_stopped: true, keep: 1, copy: true}\n")
    try:
        jobs = [wait_for(served, ask(served, "/topologies/lake/snapshots", "operate", {})[1]) for _ in range(2)]
        assert [job["status"] for job in jobs] == ["done", "done"], jobs
        _, found = ask(served, "/topologies/lake/snapshots", "admin")
        newest, older = found["snapshots"][:2]
        assert (newest["id"], newest["status"]) == (jobs[1]["result"]["id"], "COMPLETED")
        assert (older["id"], older["status"]) == (jobs[0]["result"]["id"], "DROPPED")
        assert (Path(newest["copy"]) / "topology.json").is_file()
        wanted = {"keep": 5, "timeout_seconds": 300}
        assert wait_for(served, ask(served, "/topologies/lake/snapshots", "operate", wanted)[1])["status"] == "done"
        _, found = ask(served, "/topologies/lake/snapshots")
        assert [one["status"] for one in found["snapshots"][:2]] == ["COMPLETED", "COMPLETED"], (
            "the request comes first"
        )
    finally:
        file.write_text(before)


def test_a_snapshot_that_is_aborted_is_a_job_that_failed(served: Served) -> None:
    """No member has a run, and nobody starts one."""
    job = wait_for(served, ask(served, "/topologies/lake/snapshots", "operate", {"timeout_seconds": 0.001})[1])
    assert job["status"] == "failed"
    job = ask(served, f"/topologies/lake/jobs/{job['job']}", "admin")[1]
    assert "was aborted: the time limit has passed, and these have no record: bronze, silver" in job["error"]["detail"]


@pytest.mark.parametrize("seconds", [0, 2**33], ids=["long ago", "the clock went back"])
def test_the_service_takes_the_snapshots_of_an_interval(served: Served, folder: Path, seconds: int) -> None:
    file = folder / "pipelines" / "topology.yml"
    before = file.read_text()
    service = served.service
    job = wait_for(served, ask(served, "/topologies/lake/snapshots", "operate", {"include_stopped": True})[1])
    assert job["status"] == "done"
    periodic = PeriodicSnapshots(service.jobs, service.supervisor, service.clock)
    assert periodic.begin_due() == [], "no file sets an interval"
    try:
        file.write_text(before + "snapshots: {every: 1h, include_stopped: true}\n")
        os.utime(file, ns=(0, 0))  # whatever its time is, it is another one
        assert periodic.begin_due() == [], "the newest one is younger than an hour, whoever took it"
        for path in (folder / "pipelines").rglob("order.json"):
            os.utime(path, (seconds, seconds))
        (begun,) = periodic.begin_due()
        assert periodic.begin_due() == [], "it is being taken"
        assert wait_for(served, begun.to_json())["status"] == "done"
        assert begun.by == "every"
        assert periodic.begin_due() == []
    finally:
        for path in (folder / "pipelines").rglob("order.json"):
            os.utime(path)
        file.write_text(before)
