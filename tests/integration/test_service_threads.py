"""What must go on while others wait: the health of the service, and nothing of a service that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.history.store import open_for_writing
from firnline.history.unfinished import load_unfinished
from firnline.pipeline import Pipeline
from firnline.run.open_pipeline import open_pipeline
from firnline.service.api import history
from firnline.service.jobs import LEASH
from firnline.service.plans import MOST_WAITING
from firnline.service.problems import ConflictError
from firnline.service.turns import Turns
from firnline.stores.audit import append_audit, make_record
from firnline.types import Json
from tests.support.service import NAME, run_epochs, serving, write_pipeline

THREADS = 40  # of the server, for requests that block


def test_the_health_of_the_service_waits_for_no_thread(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    gate, held = threading.Event(), threading.Semaphore(0)
    with serving(tmp_path) as (client, _):
        app = client.app

        @app.get("/held")  # type: ignore[attr-defined, untyped-decorator]
        def hold() -> None:
            held.release()
            gate.wait(60)

        def ask() -> None:
            client.get("/held", headers={"Authorization": "Bearer token-of-admin"})

        waiting = [threading.Thread(target=ask) for _ in range(THREADS)]
        try:
            for one in waiting:
                one.start()
            for _ in waiting:
                assert held.acquire(timeout=60)
            assert client.get("/healthz").status_code == 200
            assert client.get("/readyz").status_code in (200, 503)
        finally:
            gate.set()
            for one in waiting:
                one.join(60)


def test_a_table_that_does_not_answer_holds_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pipeline(tmp_path)
    gate, held = threading.Event(), threading.Semaphore(0)

    def hang(_: object) -> tuple[int, list[dict[str, Json]]]:
        held.release()
        gate.wait(60)
        return 0, []

    monkeypatch.setattr(history, "load_sinks", hang)
    admin = {"Authorization": "Bearer token-of-admin"}
    with serving(tmp_path) as (client, service), client:
        object.__setattr__(service, "reads", Turns(each=4, total=28, wait_seconds=0.1))

        def ask(number: int) -> None:
            answers.append(client.get(f"/pipelines/{NAME}/sinks?n={number}", headers=admin).status_code)

        answers: list[int] = []
        waiting = [threading.Thread(target=ask, args=(number,)) for number in range(2 * THREADS)]
        try:
            for one in waiting:
                one.start()
            for _ in range(4):
                assert held.acquire(timeout=60)
            assert client.get("/pipelines", headers=admin).status_code == 200
            assert client.post(f"/pipelines/{NAME}/stop", headers=admin).status_code == 202
            busy = client.get(f"/pipelines/{NAME}/epochs", headers=admin)
            assert (busy.status_code, busy.json()["code"]) == (503, "busy")
        finally:
            gate.set()
            for one in waiting:
                one.join(60)
        assert sorted(answers) == [200] * 4 + [503] * (len(waiting) - 4)
        assert client.get(f"/pipelines/{NAME}/epochs", headers=admin).status_code == 200


def test_only_some_confirms_wait_for_another_one(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    with serving(tmp_path) as (_, service):
        plans = service.plans
        entered, refused = threading.Semaphore(0), threading.Semaphore(0)

        def wait() -> None:
            entered.release()
            try:
                with plans._alone(NAME):
                    pass
            except ConflictError:
                refused.release()

        with plans._alone(NAME):
            threads = [threading.Thread(target=wait) for _ in range(MOST_WAITING + 1)]
            for thread in threads:
                thread.start()
                assert entered.acquire(timeout=60)
            assert refused.acquire(timeout=60)  # the one that is too many, at once
        for thread in threads:
            thread.join(60)
        assert not refused.acquire(blocking=False)


@pytest.mark.parametrize("ends", ["by itself", "with the service"])
def test_a_command_on_a_leash_does_not_outlive_the_service(ends: str) -> None:
    reader, writer = os.pipe()
    script = "import sys, time; time.sleep(300)" if ends == "with the service" else "import sys; sys.exit(7)"
    command = [sys.executable, "-c", script]
    leash = subprocess.Popen(LEASH, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(writer,))
    assert leash.stdin is not None
    leash.stdin.write(json.dumps({"command": command, "lock": writer}).encode() + b"\n")
    leash.stdin.flush()
    os.close(writer)
    if ends == "with the service":
        leash.stdin.close()  # what a kill of the service does
    assert os.read(reader, 1) == b""  # the command has ended, too: it held the descriptor
    os.close(reader)
    assert leash.wait(60) == (7 if ends == "by itself" else -9)
    leash.stdin.close()


def test_a_later_process_with_the_same_number_does_not_hide_an_unfinished_action(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 2)
    pipeline = open_pipeline(Pipeline.load(tmp_path / "firnline.yml").options)
    record = make_record(NAME, "rollback", run="a" * 16, from_epoch=2, to_epoch=1, outcome="begun")
    system, _, ticks = record.start.rpartition(" ")
    other = replace(record, pid=os.getppid(), start=f"{system} {int(ticks) + 10**9}")  # a number that is taken
    store = open_for_writing(pipeline)
    append_audit(store, other)
    store.close()
    assert [one.run for one in load_unfinished(pipeline)] == ["a" * 16]
