"""Actions over REST: a plan, its confirmation, the same receipt for every repetition, and what the audit trail says."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from starlette.testclient import TestClient

from firnline.errors import CommitUnknownError
from firnline.history.edits.sinks import SinkEdit
from firnline.history.store import load_audit_rows
from firnline.pipeline import Pipeline
from firnline.run import standby
from firnline.service.api.common import Service
from firnline.service.supervise.supervisor import Settings
from firnline.testing.local import run_locally
from tests.support.service import NAME, bearer, rows, run_epochs, serving, write_pipeline

API = f"/api/v1/pipelines/{NAME}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 4)
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[TestClient, Service]]:
    with serving(folder) as found:
        yield found


@pytest.fixture
def client(served: tuple[TestClient, Service]) -> TestClient:
    return served[0]


def post(client: TestClient, path: str, body: dict[str, Any] | None = None, role: str = "admin") -> tuple[int, Any]:
    answer = client.post(f"{API}/{path}", json=body, headers=bearer(role))
    return answer.status_code, answer.json()


def audit(client: TestClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"{API}/audit", headers=bearer("read")).json()["audit"]
    return found


def test_a_rollback_is_planned_confirmed_and_done_once(client: TestClient, folder: Path) -> None:
    code, plan = post(client, "rollback", {"to": 2})
    assert code == 200
    assert len(plan["id"]) == 16
    assert plan["confirmable"]
    assert plan["plan"]["to_epoch"] == 2
    assert plan["command"].startswith("firnline rollback --to 2 -f ")
    assert rows(folder) == [1, 2, 3, 4]
    code, first = post(client, f"rollback/{plan['id']}/confirm")
    assert code == 200, first
    assert rows(folder) == [1, 2]
    assert (first["receipt"]["epoch"], first["receipt"]["run"]) == (5, plan["id"])
    code, again = post(client, f"rollback/{plan['id']}/confirm")
    assert (code, again) == (200, first)
    trail = audit(client)
    assert [row["outcome"] for row in trail] == ["done", "begun"]
    assert all((row["user"], row["what"], row["run"]) == ("admin", "rollback", plan["id"]) for row in trail)
    assert all(row["details"]["via"] == "REST" for row in trail)
    assert client.get(f"{API}/plans/{plan['id']}", headers=bearer("read")).json()["receipt"] == first
    run_epochs(folder, 1, start=5)
    assert rows(folder) == [1, 2, 3, 4, 5]
    assert post(client, f"rollback/{plan['id']}/confirm") == (200, first)
    assert rows(folder) == [1, 2, 3, 4, 5]


def test_the_first_receipt_is_found_in_the_ledger_when_the_service_lost_it(folder: Path) -> None:
    with serving(folder) as (client, _):
        _, plan = post(client, "rollback", {"to": 2})
        _, first = post(client, f"rollback/{plan['id']}/confirm")
    (folder / "state" / "plans" / f"{plan['id']}.receipt.json").unlink()
    run_epochs(folder, 1, start=5)
    with serving(folder) as (client, _):
        assert post(client, f"rollback/{plan['id']}/confirm") == (200, first)
    assert rows(folder) == [1, 2, 3, 4, 5]


def test_further_epochs_of_the_pipeline_are_no_change(client: TestClient, folder: Path) -> None:
    _, plan = post(client, "rollback", {"to": 2})
    run_epochs(folder, 2, start=5)
    code, receipt = post(client, f"rollback/{plan['id']}/confirm")
    assert (code, receipt["receipt"]["epoch"]) == (200, 7)
    assert rows(folder) == [1, 2]


def test_what_others_did_since_the_plan_is_a_change(client: TestClient, folder: Path) -> None:
    _, plan = post(client, "rollback", {"to": 2, "accept": ["DELETE"]})
    DeltaTable(str(folder / "out")).delete("a = 1")
    code, problem = post(client, f"rollback/{plan['id']}/confirm")
    assert (code, problem["code"]) == (409, "plan-changed")
    assert "foreign commits was 0, and is 1" in problem["detail"]
    assert rows(folder) == [2, 3, 4]
    _, plan = post(client, "rollback", {"to": 2, "accept": ["DELETE"]})
    DeltaTable(str(folder / "out")).delete("a = 3")  # one more of the same
    code, problem = post(client, f"rollback/{plan['id']}/confirm")
    assert (code, problem["code"]) == (409, "plan-changed")


def test_files_lost_since_the_plan_refuse_it(client: TestClient, folder: Path) -> None:
    table = DeltaTable(str(folder / "out"))
    before = set(table.file_uris())
    table.optimize.compact()
    _, plan = post(client, "rollback", {"to": 2, "accept": ["OPTIMIZE"]})
    assert plan["confirmable"], plan
    for lost in before:  # as a vacuum does
        Path(lost).unlink()
    code, problem = post(client, f"rollback/{plan['id']}/confirm")
    assert (code, problem["code"]) == (409, "rollback-refused")
    assert rows(folder) == [1, 2, 3, 4]
    assert [row["outcome"] for row in audit(client)] == []  # nothing was begun


def test_input_lost_since_the_plan_refuses_it(client: TestClient, folder: Path) -> None:
    _, plan = post(client, "rollback", {"to": 2})
    assert plan["plan"]["input_files"] == 2
    for lost in sorted((folder / "in").iterdir())[2:]:
        lost.unlink()
    code, problem = post(client, f"rollback/{plan['id']}/confirm")
    assert (code, problem["code"]) == (409, "rollback-refused")
    assert rows(folder) == [1, 2, 3, 4]


def test_another_rollback_since_the_plan_is_a_change(client: TestClient, folder: Path) -> None:
    _, one = post(client, "rollback", {"to": 2})
    _, other = post(client, "rollback", {"to": 3})
    assert post(client, f"rollback/{other['id']}/confirm")[0] == 200
    code, problem = post(client, f"rollback/{one['id']}/confirm")
    assert (code, problem["code"]) == (409, "plan-changed")
    assert "history edits was none, and is 5" in problem["detail"]
    assert rows(folder) == [1, 2, 3]


def test_what_cannot_be_done_is_shown_and_refused(client: TestClient, folder: Path) -> None:
    DeltaTable(str(folder / "out")).delete("a = 1")
    code, plan = post(client, "rollback", {"to": 2})
    assert (code, plan["confirmable"]) == (200, False)
    assert "others changed rows since" in plan["refusals"][0]
    assert post(client, f"rollback/{plan['id']}/confirm")[0] == 409
    assert [row["outcome"] for row in audit(client)] == []
    for epoch in (99, 0, 4):
        assert post(client, "rollback", {"to": epoch})[0] == 409
    wrong: list[dict[str, Any]] = [
        {},
        {"to": 1, "to_time": "2h"},
        {"to": -1},
        {"to": 2, "force": True},
        {"to_time": "yesterday"},
    ]
    for body in wrong:
        assert post(client, "rollback", body)[0] == 422


def test_plans_need_their_role_and_their_pipeline(client: TestClient) -> None:
    assert post(client, "rollback", {"to": 2}, "operate")[0] == 403
    _, plan = post(client, "rollback", {"to": 2})
    assert post(client, f"rollback/{plan['id']}/confirm", role="operate")[0] == 403
    assert post(client, f"plans/{plan['id']}/confirm", role="operate")[0] == 403
    assert post(client, "plans/0123456789abcdef/confirm")[0] == 404
    assert post(client, "plans/..%2Ftokens/confirm")[0] in (404, 422)


def test_a_live_run_is_not_ended_unless_the_plan_says_so(client: TestClient, folder: Path) -> None:
    options = Pipeline.load(folder / "firnline.yml").options
    with standby.editing_history(options, "f" * 16, lambda _: None, take_over=False):  # holds the lease, like a run
        _, plan = post(client, "rollback", {"to": 2})
        code, problem = post(client, f"rollback/{plan['id']}/confirm")
        assert (code, problem["code"]) == (409, "already-running")
        assert rows(folder) == [1, 2, 3, 4]
        _, plan = post(client, "rollback", {"to": 2, "take_over": True})
        assert post(client, f"rollback/{plan['id']}/confirm")[0] == 200
    assert rows(folder) == [1, 2]


def test_a_rollback_leaves_the_pipeline_stopped_so_that_nothing_starts_in_between(
    served: tuple[TestClient, Service], folder: Path
) -> None:
    client, service = served
    service.supervisor.wish(NAME, "running", "ann")
    _, plan = post(client, "rollback", {"to": 2})
    assert (plan["wanted"], plan["wanted_after"]) == ("running", "stopped")
    assert plan["steps"] == [
        "The pipeline is wanted running: it is wanted stopped while this is done.",
        "The pipeline stays stopped afterwards. Start it when you have looked at the result.",
    ]
    post(client, f"rollback/{plan['id']}/confirm")
    wish = service.supervisor.load_wish(NAME)
    assert wish is not None
    assert (wish.wanted, wish.by) == ("stopped", f"admin, for plan {plan['id']}")


def test_a_pipeline_that_was_stopped_for_a_refused_plan_is_wanted_as_before(
    served: tuple[TestClient, Service], folder: Path
) -> None:
    client, service = served
    service.supervisor.wish(NAME, "running", "ann")
    _, plan = post(client, "rollback", {"to": 2, "accept": ["DELETE"]})
    DeltaTable(str(folder / "out")).delete("a = 1")
    assert post(client, f"rollback/{plan['id']}/confirm")[0] == 409
    wish = service.supervisor.load_wish(NAME)
    assert wish is not None
    assert (wish.wanted, wish.by, wish.number) == ("running", "admin", 3)  # running, stopped for the plan, running


def test_what_is_wanted_meanwhile_is_not_undone_by_the_end_of_a_plan(served: tuple[TestClient, Service]) -> None:
    _, service = served
    first = service.supervisor.wish(NAME, "running", "ann")
    service.supervisor.wish(NAME, "stopped", "bob")
    assert first is not None
    found = service.supervisor.wish(NAME, "paused", "service", after=first.number)
    assert found is not None
    assert (found.wanted, found.by) == ("stopped", "bob")


def test_a_confirmation_reads_the_audit_trail_once(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def load(*arguments: Any) -> Any:
        reads.append(1)
        return load_audit_rows(*arguments)

    monkeypatch.setattr("firnline.service.plans.load_audit_rows", load)
    _, plan = post(client, "files/reread", {"path": str(folder / "in" / "f0001.ndjson")})
    assert post(client, f"plans/{plan['id']}/confirm")[0] == 200
    assert len(reads) == 1


def test_the_command_of_a_plan_chooses_the_same_records(client: TestClient, folder: Path) -> None:
    (folder / "in" / "g1.ndjson").write_text("bad\n")
    run_locally(Pipeline.load(folder / "firnline.yml").options)
    _, plan = post(client, "quarantine/drop", {"reason": "not-json"})
    assert "quarantine --drop --reason not-json --until-epoch 5 -f " in plan["command"]


def test_files_that_were_set_aside_and_read_again(client: TestClient, folder: Path) -> None:
    (folder / "in" / "f9.ndjson.gz").write_bytes(b"no gzip")
    run_locally(Pipeline.load(folder / "firnline.yml").options)
    path = str(folder / "in" / "f9.ndjson.gz")
    _, plan = post(client, "files/retry", {"path": path}, "operate")
    assert plan["plan"] == {"path": "in/f9.ndjson.gz", "changed": False}  # only admins see folders of the machine
    _, plan = post(client, "files/retry", {"path": "in/f9.ndjson.gz"}, "operate")
    assert client.get(f"{API}/plans/{plan['id']}", headers=bearer("admin")).json()["plan"]["path"] == path
    assert post(client, f"plans/{plan['id']}/confirm", role="operate")[1]["result"] == {"asked": 1}
    assert post(client, "files/drop", {"paths": [path]}, "operate")[0] == 403
    _, plan = post(client, "files/drop", {"paths": ["*.gz"]})
    assert [file["path"] for file in plan["plan"]["files"]] == [path]
    first = post(client, f"plans/{plan['id']}/confirm")
    assert first[1]["result"] == {"asked": 1}
    assert post(client, f"plans/{plan['id']}/confirm") == first
    run_epochs(folder, 1, start=10)
    found = client.get(f"{API}/files?status=dropped", headers=bearer("read")).json()["files"]
    assert [file["path"] for file in found] == ["in/f9.ndjson.gz"]
    done = str(folder / "in" / "f0001.ndjson")
    _, plan = post(client, "files/reread", {"path": done}, "operate")
    assert plan["plan"]["effect"] == "doubled"
    assert post(client, f"plans/{plan['id']}/confirm", role="operate")[1]["result"] == {"asked": 1}
    run_epochs(folder, 1, start=11)
    assert rows(folder).count(1) == 2
    whats = {row["what"] for row in audit(client) if row["user"] in ("admin", "operate")}
    assert whats == {"files-retry", "files-drop", "files-reread"}


def test_quarantined_records_are_replayed_and_dropped_as_they_were_planned(client: TestClient, folder: Path) -> None:
    options = Pipeline.load(folder / "firnline.yml").options
    (folder / "in" / "g1.ndjson").write_text("bad\n")
    run_locally(options)
    _, plan = post(client, "quarantine/replay", {"reason": "not-json"}, "operate")
    assert plan["plan"]["records"] == 1
    (folder / "in" / "g2.ndjson").write_text("worse\n")  # came after the plan: it is not meant
    run_locally(options)
    assert post(client, f"plans/{plan['id']}/confirm", role="operate")[1]["result"] == {"asked": 1}
    run_locally(options)
    _, plan = post(client, "quarantine/drop", {"file": "*/g*"})
    assert plan["plan"]["records"] == 2
    assert post(client, f"plans/{plan['id']}/confirm")[1]["result"] == {"asked": 2}
    run_locally(options)
    _, plan = post(client, "quarantine/drop", {})
    assert (plan["confirmable"], plan["refusals"]) == (False, ["no record is left to drop"])


FOLLOWED = """\
name: flights
sources:
  in: {type: files, path: in}
sinks:
  - {type: delta, table: out}
  - {type: http, name: hook, url: "http://127.0.0.1:9/hook", required: false}
"""


def test_after_an_edit_of_a_sink_the_pipeline_is_wanted_as_before(folder: Path) -> None:
    write_pipeline(folder, FOLLOWED)
    with serving(folder) as (client, service):
        service.supervisor.wish(NAME, "paused", "ann")
        _, plan = post(client, "sinks/hook/resume", {"accept_gap": True})
        assert (plan["wanted"], plan["wanted_after"]) == ("paused", "paused")
        code, receipt = post(client, f"plans/{plan['id']}/confirm")
        assert (code, receipt["receipt"]["epoch"]) == (200, 5)
        wish = service.supervisor.load_wish(NAME)
        assert wish is not None
        assert (wish.wanted, wish.number) == ("paused", 3)  # paused, stopped for the plan, paused
        code, problem = post(client, "sinks/hook/resume", {})
        assert (code, problem["code"]) == (422, "config")
        code, problem = post(client, "sinks/nope/forget", {})
        assert (code, problem["code"]) == (404, "not_found")
        assert post(client, "dead-letters/retry", {}, "operate")[1]["refusals"] == ["there are no such dead letters"]


@pytest.mark.parametrize("is_done", [True, False])
def test_an_edit_of_which_the_sink_did_not_say_whether_it_is_done_ends_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    write_pipeline(folder, FOLLOWED)
    perform = SinkEdit.perform

    def lose_answer(edit: SinkEdit, run: str, **agreed: Any) -> None:
        if is_done:
            perform(edit, run, **agreed)
        raise CommitUnknownError("the answer was lost")

    def find_wanted() -> tuple[str, int]:
        wish = service.supervisor.load_wish(NAME)
        assert wish is not None
        return wish.wanted, wish.number

    with serving(folder) as (client, service):
        service.supervisor.wish(NAME, "paused", "ann")
        before = DeltaTable(str(folder / "out")).version()
        _, plan = post(client, "sinks/hook/resume", {"accept_gap": True})
        monkeypatch.setattr(SinkEdit, "perform", lose_answer)
        code, problem = post(client, f"plans/{plan['id']}/confirm")
        assert (code, problem["code"]) == (502, "commit-unknown")
        monkeypatch.setattr(SinkEdit, "perform", perform)

        deadline = time.monotonic() + 120
        while find_wanted() != ("paused", 3) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert find_wanted() == ("paused", 3)  # paused, stopped for the plan, paused
        after = DeltaTable(str(folder / "out")).version()
        assert (after > before) is is_done
        code, receipt = post(client, f"plans/{plan['id']}/confirm")
        assert (code, receipt["receipt"]["epoch"]) == (200, 5)
        assert (DeltaTable(str(folder / "out")).version() == after) is is_done  # it is done once
        assert [row["outcome"] for row in audit(client)][:1] == ["done"]


def test_a_supervised_run_ends_first_and_is_not_started_in_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.service.plans.STOP_SECONDS", 0.5)
    settings = Settings(
        str(folder / "state"),
        run_command=(sys.executable, "-c", "import time; time.sleep(600)"),  # obeys nobody
        look_seconds=0.05,
        stagger_seconds=0.0,
    )
    with serving(folder, settings) as (client, service):
        service.supervisor.wish(NAME, "running", "ann")
        deadline = time.monotonic() + 120
        launched: list[Any] = []
        while not (launched and launched[0].run) and time.monotonic() < deadline:
            time.sleep(0.05)
            glance = service.supervisor.get(NAME).glance
            launched = glance.launches if glance else []
        _, plan = post(client, "rollback", {"to": 2})
        code, problem = post(client, f"rollback/{plan['id']}/confirm")
        assert (code, problem["code"]) == (409, "already-running")
        _, plan = post(client, "rollback", {"to": 2, "take_over": True})
        assert "ends as fenced if it has not after a minute" in plan["steps"][1]
        assert post(client, f"rollback/{plan['id']}/confirm")[0] == 200
        assert rows(folder) == [1, 2]
        os.kill(launched[0].run.pid, signal.SIGKILL)
        while service.supervisor.is_launched(NAME) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        glance = service.supervisor.get(NAME).glance
        assert glance is not None
        assert len(glance.launches) == 1  # nobody started it again
