"""Delta tables as sources on real Spark: by a query and by an operator with state, killed after a commit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.options import OperatorOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.spec.build import load_options
from tests.support.duck import execute
from tests.support.examples import CHAIN, load_example
from tests.support.kills import PROOF
from tests.support.pipelines import pipeline_options, run_to_end
from tests.support.processes import KILLED, Launcher

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1200)]

WAIT = 400


@pytest.fixture
def bronze(tmp_path: Path) -> PipelineOptions:
    """The first pipeline of the example, which has read four files in four epochs."""
    load_example("generate", CHAIN).write(tmp_path / "in", 4, orders=100)
    for name in ("bronze", "silver", "gold"):
        shutil.copy(CHAIN / f"{name}.yml", tmp_path)
    made = load_options(tmp_path / "bronze.yml", environ={})
    made = replace(made, batch=replace(made.batch, max_files=1))
    run_to_end(replace(made, sources=(replace(made.sources[0], min_age_secs=0.0),)))  # type: ignore[call-arg]
    return made


def run_killed(launcher: Launcher, options: PipelineOptions) -> None:
    ended = launcher.start(options, "delta.commit.after:1:kill", spark=True).wait(WAIT)
    assert ended.exit_code == KILLED, ended
    assert launcher.start(options, spark=True).wait(WAIT).exit_code == 0


def test_the_chain_of_the_example(launcher: Launcher, bronze: PipelineOptions, tmp_path: Path) -> None:
    for name in ("silver", "gold"):
        options = load_options(tmp_path / f"{name}.yml", environ={})
        options = replace(options, batch=replace(options.batch, max_events=250))
        if PROOF or name == "gold":  # which has state; without Spark, tests/crash/test_chain_kills.py kills all of them
            run_killed(launcher, options)
        else:
            assert launcher.start(options, spark=True).wait(WAIT).exit_code == 0
    for table, (found, expected, apart) in load_example("check", CHAIN).compare(tmp_path).items():
        assert (found, apart) == (expected, 0), table


def test_a_query_over_a_table(launcher: Launcher, bronze: PipelineOptions, tmp_path: Path) -> None:
    query = "select order_id, customer, cents / 100 as euros from bronze where cents >= 5000"
    options = pipeline_options(
        "",
        "",
        "large",
        sources=[DeltaSourceOptions("bronze", bronze.deciding.location)],
        operators=[OperatorOptions("large", "sql", ("bronze",), {"query": query})],
        sinks=[DeltaSinkOptions("large", str(tmp_path / "large"), input="large")],
        max_events=250,
    )
    run_killed(launcher, options)
    held = execute(
        "SELECT order_id, euros FROM read_parquet($f) ORDER BY ALL",
        {"f": DeltaTable(str(tmp_path / "large")).file_uris()},
    ).fetchall()
    expected = execute(
        "SELECT order_id, cents / 100 FROM read_json($f) WHERE cents >= 5000 ORDER BY ALL",
        {"f": str(tmp_path / "in" / "*.json")},
    ).fetchall()
    assert held == expected
    assert held
