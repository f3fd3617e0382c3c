"""Two-stage tables, every row of the crash table: whatever dies, the table equals the input, and nothing is pending."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.checkpoint.codec import canonical, checksum, seal, unseal
from firnline.options import PipelineOptions
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.discard import discard
from firnline.storage import open_storage
from tests.support.committers import (
    PENDING,
    bring_file,
    commit_table,
    committer_launcher,
    pending_units,
    put_unit,
    rejected_reasons,
)
from tests.support.pipelines import pipeline_options, run_once
from tests.support.processes import KILLED, Child, Launcher, RunOrder, wait_until
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

FEW = {"firnline.committer.committer:UNITS_PER_COMMIT": 2}
SOON = {"firnline.committer.service:MIN_TAKEOVER_SECONDS": 0.3}


class World:
    """One pipeline that stages, its table, and whoever writes and commits."""

    def __init__(self, folder: Path) -> None:
        self.sample = SampleInput(folder / "in")
        self.table = folder / "out"
        self.options = self.pipeline()
        self.writers = Launcher(folder / "writers")
        self.committers = committer_launcher(folder / "committers")
        self._running: list[Child] = []

    def pipeline(self, **settings: Any) -> PipelineOptions:
        given = {"path": str(self.sample.folder), "table": str(self.table), "mode": "staged", "max_files": 1}
        return pipeline_options(**{**given, **settings})

    def stage(self, *names: str, **fields: Any) -> None:
        """One file, one epoch, one unit each."""
        for name in names:
            self.sample.add(f"{name}.json", 4, **fields)
        run = run_once(self.options)
        assert run.exit_code == 0, run.result

    def start_committer(self, **settings: Any) -> Child:
        child = self.committers.start(self.options, once=False, **settings)
        self._running.append(child)
        return child

    def ids(self) -> Counter[int]:
        return table_ids(self.table)

    def finish(self) -> None:
        """Writer and committer as a supervisor would run them; then everything is there, once."""
        assert run_once(self.options).exit_code == 0
        commit_table(self.table)
        self.check()

    def check(self) -> None:
        assert self.ids() == self.sample.ids
        assert pending_units(self.table) == []

    def data_commits(self) -> list[int]:
        """Versions that add files."""
        log = sorted((self.table / "_delta_log").glob("*.json"))
        return [int(p.stem) for p in log if '"add":{' in p.read_text()]

    def close(self) -> None:
        for child in self._running:
            if child.is_alive:
                child.signal(signal.SIGKILL)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


# -- the writer dies ------------------------------------------------------------------------------------

WRITER = ["staging.put.before", "staging.put.after", "stage.file.after", "epoch.stage.after", "delta.create.after"]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("point", WRITER)
def test_writer_dies(world: World, point: str, count: int) -> None:
    for name in "abcd":
        world.sample.add(f"{name}.json", 4)
    options = world.options
    if point in ("stage.file.after", "epoch.stage.after"):
        # These die on another lane than the one that puts units: one epoch at a time, or half a put may lie there.
        options = replace(options, batch=replace(options.batch, max_inflight=1))
    ended = world.writers.run(options, f"{point}:{1 if point.startswith('delta') else count}:kill")
    assert ended.exit_code == KILLED
    if (world.table / "_delta_log").exists():
        commit_table(world.table)  # the committer needs no writer
        assert pending_units(world.table) == []
        staged = {"staging.put.after": count, "staging.put.before": count - 1}
        if point in staged:
            assert world.ids().total() == 4 * staged[point]
    world.finish()


@pytest.mark.parametrize("point", ["delta.claim.before", "delta.claim.after", "staging.put.before"])
def test_writer_dies_with_units_pending(world: World, point: str) -> None:
    """The next run adopts the units of the one before, and reads nothing of them again."""
    world.stage("a", "b")
    world.sample.add("c.json", 4)
    assert world.writers.run(world.options, f"{point}:1:kill").exit_code == KILLED
    assert run_once(world.options).exit_code == 0
    assert len(pending_units(world.table)) == 3
    world.finish()
    assert rejected_reasons(world.table) == {}


# -- the committer dies ---------------------------------------------------------------------------------

COMMITTER = [
    "delta.claim.before:1",
    "delta.claim.after:1",
    "delta.evolve.before:1",
    "delta.evolve.after:1",
    "delta.commit.before:1",
    "delta.commit.before:2",
    "delta.commit.after:1",
    "delta.commit.after:3",
    "delta.sync.before:2",
    "delta.sync.after:2",
    "staging.delete.before:1",
    "staging.delete.before:2",
    "staging.delete.after:3",
    "storage.delete.before:4",
    "storage.put.after:1",
]


@pytest.mark.parametrize("point", COMMITTER)
def test_committer_dies(world: World, point: str) -> None:
    """Five units and three files of another program, a column that comes in the middle, two units a commit."""
    world.stage("a", "b")
    world.stage("c", extra={"deep": 1})
    world.stage("d", "e")
    for number in range(3):
        lines = world.sample.lines(2)
        ids = [json.loads(line)["id"] for line in lines]
        bring_file(world.table, f"foreign-{number}", {"id": ids, "note": ["x", "y"]})
    ended = world.committers.run(world.options, f"{point}:kill", patches=FEW)
    assert ended.exit_code == KILLED
    found = world.ids()
    assert found <= world.sample.ids, "nothing twice, at no time"
    ended = world.committers.run(world.options, patches=FEW)
    assert ended.exit_code == 0, ended
    world.check()
    assert rejected_reasons(world.table) == {}
    world.stage("f")
    world.finish()


@pytest.mark.parametrize("point", ["staging.reject.before", "staging.reject.after", "storage.delete.before"])
def test_committer_dies_in_rejecting(world: World, point: str) -> None:
    world.stage("a", "b")
    put_unit(world.table, "broken", b"{not json")
    assert world.committers.run(world.options, f"{point}:1:kill").exit_code == KILLED
    world.finish()
    assert list(rejected_reasons(world.table)) == ["broken"]


@pytest.mark.parametrize(
    ("writer", "committer"),
    list(product(["staging.put.before:2", "staging.put.after:2"], ["delta.commit.after:1", "staging.delete.after:1"])),
)
def test_both_die(world: World, writer: str, committer: str) -> None:
    world.stage("a", "b")
    for name in "cde":
        world.sample.add(f"{name}.json", 4)
    first = world.committers.start(world.options, f"{committer}:kill", patches=FEW)
    assert world.writers.run(world.options, f"{writer}:kill").exit_code == KILLED
    assert first.wait().exit_code == KILLED
    world.finish()


def test_committer_is_down_for_long(world: World) -> None:
    """Writers go on and restart meanwhile; later a few commits take it all."""
    for batch in range(4):
        world.stage(*(f"{batch}-{number}" for number in range(10)))
    assert len(pending_units(world.table)) == 40
    assert world.ids().total() == 0
    report = commit_table(world.table)
    assert (report.units, report.commits) == (40, 1)
    world.check()
    world.stage("z")
    world.finish()


def test_the_ledger_is_not_folded_past_the_log_while_the_committer_is_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pending may still be discarded: its writer then needs the entry that the log is at."""
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 4)
    monkeypatch.setattr("firnline.run.steps.FOLD_EVERY", 2)
    world.options = world.pipeline(rollback_window=2)
    world.stage("a", "b")
    commit_table(world.table)
    world.stage(*(f"c{number:02d}" for number in range(14)))
    table = Table(str(world.table), {})
    found = discard(table, open_storage(str(world.table)), "demo", 3, "person")
    assert found.resumes_after_epoch == 2
    run = run_once(world.options)
    assert run.exit_code == 0, run.result
    assert run.pipeline.deciding.load().repairs == ()
    world.finish()


def test_metadata_of_folded_epochs_is_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committer dies after its commit; the writer goes on and folds the entries of what was committed."""
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 4)
    monkeypatch.setattr("firnline.run.steps.FOLD_EVERY", 2)
    world.options = world.pipeline(rollback_window=2)
    world.stage(*(f"a{number:02d}" for number in range(9)))
    commit_table(world.table)
    world.stage(*(f"b{number:02d}" for number in range(4)))  # made after that commit: they name a floor above nothing
    assert world.committers.run(world.options, "staging.delete.before:1:kill").exit_code == KILLED
    world.stage(*(f"c{number:02d}" for number in range(6)))
    assert any(p.name.startswith("fold-") for p in (world.table / "_firnline/demo/ledger").iterdir())
    report = commit_table(world.table)
    assert report.alarms == []
    world.check()
    assert rejected_reasons(world.table) == {}


# -- between the commit and the deletion of the metadata ------------------------------------------------


def optimize(table: Path) -> None:
    DeltaTable(str(table)).optimize.compact()


def delete_some(table: Path) -> None:
    DeltaTable(str(table)).delete("id <= 3")


def vacuum(table: Path) -> None:
    delta = DeltaTable(str(table))
    delta.optimize.compact()
    delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


def restore(table: Path) -> None:
    delta = DeltaTable(str(table))
    delta.restore(delta.version() - 1)


@pytest.mark.parametrize("whose", ["own", "foreign"])
@pytest.mark.parametrize("meddle", [optimize, delete_some, vacuum, restore])
def test_nothing_is_added_twice_after_someone_touched_the_files(
    world: World, meddle: Callable[[Path], None], whose: str
) -> None:
    world.stage("a", "b", "c")
    if whose == "foreign":
        commit_table(world.table)
        for number in range(3):
            bring_file(world.table, f"foreign-{number}", {"id": [number, 900 + number]})
    assert world.committers.run(world.options, "staging.delete.before:2:kill").exit_code == KILLED
    assert len(pending_units(world.table)) == 2
    meddle(world.table)
    expected = world.ids()
    commit_table(world.table)
    assert world.ids() == expected
    assert pending_units(world.table) == []
    assert rejected_reasons(world.table) == {}


# -- several at once ------------------------------------------------------------------------------------


def test_two_committers_race(world: World) -> None:
    """Each unit is won by exactly one; neither dies of the other."""
    racers = [world.start_committer(patches=FEW | SOON) for _ in range(2)]
    for number in range(3):
        world.stage(*(f"{number}-{k}" for k in range(5)))
        bring_file(world.table, f"foreign-{number}", {"id": [json.loads(world.sample.lines(1)[0])["id"]]})
    wait_until(lambda: pending_units(world.table) == [], racers[0])
    for racer in racers:
        racer.signal(signal.SIGTERM)
    assert [racer.wait().exit_code for racer in racers] == [0, 0]
    world.check()
    assert rejected_reasons(world.table) == {}


@pytest.mark.parametrize("point", ["delta.commit.before:1", "delta.commit.after:1", "staging.delete.before:1"])
def test_a_paused_committer_is_fenced_when_it_wakes_up(world: World, point: str) -> None:
    world.stage("a", "b")
    sleeper = world.start_committer(fault=f"{point}:stop", patches=FEW | SOON)
    sleeper.wait_until_stopped()
    second = world.start_committer(patches=SOON)
    wait_until(lambda: world.ids() == world.sample.ids and pending_units(world.table) == [], second)
    world.stage("c")
    wait_until(lambda: world.ids() == world.sample.ids, second)
    sleeper.signal(signal.SIGCONT)
    sleeper.wait_for("standing by")
    world.stage("d")
    wait_until(lambda: world.ids() == world.sample.ids and pending_units(world.table) == [], second)
    world.check()
    assert rejected_reasons(world.table) == {}


def test_a_standby_takes_over_when_the_holder_is_killed(world: World) -> None:
    """A dead process on the same host is seen at once: nobody waits for the hour that a silent holder is granted."""
    world.stage("a")
    holder = world.start_committer()
    wait_until(lambda: world.ids() == world.sample.ids, holder)
    standby = world.start_committer(patches={"firnline.committer.service:MIN_TAKEOVER_SECONDS": 3600.0})
    standby.wait_for("standing by")
    holder.signal(signal.SIGKILL)
    holder.wait()
    world.stage("b")
    wait_until(lambda: world.ids() == world.sample.ids, standby)
    standby.signal(signal.SIGTERM)
    assert standby.wait().exit_code == 0
    assert not (world.table / "_staging/committer.json").exists(), "a clean stop leaves the place free"
    world.check()


def test_three_writers_on_one_table(world: World, tmp_path: Path) -> None:
    """Three pipelines, columns of their own, one killed and started again; one committer is killed, one goes on."""
    samples = [SampleInput(tmp_path / f"in{number}") for number in range(3)]
    pipelines = []
    for number, sample in enumerate(samples):
        sample._next = iter(range(number * 1000 + 1, number * 1000 + 1000))  # type: ignore[assignment]
        for k in range(5):
            sample.add(f"{k}.json", 3, 0, **{f"own{number}": "x"})
        pipelines.append(world.pipeline(name=f"p{number}", path=str(sample.folder)))
    world.sample = samples[0]
    assert run_once(pipelines[0]).exit_code == 0
    dying = world.committers.start(pipelines[0], "delta.commit.after:2:kill", once=False, patches=FEW | SOON)
    lasting = world.start_committer(patches=FEW | SOON)
    writers = [world.writers.start(p, "staging.put.after:2:kill" if p.name == "p1" else "") for p in pipelines[1:]]
    assert [w.wait().exit_code for w in writers] == [KILLED, 0]
    assert run_once(pipelines[1]).exit_code == 0
    expected = sum((s.ids for s in samples), Counter[int]())
    wait_until(lambda: world.ids() == expected and pending_units(world.table) == [], lasting)
    if dying.is_alive:
        dying.signal(signal.SIGKILL)
    assert rejected_reasons(world.table) == {}
    assert {"own0", "own1", "own2"} <= set(DeltaTable(str(world.table)).to_pyarrow_table().column_names)


# -- zombies --------------------------------------------------------------------------------------------


def read_unit(path: Path) -> dict[str, Any]:
    return unseal(json.loads(path.read_bytes()), path.name)


def stand_on(table: Path, name: str, child: str) -> None:
    """A further unit onto a unit: what a zombie that goes on would put."""
    parent = read_unit(table / PENDING / f"{name}.meta.json")
    epoch = parent["epoch"] + 1
    inner = unseal(parent["checkpoint"], name)
    checkpoint = seal({**inner, "epoch": epoch, "attempt": child})
    entry = {"epoch": epoch, "name": f"{child}.json", "checksum": checksum(child.encode())}
    previous = {"entry": parent["entry"], "epoch": parent["epoch"], "checkpoint_checksum": ""}
    body = {**parent, "epoch": epoch, "attempt": child, "checkpoint": checkpoint, "entry": entry, "previous": previous}
    put_unit(table, child, canonical(seal({k: v for k, v in body.items() if k != "format"})))


@pytest.mark.parametrize("more", [False, True], ids=["last-epoch", "more-to-come"])
@pytest.mark.parametrize("committed", [False, True], ids=["pending", "committed"])
def test_a_zombie_writer_leaves_a_fork(world: World, committed: bool, more: bool) -> None:
    """It sleeps before its put; its successor stages the same epoch with another slice; it wakes up."""
    world.stage("a")
    world.sample.add("b.json", 4)
    if more:
        world.sample.add("c.json", 4)
    zombie = world.writers.start(world.options, "staging.put.before:1:stop")
    zombie.wait_until_stopped()
    world.sample.add("d.json", 4)
    world.options = world.pipeline(max_files=10)  # another slice
    assert run_once(world.options).exit_code == 0
    if committed:
        commit_table(world.table)
    before = set(pending_units(world.table))
    zombie.signal(signal.SIGCONT)
    ended = zombie.wait()
    assert (ended.exit_code, ended.error_code) == (5, "fenced")
    (fork,) = set(pending_units(world.table)) - before
    stand_on(world.table, fork, "descendant")
    world.finish()
    reasons = rejected_reasons(world.table)
    assert set(reasons) == {fork, "descendant"}
    assert all(reason.startswith("fork") for reason in reasons.values())
    world.stage("e")
    world.finish()


def test_a_claim_adopts_units_that_the_committer_has_not_listed_yet(world: World) -> None:
    """The committer lists, the writer puts one more and dies, a successor claims it: nothing becomes a fork."""
    world.stage("a", "b")
    service = world.committers.start(world.options, "delta.claim.before:1:stop")  # listed: two units
    service.wait_until_stopped()
    world.stage("c")
    world.stage("d")  # a new claim, which adopts c
    service.signal(signal.SIGCONT)
    assert service.wait().exit_code == 0
    world.finish()
    assert rejected_reasons(world.table) == {}


# -- files that vanish, and people ----------------------------------------------------------------------


def test_a_foreign_vacuum_took_a_pending_file(world: World) -> None:
    world.stage("a", "b", "c", "d")
    units = {}
    for path in (world.table / PENDING).iterdir():
        body = read_unit(path)
        units[body["epoch"]] = (path.name.removesuffix(".meta.json"), body["files"][0]["path"])
    name, file = units[3]
    (world.table / file).unlink()
    report = commit_table(world.table)
    assert report.units == 2
    assert rejected_reasons(world.table) == {name: f"file missing: {file}"}
    assert report.waiting == {"demo": (3, 3)}
    storage, table = open_storage(str(world.table)), Table(str(world.table), {})
    done = discard(table, storage, "demo", 3, "person")
    assert (done.rejected, done.pending, done.resumes_after_epoch) == ([name], [units[4][0]], 2)
    world.finish()
    assert rejected_reasons(world.table) == {}


def test_everything_is_discarded_before_anything_was_committed(world: World) -> None:
    """The ledger knows epochs that the log never held: the writer begins again, it does not refuse."""
    world.stage(*"abcdef")
    done = discard(Table(str(world.table), {}), open_storage(str(world.table)), "demo", 1, "person")
    assert (len(done.pending), done.resumes_after_epoch) == (6, 0)
    world.finish()


def test_a_running_writer_is_fenced_by_a_discard(world: World) -> None:
    world.stage("a", "b")
    world.sample.add("c.json", 4)
    writer = world.writers.start(world.options, "staging.put.before:1:stop")
    writer.wait_until_stopped()
    discard(Table(str(world.table), {}), open_storage(str(world.table)), "demo", 2, "person")
    writer.signal(signal.SIGCONT)
    assert writer.wait().exit_code == 5
    world.finish()


def discard_from_two(order: RunOrder) -> int:
    """In a child."""
    table = order.options.sinks[0].location
    discard(Table(table, {}), open_storage(table), "demo", 2, "person")
    return 0


@pytest.mark.parametrize("point", ["delta.claim.after:1", "storage.delete.before:1", "storage.delete.after:1"])
def test_a_discard_dies(world: World, tmp_path: Path, point: str) -> None:
    """The claim comes first: from then on those units are forks."""
    world.stage("a", "b", "c")
    people = Launcher(tmp_path / "people", discard_from_two)
    assert people.run(world.options, f"{point}:kill").exit_code == KILLED
    world.finish()


# -- another mode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit_between", [False, True])
def test_staged_to_direct_with_units_pending(world: World, commit_between: bool) -> None:
    """A direct run stands on the log alone: what is pending becomes a fork, and its input is read again."""
    world.stage("a")
    commit_table(world.table)
    world.stage("b", "c")
    world.sample.add("d.json", 4)
    direct = world.pipeline(mode="direct")
    assert run_once(direct).exit_code == 0
    assert world.ids() == world.sample.ids
    if commit_between:
        report = commit_table(world.table)
        assert (report.units, len(report.rejected)) == (0, 2)
    world.finish()
    assert len(rejected_reasons(world.table)) == 2
    world.stage("e")
    world.finish()


@pytest.mark.parametrize("point", ["delta.claim.before:1", "delta.claim.after:1", "delta.commit.before:1"])
def test_a_change_of_mode_dies_while_the_committer_runs(world: World, point: str) -> None:
    world.stage("a", "b", "c")
    direct = world.pipeline(mode="direct")
    writer = world.writers.start(direct, f"{point}:stop")
    writer.wait_until_stopped()
    commit_table(world.table)
    writer.signal(signal.SIGCONT)
    writer.wait()
    assert run_once(direct).exit_code == 0
    world.finish()


def test_direct_to_staged_and_back(world: World) -> None:
    for number, mode in enumerate(["direct", "staged", "direct", "staged", "staged", "direct"]):
        world.options = world.pipeline(mode=mode)
        world.stage(f"{number}a", f"{number}b")
    world.finish()
