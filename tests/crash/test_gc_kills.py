"""gc, compact and vacuum killed at every point that they reach: rows stay, pipelines go on, the next sweep ends it.

These tests cover the fault points of `delta.compact` and of sweeps; `test_fault_points.py` covers those of a run.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import firnline.checkpoint.ledger
import firnline.maintenance.compact
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc, vacuum
from firnline.options import PipelineOptions
from tests.support.ageing import DAY, age_table
from tests.support.kills import PROOF, kill_at_every_point, perform
from tests.support.pipelines import known_files, run_once
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

OPERATIONS = ("gc", "compact", "vacuum")
MOST_KILLS = None if PROOF else 3  # per point; spread over its calls


@pytest.fixture
def options(sample: SampleInput, make_options: Callable[..., PipelineOptions], tmp_path: Path) -> PipelineOptions:
    """A table with small files, removed files, orphans, units set aside, quarantine and ledger entries to fold."""
    for number in range(8):
        sample.add(f"a{number}.json", 4, bad=number % 2)
    options = make_options(max_files=1, partition_by=("month",), rollback_window=1)
    assert run_once(options).exit_code == 0
    root = Path(options.sinks[0].location)
    compact(str(root))
    for number in range(4):
        sample.add(f"b{number}.json", 4)
    assert run_once(options).exit_code == 0
    litter(root)
    age_table(root, 40 * DAY)
    shutil.copytree(root, tmp_path / "kept")
    return options


def litter(root: Path) -> None:
    names = ["0123456789abcdef-1.parquet", "month=2026-01/part-1.parquet", "set-aside.parquet", f".{'a' * 32}.tmp"]
    names.append(f"_firnline/demo/quarantine/{1:020d}-{'e' * 16}-{'0' * 32}.parquet")
    for name in names:
        pq.write_table(pa.table({"id": pa.array([-1], pa.int64())}), root / name)
    rejected = root / "_staging" / "rejected" / "u.meta.json"
    rejected.parent.mkdir(parents=True)
    about = {"reason": "fork", "at": ""}
    rejected.write_text(json.dumps({"path": "set-aside.parquet", "size": 1, "record_count": 1, "rejected": about}))


def operate(name: str, root: Path) -> None:
    """In a process of its own: folds and compacts in small steps."""
    firnline.checkpoint.ledger.FOLD_ENTRIES = 3
    firnline.maintenance.compact.BATCH_BINS = 1
    if name == "gc":
        gc(str(root))
    elif name == "vacuum":
        vacuum(str(root))
    else:
        compact(str(root))


def start_over(options: PipelineOptions, kept: Path) -> Path:
    root = Path(options.sinks[0].location)
    shutil.rmtree(root)
    shutil.copytree(kept, root)  # with its times
    return root


def check(options: PipelineOptions, sample: SampleInput, root: Path, where: str) -> None:
    """Rows and quarantine are those of the input, and once everything is old, a sweep leaves what the log names."""
    assert table_ids(root) == sample.ids, where
    run = run_once(options)
    assert (run.exit_code, run.told.late, run.told.epochs) == (0, 0, []), where
    assert len(known_files(run.pipeline, run.pipeline.load().entry)) == 12, where
    age_table(root, 40 * DAY)
    gc(str(root))
    on_disk = {str(p.relative_to(root)) for p in root.rglob("*.parquet") if "/_" not in str(p)}
    in_log = {str(Path(uri).relative_to(root)) for uri in DeltaTable(root).file_uris()}
    assert on_disk == in_log, where
    assert not list(root.rglob("*.tmp")), where
    assert not list((root / "_firnline/pins").iterdir()), where
    assert not list((root / "_firnline/sweeps").iterdir()), where
    assert table_ids(root) == sample.ids, where


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_every_point(name: str, options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    reached = kill_at_every_point(
        partial(start_over, options, tmp_path / "kept"),
        partial(operate, name),
        partial(check, options, sample),
        most=MOST_KILLS,
        helpers=MOST_KILLS is None,
    )
    wanted = {"storage.put.after", "storage.delete.before", "storage.delete.after"}
    if name == "compact":
        wanted |= {"stage.file.before", "stage.file.after", "delta.compact.before", "delta.compact.after"}
    else:
        declared = ("sweep.declare", "delta.sweep", "sweep.end")
        wanted |= {f"{call}.{side}" for call in declared for side in ("before", "after")}
    wanted |= {"delta.sync.before", "delta.sync.after"}
    assert wanted <= set(reached)
    assert min(reached["storage.delete.before"], reached["storage.put.before"]) >= 1


def test_a_sweep_that_is_killed_again_and_again_comes_to_an_end(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    root = start_over(options, tmp_path / "kept")
    for _ in range(200):
        code, _ = perform("storage.delete.after:4:kill", operate, "gc", root)
        if code == 0:
            break
        assert table_ids(root) == sample.ids
    else:
        raise AssertionError("never done")
    assert quarantined_after(root) == sample.bad
    check(options, sample, root, "killed again and again")


def quarantined_after(root: Path) -> Counter[bytes]:
    """All quarantine that is left; entries may be folded by now."""
    found: Counter[bytes] = Counter()
    for path in (root / "_firnline/demo/quarantine").glob("*.parquet"):
        found.update(row["raw"] for row in pq.read_table(path).to_pylist())
    return found
