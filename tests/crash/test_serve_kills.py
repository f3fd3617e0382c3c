"""`firnline serve` killed at every fault point of every action, over HTTP, while its pipeline runs.

After each kill a new service starts over the same folder. The run goes on; the action was done wholly or not at all;
confirming it again gives the first receipt; `/unfinished` names the command that ends what is open, and that command
ends it; the audit trail says what happened.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from firnline.pipeline import Pipeline
from firnline.run.open_pipeline import open_pipeline
from tests.support.kills import PROOF, Most, choose, moments, spread, steps
from tests.support.processes import KILLED, wait_until
from tests.support.receiver import Receiver, Reply, Request, running_receiver
from tests.support.serve_process import BESIDE, KilledError, ServeProcess, ending_runs, fault_of, numbered
from tests.support.service import rows, run_epochs, write_pipeline

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]

MOST = None if PROOF else 3  # kills of each action
REFUSED = 1_000_000  # rows from here on are refused by the receiver, while it refuses
SPEC = """\
name: flights
sources:
  in: {type: files, path: in, poll_interval_secs: 1}
sinks:
  - {type: delta, table: out}
"""
HOOK = '  - {{type: http, name: hook, url: "{url}", on_bad_row: dead_letter, required: false}}\n'


class World:
    """A folder with a pipeline that runs, and one service after another that watches it."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        self.folder = folder
        self.receiver = receiver
        self.refusing = False
        self.doubled: set[int] = set()  # rows of files that are read twice
        self.numbers = itertools.count(100)
        self.with_hook(has_hook=True)
        receiver.behaviour = self._answer
        run_epochs(folder, 3)
        self.serve = ServeProcess(folder)

    def _answer(self, request: Request, _number: int) -> Reply | None:
        refused = self.refusing and any(int(row["a"]) >= REFUSED for row in request.rows)
        return Reply(422, text="refused") if refused else None

    def with_hook(self, *, has_hook: bool) -> None:
        write_pipeline(self.folder, SPEC + (HOOK.format(url=self.receiver.url) if has_hook else ""))

    def restart(self, fault: str = "") -> None:
        """Kill the service, and start another one."""
        self.serve.kill()
        self.serve = ServeProcess(self.folder, fault)

    @property
    def state(self) -> str:
        return str(self.serve.get("")["state"])

    def want(self, verb: str, *states: str) -> None:
        assert self.serve.post(f"/{verb}", role="operate").status == 202
        wait_until(lambda: self.state in states)

    def ensure_running(self) -> None:
        if self.state != "running":
            self.want("start", "running")

    @property
    def pid(self) -> int:
        return int(self.serve.get("")["pid"] or 0)

    def put(self, name: str, text: str | bytes) -> str:
        """Add a file of input, whole at once; returns its path."""
        hidden, path = self.folder / f".{name}", self.folder / "in" / name
        hidden.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.rename(hidden, path)
        return str(path)

    def add_row(self, number: int | None = None) -> int:
        """Add a row, and wait until the table has it."""
        number = next(self.numbers) if number is None else number
        self.put(f"n{number}.ndjson", f'{{"a": {number}}}\n')
        wait_until(lambda: number in rows(self.folder))
        return number

    def check_rows(self, where: str) -> None:
        """Every row once, but those of files that were read twice."""
        again = {number for number, count in Counter(rows(self.folder)).items() if count > 1}
        assert again <= self.doubled, where

    def trail(self, run: str) -> list[dict[str, Any]]:
        return [row for row in self.serve.get("/audit?limit=200")["audit"] if row["run"] == run]

    def unfinished(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.serve.get("/unfinished")["unfinished"]
        return found

    def files(self, status: str) -> set[str]:
        return {str(row["path"]) for row in self.serve.get(f"/files?status={status}&limit=500")["files"]}

    def edits_by(self, run: str) -> int:
        pipeline = open_pipeline(Pipeline.load(self.folder / "firnline.yml").options)
        return sum(1 for entry in pipeline.entries(pipeline.load().entry) if entry.checkpoint.run == run)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_receiver() as receiver, ending_runs(tmp_path):
        made = World(tmp_path, receiver)
        yield made
        made.serve.close()


def find_kills(world: World, threads: tuple[str, ...] = ()) -> list[str]:
    """The faults that kill the service at each moment of what it has just done unharmed."""
    trace = [one for one in world.serve.trace() if one[0] not in BESIDE or one[0] in threads]
    reached = Counter(point for _, point in trace)
    most: Most = None if PROOF else "sample"
    wanted = {(point, nth) for point, calls in steps(reached, helpers=False) for nth in spread(calls, most, point)}
    chosen = choose(wanted, moments(numbered(trace), helpers=False), most)
    places = {call: at for at, call in enumerate(_calls(trace))}
    chosen.sort(key=lambda call: places[call])
    if MOST is not None and len(chosen) > MOST:
        chosen = [chosen[step * (len(chosen) - 1) // (MOST - 1)] for step in range(MOST)]
    return [fault_of(trace, point, nth) for point, nth in chosen]


def _calls(trace: list[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for _, point in trace:
        counts[point] += 1
        yield point, counts[point]


# -- what operators want -------------------------------------------------------------------------------

WISHES: dict[str, tuple[str, str, str]] = {  # before; wanted and state after
    "start": ("stop", "running", "running"),
    "stop": ("start", "stopped", "stopped"),
    "pause": ("start", "paused", "paused"),
    "resume": ("pause", "running", "running"),
}
STATES = {"stop": ("stopped", "done"), "start": ("running",), "pause": ("paused",)}


@pytest.mark.parametrize("verb", WISHES)
def test_a_kill_while_an_operator_wants_something(verb: str, world: World) -> None:
    before, wanted, state = WISHES[verb]
    world.ensure_running()

    def settle() -> None:
        wait_until(lambda: world.state in STATES.get(verb, (state,)))

    def arrange() -> tuple[str, int]:
        world.want(before, *STATES[before])
        return str(world.serve.get("")["wanted"]), world.pid

    arrange()
    world.restart()
    assert world.serve.post(f"/{verb}", role="operate").status == 202
    settle()
    faults = find_kills(world, ("firnline look",))
    assert faults
    for fault in faults:
        was, pid = arrange()
        world.restart(fault)
        with contextlib.suppress(KilledError):  # a launch follows the answer
            assert world.serve.post(f"/{verb}", role="operate").status == 202
        assert world.serve.wait() == KILLED, fault
        world.serve = ServeProcess(world.folder)
        found = world.serve.get("")
        assert found["wanted"] in (was, wanted), (fault, found)
        if found["wanted"] == wanted:
            assert found["wanted_by"] == "operate", (fault, found)
            settle()  # without anybody asking again
        elif before != "stop":
            assert world.pid == pid, fault
        assert world.serve.post(f"/{verb}", role="operate").status == 202
        settle()
        if verb in ("pause", "resume"):
            assert world.pid == pid, fault  # the run went on
        launches = world.serve.get("/runs")["launches"]
        alive = [one["launch"] for one in launches if one["alive"]]
        assert len(alive) == (0 if verb == "stop" else 1), (fault, launches)
    world.want("start", "running")
    world.add_row()
    world.check_rows("at the end")


def test_a_kill_while_a_checkpoint_is_asked_for(world: World) -> None:
    world.ensure_running()
    for _ in range(2):
        pid = world.pid
        assert world.serve.post("/checkpoint", role="operate").status == 202
        world.restart()  # with the ticket open
        wait_until(lambda: world.state == "running")
        assert world.pid == pid
        answer = world.serve.post("/checkpoint", role="operate")
        assert answer.status == 202
        asked = f"/checkpoint/{answer.body['ticket']}"
        wait_until(lambda asked=asked: bool(world.serve.get(asked)["done"]))  # type: ignore[misc]
        assert world.unfinished() == []
        world.add_row()
    world.check_rows("at the end")


# -- actions with a plan -------------------------------------------------------------------------------


@dataclass
class Case:
    """An action with a plan: arranges what it acts on, and compares what it has done once and only once."""

    arrange: Callable[[World], tuple[str, dict[str, Any], Any]]
    check: Callable[[World, Any, str], None]
    edits: bool = False
    ends_stopped: bool = False
    needs_edit: bool = False  # no run starts before it is done


def _roll_back(world: World) -> tuple[str, dict[str, Any], Any]:
    epoch = int(world.serve.get("")["epoch"])
    return "/rollback", {"to": epoch, "leave": ["hook"], "take_over": True}, world.add_row()


def _is_rolled_back(world: World, number: Any, where: str) -> None:
    assert number not in rows(world.folder), where
    world.want("start", "running")
    wait_until(lambda: number in rows(world.folder))  # its input is read again


def _bad_file(world: World) -> str:
    number = next(world.numbers)
    path = world.put(f"n{number}.ndjson.gz", b"no gzip")
    wait_until(lambda: path in world.files("set_aside"))
    return path


def _retry_file(world: World) -> tuple[str, dict[str, Any], Any]:
    path = _bad_file(world)
    number = next(world.numbers)
    Path(path).write_bytes(gzip.compress(f'{{"a": {number}}}\n'.encode()))
    return "/files/retry", {"path": path, "changed": True}, number


def _is_read(world: World, number: Any, where: str) -> None:
    wait_until(lambda: number in rows(world.folder))


def _drop_file(world: World) -> tuple[str, dict[str, Any], Any]:
    path = _bad_file(world)
    return "/files/drop", {"paths": [path]}, path


def _is_dropped(world: World, path: Any, where: str) -> None:
    wait_until(lambda: path in world.files("dropped"))


def _reread_file(world: World) -> tuple[str, dict[str, Any], Any]:
    number = world.add_row()
    world.doubled.add(number)
    return "/files/reread", {"path": str(world.folder / "in" / f"n{number}.ndjson")}, number


def _is_doubled(world: World, number: Any, where: str) -> None:
    wait_until(lambda: rows(world.folder).count(number) == 2)
    world.add_row()
    assert rows(world.folder).count(number) == 2, where


def _bad_records(world: World) -> str:
    number = next(world.numbers)
    path = world.put(f"n{number}.ndjson", "not json\n")
    wait_until(lambda: any(path == row["file"] for row in _records(world)))
    return path


def _records(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.serve.get("/quarantine?limit=500")["quarantine"]
    return found


def _replay(world: World) -> tuple[str, dict[str, Any], Any]:
    path = _bad_records(world)
    return "/quarantine/replay", {"file": path}, path


def _is_replayed(world: World, path: Any, where: str) -> None:
    """It is as bad as before: in the quarantine once, by a later epoch."""
    wait_until(lambda: sum(1 for row in _records(world) if row["file"] == path) == 1)


def _discard(world: World) -> tuple[str, dict[str, Any], Any]:
    path = _bad_records(world)
    return "/quarantine/drop", {"file": path}, path


def _is_discarded(world: World, path: Any, where: str) -> None:
    plan = world.serve.post("/quarantine/drop", {"file": path})
    wait_until(lambda: not world.serve.post("/quarantine/drop", {"file": path}).body["plan"]["left_out"])
    assert plan.body["plan"]["records"] == 0, where


def _letters(world: World) -> int:
    world.refusing = True
    number = world.add_row(REFUSED + next(world.numbers))
    wait_until(lambda: bool(world.serve.get("/dead-letters")["dead_letters"]))
    world.refusing = False
    return number


def _retry_letters(world: World) -> tuple[str, dict[str, Any], Any]:
    return "/dead-letters/retry", {"take_over": True}, _letters(world)


def _is_delivered(world: World, number: Any, where: str) -> None:
    wait_until(lambda: any(row["a"] == number for row in world.receiver.rows))
    assert sum(1 for row in world.receiver.rows if row["a"] == number) == 1, where
    assert world.serve.get("/dead-letters")["dead_letters"] == [], where


def _drop_letters(world: World) -> tuple[str, dict[str, Any], Any]:
    return "/dead-letters/drop", {"take_over": True}, _letters(world)


def _is_given_up(world: World, number: Any, where: str) -> None:
    world.add_row()
    assert world.serve.get("/dead-letters")["dead_letters"] == [], where
    assert not any(row["a"] == number for row in world.receiver.rows), where


def _resync(world: World) -> tuple[str, dict[str, Any], Any]:
    return "/sinks/hook/resync", {"take_over": True}, (world.add_row(), len(world.receiver.taken))


def _is_copied(world: World, arranged: Any, where: str) -> None:
    number, before = arranged
    wait_until(lambda: any(row["a"] == number for request in world.receiver.taken[before:] for row in request.rows))


def _resume_sink(world: World) -> tuple[str, dict[str, Any], Any]:
    return "/sinks/hook/resume", {"accept_gap": True, "take_over": True}, None


def _goes_on(world: World, _: Any, where: str) -> None:
    number = world.add_row()
    wait_until(lambda: any(row["a"] == number for row in world.receiver.rows))


def _forget(world: World) -> tuple[str, dict[str, Any], Any]:
    _goes_on(world, None, "")  # an epoch knows the sink
    world.with_hook(has_hook=False)
    world.restart()  # reads the file
    return "/sinks/hook/forget", {"take_over": True}, None


def _is_forgotten(world: World, _: Any, where: str) -> None:
    world.add_row()
    assert "hook" not in [row["name"] for row in world.serve.get("/sinks")["sinks"]], where
    world.want("stop", *STATES["stop"])
    world.with_hook(has_hook=True)
    world.restart()


def _dispose(world: World) -> tuple[str, dict[str, Any], Any]:
    job = world.serve.post("/savepoints", {}).body["job"]
    wait_until(lambda: world.serve.get(f"/jobs/{job}")["ended_at"] is not None)
    savepoint = world.serve.get(f"/jobs/{job}")["result"]["id"]
    return f"/savepoints/{savepoint}/dispose", {}, savepoint


def _is_gone(world: World, savepoint: Any, where: str) -> None:
    assert savepoint not in [one["id"] for one in world.serve.get("/savepoints")["savepoints"]], where


CASES = {
    "rollback": Case(_roll_back, _is_rolled_back, edits=True, ends_stopped=True),
    "files-retry": Case(_retry_file, _is_read),
    "files-drop": Case(_drop_file, _is_dropped),
    "files-reread": Case(_reread_file, _is_doubled),
    "quarantine-replay": Case(_replay, _is_replayed),
    "quarantine-drop": Case(_discard, _is_discarded),
    "dead-letters-retry": Case(_retry_letters, _is_delivered, edits=True),
    "dead-letters-drop": Case(_drop_letters, _is_given_up, edits=True),
    "sinks-resync": Case(_resync, _is_copied, edits=True),
    "sinks-resume": Case(_resume_sink, _goes_on, edits=True),
    "sinks-forget": Case(_forget, _is_forgotten, edits=True, needs_edit=True),
    "savepoint-dispose": Case(_dispose, _is_gone),
}


@dataclass
class Round:
    """One time that an action is planned, confirmed and cut off."""

    case: Case
    plan: str
    arranged: Any
    pid: int
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path = f"/plans/{self.plan}/confirm"

    def end(self, world: World, where: str, *, by_command: bool) -> None:
        """Check what the kill left, end the action, and compare what it has done."""
        is_decided = world.edits_by(self.plan)
        assert is_decided <= 1, where
        if is_decided:  # a service that starts records the end
            wait_until(lambda: self._outcomes(world)[:1] == ["done"])
        outcomes = self._outcomes(world)
        opened = [one["run"] for one in world.unfinished()]
        assert opened in ([], [self.plan] if outcomes[:1] == ["begun"] else []), (where, outcomes)
        if not self.case.edits:
            assert world.pid == self.pid, where  # the run went on
            if outcomes == ["begun"] and not opened:  # the request was made: nobody needs to do anything
                self.case.check(world, self.arranged, where)
        elif not is_decided:
            assert opened == ([self.plan] if outcomes else []), where
            # As before: nothing was decided.
            wait_until(lambda: self._is_as_before(world))
        if opened and by_command:
            self._type(world, where)
        else:
            self._confirm_again(world, where)
        assert world.unfinished() == [], where
        if opened and by_command and self.case.edits:
            wait_until(lambda: world.serve.get("")["needs_person"] is not None)  # the command fenced the run
            if not self.case.ends_stopped:
                world.want("start", "running")
        elif self.case.ends_stopped:
            assert world.serve.get("")["wanted"] == "stopped", where
        elif self.case.edits:
            wait_until(lambda: world.state == "running")
        self.case.check(world, self.arranged, where)
        world.check_rows(where)

    def _is_as_before(self, world: World) -> bool:
        found = world.serve.get("")
        return found["needs_person"] is not None if self.case.needs_edit else found["state"] == "running"

    def _outcomes(self, world: World) -> list[str]:
        """How the action ended, and how it was begun, by the audit trail: newest first."""
        return [str(row["outcome"]) for row in world.trail(self.plan)]

    def _type(self, world: World, where: str) -> None:
        """Type the command of `/unfinished` on the machine of the service."""
        words = shlex.split(world.unfinished()[0]["command"])
        assert words[0] == "firnline"
        assert run_command(words[1:]) == 0, (where, words)

    def _confirm_again(self, world: World, where: str) -> None:
        answer = world.serve.post(self.path)
        assert answer.status == 200, (where, answer)
        assert world.serve.post(self.path) == answer, where
        mine = world.trail(self.plan)
        assert mine[0]["outcome"] == "done", (where, mine)
        assert {row["user"] for row in mine} == {"admin"}, (where, mine)
        assert {row["details"]["via"] for row in mine} == {"REST"}, (where, mine)
        if self.case.edits:
            assert world.edits_by(self.plan) == 1, where


def begin(world: World, case: Case) -> Round:
    world.ensure_running()
    path, body, arranged = case.arrange(world)
    answer = world.serve.post(path, body)
    assert answer.status == 200, answer
    assert answer.body["confirmable"], answer
    return Round(case, answer.body["id"], arranged, world.pid)


@pytest.mark.parametrize("action", CASES)
def test_a_kill_in_the_middle_of_an_action_with_a_plan(action: str, world: World) -> None:
    case = CASES[action]
    unharmed = begin(world, case)
    world.restart()
    assert world.serve.post(unharmed.path).status == 200
    faults = find_kills(world)
    assert len(faults) >= 2
    unharmed.end(world, "not killed", by_command=False)
    for number, fault in enumerate(faults):
        cut_off = begin(world, case)
        world.restart(fault)
        with pytest.raises(KilledError):
            world.serve.post(cut_off.path)
        assert world.serve.wait() == KILLED, fault
        world.serve = ServeProcess(world.folder)
        cut_off.end(world, f"{action} killed at {fault}", by_command=number % 2 == 0)


# -- jobs ----------------------------------------------------------------------------------------------


def test_a_kill_in_the_middle_of_a_savepoint(world: World) -> None:
    world.ensure_running()
    world.restart()
    job = world.serve.post("/savepoints", {"copy": True}, role="operate").body["job"]
    wait_until(lambda: world.serve.get(f"/jobs/{job}")["ended_at"] is not None)
    assert world.serve.get(f"/jobs/{job}")["status"] == "done"
    faults = find_kills(world)
    assert len(faults) >= 2
    for fault in faults:
        pid = world.pid
        world.restart(fault)
        job = world.serve.post("/savepoints", {"copy": True}, role="operate").body["job"]
        assert world.serve.wait() == KILLED, fault
        world.serve = ServeProcess(world.folder)
        trail = world.trail(job)
        assert {row["user"] for row in trail} <= {"operate"}, fault
        opened = world.unfinished()
        states = [one["state"] for one in world.serve.get("/savepoints")["savepoints"]]
        assert states.count("incomplete") == len(opened) <= 1, (fault, states, opened)
        for one in opened:
            assert (one["run"], one["what"]) == (job, "savepoint-create"), fault
            assert run_command([*shlex.split(one["command"])[1:], "--yes"]) == 0, (fault, one)
        assert world.unfinished() == [], fault
        assert {one["state"] for one in world.serve.get("/savepoints")["savepoints"]} <= {"complete"}, fault
        world.add_row()
        assert world.pid == pid, fault
    world.check_rows("at the end")


def test_a_kill_in_the_middle_of_a_dry_run(world: World) -> None:
    world.ensure_running()
    pid = world.pid
    answer = world.serve.post("/dry-run", role="operate")
    assert answer.status == 202
    wait_until(lambda: world.serve.get(f"/jobs/{answer.body['job']}")["status"] == "running")
    world.restart()
    assert world.unfinished() == []
    assert world.pid == pid
    again = world.serve.post("/dry-run", role="operate")
    assert again.status == 202
    wait_until(lambda: world.serve.get(f"/jobs/{again.body['job']}")["ended_at"] is not None, seconds=400)
    assert world.serve.get(f"/jobs/{again.body['job']}")["status"] == "done"
    world.add_row()
    world.check_rows("at the end")
