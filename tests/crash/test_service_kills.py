"""The service killed in the middle of every action: nothing half done, and the audit trail says what happened.

Each action is confirmed in a process that is killed at a fault point. A new service over the same folder lists what was
begun, and the same confirmation, repeated, ends it with the result of one that nobody disturbed.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from firnline.history.savepoints.catalog import list_savepoints
from firnline.history.savepoints.create import create_savepoint
from firnline.pipeline import Pipeline
from firnline.run.open_pipeline import open_pipeline
from firnline.testing.local import run_locally
from tests.support.kills import kill_at_every_point
from tests.support.service import NAME, bearer, rows, run_epochs, serving, write_pipeline

API = f"/api/v1/pipelines/{NAME}"
ACTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rollback": ("rollback", {"to": 2}),
    "files-drop": ("files/drop", {"paths": ["*.gz"]}),
    "files-retry": ("files/retry", {"path": "bad.ndjson.gz"}),
    "files-reread": ("files/reread", {"path": "f0001.ndjson"}),
    "quarantine-drop": ("quarantine/drop", {}),
    "quarantine-replay": ("quarantine/replay", {}),
    "savepoint-dispose": ("savepoints/{savepoint}/dispose", {}),
    "sinks-resume": ("sinks/hook/resume", {"accept_gap": True}),
}
FOLLOWED = """\
name: flights
sources:
  in: {type: files, path: in}
sinks:
  - {type: delta, table: out}
  - {type: http, name: hook, url: "http://127.0.0.1:9/hook", required: false}
"""


def make_world(folder: Path) -> None:
    write_pipeline(folder)
    run_epochs(folder, 3)
    (folder / "in" / "bad.ndjson.gz").write_bytes(b"no gzip")
    (folder / "in" / "g.ndjson").write_text("not json\n")
    run_locally(Pipeline.load(folder / "firnline.yml").options)


def confirm(plan: str, folder: Path) -> None:
    """Confirm a plan in a service of its own: what is killed."""
    with serving(folder) as (client, _):
        answer = client.post(f"{API}/plans/{plan}/confirm", headers=bearer("admin"))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("action", ACTIONS)
def test_a_kill_in_the_middle_of_an_action(action: str, tmp_path: Path) -> None:
    template, plans = tmp_path / "flights", []
    make_world(template)
    path, body = ACTIONS[action]
    if action == "savepoint-dispose":
        pipeline = open_pipeline(Pipeline.load(template / "firnline.yml").options)
        path = path.replace("{savepoint}", create_savepoint(pipeline)[0].id)
    if action == "sinks-resume":
        write_pipeline(template, FOLLOWED)
    with serving(template) as (client, _):
        answer = client.post(f"{API}/{path}", json=body, headers=bearer("admin"))
        assert answer.status_code == 200, answer.text
        plan = answer.json()["id"]
        plans.append(plan)
    saved = tmp_path / "saved"
    shutil.move(template, saved)

    def prepare() -> Path:
        shutil.rmtree(template, ignore_errors=True)  # the same path again: positions and plans name files by it
        shutil.copytree(saved, template, symlinks=True)
        return template

    expected: list[tuple[Any, ...]] = []
    for_message = itertools.count(1)

    def check(folder: Path, where: str) -> None:
        number = next(for_message)
        with serving(folder) as (client, _):
            unfinished = client.get(f"{API}/unfinished", headers=bearer("read")).json()["unfinished"]
            trail = client.get(f"{API}/audit", headers=bearer("read")).json()["audit"]
            begun = [row for row in trail if row["run"] == plan]
            assert [one["run"] for one in unfinished] in ([], [plan] if begun else []), where
            assert rows(folder) in ([1, 2, 3], [1, 2]), where
            if rows(folder) == [1, 2]:
                assert begun, f"{where}: decided without a line in the audit trail"
            answer = client.post(f"{API}/plans/{plan}/confirm", headers=bearer("admin"))
            assert answer.status_code == 200, (where, answer.text)
            again = client.post(f"{API}/plans/{plan}/confirm", headers=bearer("admin"))
            assert again.json() == answer.json(), where
            trail = client.get(f"{API}/audit", headers=bearer("read")).json()["audit"]
            mine = [row for row in trail if row["run"] == plan]
            assert mine, where
            assert {row["user"] for row in mine} == {"admin"}, where
            assert mine[0]["outcome"] == "done", where
            assert client.get(f"{API}/unfinished", headers=bearer("read")).json()["unfinished"] == [], where
        if action != "sinks-resume":  # nobody listens there
            run_locally(Pipeline.load(folder / "firnline.yml").options)
        pipeline = open_pipeline(Pipeline.load(folder / "firnline.yml").options)
        kinds = [entry.kind for entry in pipeline.entries(pipeline.load().entry)]
        saved_points = len(list_savepoints(pipeline, {}))
        found = (rows(folder), kinds.count("rollback"), pipeline.load().epoch, saved_points)
        expected.append(found)
        assert found == expected[0], (where, number)

    reached = kill_at_every_point(prepare, functools.partial(confirm, plan), check, helpers=False)
    assert sum(reached.values()) > 2
