"""The control channel: it does what it is told, and nothing that is sent to it harms the run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.epoch import messages as m
from firnline.epoch.decide import EpochState, Phase, Settings, SinkState, Slot
from firnline.errors import ControlError, FencedError, NotRunningError
from firnline.history.edits.rollback import Rollback
from firnline.names import socket_name
from firnline.options import PipelineOptions
from firnline.run import control
from firnline.run import control as late_control
from firnline.run.control import ControlServer, LateControl, ask, check_folder, check_peer, folders
from firnline.run.observer import EpochFacts, Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.run.status import CheckpointWatch, RunStatus, is_still, status_of
from firnline.sinks.base import Head
from firnline.sources.files.source import FileSource
from firnline.testing.local import LocalEngine
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, table_ids

WAIT = 30.0  # for what should come at once


class FakeRun:
    """Notes what it is told."""

    run_id = "r1"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.watches: list[CheckpointWatch] = []

    def pause(self) -> bool:
        self.told.append("pause")
        return self.told.count("pause") == 1

    def resume(self) -> bool:
        self.told.append("resume")
        return True

    def stop(self) -> None:
        self.told.append("stop")

    def checkpoint(self) -> CheckpointWatch:
        self.watches.append(CheckpointWatch())
        return self.watches[-1]

    def status(self) -> RunStatus:
        return RunStatus("running", 7, 2, (8,))


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        yield {"XDG_RUNTIME_DIR": folder}


@pytest.fixture
def options(make_options: MakeOptions) -> PipelineOptions:
    made: PipelineOptions = make_options(poll_interval_secs=3600)
    return made


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


@pytest.fixture
def server(options: PipelineOptions, run: FakeRun, environ: dict[str, str]) -> Iterator[ControlServer]:
    with ControlServer(options, run, environ) as server:
        yield server


@contextmanager
def connected(server: ControlServer) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT)
        connection.connect(str(server.path))
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side ends it."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


# -- commands -----------------------------------------------------------------------------------------


def test_commands_reach_the_run(
    server: ControlServer, run: FakeRun, options: PipelineOptions, environ: dict[str, str]
) -> None:
    found = ask(options, {"command": "status"}, environ)
    assert found == {
        "ok": True, "pipeline": "demo", "run": "r1", "pid": os.getpid(), "state": "running", "epoch": 7,
        "generation": 2, "in_flight": [8],
    }  # fmt: skip
    assert [ask(options, {"command": "pause"}, environ)["changed"] for _ in range(2)] == [True, False]
    assert ask(options, {"command": "resume"}, environ)["changed"]
    ask(options, {"command": "stop"}, environ)
    assert run.told == ["pause", "pause", "resume", "stop"]


def test_a_checkpoint_is_asked_for_once_and_its_ticket_as_often_as_one_likes(
    server: ControlServer, run: FakeRun, options: PipelineOptions, environ: dict[str, str]
) -> None:
    ticket = ask(options, {"command": "checkpoint"}, environ)["ticket"]
    assert not ask(options, {"command": "checkpoint", "ticket": ticket}, environ)["done"]
    run.watches[0].finish(Head(exists=True, version=3, generation=2, epoch=8))
    found = ask(options, {"command": "checkpoint", "ticket": ticket}, environ)
    assert (found["done"], found["epoch"], found["committed"]) == (True, 8, True)
    assert len(run.watches) == 1
    with pytest.raises(ControlError, match="no such ticket"):
        ask(options, {"command": "checkpoint", "ticket": 99}, environ)


def test_tickets_do_not_pile_up(
    server: ControlServer, options: PipelineOptions, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_TICKETS", 4)
    for _ in range(20):
        server.answer(b'{"command": "checkpoint"}')
    assert len(server._tickets) <= 5
    assert server.answer(b'{"command": "checkpoint", "ticket": 20}')["ok"]
    assert not server.answer(b'{"command": "checkpoint", "ticket": 1}')["ok"]


# -- hostile input ------------------------------------------------------------------------------------


GARBAGE = [
    b"", b"\x00\xff\xfe", b"nonsense", b"[]", b"null", b"7", b'"pause"', b"{}", b'{"command": 7}',
    b'{"command": "rm"}', b'{"command": ["pause"]}', b'{"command": "checkpoint", "ticket": {}}',
    b'{"command": "checkpoint", "ticket": [1]}', b"[" * 4000, b'{"command": "pause"', b"GET / HTTP/1.1\r",
]  # fmt: skip


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_a_malformed_request_gets_an_error_and_nothing_else(server: ControlServer, run: FakeRun, line: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(line + b"\n" + b'{"command": "status"}\n')
        connection.shutdown(socket.SHUT_WR)
        first, second = (json.loads(text) for text in read_all(connection).splitlines())
    assert (first["ok"], second["ok"]) == (False, True)
    assert run.told == []


def test_random_bytes_never_raise(server: ControlServer, run: FakeRun) -> None:
    dice = random.Random(7)
    good = b'{"command": "checkpoint", "ticket": 1}'
    for _ in range(2000):
        line = bytearray(good if dice.random() < 0.5 else dice.randbytes(dice.randint(0, 80)))
        if line:
            line[dice.randrange(len(line))] = dice.randrange(256)
        assert json.loads(json.dumps(server.answer(bytes(line))))["ok"] in (True, False)
    assert run.told == []


def test_a_line_that_never_ends_is_cut_off(server: ControlServer, run: FakeRun) -> None:
    with connected(server) as connection:
        try:
            for _ in range(100):
                connection.sendall(b"x" * 65536)
        except ConnectionError:
            pass
        else:
            pytest.fail("all of it was taken in")
    with connected(server) as connection:
        connection.sendall(b"y" * (control.MAX_LINE + 1))
        assert b"at most" in read_all(connection)
    with connected(server) as connection:
        connection.sendall(b'{"command": "status"}\n')
        assert json.loads(connection.recv(65536))["ok"]


def test_slow_clients_hold_up_nobody_and_are_dropped(
    server: ControlServer, options: PipelineOptions, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_SECONDS", 0.3)
    with connected(server) as silent, connected(server) as half:
        half.sendall(b'{"comm')
        assert ask(options, {"command": "status"}, environ)["ok"]
        assert read_all(silent) == b""
        assert read_all(half) == b""


def test_a_client_that_does_not_read_is_dropped(
    server: ControlServer, options: PipelineOptions, environ: dict[str, str]
) -> None:
    with connected(server) as deaf:
        deaf.settimeout(0.5)
        with pytest.raises(OSError, match=r"timed out|reset|Broken pipe"):  # noqa: PT012
            while True:
                deaf.sendall(b'{"command": "status"}\n' * 100)
        assert ask(options, {"command": "status"}, environ)["ok"]


def has_room(options: PipelineOptions, environ: dict[str, str]) -> bool:
    try:
        return bool(ask(options, {"command": "status"}, environ)["ok"])
    except ControlError:
        return False


def test_too_many_clients_are_refused_and_there_is_room_again_later(
    server: ControlServer, options: PipelineOptions, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_SECONDS", 0.5)
    many = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(control.MAX_CLIENTS + 4)]
    for connection in many:
        connection.settimeout(WAIT)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # no room even to wait, or refused already
            connection.connect(str(server.path))
            connection.sendall(b"{")
    for connection in many:
        with contextlib.suppress(OSError):
            assert read_all(connection) == b""
        connection.close()
    wait_until(lambda: has_room(options, environ))


def test_a_bug_in_a_command_is_answered(server: ControlServer, run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "status", lambda: 1 / 0)
    assert server.answer(b'{"command": "status"}') == {"ok": False, "error": "ZeroDivisionError: division by zero"}


# -- the socket ---------------------------------------------------------------------------------------


def test_the_socket_is_for_its_user_alone_and_gone_at_the_end(
    options: PipelineOptions, run: FakeRun, environ: dict[str, str]
) -> None:
    with ControlServer(options, run, environ) as server:
        assert server.path.stat().st_mode & 0o777 == 0o600
        assert server.path.parent.stat().st_mode & 0o777 == 0o700
        assert len(str(server.path)) <= control.MAX_PATH
    assert not server.path.exists()
    with pytest.raises(NotRunningError, match="no run of pipeline 'demo' on this machine"):
        ask(options, {"command": "status"}, environ)


def test_a_dead_runs_socket_is_replaced(options: PipelineOptions, run: FakeRun, environ: dict[str, str]) -> None:
    path = folders(environ)[0] / socket_name(options.name, options.deciding.location)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunningError):
        ask(options, {"command": "status"}, environ)
    with ControlServer(options, run, environ):
        assert ask(options, {"command": "status"}, environ)["ok"]


def test_a_living_runs_socket_is_not_replaced(
    server: ControlServer, options: PipelineOptions, environ: dict[str, str]
) -> None:
    with pytest.raises(ControlError, match="another run"), ControlServer(options, FakeRun(), environ):
        pytest.fail("two channels")
    assert ask(options, {"command": "status"}, environ)["ok"]


def test_a_refused_channel_leaves_nothing_open(
    server: ControlServer, options: PipelineOptions, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> int:
        return len(os.listdir("/dev/fd"))

    before = opened()
    refused = [ControlServer(options, FakeRun(), environ) for _ in range(5)]
    for one in refused:
        with pytest.raises(ControlError, match="another run"):
            one.__enter__()
    wait_until(lambda: opened() == before)  # the server may still be closing its end
    monkeypatch.setattr(ControlServer, "_listen", lambda _: os.stat("/nowhere"))
    broken = ControlServer(replace(options, name="other"), FakeRun(), environ)
    with pytest.raises(FileNotFoundError):
        broken.__enter__()
    wait_until(lambda: opened() == before)


def test_a_channel_is_had_when_the_run_that_has_it_is_gone(
    options: PipelineOptions, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_control, "RETRY_SECONDS", 0.01)
    first, second = FakeRun(), FakeRun()
    second.run_id = "r2"
    had = threading.Event()
    late = ControlServer(options, second, environ)
    with contextlib.ExitStack() as stack:
        with ControlServer(options, first, environ):
            with pytest.raises(ControlError, match="another run"):
                late.__enter__()
            stack.enter_context(LateControl(late, had.set))
            assert ask(options, {"command": "status"}, environ)["run"] == "r1"
            assert not had.is_set()
        assert had.wait(WAIT)
        assert ask(options, {"command": "status"}, environ)["run"] == "r2"
    with pytest.raises(NotRunningError):
        ask(options, {"command": "status"}, environ)
    with ControlServer(options, first, environ) as server, LateControl(late, had.clear):
        assert server.path.exists()
    assert had.is_set()  # it was not had any more


@pytest.mark.parametrize(("number", "rests"), [(errno.EMFILE, 1), (errno.ENFILE, 1), (errno.EAGAIN, 0)])
def test_a_machine_without_descriptors_left_is_not_asked_without_end(
    options: PipelineOptions, run: FakeRun, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    number: int, rests: int,
) -> None:  # fmt: skip
    class Full:
        def accept(self) -> None:
            raise OSError(number, os.strerror(number))

    rested: list[float] = []
    server = ControlServer(options, run, environ)
    server._listener = Full()  # type: ignore[assignment]
    monkeypatch.setattr("time.sleep", rested.append)
    assert server._accept(0) is None
    assert rested == [control.REST_SECONDS] * rests


def test_pipelines_do_not_share_a_socket(make_options: MakeOptions) -> None:
    made = [make_options(), make_options(name="other"), make_options(table="/elsewhere")]
    assert len({socket_name(options.name, options.deciding.location) for options in made}) == 3


def test_a_service_without_a_login_is_found_in_the_temporary_folder(
    options: PipelineOptions, run: FakeRun, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with ControlServer(options, run, {}) as server:
            assert server.path.parent == Path(folder) / f"firnline-{os.getuid()}"
            assert ask(options, {"command": "status"}, environ)["ok"]


def test_a_folder_that_is_too_deep_for_a_socket_is_passed_over(
    options: PipelineOptions, run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with ControlServer(options, run, {"XDG_RUNTIME_DIR": str(deep)}) as server:
            assert server.path.is_relative_to(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ControlError, match="too long"):
        ControlServer(options, run, {"XDG_RUNTIME_DIR": str(deep)})


def test_a_folder_that_is_not_ours_alone_is_refused(
    options: PipelineOptions, run: FakeRun, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders(environ)[0]
    folder.mkdir(mode=0o700)
    check_folder(folder)
    folder.chmod(0o750)
    with pytest.raises(ControlError, match="open to others"):
        ControlServer(options, run, environ)
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ControlError, match="another user"):
            ControlServer(options, run, environ)
    folder.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ControlError, match="no folder of its own"):
        ControlServer(options, run, environ)
    assert list((tmp_path / "real").iterdir()) == []
    with pytest.raises(NotRunningError):  # nor does a client look there
        ask(options, {"command": "status"}, environ)


def test_a_client_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        def __init__(self, user: int) -> None:
            self.user = user

        def getsockopt(self, *_: Any) -> bytes:
            return struct.pack("3i", 1, self.user, 1)

    monkeypatch.setattr("sys.platform", "linux")
    check_peer(Peer(os.geteuid()))  # type: ignore[arg-type]
    check_peer(Peer(0))  # type: ignore[arg-type]
    with pytest.raises(ControlError, match="user 4711 may not"):
        check_peer(Peer(4711))  # type: ignore[arg-type]


def test_a_refused_client_gets_nothing(server: ControlServer, run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: socket.socket) -> None:
        raise ControlError("not you")

    monkeypatch.setattr(control, "check_peer", refuse)
    with connected(server) as connection:
        assert read_all(connection) == b""
    assert run.told == []


# -- what a run does with it --------------------------------------------------------------------------


class Watcher(Observer):
    """Lets a test wait for what a run tells."""

    def __init__(self) -> None:
        self.heard = threading.Condition()
        self.epochs: list[int] = []
        self.pauses: list[bool] = []
        self.idles = 0

    def committed(self, facts: EpochFacts) -> None:
        with self.heard:
            self.epochs.append(facts.epoch)
            self.heard.notify_all()

    def paused(self, paused: bool) -> None:
        with self.heard:
            self.pauses.append(paused)
            self.heard.notify_all()

    def idle(self) -> None:
        with self.heard:
            self.idles += 1
            self.heard.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self.heard:
            assert self.heard.wait_for(until, WAIT)


class Running:
    """A run in a thread of this process."""

    def __init__(self, options: PipelineOptions) -> None:
        self.told = Watcher()
        self.runner = Runner(open_pipeline(options), LocalEngine(1), self.told)
        self.results: list[RunResult] = []
        self._thread = threading.Thread(target=lambda: self.results.append(self.runner.run()))

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.stop()
        self.join()

    def join(self) -> RunResult:
        self._thread.join(WAIT)
        return self.results[0]

    def checkpoint(self) -> dict[str, Any]:
        watch = self.runner.checkpoint()
        assert watch.done.wait(WAIT)
        return watch.answer

    def wait_until(self, state: str) -> RunStatus:
        """Asks until it is so; states change without a word to observers."""
        for _ in range(3000):
            found = self.runner.status()
            if found.state == state:
                return found
            threading.Event().wait(0.01)
        raise AssertionError(self.runner.status())


@pytest.fixture
def running(options: PipelineOptions, sample: SampleInput) -> Iterator[Running]:
    """A run that has read one file and would look again in an hour."""
    sample.add("a1.json", 4)
    with Running(options) as running:
        running.told.wait(lambda: running.told.idles > 0 and running.told.epochs == [1])
        yield running


def test_a_checkpoint_does_not_wait_for_the_poll(
    running: Running, options: PipelineOptions, sample: SampleInput
) -> None:
    sample.add("b1.json", 4)
    found = running.checkpoint()
    assert (found["epoch"], found["committed"], found["generation"]) == (2, True, 1)
    assert table_ids(options.sinks[0].location) == sample.ids
    held = open_pipeline(options).load()
    assert (found["id"], found["epoch"]) == (held.attempt, held.epoch)


def test_a_checkpoint_without_input_says_so_and_timers_do_not_pile_up(running: Running) -> None:
    for _ in range(5):
        assert running.checkpoint()["committed"] is False
    assert len(running.runner._timers._due) == 1
    assert running.told.epochs == [1]


def test_a_checkpoint_that_is_asked_for_while_a_plan_is_under_way_makes_another(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that lists already does not count; the next one must not wait for an hour."""
    listing, go_on = threading.Event(), threading.Event()
    original = FileSource.plan

    def slowly(self: FileSource, *arguments: Any) -> Any:
        found = original(self, *arguments)
        if found is None and not listing.is_set():
            listing.set()
            go_on.wait(WAIT)
        return found

    monkeypatch.setattr(FileSource, "plan", slowly)
    sample.add("a1.json", 4)
    with Running(options) as running:
        assert listing.wait(WAIT)
        sample.add("b1.json", 4)
        watch = running.runner.checkpoint()
        running.runner.status()
        threading.Timer(0.2, go_on.set).start()
        assert watch.done.wait(WAIT)
        assert (watch.answer["epoch"], watch.answer["committed"]) == (2, True)


def test_an_idle_run_notices_that_a_rollback_took_over(make_options: MakeOptions, sample: SampleInput) -> None:
    options = make_options(poll_interval_secs=0.02, max_files=1)
    sample.add("a1.json", 4)
    sample.add("a2.json", 4)
    with Running(options) as running:
        running.told.wait(lambda: running.told.epochs == [1, 2] and running.told.idles > 1)
        Rollback(open_pipeline(options), 1).perform("test")
        assert running.join().exit_code == 5
    assert run_once(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids


def test_several_who_ask_at_once_all_get_an_answer(running: Running, sample: SampleInput) -> None:
    sample.add("b1.json", 4)
    watches = [running.runner.checkpoint() for _ in range(5)]
    assert all(watch.done.wait(WAIT) for watch in watches)
    assert {watch.answer["epoch"] for watch in watches} == {2}


def test_a_paused_run_plans_nothing_until_it_is_resumed(
    running: Running, options: PipelineOptions, sample: SampleInput
) -> None:
    assert running.runner.pause()
    assert not running.runner.pause()
    assert running.wait_until("paused") == RunStatus("paused", 1, 1, ())
    running.told.wait(lambda: running.told.pauses == [True])
    sample.add("b1.json", 4)
    assert running.checkpoint() == {**running.checkpoint(), "epoch": 1, "committed": False}
    assert running.told.epochs == [1]
    watch = running.runner.checkpoint()
    assert watch.done.wait(WAIT)
    assert running.runner.resume()
    assert not running.runner.resume()
    running.told.wait(lambda: running.told.epochs == [1, 2])
    assert running.told.pauses == [True, False]
    assert table_ids(options.sinks[0].location) == sample.ids


def test_a_pause_lets_what_is_in_flight_complete(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.add("a1.json", 4)
    begun, go_on = threading.Event(), threading.Event()
    work = LocalEngine.run

    def hold(self: LocalEngine, *arguments: Any) -> list[dict[str, Any]]:
        begun.set()
        assert go_on.wait(WAIT)
        return work(self, *arguments)

    monkeypatch.setattr(LocalEngine, "run", hold)
    with Running(options) as running:
        assert begun.wait(WAIT)
        assert running.runner.pause()
        assert running.runner.status() == RunStatus("pausing", 0, 1, (1,))
        go_on.set()
        assert running.wait_until("paused").epoch == 1
        assert table_ids(options.sinks[0].location) == sample.ids


def test_a_stop_ends_a_paused_run_and_a_stopping_run_is_not_paused(running: Running) -> None:
    running.runner.pause()
    running.wait_until("paused")
    running.runner.stop()
    assert running.join().exit_code == 0
    assert running.runner.status().state == "ended"
    assert running.runner.stop_requested
    running.runner.resume()
    assert not running.runner.pause()


def test_a_lost_lease_ends_the_run_fenced(running: Running) -> None:
    running.runner.fence(FencedError("run x took the lease over"))
    result = running.join()
    assert result.exit_code == 5
    assert result.error is not None
    assert result.error.message == "run x took the lease over"


# -- decisions ----------------------------------------------------------------------------------------

BASE = EpochState(
    Settings(), (SinkState("delta", epoch=3),), Phase.RUNNING, decided=3, committed=3, tip="t3", settled=3, recorded=3
)
HELD = Head(exists=True, version=5, generation=2, epoch=3)


def changed(state: EpochState, **changes: Any) -> EpochState:
    return replace(state, **changes)


def test_still_means_that_nothing_is_in_flight() -> None:
    assert is_still(BASE, waiting=False)
    moving: list[dict[str, Any]] = [
        {"phase": Phase.READING}, {"phase": Phase.CLAIMING}, {"recording": True}, {"acknowledging": True},
        {"planning": (3, "t3")}, {"slots": (Slot(4, "t4", "t3"),)}, {"recorded": 2}, {"decided": 4, "committed": 4},
        {"sinks": (SinkState("delta", epoch=3, busy=True),)},
    ]  # fmt: skip
    assert not any(is_still(changed(BASE, **changes), waiting=False) for changes in moving)
    assert is_still(changed(BASE, planning=(3, "t3")), waiting=True)


def test_words_for_where_a_run_stands() -> None:
    def word(paused: bool = False, **changes: Any) -> str:
        return status_of(changed(BASE, **changes), HELD, paused=paused, waiting=False).state

    assert word(phase=Phase.READING) == "starting"
    assert word() == "running"
    assert word(paused=True) == "paused"
    assert word(paused=True, recording=True) == "pausing"
    assert word(paused=True, stopping=True) == "stopping"
    assert word(phase=Phase.STOPPED) == "ended"


def watch_on(state: EpochState, *, waiting: bool = False) -> CheckpointWatch:
    watch = CheckpointWatch()
    watch.begin(state, waiting=waiting)
    return watch


def test_a_plan_that_was_under_way_before_the_request_does_not_count() -> None:
    planning = changed(BASE, planning=(3, "t3"))
    watch = watch_on(planning)
    watch.follow(planning, m.NothingToPlan(), BASE)
    assert not watch.is_complete(BASE, still=False)
    watch.plan_begins()
    watch.follow(planning, m.NothingToPlan(), BASE)
    assert watch.is_complete(BASE, still=False)
    waiting = watch_on(planning, waiting=True)
    waiting.follow(planning, m.NothingToPlan(), BASE)
    assert waiting.is_complete(BASE, still=False)


def test_an_epoch_is_waited_for_until_it_is_recorded() -> None:
    planning = changed(BASE, planning=(3, "t3"))
    flying = changed(BASE, slots=(Slot(4, "t4", "t3"),))
    decided = changed(BASE, decided=4, committed=4, tip="t4")
    watch = watch_on(BASE)
    watch.plan_begins()
    watch.follow(planning, m.Planned(4, "t4", "t3"), flying)
    assert not watch.is_complete(flying, still=False)
    watch.follow(flying, m.Committed("delta", 4, "t4"), decided)
    assert not watch.is_complete(decided, still=False)
    assert watch.is_complete(changed(decided, recorded=4, settled=4), still=False)


@pytest.mark.parametrize("found", ["planned", "nothing"])
def test_what_is_dropped_is_looked_for_again(found: str) -> None:
    flying = changed(BASE, slots=(Slot(4, "t4", "t3"),))
    watch = watch_on(BASE)
    watch.plan_begins()
    if found == "planned":
        watch.follow(changed(BASE, planning=(3, "t3")), m.Planned(4, "t4", "t3"), flying)
    else:
        watch.follow(changed(flying, planning=(4, "t4")), m.NothingToPlan(), flying)
    watch.follow(flying, m.EpochLost(4, "t4"), BASE)
    assert not watch.is_complete(BASE, still=False)
    taken = changed(BASE, decided=5, committed=5, tip="x5", recorded=5, settled=5)  # another run's, found by the claim
    watch.follow(flying, m.Claimed(5, "x5"), taken)
    assert not watch.is_complete(taken, still=False)
    watch.plan_begins()
    watch.follow(changed(taken, planning=(5, "x5")), m.NothingToPlan(), taken)
    assert watch.is_complete(taken, still=False)


@pytest.mark.parametrize("event", [m.Planned(4, "late", "t2"), m.NothingToPlan(), m.Failed(True, 3)])
def test_an_answer_that_counts_no_more_begins_anew(event: m.Event) -> None:
    stale = changed(BASE, planning=(2, "t2"))
    watch = watch_on(BASE)
    watch.plan_begins()
    watch.follow(stale, event, BASE)
    assert not watch.is_complete(BASE, still=False)
    watch.plan_begins()
    watch.follow(changed(BASE, planning=(3, "t3")), m.NothingToPlan(), BASE)
    assert watch.is_complete(BASE, still=False)


def test_a_paused_run_that_stands_still_answers_at_once() -> None:
    assert watch_on(BASE).is_complete(BASE, still=True)


def test_a_word_that_comes_late_does_not_undo_a_later_wish(server: ControlServer, run: FakeRun) -> None:
    def tell(**request: object) -> bool:
        return bool(server.answer(json.dumps(request).encode()).get("changed"))

    assert tell(command="pause", wish=2)
    assert tell(command="resume", wish=3)
    before = list(run.told)
    server.answer(json.dumps({"command": "stop", "wish": 2}).encode())
    assert not tell(command="pause", wish=3)
    assert run.told == before
    server.answer(json.dumps({"command": "stop", "wish": 4}).encode())
    assert run.told == [*before, "stop"]
