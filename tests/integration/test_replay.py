"""What a replay of epochs makes of the state: exactly what the epochs made of it when they were first read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.options import OperatorOptions, StateOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.keyed import (
    FIRST_TOTALS,
    FIRSTS,
    TOTALS,
    WINDOWS,
    KeyedInput,
    answers,
    answers_without_trouble,
    keyed_options,
)
from tests.support.pipelines import run_once, run_to_end
from tests.support.replays import Life, run_at

SEEDS = range(200) if os.environ.get("FIRNLINE_PROOF") else range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_kill_rescale_loss_or_silence_changes_what_tables_hold(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, seed)
    life.live(steps=6)
    assert life.differences() == {}, life.trace


# -- each of these was wrong in a copy of the code that the other tests let pass --------------------------


@pytest.mark.parametrize("seldom", ["firsts", "totals"])
def test_an_operator_skips_the_epochs_that_its_own_snapshot_holds(tmp_path: Path, seldom: str) -> None:
    source = KeyedInput(tmp_path / "in")
    operators = tuple(replace(o, interval_ms=3_600_000 if o.name == seldom else 1) for o in (FIRSTS, FIRST_TOTALS))
    options = keyed_options(tmp_path, operators, mode="per_operator")
    for _ in range(4):
        source.add()
        run_to_end(options)
    epochs = {name: ref["epoch"] for name, ref in held_state(options).items()}
    assert epochs == {"firsts": 4, "totals": 4, seldom: 1}
    source.add()
    run_to_end(options)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def held_state(options: Any) -> dict[str, Any]:
    held = open_pipeline(options).load().checkpoint
    assert held is not None
    return dict(held.state)


@pytest.mark.parametrize("every", [2, 3, 100])
def test_a_replay_of_the_middle_of_a_file_reads_neither_its_beginning_nor_its_end(tmp_path: Path, every: int) -> None:
    source = CounterInput(tmp_path / "in")
    options = counter_options(
        source.folder, tmp_path / "table", max_events=4, trigger=TriggerOptions(every_epochs=every)
    )
    for _ in range(3):
        source.add(files=1, rows=11)
        run_to_end(options)
    source.add(files=1, rows=2)
    run_to_end(options)
    assert read_counts(options.sinks[0].location) == source.expected()


def test_a_window_that_ends_exactly_at_the_watermark_is_closed(tmp_path: Path) -> None:
    """The delay is five seconds: the row at 65 seconds takes the watermark to the end of the first minute."""
    settings = {**WINDOWS.settings, "emit": "final"}
    options = keyed_options(tmp_path, (replace(WINDOWS, settings=settings),))
    options = replace(options, sinks=(replace(options.sinks[0], write="append"),))
    (tmp_path / "in").mkdir()
    for number, second in enumerate(("00:05", "01:05", "02:04")):
        row = f'{{"k": "x", "v": 1, "at": "2026-01-01T00:{second}Z"}}\n'
        (tmp_path / "in" / f"f{number}.json").write_text(row)
    run = run_once(options)
    assert [e.operators["windows"]["out"]["windows"] for e in run.told.epochs] == [0, 1, 0]


OWN = """
import pyarrow as pa

from firnline.operators.base import MAIN, Operator, Result


class Moments(Operator):
    "Remembers when each key was first folded."

    @property
    def keys(self):
        return tuple(self.settings["keys"])

    @property
    def state_schema(self):
        return pa.schema([("moment", pa.string())])

    def output_schema(self, port=MAIN):
        return pa.schema([*self.state_key, *self.state_schema])

    def fold(self, batch, context):
        import numpy as np

        every = np.arange(batch.keys.num_rows)
        then = [old or context.epoch_time.isoformat() for old in batch.state.column("moment").to_pylist()]
        state = pa.table({"moment": pa.array(then, pa.string())})
        return Result(every, state, output={MAIN: batch.keys.append_column("moment", state.column("moment"))})
"""


def test_a_replay_is_told_the_time_that_its_epoch_was_told(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "moments_of_keys.py").write_text(OWN)
    operator = OperatorOptions("moments", "moments_of_keys:Moments", ("files",), {"keys": ["k"]})
    plain = keyed_options(tmp_path, (operator,), trigger=TriggerOptions(every_epochs=100))
    sink = replace(plain.sinks[0], write="append")
    options = replace(plain, sinks=(sink,), operator_paths=(str(tmp_path / "own"),))
    (tmp_path / "in").mkdir()
    for minute, key in enumerate(("x", "y", "y")):
        (tmp_path / "in" / f"f{minute}.json").write_text(f'{{"k": "{key}", "v": 1}}\n')
        assert run_at(options, minute).exit_code == 0
    assert [row[1][14:16] for row in answers(sink.location) if row[0] == "y"] == ["01", "01"]


def test_the_first_epoch_with_other_shards_ends_with_a_checkpoint_of_the_state(tmp_path: Path) -> None:
    source = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, (TOTALS,), trigger=TriggerOptions(every_epochs=100))
    for shards, epoch in ((2, 1), (2, 1), (3, 3), (3, 3)):
        source.add()
        options = replace(options, state=StateOptions(shards=shards))
        run_to_end(options)
        ref = held_state(options)["totals"]
        assert (ref["epoch"], ref["shards"]) == (epoch, shards)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)
