"""One active run among many: killed, frozen, released or taken over, one goes on and every record lands once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.options import PipelineOptions, StoreOptions
from firnline.stores import open_store
from firnline.stores.lease import LeaseRecord
from tests.support.commands import JumpingClock, run_plainly, run_standby, run_taking_over
from tests.support.pipelines import MakeOptions
from tests.support.processes import KILLED, Child, Launcher, wait_until
from tests.support.s3 import new_bucket, s3_options
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

PATIENCE = 240.0
STORM_SECONDS = 120.0 if os.environ.get("FIRNLINE_PROOF") else 15.0
TOOK = "took the lease (token"


@pytest.fixture
def plain(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path / "plain", run_plainly)


@pytest.fixture
def standbys(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path / "standbys", run_standby)


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A pipeline whose lease is short, in a folder."""
    store = StoreOptions(type="file", path=str(tmp_path / "checkpoints"))
    made: PipelineOptions = make_options(max_files=1, lease_seconds=1.0, store=store)
    return made


def kept(options: PipelineOptions) -> PipelineOptions:
    """The pipeline with a lease that a holder keeps on a busy machine: it renews it every second."""
    return replace(options, checkpoint=replace(options.checkpoint, lease_seconds=3.0))


def wait_for_rows(options: PipelineOptions, sample: SampleInput, child: Child) -> None:
    wait_until(lambda: table_ids(options.sinks[0].location) == sample.ids, child)


def stop(child: Child) -> int:
    child.signal(signal.SIGTERM)
    return child.wait(PATIENCE).exit_code


def lease_record(options: PipelineOptions) -> LeaseRecord:
    assert options.checkpoint.store is not None
    store = open_store(options.checkpoint.store)
    found = store.get(f"{options.name}/lease", LeaseRecord)
    store.close()
    assert found is not None
    return found


def committed_epochs(options: PipelineOptions) -> Counter[int]:
    """How often each epoch was committed, by the table's own log."""
    found: Counter[int] = Counter()
    for commit in DeltaTable(options.sinks[0].location).history():
        value = commit.get("firnline")
        facts = json.loads(value) if isinstance(value, str) else value
        if facts and facts["kind"] == "epoch":
            found[facts["entry"]["epoch"]] += 1
    return found


def check(options: PipelineOptions, sample: SampleInput) -> None:
    assert table_ids(options.sinks[0].location) == sample.ids
    epochs = committed_epochs(options)
    assert set(epochs) == set(range(1, max(epochs) + 1))
    assert set(epochs.values()) == {1}


def test_a_frozen_holder_is_succeeded_and_ends_fenced(
    plain: Launcher, standbys: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    sample.add("a1.json", 4)
    holder = plain.start(options, once=False)
    wait_for_rows(options, sample, holder)
    first = lease_record(options)
    assert first.pid == holder.pid
    holder.signal(signal.SIGSTOP)
    standby = standbys.start(options, once=False)
    standby.wait_for(f"standing by: run {first.holder} on {first.host}:{holder.pid} holds the lease (token 1)")
    standby.wait_for(TOOK)
    for number in range(3):
        sample.add(f"b{number}.json", 4)
    wait_for_rows(options, sample, standby)
    holder.signal(signal.SIGCONT)
    assert holder.wait(PATIENCE).exit_code == 5
    assert "took the lease over (token" in holder.log() or "fenced" in holder.log()
    sample.add("c1.json", 4)
    wait_for_rows(options, sample, standby)
    assert lease_record(options).token > first.token
    assert stop(standby) == 0
    assert lease_record(options).released
    check(options, sample)


def test_a_living_holder_is_left_alone_and_a_killed_one_succeeded(
    plain: Launcher, standbys: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    options = kept(options)
    sample.add("a1.json", 4)
    holder = plain.start(options, once=False)
    wait_for_rows(options, sample, holder)
    waiting = [standbys.start(options, once=False) for _ in range(2)]
    for child in waiting:
        child.wait_for("standing by: run")
    writes = lease_record(options).writes
    wait_until(lambda: lease_record(options).writes > writes + 6, holder)  # over two leases long
    assert not any(TOOK in child.log() for child in waiting)
    holder.signal(signal.SIGKILL)
    assert holder.wait().exit_code == KILLED
    wait_until(lambda: any(TOOK in child.log() for child in waiting), waiting[0])
    sample.add("b1.json", 4)
    wait_for_rows(options, sample, waiting[0])
    active, idle = sorted(waiting, key=lambda child: TOOK not in child.log())
    assert TOOK not in idle.log()
    assert lease_record(options).pid == active.pid
    assert stop(active) == 0
    idle.wait_for(TOOK)
    sample.add("c1.json", 4)
    wait_for_rows(options, sample, idle)
    assert stop(idle) == 0
    check(options, sample)


def test_a_released_lease_is_taken_at_once_and_a_standby_can_be_stopped(
    plain: Launcher, standbys: Launcher, make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    store = StoreOptions(type="file", path=str(tmp_path / "checkpoints"))
    options: PipelineOptions = make_options(lease_seconds=3600.0, store=store)
    sample.add("a1.json", 4)
    holder = plain.start(options, once=False)
    wait_for_rows(options, sample, holder)
    never, standby = standbys.start(options, once=False), standbys.start(options, once=False)
    never.wait_for("standing by: run")
    standby.wait_for("standing by: run")
    assert stop(never) == 0
    assert "stopped while standing by; nothing was run" in never.log()
    assert stop(holder) == 0
    standby.wait_for(TOOK)  # long before the hour is over
    sample.add("b1.json", 4)
    wait_for_rows(options, sample, standby)
    assert stop(standby) == 0
    check(options, sample)


@pytest.mark.parametrize("point", ["lease.take.before", "lease.take.after"])
def test_of_two_starts_at_the_same_instant_exactly_one_runs(
    plain: Launcher, options: PipelineOptions, sample: SampleInput, point: str
) -> None:
    """Both have read that nobody holds the lease; both are held where they write it, or one after it wrote it."""
    long = replace(options, checkpoint=replace(options.checkpoint, lease_seconds=60.0))  # frozen, but alive
    sample.add("a1.json", 4)
    held = plain.start(long, f"{point}:1:stop", once=False)
    held.wait_until_stopped()
    other = plain.start(long, f"{point}:1:stop" if point.endswith("before") else "", once=False)
    if point.endswith("before"):
        other.wait_until_stopped()
        other.signal(signal.SIGCONT)
        wait_for_rows(long, sample, other)
        held.signal(signal.SIGCONT)
        runs, refused = other, held
    else:
        runs, refused = held, other
    assert refused.wait(PATIENCE).exit_code == 6
    assert f"(pid {runs.pid})" in refused.log()
    runs.signal(signal.SIGCONT)
    wait_for_rows(long, sample, runs)
    assert stop(runs) == 0
    check(long, sample)


def test_the_lease_of_a_killed_run_is_taken_at_once_but_not_that_of_a_frozen_one(
    plain: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    long = replace(options, checkpoint=replace(options.checkpoint, lease_seconds=3600.0))
    sample.add("a1.json", 4)
    first = plain.start(long, once=False)
    wait_for_rows(long, sample, first)
    first.signal(signal.SIGSTOP)
    first.wait_until_stopped()
    sample.add("b1.json", 4)
    assert plain.run(long).exit_code == 6
    first.signal(signal.SIGKILL)  # not waited for: it may be a zombie
    wait_until(lambda: plain.run(long).exit_code == 0)
    assert first.wait().exit_code == KILLED
    check(long, sample)


def test_a_run_that_takes_over_takes_the_lease_from_a_living_holder(
    plain: Launcher, options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a1.json", 4)
    first = plain.start(options, once=False)
    wait_for_rows(options, sample, first)
    second = Launcher(tmp_path / "second", run_taking_over).start(options, once=False)
    second.wait_for("took the lease over from run ")
    ended = first.wait(PATIENCE)  # without any commit of the second: its renewal tells
    assert ended.exit_code == 5
    assert f":{second.pid} took the lease over (token" in first.log()
    sample.add("b1.json", 4)
    wait_for_rows(options, sample, second)
    assert stop(second) == 0
    check(options, sample)


def test_an_outage_of_the_store_ends_no_run(
    plain: Launcher, options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a1.json", 4)
    holder = plain.start(options, once=False)
    wait_for_rows(options, sample, holder)
    place = tmp_path / "checkpoints"
    place.rename(tmp_path / "away")
    place.touch()  # where a folder should be: nothing can be read or put
    holder.wait_for("the lease lapsed: the store cannot be reached; going on, the table decides")
    sample.add("b1.json", 4)
    wait_for_rows(options, sample, holder)
    place.unlink()
    (tmp_path / "away").rename(place)
    holder.wait_for("the lease is renewed again")
    sample.add("c1.json", 4)
    wait_for_rows(options, sample, holder)
    assert stop(holder) == 0
    assert lease_record(options).released
    check(options, sample)


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("point", [f"lease.{c}.{s}" for c in ("take", "renew", "release") for s in ("before", "after")])
def test_killed_or_broken_at_the_leases_own_points(
    standbys: Launcher, options: PipelineOptions, sample: SampleInput, point: str, action: str
) -> None:
    for number in range(4):
        sample.add(f"a{number}.json", 4)
    first = standbys.start(options, f"{point}:1:{action}", once=False)
    if action == "raise":
        wait_for_rows(options, sample, first)
        wait_until(lambda: lease_record(options).writes > 4, first)
        assert stop(first) == 0
    elif "release" in point:
        wait_for_rows(options, sample, first)
        assert stop(first) == KILLED
    else:
        assert first.wait(PATIENCE).exit_code == KILLED
    sample.add("b1.json", 4)
    assert standbys.run(options).exit_code == 0
    check(options, sample)


def test_jumps_of_the_wall_clock_neither_give_nor_take_a_lease(
    plain: Launcher, standbys: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    jumping = {"firnline.clock:SystemClock": JumpingClock}
    options = kept(options)
    sample.add("a1.json", 4)
    holder = plain.start(options, once=False, patches=jumping)
    wait_for_rows(options, sample, holder)
    standby = standbys.start(options, once=False, patches=jumping)
    standby.wait_for("standing by: run")
    seen = {lease_record(options).renewed_at[:4]}
    writes = lease_record(options).writes
    while lease_record(options).writes < writes + 8:
        seen.add(lease_record(options).renewed_at[:4])
        assert holder.is_alive
        time.sleep(0.05)
    assert len(seen) > 1  # years went by, back and forth
    assert TOOK not in standby.log()
    holder.signal(signal.SIGKILL)
    standby.wait_for(TOOK)
    sample.add("b1.json", 4)
    wait_for_rows(options, sample, standby)
    assert stop(standby) == 0
    check(options, sample)


# -- other stores -------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", pytest.param("s3", marks=pytest.mark.s3), "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreOptions:
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        uri = f"s3://{new_bucket(server)}/checkpoints"
        return StoreOptions(type="object", uri=uri, storage_options=s3_options(server))
    if request.param == "postgres":
        return StoreOptions(type="postgres", dsn=request.getfixturevalue("postgres"))
    return StoreOptions(type="sqlite", path=str(tmp_path / "checkpoints.db"))


def test_a_standby_takes_over_by_a_lease_in_another_store(
    plain: Launcher, standbys: Launcher, make_options: MakeOptions, sample: SampleInput, store: StoreOptions
) -> None:
    options: PipelineOptions = make_options(max_files=1, lease_seconds=2.0, store=store)
    sample.add("a1.json", 4)
    holder = plain.start(options, once=False)
    wait_for_rows(options, sample, holder)
    standby = standbys.start(options, once=False)
    standby.wait_for("standing by: run")
    holder.signal(signal.SIGSTOP)
    standby.wait_for(TOOK)
    sample.add("b1.json", 4)
    wait_for_rows(options, sample, standby)
    holder.signal(signal.SIGCONT)
    assert holder.wait(PATIENCE).exit_code == 5
    assert stop(standby) == 0
    check(options, sample)


# -- all at once --------------------------------------------------------------------------------------


def test_three_instances_in_a_storm_of_kills(standbys: Launcher, options: PipelineOptions, sample: SampleInput) -> None:
    """Killed, frozen and thawed at random, restarted when they end; input keeps coming. Counted by DuckDB."""
    seed = int(os.environ.get("FIRNLINE_SEED", random.randrange(1 << 30)))
    dice = random.Random(seed)
    sample.add("a0.json", 4)
    children = [standbys.start(options, once=False) for _ in range(3)]
    started = list(children)
    frozen: set[int] = set()
    ends: Counter[int] = Counter()
    deadline = time.monotonic() + STORM_SECONDS
    files = 0

    def takeovers() -> int:
        return sum(TOOK in child.log() for child in started)

    while time.monotonic() < deadline or (takeovers() < 4 and time.monotonic() < deadline + PATIENCE):
        files += 1
        sample.add(f"b{files:04d}.json", 3)
        place = dice.randrange(3)
        child = children[place]
        if not child.is_alive:
            ends[child.wait().exit_code] += 1
            children[place] = standbys.start(options, once=False)
            started.append(children[place])
        elif place in frozen:
            child.signal(signal.SIGCONT)
            frozen.discard(place)
        else:
            number = dice.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
            child.signal(number)
            if number == signal.SIGSTOP:
                frozen.add(place)
        time.sleep(dice.uniform(0.1, 1.2))
    for place, child in enumerate(children):
        if place in frozen:
            child.signal(signal.SIGCONT)
        if child.is_alive:
            child.signal(signal.SIGTERM)
        ends[child.wait(PATIENCE).exit_code] += 1
    # 130: told to stop twice. Minus SIGTERM: told before it had begun to listen.
    assert set(ends) <= {0, 5, 130, KILLED, -signal.SIGTERM}, f"FIRNLINE_SEED={seed}: {ends}"
    assert takeovers() >= 4, f"FIRNLINE_SEED={seed}: too quiet a storm"
    standbys.run_until_done(options)
    check(options, sample)
    print(f"{files} files, {len(started)} runs, {takeovers()} takeovers, exit codes {dict(ends)}")
