"""The spec as it may be shown: ordinary settings are readable, secrets are stars wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from firnline.spec.loading import load_spec
from firnline.spec.models import pipeline_model
from firnline.spec.shown import MASK, _show_model, location_text, show_spec

SECRET = "hunter2secret"
SPEC = """\
name: shown
spark: {spark.executor.memory: 4g}
sources:
  files:
    type: files
    path: in
    format: csv
    csv: {delimiter: ";", encoding: utf-8, null_values: [NA, "-"]}
    on_bad_record: fail
    storage_options: {AWS_SECRET_ACCESS_KEY: "${env:S}"}
  kafka:
    type: kafka
    brokers: [b1:9092, b2:9092]
    topics: [orders]
    sasl: {mechanism: PLAIN, username: ann, password: "${env:S}"}
    tls: {}
  db: {type: postgres, dsn: "${env:S}", tables: [public.orders]}
sinks:
  - {type: delta, name: lake, table: out, input: files}
  - {type: delta, name: topic, table: out2, input: kafka}
  - {type: delta, name: rows, table: out3, input: db.public.orders}
  - type: http
    name: hook
    input: files
    url: "${env:URL}"
    headers: {Authorization: "Bearer ${env:S}"}
    hmac: "${env:S}"
    required: false
    exclude: [iban]
    mask: {email: hash}
"""


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "in").mkdir()
    path = tmp_path / "firnline.yml"
    path.write_text(SPEC)
    return show_spec(load_spec(path, environ={"S": SECRET, "URL": f"https://u:{SECRET}@host/x?sig={SECRET}"}))


def test_ordinary_settings_are_readable(shown: dict[str, Any]) -> None:
    files, kafka = shown["sources"]["files"], shown["sources"]["kafka"]
    assert (files["on_bad_record"], files["format"]) == ("fail", "csv")
    assert (files["csv"]["delimiter"], files["csv"]["null_values"]) == (";", ["NA", "-"])
    assert MASK not in json.dumps({key: value for key, value in files.items() if key != "storage_options"})
    assert (kafka["sasl"]["mechanism"], kafka["sasl"]["username"]) == ("PLAIN", "ann")
    assert shown["sinks"][3]["mask"] == {"email": "hash"}
    assert MASK not in json.dumps({key: shown[key] for key in ("batch", "checkpoint", "restart")})


def test_secrets_and_free_options_are_stars(shown: dict[str, Any]) -> None:
    assert SECRET not in json.dumps(shown)
    assert "${env" not in json.dumps(shown)
    assert shown["sources"]["files"]["storage_options"] == {"AWS_SECRET_ACCESS_KEY": MASK}
    assert shown["sources"]["kafka"]["sasl"]["password"] == MASK
    assert shown["sources"]["db"]["dsn"] == MASK
    hook = shown["sinks"][3]
    assert (hook["url"], hook["headers"], hook["hmac"]) == (MASK, {"Authorization": MASK}, MASK)
    assert shown["spark"] == {"spark.executor.memory": MASK}


def models(kind: Any, found: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """All models below a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in found:
        found.add(kind)
        for field in kind.model_fields.values():
            models(field.annotation, found)
    for one in getattr(kind, "__args__", ()) or ():
        models(one, found)
    for one in getattr(kind, "__metadata__", ()) or ():
        models(one, found)
    return found


def test_no_field_that_is_a_secret_is_ever_shown() -> None:
    """Whatever its key is called: the type decides."""
    every = models(pipeline_model(), set())
    assert len(every) > 15
    for kind in every:
        secret: dict[str, Any] = {
            name: SecretStr(SECRET) for name, field in kind.model_fields.items() if "SecretStr" in str(field.annotation)
        }
        made = kind.model_construct(**secret)
        assert SECRET not in json.dumps(_show_model(made, {**secret, **dict.fromkeys(secret, SECRET)}), default=str)


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("s3://AKIA:pw@bucket/t?sig=x#y", "s3://bucket/t"),
        ("jdbc:postgresql://u:pw@h:5432/db?password=x", "jdbc:postgresql://h:5432/db"),
        ("abfss://c@h.net/t?sig=x", "abfss://h.net/t"),
        ("http://[bad", "http://***"),
        ("/p/jdbc:postgresql:/u:pw@h/db", "/p/jdbc:postgresql:/***@h/db"),
        ("ann@example.org", "ann@example.org"),
        ("in/data", "in/data"),
        ("a > 1 and b < 2", "a > 1 and b < 2"),
    ],
)
def test_a_location_is_shown_without_credentials(text: str, shown_as: str) -> None:
    assert location_text(text) == shown_as
