"""Requests to read again beside `run --take-over` and `gc`: whoever sleeps and wakes up, each is answered once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

import firnline.checkpoint.ledger
from firnline.history.quarantine import load_quarantine, load_quarantine_files
from firnline.maintenance.gc import gc
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from tests.crash.test_read_again_kills import check, options_of, prepare_in, work
from tests.support.ageing import DAY, age_table
from tests.support.commands import run_plainly, run_taking_over
from tests.support.pipelines import run_once
from tests.support.processes import Child, Launcher

pytestmark = pytest.mark.crash

SEEDS = range(40 if os.environ.get("FIRNLINE_PROOF") else 4)
POINTS = [
    "epoch.plan.after:1",
    "lease.take.before:1",
    "lease.take.after:1",
    "delta.claim.before:1",
    "delta.claim.after:1",
    "epoch.plan.after:2",
    "stage.file.after:1",
    "stage.quarantine.after:1",
    "epoch.stage.after:1",
    "delta.commit.before:1",
    "delta.commit.after:1",
    "epoch.commit.after:1",
    "storage.delete.before:1",
    "storage.delete.after:1",
    "delta.commit.before:2",
    "epoch.acknowledge.before:1",
]


@pytest.fixture
def plain(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path / "plain", run_plainly)


@pytest.fixture
def takers(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path / "takers", run_taking_over)


def leased(root: str) -> PipelineOptions:
    return options_of(root, lease_seconds=1.0, store=StoreOptions(type="file", path=f"{root}/checkpoints"))


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_sleeps_is_taken_over(plain: Launcher, takers: Launcher, tmp_path: Path, point: str) -> None:
    root = prepare_in(tmp_path / "ndjson")
    sleeper = plain.start(leased(root), f"{point}:stop")
    sleeper.wait_until_stopped()
    taken = takers.run(leased(root))
    assert taken.exit_code == 0, taken
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait().exit_code in (0, 5)
    check(root, point)


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_takes_over_sleeps_itself(plain: Launcher, takers: Launcher, tmp_path: Path, point: str) -> None:
    """The first run goes on while the other one sleeps, until that one wakes up."""
    root = prepare_in(tmp_path / "ndjson")
    first = plain.start(leased(root), "epoch.stage.after:1:stop")  # before it commits anything
    first.wait_until_stopped()
    taker = takers.start(leased(root), f"{point}:stop")
    taker.wait_until_stopped()
    first.signal(signal.SIGCONT)
    first_end = first.wait()
    assert first_end.exit_code in (0, 5), first_end
    taker.signal(signal.SIGCONT)
    taken = taker.wait()
    assert taken.exit_code in (0, 5), taken
    check(root, point)


@pytest.mark.parametrize("aged", [False, True], ids=["young", "aged"])
@pytest.mark.parametrize("point", [point for point in POINTS if "lease" not in point])
def test_gc_sweeps_while_a_run_sleeps(launcher: Launcher, tmp_path: Path, point: str, aged: bool) -> None:
    root = prepare_in(tmp_path / "ndjson")
    sleeper = launcher.start(options_of(root), f"{point}:stop")
    sleeper.wait_until_stopped()
    if aged:
        age_table(f"{root}/out", 40 * DAY)
    gc(f"{root}/out")
    sleeper.signal(signal.SIGCONT)
    ended = sleeper.wait()
    assert ended.exit_code in (0, 3), ended
    check(root, point)


def ask_replay(root: str) -> None:
    """Request everything in quarantine, also what is requested already."""
    pipeline = open_pipeline(options_of(root))
    files = [file.describe([number for number, _ in file.rows]) for file in load_quarantine_files(pipeline)]
    if files:
        pipeline.requests.ask_replay("files", files, discard=False, ids=pipeline.ids)


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_that_sleep_and_wake_at_random_beside_gc(
    plain: Launcher, takers: Launcher, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad records become good ones: each is in the table once, however often and by whom it is asked for."""
    monkeypatch.setattr(firnline.checkpoint.ledger, "FOLD_ENTRIES", 3)
    rng, root = random.Random(seed), str(tmp_path / "ndjson")
    (Path(root) / "in").mkdir(parents=True)
    count = 0
    asleep: list[Child] = []
    for turn in range(8):
        lines = []
        for number in range(rng.randint(2, 6)):
            count += 1
            is_good = not number or rng.random() < 0.5  # some record must have the key
            lines.append(f'{{"id": {count}, "v": {count}}}' if is_good else f'{{"id": {count}}}')
        Path(root, "in", f"{turn}.json").write_text("".join(f"{line}\n" for line in lines))
        strict = {"write": "upsert", "key": ("v",)}
        assert run_once(options_of(root, **strict, max_bad_ratio=1.0)).exit_code == 0
        ask_replay(root)
        if rng.random() < 0.5:
            ask_replay(root)
        point = rng.choice([*POINTS, ""])
        child = rng.choice([plain, takers]).start(leased(root), f"{point}:stop" if point else "")
        if not point:
            time.sleep(rng.random() / 4)
            child.signal(signal.SIGSTOP)
        while child.is_alive and not child.is_stopped:
            time.sleep(0.01)
        asleep.append(child)
        if rng.random() < 0.5:
            if rng.random() < 0.5:
                age_table(f"{root}/out", 40 * DAY)
            gc(f"{root}/out")
        if rng.random() < 0.4:
            woken = asleep.pop(rng.randrange(len(asleep)))
            woken.signal(signal.SIGCONT)
            assert woken.wait().exit_code in (0, 3, 5, 6), woken.log()[-4000:]
    for child in asleep:
        child.signal(signal.SIGCONT)
        assert child.wait().exit_code in (0, 3, 5, 6), child.log()[-4000:]
    work(root)
    work(root)
    rows = DeltaTable(f"{root}/out").to_pyarrow_table().column("id").to_pylist()
    assert sorted(rows) == list(range(1, count + 1))
    pipeline = open_pipeline(options_of(root))
    assert list(load_quarantine(pipeline)) == []
    assert pipeline.requests.load() == []


def test_a_run_that_knew_requests_before_its_claim_forgets_those_that_others_answered(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Later epochs no longer name the requests as answered, since they are deleted."""
    root = prepare_in(tmp_path / "ndjson")
    sleeper = launcher.start(options_of(root), "delta.claim.before:1:stop")
    sleeper.wait_until_stopped()
    work(root)
    ask_replay(root)  # one more request, whose answer takes the place of the first ones
    check(root, "before it wakes up")
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait().exit_code == 0
    check(root, "after it woke up")
