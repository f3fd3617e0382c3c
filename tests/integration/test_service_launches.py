"""Launches under attack: reboots, clocks, two services, slow and killed launchers, full disks, broken files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.codec import canonical, seal
from firnline.clock import SystemClock
from firnline.errors import NotRunningError
from firnline.names import launch_id, launch_name, run_name, runs_folder
from firnline.options import PipelineOptions
from firnline.process import Process, find_process, this_process
from firnline.run.wanted import Wishes
from firnline.service.glance import Glance, take_glance
from firnline.service.registry import Registered, Registry
from firnline.service.supervise import launcher, policy
from firnline.service.supervise.launches import Launches
from firnline.service.supervise.supervisor import Settings, Supervisor
from firnline.storage import LocalStorage
from firnline.types import Clock, Json, RandomIds
from tests.integration.test_service_supervision import PATIENCE_SECONDS, ends, launches, wait_for, write_pipeline

SLEEPS = "import time; time.sleep(300)"
AT = "2026-11-16T08:00:00+00:00"


def service(tmp_path: Path, script: str, clock: Clock | None = None, **settings: Any) -> Supervisor:
    given: dict[str, Any] = {"state": str(tmp_path / "state"), "look_seconds": 0.05, "stagger_seconds": 0.0}
    return Supervisor(
        Registry([tmp_path / "pipelines"], os.environ),
        Settings(**{**given, "hangs_seconds": 600.0, "run_command": (sys.executable, "-c", script), **settings}),
        clock or SystemClock(),
        RandomIds(),
        dict(os.environ),
    )


def options_of(tmp_path: Path, name: str = "flights") -> PipelineOptions:
    registry = Registry([tmp_path / "pipelines"], os.environ)
    registry.refresh()
    return registry.get(name).usable


def records(tmp_path: Path, name: str = "flights") -> Launches:
    return Launches(LocalStorage(options_of(tmp_path, name).home.root), name)


def wishes(tmp_path: Path, name: str = "flights") -> Wishes:
    return Wishes(LocalStorage(options_of(tmp_path, name).home.root), name, SystemClock())


def dead_process() -> Process:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return find_process(child.pid)


def put_launch(tmp_path: Path, run: Process, by: Process | None = None, attempt: int = 1) -> str:
    """Record a launch of wish 1 whose run was let go, and whose end nobody recorded."""
    launch, found = launch_id(1, attempt), records(tmp_path)
    found.put(launch, "begun", {"at": AT, "by": "ann"})
    found.put_process(launch, by or run, run)
    return launch


def kill_runs(supervised: Supervisor) -> None:
    for seen in supervised.all():
        for launch in launches(seen):
            if launch.ended_at is None and launch.run is not None and launch.run.host == this_process().host:
                for one in (launch.run, launch.launcher):
                    if one is not None and find_process(one.pid).start == one.start:
                        os.kill(one.pid, signal.SIGKILL)


@pytest.mark.parametrize("where", ["another boot", "another host", "another container"])
def test_a_run_of_a_machine_that_is_gone_is_started_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    run = dead_process()
    boot, space, ticks = run.start.split(" ")
    changed = {
        "another boot": replace(run, start=f"00000000-0000-4000-8000-000000000000 {space} {ticks}"),
        "another host": replace(run, host="elsewhere"),
        "another container": replace(run, start=f"{boot} pid:[1] {ticks}"),
    }[where]
    put_launch(tmp_path, changed)
    monkeypatch.setattr(policy, "BOOT_SECONDS", 0.1 if where == "another boot" else 1e9)
    monkeypatch.setattr(policy, "SILENT_SECONDS", 1e9 if where == "another boot" else 0.1)
    with service(tmp_path, "pass") as supervised:
        seen = wait_for(supervised, "flights", lambda seen: len(ends(seen)) == 2)
        assert ends(seen) == [None, 0]
        assert seen.needs_person is None


@pytest.mark.parametrize("part", ["begun", "process", "exit"])
@pytest.mark.parametrize("content", [b"", b'{"format": 99}'])
def test_a_record_that_cannot_be_read_ends_no_supervision(
    part: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    launch, found = put_launch(tmp_path, dead_process()), records(tmp_path)
    if part == "exit":
        found.put(launch, "exit", {"at": AT, "code": 3, "wish": 1})
    (Path(found.folder) / launch_name(launch, part)).write_bytes(content)
    monkeypatch.setattr(policy, "BEGIN_SECONDS", 0.1)
    with service(tmp_path, "pass") as supervised:
        wait_for(supervised, "flights", lambda seen: launches(seen)[0].is_over)
        monkeypatch.setattr(policy, "BEGIN_SECONDS", 600.0)
        seen = wait_for(supervised, "flights", lambda seen: len(ends(seen)) == 2)
        assert ends(seen) == [None, 0]


def test_a_run_elsewhere_counts_as_alive_while_its_launcher_shows_a_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    launch = put_launch(tmp_path, replace(dead_process(), host="elsewhere"))
    beats = iter(range(1_000_000))
    monkeypatch.setattr(Launches, "find_beat", lambda *_: next(beats))
    monkeypatch.setattr(policy, "SILENT_SECONDS", 0.0001)
    looks = 0
    with service(tmp_path, "pass", look_seconds=0.01) as supervised:
        seen = wait_for(supervised, "flights", lambda _: True)
        while looks < 5:
            read_at = seen.glance.read_at  # type: ignore[union-attr]
            seen = wait_for(supervised, "flights", lambda one, at=read_at: one.glance.read_at != at)  # type: ignore[misc]
            looks += 1
        assert [one.id for one in launches(seen) if one.is_alive] == [launch]
        assert len(launches(seen)) == 1


def test_a_clock_that_is_set_back_starts_nothing_again(tmp_path: Path) -> None:
    class Ahead(SystemClock):
        hours = 1.0

        def now(self) -> datetime:
            return super().now() + timedelta(hours=self.hours)

    write_pipeline(tmp_path / "pipelines")
    clock = Ahead()
    with service(tmp_path, "import sys; sys.exit(5)", clock) as supervised:
        supervised.wish("flights", "running", "ann")
        clock.hours = 0.0  # while the run is being started
        seen = wait_for(supervised, "flights", lambda seen: seen.needs_person is not None)
        assert seen.needs_person == "the run ended with exit code 5"
        assert ends(seen) == [5]
        clock.hours = -24.0
        supervised.wish("flights", "running", "ann")  # the launch of a later wish is the newer one
        seen = wait_for(supervised, "flights", lambda seen: len(ends(seen)) == 2 and seen.needs_person is not None)
        assert [launch.wish for launch in launches(seen)] == [1, 2]


def test_a_restart_does_not_wait_for_a_clock_that_was_set_back(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    launch = put_launch(tmp_path, dead_process())
    future = (SystemClock().now() + timedelta(days=365)).isoformat()
    records(tmp_path).put(launch, "exit", {"at": future, "code": 3, "wish": 1})
    with service(tmp_path, "pass") as supervised:
        wait_for(supervised, "flights", lambda seen: ends(seen) == [3, 0])


def test_one_wish_starts_one_run_whatever_number_of_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pipeline(tmp_path / "pipelines")
    both, put = threading.Barrier(2), Launches.put
    held: list[str] = []

    def hold(self: Launches, launch: str, part: str, body: dict[str, Json]) -> None:
        if part == "begun" and len(held) < 2:
            held.append(launch)
            both.wait(PATIENCE_SECONDS)  # each has decided to start it
        put(self, launch, part, body)

    monkeypatch.setattr(Launches, "put", hold)
    wishes(tmp_path).put("running", "ann")
    first, second = service(tmp_path, SLEEPS), service(tmp_path, SLEEPS, state=str(tmp_path / "other"))
    with first, second:
        for supervised in (first, second):
            seen = wait_for(supervised, "flights", lambda seen: any(one.run for one in launches(seen)))
            assert [one.id for one in launches(seen)] == [launch_id(1, 1)]
        assert held == [launch_id(1, 1)] * 2
        kill_runs(first)


def run_launcher(tmp_path: Path, launch: str, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firnline.service.supervise.launcher", options_of(tmp_path).home.root]
    return subprocess.run(
        [*command, "flights", launch, sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_a_launcher_whose_launch_no_longer_counts_starts_no_run(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    found, mark = records(tmp_path), tmp_path / "ran"
    script = f"open({str(mark)!r}, 'w').close()"
    wishes(tmp_path).put("running", "ann")
    found.put(launch_id(1, 1), "begun", {"at": AT, "by": "ann"})
    found.put(launch_id(1, 1), "process", {"given_up_at": AT})  # it was slow
    assert run_launcher(tmp_path, launch_id(1, 1), script).returncode == launcher.NOT_STARTED
    found.put(launch_id(1, 2), "begun", {"at": AT, "by": "ann"})
    found.put(launch_id(1, 3), "begun", {"at": AT, "by": "ann"})  # of another service
    answer = run_launcher(tmp_path, launch_id(1, 2), script)
    assert answer.returncode == launcher.NOT_STARTED
    assert f"launch {launch_id(1, 3)} is there" in answer.stderr
    wishes(tmp_path).put("stopped", "bob")
    assert "wanted stopped" in run_launcher(tmp_path, launch_id(1, 3), script).stderr
    assert not mark.exists()
    assert [(one.is_over, one.code) for one in found.load()] == [(True, None)] * 3
    wishes(tmp_path).put("running", "bob")
    found.put(launch_id(3, 1), "begun", {"at": AT, "by": "bob"})
    assert run_launcher(tmp_path, launch_id(3, 1), script).returncode == 0
    assert mark.exists()
    last = found.load()[-1]
    assert (last.code, last.charged) == (0, 3)


def test_a_launcher_passes_signals_on_and_records_how_the_run_ended(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    records(tmp_path).put(launch_id(1, 1), "begun", {"at": AT, "by": "ann"})
    script = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    assert run_launcher(tmp_path, launch_id(1, 1), script).returncode == 128 + signal.SIGTERM
    assert records(tmp_path).load()[0].code == -signal.SIGTERM


def test_an_exit_code_is_recorded_once_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found, put = Launches(LocalStorage(str(tmp_path)), "p"), Launches.put
    failures = iter(range(3))

    def fail(self: Launches, launch: str, part: str, body: dict[str, Json]) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, launch, part, body)

    monkeypatch.setattr(Launches, "put", fail)
    monkeypatch.setattr(launcher, "RETRY_SECONDS", 0.0)
    launcher._record(found, launch_id(1, 1), {"at": AT, "code": 2, "wish": 1})
    assert found.load()[0].code == 2
    assert capfd.readouterr().err.count("No space left") == 1


def test_an_end_that_cannot_be_recorded_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    put_launch(tmp_path, dead_process(), by=this_process())  # the launcher lives
    monkeypatch.setattr("firnline.service.supervise.supervisor.END_SECONDS", 0.0)
    with service(tmp_path, "pass") as supervised:
        seen = wait_for(supervised, "flights", lambda seen: seen.needs_person is not None)
        assert "cannot record how" in str(seen.needs_person)
        assert len(launches(seen)) == 1


@pytest.mark.parametrize(("code", "started"), [(0, False), (2, False), (5, False), (3, True), (None, True)])
def test_the_run_history_says_how_a_run_ended_whose_launcher_was_killed(
    code: int | None, started: bool, tmp_path: Path
) -> None:
    write_pipeline(tmp_path / "pipelines")
    wishes(tmp_path).put("running", "ann")
    run = dead_process()
    put_launch(tmp_path, run)
    record = {
        "run": "a" * 16,
        **asdict(run),
        "started_at": AT,
        "status": "done",
        "exit_code": code,
        "last_restarts": [],
    }
    record |= {"paused": False, "error": None, "ended_at": AT}
    name = f"{runs_folder('flights')}/{run_name(datetime.fromisoformat(AT), 'a' * 16)}"
    LocalStorage(options_of(tmp_path).home.root).put(name, canonical(seal(record)))
    with service(tmp_path, "pass") as supervised:
        if started:
            wait_for(supervised, "flights", lambda seen: ends(seen) == [code, 0])
            return
        seen = wait_for(supervised, "flights", lambda seen: ends(seen) == [code])
        assert (seen.needs_person is None) == (code == 0)


def test_what_fails_in_a_look_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pipeline(tmp_path / "pipelines")
    put, full = Launches.put, True

    def fail(self: Launches, launch: str, part: str, body: dict[str, Json]) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, launch, part, body)

    monkeypatch.setattr(Launches, "put", fail)
    with service(tmp_path, "pass") as supervised:
        supervised.wish("flights", "running", "ann")
        seen = wait_for(supervised, "flights", lambda seen: seen.needs_person is not None)
        assert seen.needs_person == "a run cannot be started: No space left on device"
        full = False
        wait_for(supervised, "flights", lambda seen: ends(seen) == [0] and seen.needs_person is None)
        broken = True

        def bug(self: Supervisor, registered: Registered, glance: Glance) -> None:
            if broken:
                raise RuntimeError("a bug")

        monkeypatch.setattr(Supervisor, "_find_trouble", bug)
        seen = wait_for(supervised, "flights", lambda seen: seen.needs_person is not None)
        assert seen.needs_person == "looking at it failed: RuntimeError: a bug"
        broken = False
        wait_for(supervised, "flights", lambda seen: seen.needs_person is None)


def test_runs_that_nobody_has_looked_at_yet_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "z"):
        write_pipeline(tmp_path / "pipelines", name)
        wishes(tmp_path, name).put("running", "ann")
    found = records(tmp_path, "z")
    found.put(launch_id(1, 1), "begun", {"at": AT, "by": "ann"})
    found.put_process(launch_id(1, 1), this_process(), this_process())  # it lives
    gate = threading.Event()

    def take(registered: Registered, *rest: Any) -> Glance:
        if registered.name == "z":
            gate.wait(PATIENCE_SECONDS)
        return take_glance(registered, *rest)

    monkeypatch.setattr("firnline.service.supervise.supervisor.take_glance", take)
    with service(tmp_path, SLEEPS, max_running=1) as supervised:
        seen = wait_for(supervised, "a", lambda seen: isinstance(seen.decision, policy.Wait))
        assert seen.decision.reason == "runs are being counted"  # type: ignore[union-attr]
        gate.set()
        wait_for(supervised, "z", lambda seen: True)
        seen = wait_for(
            supervised, "a", lambda seen: isinstance(seen.decision, policy.Wait) and "1 runs" in seen.decision.reason
        )
        assert launches(seen) == []


@pytest.mark.parametrize("change", ["broken", "gone", "renamed", "moved"])
def test_a_pipeline_whose_file_cannot_be_used_stays_while_its_run_lives(change: str, tmp_path: Path) -> None:
    path = write_pipeline(tmp_path / "pipelines")
    path = path.rename(path.with_name("team.yml"))
    wishes(tmp_path).put("running", "ann")
    home = wishes(tmp_path)
    run = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        put_launch(tmp_path, find_process(run.pid))
        with service(tmp_path, "pass") as supervised:
            wait_for(supervised, "flights", lambda seen: launches(seen)[0].is_alive)
            text = path.read_text()
            if change == "gone":
                path.unlink()
            else:
                path.write_text(
                    {
                        "broken": text.replace("sinks:", "sinks"),
                        "renamed": text.replace("name: flights", "name: trains"),
                        "moved": text.replace("flights-out", "elsewhere/out"),
                    }[change]
                )
            supervised._files_after = 0.0
            seen = wait_for(supervised, "flights", lambda seen: seen.registered.problem is not None)
            assert launches(seen)[0].is_alive
            assert seen.needs_person is not None
            assert supervised.wish("flights", "stopped", "bob") is not None
            newest = home.load()
            assert newest is not None
            assert (newest.wanted, newest.by) == ("stopped", "bob")
            run.communicate()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                supervised._files_after = 0.0
                names = {one.registered.name: one.registered for one in supervised.all()}
                if change == "broken" and names["flights"].last is None:
                    break
                if "flights" not in names or (change == "moved" and names["flights"].options is not None):
                    break
                time.sleep(0.02)
            else:
                raise AssertionError(f"still there: {names}")
    finally:
        run.kill()
        run.communicate()


def test_a_broken_file_takes_the_name_from_no_other(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines", "a").rename(tmp_path / "pipelines" / "z.yml")
    (tmp_path / "pipelines" / "a.yml").write_text("name: [")
    registry = Registry([tmp_path / "pipelines"], os.environ)
    registry.refresh()
    assert registry.get("a").usable.name == "a"
    assert registry.get("a.yml").problem is not None


def test_names_and_texts_that_utf8_cannot_hold_break_no_answer(tmp_path: Path) -> None:
    """Every list of all pipelines, page and metric names them: one file must not take all of that away."""
    folder = tmp_path / "pipelines"
    write_pipeline(folder, "a")
    with open(os.fsencode(folder) + b"/\xff.yml", "w") as file:
        file.write((folder / "a.yml").read_text().replace("name: a", "name: b"))
    (folder / "c.yml").write_text('name: "\\ud800"\n')
    registry = Registry([folder], os.environ)
    registry.refresh()
    texts = [text for one in registry.all() for text in (one.name, one.problem or "")]
    assert [one.encode() for one in texts]
    assert "is not UTF-8" in (registry.get("\\udcff").problem or "")
    assert [one.name for one in registry.all() if one.problem is None] == ["a"]


def test_a_stop_of_a_run_that_no_service_started_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pipeline(tmp_path / "pipelines")
    told: list[dict[str, Json]] = []

    def answer(options: PipelineOptions, request: dict[str, Json], environ: Mapping[str, str]) -> dict[str, Json]:
        told.append(request)
        return {"ok": True, "pid": os.getpid(), "state": "running", "epoch": 1, "generation": 1, "run": "a" * 16}

    monkeypatch.setattr("firnline.service.supervise.supervisor.ask", answer)
    with service(tmp_path, "pass", only_watches=True) as supervised:
        assert supervised.wish("flights", "paused", "ann") is None
        assert told[-1] == {"command": "pause"}
        wish = supervised.wish("flights", "stopped", "ann")
        assert wish is not None
        assert told[-1] == {"command": "stop", "wish": 1}
        assert supervised.wish("flights", "running", "ann") is not None
        assert told[-1] == {"command": "resume", "wish": 2}


def test_a_run_that_does_not_answer_calls_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline.errors import ControlError

    write_pipeline(tmp_path / "pipelines")
    mute = True

    def answer(*_: Any) -> dict[str, Json]:
        raise ControlError("the run did not answer") if mute else NotRunningError("no run")

    monkeypatch.setattr("firnline.service.glance.ask", answer)
    monkeypatch.setattr("firnline.service.supervise.supervisor.MUTE_SECONDS", 0.0)
    with service(tmp_path, "pass") as supervised:
        seen = wait_for(supervised, "flights", lambda seen: seen.needs_person is not None)
        assert "has not answered" in str(seen.needs_person)
        mute = False
        wait_for(supervised, "flights", lambda seen: seen.needs_person is None)
