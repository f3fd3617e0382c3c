"""Sweeping: what is needed stays whole, what is not goes, wherever the sweep is broken off."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firnline.errors import CheckpointError, ConfigError, DamagedError, NewerFormatError, StateIncompleteError
from firnline.state.manifest import CompleteCheckpoint, snapshot_ref
from firnline.state.snapshot import abort, begin, load, verify_files
from firnline.state.sweep import Marks, Swept, sweep
from firnline.storage import Storage, open_storage
from firnline.testing.faults import Faults, FaultyStorage
from firnline.types import Json
from tests.support.states import OPERATOR, StateHistory, list_checkpoints, make_checkpoint, sample_plan, write_segment

NOW = datetime(2040, 1, 1, tzinfo=UTC)
HOUR = 3600.0
MORE = 20 if os.environ.get("FIRNLINE_PROOF") else 1


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "home"))


@pytest.fixture
def home(storage: Storage) -> Path:
    return Path(storage.root)


def swept(storage: Storage, marks: Marks, *, now: datetime = NOW, keep: int = 0, dry_run: bool = False) -> Swept:
    return sweep(storage, marks, now, HOUR, keep, 2 * HOUR, dry_run)


def mark(*ids: str, keep_from: int = 1000) -> Marks:
    return Marks(dict.fromkeys(ids), keep_from)


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def touch(home: Path, folder: str, at: datetime) -> None:
    for path in (home / folder).rglob("*"):
        os.utime(path, (at.timestamp(),) * 2)


def state_of(complete: CompleteCheckpoint) -> dict[str, Json]:
    return {name: snapshot_ref(complete, name).to_json() for name in complete.plan.operators}


# -- one rule at a time ----------------------------------------------------------------------------------


def test_an_unmarked_old_checkpoint_goes_and_leaves_no_folder(storage: Storage, home: Path) -> None:
    old, kept = (make_checkpoint(storage, sample_plan(n)) for n in (1, 2))
    before = files(home)
    told = swept(storage, mark(kept.checkpoint_id))
    assert told.checkpoints == (old.checkpoint_id,)
    assert told.kept == (kept.checkpoint_id,)
    assert set(told.paths) == before - files(home)
    assert [path.name for path in home.iterdir()] == [kept.checkpoint_id]
    verify_files(storage, load(storage, kept.checkpoint_id), deep=True)


def test_a_dry_run_says_the_same_and_deletes_nothing(storage: Storage, home: Path) -> None:
    make_checkpoint(storage, sample_plan(1))
    before = files(home)
    size = sum((home / name).stat().st_size for name in before)
    told = swept(storage, mark(), dry_run=True)
    assert files(home) == before
    assert told.size_bytes == size
    assert swept(storage, mark()) == told
    assert files(home) == set()


def test_files_of_older_checkpoints_that_newer_ones_use_stay(storage: Storage, home: Path) -> None:
    history = StateHistory(storage, random.Random(1))
    ids = [history.next_epoch("checkpoint") for _ in range(5)]
    told = swept(storage, mark(ids[-1]))
    assert told.checkpoints == tuple(ids[:-1])
    assert verify_files(storage, load(storage, ids[-1]), deep=True) > 0
    assert len([name for name in files(home) if name.endswith(".arrow")]) == 10


def test_files_that_were_merged_away_go(storage: Storage, home: Path) -> None:
    history = StateHistory(storage, random.Random(1))
    first = history.next_epoch("plain")
    second = history.next_epoch("checkpoint", merge=True)
    swept(storage, mark(second))
    assert not (home / first).exists()
    arrows = {name for name in files(home) if name.endswith(".arrow")}
    assert arrows == set(load(storage, second).files())  # the unmerged run of its own epoch is gone as well


def test_an_epoch_without_a_checkpoint_keeps_what_a_later_one_uses(storage: Storage) -> None:
    history = StateHistory(storage, random.Random(1))
    history.next_epoch("plain")
    kept = history.next_epoch("checkpoint")
    swept(storage, mark(kept))
    verify_files(storage, load(storage, kept), deep=True)


def test_the_newest_complete_ones_stay_without_a_mark(storage: Storage) -> None:
    ids = [make_checkpoint(storage, sample_plan(n)).checkpoint_id for n in range(1, 6)]
    assert swept(storage, mark(), keep=2).kept == tuple(ids[3:])
    assert [info.checkpoint_id for info in list_checkpoints(storage)] == ids[3:]


def test_a_damaged_unmarked_one_does_not_count_among_the_newest(storage: Storage, home: Path) -> None:
    ids = [make_checkpoint(storage, sample_plan(n)).checkpoint_id for n in range(1, 4)]
    (home / ids[2] / "metadata.json").write_bytes(b"rot")
    touch(home, ids[2], NOW - timedelta(days=1))
    told = swept(storage, mark(), keep=1)
    assert told.kept == (ids[1],)
    assert list(told.damaged) == [ids[2]]
    assert [info.checkpoint_id for info in list_checkpoints(storage)] == [ids[1]]


def test_epochs_from_the_floor_on_stay_whatever_they_are(storage: Storage, home: Path) -> None:
    history = StateHistory(storage, random.Random(1))
    for kind in ("checkpoint", "partial", "plain", "lost"):
        history.next_epoch(kind)
    before = files(home)
    assert swept(storage, mark(keep_from=1)).paths == ()
    assert files(home) == before


def test_what_a_new_unmarked_checkpoint_uses_stays(storage: Storage) -> None:
    """Its commit in the sink may land while this sweeps."""
    history = StateHistory(storage, random.Random(1))
    history.next_epoch("checkpoint")
    history.next_epoch("checkpoint")
    newest = history.next_epoch("checkpoint")
    swept(storage, mark(keep_from=3))
    verify_files(storage, load(storage, newest), deep=True)


def test_nothing_younger_than_the_grace_period_goes(storage: Storage, home: Path) -> None:
    young = make_checkpoint(storage, sample_plan(1)).checkpoint_id
    touch(home, young, NOW - timedelta(minutes=59))
    assert swept(storage, mark()).paths == ()
    assert swept(storage, mark(), now=NOW + timedelta(minutes=2)).checkpoints == (young,)


def test_a_young_checkpoint_keeps_the_old_files_that_it_uses(storage: Storage, home: Path) -> None:
    history = StateHistory(storage, random.Random(1))
    history.next_epoch("checkpoint")
    young = history.next_epoch("checkpoint")
    touch(home, young, NOW)
    swept(storage, mark())
    verify_files(storage, load(storage, young), deep=True)


def test_a_file_from_the_future_is_young(storage: Storage, home: Path) -> None:
    name = make_checkpoint(storage, sample_plan(1)).checkpoint_id
    touch(home, name, NOW + timedelta(days=400))
    assert swept(storage, mark()).paths == ()


@pytest.mark.parametrize("kind", ["partial", "aborted", "both"])
def test_failed_ones_are_kept_for_a_while(kind: str, storage: Storage, home: Path) -> None:
    plan = sample_plan(1)
    if kind == "both":
        make_checkpoint(storage, plan)
    else:
        begin(storage, plan)
        write_segment(storage, plan.checkpoint_id, 0, "totals.t", b"half", epoch=1)
    if kind != "partial":
        abort(storage, plan.checkpoint_id, "timed out", unnamed=True)
    touch(home, plan.checkpoint_id, NOW - timedelta(minutes=119))
    before = files(home)
    assert swept(storage, mark()).paths == ()
    assert files(home) == before
    told = swept(storage, mark(), now=NOW + timedelta(minutes=2))
    assert told.checkpoints == (plan.checkpoint_id,)
    assert files(home) == set()


def test_a_marked_one_stays_though_somebody_tried_to_abort_it(storage: Storage) -> None:
    made = make_checkpoint(storage, sample_plan(1))
    abort(storage, made.checkpoint_id, "dropped", unnamed=True)
    assert swept(storage, Marks({made.checkpoint_id: made.digest}, 1000)).paths == ()
    assert load(storage, made.checkpoint_id, made.digest) == made


def test_a_used_file_of_an_aborted_checkpoint_stays(storage: Storage) -> None:
    history = StateHistory(storage, random.Random(1))
    first = history.next_epoch("checkpoint")
    second = history.next_epoch("checkpoint")
    abort(storage, first, "dropped", unnamed=True)
    assert first in swept(storage, mark(second)).checkpoints
    verify_files(storage, load(storage, second), deep=True)


def test_temporary_files_go_and_strangers_stay(storage: Storage, home: Path) -> None:
    kept = make_checkpoint(storage, sample_plan(1)).checkpoint_id
    litter = home / kept / "shard_0" / f".{'a' * 32}.tmp"
    litter.write_bytes(b"torn")
    touch(home, kept, NOW - timedelta(days=1))
    strangers = [home / "README", home / "7-old" / "COMMITTED", home / "notes" / "metadata.json"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("of somebody else")
    swept(storage, mark(kept))
    assert not litter.exists()
    assert all(path.exists() for path in strangers)


def test_an_empty_home_is_swept_in_no_time(storage: Storage) -> None:
    assert swept(storage, mark()) == Swept()


def test_the_order_keeps_what_is_complete_whole(storage: Storage) -> None:
    for number in (1, 2):
        make_checkpoint(storage, sample_plan(number))
    begin(storage, sample_plan(3))
    abort(storage, sample_plan(3).checkpoint_id, "x")
    turns = [_turn(path) for path in swept(storage, mark()).paths]
    assert turns == sorted(turns)
    assert set(turns) == {0, 1, 2, 3, 4}


def _turn(path: str) -> int:
    name = path.rsplit("/", 1)[1]
    if name == "metadata.json":
        return 1 if "shard_" in path else 3
    return {"COMMITTED": 0, "ABORTED": 4}.get(name, 2)


# -- marks that cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["COMMITTED", "metadata.json", "shard_1/metadata.json"])
@pytest.mark.parametrize("damage", ["gone", "rot", "newer"])
def test_a_marked_one_that_cannot_be_read_stops_the_sweep(name: str, damage: str, storage: Storage, home: Path) -> None:
    make_checkpoint(storage, sample_plan(1))
    marked = make_checkpoint(storage, sample_plan(2)).checkpoint_id
    path = home / marked / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            path.read_bytes().replace(b'"format":1', b'"format":9' if damage == "newer" else b'"farmat":1')
        )
    before = files(home)
    with pytest.raises(CheckpointError):
        swept(storage, mark(marked))
    assert files(home) == before


def test_a_mark_that_is_not_there_stops_the_sweep_unless_it_may_be_absent(storage: Storage, home: Path) -> None:
    old = make_checkpoint(storage, sample_plan(1)).checkpoint_id
    absent = sample_plan(2).checkpoint_id
    with pytest.raises(StateIncompleteError):
        swept(storage, mark(absent))
    write_segment(storage, absent, 0, "totals.t", b"on its way", epoch=2)
    told = sweep(storage, mark(absent), NOW, HOUR, 0, HOUR, absent_marks=True)
    assert told.checkpoints == (old,)
    assert files(home) == {f"{absent}/shard_0/totals.t.arrow"}


def test_another_digest_than_the_marked_one_stops_the_sweep(storage: Storage) -> None:
    made = make_checkpoint(storage, sample_plan(1))
    with pytest.raises(DamagedError):
        swept(storage, Marks({made.checkpoint_id: "0" * 64}, 1000))


def test_a_newer_format_stops_the_sweep_without_a_mark(storage: Storage, home: Path) -> None:
    from firnline.checkpoint.codec import canonical, checksum, parse

    path = home / make_checkpoint(storage, sample_plan(1)).checkpoint_id / "COMMITTED"
    body = {key: value for key, value in parse(path.read_bytes(), "").items() if key != "checksum"} | {"format": 9}
    path.write_bytes(canonical({**body, "checksum": checksum(canonical(body))}))
    with pytest.raises(NewerFormatError):
        swept(storage, mark(), keep=1)


@pytest.mark.parametrize("numbers", [(-1.0, 0, 0.0), (0.0, -1, 0.0), (0.0, 0, -1.0)])
def test_numbers_below_nothing_are_refused(numbers: tuple[float, int, float], storage: Storage) -> None:
    with pytest.raises(ConfigError):
        sweep(storage, mark(), NOW, *numbers)
    with pytest.raises(ConfigError):
        sweep(storage, mark("../x"), NOW, 0, 0, 0)


# -- collecting marks ------------------------------------------------------------------------------------


def test_marks_follow_from_what_sinks_versions_and_savepoints_name(storage: Storage) -> None:
    saved, slow, fast = (make_checkpoint(storage, sample_plan(n)) for n in (3, 10, 20))
    marks = Marks.collect(15, [OPERATOR], [state_of(slow), state_of(fast)], [state_of(saved)])
    assert marks.ids == {c.checkpoint_id: c.digest for c in (saved, slow, fast)}
    assert marks.keep_from_epoch == 10
    assert Marks.collect(7, [OPERATOR], [state_of(slow)]).keep_from_epoch == 7


def test_an_operator_without_a_snapshot_keeps_everything(storage: Storage) -> None:
    made = make_checkpoint(storage, sample_plan(10))
    assert Marks.collect(15, [OPERATOR, "joined"], [state_of(made)]).keep_from_epoch == 0
    assert Marks.collect(15, [OPERATOR], [state_of(made), {}]).keep_from_epoch == 0
    assert Marks.collect(15, [OPERATOR], []).keep_from_epoch == 0
    assert Marks.collect(15, [], [state_of(made)]).keep_from_epoch == 15  # of an operator that is no more


def test_a_reference_that_cannot_be_read_gives_no_marks() -> None:
    with pytest.raises(DamagedError):
        Marks.collect(1, [OPERATOR], [{OPERATOR: {"checkpoint": "x"}}])


# -- any history -----------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["checkpoint", "checkpoint", "plain", "partial", "lost", "abort", "back"]), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@contextmanager
def any_history(steps: list[tuple[str, bool]], seed: int) -> Iterator[tuple[StateHistory, random.Random]]:
    with tempfile.TemporaryDirectory(prefix="firnline-sweep-") as folder:
        generator = random.Random(seed)
        Path(folder, "home").mkdir()  # also where no epoch writes anything
        history = StateHistory(open_storage(f"{folder}/home"), generator)
        for kind, merge in steps:
            if kind == "back":
                if history.complete:
                    history.go_back(generator.choice(sorted(history.complete)))
            elif kind == "abort":
                abort(history.storage, history.next_epoch("partial"), "a shard failed")
            else:
                history.next_epoch(kind, merge=merge)
        yield history, generator


def marks_of(history: StateHistory, generator: random.Random) -> Marks:
    """As a caller collects them: the newest checkpoint is named by a fast sink, perhaps an older one by a slow sink."""
    if not history.base:
        return Marks.collect(generator.randint(0, history.epoch), [OPERATOR], [{}])
    base = history.complete[history.base]
    older = [c for c in history.complete.values() if c.epoch < base.epoch]
    slow = generator.choice(older) if older and generator.random() < 0.4 else base
    saved = [c for c in history.complete.values() if generator.random() < 0.3]
    floor = history.epoch if generator.random() < 0.6 else generator.randint(0, history.epoch)
    return Marks.collect(floor, [OPERATOR], [state_of(base), state_of(slow)], [state_of(c) for c in saved])


def check_whole(history: StateHistory, storage: Storage, marks: Marks) -> None:
    """Marked ones, whatever says that it is complete, and the state that the run goes on from."""
    for checkpoint, digest in marks.ids.items():
        verify_files(storage, load(storage, checkpoint, digest), deep=True)
    for info in list_checkpoints(storage):
        if info.status == "COMPLETED":
            verify_files(storage, load(storage, info.checkpoint_id), deep=True)
    for state in history.live.values():
        for ref in state.files:
            assert storage.stat(ref.path).size_bytes == ref.size_bytes


@settings(max_examples=40 * MORE)
@given(STEPS, st.integers(0, 2**32), st.integers(0, 3), st.booleans())
@example([("checkpoint", False)] * 5, 2, 3, False)  # old, unmarked, and kept as one of the newest
def test_what_is_needed_stays_and_the_rest_goes(
    steps: list[tuple[str, bool]], seed: int, keep: int, young: bool
) -> None:
    with any_history(steps, seed) as (history, generator):
        storage, home = history.storage, Path(history.storage.root)
        marks = marks_of(history, generator)
        if young:
            for path in sorted(home.rglob("*")):
                if path.is_file() and generator.random() < 0.5:
                    os.utime(path, (NOW.timestamp() - 60,) * 2)
        before = {name: (home / name).stat().st_mtime for name in files(home)}
        told = swept(storage, marks, keep=keep)
        gone = before.keys() - files(home)
        assert gone == set(told.paths)
        for name in gone:
            assert int(name[:20]) < marks.keep_from_epoch
            assert before[name] <= (NOW - timedelta(seconds=HOUR)).timestamp()
        check_whole(history, storage, marks)
        for checkpoint in sorted(history.complete, reverse=True)[:keep]:
            verify_files(storage, load(storage, checkpoint), deep=True)
        assert swept(storage, marks, keep=keep).paths == ()
        if not young:  # nothing is left below the bound but what is referred to
            needed = {path for name in told.kept for path in load(storage, name).files()}
            about = {name for name in files(home) if name.split("/")[0] in told.kept and not name.endswith(".arrow")}
            assert {name for name in files(home) if int(name[:20]) < marks.keep_from_epoch} <= needed | about


@settings(max_examples=12 * MORE)
@given(STEPS, st.integers(0, 2**32), st.booleans())
def test_broken_off_at_any_call_it_loses_nothing_and_the_next_one_ends_it(
    steps: list[tuple[str, bool]], seed: int, after: bool
) -> None:
    with (
        any_history(steps, seed) as (history, generator),
        tempfile.TemporaryDirectory(prefix="firnline-sweep-") as kept,
    ):
        home = Path(history.storage.root)
        marks = marks_of(history, generator)
        shutil.copytree(home, kept, dirs_exist_ok=True)
        faults = Faults()
        swept(faulty(home, faults), marks, keep=1)
        ended = files(home)
        for nth in range(1, len(faults.calls) + 1):
            shutil.rmtree(home)
            shutil.copytree(kept, home)
            with suppress(OSError):
                swept(faulty(home, Faults(nth=nth, for_ever=True, after=after)), marks, keep=1)
            check_whole(history, history.storage, marks)
            swept(history.storage, marks, keep=1)
            check_whole(history, history.storage, marks)
            assert files(home) == ended, f"call {nth}, {faults.calls[nth - 1]}"


def faulty(home: Path, faults: Faults) -> Storage:
    made: Storage = type("Counted", (FaultyStorage,), {"faults": faults})(str(home))
    return made
