"""Secrets are read late and shown nowhere."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

from firnline.config.secrets import MAX_SECRET_BYTES, MaskedDict, is_sensitive
from firnline.errors import SpecError
from firnline.spec.build import build_options, load_options
from firnline.spec.loading import load_spec, parse_spec
from tests.support.pipelines import file_source

SECRET = "hunter2"
TEXT = """\
name: p
sources:
  s:
    path: s3://lake/in
    storage_options:
      aws_access_key_id: 0123
      aws_secret_access_key: ${env:KEY}
      token: "Bearer ${file:etc/token}"
sinks:
  - table: s3://lake/out
    storage_options: {aws_secret_access_key: "${PLAIN}"}
spark:
  spark.hadoop.fs.s3a.secret.key: ${env:KEY}
  spark.master: local[2]
"""
ENVIRON = {"KEY": SECRET, "PLAIN": SECRET}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "firnline.yml").write_text(TEXT)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "token").write_text(f"{SECRET}\n")
    return tmp_path


def test_references_are_read_when_the_options_are_built(folder: Path) -> None:
    built = load_options(environ=ENVIRON, cwd=folder)
    assert file_source(built).storage_options == {
        "aws_access_key_id": "0123",
        "aws_secret_access_key": SECRET,
        "token": f"Bearer {SECRET}",
    }
    assert built.home.storage_options == {"aws_secret_access_key": SECRET}
    assert built.spark == {"spark.hadoop.fs.s3a.secret.key": SECRET, "spark.master": "local[2]"}


def test_no_form_of_the_spec_or_the_options_shows_a_secret(folder: Path) -> None:
    loaded = load_spec(environ=ENVIRON, cwd=folder)
    built = build_options(loaded, environ=ENVIRON)
    shown = [repr(loaded), str(loaded.spec), repr(loaded.spec), loaded.spec.model_dump_json(), repr(built), str(built)]
    shown += [
        str(loaded.spec.model_dump()),
        repr(dataclasses.asdict(built)),
        repr(built.sources),
        repr(built.describe()),
    ]
    for text in shown:
        assert SECRET not in text
    assert "local[2]" in repr(built)
    assert "local[2]" in repr(loaded.spec)


def test_a_wrong_spec_does_not_show_its_secrets(folder: Path) -> None:
    text = TEXT.replace("spark.master: local[2]", f"spark.plugins: {SECRET}").replace("table:", "tabel:")
    (folder / "firnline.yml").write_text(text.replace("token:", f"nested: [{SECRET}]\n      token:"))
    with pytest.raises(SpecError) as caught:
        load_options(environ=ENVIRON, cwd=folder)
    assert caught.value.message.splitlines() == [
        "firnline.yml:8: sources.s.storage_options.nested: must be text, not what it holds (put it in quotes)",
        'firnline.yml:11: sinks[0].tabel: unknown key (did you mean "table"?)',
        'firnline.yml:15: spark["spark.plugins"]: not allowed in a spec: it names classes that Spark would load',
    ]
    assert SECRET not in repr(caught.value.fields)


def test_what_a_reference_names_must_be_there(folder: Path) -> None:
    (folder / "etc" / "token").unlink()
    with pytest.raises(SpecError) as caught:
        load_options(environ={"PLAIN": "x"}, cwd=folder)
    assert caught.value.message.splitlines() == [
        "firnline.yml:7: sources.s.storage_options.aws_secret_access_key: environment variable KEY is not set",
        f"firnline.yml:8: sources.s.storage_options.token: secret file {folder}/etc/token cannot be read: "
        "No such file or directory",
        'firnline.yml:13: spark["spark.hadoop.fs.s3a.secret.key"]: environment variable KEY is not set',
    ]
    assert caught.value.hint == "Set the variable or write the file that the reference names."


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff", "is not UTF-8 text"), (b"x" * (MAX_SECRET_BYTES + 1), f"is larger than {MAX_SECRET_BYTES} bytes")],
)
def test_a_secret_file_must_be_short_text(folder: Path, content: bytes, message: str) -> None:
    (folder / "etc" / "token").write_bytes(content)
    with pytest.raises(SpecError, match=message):
        load_options(environ=ENVIRON, cwd=folder)


def test_the_connection_string_of_a_store_may_be_a_reference(folder: Path) -> None:
    section = "checkpoint: {store: {type: postgres, dsn: '${env:KEY}'}}\n"
    (folder / "firnline.yml").write_text(TEXT + section)
    built = load_options(environ=ENVIRON, cwd=folder)
    assert built.checkpoint.store is not None
    assert built.checkpoint.store.dsn == ENVIRON["KEY"]
    assert ENVIRON["KEY"] not in repr(built)


def test_references_elsewhere_are_refused(folder: Path) -> None:
    hints = {
        "${env:KEY}": "Write ${KEY}: the variable is read with the spec, and its value is shown.",
        "${file:key}": "Write the value itself, or ${NAME} for an environment variable.",
    }
    for reference, hint in hints.items():
        (folder / "firnline.yml").write_text(TEXT.replace("name: p", f"name: {reference}"))
        with pytest.raises(SpecError) as caught:
            load_spec(environ=ENVIRON, cwd=folder)
        words = f'firnline.yml:1: name: "{reference}" refers to a secret, and this key takes none'
        assert (caught.value.message, caught.value.hint) == (words, hint)


def test_a_wrong_reference_in_a_key_for_secrets_names_those_for_secrets(folder: Path) -> None:
    section = "checkpoint: {store: {type: postgres, dsn: '${vault:KEY}'}}\n"
    (folder / "firnline.yml").write_text(TEXT + section)
    with pytest.raises(SpecError) as caught:
        load_spec(environ=ENVIRON, cwd=folder)
    assert '"${vault:KEY}" is not a reference' in caught.value.message
    assert str(caught.value.hint).startswith("Write ${env:NAME} or ${file:PATH}")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${vault:x}", 'unknown reference "${vault:...}" (known: ${env:NAME}, ${file:path})'),
        ("${env: }", 'reference "${env:}" names nothing'),
    ],
)
def test_an_unknown_kind_of_reference_is_told(value: str, message: str) -> None:
    source = {"path": "in", "storage_options": {"k": value}}
    with pytest.raises(SpecError) as caught:
        parse_spec({"name": "p", "sources": {"s": source}, "sinks": [{"table": "out"}]})
    assert caught.value.message == f"spec: sources.s.storage_options.k: {message}"


def test_a_masked_mapping_is_a_mapping_that_stays_masked() -> None:
    masked = MaskedDict({"a": SECRET, "b": "open"}, shown=["b"])
    for made in (masked, pickle.loads(pickle.dumps(masked)), copy.deepcopy(masked)):
        assert made == {"a": SECRET, "b": "open"}
        assert repr(made) == "{'a': '**********', 'b': 'open'}"
        assert f"{made}" == repr(made)


@pytest.mark.parametrize(
    ("key", "sensitive"),
    [
        ("spark.hadoop.fs.s3a.access.key", True),
        ("spark.hadoop.fs.s3a.session.token", True),
        ("spark.authenticate.secret", True),
        ("fs.azure.account.key.box", True),
        ("spark.master", False),
        ("spark.executor.memory", False),
    ],
)
def test_sensitive_settings_are_known_by_name(key: str, sensitive: bool) -> None:
    assert is_sensitive(key) is sensitive
