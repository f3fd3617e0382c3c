"""What the models accept, refuse and default to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from firnline import options
from firnline.errors import SpecError
from firnline.sinks.delta.config import DeltaSinkConfig
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.http.config import HttpSinkConfig
from firnline.sinks.http.options import HttpSinkOptions
from firnline.sinks.redis.config import RedisSinkConfig
from firnline.sinks.redis.options import RedisSinkOptions
from firnline.sources.config import FieldConfig, SchemaConfig
from firnline.sources.files.config import FilesSourceConfig
from firnline.sources.files.options import FileSourceOptions
from firnline.spec import models
from firnline.spec.build import build_options
from firnline.spec.loading import LoadedSpec, parse_spec
from firnline.spec.models import (
    CheckpointConfig,
    LocalTierConfig,
    RemoteTierConfig,
    StateConfig,
    StoreConfig,
    TriggerConfig,
)
from firnline.spec.operators import OwnOperatorConfig
from firnline.spec.spark_keys import ALLOWED_KEYS, find_refusal, find_value_problem

MINIMAL: dict[str, Any] = {"name": "p", "sources": {"s": {"path": "in"}}, "sinks": [{"table": "out"}]}

PAIRS: list[tuple[type[Any], type[BaseModel]]] = [
    (options.FieldOptions, FieldConfig),
    (options.SchemaOptions, SchemaConfig),
    (FileSourceOptions, FilesSourceConfig),
    (DeltaSinkOptions, DeltaSinkConfig),
    (DeltaPartsOptions, DeltaSinkConfig),
    (RedisSinkOptions, RedisSinkConfig),
    (HttpSinkOptions, HttpSinkConfig),
    (options.BatchOptions, models.BatchConfig),
    (options.RestartOptions, models.RestartConfig),
    (options.StoreOptions, StoreConfig),
    (options.LocalTierOptions, LocalTierConfig),
    (options.RemoteTierOptions, RemoteTierConfig),
    (options.TriggerOptions, TriggerConfig),
    (options.CheckpointOptions, CheckpointConfig),
    (options.OperatorOptions, OwnOperatorConfig),
    (options.StateOptions, StateConfig),
    (options.StagingOptions, models.StagingConfig),
    (options.OutboxOptions, models.OutboxConfig),
    (options.PipelineOptions, models.PipelineSpec),
]
DIFFERENT = {  # where the spec and the core hold the same thing in another shape
    ("FileSourceOptions", "name"),  # the key of `sources`
    ("FileSourceOptions", "min_age_secs"),  # the default depends on `path`
    ("DeltaSinkOptions", "name"),  # numbered when left out
    ("DeltaSinkOptions", "start"),  # empty when left out
    *(("DeltaPartsOptions", key) for key in ("name", "copy_from", "renamed_from")),
    ("RedisSinkOptions", "name"),
    ("RedisSinkOptions", "copy_from"),  # empty text when left out
    ("RedisSinkOptions", "renamed_from"),
    ("HttpSinkOptions", "name"),
    *(("HttpSinkOptions", key) for key in ("copy_from", "renamed_from", "hmac", "ca_file")),
    ("StoreOptions", "path"),  # which of the three is needed depends on the type
    ("StoreOptions", "uri"),
    ("StoreOptions", "dsn"),
    ("TriggerOptions", "event_time_ms"),  # a duration, `event_time`
    ("CheckpointOptions", "keep_aborted_secs"),  # a duration, `keep_aborted`
    ("CheckpointOptions", "trigger"),
    ("PipelineOptions", "sources"),
    ("PipelineOptions", "sinks"),
    ("PipelineOptions", "checkpoint"),
    ("PipelineOptions", "operator_paths"),  # folders, never a key
    ("PipelineOptions", "journal"),  # where it lies, `home`
}


def minimal(**changes: Any) -> dict[str, Any]:
    return {**MINIMAL, **changes}


def message_of(data: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(data, folder="/data")
    return caught.value.message


def option_fields() -> list[tuple[type[Any], type[BaseModel], dataclasses.Field[Any]]]:
    return [(made, model, field) for made, model in PAIRS for field in dataclasses.fields(made)]


def plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.model_dump() if isinstance(value, BaseModel) else value


@pytest.mark.parametrize(("made", "model", "field"), option_fields(), ids=lambda v: getattr(v, "name", v.__class__))
def test_every_option_is_a_key_with_the_same_default(
    made: type[Any], model: type[BaseModel], field: dataclasses.Field[Any]
) -> None:
    if (made.__name__, field.name) in DIFFERENT:
        return
    keys = {known.alias or name: known for name, known in model.model_fields.items()}
    assert field.name in keys
    known = keys[field.name]
    if field.default_factory is not dataclasses.MISSING:
        assert known.default == field.default_factory()
    elif field.default is dataclasses.MISSING:
        assert known.is_required()
    else:
        assert plain(known.default) == plain(field.default)


def test_every_dataclass_of_options_has_a_model() -> None:
    made = {v for v in vars(options).values() if isinstance(v, type) and dataclasses.is_dataclass(v)}
    no_section = {
        options.SourceOptions,
        options.SinkOptions,
        options.FollowerOptions,
        options.Home,
        options.StrictColumn,
    }
    assert made - no_section == {pair[0] for pair in PAIRS if pair[0].__module__ == options.__name__}


@pytest.mark.parametrize("model", [pair[1] for pair in PAIRS])
def test_every_key_has_a_description_and_is_an_option(model: type[BaseModel]) -> None:
    known = {field.name for made, other in PAIRS if other is model for field in dataclasses.fields(made)} | {
        "type",
        "sources",
        "event_time",
        "keep_aborted",
        "home",
    }
    for name, field in model.model_fields.items():
        assert field.description, name
        assert (field.alias or name) in known
    assert model.model_config["frozen"]
    assert model.model_config["extra"] == "forbid"


def test_a_minimal_spec_builds_the_default_options() -> None:
    built = build_options(parse_spec(MINIMAL, folder="/data"), environ={})
    assert built == options.PipelineOptions(
        name="p",
        sources=(FileSourceOptions("s", "/data/in", min_age_secs=2),),
        sinks=(DeltaSinkOptions("delta-1", "/data/out", input="s"),),
        checkpoint=options.CheckpointOptions(store=options.StoreOptions(path="/data/data/firnline_checkpoints")),
    )


def test_the_models_build_a_pipeline_in_python() -> None:
    spec = models.PipelineSpec(
        name="p",
        sources={"s": FilesSourceConfig(path="/data/in", schema=SchemaConfig(evolution="fail"))},
        sinks=(DeltaSinkConfig(table="/data/out"),),
    )
    built = build_options(LoadedSpec(spec, Path("/data")), environ={})
    assert built.sources[0].schema.evolution == "fail"
    assert built.sinks[0].name == "delta-1"


def test_empty_sections_mean_defaults() -> None:
    data = minimal(batch=None, spark={"spark.master": None}, sources={"s": {"path": "in", "schema": None}})
    assert parse_spec(data, folder="/data").spec == parse_spec(MINIMAL, folder="/data").spec


def test_sinks_are_named_by_type_and_number() -> None:
    sinks = [{"table": "a"}, {"table": "b", "name": "copy"}, {"table": "c"}]
    assert [s.name for s in parse_spec(minimal(sinks=sinks)).spec.sinks] == ["delta-1", "copy", "delta-3"]


def test_declared_columns_reach_the_options() -> None:
    fields = [{"name": "id", "type": "int64", "nullable": False}, {"name": "tags", "type": "list<string>"}]
    source = {"path": "in", "schema": {"fields": fields, "evolution": "rescue"}}
    built = build_options(parse_spec(minimal(sources={"s": source})), environ={})
    assert built.sources[0].schema == options.SchemaOptions(
        (options.FieldOptions("id", "int64", False), options.FieldOptions("tags", "list<string>")), "rescue"
    )


@pytest.mark.parametrize(
    "written",
    ["s3://lake/in", "gs://lake/in/*.gz", "az://box/in", "abfs://box@account.example/in", "file:///data/in", "/abs/in"],
)
def test_uris_and_absolute_paths_are_kept(written: str) -> None:
    spec = parse_spec(minimal(sources={"s": {"path": written}}), folder="/data").spec
    assert spec.sources["s"].endpoint == ("path", written)


@pytest.mark.parametrize(
    ("written", "resolved"),
    [("in", "/data/in"), ("./in/", "/data/in"), ("../x/*.json.gz", "/x/*.json.gz"), ("a/**/b-*", "/data/a/**/b-*")],
)
def test_local_paths_start_at_the_folder(written: str, resolved: str) -> None:
    spec = parse_spec(minimal(sources={"s": {"path": written}}), folder="/data").spec
    assert spec.sources["s"].endpoint == ("path", resolved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {}}, "sources: must not be empty"),
        ({"sources": {"s": {"type": "kafka", "brokers": "x"}}},
         'sources.s.type: "kafka" is not in this version (known: files)'),
        ({"sources": {"a b": {"path": "x"}}},
         'sources["a b"]: "a b" is not a valid name (letters, digits, "_", ".", "-"; a letter or digit first)'),
        ({"sources": {"s": {"path": "s3a://b/x"}}}, 'sources.s.path: unknown scheme "s3a://" (write "s3://")'),
        ({"sources": {"s": {"path": "ftp://b/x"}}},
         'sources.s.path: unknown scheme "ftp://" (known: s3://, gs://, az://, abfs://, abfss://, file://)'),
        ({"sources": {"s": {"path": "s3://k:pw@b/x"}}},
         "sources.s.path: credentials do not belong in a URI; put them under storage_options"),
        ({"sources": {"s": {"path": "s3:///x"}}}, 'sources.s.path: "s3://" is not followed by a bucket or container'),
        ({"sources": {"s": {"path": "file://x"}}},
         'sources.s.path: a "file://" URI needs an absolute path: file:///folder'),
        ({"sources": {"s": {"path": " "}}}, "sources.s.path: must not be empty"),
        ({"sources": {"s": {"path": "a\0b"}}}, "sources.s.path: must not hold line ends or NUL characters"),
        ({"sources": {"s": {"path": "in", "start_after": "2026-11-01 00:00"}}},
         'sources.s.start_after: the time "2026-11-01 00:00" has no zone (write 2026-11-01T00:00Z for UTC)'),
        ({"sources": {"s": {"path": "in", "max_bad_ratio": 1.5}}},
         "sources.s.max_bad_ratio: must be at most 1, not 1.5"),
        ({"sources": {"s": {"path": "in", "poll_interval_secs": float("inf")}}},
         "sources.s.poll_interval_secs: must be a finite number"),
        ({"sources": {"s": {"path": "in", "lineage": 1}}}, "sources.s.lineage: must be true or false, not 1"),
        ({"sources": {"s": {"path": "in", "poll_interval_secs": 1e9}}},
         "sources.s.poll_interval_secs: must be at most 31622400, not 1000000000.0"),
        ({"sources": {"s": {"path": "in", "schema": {"fields": [{"name": "a", "type": "int"}]}}}},
         "sources.s.schema.fields[0].type: unknown type 'int' (known: string, int32, int64, float32, float64, "
         "boolean, timestamp, date, binary, decimal(p,s), list<T>, map<T>, struct<name:T,...>, json)"),
        ({"sources": {"s": {"path": "in", "schema": {"fields": [{"name": "a", "type": "decimal(18"}]}}}},
         'sources.s.schema.fields[0].type: "decimal(18" is cut off '
         "(inside { } put a type that holds a comma in quotes)"),
        ({"sources": {"s": {"path": "in", "schema": {"fields": [{"name": "_firnline_x", "type": "json"}]}}}},
         'sources.s.schema.fields[0].name: names that start with "_firnline" are reserved'),
        ({"sources": {"s": {"path": "in", "schema": {"fields": [{"name": "_rescued_data", "type": "json"}]}}}},
         'sources.s.schema.fields[0].name: the name "_rescued_data" is reserved'),
        ({"sources": {"s": {"path": "in", "schema": {"fields": [{"name": "a b", "type": "json"}]}}}},
         'sources.s.schema.fields[0].name: "a b" cannot be a column name (no spaces, and none of , ; { } ( ) =)'),
        ({"sources": {"s": {"path": "in", "schema": {"fields": [{"name": n, "type": "date"} for n in "aA"]}}}},
         'sources.s.schema.fields[1].name: column "A" is there twice (upper and lower case are the same)'),
        ({"sinks": []}, "sinks: must not be empty"),
        ({"sinks": [{"table": "a", "name": "x"}, {"table": "b", "name": "x"}]},
         'sinks[1].name: two sinks have the name "x"'),
        ({"sinks": [{"table": "a", "name": "delta-2"}, {"table": "b"}]},
         'sinks[1].name: two sinks have the name "delta-2"'),
        ({"sinks": [{"table": "a"}, {"table": "file:///data/x/../a/"}]},
         'sinks[1].table: sink "delta-1" already writes to this table'),
        ({"sinks": [{"table": "s3://b/a"}, {"table": "s3://b//a/"}]},
         'sinks[1].table: sink "delta-1" already writes to this table'),
        ({"sinks": [{"table": "in"}]}, 'sinks[0].table: the table is the path of source "s"'),
        ({"sinks": [{"table": "in"}, {"table": "in"}]},
         'sinks[0].table: the table is the path of source "s"\n'
         'spec: sinks[1].table: sink "delta-1" already writes to this table\n'
         'spec: sinks[1].table: the table is the path of source "s"'),
        ({"sinks": [{"table": "in/out"}]}, 'sinks[0].table: the table lies inside the path of source "s"'),
        ({"sinks": [{"name": "journal", "table": "a"}]},
         'sinks[0].name: the name "journal" is reserved for the pipeline\'s journal'),
        ({"home": "h", "sinks": [{"table": "a"}]},
         'home: not used: sink "delta-1" decides, and its table holds what would be in the home'),
        ({"home": {"path": "h", "folder": "x"}, "sinks": [{"table": "a", "required": False}]},
         'home.folder: unknown key (did you mean "path"?)'),
        ({"sinks": [{"table": "a", "partition_by": ["m", "M"]}]},
         'sinks[0].partition_by[1]: column "M" is there twice'),
        ({"sinks": [{"table": "a", "type": "detla"}]},
         'sinks[0].type: "detla" is not in this version (known: delta; did you mean "delta"?)'),
        ({"sinks": [{"table": "a", "type": "redis"}]}, 'sinks[0].type: "redis" is not in this version (known: delta)'),
        ({"batch": {"quorum": 1}}, "batch.quorum: only with commit_policy: quorum (here it is all)"),
        ({"batch": {"commit_policy": "quorum", "quorum": 2}},
         "batch.quorum: must be at most the number of sinks (1), not 2"),
        ({"batch": {"max_files": 0}}, "batch.max_files: must be at least 1, not 0"),
        ({"batch": {"max_files": True}}, "batch.max_files: must be a number, not true"),
        ({"batch": {"max_files": 1.5}}, "batch.max_files: must be a whole number, not 1.5"),
        ({"batch": {"max_files": "many"}}, 'batch.max_files: must be a whole number, not "many"'),
        ({"batch": 5}, "batch: must be a mapping (key: value), not 5"),
        ({"batch": {"commit_policy": "any"}}, 'batch.commit_policy: must be one of all, required, quorum, not "any"'),
        ({"restart": {"attempts": -1}}, "restart.attempts: must be at least 0, not -1"),
        ({"restart": {"backoff_secs": 90}}, "restart.max_backoff_secs: must be at least backoff_secs (90), not 60"),
        ({"restart": {"backoff_secs": "soon"}},
         'restart.backoff_secs: must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), not "soon"'),
        ({"sinks": [{"table": "a", "mode": "staged"}, {"table": "b", "required": False}]},
         "sinks[1].mode: cannot be direct behind a staged sink; set mode: staged here, or list this sink first"),
        ({"checkpoint": {"rollback_window": "soon"}},
         'checkpoint.rollback_window: must be a number of epochs, or a time like 30m, 12h or 7d, not "soon"'),
        ({"checkpoint": {"store": {"type": "sqlite"}}}, "checkpoint.store.path: type: sqlite needs it"),
        ({"checkpoint": {"store": {"type": "memory", "uri": "s3://b"}}},
         "checkpoint.store.uri: is for type: object, not memory"),
        ({"checkpoint": {"local": {"path": "s3://b/x"}}},
         "checkpoint.local.path: must be a folder on this machine; a bucket belongs to checkpoint.remote"),
        ({"checkpoint": {"rollback_window": 0}}, "checkpoint.rollback_window: must be at least 1, not 0"),
        ({"name": 5}, "name: must be text, not 5 (put it in quotes)"),
        ({"name": "x" * 101}, f'name: "{"x" * 59}... is not a valid name '
         '(letters, digits, "_", ".", "-"; a letter or digit first)'),
        ({"spark": {"spark.master": {"a": 1}}},
         'spark["spark.master"]: must be text: Spark settings are written flat, e.g. spark.master: local[2]'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(changes: dict[str, Any], message: str) -> None:
    assert message_of(minimal(**changes)) == f"spec: {message}"


def test_a_glob_beside_the_table_is_fine() -> None:
    spec = parse_spec(minimal(sources={"s": {"path": "/d/*.gz"}}, sinks=[{"table": "/d/out"}])).spec
    assert spec.sinks[0].endpoint == ("table", "/d/out")


def test_a_glob_that_reaches_the_table_is_refused() -> None:
    data = minimal(sources={"s": {"path": "/d/**/*.gz"}}, sinks=[{"table": "/d/out"}])
    assert message_of(data) == 'spec: sinks[0].table: the table lies inside the path of source "s"'


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("spark.plugins", "it names classes that Spark would load"),
        ("spark.extraListeners", "it names classes that Spark would load"),
        ("spark.sql.queryExecutionListeners", "it names classes that Spark would load"),
        ("spark.sql.extensions", "it names classes that Spark would load"),
        ("spark.executor.extraJavaOptions", "it can load any code into the JVM"),
        ("spark.driver.defaultJavaOptions", "it can load any code into the JVM"),
        ("spark.jars", "it brings code into Spark"),
        ("spark.jars.packages", "it brings code into Spark"),
        ("spark.executor.extraClassPath", "it brings code into Spark"),
        ("spark.submit.pyFiles", "it brings code into Spark"),
        ("spark.hadoop.fs.s3a.impl", "it names a class that Spark would load"),
        ("spark.hadoop.fs.s3a.aws.credentials.provider", "it names a class that Spark would load"),
        ("spark.sql.adaptive.customCostEvaluatorClass", "it names a class that Spark would load"),
        ("spark.serializer", "it names a class that Spark would load"),
        ("spark.executor.resource.gpu.discoveryScript", "it names a script that Spark would run"),
        ("spark.pyspark.python", "Firnline sets the workers' Python itself"),
    ],
)
def test_spark_settings_that_load_code_are_refused(key: str, reason: str) -> None:
    data = minimal(spark={key: "x"})
    assert message_of(data) == f'spec: spark["{key}"]: not allowed in a spec: {reason}'


def test_every_refused_spark_setting_is_named() -> None:
    message = message_of(minimal(spark={"spark.plugins": "x", "spark.foo": "y", "fs.s3a.endpoint": "z"}))
    assert message.splitlines() == [
        'spec: spark["spark.plugins"]: not allowed in a spec: it names classes that Spark would load',
        'spec: spark["spark.foo"]: not among the Spark settings that a spec may pass',
        'spec: spark["fs.s3a.endpoint"]: not a Spark setting (they start with "spark.")',
    ]


@pytest.mark.parametrize(
    "key",
    [*sorted(ALLOWED_KEYS), "spark.executor.memory", "spark.sql.shuffle.partitions", "spark.hadoop.fs.s3a.endpoint"],
)
def test_common_spark_settings_pass(key: str) -> None:
    assert find_refusal(key) is None


@pytest.mark.parametrize(
    "master",
    ["local", "local[4]", "local[*]", "local[*,3]", "local[2, 3]", "local-cluster[2,1,1024]", "spark://host:7077",
     "spark://a:7077,b:7077", "yarn", "k8s://https://10.0.0.1:6443", "k8s://host"],
)  # fmt: skip
def test_every_form_of_master_passes(master: str) -> None:
    assert find_value_problem("spark.master", master) is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *(("spark.master", wrong, "local, local[4], local[*], spark://HOST:PORT, yarn or k8s://HOST:PORT")
          for wrong in ("locl[2]", "local[0]", "local[]", "local[two]", "local[2", "Local[2]", "spark:/host:7077",
                        "spark://host", "yarn-client", "host:7077", "")),
        ("spark.executor.cores", "two", "a whole number above 0"),
        ("spark.sql.shuffle.partitions", "0", "a whole number above 0"),
        ("spark.driver.memory", "4 gigs", "a size such as 512m or 4g"),
        ("spark.network.timeout", "2 minutes", "a time such as 120s or 5min"),
        ("spark.ui.enabled", "yes please", "true or false"),
        ("spark.ui.port", "http", "the number of a port"),
        ("spark.log.level", "loud", "ALL, DEBUG, ERROR, FATAL, INFO, OFF, TRACE or WARN"),
    ],
)  # fmt: skip
def test_spark_values_are_checked_before_spark_starts(key: str, value: str, words: str) -> None:
    assert message_of(minimal(spark={key: value})) == f'spec: spark["{key}"]: must be {words}, not "{value}"'


@pytest.mark.parametrize(
    ("key", "value"),
    [("spark.driver.memory", "2G"), ("spark.executor.memory", "512"), ("spark.network.timeout", "120s"),
     ("spark.ui.enabled", "TRUE"), ("spark.memory.fraction", "0.6"), ("spark.hadoop.fs.s3a.endpoint", "http://h:1"),
     ("spark.dynamicAllocation.executorIdleTimeout", "60s"), ("spark.ui.port", "0")],
)  # fmt: skip
def test_right_spark_values_pass(key: str, value: str) -> None:
    assert find_value_problem(key, value) is None


def test_spark_connect_is_refused_by_name() -> None:
    assert "Spark Connect is not supported" in str(find_refusal("spark.remote"))


def test_spark_values_become_text() -> None:
    spark = {"spark.task.cpus": 2, "spark.speculation": True, "spark.memory.fraction": 0.5, "spark.master": "local[2]"}
    built = build_options(parse_spec(minimal(spark=spark)), environ={})
    assert built.spark == {
        "spark.task.cpus": "2",
        "spark.speculation": "true",
        "spark.memory.fraction": "0.5",
        "spark.master": "local[2]",
    }


def test_a_spark_setting_without_its_first_word_is_named_whole() -> None:
    message = message_of(minimal(spark={"master": "local[1]"}))
    assert message == 'spec: spark.master: not a Spark setting; write its whole name below `spark`: "spark.master": ...'
