"""Restores of chained pipelines: all members or none, to a snapshot or to a time."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.errors import ConfigError, FencedError
from firnline.history.edits.rollback import Rollback
from firnline.history.topology.restore import (
    RestoreResult,
    find_epochs_at,
    find_inconsistent,
    find_or_order,
    find_snapshot_epochs,
    perform_restore,
)
from firnline.history.topology.snapshot import Snapshots
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import Hold, put_hold
from firnline.types import RandomIds
from tests.support.pipelines import checkpoint_of, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, member, open_snapshots, settle


def restore(snapshots: Snapshots, target: str, epochs: dict[str, int]) -> RestoreResult:
    order = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds())
    return perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)


class Chain:
    """files -> a -> b -> c, with one snapshot after the first file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sample = SampleInput(folder / "in")
        self.members = [member(folder, "a"), member(folder, "b", "a"), member(folder, "c", "b")]
        self.sample.add("f1.json", 3)
        self.run()
        self.snapshots = open_snapshots(folder, self.members)
        order = self.snapshots.order(TIMEOUT)
        self.run()
        assert settle(self.snapshots, order) == (Outcome.COMMIT, "")
        self.id, self.epochs = find_snapshot_epochs(self.snapshots, order.snapshot[:6])
        self.then = set(self.sample.ids)

    def run(self, *members: PipelineOptions) -> None:
        for one in members or self.members:
            run_to_end(one)

    def ids(self) -> list[set[object]]:
        return [set(table_ids(one.sinks[0].location)) for one in self.members]


def test_all_members_go_back_and_go_on(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    for number in (2, 3):
        chain.sample.add(f"f{number}.json", 3)
        chain.run()
    result = restore(chain.snapshots, chain.id, chain.epochs)
    assert result.decision is Decision.GO
    assert chain.ids() == [chain.then] * 3
    chain.run()
    for one in chain.members:
        assert table_ids(one.sinks[0].location) == chain.sample.ids, "each row once"
    assert chain.snapshots.home.find_unfinished() is None
    again = restore(chain.snapshots, chain.id, chain.epochs)  # the snapshot is still kept
    assert again.decision is Decision.GO
    assert chain.ids() == [chain.then] * 3


def test_a_channel_keeps_what_its_reader_had_not_read(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    a, b, c = chain.members
    chain.sample.add("f2.json", 3)
    chain.run(a)  # b has not read it
    snapshots = open_snapshots(tmp_path, chain.members)
    order = snapshots.order(TIMEOUT)
    chain.run(c, b)
    run_to_end(a)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    chain.sample.add("f3.json", 3)
    chain.run()
    restore(snapshots, *find_snapshot_epochs(snapshots, order.snapshot))
    chain.run()
    for one in chain.members:
        assert table_ids(one.sinks[0].location) == chain.sample.ids


def test_a_member_that_stands_at_its_record_keeps_its_rows(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    before = [checkpoint_of(one).epoch for one in chain.members]
    result = restore(chain.snapshots, chain.id, chain.epochs)
    assert result.decision is Decision.GO
    assert [result.epochs[name] for name in "abc"] == [epoch + 1 for epoch in before]
    assert chain.ids() == [chain.then] * 3
    chain.run()
    assert chain.ids() == [chain.then] * 3


def test_a_time_gives_the_newest_consistent_cut(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    moment, then = datetime.now(UTC), set(chain.sample.ids)
    chain.sample.add("f3.json", 3)
    chain.run()
    epochs = find_epochs_at(chain.snapshots, moment)
    assert epochs == {"a": 3, "b": 3, "c": 3}
    assert restore(chain.snapshots, "then", epochs).decision is Decision.GO
    assert chain.ids() == [then] * 3
    chain.run()
    for one in chain.members:
        assert table_ids(one.sinks[0].location) == chain.sample.ids


def test_a_run_and_an_edit_stop_at_a_hold(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    a = chain.members[0]
    chain.sample.add("f2.json", 3)
    home = chain.snapshots.home
    put_hold(open_pipeline(a).storage, "a", Hold("0123456789abcdef", home.name, home.root))
    run = run_once(a)
    assert (run.exit_code, run.error_code) == (5, "fenced")
    assert chain.ids() == [chain.then] * 3
    with pytest.raises(FencedError, match="restore 0123456789abcdef"):
        Rollback(open_pipeline(a), 1).perform("test")
    result = restore(chain.snapshots, chain.id, chain.epochs)
    assert (result.decision, result.reason) == (Decision.WITHDRAWN, "another restore holds a")
    home.release("0123456789abcdef", "now", {})
    run_to_end(a)


def test_members_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    now = set(chain.sample.ids)
    order = find_or_order(chain.snapshots, chain.id, chain.epochs, SystemClock(), RandomIds(), without=["c"])
    (line,) = find_inconsistent(chain.snapshots, order)
    assert line.startswith("c has read rows of b that are undone")
    result = perform_restore(chain.snapshots, order, RandomIds().new(), SystemClock(), print)
    assert result.decision is Decision.GO
    assert chain.ids() == [chain.then, chain.then, now]
    a, b, c = chain.members
    chain.run(a, b)
    stopped = run_once(c)
    assert stopped.exit_code == 1
    assert stopped.result.error is not None
    assert "`firnline rollback --to 2`" in str(stopped.result.error.hint)
    Rollback(open_pipeline(c), 2).perform("test")
    run_to_end(c)
    assert table_ids(c.sinks[0].location) == chain.sample.ids
    other = find_or_order(chain.snapshots, chain.id, chain.epochs, SystemClock(), RandomIds(), without=["a"])
    assert find_inconsistent(chain.snapshots, other) == ["b reads again what a has written since: a keeps it"]


def test_a_hold_names_what_ends_it(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    home, a = chain.snapshots.home, chain.members[0]
    order = find_or_order(
        chain.snapshots, chain.id, chain.epochs, SystemClock(), RandomIds(), command="firnline topology restore 4f2a"
    )
    home.put_restore(order)
    put_hold(open_pipeline(a).storage, "a", Hold(order.restore, home.name, home.root, order.command))
    with pytest.raises(FencedError) as caught:
        Rollback(open_pipeline(a), 1).perform("test")
    finish = "Let it finish: firnline topology restore 4f2a"
    assert caught.value.hint == f"{finish}. Or give it up, while undecided: firnline topology withdraw FILE"
    home.decide_restore(order.restore, Decision.GO, "")
    with pytest.raises(FencedError) as caught:
        Rollback(open_pipeline(a), 1).perform("test")
    assert caught.value.hint == finish
    (tmp_path / "home").rename(tmp_path / "lost")
    with pytest.raises(FencedError) as caught:
        Rollback(open_pipeline(a), 1).perform("test")
    hold = next((tmp_path / "a").rglob(f"holds/{order.restore}.json"))
    assert str(caught.value.hint).endswith(f"delete {hold}")
    hold.unlink()
    chain.sample.add("f2.json", 3)
    chain.run()


def test_a_restore_that_cannot_be_is_withdrawn_and_changes_no_row(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    epochs = {**chain.epochs, "c": 99}
    result = restore(chain.snapshots, "never", epochs)
    assert result.decision is Decision.WITHDRAWN
    assert "c: " in result.reason
    assert chain.ids() == [set(chain.sample.ids)] * 3
    chain.sample.add("f3.json", 3)
    chain.run()


def test_another_restore_is_refused_while_one_is_decided(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    order = find_or_order(chain.snapshots, chain.id, chain.epochs, SystemClock(), RandomIds())
    chain.snapshots.home.put_restore(order)
    assert find_or_order(chain.snapshots, chain.id, chain.epochs, SystemClock(), RandomIds()) == order
    chain.snapshots.home.decide_restore(order.restore, Decision.GO, "")
    with pytest.raises(ConfigError, match="has begun, and not ended"):
        find_or_order(chain.snapshots, "another", chain.epochs, SystemClock(), RandomIds())


def test_a_dropped_snapshot_is_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.snapshots.drop(chain.id)
    with pytest.raises(ConfigError, match="cannot be restored"):
        find_snapshot_epochs(chain.snapshots, chain.id)


@pytest.mark.parametrize("decided", [True, False])
def test_a_snapshot_that_is_dropped_during_a_restore_stays_pinned(tmp_path: Path, decided: bool) -> None:
    chain = Chain(tmp_path)
    chain.sample.add("f2.json", 3)
    chain.run()
    now = chain.ids()
    order = find_or_order(chain.snapshots, chain.id, chain.epochs, SystemClock(), RandomIds())
    chain.snapshots.home.put_restore(order)  # and then the command is killed
    if decided:
        chain.snapshots.home.decide_restore(order.restore, Decision.GO, "")
    chain.snapshots.drop(chain.id)
    pins = tmp_path / "a" / "_firnline" / "pins"
    assert len(list(pins.glob("topology-*"))) == 1
    result = perform_restore(chain.snapshots, order, RandomIds().new(), SystemClock(), print)
    assert result.decision is (Decision.GO if decided else Decision.WITHDRAWN)
    assert chain.ids() == ([chain.then] * 3 if decided else now)
    chain.snapshots.order(TIMEOUT)  # deletes what nobody needs
    assert [pin.stem for pin in pins.glob(f"topology-{chain.id}*")] == []
