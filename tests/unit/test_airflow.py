"""The Airflow operator and sensor: what exit codes mean to Airflow, and how a killed task ends its run.

Where Airflow is installed, its own classes are used; elsewhere small doubles of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class _Base:
    """A double of Airflow's base classes."""

    log = logging.getLogger("airflow.task")

    def __init__(self, *, task_id: str, **_: Any) -> None:
        self.task_id = task_id


class _AirflowError(Exception):
    """A double of AirflowException."""


class _AirflowFailError(_AirflowError):
    """A double of AirflowFailException."""


@pytest.fixture(scope="module")
def airflow() -> Iterator[Any]:
    """The module under test, and with it Airflow's two exceptions."""
    doubles: dict[str, ModuleType] = {}
    if importlib.util.find_spec("airflow") is None:
        doubles = {name: ModuleType(name) for name in ("airflow", "airflow.sdk", "airflow.sdk.exceptions")}
        vars(doubles["airflow.sdk"]).update(BaseOperator=_Base, BaseSensorOperator=_Base)
        vars(doubles["airflow.sdk.exceptions"]).update(
            AirflowException=_AirflowError, AirflowFailException=_AirflowFailError
        )
    sys.modules.update(doubles)
    try:
        yield importlib.import_module("firnline.airflow")
    finally:
        for name in (*doubles, "firnline.airflow"):
            sys.modules.pop(name, None)


@pytest.fixture
def command(tmp_path: Path) -> str:
    """A double of the `firnline` command: shows its arguments, and answers and ends as variables say."""
    program = tmp_path / "firnline"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, sys, time\n"
        "print('starting', *sys.argv[1:], file=sys.stderr, flush=True)\n"
        "def stop(*_):\n"
        "    open('stopped', 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get('DEAF') else stop)\n"
        "if os.environ.get('WAITS'):\n"
        "    open('waiting', 'w').close()\n"
        "    time.sleep(300)\n"
        "print(os.environ.get('ANSWER', '{}'))\n"
        "if os.environ.get('SIGNAL'):\n"
        "    sys.stdout.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
        "sys.exit(int(os.environ.get('CODE', '0')))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def operator(airflow: Any, command: str, **env: str) -> Any:
    return airflow.FirnlineRunOperator(
        task_id="run", spec="orders.yml", command=command, arguments=["--strict-store"], env=env,
        cwd=os.path.dirname(command),
    )  # fmt: skip


def test_a_run_that_succeeds_returns_its_result(airflow: Any, command: str) -> None:
    answer = {"pipeline": "orders", "epoch": 7, "rows": 12, "exit_code": 0}
    task = operator(airflow, command, ANSWER=json.dumps(answer))
    assert task.execute({}) == answer


def test_the_command_runs_once_and_its_log_is_the_tasks(
    airflow: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    task = operator(airflow, command)

    class Log:
        def info(self, _: str, line: str) -> None:
            lines.append(line)

        def warning(self, *_: str) -> None:
            """Airflow warns of an operator that is called outside of a task."""

    monkeypatch.setattr(type(task), "log", Log(), raising=False)  # a property of Airflow's own class
    task.execute({})
    assert lines == ["starting run orders.yml --once --json --strict-store"]


@pytest.mark.parametrize("code", [1, 2, 5, 7])
def test_what_needs_a_person_fails_for_good(airflow: Any, command: str, code: int) -> None:
    answer = json.dumps({"error": {"code": "x", "message": "the table is gone", "hint": "Create it."}})
    with pytest.raises(airflow.AirflowFailException, match=r"the table is gone Create it\."):
        operator(airflow, command, CODE=str(code), ANSWER=answer).execute({})


@pytest.mark.parametrize("code", [3, 4, 6, 130])
def test_what_is_safe_to_run_again_is_retried(airflow: Any, command: str, code: int) -> None:
    with pytest.raises(airflow.AirflowException) as failed:
        operator(airflow, command, CODE=str(code), ANSWER="").execute({})
    assert not isinstance(failed.value, airflow.AirflowFailException)
    assert f"ended with {code}" in str(failed.value)


def test_a_killed_run_is_retried(airflow: Any, command: str) -> None:
    with pytest.raises(airflow.AirflowException, match="by a signal") as failed:
        operator(airflow, command, SIGNAL="1").execute({})
    assert not isinstance(failed.value, airflow.AirflowFailException)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_killed_task_ends_its_run(airflow: Any, command: str, deaf: bool) -> None:
    """Cleanly if the run listens, at once if it does not."""
    folder = Path(command).parent
    task = operator(airflow, command, WAITS="1", **({"DEAF": "1"} if deaf else {}))
    task.stop_seconds = 1 if deaf else 120
    failed: list[BaseException] = []

    def execute() -> None:
        try:
            task.execute({})
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=execute, daemon=True)
    thread.start()
    deadline = time.time() + 100
    # The process may wait before the thread that started it knows it.
    while not ((folder / "waiting").exists() and task._process is not None) and time.time() < deadline:
        time.sleep(0.02)
    task.on_kill()
    thread.join(100)
    assert not thread.is_alive()
    assert (folder / "stopped").exists() is not deaf
    task.on_kill()  # a run that has ended is left alone


STATUS = {
    "pipeline": "orders",
    "committed_epoch": 7,
    "last_commit_at": "2026-03-01T10:00:00+00:00",
    "files_outstanding": 0,
}


@pytest.mark.parametrize(
    ("wanted", "is_there"),
    [
        ({}, True),
        ({"epoch": 7}, True),
        ({"epoch": "8"}, False),
        ({"since": "2026-03-01T09:59:59+00:00"}, True),
        ({"since": "2026-03-01T10:00:00"}, True),
        ({"since": "2026-03-01T10:00:01Z"}, False),
        ({"all_read": True}, True),
        ({"all_read": True, "epoch": 9}, False),
    ],
)
def test_the_sensor_waits_for_its_conditions(
    airflow: Any, command: str, wanted: dict[str, Any], is_there: bool
) -> None:
    sensor = airflow.FirnlineSensor(
        task_id="wait", spec="orders.yml", command=command, env={"ANSWER": json.dumps(STATUS)}, **wanted
    )
    assert sensor.poke({}) is is_there


def test_a_pipeline_that_has_committed_nothing_is_waited_for(airflow: Any) -> None:
    new = {"committed_epoch": None, "last_commit_at": None, "files_outstanding": None}
    assert airflow.find_waiting(new, epoch="1")
    assert airflow.find_waiting(new, since="2026-01-01T00:00:00Z")
    assert airflow.find_waiting(new, all_read=True)
    assert airflow.find_waiting({**STATUS, "files_outstanding": 3}, all_read=True)


def test_the_sensor_fails_where_a_person_is_needed_and_waits_where_not(airflow: Any, command: str) -> None:
    def sensor(code: int) -> Any:
        return airflow.FirnlineSensor(task_id="wait", spec="x.yml", command=command, env={"CODE": str(code)})

    with pytest.raises(airflow.AirflowFailException):
        sensor(2).poke({})
    assert sensor(3).poke({}) is False
