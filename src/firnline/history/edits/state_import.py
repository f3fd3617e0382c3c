"""Imports state rows into an operator while no run is active: some keys, or a whole snapshot.

Only the state changes. Tables keep their rows: an operator emits a key's rows only when input for that key arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from firnline.errors import ConfigError
from firnline.history.edits.rescale import StateJump, States, StateTip, ensure_here, load_tip
from firnline.history.state import Stateful, find_stateful
from firnline.operators.loading import build_operator
from firnline.run.open_pipeline import OpenPipeline
from firnline.sources.columns import columns_from_json
from firnline.state.columns import Layout
from firnline.state.export import StateReader
from firnline.state.load import add_state, import_rows, locate_rows
from firnline.state.manifest import CheckpointPlan
from firnline.state.rescale import rescale
from firnline.types import Receipt


def import_state(
    pipeline: OpenPipeline,
    operator: str,
    table: pa.Table,
    run: str,
    tell: Callable[[str], None] = lambda _: None,
    *,
    replace_all: bool = False,
) -> Receipt | None:
    """Set the state of keys from rows. Returns None if there was nothing to do.

    Args:
        pipeline: The pipeline.
        operator: Its operator.
        table: The rows in the form of an export: the columns of key and state, and `_timer`; every key once.
        run: The id to claim with.
        tell: Called with each step, for display.
        replace_all: Delete the state of keys without a row; otherwise they keep it.

    Raises:
        ConfigError: the operator is unknown, or the rows have other columns or a duplicate key; no run was fenced.
        CheckpointError: the newest snapshot is older than the newest epoch, or damaged.
        FencedError: another run took over meanwhile.
    """
    tip = load_tip(pipeline)
    tip.check_newest()
    found = find_stateful(pipeline, operator, tip.checkpoint)
    name, deciding = found.known_as, found.deciding
    if name not in tip.states or deciding is None:
        raise ConfigError(
            f"the checkpoint and the spec do not both have an operator {operator!r}",
            hint="An operator that is new begins with an exported state by initial_state: PATH.",
        )
    ensure_here(pipeline.state_home, tip)
    layout = _layout(pipeline, tip, found)
    locate_rows(table, layout, tip.key_groups, deciding, operator)
    if table.num_rows == 0 and not replace_all:
        return None
    ranges, home = tip.ranges, pipeline.state_home

    def change(now: StateTip, plan: CheckpointPlan) -> States:
        states = {known: rescale(state, ranges) for known, state in now.states.items()}
        added = import_rows(home, plan.checkpoint_id, table, layout, ranges, now.key_groups, deciding, name, plan.epoch)
        return {**states, name: added if replace_all else add_state(states[name], added)}

    facts = {"operator": name, "keys": table.num_rows, "replaced": replace_all}
    return StateJump("import", ranges, change, facts).perform(pipeline, run, tell)


def _layout(pipeline: OpenPipeline, tip: StateTip, found: Stateful) -> Layout:
    """Return the columns of an operator's state: those of its newest segment, otherwise those derived from its
    inputs."""
    state = tip.states[found.known_as]
    if any(shard.segments for _, _, shard in state.shards):
        return StateReader([pipeline.state_home], state, tip.key_groups, found.deciding).layout
    columns = columns_from_json(tip.checkpoint.columns)
    options = found.options
    if options is None or any(port not in columns for port in options.inputs):
        raise ConfigError(
            f"the state of {found.name!r} is empty, and its columns are not known yet",
            hint="Run the pipeline until the operator has seen rows, then import.",
        )
    inputs = {port: columns[port] for port in options.inputs}
    operator = build_operator(options, inputs, pipeline.options.operator_paths)
    return Layout(operator.state_key, operator.state_schema, timers=True)
