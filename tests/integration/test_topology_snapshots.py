"""Snapshots of chained pipelines: real Delta tables, runs in this process."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.errors import ConfigError, DamagedError
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.create import create_savepoint
from firnline.history.topology.stopped import paused_run
from firnline.maintenance.references import References
from firnline.maintenance.survey import Candidates, open_table, walk
from firnline.names import PINS
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Outcome
from firnline.topology.records import Order, TopologyHome, load_asked, stop_asking
from tests.support.committers import make_service
from tests.support.pipelines import checkpoint_of, delta_table, make_epochs, run_to_end
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, member, open_snapshots, running, settle


def test_runs_record_a_snapshot_by_request_and_by_marker(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    a, b = member(tmp_path, "a"), member(tmp_path, "b", "a")
    sample.add("f1.json", 3)
    run_to_end(a)
    run_to_end(b)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    assert snapshots.settle(order) == (Outcome.WAIT, "a, b")
    sample.add("f2.json", 3)
    run_to_end(a)  # the record of a, then nothing more
    assert checkpoint_of(a).topology[order.snapshot]["epoch"] == 2
    sample.add("f3.json", 3)
    run_to_end(a)
    run_to_end(b)
    outcome = settle(snapshots, order)
    assert outcome == (Outcome.COMMIT, "")
    written = snapshots.home.find_outcome(order.snapshot)
    assert written is not None
    assert written.records["a"] == 2


def make_chain(folder: Path) -> tuple[SampleInput, PipelineOptions, PipelineOptions]:
    """Two pipelines that have read one file."""
    sample = SampleInput(folder / "in")
    a, b = member(folder, "a"), member(folder, "b", "a")
    sample.add("f1.json", 3)
    run_to_end(a)
    run_to_end(b)
    return sample, a, b


def test_idle_paused_and_stopped_members_take_part(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    c = member(tmp_path, "c", "b")
    run_to_end(c)
    snapshots = open_snapshots(tmp_path, [a, b, c])
    with running(a), running(b) as paused:
        paused.pause()
        order = snapshots.order(TIMEOUT)
        with paused_run(c, LocalEngine(1), print) as started:
            assert started
            assert settle(snapshots, order) == (Outcome.COMMIT, "")
    assert [checkpoint_of(one).topology[order.snapshot]["epoch"] for one in (a, b, c)] == [2, 2, 2]
    assert load_asked(open_pipeline(a).storage, "a") == []
    (view,) = snapshots.list()
    assert (view.status, view.acknowledged) == ("COMPLETED", "3/3")


def test_a_run_that_is_alive_is_not_taken_for_stopped(tmp_path: Path) -> None:
    _, a, _ = make_chain(tmp_path)
    SampleInput(tmp_path / "in").add("f2.json", 3)
    with running(a):
        wait_until(lambda: checkpoint_of(a).epoch >= 2)
        with paused_run(a, LocalEngine(1), print) as started:
            assert not started


def test_a_member_that_is_behind_ends_its_slice_at_the_marker(tmp_path: Path) -> None:
    sample, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    for number in (2, 3):
        sample.add(f"f{number}.json", 3)
        run_to_end(a)
    order = snapshots.order(TIMEOUT)
    stop_asking(open_pipeline(b).storage, "b", order.snapshot)  # the marker alone must do
    run_to_end(a)
    sample.add("f4.json", 3)
    run_to_end(a)
    assert checkpoint_of(a).epoch == 5
    run_to_end(b)
    epochs = {entry.epoch: entry for entry in open_pipeline(b).entries(open_pipeline(b).load().entry)}
    record = checkpoint_of(b).topology[order.snapshot]["epoch"]
    rows = sum(int(r["to"]) - int(r["from"]) for e in epochs.values() if e.epoch <= record for r in e.inputs["a"])
    assert rows == 9
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    assert table_ids(b.sinks[0].location) == sample.ids


def test_a_marker_without_rows_is_an_epoch_and_a_claim_is_none(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    stop_asking(open_pipeline(b).storage, "b", order.snapshot)
    run_to_end(b)
    assert checkpoint_of(b).epoch == 1
    run_to_end(a)  # a claim, and a marker without rows
    run_to_end(b)
    assert checkpoint_of(b).epoch == 2
    assert settle(snapshots, order) == (Outcome.COMMIT, "")


def test_a_closed_snapshot_is_passed_over(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    run_to_end(a)
    snapshots.abort(order, "test")
    run_to_end(b)
    assert checkpoint_of(b).epoch == 1
    (view,) = snapshots.list()
    assert (view.status, view.reason) == ("FAILED", "test")


def test_a_rollback_of_a_member_aborts(tmp_path: Path) -> None:
    sample, a, b = make_chain(tmp_path)
    sample.add("f2.json", 3)
    run_to_end(a)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    run_to_end(a)
    Rollback(open_pipeline(a), 1).perform("test")
    run_to_end(a)
    run_to_end(b)
    outcome, reason = settle(snapshots, order)
    assert outcome is Outcome.ABORT
    assert reason.startswith("a: a rollback since the order")
    assert pins_of(a) == pins_of(b) == []
    assert order.snapshot in checkpoint_of(a).topology, "a history edit does not take a record back"


def test_another_spec_aborts(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    order = open_snapshots(tmp_path, [a, b]).order(TIMEOUT)
    changed = member(tmp_path, "b", "a")
    changed = replace(changed, sinks=(replace(delta_table(changed), write="upsert", key=("id",)),))
    outcome, reason = open_snapshots(tmp_path, [a, changed]).settle(order)
    assert (outcome, reason) == (Outcome.ABORT, "b: its spec has changed since the order")


def test_the_time_limit_aborts_and_names_who_is_missing(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(timedelta(0))
    run_to_end(a)
    assert snapshots.settle(order) == (
        Outcome.ABORT,
        "the time limit has passed, and these have no record: b",
    )


def test_the_floor_stays_at_the_record_until_the_snapshot_is_dropped(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    a, b = member(tmp_path, "a", rollback_window=1), member(tmp_path, "b", "a", rollback_window=1)
    make_epochs(sample, a, 1)
    run_to_end(b)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    run_to_end(a)
    run_to_end(b)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    make_epochs(sample, a, 4, first=2)
    assert (checkpoint_of(a).epoch, checkpoint_of(a).floor) == (6, 2)
    assert pins_of(a) == [order.snapshot]
    snapshots.drop(order.snapshot)
    assert pins_of(a) == []
    make_epochs(sample, a, 2, first=6)
    assert checkpoint_of(a).floor == 7
    assert checkpoint_of(a).topology[order.snapshot]["released"]


def test_a_staged_table_ends_its_commit_with_the_marker(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    a, b = member(tmp_path, "a", mode="staged"), member(tmp_path, "b", "a")
    sample.add("f1.json", 3)
    run_to_end(a)
    make_service(a).run_once()
    run_to_end(b)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    for number in (2, 3, 4):
        sample.add(f"f{number}.json", 3)
        run_to_end(a)
    assert snapshots.settle(order)[0] is Outcome.WAIT
    make_service(a).run_once()
    run_to_end(b)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    written = snapshots.home.find_outcome(order.snapshot)
    assert written is not None
    assert written.records["a"] == 2
    deciding = open_pipeline(a).deciding
    deciding.load()
    assert deciding.version_of(2) < deciding.version_of(4)
    assert table_ids(b.sinks[0].location) == sample.ids


def test_fan_in_a_cycle_and_two_snapshots_at_once(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    a, b = member(tmp_path, "a"), member(tmp_path, "b", "a")
    c = member(tmp_path, "c", "a", "b")
    c = replace(c, sinks=(replace(delta_table(c), input="a"), DeltaSinkOptions("d", str(tmp_path / "d"), input="b")))
    sample.add("f1.json", 3)
    for one in (a, b, c):
        run_to_end(one)
    snapshots = open_snapshots(tmp_path, [a, b, c])
    with running(a), running(b), running(c):
        orders = []
        for number in range(2, 8):
            sample.add(f"f{number}.json", 3)
            orders.append(snapshots.order(TIMEOUT))
        assert {settle(snapshots, order) for order in orders} == {(Outcome.COMMIT, "")}


def test_several_writers_and_members_without_history_are_refused(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    with pytest.raises(ConfigError, match="d has committed nothing yet"):
        open_snapshots(tmp_path, [a, b, member(tmp_path, "d", "b")]).order(TIMEOUT)
    with pytest.raises(ConfigError, match=r"is written by 'a' .* and 'z'"):
        open_snapshots(tmp_path, [a, b, replace(a, name="z")]).order(TIMEOUT)
    assert pins_of(a) == []


def test_pins_keep_what_a_snapshot_needs_from_vacuum(tmp_path: Path) -> None:
    _, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    run_to_end(a)
    run_to_end(b)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    table = DeltaTable(str(tmp_path / "a"))
    before = set(table.file_uris())
    table.delete()
    later = datetime.now(UTC) + timedelta(days=30)
    storage, handle = open_table(str(tmp_path / "a"), {})
    references = References(storage, handle, {}, later)
    candidates = Candidates({file.key: file for file in walk(storage, "") if file.key.endswith(".parquet")})
    references.apply(candidates)
    assert all(Path(name).exists() for name in before)
    assert not {Path(name).name for name in before} & {key.rsplit("/", 1)[-1] for key in candidates.files}


def pins_of(options: PipelineOptions) -> list[str]:
    folder = Path(options.sinks[0].location) / "_firnline/pins"
    return sorted(path.stem.removeprefix("topology-") for path in folder.glob("topology-*.json"))


def test_an_order_whose_pins_another_command_deletes_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    put_order = TopologyHome.put_order
    others: list[Order] = []

    def put_behind_another(self: TopologyHome, order: Order) -> None:
        if not others:  # between the pins and the order of the first command, a second one begins and ends
            others.append(order)
            others.append(open_snapshots(tmp_path, [a, b]).order(TIMEOUT))
        put_order(self, order)

    monkeypatch.setattr(TopologyHome, "put_order", put_behind_another)
    first = snapshots.order(TIMEOUT)
    outcome, reason = snapshots.settle(first)
    assert (outcome, "order it again" in reason) == (Outcome.ABORT, True)
    run_to_end(a)
    run_to_end(b)
    assert first.snapshot not in checkpoint_of(a).topology
    assert settle(snapshots, others[1]) == (Outcome.COMMIT, "")


@pytest.mark.parametrize("part", ["order", "outcome"])
def test_a_snapshot_whose_record_is_damaged_is_given_up_by_its_folder(tmp_path: Path, part: str) -> None:
    sample, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    first = snapshots.order(TIMEOUT)
    run_to_end(a)
    run_to_end(b)
    assert settle(snapshots, first) == (Outcome.COMMIT, "")
    [damaged] = (tmp_path / "home").rglob(f"{part}.json")
    damaged.write_bytes(b"")
    with pytest.raises(DamagedError) as failure:
        snapshots.order(TIMEOUT)
    assert failure.value.hint.endswith(f"move the folder {damaged.parent} away.")
    damaged.parent.rename(tmp_path / "away")
    second = snapshots.order(TIMEOUT)
    assert not list(tmp_path.glob(f"*/{PINS}/*{first.snapshot}*"))
    sample.add("f9.json", 1)
    run_to_end(a)
    run_to_end(b)
    assert settle(snapshots, second) == (Outcome.COMMIT, "")
    assert checkpoint_of(a).topology[first.snapshot]["released"]


def test_a_pipeline_that_begins_from_a_savepoint_of_a_member_holds_no_snapshots(tmp_path: Path) -> None:
    """Those are snapshots of the member, whose topology may be far away: they would hold the new one's floor."""
    sample, a, b = make_chain(tmp_path)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    for one in (a, b):
        run_to_end(one)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    saved = tmp_path / "saved"
    create_savepoint(open_pipeline(a), str(saved), copy=True, run="test")
    new = replace(a, sinks=(replace(delta_table(a), table=str(tmp_path / "new")),))
    restore_savepoint(open_pipeline(new), str(saved), "test")
    assert checkpoint_of(new).topology == {}
    restore_savepoint(open_pipeline(a), str(saved), "test")
    assert list(checkpoint_of(a).topology) == [order.snapshot], "the member still holds its own"
    sample.add("f2.json", 3)
    run_to_end(new)
    assert table_ids(tmp_path / "new") == sample.ids
