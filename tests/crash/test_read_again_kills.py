"""Requests to read records and files again, killed at every point that a run reaches: each is answered exactly once."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.history.quarantine import load_quarantine, load_quarantine_files
from firnline.history.reread import plan_reread
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.kills import PROOF, in_proof, kill_at_every_point
from tests.support.pipelines import pipeline_options, run_once
from tests.support.processes import Launcher

pytestmark = pytest.mark.crash

MOST_KILLS = in_proof(None)


FILES = {  # by format: a and b are read first, then c
    "ndjson": ('{"id": 1, "v": 1}\n', '{"id": 2, "v": 2}\n{"id": 3}\nbroken\n', '{"id": 9, "v": 9}\n'),
    "csv": ("id,v\n1,1\n", "v,id\n2,2\n,3\nbroken\n", "id,v\n9,9\n"),
}


def options_of(root: str, **settings: object) -> PipelineOptions:
    """The format is the last part of `root`."""
    return pipeline_options(f"{root}/in", f"{root}/out", format=Path(root).name, **settings)  # type: ignore[arg-type]


def work(root: str) -> None:
    assert run_once(options_of(root)).exit_code == 0


def check(root: str, where: str) -> None:
    work(root)
    work(root)
    rows = DeltaTable(f"{root}/out").to_pyarrow_table().column("id").to_pylist()
    assert sorted(rows) == [1, 1, 2, 3, 9], where  # the row of the first file twice, the record without a key once
    pipeline = open_pipeline(options_of(root))
    assert [row["raw"] for row in load_quarantine(pipeline)] == [b"broken"], where
    assert pipeline.requests.load() == [], where


def prepare_in(root: Path) -> str:
    """A record without a key and a file that was read are requested again; one more file waits."""
    (root / "in").mkdir(parents=True)
    first, second, later = FILES[root.name]
    (root / "in" / "a").write_text(first)
    (root / "in" / "b").write_text(second)
    assert run_once(options_of(str(root), write="upsert", key=("v",))).exit_code == 0
    pipeline = open_pipeline(options_of(str(root)))
    files = [file.describe([number for number, _ in file.rows]) for file in load_quarantine_files(pipeline)]
    pipeline.requests.ask_replay("files", files, discard=False, ids=pipeline.ids)
    plan = plan_reread(pipeline, "a")
    pipeline.requests.ask_reread(plan.path, plan.source, reading=plan.reading, ids=pipeline.ids)
    (root / "in" / "c").write_text(later)
    return str(root)


@pytest.mark.parametrize("name", FILES)
def test_killed_at_every_point(tmp_path: Path, name: str) -> None:
    numbers = itertools.count()

    def prepare() -> str:
        return prepare_in(tmp_path / str(next(numbers)) / name)

    # Two requests are deleted; a request that an epoch still names is deleted again.
    deletes = {"storage.delete.before": 2, "storage.delete.after": 2}
    # Formats differ in what an epoch holds, not in how it becomes true: all other points are tried with the first one.
    calls = () if PROOF or name == "ndjson" else ("epoch.run", "stage.file", "delta.commit", "storage.delete")
    points = [f"{call}.{side}" for call in calls for side in ("before", "after")]
    reached = kill_at_every_point(prepare, work, check, points=points, varying=deletes, most=MOST_KILLS, helpers=False)
    assert reached["epoch.commit.after"] >= 2
    assert reached["storage.delete.after"] >= 2


@pytest.mark.parametrize(
    "point",
    [
        "epoch.plan.after:2",
        "epoch.run.after:1",
        "epoch.stage.after:1",
        "epoch.commit.before:1",
        "delta.commit.before:1",
        "delta.commit.before:2",
        "delta.commit.after:1",
        "storage.delete.before:1",
    ],
)
def test_a_run_that_planned_the_requests_is_fenced_by_one_that_answers_them(
    launcher: Launcher, tmp_path: Path, point: str
) -> None:
    root = prepare_in(tmp_path / "ndjson")
    assert resume_after_another_run(launcher, root, point) == 5
    check(root, point)


@pytest.mark.parametrize("point", ["epoch.plan.after:1", "delta.claim.before:1"])
def test_a_run_that_planned_the_requests_before_its_claim_drops_that_plan(
    launcher: Launcher, tmp_path: Path, point: str
) -> None:
    """It claims last, so it goes on, on a history in which the requests are answered."""
    root = prepare_in(tmp_path / "ndjson")
    assert resume_after_another_run(launcher, root, point) == 0
    check(root, point)


def resume_after_another_run(launcher: Launcher, root: str, point: str) -> int:
    """Stop a run at a point, let another one do all the work, wake the first; returns its exit code."""
    stopped = launcher.start(options_of(root), f"{point}:stop")
    stopped.wait_until_stopped()
    work(root)
    stopped.signal(signal.SIGCONT)
    return stopped.wait().exit_code
