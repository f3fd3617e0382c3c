"""Operators, state and triggers in a spec: what they become, and what is wrong with them."""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from firnline.config.fields import duration_text
from firnline.errors import SpecError
from firnline.options import OperatorOptions, StateOptions, TriggerOptions
from firnline.spec import operators
from firnline.spec.build import build_options, load_options
from firnline.spec.loading import parse_spec
from firnline.spec.models import json_schema

COUNT = {"name": "n", "function": "count"}
LAST = {"name": "x", "function": "last", "column": "a"}


def spec(operator: dict[str, Any], **more: Any) -> dict[str, Any]:
    inputs = operator.get("inputs", ["s"])
    sources = {name: {"path": name} for name in inputs if isinstance(name, str)} if isinstance(inputs, list) else {}
    return {
        "name": "p",
        "sources": sources or {"s": {"path": "s"}},
        "operators": [{"name": "o", "inputs": ["s"], **operator}],
        "sinks": [{"table": "out"}],
        **more,
    }


def built(operator: dict[str, Any], **more: Any) -> OperatorOptions:
    (found,) = build_options(parse_spec(spec(operator, **more), folder="/data"), environ={}).operators
    return found


def message_of(operator: dict[str, Any], **more: Any) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec(operator, **more), folder="/data")
    return caught.value.message.removeprefix("spec: ")


# --- what they become ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "settings"),
    [
        ({"type": "sql", "query": "SELECT * FROM s"}, {"query": "SELECT * FROM s"}),
        ({"type": "aggregate", "aggregates": [COUNT]},
         {"keys": [], "aggregates": [{"name": "n", "function": "count"}]}),
        ({"type": "aggregate", "keys": ["k"], "aggregates": [{**LAST, "order_by": "b"}], "time": "ts",
          "window": {"size": "10m", "slide": "5m"}, "delay": "30s", "emit": "changes", "before": True},
         {"keys": ["k"], "aggregates": [{"name": "x", "function": "last", "column": "a", "order_by": "b"}],
          "time": "ts", "window": {"size_us": 600_000_000, "slide_us": 300_000_000}, "delay_us": 30_000_000,
          "emit": "changes", "before": True}),
        ({"type": "aggregate", "aggregates": [LAST], "time": "ts", "window": {"size": "1d"}, "emit": "final"},
         {"keys": [], "aggregates": [{"name": "x", "function": "last", "column": "a"}], "time": "ts",
          "window": {"size_us": 86_400_000_000}, "emit": "final"}),
        ({"type": "deduplicate", "keys": ["id"]}, {"keys": ["id"]}),
        ({"type": "deduplicate", "keys": ["a", "b"], "time": "ts", "ttl": "1h", "delay": "250ms"},
         {"keys": ["a", "b"], "time": "ts", "ttl_us": 3_600_000_000, "delay_us": 250_000}),
        ({"type": "correlate", "inputs": ["s", "t"], "keys": ["k"], "time": "ts", "window": "30s"},
         {"keys": ["k"], "time": "ts", "window_us": 30_000_000}),
        ({"type": "correlate", "inputs": ["s", "t"], "keys": ["k"], "time": "ts", "window": "30s", "min_inputs": 2,
          "delay": "5s", "retain": "7d"},
         {"keys": ["k"], "time": "ts", "window_us": 30_000_000, "min_inputs": 2, "delay_us": 5_000_000,
          "retain_us": 604_800_000_000}),
        ({"type": "aggregate", "keys": None, "aggregates": [COUNT], "time": None, "emit": None},
         {"keys": [], "aggregates": [{"name": "n", "function": "count"}]}),
    ],
)  # fmt: skip
def test_settings_hold_what_was_given_and_nothing_else(operator: dict[str, Any], settings: dict[str, Any]) -> None:
    assert built(operator) == OperatorOptions("o", operator["type"], tuple(operator.get("inputs", ["s"])), settings)


def test_what_all_operators_with_state_take() -> None:
    operator = {"type": "deduplicate", "keys": ["id"], "interval_ms": 500, "initial_state": "old", "renamed_from": "d"}
    found = built(operator, checkpoint={"mode": "per_operator"})
    assert (found.interval_ms, found.initial_state, found.renamed_from) == (500, "/data/old", "d")


def test_a_state_may_begin_empty() -> None:
    assert built({"type": "deduplicate", "keys": ["id"], "initial_state": "empty"}).initial_state == "empty"


def test_state_becomes_options() -> None:
    state = {"shards": 4, "key_groups": 64, "on_worker_loss": "absorb", "worker_ping_secs": 2, "dropped": ["old"]}
    loaded = parse_spec(spec({"type": "deduplicate", "keys": ["id"]}, state=state))
    assert build_options(loaded, environ={}).state == StateOptions(4, 64, "absorb", 2, ("old",))


@pytest.mark.parametrize(
    ("trigger", "made"),
    [
        (None, TriggerOptions(1)),
        ({}, TriggerOptions(1)),
        ({"every_epochs": 5}, TriggerOptions(5)),
        ({"every_ms": 500}, TriggerOptions(None, every_ms=500)),
        ({"every_records": 9}, TriggerOptions(None, every_records=9)),
        ({"event_time": "10m"}, TriggerOptions(None, event_time_ms=600_000)),
        ({"every_epochs": 3, "event_time": "250ms"}, TriggerOptions(3, event_time_ms=250)),
        ({"every_epochs": None, "every_ms": 500}, TriggerOptions(None, every_ms=500)),
    ],
)
def test_another_trigger_takes_the_place_of_every_epoch(trigger: dict[str, Any] | None, made: TriggerOptions) -> None:
    data = spec({"type": "deduplicate", "keys": ["id"]}, checkpoint={"trigger": trigger})
    assert build_options(parse_spec(data), environ={}).checkpoint.trigger == made


def test_how_long_checkpoints_are_kept() -> None:
    checkpoint = {"timeout_ms": 5, "max_pause_ms": 6, "keep_checkpoints": 7, "keep_aborted": "2d"}
    made = build_options(parse_spec(spec({"type": "deduplicate", "keys": ["id"]}, checkpoint=checkpoint)), environ={})
    kept = made.checkpoint
    assert (kept.timeout_ms, kept.max_pause_ms, kept.keep_checkpoints, kept.keep_aborted_secs) == (5, 6, 7, 172_800)


@pytest.mark.parametrize("text", ["250ms", "90s", "10m", "36h", "7d", "1500ms"])
def test_a_duration_is_written_as_it_was_read(text: str) -> None:
    found = built({"type": "deduplicate", "keys": ["id"], "time": "ts", "ttl": text}).settings["ttl_us"]
    assert duration_text(timedelta(microseconds=found)) == text


# --- what is wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ({"type": "sql"}, "operators[0].query: missing"),
        ({"type": "sql", "query": ""}, "operators[0].query: must not be empty"),
        ({"type": "sql", "query": "SELECT * FROM s", "keys": ["a"]},
         "operators[0].keys: unknown key (known: name, type, inputs, query)"),
        ({"type": "sql", "sql": "SELECT 1"}, 'operators[0].sql: unknown key (did you mean "query"?)'),
        ({"type": "sql", "query": "SELECT * FROM s", "interval_ms": 5},
         "operators[0].interval_ms: unknown key (known: name, type, inputs, query)"),
        ({"type": "agregate"},
         'operators[0].type: "agregate" is not in this version (known: sql, aggregate, deduplicate, correlate, '
         'or module:Class; did you mean "aggregate"?)'),
        ({"type": 5}, 'operators[0].type: "5" is not in this version '
         "(known: sql, aggregate, deduplicate, correlate, or module:Class)"),
        ({"type": None}, "operators[0].type: missing"),
        ({"type": "a b:C"},
         'operators[0].type: "a b:C" must name a class as module:Class, e.g. sessions:Sessionise'),
        ({"type": "sql", "query": "SELECT * FROM s", "name": "a.b"},
         'operators[0].name: "a.b" must hold no dot: what follows one names a port, as in totals.late'),
        ({"type": "sql", "query": "SELECT * FROM s", "name": "a b"},
         'operators[0].name: "a b" is not a valid name (letters, digits, "_", ".", "-"; a letter or digit first)'),
        ({"type": "deduplicate", "keys": ["a"], "inputs": []}, "operators[0].inputs: must not be empty"),
        ({"type": "deduplicate", "keys": ["a"], "inputs": "s"},
         'operators[0].inputs: must be a list, not "s" (write [s])'),
        ({"type": "deduplicate", "keys": ["a"], "inputs": ["s", "s"]},
         'operators[0].inputs[1]: input "s" is there twice'),
        ({"type": "deduplicate", "keys": []}, "operators[0].keys: must not be empty"),
        ({"type": "deduplicate", "key": ["a"]}, 'operators[0].key: unknown key (did you mean "keys"?)'),
        ({"type": "deduplicate", "keys": ["a", "A"]}, 'operators[0].keys[1]: column "A" is there twice'),
        ({"type": "deduplicate", "keys": ["a"], "ttl": "1h"},
         "operators[0].ttl: needs `time`, the event-time column"),
        ({"type": "deduplicate", "keys": ["a"], "idle_after": "1h"},
         "operators[0].idle_after: needs `time`, the event-time column"),
        ({"type": "deduplicate", "keys": ["a"], "delay": "1h"},
         "operators[0].delay: needs `time`, the event-time column"),
        ({"type": "deduplicate", "keys": ["a"], "time": "ts", "ttl": "soon"},
         'operators[0].ttl: must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), not "soon"'),
        ({"type": "deduplicate", "keys": ["a"], "time": "ts", "ttl": True},
         "operators[0].ttl: must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), not true"),
        ({"type": "deduplicate", "keys": ["a"], "time": "ts", "ttl": ["1h"]},
         "operators[0].ttl: must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), not a list or a mapping"),
        ({"type": "deduplicate", "keys": ["a"], "time": "ts", "ttl": "0s"},
         'operators[0].ttl: "0s" must be more than 0 and at most a year'),
        ({"type": "deduplicate", "keys": ["a"], "time": "ts", "ttl": "9999999d"},
         'operators[0].ttl: "9999999d" must be more than 0 and at most a year'),
        ({"type": "aggregate"}, "operators[0].aggregates: missing"),
        ({"type": "aggregate", "aggregates": []}, "operators[0].aggregates: must not be empty"),
        ({"type": "aggregate", "aggregates": [{"name": "n", "function": "percentile", "column": "a"}]},
         "operators[0].aggregates[0].function: must be one of count, sum, min, max, avg, first, last, "
         'not "percentile"'),
        ({"type": "aggregate", "aggregates": [{"name": "n", "function": "sum"}]},
         "operators[0].aggregates[0].column: function: sum needs it"),
        ({"type": "aggregate", "aggregates": [{**COUNT, "order_by": "a"}]},
         "operators[0].aggregates[0].order_by: is for function: first or last, not count"),
        ({"type": "aggregate", "aggregates": [LAST]},
         "operators[0].aggregates[0].order_by: function: last needs it, or `time`"),
        ({"type": "aggregate", "aggregates": [COUNT, {**COUNT, "name": "N"}]},
         'operators[0].aggregates[1].name: two aggregates have the name "N"'),
        ({"type": "aggregate", "keys": ["N"], "aggregates": [COUNT]},
         'operators[0].aggregates[0].name: "n" is taken: a key has this name'),
        ({"type": "aggregate", "aggregates": [{**COUNT, "name": "window_start"}]},
         'operators[0].aggregates[0].name: "window_start" is taken: the operator adds a column of this name'),
        ({"type": "aggregate", "aggregates": [{**COUNT, "name": "_op"}]},
         'operators[0].aggregates[0].name: "_op" is taken: the operator adds a column of this name'),
        ({"type": "aggregate", "keys": ["_op"], "aggregates": [COUNT]},
         'operators[0].keys[0]: "_op" cannot be a key: the operator adds a column of this name'),
        ({"type": "aggregate", "aggregates": [COUNT], "window": {"size": "5m"}},
         "operators[0].window: needs `time`, the event-time column"),
        ({"type": "aggregate", "aggregates": [COUNT], "delay": "5m"},
         "operators[0].delay: needs `time`, the event-time column"),
        ({"type": "aggregate", "aggregates": [COUNT], "time": "ts", "window": {"size": "5m", "slide": "10m"}},
         "operators[0].window.slide: must be at most size: rows between two windows would be lost"),
        ({"type": "aggregate", "aggregates": [COUNT], "time": "ts", "window": "5m"},
         'operators[0].window: must be a mapping (key: value), not "5m"'),
        ({"type": "aggregate", "aggregates": [COUNT], "time": "ts", "window": {"sise": "5m"}},
         'operators[0].window.sise: unknown key (did you mean "size"?)'),
        ({"type": "aggregate", "aggregates": [COUNT], "emit": "final"},
         "operators[0].emit: final needs a window: without a window no row is ever final"),
        ({"type": "aggregate", "aggregates": [COUNT], "emit": "finaly"},
         'operators[0].emit: must be one of changes, final, not "finaly" (did you mean "final"?)'),
        ({"type": "aggregate", "aggregates": [COUNT], "time": "ts", "window": {"size": "5m"}, "emit": "final",
          "before": True}, "operators[0].before: has no meaning with emit: final, which emits every row once"),
        ({"type": "correlate", "keys": ["k"], "time": "ts", "window": "5m"},
         "operators[0].inputs: must name at least two: one input has nothing to be correlated with"),
        ({"type": "correlate", "inputs": ["s", "t"], "keys": ["k"], "time": "ts", "window": "5m", "min_inputs": 3},
         "operators[0].min_inputs: must be at most the number of inputs (2), not 3"),
        ({"type": "correlate", "inputs": ["s", "t"], "keys": ["k"], "time": "ts"}, "operators[0].window: missing"),
        ({"type": "correlate", "inputs": ["s", "t"], "keys": ["k"], "window": "5m"}, "operators[0].time: missing"),
        ({"type": "m:C", "settings": {"a": float("nan")}},
         "operators[0].settings: must be plain values: text, numbers, true or false, lists and mappings"),
        ({"type": "m:C", "setings": {}}, 'operators[0].setings: unknown key (did you mean "settings"?)'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_operator_is_said(operator: dict[str, Any], message: str) -> None:
    assert message_of(operator) == message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"state": {"shards": 200}}, "state.shards: must be at most key_groups (128), not 200"),
        ({"state": {"key_groups": 0}}, "state.key_groups: must be at least 1, not 0"),
        ({"state": {"key_groups": 32769}}, "state.key_groups: must be at most 32768, not 32769"),
        ({"state": {"on_worker_loss": "wait"}},
         'state.on_worker_loss: must be one of replace, absorb, not "wait"'),
        ({"state": {"dropped": ["o"]}}, 'state.dropped[0]: operator "o" is still there'),
        ({"checkpoint": {"trigger": {"every_epochs": 0}}},
         "checkpoint.trigger.every_epochs: must be at least 1, not 0"),
        ({"checkpoint": {"trigger": {"event_time": "1w"}}},
         'checkpoint.trigger.event_time: must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), not "1w"'),
        ({"checkpoint": {"trigger": {"every_record": 5}}},
         'checkpoint.trigger.every_record: unknown key (did you mean "every_records"?)'),
        ({"checkpoint": {"mode": "each"}}, 'checkpoint.mode: must be one of aligned, per_operator, not "each"'),
        ({"checkpoint": {"rollback_window": "10x"}},
         'checkpoint.rollback_window: must be a number of epochs, or a time like 30m, 12h or 7d, not "10x"'),
        ({"operators": ["x"]}, "operators[0]: must be a mapping (key: value) with name, type and inputs"),
        ({"sinks": [{"table": "out", "write": "upsert", "mode": "staged"}]},
         "sinks[0].write: upsert is not possible with mode: staged"),
        ({"sinks": [{"table": "out", "sequence_by": "a"}]},
         "sinks[0].sequence_by: only with write: upsert (here it is append)"),
        ({"sinks": [{"table": "out", "delete_when": {"op": "D"}}]},
         "sinks[0].delete_when: only with write: upsert (here it is append)"),
        ({"sinks": [{"table": "out", "write": "upsert", "key": ["a"], "sequence_by": "b", "partition_by": ["b"]}]},
         "sinks[0].sequence_by: cannot be a column of partition_by"),
        ({"sinks": [{"table": "out", "key": ["a"]}]}, "sinks[0].key: only with write: upsert (here it is append)"),
        ({"sinks": [{"table": "out", "write": "upsert", "key": ["a", "a"]}]},
         'sinks[0].key[1]: column "a" is there twice'),
    ],
)  # fmt: skip
def test_what_is_wrong_around_operators_is_said(more: dict[str, Any], message: str) -> None:
    assert message_of({"type": "deduplicate", "keys": ["id"]}, **more) == message


def test_a_missing_key_says_where_to_add_it() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec({"type": "sql"}))
    assert caught.value.hint == "Add `query: ...` to operators[0]."


KEYS = sorted({key for name in operators.__all__ for key in getattr(operators, name).model_fields})
WORDS = ["s", "o", "sql", "aggregate", "deduplicate", "correlate", "m:C", "count", "last", "5m", "1h", "final", "_op"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)


@settings(max_examples=300)
@given(st.sampled_from(WORDS[2:7]), st.dictionaries(st.sampled_from([k for k in KEYS if k != "type"]), VALUES))
def test_any_operator_is_options_or_a_spec_error(kind: str, data: dict[str, Any]) -> None:
    with contextlib.suppress(SpecError):
        (made,) = build_options(parse_spec(spec({**data, "type": kind})), environ={}).operators
        assert json.loads(json.dumps(dict(made.settings))) == made.settings


# --- classes of the user's own ---------------------------------------------------------------------------

OWN = """\
name: p
sources: {s: {path: in}}
operators:
  - name: o
    type: sessions.web:Sessionise
    inputs: [s]
    settings: {gap: 30, names: [a, b]}
sinks: [{table: out}]
"""


def test_own_classes_come_from_the_folder_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "firnline.yml").write_text(OWN)
    found = load_options(environ={}, cwd=tmp_path)
    assert found.operator_paths == (str(tmp_path / "operators"),)
    assert found.operators == (
        OperatorOptions("o", "sessions.web:Sessionise", ("s",), {"gap": 30, "names": ["a", "b"]}),
    )


def test_the_environment_names_further_folders(tmp_path: Path) -> None:
    for name in ("operators", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "firnline.yml").write_text(OWN)
    named = f"{tmp_path / 'a'}:{tmp_path / 'none'}:{tmp_path / 'b'}:"
    found = load_options(environ={"FIRNLINE_OPERATOR_PATH": named}, cwd=tmp_path)
    assert found.operator_paths == (str(tmp_path / "operators"), str(tmp_path / "a"), str(tmp_path / "b"))


def test_without_a_folder_it_is_said_where_to_put_the_file(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_text(OWN)
    with pytest.raises(SpecError) as caught:
        load_options(environ={}, cwd=tmp_path)
    assert caught.value.message == (
        'firnline.yml:5: operators[0].type: there is no folder that "sessions.web:Sessionise" could come from'
    )
    assert caught.value.hint == (
        f"Put the class into {tmp_path}/operators/sessions/web.py, or name its folder in FIRNLINE_OPERATOR_PATH."
    )


def test_a_spec_cannot_name_folders_itself() -> None:
    message = message_of({"type": "m:C"}, operator_paths=["/x"])
    assert message.startswith("operator_paths: unknown key")


# --- the models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [getattr(operators, name) for name in operators.__all__])
def test_every_key_has_a_description(model: type[BaseModel]) -> None:
    assert model.model_config["frozen"]
    assert model.model_config["extra"] == "forbid"
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_json_schema_tells_the_types_apart() -> None:
    schema = json_schema()
    found = schema["properties"]["operators"]["items"]["oneOf"]
    types = [schema["$defs"][each["$ref"].rsplit("/", 1)[-1]]["properties"]["type"] for each in found]
    assert [t.get("const") for t in types] == ["sql", "aggregate", "deduplicate", "correlate", None]
    assert schema["$defs"]["CheckpointConfig"]["properties"]["keep_aborted"]["default"] == "1h"
