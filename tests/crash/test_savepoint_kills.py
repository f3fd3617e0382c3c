"""Savepoints made, disposed of and restored under kill -9 and failures at every point that they reach.

Whatever is left behind is listed and can be disposed of; a restore that is repeated ends as one that was never broken.
These tests cover the fault points of `savepoint.` and `restore.`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline import faults
from firnline.errors import ConfigError, FirnlineError
from firnline.faults import VARIABLE
from firnline.history.edits.restore import restore_savepoint
from firnline.history.quarantine import load_quarantine
from firnline.history.savepoints.catalog import dispose_savepoint, list_savepoints
from firnline.history.savepoints.create import create_savepoint
from firnline.maintenance.gc import gc
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.ageing import DAY, age_files
from tests.support.kills import PROOF, count_points, kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

OPERATIONS = ("create", "dispose", "restore-back", "restore-swept", "restore-new")
MOST_KILLS = None if PROOF else 2  # per point; spread over its calls


@dataclass(frozen=True)
class Stage:
    """A pipeline with two sinks and a savepoint of its second epoch; `keep` holds it all as it was made."""

    options: PipelineOptions
    folder: Path
    keep: Path
    saved: Path
    rows: Counter[int]

    @property
    def target(self) -> PipelineOptions:
        """The same pipeline, into tables that do not exist yet."""
        return dataclasses.replace(self.options, sinks=sinks(self.folder / "new"))

    def start_over(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.keep, self.folder)


def sinks(folder: Path) -> tuple[DeltaSinkOptions, DeltaSinkOptions]:
    return (
        DeltaSinkOptions("main", str(folder / "one")),
        DeltaSinkOptions("further", str(folder / "two"), partition_by=("month",)),
    )


@pytest.fixture
def stage(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> Stage:
    folder, keep = tmp_path / "world", tmp_path / "keep"
    options = make_options(max_files=1, sinks=sinks(folder))
    for number in range(2):
        sample.add(f"f{number}.json", 3, bad=1)
        assert run_once(options).exit_code == 0
    rows = table_ids(options.sinks[0].location)
    create_savepoint(open_pipeline(options), str(folder / "saved"), copy=True)
    sample.add("f2.json", 3, extra="x")
    assert run_once(options).exit_code == 0
    shutil.copytree(folder, keep)
    return Stage(options, folder, keep, folder / "saved", rows)


def prepare(name: str, stage: Stage) -> Stage:
    stage.start_over()
    if name == "restore-swept":
        for sink in stage.options.sinks:
            DeltaTable(sink.location).optimize.compact()
            lose_removed(Path(sink.location))
    return stage


def lose_removed(root: Path) -> None:
    """Delete every file that the newest version does not name; how much a vacuum takes depends on the clock."""
    live = {Path(uri) for uri in DeltaTable(root).file_uris()}
    for path in root.rglob("*.parquet"):
        if path not in live and not path.relative_to(root).parts[0].startswith("_"):
            path.unlink()


def operate(name: str, stage: Stage) -> None:
    if name == "create":
        create_savepoint(open_pipeline(stage.options), str(stage.folder / "another"), copy=True)
    elif name == "dispose":
        dispose_savepoint(open_pipeline(stage.options), str(stage.saved))
    else:
        options = stage.target if name == "restore-new" else stage.options
        restore_savepoint(open_pipeline(options), str(stage.saved), "test")


def files(folder: Path) -> list[str]:
    """What lies in a folder; temporary files of a killed write are nobody's."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".tmp")


def pins(stage: Stage) -> int:
    return sum(len(list((Path(s.location) / "_firnline/pins").glob("savepoint-*"))) for s in stage.options.sinks)


def check(name: str, sample: SampleInput, stage: Stage, where: str) -> None:
    """Finish what was broken, as a person or a supervisor would, and look at everything."""
    if name == "create":
        check_create(stage, where)
    elif name == "dispose":
        check_dispose(stage, where)
    else:
        check_restore(name, stage, sample, where)
    for sink in stage.options.sinks:
        if not name.startswith("restore"):
            assert table_ids(sink.location) == sample.ids, where


def check_create(stage: Stage, where: str) -> None:
    place = stage.folder / "another"
    found = {s.path: s.state for s in list_savepoints(open_pipeline(stage.options))}
    assert found.get(str(stage.saved)) == "complete", where
    made = (place / "savepoint.json").exists()
    if str(place) not in found:
        assert files(place) == [], where
    else:
        assert found[str(place)] == ("complete" if made else "incomplete"), where
        dispose_savepoint(open_pipeline(stage.options), str(place))
        assert files(place) == [], where
    assert pins(stage) == 2, where
    shutil.rmtree(place, ignore_errors=True)
    create_savepoint(open_pipeline(stage.options), str(place), copy=True)
    assert [s.state for s in list_savepoints(open_pipeline(stage.options))] == ["complete", "complete"], where


def check_dispose(stage: Stage, where: str) -> None:
    listed = [s.id for s in list_savepoints(open_pipeline(stage.options))]
    for identity in listed:
        dispose_savepoint(open_pipeline(stage.options), identity)
    assert files(stage.saved) == [], where
    assert pins(stage) == 0, where
    with pytest.raises(ConfigError):
        dispose_savepoint(open_pipeline(stage.options), str(stage.saved))


def check_restore(name: str, stage: Stage, sample: SampleInput, where: str) -> None:
    options = stage.target if name == "restore-new" else stage.options
    kept = files(stage.keep / "saved")
    result = restore_savepoint(open_pipeline(options), str(stage.saved), "again")
    assert table_ids(options.sinks[0].location) == stage.rows, where
    run = run_once(options)
    assert (run.exit_code, run.told.late) == (0, 0), where
    assert restore_savepoint(open_pipeline(options), str(stage.saved), "again").epoch == result.epoch, where
    assert files(stage.saved) == kept, where
    for sink in options.sinks:
        assert table_ids(sink.location) == sample.ids, where
    found = [bytes(record["raw"]).strip() for record in load_quarantine(open_pipeline(options))]
    assert sorted(found) == sorted(sample.bad.elements()), where
    ledger = {options.name: open_pipeline(options).storage}
    for sink in options.sinks:
        root = Path(sink.location)
        age_files(root, 2 * DAY)
        gc(str(root), grace_seconds=3600, ledgers=ledger if sink is not options.deciding else None)
        assert table_ids(root) == sample.ids, where
        left_pins = [json.loads(p.read_text()) for p in (root / "_firnline/pins").glob("restore-*")]
        assert not [pin for pin in left_pins if pin["pid"] != os.getpid()], where  # a living process keeps its own
        left = {p.name for p in root.rglob("*.parquet") if "_" not in str(p.relative_to(root))}
        named = {Path(uri).name for uri in DeltaTable(root).file_uris()}
        log = "".join(p.read_text() for p in (root / "_delta_log").glob("*.json"))
        assert all(file in named or file in log for file in left), where


WANTED = {
    "create": {"savepoint.pin.before", "savepoint.copy.after", "savepoint.put.before", "savepoint.put.after"},
    "dispose": {"savepoint.delete.before", "savepoint.delete.after"},
    "restore-back": {"delta.claim.before", "delta.jump.before", "delta.jump.after", "delta.sync.after"},
    "restore-swept": {"restore.pin.before", "restore.pin.after", "restore.copy.before", "restore.copy.after"},
    "restore-new": {"delta.create.before", "delta.create.after", "restore.copy.after", "delta.jump.after"},
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_every_point(name: str, stage: Stage, sample: SampleInput) -> None:
    reached = kill_at_every_point(
        partial(prepare, name, stage),
        partial(operate, name),
        partial(check, name, sample),
        most=MOST_KILLS,
        helpers=MOST_KILLS is None,
    )
    assert WANTED[name] <= set(reached)


@pytest.mark.parametrize("name", OPERATIONS)
def test_broken_at_every_point(name: str, stage: Stage, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is told, or healed; repeated without it, all is well."""
    prepare(name, stage)
    reached = count_points(operate, name, stage)
    for point in sorted(reached):
        prepare(name, stage)
        monkeypatch.setenv(VARIABLE, f"{point}:1:raise")
        faults._seen.clear()
        try:
            operate(name, stage)
        except (FirnlineError, OSError) as error:
            told = str(error)
        else:
            told = "healed"
        monkeypatch.delenv(VARIABLE)
        check(name, sample, stage, f"{name}, broken at {point}: {told}")
    faults._seen.clear()
