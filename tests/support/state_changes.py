"""Rescales and imports of state: in this process, and in processes of their own, to be killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from firnline.errors import FirnlineError
from firnline.history.edits.operator_state import Rescale, import_state
from firnline.history.state import load_state_view
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.state.keys import locate
from firnline.testing.faults import reached_points
from firnline.types import RandomIds
from tests.support.processes import Launcher, RunOrder, tell_end


def rescale_to(options: PipelineOptions, shards: int) -> int:
    """Rescale; returns the epoch at which the pipeline stands then."""
    pipeline = open_pipeline(options)
    Rescale(pipeline, shards).perform(RandomIds().new())
    return pipeline.load().epoch


def import_rows_of(options: PipelineOptions, operator: str, rows: list[dict[str, Any]], **settings: Any) -> int:
    """Import rows of state; returns the epoch at which the pipeline stands then."""
    pipeline = open_pipeline(options)
    _import(pipeline, operator, rows, **settings)
    return pipeline.load().epoch


def state_rows(options: PipelineOptions, operator: str, at: int | None = None) -> list[dict[str, Any]]:
    """All rows of an operator's state, sorted; each of them is checked to lie in the shard that owns its key."""
    view = load_state_view(open_pipeline(options), operator, at)
    table = pa.concat_tables([view.reader.schema.empty_table(), *view.reader.scan()])
    rows: list[dict[str, Any]] = table.to_pylist()
    keys = table.select(range(len(view.reader.layout.key)))
    assert view.reader.deciding is not None
    groups = locate(keys, view.reader.deciding, view.key_groups, table.num_rows).groups
    assert all(groups[1:] >= groups[:-1]), "a key lies in a shard that does not own it"
    return sorted(rows, key=str)


def rescale_launcher(folder: Path, shards: int) -> Launcher:
    """Starts rescales of a pipeline."""
    return Launcher(folder, partial(_in_child, "rescale", shards))


def import_launcher(folder: Path, operator: str, rows: list[dict[str, Any]]) -> Launcher:
    """Starts imports of rows of state."""
    return Launcher(folder, partial(_in_child, "import", (operator, rows)))


def export_launcher(folder: Path, operator: str, path: Path) -> Launcher:
    """Starts exports of the state of an operator."""
    return Launcher(folder, partial(_in_child, "export", (operator, str(path))))


def _in_child(what: str, argument: Any, order: RunOrder) -> int:
    error: FirnlineError | None = None
    with reached_points() as points:
        try:
            _change(open_pipeline(order.options), what, argument)
        except FirnlineError as found:
            error = found
    tell_end(order, error, points)
    return error.exit_code if error else 0


def _change(pipeline: OpenPipeline, what: str, argument: Any) -> None:
    from firnline.state.export import write_export

    match what:
        case "rescale":
            Rescale(pipeline, argument).perform(RandomIds().new())
        case "import":
            _import(pipeline, *argument)
        case _:
            operator, path = argument
            reader = load_state_view(pipeline, operator).reader
            write_export(path, reader.schema, reader.scan(), {"operator": operator})


def _import(pipeline: OpenPipeline, operator: str, rows: list[dict[str, Any]], **settings: Any) -> None:
    import_state(pipeline, operator, pa.Table.from_pylist(rows), RandomIds().new(), **settings)
