"""Jobs, the masked spec, archives, metrics, events and unfinished actions, over REST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from firnline.clock import SystemClock
from firnline.pipeline import Pipeline
from firnline.run.open_pipeline import open_pipeline
from firnline.service.access.tokens import hash_token
from firnline.service.jobs import Job, Jobs, holding, run_command
from firnline.stores.archive import open_archive
from firnline.stores.audit import append_audit, make_record
from firnline.types import RandomIds
from tests.support.processes import wait_until
from tests.support.service import NAME, bearer, run_epochs, serving, write_pipeline

API = f"/api/v1/pipelines/{NAME}"
PATIENCE_SECONDS = 300.0
SECRETS = """\
name: flights
sources:
  in: {type: files, path: in}
sinks:
  - {type: delta, table: out, storage_options: {AWS_SECRET_ACCESS_KEY: "${env:SECRET}", region: hidden-too}}
  - {type: http, name: hook, url: "https://example.com/hook?key=query-word", required: false,
     headers: {Authorization: "${env:SECRET}"}}
checkpoint:
  store: {type: file, path: store}
"""


def wait_for(client: TestClient, job: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found: dict[str, Any] = client.get(f"{API}/jobs/{job}", headers=bearer("read")).json()
        if found["ended_at"] is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("the job did not end")


def test_a_savepoint_is_a_job_and_is_disposed_of_by_a_plan(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 2)
    with serving(tmp_path) as (client, _):
        assert client.post(f"{API}/savepoints", json={}, headers=bearer("read")).status_code == 403
        begun = client.post(f"{API}/savepoints", json={}, headers=bearer("operate"))
        assert begun.status_code == 202
        job = wait_for(client, begun.json()["job"])
        assert (job["status"], job["result"]["epoch"]) == ("done", 2)
        savepoint = job["result"]["id"]
        answer = client.post(f"{API}/savepoints/{savepoint}/dispose", headers=bearer("admin"))
        assert answer.status_code == 200, answer.text
        plan = answer.json()
        done = client.post(f"{API}/plans/{plan['id']}/confirm", headers=bearer("admin"))
        assert done.status_code == 200, done.text
        assert client.get(f"{API}/savepoints", headers=bearer("read")).json()["savepoints"] == []
        assert client.post(f"{API}/plans/{plan['id']}/confirm", headers=bearer("admin")).json() == done.json()
        trail = client.get(f"{API}/audit", headers=bearer("read")).json()["audit"]
        assert {(row["what"], row["user"]) for row in trail} == {
            ("savepoint-create", "operate"), ("savepoint-dispose", "admin")
        }  # fmt: skip


def test_a_dry_run_is_a_process_with_progress_and_a_result(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 1)
    (tmp_path / "in" / "new.ndjson").write_text('{"a": 9}\n')
    with serving(tmp_path) as (client, _):
        begun = client.post(f"{API}/dry-run", headers=bearer("operate"))
        assert begun.status_code == 202
        assert client.post(f"{API}/dry-run", headers=bearer("operate")).status_code == 409
        job = wait_for(client, begun.json()["job"])
        assert job["status"] == "done", job
        assert job["result"]["first_epoch"]["files"] == 1
        assert [one["job"] for one in client.get(f"{API}/jobs", headers=bearer("read")).json()["jobs"]] == [job["job"]]
        assert client.get(f"{API}/jobs/0123456789abcdef", headers=bearer("read")).status_code == 404


def test_a_job_that_is_cancelled_ends_its_process(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    with serving(tmp_path) as (client, service):
        marker = tmp_path / "child"
        script = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

        def work(job: Job) -> dict[str, Any]:
            return run_command(job, [sys.executable, "-c", script], tmp_path, service.supervisor.environ, service.clock)

        job = service.jobs.start("dry-run", NAME, "ann", work)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.post(f"{API}/jobs/{job.id}/cancel", headers=bearer("operate")).status_code == 202
        assert wait_for(client, job.id)["status"] == "cancelled"
        assert not Path(f"/proc/{marker.read_text()}").exists()


def test_a_process_that_a_killed_service_left_behind_is_waited_for(tmp_path: Path) -> None:
    """One dry-run at a time, each is a JVM: also after a kill."""
    clock, lock = SystemClock(), tmp_path / "dry-run.lock"
    left = Job("a" * 16, NAME, "dry-run", "ann", "")
    with holding(lock, left) as descriptor:
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
                                 pass_fds=(descriptor,))  # fmt: skip
    jobs = Jobs(clock, RandomIds())  # of another service; the first one no longer has the descriptor

    def work(job: Job) -> dict[str, Any]:
        with holding(lock, job) as held:
            return run_command(job, [sys.executable, "-c", "print('{}')"], tmp_path, os.environ, clock, held)

    try:
        cancelled = jobs.start("dry-run", NAME, "ann", work)
        wait_until(lambda: len(cancelled.progress) == 1)
        cancelled.cancelled.set()
        wait_until(lambda: cancelled.status == "cancelled")
        waiting = jobs.start("dry-run", NAME, "ann", work)
        wait_until(lambda: len(waiting.progress) == 1)
        assert "waits for the end of a process" in waiting.progress[0]
        assert waiting.ended_at is None
    finally:
        child.communicate()
    wait_until(lambda: waiting.status == "done")


def test_the_spec_is_shown_without_secrets(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET", "secret-word")
    write_pipeline(tmp_path, SECRETS)
    with serving(tmp_path) as (client, _):
        answer = client.get(f"{API}/spec", headers=bearer("read"))
        assert answer.status_code == 200, answer.text
        spec = answer.json()["spec"]
        assert (spec["name"], spec["sinks"][0]["type"]) == ("flights", "delta")
        assert spec["checkpoint"]["rollback_window"] in (64, "64")
        for word in ("secret-word", "query-word", "hidden-too", "SECRET}"):
            assert word not in answer.text
        valid = client.post(f"{API}/validate", headers=bearer("operate")).json()
        assert (valid["valid"], valid["problem"]) == (True, None)
        (tmp_path / "firnline.yml").write_text("name: flights\nsource: {}\n")
        valid = client.post(f"{API}/validate", headers=bearer("operate")).json()
        assert valid["valid"] is False


def test_the_archive_of_checkpoints_is_a_download(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 2)
    with serving(tmp_path) as (client, _):
        tokens = json.loads((tmp_path / "state" / "tokens.json").read_text())["tokens"]
        blind = {"name": "blind", "role": "admin", "data": False, "hash": hash_token("token-of-blind")}
        (tmp_path / "state" / "tokens.json").write_text(json.dumps({"tokens": [*tokens, blind]}))
        for role in ("operate", "blind"):
            assert client.get(f"{API}/checkpoints/export", headers=bearer(role)).status_code == 403
        answer = client.get(f"{API}/checkpoints/export", headers=bearer("admin"))
        assert answer.status_code == 200
        (tmp_path / "archive").write_bytes(answer.content)
        with open_archive(str(tmp_path / "archive")) as archive:
            assert archive.manifest.pipeline == NAME
        assert list((tmp_path / "state" / "exports").iterdir()) == []
        assert client.get(f"{API}/checkpoints/1", headers=bearer("read")).status_code == 200


def test_metrics_of_every_pipeline_need_a_token(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 1)
    with serving(tmp_path) as (client, service):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not service.supervisor.is_ready and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.get("/metrics").status_code == 401
        text = client.get("/metrics", headers=bearer("read")).text
        assert 'firnline_service_state{pipeline="flights",state="' in text
        assert 'firnline_service_needs_person{pipeline="flights"} 0.0' in text


def test_actions_without_an_end_are_listed_with_what_ends_them(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 3)
    from firnline.history.store import open_for_writing

    store = open_for_writing(open_pipeline(Pipeline.load(tmp_path / "firnline.yml").options))
    for what, facts in (("rollback", {}), ("savepoint-create", {"savepoint": "ab12"}), ("sinks-forget", {"sink": "x"})):
        append_audit(store, make_record(NAME, what, run=what, to_epoch=2, details=facts, outcome="begun"))
    append_audit(store, make_record(NAME, "sinks-forget", to_epoch=2, details={"sink": "x"}))  # somebody repeated it
    store.close()
    with serving(tmp_path) as (client, _):
        found = client.get(f"{API}/unfinished", headers=bearer("admin")).json()["unfinished"]
        [seen] = client.get(f"{API}/unfinished", headers=bearer("read")).json()["unfinished"]
    assert str(tmp_path) not in seen["command"]  # folders of the machine are for those who may act there
    # The savepoint was never pinned: nothing of it is left.
    command = f"firnline rollback --to 2 -f {tmp_path / 'firnline.yml'}"
    assert [(one["what"], one["epoch"], one["command"]) for one in found] == [("rollback", None, command)]
