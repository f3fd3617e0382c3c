"""Topologies of the service while people work beside it: snapshots of several topologies, files that change, roles."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from firnline.clock import SystemClock
from firnline.service.access.guard import Rules
from firnline.service.access.sessions import Sessions
from firnline.service.access.tokens import Tokens
from firnline.service.api.common import Service
from firnline.service.app import make_app
from firnline.service.registry import Registry
from firnline.service.supervise.supervisor import Settings, Supervisor
from firnline.spec.build import load_options
from firnline.testing.local import run_locally
from firnline.types import RandomIds
from tests.support.processes import wait_until
from tests.support.service import BASE, bearer, write_tokens

API = "/api/v1/topologies"
LAKE = "name: lake\npipelines: [bronze.yml, silver.yml]\nsnapshots: {keep: 4}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The topologies `lake` (bronze, silver) and `sea` (left, right), each with one epoch."""
    found = tmp_path / "pipelines"
    (found / "in").mkdir(parents=True)
    (found / "in" / "a.ndjson").write_text('{"a": 1}\n')
    for name, reads in {"bronze": "", "silver": "bronze", "left": "", "right": "left"}.items():
        source = {"type": "delta", "table": f"out/{reads}"} if reads else {"type": "files", "path": "in"}
        body = {"name": name, "sources": {"rows": source}, "sinks": [{"type": "delta", "table": f"out/{name}"}]}
        (found / f"{name}.yml").write_text(json.dumps(body))
    (found / "topology.yml").write_text(LAKE)
    (found / "sea-topology.yml").write_text("name: sea\npipelines: [left.yml, right.yml]\n")
    run(found, "bronze", "silver", "left", "right")
    return found


def run(folder: Path, *names: str) -> None:
    for name in names:
        run_locally(load_options(folder / f"{name}.yml", environ=os.environ))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[TestClient]:
    """Serve a folder of pipelines, without a network."""
    state = folder.parent / "state"
    state.mkdir(exist_ok=True)
    write_tokens(state / "tokens.json")
    clock = SystemClock()
    tokens = Tokens(state / "tokens.json", clock)
    settings = Settings(str(state), only_watches=True, look_seconds=0.05)
    with Supervisor(Registry([folder], os.environ), settings, clock, RandomIds(), dict(os.environ)) as supervisor:
        service = Service(supervisor, tokens, Sessions(b"k" * 32, tokens, clock), clock)
        yield TestClient(make_app(service, Rules()), base_url=BASE, raise_server_exceptions=False)
        service.jobs.close()


def ask(client: TestClient, path: str, role: str = "read") -> Any:
    return client.get(f"{API}{path}", headers={**bearer(role), "Cache-Control": "no-cache"})


def begin(client: TestClient, name: str, **body: object) -> Any:
    """Begin a snapshot, and wait until its members are asked."""
    job = client.post(f"{API}/{name}/snapshots", json=body, headers=bearer("operate"))
    assert job.status_code == 202, job.text
    wait_until(lambda: ask(client, f"/{name}/snapshots").json()["snapshots"][:1] != [] and is_asked(client, name, job))
    return job.json()


def is_asked(client: TestClient, name: str, job: Any) -> bool:
    found = ask(client, f"/{name}/jobs/{job.json()['job']}", "admin").json()
    return len(found["progress"]) > 0


def finish(client: TestClient, name: str, job: Any) -> Any:
    wait_until(lambda: ask(client, f"/{name}/jobs/{job['job']}").json()["ended_at"] is not None)
    return ask(client, f"/{name}/jobs/{job['job']}", "admin").json()


def test_a_snapshot_over_rest_keeps_as_many_as_the_file_says(folder: Path) -> None:
    with serving(folder) as client:
        for _ in range(5):
            job = begin(client, "lake")
            run(folder, "bronze", "silver")
            assert finish(client, "lake", job)["status"] == "done"
        found = ask(client, "/lake/snapshots").json()["snapshots"]
        assert [one["status"] for one in found] == ["COMPLETED"] * 4 + ["DROPPED"]


def test_a_snapshot_that_waits_holds_up_no_other_topology(folder: Path) -> None:
    with serving(folder) as client:
        waiting = begin(client, "lake")  # nobody runs its members
        again = client.post(f"{API}/lake/snapshots", json={}, headers=bearer("operate"))
        assert again.status_code == 409
        job = begin(client, "sea")
        run(folder, "left", "right")
        assert finish(client, "sea", job)["status"] == "done"
        assert ask(client, f"/lake/jobs/{waiting['job']}").json()["status"] == "running"
        run(folder, "bronze", "silver")
        assert finish(client, "lake", waiting)["status"] == "done"


def test_every_route_asks_for_a_token_and_a_snapshot_for_the_role(folder: Path) -> None:
    with serving(folder) as client:
        for path in ("", "/lake", "/lake/snapshots", "/lake/jobs/0"):
            assert client.get(f"{API}{path}").status_code == 401, path
            assert ask(client, path).status_code in (200, 404, 422), path
        assert client.post(f"{API}/lake/snapshots", json={}).status_code in (401, 403)
        assert client.post(f"{API}/lake/snapshots", json={}, headers=bearer("read")).status_code == 403
        assert ask(client, "/lake/snapshots").json()["snapshots"] == []
        for page in ("/t", "/t/lake"):
            assert client.get(page, follow_redirects=False).status_code in (302, 303, 401), page


@pytest.mark.parametrize(
    "text", ["", "[", "name: lake\npipelines: [nowhere.yml]\n", "name: lake\npipelines: [", "\x00", "- " * 5000]
)
def test_a_topology_file_that_cannot_be_read_any_more_is_shown_with_its_problem(folder: Path, text: str) -> None:
    with serving(folder) as client:
        assert ask(client, "/lake").status_code == 200
        (folder / "topology.yml").write_text(text)
        rows = {one["topology"]: one for one in ask(client, "").json()["topologies"]}
        assert rows["topology.yml"]["problem"]
        assert rows["sea"]["members"] == ["left", "right"]
        assert rows["derived"]["members"] == ["bronze", "silver"]
        assert ask(client, "/topology.yml").status_code == 409
        assert client.post(f"{API}/topology.yml/snapshots", json={}, headers=bearer("operate")).status_code == 409
        assert client.get("/t", headers=bearer("read")).status_code == 200
        (folder / "topology.yml").unlink()
        assert ask(client, "/lake").status_code == 404
        assert client.get("/t/lake", headers=bearer("read")).status_code == 404


def test_two_files_with_one_name_and_a_folder_that_is_gone(folder: Path) -> None:
    with serving(folder) as client:
        shutil.copy(folder / "topology.yml", folder / "z-topology.yml")
        rows = ask(client, "").json()["topologies"]
        assert [one["topology"] for one in rows if one["members"] == ["bronze", "silver"]] == ["lake"]
        assert any("named twice" in (one["problem"] or "") for one in rows)
        folder.rename(folder.parent / "away")
        answer = ask(client, "")
        assert answer.status_code < 500, answer.text
        assert client.get("/t", headers=bearer("read")).status_code < 500


def test_damaged_records_of_a_topology_are_named(folder: Path) -> None:
    with serving(folder) as client:
        job = begin(client, "lake")
        run(folder, "bronze", "silver")
        assert finish(client, "lake", job)["status"] == "done"
        (order,) = (folder / "data" / "lake").rglob("order.json")
        order.write_bytes(order.read_bytes()[:-10])
        answer = ask(client, "/lake/snapshots")
        assert answer.status_code < 500 or answer.json()["code"] == "damaged", answer.text
        assert "damaged" in answer.json()["code"]
        page = client.get("/t/lake", headers=bearer("read"))
        assert page.status_code == 200
        assert "Cannot be shown" in page.text
        assert ask(client, "").status_code == 200
