"""The supervisor with real processes: starts, restarts, calls a person, and is killed without harm to a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firnline.clock import SystemClock
from firnline.names import launch_id
from firnline.service.glance import Glance, take_glance
from firnline.service.registry import Registered, Registry
from firnline.service.supervise.launches import Launch, Launches
from firnline.service.supervise.supervisor import HomeHangsError, Seen, Settings, Supervisor
from firnline.storage import LocalStorage, open_storage
from firnline.types import RandomIds

PATIENCE_SECONDS = 120.0


def write_pipeline(folder: Path, name: str = "flights") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.yml"
    path.write_text(
        f"name: {name}\nsources:\n  in: {{type: files, path: in}}\nsinks:\n  - {{type: delta, table: {name}-out}}\n"
    )
    (folder / "in").mkdir(exist_ok=True)
    return path


def supervisor(
    tmp_path: Path,
    script: str,
    *,
    max_running: int | None = None,
    only_watches: bool = False,
    starts_new: bool = False,
    hangs_seconds: float = 600.0,
) -> Supervisor:
    """Supervise the folder `pipelines`; a run is a Python script that gets the path of the pipeline file."""
    settings = Settings(
        str(tmp_path / "state"),
        max_running,
        only_watches,
        starts_new,
        run_command=(sys.executable, "-c", script),
        look_seconds=0.05,
        stagger_seconds=0.0,
        hangs_seconds=hangs_seconds,
    )
    return Supervisor(
        Registry([tmp_path / "pipelines"], os.environ), settings, SystemClock(), RandomIds(), dict(os.environ)
    )


def wait_for(supervised: Supervisor, name: str, is_so: Callable[[Seen], bool]) -> Seen:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        seen = supervised.get(name)
        if seen.glance is not None and is_so(seen):
            return seen
        time.sleep(0.02)
    raise AssertionError(f"not seen in time: {supervised.get(name)}")


def launches(seen: Seen) -> list[Launch]:
    return seen.glance.launches if seen.glance is not None else []


def ends(seen: Seen) -> list[int | None]:
    return [launch.code for launch in launches(seen) if launch.ended_at is not None]


def test_nothing_is_started_before_somebody_wants_it(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    with supervisor(tmp_path, "pass") as supervised:
        seen = wait_for(supervised, "flights", lambda seen: True)
        assert seen.glance is not None
        assert (seen.glance.state, seen.glance.launches) == ("new", [])


def test_a_run_that_fails_for_a_while_is_restarted_and_its_output_is_kept(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    tries = tmp_path / "tries"
    script = (
        f"import sys, pathlib; p = pathlib.Path({str(tries)!r}); n = len(p.read_text()) if p.exists() else 0; "
        "p.write_text('x' * (n + 1)); print('try', n, flush=True); sys.exit(3 if n < 2 else 0)"
    )
    with supervisor(tmp_path, script) as supervised:
        supervised.wish("flights", "running", "ann")
        seen = wait_for(supervised, "flights", lambda seen: len(ends(seen)) == 3)
        assert ends(seen) == [3, 3, 0]
        assert seen.needs_person is None
        assert seen.glance is not None
        logs = [supervised.log_path("flights", launch.id) for launch in seen.glance.launches]
        assert [Path(log).read_text() for log in logs if log] == ["try 0\n", "try 1\n", "try 2\n"]


def test_a_failure_that_stays_calls_a_person_until_somebody_asks_again(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    with supervisor(tmp_path, "import sys; sys.exit(1)") as supervised:
        supervised.wish("flights", "running", "ann")
        seen = wait_for(supervised, "flights", lambda seen: seen.needs_person is not None)
        assert seen.needs_person == "the run ended with exit code 1"
        assert ends(seen) == [1]
        supervised.wish("flights", "running", "bob")
        seen = wait_for(supervised, "flights", lambda seen: len(ends(seen)) == 2)
        assert [launch.by for launch in launches(seen)] == ["ann", "bob"]


def test_a_killed_run_is_restarted_by_a_new_service_too(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    with supervisor(tmp_path, "import time; time.sleep(600)") as supervised:
        supervised.wish("flights", "running", "ann")
        seen = wait_for(
            supervised,
            "flights",
            lambda seen: bool(launches(seen)) and launches(seen)[-1].run is not None,
        )
    assert seen.glance is not None
    first = seen.glance.launches[-1]
    assert first.run is not None
    os.kill(first.run.pid, 0)  # the end of the supervisor ends no run
    with supervisor(tmp_path, "import time; time.sleep(600)") as supervised:
        same = wait_for(supervised, "flights", lambda seen: True)
        assert same.glance is not None
        assert [launch.id for launch in same.glance.launches] == [first.id]
        assert same.glance.state == "starting"
        os.kill(first.run.pid, signal.SIGKILL)
        seen = wait_for(
            supervised,
            "flights",
            lambda seen: len(launches(seen)) == 2 and launches(seen)[-1].run is not None,
        )
        assert ends(seen) == [-signal.SIGKILL]
        assert seen.glance is not None
        again = seen.glance.launches[-1].run
        assert again is not None
        supervised.wish("flights", "stopped", "ann")
        os.kill(again.pid, signal.SIGKILL)
        wait_for(supervised, "flights", lambda seen: len(ends(seen)) == 2)
        time.sleep(0.5)
        assert len(supervised.get("flights").glance.launches) == 2  # type: ignore[union-attr]


def test_only_so_many_runs_at_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_pipeline(tmp_path / "pipelines", name)
    gate = tmp_path / "gate"
    script = (
        f"import time, pathlib\nend = time.monotonic() + 300\n"  # a test that fails leaves no process behind for long
        f"while not pathlib.Path({str(gate)!r}).exists() and time.monotonic() < end: time.sleep(0.05)"
    )
    with supervisor(tmp_path, script, max_running=1) as supervised:
        for name in ("a", "b", "c"):
            supervised.wish(name, "running", "ann")
        launched: list[Seen] = []
        for _ in range(20):
            time.sleep(0.1)
            launched = [one for one in supervised.all() if one.glance and one.glance.launches]
            assert len(launched) <= 1
        gate.touch()
        for name in ("a", "b", "c"):
            wait_for(supervised, name, lambda seen: ends(seen) == [0])


def test_a_service_that_only_watches_starts_nothing(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    with supervisor(tmp_path, "pass", only_watches=True) as supervised:
        supervised.wish("flights", "running", "ann")
        wait_for(supervised, "flights", lambda seen: seen.glance is not None and seen.glance.wish is not None)
        time.sleep(0.5)
        assert supervised.get("flights").glance.launches == []  # type: ignore[union-attr]


def test_files_are_registered_changed_and_forgotten(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipelines")
    (tmp_path / "pipelines" / "bad.yml").write_text("name: [")
    registry = Registry([tmp_path / "pipelines"], os.environ)
    registry.refresh()
    assert [(one.name, one.problem is None) for one in registry.all()] == [("bad", False), ("flights", True)]
    (tmp_path / "pipelines" / "copy.yml").write_text((tmp_path / "pipelines" / "flights.yml").read_text())
    (tmp_path / "pipelines" / "bad.yml").unlink()
    registry.refresh()
    assert [(one.name, one.options) for one in registry.all()] == [("flights", None)]
    assert "same name" in str(registry.get("flights").problem)


def test_new_pipelines_are_started_on_request_but_none_that_somebody_stopped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_pipeline(tmp_path / "pipelines", name)
    with supervisor(tmp_path, "pass") as supervised:
        supervised.wish("b", "stopped", "ann")
    with supervisor(tmp_path, "pass", starts_new=True) as supervised:
        seen = wait_for(supervised, "a", lambda seen: ends(seen) == [0])
        assert seen.glance is not None
        assert seen.glance.wish is not None
        assert seen.glance.wish.by == "serve --start"
        assert launches(wait_for(supervised, "b", lambda seen: True)) == []


def test_a_home_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = [f"hung{number}" for number in range(5)]  # more than look together
    for name in (*hung, "well"):
        write_pipeline(tmp_path / "pipelines", name)
    gate = threading.Event()

    def take(registered: Registered, *rest: Any) -> Glance:
        if registered.name in hung:
            gate.wait(PATIENCE_SECONDS)
        return take_glance(registered, *rest)

    monkeypatch.setattr("firnline.service.supervise.supervisor.take_glance", take)
    before = threading.active_count()
    with supervisor(tmp_path, "pass", hangs_seconds=0.3) as supervised:
        assert not supervised.is_ready
        supervised.wish("well", "running", "ann")
        wait_for(supervised, "well", lambda seen: ends(seen) == [0])
        for name in hung:
            seen = wait_for(supervised, name, lambda seen: seen.hangs)
            assert seen.glance is not None
            assert (seen.glance.state, seen.needs_person) == ("unreadable", "its home has not answered for 0 s")
            with pytest.raises(HomeHangsError):
                supervised.usable(name)
        assert supervised.is_ready
        assert threading.active_count() - before <= 2 + len(hung) + 1
        gate.set()
        for name in hung:
            wait_for(supervised, name, lambda seen: not seen.hangs and seen.glance is not None)
            assert supervised.usable(name).name == name


def test_records_of_launches_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pipeline(tmp_path / "pipelines")
    registered = Registry([path], os.environ)
    registered.refresh()
    options = registered.get("flights").usable
    launches = Launches(open_storage(options.home.root), "flights")
    for number in range(20):
        launch = launch_id(1, number + 1)
        launches.put(launch, "begun", {"at": "2026-11-16T08:00:00+00:00", "by": "ann"})
        launches.put(launch, "exit", {"at": "2026-11-16T08:01:00+00:00", "code": 0})
    reads: list[str] = []
    get = LocalStorage.get

    def count(self: LocalStorage, key: str) -> bytes:
        reads.append(key)
        return get(self, key)

    monkeypatch.setattr(LocalStorage, "get", count)
    known: dict[str, dict[str, Any]] = {}

    def look() -> tuple[int, Glance]:
        reads.clear()
        glance = take_glance(registered.get("flights"), str(tmp_path), SystemClock(), os.environ, known)
        return sum(1 for key in reads if "/launches/" in key), glance

    (first, glance), (second, again) = look(), look()
    assert (first, second) == (40, 0)
    assert again.launches == glance.launches
    assert len(glance.launches) == 20
    launches.put(launch_id(2, 1), "begun", {"at": "2026-11-16T09:00:00+00:00", "by": "bob"})
    launches.prune()
    third, last = look()
    assert third == 1
    assert [one.by for one in last.launches] == ["ann"] * 19 + ["bob"]
    assert len(known) == 39
