"""The files of a checkpoint of state: created once, first writer wins, complete or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.checkpoint.codec import canonical, checksum, seal
from firnline.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    NewerFormatError,
    StateConflictError,
    StateDamagedError,
    StateIncompleteError,
)
from firnline.names import metadata_key
from firnline.state.manifest import (
    CheckpointPlan,
    OperatorState,
    ShardState,
    SnapshotRef,
    assemble,
    check_id,
    check_path,
    checkpoint_id,
    snapshot_ref,
)
from firnline.state.snapshot import (
    abort,
    begin,
    commit,
    finish_shard,
    load,
    verify_files,
)
from firnline.storage import LocalStorage, Storage, open_storage
from tests.support.damage import cuts, flips
from tests.support.states import (
    OPERATOR,
    find_newest_complete,
    finish_all,
    list_checkpoints,
    make_checkpoint,
    new_states,
    sample_plan,
    write_segment,
)

ID = f"{7:020d}-a1"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "home"))


@pytest.fixture
def home(storage: Storage) -> Path:
    return Path(storage.root)


def finished(storage: Storage, plan: CheckpointPlan) -> dict[int, str]:
    begin(storage, plan)
    return finish_all(storage, plan, new_states(storage, plan))[1]


# -- names -----------------------------------------------------------------------------------------------


def test_an_id_is_the_epoch_and_the_attempt() -> None:
    assert checkpoint_id(7, "a1") == ID


@pytest.mark.parametrize(
    "value", ["", "7-a", "../x", f"{7:020d}-", f"{7:020d}-A", f"{7:020d}-a/b", f"{7:020d}-..", ID + "\n", ID + "x" * 64]
)
def test_what_is_no_id_never_becomes_a_path(value: str, storage: Storage) -> None:
    with pytest.raises(ConfigError):
        check_id(value)
    calls: list[Callable[[], object]] = [
        lambda: load(storage, value),
        lambda: abort(storage, value, "x"),
        lambda: finish_shard(storage, value, 0, {}),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
    assert not Path(storage.root).exists()


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x.arrow", f"{ID}/../x", f"{ID}/shard_0/../../x", f"{ID}/shard_01/x.arrow"]
)
def test_a_file_outside_the_checkpoints_is_refused(path: str, storage: Storage) -> None:
    with pytest.raises(DamagedError):
        check_path(path)
    plan = sample_plan(7)
    run = replace(new_states(storage, plan)[0][OPERATOR].segments[0], path=path)
    with pytest.raises(DamagedError):
        finish_shard(storage, ID, 0, {OPERATOR: ShardState((run,))})


# -- what is written -------------------------------------------------------------------------------------


def test_the_files_are_those_of_the_layout(storage: Storage, home: Path) -> None:
    complete = make_checkpoint(storage, sample_plan(7))
    assert complete.checkpoint_id == ID
    names = {str(p.relative_to(home)) for p in home.rglob("*") if p.is_file()}
    assert names == {
        f"{ID}/COMMITTED",
        f"{ID}/metadata.json",
        *(f"{ID}/shard_{n}/{name}" for n in (0, 1) for name in ("metadata.json", f"{OPERATOR}.t{n}.arrow")),
        *(f"{ID}/shard_{n}/{OPERATOR}.t{n}.timers.arrow" for n in (0, 1)),
    }


def test_the_metadata_can_be_read_without_firnline(storage: Storage, home: Path) -> None:
    make_checkpoint(storage, sample_plan(7))
    metadata = json.loads((home / ID / "metadata.json").read_text())
    assert metadata["barrier"] == metadata["epoch"] == 7
    assert metadata["shards"] == [{"shard": 0, "groups": [0, 4]}, {"shard": 1, "groups": [4, 8]}]
    assert metadata["workers"] == [{"host": "worker-1", "pid": 100}]
    told = {"type": "aggregate", "key_schema": "k" * 64, "state_schema": "s" * 64, "shape": ""}
    assert metadata["operators"] == {OPERATOR: told}
    shard = json.loads((home / ID / "shard_1" / "metadata.json").read_text())
    (run,) = shard["operators"][OPERATOR]["runs"]
    assert run["path"] == f"{ID}/shard_1/{OPERATOR}.t1.arrow"
    assert run["size_bytes"] == (home / run["path"]).stat().st_size
    assert shard["report"] == {"rows": 1}
    committed = json.loads((home / ID / "COMMITTED").read_text())
    assert committed["metadata"] == checksum((home / ID / "metadata.json").read_bytes())
    assert committed["shards"] == [checksum((home / ID / f"shard_{n}" / "metadata.json").read_bytes()) for n in (0, 1)]


def test_what_is_loaded_is_what_was_made(storage: Storage) -> None:
    plan = sample_plan(7, operators=("totals", "joined"), shards=3)
    made = make_checkpoint(storage, plan)
    found = load(storage, ID, made.digest)
    assert found == made
    assert found.plan == plan
    assert (found.epoch, found.plan.positions, found.plan.watermarks) == (7, plan.positions, plan.watermarks)
    state = found.operators["joined"]
    assert state == OperatorState.from_json(state.to_json())
    assert [(first, last) for first, last, _ in state.shards] == [(0, 2), (2, 5), (5, 8)]
    assert state.epoch == 7
    assert [content.report for content in found.contents] == [{"rows": 0}, {"rows": 1}, {"rows": 2}]
    assert verify_files(storage, found, deep=True) == sum(ref.size_bytes for ref in found.files().values())


def test_a_reference_survives_json_and_tells_sizes(storage: Storage) -> None:
    made = make_checkpoint(storage, sample_plan(7, operators=("totals", "joined")))
    ref = snapshot_ref(made, "joined")
    assert SnapshotRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    assert ref.to_json() == {
        "checkpoint": ID,
        "epoch": 7,
        "digest": made.digest,
        "shards": 2,
        "size_bytes": sum(state.size_bytes for _, _, state in made.operators["joined"].shards),
        "rows": ref.rows,
    }
    for change in ({"epoch": 8}, {"checkpoint": "../7"}, {"digest": None, "rows": "many"}):
        with pytest.raises(DamagedError):
            SnapshotRef.from_json({**ref.to_json(), **change})
    with pytest.raises(DamagedError):
        SnapshotRef.from_json({"checkpoint": ID})


def test_a_checkpoint_refers_to_files_of_older_ones(storage: Storage) -> None:
    first = make_checkpoint(storage, sample_plan(7))
    plan = sample_plan(8, "b2")
    run = write_segment(storage, plan.checkpoint_id, 0, "totals.x", b"new", epoch=8)
    older = {content.shard: content.operators[OPERATOR] for content in first.contents}
    states = {
        0: {OPERATOR: replace(older[0], segments=(*older[0].segments, run))},
        1: {OPERATOR: older[1]},
    }
    second = make_checkpoint(storage, plan, states)
    assert set(second.files()) == {*first.files(), run.path}
    verify_files(storage, load(storage, second.checkpoint_id), deep=True)


def test_a_file_that_two_shards_share_counts_once(storage: Storage) -> None:
    """As after a rescale, when two shards read their own groups from one file."""
    plan = sample_plan(7)
    run = write_segment(storage, ID, 0, "totals.old", b"shared bytes", epoch=3)
    shared = {0: {OPERATOR: ShardState((run,))}, 1: {OPERATOR: ShardState((run,))}}
    made = make_checkpoint(storage, plan, shared)
    assert snapshot_ref(made, OPERATOR).size_bytes == 12
    other = sample_plan(8)
    different = {0: {OPERATOR: ShardState((run,))}, 1: {OPERATOR: ShardState((replace(run, crc32=1),))}}
    with pytest.raises(DamagedError, match="disagree"):
        make_checkpoint(storage, other, different).files()


# -- once only -------------------------------------------------------------------------------------------


def test_begin_is_repeatable_but_not_with_another_plan(storage: Storage) -> None:
    plan = sample_plan(7)
    assert begin(storage, plan) == begin(storage, plan) == ID
    with pytest.raises(StateConflictError):
        begin(storage, replace(plan, positions={}))
    assert CheckpointPlan.from_bytes(storage.get(metadata_key(ID)), "the plan", ID) == plan


@pytest.mark.parametrize("shards", [(), ((0, 4),), ((0, 4), (5, 8)), ((0, 0), (0, 8)), ((4, 8), (0, 4)), ((0, 9),)])
def test_ranges_that_are_not_all_key_groups_are_refused(shards: tuple[tuple[int, int], ...], storage: Storage) -> None:
    with pytest.raises(ConfigError):
        begin(storage, replace(sample_plan(7), shards=shards))


def test_the_first_try_of_a_shard_wins(storage: Storage) -> None:
    plan = sample_plan(7)
    begin(storage, plan)
    states = new_states(storage, plan)
    first, first_sum = finish_shard(storage, ID, 0, states[0], {"staged": ["a"]})
    rival = write_segment(storage, ID, 0, "totals.rival", b"rival", epoch=7)
    second, second_sum = finish_shard(storage, ID, 0, {OPERATOR: ShardState((rival,))}, {"staged": ["b"]})
    assert (second, second_sum) == (first, first_sum)
    assert second.report == {"staged": ["a"]}


def test_a_damaged_first_try_is_no_content(storage: Storage, home: Path) -> None:
    plan = sample_plan(7)
    states = new_states(storage, plan)
    finish_shard(storage, ID, 0, states[0])
    path = home / ID / "shard_0" / "metadata.json"
    path.write_bytes(path.read_bytes().replace(b"totals", b"totale", 1))
    with pytest.raises(DamagedError):
        finish_shard(storage, ID, 0, states[0])


def test_tries_at_once_agree_on_one_content(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        tries = [pool.submit(finish_shard, storage, ID, 0, {}, {"try": n}) for n in range(16)]
    assert len({done.result()[1] for done in tries}) == 1


def test_commit_is_repeatable_but_not_with_other_shards(storage: Storage) -> None:
    sums = finished(storage, sample_plan(7))
    assert commit(storage, ID, sums) == commit(storage, ID, sums)
    with pytest.raises(StateConflictError):
        commit(storage, ID, {**sums, 1: "0" * 64})
    load(storage, ID)


@pytest.mark.parametrize("shards", [{}, {0: "a"}, {0: "a", 2: "b"}, {0: "a", 1: "b", 2: "c"}])
def test_commit_needs_every_shard(shards: dict[int, str], storage: Storage) -> None:
    begin(storage, sample_plan(7))
    with pytest.raises(StateIncompleteError):
        commit(storage, ID, shards)
    assert [info.status for info in list_checkpoints(storage)] == ["IN_PROGRESS"]


def test_commit_needs_a_beginning(storage: Storage) -> None:
    with pytest.raises(StateIncompleteError, match=r"lacks metadata\.json"):
        commit(storage, ID, {0: "a"})


def test_parts_that_lack_an_operator_are_no_checkpoint(storage: Storage) -> None:
    plan = sample_plan(7, operators=("totals", "joined"))
    states = new_states(storage, plan)
    del states[1]["joined"]
    contents, sums = finish_all(storage, plan, states)
    with pytest.raises(DamagedError, match="every operator"):
        assemble(plan, "", contents)
    with pytest.raises(DamagedError, match="shards"):
        assemble(plan, "", contents[:1])
    begin(storage, plan)
    commit(storage, ID, sums)
    with pytest.raises(DamagedError, match="every operator"):
        load(storage, ID)


# -- aborted ---------------------------------------------------------------------------------------------


def test_an_aborted_one_never_commits_and_never_loads(storage: Storage) -> None:
    sums = finished(storage, sample_plan(7))
    abort(storage, ID, "shard 1 failed")
    abort(storage, ID, "again")
    with pytest.raises(StateConflictError, match="shard 1 failed"):
        commit(storage, ID, sums)
    with pytest.raises(StateIncompleteError, match="shard 1 failed"):
        load(storage, ID)
    assert [info.status for info in list_checkpoints(storage)] == ["FAILED"]


def test_a_complete_one_is_not_aborted(storage: Storage) -> None:
    made = make_checkpoint(storage, sample_plan(7))
    with pytest.raises(StateConflictError):
        abort(storage, ID, "too late")
    assert load(storage, ID) == made
    assert not (Path(storage.root) / ID / "ABORTED").exists()


def test_a_complete_one_that_no_sink_names_may_be_aborted_by_who_knows(storage: Storage) -> None:
    made = make_checkpoint(storage, sample_plan(7))
    abort(storage, ID, "its epoch was dropped", unnamed=True)
    with pytest.raises(StateIncompleteError, match="dropped"):
        load(storage, ID)
    assert [info.status for info in list_checkpoints(storage)] == ["FAILED"]
    # A sink that names it all the same is right.
    assert load(storage, ID, made.digest) == load(storage, ID, named=True) == made
    assert [info.status for info in list_checkpoints(storage, frozenset({ID}))] == ["COMPLETED"]


class Between(LocalStorage):
    """Does something just before or after one file is created."""

    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None

    def put_new(self, key: str, data: bytes) -> None:
        before, self.before = self.before, None
        if before:
            before()
        super().put_new(key, data)
        after, self.after = self.after, None
        if after:
            after()


@pytest.mark.parametrize("side", ["before", "after"])
def test_of_a_commit_and_an_abort_at_once_never_both_succeed(side: str, storage: Storage) -> None:
    """Whenever the abort comes within the commit, the commit raises, so no sink will name the checkpoint."""
    sums = finished(storage, sample_plan(7))
    between = Between(storage.root)
    aborted = []

    def try_abort() -> None:
        try:
            abort(storage, ID, "timed out")
        except StateConflictError:
            return
        aborted.append(True)

    setattr(between, side, try_abort)
    if side == "before":
        with pytest.raises(StateConflictError):
            commit(between, ID, sums)
        assert aborted
    else:  # the abort saw COMMITTED and left it alone
        commit(between, ID, sums)
        assert not aborted
        load(storage, ID)


def test_an_abort_that_meets_a_commit_raises_and_the_sinks_decide(storage: Storage) -> None:
    sums = finished(storage, sample_plan(7))
    between = Between(storage.root)
    digests = []
    between.before = lambda: digests.append(commit(storage, ID, sums))
    with pytest.raises(StateConflictError):
        abort(between, ID, "timed out")
    with pytest.raises(StateIncompleteError):
        load(storage, ID)
    assert load(storage, ID, digests[0]).checkpoint_id == ID


# -- damage ----------------------------------------------------------------------------------------------


def test_what_is_not_there_is_incomplete(storage: Storage, home: Path) -> None:
    with pytest.raises(StateIncompleteError):
        load(storage, ID)
    made = make_checkpoint(storage, sample_plan(7))
    for name in ("COMMITTED", "metadata.json", "shard_1/metadata.json"):
        path = home / ID / name
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(StateIncompleteError):
            load(storage, ID, made.digest)
        path.write_bytes(data)
    assert load(storage, ID, made.digest) == made
    (home / next(iter(made.files()))).unlink()
    with pytest.raises(StateDamagedError, match="missing"):
        verify_files(storage, made, deep=False)


def test_another_digest_than_the_named_one_is_refused(storage: Storage) -> None:
    make_checkpoint(storage, sample_plan(7))
    with pytest.raises(DamagedError, match="named"):
        load(storage, ID, "0" * 64)


@pytest.mark.parametrize("name", ["COMMITTED", "metadata.json", "shard_0/metadata.json"])
@pytest.mark.parametrize("named", [True, False])
def test_every_flipped_byte_and_every_cut_of_metadata_is_noticed(
    name: str, named: bool, storage: Storage, home: Path
) -> None:
    made = make_checkpoint(storage, sample_plan(7, shards=1))
    path = home / ID / name
    data = path.read_bytes()
    for at, damaged in (*flips(data), *cuts(data)):
        path.write_bytes(damaged)
        try:
            found = load(storage, ID, made.digest if named else None)
        except CheckpointError:
            continue
        # Only white space at the end of COMMITTED, which nothing names, may differ.
        assert (name, named, at) in (("COMMITTED", False, len(data) - 1),)
        assert found.plan == made.plan
        assert found.contents == made.contents


def test_every_flipped_byte_and_every_cut_of_a_run_is_noticed(storage: Storage, home: Path) -> None:
    made = make_checkpoint(storage, sample_plan(7, shards=1))
    for name in made.files():
        path = home / name
        data = path.read_bytes()
        for _, damaged in (*flips(data), *cuts(data)):
            path.write_bytes(damaged)
            with pytest.raises(StateDamagedError):
                verify_files(storage, made, deep=True)
        path.write_bytes(data)
    verify_files(storage, made, deep=True)


def test_a_shallow_look_sees_sizes_only(storage: Storage, home: Path) -> None:
    made = make_checkpoint(storage, sample_plan(7))
    path = home / next(iter(made.files()))
    path.write_bytes(bytes(len(path.read_bytes())))
    verify_files(storage, made, deep=False)
    with pytest.raises(StateDamagedError, match="checksum"):
        verify_files(storage, made, deep=True)
    path.write_bytes(b"")
    with pytest.raises(StateDamagedError, match="bytes"):
        verify_files(storage, made, deep=False)


def test_a_newer_format_is_named(storage: Storage, home: Path) -> None:
    make_checkpoint(storage, sample_plan(7))
    path = home / ID / "COMMITTED"
    body = {key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"}
    body["format"] = 99
    path.write_bytes(canonical({**body, "checksum": checksum(canonical(body))}))
    with pytest.raises(NewerFormatError):
        load(storage, ID)


@pytest.mark.parametrize(
    "change",
    [
        {"shards": 3}, {"shards": [{"shard": 0}]}, {"shards": [{"groups": [0]}]}, {"operators": []}, {"epoch": None},
        {"epoch": 8}, {"positions": None}, {"key_groups": 9}, {"kind": "shard"}, {"checkpoint": f"{8:020d}-a1"},
        {"workers": [{}]},
    ],
)  # fmt: skip
def test_metadata_of_another_shape_is_damaged(change: dict[str, object]) -> None:
    body = json.loads(sample_plan(7).to_bytes())
    del body["checksum"]
    with pytest.raises(DamagedError):
        CheckpointPlan.from_bytes(canonical(seal({**body, **change})), "metadata", ID)


@pytest.mark.parametrize(
    "change", [{"shard": 1}, {"shard": None}, {"operators": {"totals": {}}}, {"operators": 1}, {"kind": "state"}]
)
def test_shard_metadata_of_another_shape_is_damaged(change: dict[str, object], storage: Storage, home: Path) -> None:
    finish_shard(storage, ID, 0, {})
    path = home / ID / "shard_0" / "metadata.json"
    body = json.loads(path.read_bytes())
    del body["checksum"]
    path.write_bytes(canonical(seal({**body, **change})))
    with pytest.raises(DamagedError):
        finish_shard(storage, ID, 0, {})


# -- listing ---------------------------------------------------------------------------------------------


def test_the_list_tells_what_became_of_each(storage: Storage, home: Path) -> None:
    make_checkpoint(storage, sample_plan(1))
    plan = sample_plan(2)
    begin(storage, plan)
    finish_shard(storage, plan.checkpoint_id, 0, new_states(storage, plan)[0])
    begin(storage, sample_plan(3))
    abort(storage, sample_plan(3).checkpoint_id, "timed out")
    write_segment(storage, sample_plan(4).checkpoint_id, 0, "totals.t", b"no checkpoint was begun", epoch=4)
    (home / "notes.txt").write_text("of somebody else")
    found = list_checkpoints(storage)
    assert [(i.epoch, i.status, i.shards_done) for i in found] == [
        (1, "COMPLETED", 2),
        (2, "IN_PROGRESS", 1),
        (3, "FAILED", 0),
    ]
    sizes = [sum(p.stat().st_size for p in (home / i.checkpoint_id).rglob("*") if p.is_file()) for i in found]
    assert [i.size_bytes for i in found] == sizes
    assert found[0].created_at <= found[0].modified_at


def test_the_newest_complete_one_is_found_behind_damaged_and_aborted_ones(storage: Storage, home: Path) -> None:
    assert find_newest_complete(storage) is None
    made = [make_checkpoint(storage, sample_plan(n)) for n in (1, 2, 3, 4)]
    assert find_newest_complete(storage) == made[3]
    assert find_newest_complete(storage, up_to_epoch=2) == made[1]
    abort(storage, made[3].checkpoint_id, "dropped", unnamed=True)
    assert find_newest_complete(storage) == made[2]
    assert find_newest_complete(storage, named={made[3].checkpoint_id}) == made[3]
    (home / made[2].checkpoint_id / "COMMITTED").write_bytes(b"{}")
    (home / next(iter(made[1].files()))).unlink()
    assert find_newest_complete(storage) == made[0]
