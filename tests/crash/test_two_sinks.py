"""Two tables in one pipeline: each whole, both equal to the input, whatever dies between the two commits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.dry_run_preview import preview
from firnline.history.status import load_status
from firnline.options import OperatorOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.committers import commit_table
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids, table_rows

pytestmark = pytest.mark.crash

EACH_EPOCH = ("epoch.commit", "delta.commit", "outbox.copy", "outbox.release")
ONCE = ("delta.create", "delta.claim", "delta.evolve")
SIDES = ("before", "after")
COUNTS = OperatorOptions(
    "counts", "aggregate", ("files",), {"keys": ["month"], "aggregates": [{"name": "n", "function": "count"}]}
)
CHANGED: dict[str, Any] = {"input": "counts", "write": "upsert", "key": ("month",)}


def kills(*sinks: str) -> list[str]:
    """Every point that a sink reaches on its own lane, counted there: lanes reach a point in any order."""
    return [
        *(
            f"{c}.{s}@firnline sink {sink}:{n}"
            for c in EACH_EPOCH
            for s in SIDES
            for sink in sinks
            for n in (1, 2)
            if sink == "optional" or not c.startswith("outbox")
        ),
        *(f"{c}.{s}@firnline sink {sink}:1" for c in ONCE for s in SIDES for sink in sinks),
        *(f"epoch.record.before:{n}" for n in (1, 2, 3)),
        "epoch.acknowledge.after:1",
    ]


@pytest.fixture
def sinks(tmp_path: Path) -> dict[str, Any]:
    return {
        "sinks": (
            DeltaSinkOptions("optional", str(tmp_path / "two"), required=False, partition_by=("month",)),
            DeltaSinkOptions("main", str(tmp_path / "one")),
        )
    }


def months(sample: SampleInput) -> dict[str, int]:
    """How many records of each month were put in."""
    return dict(Counter(f"2026-{number % 3 + 1:02d}" for number in sample.ids.elements()))


def both(options: PipelineOptions) -> tuple[Counter[int], Counter[int]]:
    return table_ids(options.sinks[1].location), table_ids(options.sinks[0].location)


@pytest.mark.parametrize(
    ("policy", "fault"),
    # Only a quorum of both keeps a run from ending before the optional sink has got anything.
    [*(("quorum", fault) for fault in kills("main", "optional")), *(("required", fault) for fault in kills("main"))],
)
def test_killed(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, sinks: Any, fault: str, policy: str
) -> None:
    quorum = {"quorum": 2} if policy == "quorum" else {}
    options: PipelineOptions = make_options(max_files=1, commit_policy=policy, **quorum, **sinks)
    sample.add("a1.json", 3)
    sample.add("a2.json", 3, extra=1)
    if fault.startswith("delta.claim"):
        assert launcher.run(options).exit_code == 0
    sample.add("a3.json", 3)
    sample.add("a4.json", 3)
    assert launcher.run(options, f"{fault}:kill").exit_code == KILLED
    launcher.run_until_done(options)
    for _ in range(3):  # an optional sink may be left behind by a run that ends; the next one brings it level
        if both(options) == (sample.ids, sample.ids):
            break
        launcher.run_until_done(options)
    assert both(options) == (sample.ids, sample.ids)


def second_log(options: PipelineOptions) -> Path:
    """The log of the sink that does not decide."""
    return Path(options.ordered_sinks[1].location) / "_delta_log"


def break_second(options: PipelineOptions) -> None:
    """Files can still be staged there, but nobody can read or write the log."""
    log = second_log(options)
    log.parent.mkdir(exist_ok=True)
    if log.exists():
        log.rename(log.with_suffix(".away"))
    log.write_text("a file stands where the log should be")


def mend_second(options: PipelineOptions) -> None:
    log = second_log(options)
    log.unlink()
    if log.with_suffix(".away").exists():
        log.with_suffix(".away").rename(log)


@pytest.mark.parametrize("write", ["append", "staged", "upsert"])
def test_an_optional_sink_whose_storage_is_away_stops_nobody(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, write: str
) -> None:
    """From the first epoch on, and once more later: its rows wait beside the ledger, and it gets all of them."""
    kinds: dict[str, dict[str, Any]] = {"append": {"partition_by": ("month",)}, "staged": {"mode": "staged"}}
    away = DeltaSinkOptions("optional", str(tmp_path / "two"), required=False, **kinds.get(write, {}))
    main = DeltaSinkOptions("main", str(tmp_path / "one"), input="files")
    options: PipelineOptions = make_options(max_files=1, commit_policy="required", sinks=(main, away))
    if write == "upsert":
        options = replace(options, operators=(COUNTS,), sinks=(options.sinks[0], replace(away, **CHANGED)))
    table = Path(away.table)
    outbox = tmp_path / "one" / "_firnline" / options.name / "outbox"
    for number in range(1, 5):
        if number % 2:
            if table.exists():
                table.rename(tmp_path / "kept")
            table.write_text("a file stands where the folder should be")
        sample.add(f"a{number}.json", 3)
        run = run_once(options)
        assert run.exit_code == 0, run.result
        if number % 2:
            assert table_ids(tmp_path / "one") == sample.ids
            row = load_status(open_pipeline(options)).sinks[1]
            assert (row["name"], row["epoch"], row["epochs_behind"]) == ("optional", None, None)
            assert row["error"]
            assert any("optional sink" in warning for warning in preview(open_pipeline(options))["warnings"])
            assert any(outbox.rglob("*.parquet"))
            table.unlink()
            if (tmp_path / "kept").exists():
                (tmp_path / "kept").rename(table)
    for _ in range(2):  # one that ends early leaves the rest to the next
        assert run_once(options).exit_code == 0
    if write == "staged":
        commit_table(table)
        assert run_once(options).exit_code == 0
        sample.add("b.json", 1)
        assert run_once(options).exit_code == 0
        commit_table(table)
    if write == "upsert":
        assert {row["month"]: row["n"] for row in table_rows(table)} == months(sample)
    else:
        assert table_ids(table) == sample.ids
        assert load_status(open_pipeline(options)).sinks[1]["epochs_behind"] == 0
    if write != "staged":
        assert not any(outbox.rglob("*.parquet"))


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("policy", ["all", "required"])
def test_second_sink_is_down(
    sample: SampleInput, make_options: MakeOptions, sinks: Any, policy: str, is_required: bool
) -> None:
    """A run without a required sink stops, safe to run again; without an optional one it goes on."""
    options: PipelineOptions = make_options(max_files=1, commit_policy=policy, **sinks)
    second, main = options.sinks
    if is_required:  # the first required one decides
        options = replace(options, sinks=(main, replace(second, required=True)))
    for number in range(5):
        sample.add(f"a{number}.json", 3)
    break_second(options)
    run = run_once(options)
    if is_required:
        assert run.exit_code == 3, run.result
    else:
        assert run.exit_code == 0, run.result
        assert table_ids(main.location) == sample.ids
    mend_second(options)
    sample.add("b.json", 3)
    for _ in range(2):
        assert run_once(options).exit_code == 0
    assert both(options) == (sample.ids, sample.ids)


def test_lagging_sink_keeps_the_floor(
    sample: SampleInput, make_options: MakeOptions, sinks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that a lagging sink still needs are neither folded nor swept."""
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 4)
    monkeypatch.setattr("firnline.run.steps.FOLD_EVERY", 2)
    options: PipelineOptions = make_options(max_files=1, commit_policy="required", rollback_window=2, **sinks)
    sample.add("a0.json", 3)
    assert run_once(options).exit_code == 0
    break_second(options)
    for number in range(1, 15):
        sample.add(f"a{number:02d}.json", 1)
    assert run_once(options).exit_code == 0
    mend_second(options)
    sample.add("b.json", 3)
    for _ in range(2):
        assert run_once(options).exit_code == 0
    assert both(options) == (sample.ids, sample.ids)


def test_new_sink_on_old_pipeline_is_refused(sample: SampleInput, make_options: MakeOptions, sinks: Any) -> None:
    sample.add("a.json", 3)
    options: PipelineOptions = make_options(sinks=sinks["sinks"][1:])
    assert run_once(options).exit_code == 0
    run = run_once(make_options(**sinks))
    assert (run.exit_code, run.error_code) == (2, "config")


def test_first_required_sink_decides(sample: SampleInput, make_options: MakeOptions, sinks: Any) -> None:
    sample.add("a.json", 3)
    options: PipelineOptions = make_options(**sinks)
    assert run_once(options).exit_code == 0
    assert open_pipeline(options).deciding.name == "main"
    assert (Path(options.sinks[1].location) / "_firnline").exists()
    assert not (Path(options.sinks[0].location) / "_firnline" / options.name / "ledger").exists()
