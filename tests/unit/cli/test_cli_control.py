"""`pause`, `resume`, `stop` and `checkpoint` on a run in a process of its own; `run --standby`; what `status` tells."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.cli import control
from firnline.cli.main import run_command
from firnline.cli.run_report import RunReporter, RunTotals
from firnline.errors import ConfigError, ControlError
from firnline.history.status import load_status
from firnline.options import PipelineOptions, StoreOptions
from firnline.process import StopFlag
from firnline.run.control import ask
from firnline.run.open_pipeline import open_pipeline
from firnline.run.standby import check_standby, holding_lease
from firnline.service.health import Health
from firnline.sinks.base import Head
from firnline.spec.build import load_options
from firnline.stores import open_store
from firnline.stores.lease import LeaseRecord
from tests.support.commands import run_plainly, run_standby
from tests.support.processes import Child, Launcher, wait_until
from tests.support.s3 import s3_options
from tests.support.samples import SampleInput, table_ids

VERBS = ["pause", "resume", "stop", "checkpoint"]


@pytest.fixture
def options(spec: Path) -> PipelineOptions:
    """The pipeline of the spec, but it looks for new files once an hour only."""
    made = load_options(spec, environ={})
    return replace(made, sources=(replace(made.sources[0], poll_interval_secs=3600),))


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path / "children", run_plainly)


@contextlib.contextmanager
def ending(child: Child) -> Iterator[Child]:
    """Nothing is left when the test is over."""
    try:
        yield child
    finally:
        if child.is_alive:
            child.signal(signal.SIGKILL)
            child.wait()


@pytest.fixture
def running(launcher: Launcher, options: PipelineOptions) -> Iterator[Child]:
    """A run that has read everything, at epoch 2."""
    with ending(launcher.start(options, once=False)) as child:
        child.wait_for("all read; waiting for new files")
        child.wait_for("epoch 2 committed")  # the last one may still have been under way
        yield child


def flying(options: PipelineOptions) -> int:
    """How many epochs the run says are in flight."""
    try:
        return len(ask(options, {"command": "status"}, os.environ)["in_flight"])
    except ControlError:  # it does not listen yet
        return 0


# -- without a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_run_it_says_so(spec: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([verb]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Error: no run of pipeline 'flights' on this machine"
    assert second.startswith("Try: `firnline status`")
    assert "`firnline run`" in second


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_that_was_killed_is_no_run(running: Child, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    running.signal(signal.SIGKILL)
    running.wait()
    assert run_command([verb]) == 1
    assert "no run of pipeline 'flights' on this machine" in capsys.readouterr().err


# -- with one -----------------------------------------------------------------------------------------


def test_pause_resume_checkpoint_and_stop(
    running: Child, options: PipelineOptions, sample: SampleInput, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(*tokens: str) -> str:
        assert run_command(list(tokens)) == 0
        return capsys.readouterr().out

    assert say("checkpoint") == "nothing new; the pipeline is at epoch 2\n"
    sample.add("c1.json", 3)
    assert say("checkpoint").startswith("committed epoch 3 (checkpoint ")
    assert table_ids(options.sinks[0].location) == sample.ids
    assert say("pause") == "paused at epoch 3\n"
    assert say("pause") == "already paused at epoch 3\n"
    sample.add("d1.json", 3)
    assert say("checkpoint") == "nothing new; the pipeline is at epoch 3\n"
    assert say("resume") == "resumed, after epoch 3\n"
    assert say("resume").startswith("already running, after epoch ")
    assert say("checkpoint").split(" ")[-1]
    assert table_ids(options.sinks[0].location) == sample.ids
    assert say("stop") == "stopped after epoch 4\n"
    assert running.wait().exit_code == 0
    assert "stopped cleanly after epoch 4" in running.log()
    assert "paused: no further epoch is planned" in running.log()
    assert "resumed" in running.log()


def test_a_paused_run_is_stopped(running: Child, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["pause"]) == 0
    assert run_command(["stop"]) == 0
    assert running.wait().exit_code == 0
    assert capsys.readouterr().out == "paused at epoch 2\nstopped after epoch 2\n"


def test_the_json_fields_are_those_of_the_help(running: Child, run_json: Any, sample: SampleInput) -> None:
    sample.add("c1.json", 3)
    found = {verb: run_json(verb) for verb in ("checkpoint", "pause", "resume", "stop")}
    for verb, fields in found.items():
        text = getattr(control, f"{verb.upper()}_EPILOGUE")
        assert [key for key in fields if key not in text] == []
        assert (fields["pipeline"], fields["pid"], fields["epoch"]) == ("flights", running.pid, 3)
    assert {verb: fields["status"] for verb, fields in found.items()} == {
        "checkpoint": "committed", "pause": "paused", "resume": "resumed", "stop": "stopped",
    }  # fmt: skip
    assert found["checkpoint"]["committed"] is True
    assert running.wait().exit_code == 0
    assert run_json("checkpoints")["checkpoints"][0]["id"] == found["checkpoint"]["id"]


@pytest.mark.parametrize("verb", ["pause", "checkpoint", "stop"])
def test_waiting_has_an_end(
    launcher: Launcher, options: PipelineOptions, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ending(launcher.start(options, "epoch.run.before:1:hang", once=False)) as child:
        wait_until(lambda: flying(options) == 1, child)
        assert run_command([verb, "--timeout", "0.3"]) == 1
    told = capsys.readouterr().err
    assert " after 0.3 s" in told
    assert "Try: It " in told
    if verb != "stop":
        assert "1 epoch in flight" in told


def test_a_checkpoint_of_a_run_that_ends_is_told_apart(
    launcher: Launcher, options: PipelineOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from firnline.cli.control import RunningPipeline

    asks: Callable[..., dict[str, Any]] = RunningPipeline.ask
    with ending(launcher.start(options, "epoch.run.before:1:hang", once=False)) as child:
        wait_until(lambda: flying(options) == 1, child)

        def ask_and_kill(self: RunningPipeline, command: str, **facts: Any) -> dict[str, Any]:
            if facts and child.is_alive:
                child.signal(signal.SIGKILL)
                child.wait()
            return asks(self, command, **facts)

        monkeypatch.setattr(RunningPipeline, "ask", ask_and_kill)
        assert run_command(["checkpoint"]) == 1
    assert "ended before it took the checkpoint" in capsys.readouterr().err


def test_a_second_run_with_nothing_to_do_disturbs_nobody(
    running: Child, launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    running.signal(signal.SIGSTOP)  # so that the lease does not change meanwhile
    running.wait_until_stopped()
    with contextlib.closing(open_store(lease_store(options))) as store:
        before = store.get_raw("flights/lease")
        with ending(launcher.start(options, once=True)) as second:
            assert second.wait().exit_code == 0
            assert "control channel" not in second.log()
            assert "lease" not in second.log()
        assert store.get_raw("flights/lease") == before
    running.signal(signal.SIGCONT)
    sample.add("c1.json", 3)
    assert run_command(["checkpoint"]) == 0
    assert table_ids(options.sinks[0].location) == sample.ids


def test_a_second_run_is_refused_while_the_first_is_alive(
    running: Child, launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    with ending(launcher.start(options, once=False)) as second:
        assert second.wait().exit_code == 6
        log = second.log()
        assert "Error: pipeline 'flights' is already running: run " in log
        assert f" on {socket.gethostname()} (pid {running.pid}) since 20" in log
        assert all(word in log for word in ("`firnline stop`", "`firnline run --standby`", "--take-over"))
    sample.add("c1.json", 3)
    assert run_command(["checkpoint"]) == 0
    assert table_ids(options.sinks[0].location) == sample.ids


def test_a_run_that_finds_work_only_when_it_claims_is_refused_then(
    running: Child, launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    sample.add("c1.json", 3)  # the live run lists its input once an hour
    with ending(launcher.start(options, once=True)) as second:
        assert second.wait().exit_code == 6
        assert "is already running" in second.log()
    assert run_command(["checkpoint"]) == 0
    assert table_ids(options.sinks[0].location) == sample.ids


def test_a_rollback_is_refused_while_a_run_is_alive(
    running: Child, options: PipelineOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table_ids(options.sinks[0].location)
    assert run_command(["rollback", "--to", "1", "--yes"]) == 6
    assert "Error: pipeline 'flights' is already running: run " in capsys.readouterr().err
    assert running.is_alive
    assert table_ids(options.sinks[0].location) == rows
    assert run_command(["rollback", "--to", "1", "--yes", "--take-over"]) == 0
    assert running.wait().exit_code == 5
    assert 0 < table_ids(options.sinks[0].location).total() < rows.total()


def lease_store(options: PipelineOptions) -> StoreOptions:
    assert options.checkpoint.store is not None
    return options.checkpoint.store


def test_a_run_after_one_that_was_killed_takes_nothing_from_anybody(
    running: Child, launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    running.signal(signal.SIGKILL)
    running.wait()
    sample.add("c1.json", 3)
    with ending(launcher.start(options)) as second:
        assert second.wait().exit_code == 0
        assert "took the lease over" not in second.log()
        assert "without a control channel" not in second.log()
    assert table_ids(options.sinks[0].location) == sample.ids


# -- the lease ----------------------------------------------------------------------------------------


def test_status_tells_the_lease_and_what_the_run_says(
    running: Child, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["pause"]) == 0
    capsys.readouterr()
    found = run_json("status")
    assert found["state"] == "paused"
    assert (found["lease"]["pid"], found["lease"]["token"], found["lease"]["released"]) == (running.pid, 1, False)
    assert (found["control"]["state"], found["control"]["pid"]) == ("paused", running.pid)
    assert run_command(["status"]) == 0
    text = capsys.readouterr().out
    assert "(token 1), renewed " in text
    assert f"paused, 0 epochs in flight (pid {running.pid} on this machine)" in text
    assert run_command(["stop"]) == 0
    capsys.readouterr()
    found = run_json("status")
    assert (found["state"], found["control"], found["lease"]["released"]) == ("done", None, True)
    assert run_command(["status"]) == 0
    assert "released by run " in capsys.readouterr().out


def test_a_store_that_cannot_be_read_is_no_failure_of_status(finished: Path, run_json: Any) -> None:
    options = load_options(finished, environ={})
    assert options.checkpoint.store is not None
    store = open_store(options.checkpoint.store)
    store.put_raw("flights/lease", b"{}")
    store.close()
    assert "unreadable" in run_json("status")["lease"]


@pytest.mark.parametrize("moment", ["2026-01-01T00:00:00", "yesterday", ""])
def test_a_lease_of_an_odd_time_is_no_failure_of_status(
    finished: Path, run_json: Any, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    options = load_options(finished, environ={})
    assert options.checkpoint.store is not None
    with contextlib.closing(open_store(options.checkpoint.store)) as store:
        store.put("flights/lease", LeaseRecord("r", "h", 1, "u", 1, moment, moment, 15.0))
    lease = run_json("status")["lease"]
    assert (lease["renewed_at"], lease["renewed_seconds_ago"]) == (moment, None)
    assert run_command(["status"]) == 0
    assert "renewed at an unknown time" in capsys.readouterr().out


@pytest.mark.parametrize("begun", [False, True])
def test_status_without_the_source_shows_the_rest(
    spec: Path, request: pytest.FixtureRequest, sample: SampleInput, run_json: Any,
    capsys: pytest.CaptureFixture[str], begun: bool,
) -> None:  # fmt: skip
    if begun:
        request.getfixturevalue("finished")
    Path(load_options(spec, environ={}).sources[0].location).rename(spec.parent / "away")
    found = run_json("status")
    assert (found["files_outstanding"], found["bytes_outstanding"]) == (None, None)
    assert (found["epoch"] > 0, found["state"]) == (begun, "done" if begun else "new")
    assert run_command(["status"]) == 0
    assert re.search(r"^source flights  .*cannot be listed: ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("answer", "state"),
    [(None, "done"), ("starting", "starting"), ("running", "running"), ("pausing", "pausing"), ("ended", "done")],
)
def test_what_a_live_run_says_wins_over_its_predecessors_end(finished: Path, answer: str | None, state: str) -> None:
    pipeline = open_pipeline(load_options(finished, environ={}))
    assert load_status(pipeline, {"state": answer} if answer else None).state == state


def test_a_signal_is_heard_while_the_store_hangs(tmp_path: Path, options: PipelineOptions) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:  # connections are made, and never answered
        access = s3_options(f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = StoreOptions(type="object", uri="s3://bucket/checkpoints", storage_options=access)
        hung = replace(options, checkpoint=replace(options.checkpoint, store=store, lease_seconds=1.0))
        with (
            ending(Launcher(tmp_path / "standby", run_standby).start(hung, once=False)) as standby,
            ending(Launcher(tmp_path / "plain", run_plainly).start(hung, once=False)) as plain,
        ):
            plain.wait_for("running without a lease")
            standby.wait_for("standing by: the checkpoint store does not answer: no answer for 5 s")
            standby.signal(signal.SIGQUIT)
            standby.wait_for("Current thread 0x")  # the stacks, and it goes on
            standby.signal(signal.SIGTERM)
            assert standby.wait().exit_code == 0
            assert "stopped while standing by; nothing was run" in standby.log()


@pytest.mark.parametrize("store", [None, StoreOptions(type="memory")])
def test_standing_by_needs_a_store_that_others_see(options: PipelineOptions, store: StoreOptions | None) -> None:
    lonely = replace(options, checkpoint=replace(options.checkpoint, store=store))
    with pytest.raises(ConfigError, match="--standby needs a checkpoint store") as caught:
        check_standby(lonely)
    assert "checkpoint.store" in caught.value.hint
    said: list[str] = []
    with holding_lease(lonely, FakeRunner(), said.append, standby=False, stop=StopFlag()) as go:
        assert go
    assert said == ["no lease: other runs of this pipeline are not seen; the table still lets only one of them commit"]


class FakeRunner:
    run_id = "r1"

    def fence(self, error: Exception) -> None:
        raise AssertionError(error)


def fail(text: str) -> None:
    raise AssertionError(text)


def test_a_run_whose_store_is_out_of_reach_runs_without_a_lease_but_a_standby_waits(
    options: PipelineOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    store = StoreOptions(type="file", path=str(tmp_path / "file" / "store"))
    away = replace(options, checkpoint=replace(options.checkpoint, store=store))
    with holding_lease(away, FakeRunner(), fail, standby=False, stop=StopFlag()) as go:
        assert go
    assert "running without a lease" in caplog.text
    monkeypatch.setattr("firnline.run.standby.RETRY_SECONDS", 0.01)
    told: list[str] = []
    stop = StopFlag()

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            (tmp_path / "file").unlink()  # now it can be made

    with holding_lease(away, FakeRunner(), say, standby=True, stop=stop) as go:
        assert go
        opened = open_store(store)
        record = opened.get("flights/lease", LeaseRecord)
        assert record is not None
        assert (record.holder, record.released) == ("r1", False)
    assert "does not answer" in told[0]
    assert told[1] == "took the lease (token 1)"
    assert record != (after := opened.get("flights/lease", LeaseRecord))
    assert after is not None
    assert after.released


def test_a_standby_is_stopped_while_the_store_is_out_of_reach(options: PipelineOptions, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = StoreOptions(type="file", path=str(tmp_path / "file" / "store"))
    away = replace(options, checkpoint=replace(options.checkpoint, store=store))
    stop = StopFlag()
    with holding_lease(away, FakeRunner(), lambda _: stop.set(), standby=True, stop=stop) as go:
        assert not go


def test_a_signal_ends_a_standby_which_has_not_started_spark(
    running: Child, tmp_path: Path, options: PipelineOptions
) -> None:
    with ending(Launcher(tmp_path / "standbys", run_standby).start(options, once=False)) as standby:
        standby.wait_for("standing by: run")
        standby.signal(signal.SIGINT)
        assert standby.wait().exit_code == 0
        assert "stopped while standing by; nothing was run" in standby.log()
        assert "starting Spark" not in standby.log()


# -- who listens --------------------------------------------------------------------------------------


def test_a_paused_run_is_healthy_for_as_long_as_it_lasts() -> None:
    now = 0.0
    health = Health("flights", lambda: now, poll_seconds=10, stuck_seconds=900)
    health.started("r", Head(exists=True, version=3, epoch=2))
    health.paused(True)
    now = 100_000.0
    assert health.healthy().ok
    assert health.ready().ok
    assert health.healthy().facts["paused"] is True
    health.paused(False)
    assert health.healthy().ok
    now = 200_000.0
    assert not health.healthy().ok


def test_a_pause_is_told() -> None:
    said: list[str] = []
    tally, narrator = RunTotals(time.monotonic), RunReporter(said.append, attempts=3)
    for listener in (tally, narrator):
        listener.paused(True)
    assert tally.doing.startswith("paused")
    narrator.paused(False)
    assert [text.split(":")[0] for text in said] == ["paused", "resumed"]
    assert json.dumps(tally.summary())
