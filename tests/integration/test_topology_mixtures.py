"""Snapshots, restores and savepoints of a topology beside other commands, other specs and other clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from firnline import faults
from firnline.clock import SystemClock
from firnline.errors import ConfigError, FencedError, FirnlineError
from firnline.history.edits.rollback import Rollback
from firnline.history.topology.graph import make_topology
from firnline.history.topology.restore import (
    RestoreResult,
    find_epochs_at,
    find_inconsistent,
    find_or_order,
    find_snapshot_epochs,
    perform_restore,
    withdraw_restores,
)
from firnline.history.topology.savepoint import copy_all, create_topology_savepoint, start_from_savepoint
from firnline.history.topology.snapshot import Snapshots
from firnline.history.topology.stopped import paused_run
from firnline.names import hold_key
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import Hold, RestoreOrder, put_hold
from firnline.types import RandomIds
from tests.integration.test_topology_restore import Chain
from tests.support.pipelines import make_epochs, run_once, run_to_end, run_until_epoch
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, register_sqlite
from tests.support.topologies import TIMEOUT, member, open_snapshots, reads, settle


def order_of(
    snapshots: Snapshots, snapshot: str, *, leave: Sequence[str] = (), without: Sequence[str] = ()
) -> RestoreOrder:
    target, epochs = find_snapshot_epochs(snapshots, snapshot)
    return find_or_order(snapshots, target, epochs, SystemClock(), RandomIds(), leave=leave, without=without)


def perform(snapshots: Snapshots, order: RestoreOrder) -> RestoreResult:
    return perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)


def check_arrived(chain: Chain) -> None:
    for one in chain.members:
        assert table_ids(one.sinks[0].location) == chain.sample.ids, one.name


@contextmanager
def standing_at(point: str, action: Callable[[], object]) -> Iterator[list[str]]:
    """Whoever reaches a fault point first stands still there, while an action is performed."""
    stood: list[str] = []

    def follow(name: str) -> None:
        if name == point and not stood:
            stood.append(name)
            action()

    faults.followers.append(follow)
    try:
        yield stood
    finally:
        faults.followers.remove(follow)


# -- two commands ---------------------------------------------------------------------------------------

CALLS = ("topology.hold", "topology.decide", "delta.jump", "topology.release")
OF_RESTORES = ["topology.restore.after", *(f"{call}.{side}" for call in CALLS for side in ("before", "after"))]


@pytest.mark.parametrize("point", OF_RESTORES)
def test_a_restore_that_another_command_finished_undoes_nothing_more(tmp_path: Path, point: str) -> None:
    """The first command stands still, the second one finishes, and the runs go on: then the first one wakes up."""
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    first = order_of(chain.snapshots, chain.id)

    def finish_and_run() -> None:
        other = open_snapshots(tmp_path, chain.members)
        assert perform(other, order_of(other, chain.id)).decision is Decision.GO
        chain.sample.add("f3.json", 3)
        chain.run()
        check_arrived(chain)

    with standing_at(point, finish_and_run) as stood:
        try:
            result = perform(chain.snapshots, first)
        except FencedError:
            pass
        else:
            assert result.decision is Decision.WITHDRAWN or point.startswith("topology.release.")
    assert stood
    check_arrived(chain)
    chain.sample.add("f4.json", 3)
    chain.run()
    check_arrived(chain)
    for one in chain.members:
        assert not list((Path(one.sinks[0].location) / hold_key(one.name, "x")).parent.glob("*.json"))


@pytest.mark.parametrize("point", ["topology.hold.after", "delta.claim.after", "topology.decide.before"])
def test_a_restore_that_is_interrupted_before_the_decision_holds_nobody(tmp_path: Path, point: str) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with standing_at(point, interrupt) as stood, pytest.raises(KeyboardInterrupt):
        perform(chain.snapshots, order_of(chain.snapshots, chain.id))
    assert stood
    chain.sample.add("f3.json", 3)
    chain.run()
    check_arrived(chain)


def test_a_restore_that_was_killed_before_its_decision_is_given_up(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    home, killed = chain.snapshots.home, order_of(chain.snapshots, chain.id)
    home.put_restore(killed)
    for one in chain.members:
        put_hold(open_pipeline(one).storage, one.name, Hold(killed.restore, home.name, home.root, "firnline x"))
    chain.sample.add("f3.json", 3)
    held = run_once(chain.members[0]).result.error
    assert isinstance(held, FencedError)
    assert held.hint.endswith("firnline topology withdraw FILE")
    assert [one.restore for one in withdraw_restores(chain.snapshots)] == [killed.restore]
    assert withdraw_restores(chain.snapshots) == []
    chain.run()
    check_arrived(chain)
    home.put_restore(decided := order_of(chain.snapshots, chain.id))
    assert home.decide_restore(decided.restore, Decision.GO, "") is Decision.GO
    with pytest.raises(ConfigError, match="has begun, and not ended"):
        withdraw_restores(chain.snapshots)
    assert home.find_decision(decided.restore) == (Decision.GO, "")


def test_a_restore_that_was_not_decided_gives_way_to_another_one(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    now, home = set(chain.sample.ids), chain.snapshots.home
    killed = order_of(chain.snapshots, chain.id)
    home.put_restore(killed)
    order = order_of(chain.snapshots, chain.id, without=["c"])
    assert set(order.epochs) == {"a", "b"}
    assert perform(chain.snapshots, order).decision is Decision.GO
    assert chain.ids() == [chain.then, chain.then, now]
    assert home.find_unfinished() is None
    assert perform(chain.snapshots, killed).decision is Decision.WITHDRAWN, "its command wakes up"
    assert chain.ids() == [chain.then, chain.then, now]


def test_a_time_ago_that_was_not_decided_is_computed_anew(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    killed = find_or_order(chain.snapshots, "0s", chain.epochs, SystemClock(), RandomIds())
    chain.snapshots.home.put_restore(killed)
    chain.sample.add("f2.json", 3)
    chain.run()
    epochs = find_epochs_at(chain.snapshots, datetime.now(UTC))
    order = find_or_order(chain.snapshots, "0s", epochs, SystemClock(), RandomIds())
    assert order.epochs == epochs != killed.epochs
    assert perform(chain.snapshots, order).decision is Decision.GO
    assert chain.ids() == [set(chain.sample.ids)] * 3


def test_a_restore_that_was_decided_is_finished_with_its_own_flags(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    begun = order_of(chain.snapshots, chain.id)
    begun = replace(begun, command="firnline topology restore ID --yes")
    chain.snapshots.home.put_restore(begun)
    chain.snapshots.home.decide_restore(begun.restore, Decision.GO, "")
    with pytest.raises(ConfigError, match="has begun, and not ended") as refused:
        order_of(chain.snapshots, chain.id, without=["c"])
    assert refused.value.hint == "Finish it first: firnline topology restore ID --yes"
    other = replace(begun, restore="0123456789abcdef", target="another")
    with pytest.raises(ConfigError, match="has begun, and not ended"):
        perform(chain.snapshots, other)
    assert perform(chain.snapshots, order_of(chain.snapshots, chain.id)).decision is Decision.GO
    assert chain.ids() == [chain.then] * 3


def test_a_damaged_hold_and_the_order_of_a_restore_that_has_ended_stop_nobody(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    home = chain.snapshots.home
    first = order_of(chain.snapshots, chain.id)
    assert perform(chain.snapshots, first).decision is Decision.GO
    [damaged] = (tmp_path / "home").rglob(f"restores/{first.restore}/order.json")
    damaged.write_bytes(b"")
    order = order_of(chain.snapshots, chain.id)
    home.put_restore(order)
    home.decide_restore(order.restore, Decision.GO, "")
    hold = tmp_path / "b" / hold_key("b", order.restore)
    hold.parent.mkdir(parents=True, exist_ok=True)
    hold.write_bytes(b"{")
    chain.sample.add("f2.json", 3)
    chain.run(chain.members[0])
    assert run_once(chain.members[1]).exit_code != 0, "it may count"
    assert perform(chain.snapshots, order_of(chain.snapshots, chain.id)).decision is Decision.GO
    chain.run()
    check_arrived(chain)


# -- another topology -----------------------------------------------------------------------------------


def test_a_snapshot_that_is_open_when_the_topology_gets_a_member_is_completed(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    order = chain.snapshots.order(TIMEOUT)
    chain.run()
    fourth = member(tmp_path, "d", "c")
    run_to_end(fourth)
    more = open_snapshots(tmp_path, [*chain.members, fourth])
    assert settle(more, order) == (Outcome.COMMIT, "")
    assert set(find_snapshot_epochs(chain.snapshots, order.snapshot)[1]) == {"a", "b", "c"}
    with pytest.raises(ConfigError, match=r"other members than snapshot .*: d"):
        find_snapshot_epochs(more, order.snapshot)


def test_a_restore_that_was_decided_needs_all_its_members(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    order = order_of(chain.snapshots, chain.id)
    chain.snapshots.home.put_restore(order)
    chain.snapshots.home.decide_restore(order.restore, Decision.GO, "")
    less = open_snapshots(tmp_path, chain.members[:2])
    with pytest.raises(ConfigError, match="takes c back, which is no member"):
        perform(less, order)
    with pytest.raises(ConfigError, match="takes c back, which is no member"):
        find_or_order(less, chain.id, {"a": 2, "b": 2}, SystemClock(), RandomIds())
    assert perform(chain.snapshots, order).decision is Decision.GO


def with_a_source_more(folder: Path) -> PipelineOptions:
    """c reads b, and also a, into a table of its own."""
    c = member(folder, "c", "b")
    table = DeltaSinkOptions("c2", str(folder / "c2"), input="a", start="now")
    return replace(c, sources=(*c.sources, *reads(folder, "a")), sinks=(*c.sinks, table))


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("at", [True, False], ids=["time", "snapshot"])
def test_a_restore_to_before_a_source_was_added(tmp_path: Path, begun: bool, at: bool) -> None:
    chain = Chain(tmp_path)
    moment = datetime.now(UTC)
    chain.sample.add("f2.json", 3)
    if not begun:
        chain.run()
    chain.members[2] = with_a_source_more(tmp_path)
    if begun:
        chain.run()
    snapshots = open_snapshots(tmp_path, chain.members)
    epochs = find_epochs_at(snapshots, moment) if at else chain.epochs
    order = find_or_order(snapshots, "then" if at else chain.id, epochs, SystemClock(), RandomIds())
    assert (perform(snapshots, order).decision, order.epochs) == (Decision.GO, chain.epochs)
    assert chain.ids() == [chain.then] * 3
    chain.run()
    check_arrived(chain)
    assert table_ids(tmp_path / "c2") == chain.sample.ids


def test_a_snapshot_of_a_run_that_lacks_a_source_of_its_spec(tmp_path: Path) -> None:
    """Its run has the spec of before: it has read nothing of the channel that is new."""
    chain = Chain(tmp_path)
    c = chain.members[2]
    (first,), (second,) = c.sources, reads(tmp_path, "a")
    new = [*chain.members[:2], replace(c, sources=(first, second))]
    snapshots = open_snapshots(tmp_path, new)
    order = snapshots.order(TIMEOUT)
    chain.run()
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    with pytest.raises(FirnlineError, match="c had no source 'a' at the snapshot"):
        create_topology_savepoint(snapshots, order.snapshot, str(tmp_path / "saved"))
    chain.sample.add("f2.json", 3)
    chain.run()
    assert perform(snapshots, order_of(snapshots, order.snapshot)).decision is Decision.GO
    assert chain.ids() == [chain.then] * 3


# -- what stands against a jump -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["beginning", "copy", "now"])
@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("leave", [True, False])
def test_what_stands_against_a_jump_withdraws_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, down: bool, leave: bool
) -> None:
    """A sink that was added to a member is filled, or has yet to begin. After the decision nothing may stop a jump:
    the members are held, so nobody could bring the sink in order."""
    register_sqlite(monkeypatch)
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    b = chain.members[1]
    ways: dict[str, dict[str, Any]] = {"beginning": {"start": "beginning"}, "copy": {"copy_from": "b"}, "now": {}}
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False, input="a", **ways[way])
    chain.members[1] = replace(b, sinks=(*b.sinks, copy))
    broken = tmp_path / f"copy.db{DOWN}"
    broken.touch()
    if way != "now":
        chain.sample.add("f3.json", 3)
        chain.run()
    if not down:
        broken.unlink()
    before = chain.ids()
    snapshots = open_snapshots(tmp_path, chain.members)
    order = order_of(snapshots, chain.id, leave=["copy"] if leave else [])
    result = perform(snapshots, order)
    assert (result.decision is Decision.GO) == (way == "now" and leave)
    assert chain.ids() == ([chain.then] * 3 if result.decision is Decision.GO else before)
    assert snapshots.home.find_unfinished() is None
    broken.unlink(missing_ok=True)
    chain.run()
    check_arrived(chain)


@pytest.mark.parametrize("leave", [True, False])
def test_a_table_that_cannot_be_read_stops_no_restore_after_the_decision(tmp_path: Path, leave: bool) -> None:
    chain = Chain(tmp_path)
    c = chain.members[2]
    copy = DeltaSinkOptions("c2", str(tmp_path / "c2"), input="b", required=False, start="now")
    chain.members[2] = replace(c, sinks=(*c.sinks, copy))
    snapshots = open_snapshots(tmp_path, chain.members)
    chain.sample.add("f2.json", 3)
    chain.run()
    taken = snapshots.order(TIMEOUT)
    chain.run()
    assert settle(snapshots, taken) == (Outcome.COMMIT, "")
    then = set(chain.sample.ids)
    chain.sample.add("f3.json", 3)
    chain.run()
    log = tmp_path / "c2" / "_delta_log"
    log.rename(tmp_path / "away")
    log.write_text("no folder")
    result = perform(snapshots, order_of(snapshots, taken.snapshot, leave=["c2"] if leave else []))
    assert result.decision is (Decision.GO if leave else Decision.WITHDRAWN)
    assert chain.ids() == [then if leave else set(chain.sample.ids)] * 3
    assert snapshots.home.find_unfinished() is None
    log.unlink()
    (tmp_path / "away").rename(log)
    chain.run()
    check_arrived(chain)


def test_a_member_that_cannot_be_claimed_withdraws_the_restore(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    order = order_of(chain.snapshots, chain.id)
    log = tmp_path / "c" / "_delta_log"
    log.rename(tmp_path / "away")
    log.write_text("no folder")
    result = perform(chain.snapshots, order)
    assert result.decision is Decision.WITHDRAWN
    assert result.reason.startswith("c: cannot read the table")
    chain.sample.add("f3.json", 3)
    chain.run(*chain.members[:2])  # nobody holds them
    log.unlink()
    (tmp_path / "away").rename(log)
    chain.run()
    check_arrived(chain)


def test_the_plan_names_a_channel_that_keeps_its_rows(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    a = member(tmp_path, "a")
    a = replace(a, sinks=(*a.sinks, DeltaSinkOptions("a2", str(tmp_path / "a2"))))
    members = [a, member(tmp_path, "b", "a2")]
    sample.add("f1.json", 3)
    for one in members:
        run_to_end(one)
    snapshots = open_snapshots(tmp_path, members)
    order = find_or_order(snapshots, "then", {"a": 1, "b": 1}, SystemClock(), RandomIds(), leave=["a2"])
    assert find_inconsistent(snapshots, order) == [
        "b reads again what sink a2 of a keeps, and then gets it once more: a writes it again"
    ]


# -- clocks ---------------------------------------------------------------------------------------------


class WrongClock(SystemClock):
    """A clock that is off by some time."""

    by = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.by


def test_the_newest_snapshot_is_kept_although_the_clock_went_back(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    clock = WrongClock()
    snapshots = Snapshots(chain.snapshots.topology, chain.snapshots.home, clock, RandomIds())
    for days in (365, 0, -1):
        clock.by = timedelta(days=days)
        order = snapshots.order(TIMEOUT)
        chain.run()
        assert settle(snapshots, order) == (Outcome.COMMIT, "")
        snapshots.keep(1)
        assert snapshots.find_complete() == [order.snapshot]
        assert snapshots.list()[0].id == order.snapshot, "the newest comes first"


# -- snapshots that are undone --------------------------------------------------------------------------


def take(chain: Chain) -> str:
    order = chain.snapshots.order(TIMEOUT)
    chain.run()
    assert settle(chain.snapshots, order) == (Outcome.COMMIT, "")
    return order.snapshot


def test_snapshots_that_a_restore_has_undone_do_not_count(tmp_path: Path) -> None:
    chain, ids = Chain(tmp_path), []
    for number in (2, 3):
        chain.sample.add(f"f{number}.json", 3)
        chain.run()
        ids.append(take(chain))
    assert perform(chain.snapshots, order_of(chain.snapshots, chain.id)).decision is Decision.GO
    views = {view.id: view for view in chain.snapshots.list()}
    assert [bool(views[one].restorable_until) for one in (chain.id, *ids)] == [True, False, False]
    assert "has undone epoch" in views[ids[0]].reason
    newest = take(chain)
    assert chain.snapshots.keep(2) == ids
    assert chain.snapshots.find_complete() == [chain.id, newest]
    for one in (newest, chain.id):
        assert perform(chain.snapshots, order_of(chain.snapshots, one)).decision is Decision.GO
    chain.run()
    check_arrived(chain)


def test_a_snapshot_that_cannot_be_copied_stands_in_the_way_of_no_other(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    said: list[str] = []
    Rollback(open_pipeline(chain.members[0]), 1).perform("person")  # its record is undone
    newest = take(chain)
    assert copy_all(chain.snapshots, {}, said.append) == [chain.id]
    assert chain.snapshots.find_copy(newest) is not None
    assert said[1].startswith(f"alarm: {chain.id} has no copy: a has no epoch 2 any more")


# -- savepoints -----------------------------------------------------------------------------------------


def reads_twice(folder: Path) -> PipelineOptions:
    """b reads the table of a with two sources: one from its first version on, one from now on."""
    (one,) = reads(folder, "a")
    sinks = [DeltaSinkOptions(name, str(folder / name), input=name) for name in ("early", "late")]
    sources = (replace(one, name="late", start="now"), replace(one, name="early", start=0))
    return replace(member(folder, "b", "a", max_files=2), sources=sources, sinks=tuple(sinks))


def test_a_savepoint_of_a_member_that_reads_one_table_with_two_sources(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    a, b = member(tmp_path, "a"), reads_twice(tmp_path)
    make_epochs(sample, a, 4)
    run_until_epoch(b, 2)  # `early` is in the midst, `late` at the end
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    run_to_end(a)
    with paused_run(b, LocalEngine(1), lambda _: None):
        assert settle(snapshots, order) == (Outcome.COMMIT, "")
    create_topology_savepoint(snapshots, order.snapshot, str(tmp_path / "saved"))
    new, before = tmp_path / "new", set(sample.ids)
    members = [replace(member(new, "a"), sources=a.sources), reads_twice(new)]
    start_from_savepoint(make_topology(members), str(tmp_path / "saved"), "start")
    sample.add("f5.json", 3)
    for one in members:
        run_to_end(one)
    assert table_ids(new / "early") == sample.ids
    assert set(table_ids(new / "late")) == set(sample.ids) - before


def test_a_start_that_is_repeated_after_runs_changes_nothing(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    create_topology_savepoint(chain.snapshots, chain.id, str(tmp_path / "saved"))
    new = tmp_path / "new"
    members = [member(new, "a"), member(new, "b", "a"), member(new, "c", "b")]
    members[0] = replace(members[0], sources=chain.members[0].sources)
    topology = make_topology(members)
    start_from_savepoint(topology, str(tmp_path / "saved"), "start")
    chain.sample.add("f2.json", 3)
    for _ in range(2):
        for one in members:
            run_to_end(one)
            assert table_ids(one.sinks[0].location) == chain.sample.ids
        start_from_savepoint(topology, str(tmp_path / "saved"), "again")
