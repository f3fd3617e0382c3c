"""A secret that is written in a spec is warned about, and appears nowhere: no output, no log, no durable file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from firnline.config.secrets import is_inline_secret
from firnline.spec.loading import load_spec
from tests.support.samples import SampleInput

SECRET = "hunter2-hunter2"
SPEC = f"""\
name: flights
sources:
  flights:
    path: in
    min_age_secs: 0
    storage_options: {{aws_access_key_id: AKIA, aws_secret_access_key: {SECRET}}}
sinks:
  - table: out
    storage_options: {{aws_secret_access_key: "${{env:KEY}}"}}
checkpoint:
  remote:
    uri: copies
    storage_options: {{token: {SECRET}}}
restart: {{attempts: 0}}
"""
WORDS = "holds a secret in plain text; write ${env:NAME} or ${file:path} instead"


@pytest.fixture
def spec(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    sample.add("a1.json.gz", 5, bad=1)
    path = tmp_path / "firnline.yml"
    path.write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", SECRET)
    return path


@pytest.mark.usefixtures("no_spark")
def test_run_and_dry_run_warn_once_and_nothing_shows_the_secret(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = [
        f"firnline.yml:6: sources.flights.storage_options.aws_secret_access_key: {WORDS}",
        f"firnline.yml:13: checkpoint.remote.storage_options.token: {WORDS}",
    ]
    shown = ""
    assert run_command(["dry-run", "--json"]) == 0
    answer = capfd.readouterr()
    assert [line for line in json.loads(answer.out)["warnings"] if "plain text" in line] == told
    shown += answer.out + answer.err
    assert run_command(["dry-run"]) == 0
    answer = capfd.readouterr()
    assert answer.out.replace("\n", " ").count("in plain text") == 2
    shown += answer.out + answer.err
    assert run_command(["run", "--once", "--debug"]) == 0
    answer = capfd.readouterr()
    assert [line for line in answer.err.splitlines() if "plain text" in line] == [f"warning: {line}" for line in told]
    shown += answer.out + answer.err
    for command in (
        ["status"], ["status", "--json"], ["checkpoints", "--json"], ["checkpoints", "show", "1", "--json"], ["files"],
        ["checkpoints", "--audit", "--json"], ["quarantine", "--json"], ["savepoint", "create", "--json"],
        ["savepoint", "list", "--json"], ["gc", "--dry-run", "--json"], ["compact", "--json"],
        ["checkpoints", "export", "copy.tar"], ["rollback", "--to", "1", "--dry-run"],
    ):  # fmt: skip
        run_command([*command, "--debug"])
        answer = capfd.readouterr()
        assert "in plain text" not in answer.err, "only a run and a dry run warn"
        shown += answer.out + answer.err
    assert SECRET not in shown
    written = [path for path in spec.parent.rglob("*") if path.is_file() and path != spec]
    assert len(written) > 10, "ledger, table, store, remote tier, savepoint"
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.usefixtures("no_spark")
def test_errors_and_tracebacks_show_no_secret(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec.write_text(SPEC.replace("restart: {attempts: 0}", "restart: {attempts: x}"))
    assert run_command(["run", "--once", "--debug"]) == 2
    spec.write_text(SPEC.replace("path: in", "path: /nowhere"))
    assert run_command(["run", "--once", "--debug"]) != 0
    spec.write_text(SPEC.replace("path: in", f"path: s3://user:{SECRET}@bucket/in"))
    assert run_command(["run", "--once", "--debug"]) == 2
    answer = capfd.readouterr()
    assert SECRET not in answer.out + answer.err


@pytest.mark.parametrize(
    ("key", "text", "is_inline"),
    [
        ("dsn", "postgresql://me:pw@host/db", True),
        ("dsn", "postgresql://me:p@w/x@host/db", True),
        ("dsn", "postgresql://me:${env:PW}@host/db", False),
        ("dsn", "postgresql://me:${PW}@host/db", False),
        ("dsn", "postgresql://me@host/db", False),
        ("dsn", "postgresql://host:5432/db", False),
        ("dsn", "host=db user=me password=pw", True),
        ("dsn", "host=db password='a b' user=me", True),
        ("dsn", "host=db password=${env:PW}", False),
        ("dsn", "${env:DSN}", False),
        ("aws_secret_access_key", "abc", True),
        ("aws_secret_access_key", "", False),
        ("aws_secret_access_key", "${env:KEY}", False),
        ("aws_access_key_id", "AKIA", False),
        ("aws_session_token", "abc", True),
        ("region", "eu-north-1", False),
        ("endpoint", "http://127.0.0.1:9000", False),
        ("endpoint", "http://me:pw@127.0.0.1:9000", True),
    ],
)
def test_what_counts_as_a_secret_in_plain_text(key: str, text: str, is_inline: bool) -> None:
    assert is_inline_secret(key, text, takes_secret=True) == is_inline


def test_a_value_from_the_environment_is_no_secret_in_the_spec(spec: Path) -> None:
    assert len(load_spec(spec, environ={}).warnings) == 2
    environ = {
        "FIRNLINE__CHECKPOINT__REMOTE__STORAGE_OPTIONS__TOKEN": SECRET,
        "FIRNLINE__SOURCES__FLIGHTS__STORAGE_OPTIONS__AWS_SECRET_ACCESS_KEY": SECRET,
    }
    assert load_spec(spec, environ=environ).warnings == ()
