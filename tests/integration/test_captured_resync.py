"""A sink of captured tables that no table can be copied into: the tables are read again for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.sinks import last_line
from firnline.errors import ConfigError
from firnline.history.edits.sinks import SinkEdit
from firnline.history.sinks import load_sinks
from firnline.options import OutboxOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.known import find_away
from tests.integration.test_captured_tables import Database
from tests.support.captured import delta_rows
from tests.support.kills import kill
from tests.support.pipelines import run_once, run_to_end


def optional(options: PipelineOptions) -> PipelineOptions:
    """With an optional `current`."""
    return replace(options, sinks=tuple(replace(one, required=one.name != "current") for one in options.sinks))


@pytest.fixture
def database(captured_server: Any, tmp_path: Path) -> Database:
    found = Database(captured_server, tmp_path)
    found.run("INSERT INTO @orders VALUES (1, 1, 'a'), (2, 2, 'b')", "INSERT INTO @lines VALUES ('x', 'eu', 1)")
    found.run("INSERT INTO @notes VALUES ('plain')")
    run_to_end(optional(found.options()))
    return found


def give_up(database: Database, folder: Path) -> PipelineOptions:
    """Let the template sink lag until it is set aside: its folder is away. Then it is back."""
    options, lake = optional(database.options()), folder / "lake"
    lake.rename(folder / "away")
    lake.write_text("no folder")
    for number in range(10, 14):
        database.run(f"INSERT INTO @orders VALUES ({number}, 1, 'late')", "DELETE FROM @orders WHERE id = 1")
        database.run(f"INSERT INTO @lines VALUES ('y', 'eu', {number})")
        run_once(replace(options, outbox=OutboxOptions(max_bytes=1, keep=timedelta(0))))
    lake.unlink()
    (folder / "away").rename(lake)
    assert "current" in find_away(open_pipeline(options).load().checkpoint, options.followers)
    return options


def check(database: Database) -> None:
    database.check("orders", "id, amount, note")
    database.check("lines", "number, region, note")


def test_a_template_that_was_set_aside_is_read_again(database: Database, tmp_path: Path) -> None:
    options = give_up(database, tmp_path)
    edit = SinkEdit(open_pipeline(options), "resync", "current")
    plan = edit.plan()
    prefix = database.prefix or "public."
    assert sorted(plan.reads) == [f"{prefix}lines", f"{prefix}orders"]
    assert (plan.loses, plan.empties, plan.again) == ((f"{prefix}notes",), True, ("history",))
    done, _ = edit.perform("person")
    assert f"{prefix}orders" in last_line(done)
    database.run("INSERT INTO @orders VALUES (50, 5, 'after')")
    run_to_end(options)
    check(database)
    assert not open_pipeline(options).requests.load()
    past = Counter(op for (op,) in delta_rows(tmp_path / "history" / "orders", "_op"))
    assert past["truncate"] == 1
    run_to_end(options)
    check(database)


def test_a_sink_that_goes_on_says_what_it_drops(database: Database, tmp_path: Path) -> None:
    """Neither the command nor the list says that the next run delivers it."""
    options = give_up(database, tmp_path)
    done, _ = SinkEdit(open_pipeline(options), "resume", "current").perform("person")
    text = last_line(done)
    assert f"epochs {done.held + 1} to {done.epoch}" in text
    assert "firnline sinks resync current" in text
    [row] = [one for one in load_sinks(open_pipeline(options))[1] if one["name"] == "current"]
    assert (row["epochs_behind"], row["bytes_behind"], row["state"]) == (0, 0, "in sync")
    before = delta_rows(tmp_path / "lake" / "orders", "id")
    run_to_end(options)
    assert delta_rows(tmp_path / "lake" / "orders", "id") == before
    SinkEdit(open_pipeline(options), "resync", "current").perform("person")  # as the line says
    run_to_end(options)
    check(database)


def resync(options: PipelineOptions) -> None:
    SinkEdit(open_pipeline(options), "resync", "current").perform("person")


@pytest.mark.crash
@pytest.mark.parametrize(
    "point", ["storage.put.after:1", "storage.put.after:2", "delta.commit.before:1", "delta.commit.after:1"]
)
def test_killed_while_it_is_decided(postgres: str, tmp_path: Path, point: str) -> None:
    """Nothing is decided without its requests."""
    database = Database(postgres, tmp_path)
    database.run("INSERT INTO @orders VALUES (1, 1, 'a')", "INSERT INTO @lines VALUES ('x', 'eu', 1)")
    run_to_end(optional(database.options()))
    options = give_up(database, tmp_path)
    kill(point, partial(resync, options))
    run_to_end(options)
    if find_away(open_pipeline(options).load().checkpoint, options.followers):
        SinkEdit(open_pipeline(options), "resync", "current").perform("person")
        run_to_end(options)
    check(database)


def test_a_table_that_is_to_be_copied_by_name_is_still_refused(database: Database) -> None:
    options = optional(database.options())
    with pytest.raises(ConfigError, match="is no table with the input"):
        SinkEdit(open_pipeline(options), "resync", "current", "history").plan()
