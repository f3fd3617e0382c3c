"""The starter file and the JSON Schema agree with what is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions, RestartOptions, StoreOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.spec.build import load_options
from firnline.spec.models import PipelineSpec, json_schema
from firnline.spec.template import TemplateName, name_from, render_template
from tests.support.pipelines import delta_table, file_source


def load(folder: Path, text: str) -> PipelineOptions:
    (folder / "firnline.yml").write_text(text)
    return load_options(environ={"AWS_SECRET_ACCESS_KEY": "x"}, cwd=folder)


def test_the_template_is_a_valid_spec_with_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, render_template("orders")) == PipelineOptions(
        name="orders",
        sources=(FileSourceOptions("orders", str(tmp_path / "in"), min_age_secs=2),),
        sinks=(DeltaSinkOptions("delta-1", str(tmp_path / "out"), input="orders"),),
        checkpoint=CheckpointOptions(store=StoreOptions(path=str(tmp_path / "data" / "firnline_checkpoints"))),
    )


def test_every_commented_key_of_the_template_is_valid_and_shows_its_default(tmp_path: Path) -> None:
    lines = render_template().splitlines()
    opened = [re.sub(r"^( *)# ( *)(?=- |[a-z_.]+:)", r"\1\2", line) for line in lines]
    built = load(tmp_path, "\n".join(opened))
    assert built.batch == BatchOptions()
    assert built.restart == RestartOptions()
    assert built.sources[0].poll_interval_secs == 10
    assert file_source(built).start_after == "2026-01-01T00:00:00Z"
    assert [field.type for field in built.sources[0].schema.fields] == ["int64", "decimal(18,2)"]
    assert file_source(built).storage_options == {"aws_secret_access_key": "x"}
    assert built.spark == {"spark.master": "local[*]", "spark.driver.memory": "2g"}
    assert delta_table(built).partition_by == ("month",)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("orders", "orders"),
        ("My Orders!", "My-Orders"),
        ("_x", "x"),
        ("", "pipeline"),
        ("\u00e9", "pipeline"),
        ("a" * 200, "a" * 100),
    ],
)
def test_a_name_is_made_from_any_text(text: str, name: str) -> None:
    assert name_from(text) == name


def test_the_json_schema_knows_every_key_with_its_description() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["title"] == "Firnline pipeline"
    assert schema["required"] == ["name", "sources", "sinks"]
    assert list(schema["properties"]) == list(PipelineSpec.model_fields)
    source = schema["$defs"]["FilesSourceConfig"]
    assert source["additionalProperties"] is False
    assert source["required"] == ["path"]
    assert "schema" in source["properties"]
    for part in [schema, *schema["$defs"].values()]:
        for key, value in part["properties"].items():
            assert "description" in value or "$ref" in value, key


def test_the_json_schema_lets_numbers_be_variables() -> None:
    batch: dict[str, Any] = json_schema()["$defs"]["BatchConfig"]["properties"]
    assert batch["max_files"] == {
        "default": 1000,
        "description": "Maximum number of input files per epoch.",
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"\$\{[^}]+\}"}],
    }


@pytest.mark.parametrize("name", ["a", "shop", "orders-of-the-shop"])
@pytest.mark.parametrize("template", get_args(TemplateName))
def test_comments_lie_below_each_other(name: str, template: TemplateName) -> None:
    """Whatever the name of the pipeline is; only what reaches beyond their column moves them."""
    for line in render_template(name, template=template).splitlines():
        words = re.match(r"(.*\S) {2,}# ", line)
        if words is not None and len(words.group(1)) < 33:
            assert words.end() == 36, line
