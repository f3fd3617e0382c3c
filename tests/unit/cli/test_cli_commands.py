"""The commands that only look: what they show, and that their JSON is what their help documents."""

from __future__ import annotations

import base64
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import ALIASES, COMMANDS, run_command
from tests.support.commands import keys_of
from tests.support.samples import SampleInput

CHECKPOINT_FIELDS = [
    "id", "epoch", "status", "is_savepoint", "trigger_timestamp", "latest_ack_timestamp", "end_to_end_duration_ms",
    "checkpointed_size_bytes", "state_size_bytes", "acknowledged", "path",
]  # fmt: skip
FILE_FIELDS = [
    "path", "size_bytes", "create_time", "discovery_time", "processed_time", "commit_time", "status", "epoch",
    "table_version", "records", "reason", "reread",
]  # fmt: skip
FREE_KEYS = {"updated_at", "format", "checksum"}  # of the stored history of runs


def epilogue(verb: str) -> str:
    module, _, name = next(target for name, target, _ in COMMANDS if name == verb).partition(":")
    return str(getattr(importlib.import_module(f"firnline.cli.{module}"), name).help_epilogue)


@pytest.mark.parametrize("verb", ["status", "checkpoints", "files", "quarantine", "dry-run"])
def test_every_json_field_is_documented_in_the_help(finished: Path, run_json: Any, verb: str) -> None:
    words = set(epilogue(verb).replace(",", " ").replace("[{", " ").replace("}]", " ").replace("{", " ").split())
    words = {word.strip("().}]:") for word in words}
    assert {key for key in keys_of(run_json(verb)) if key not in words | FREE_KEYS} == set()


@pytest.mark.parametrize("verb", [verb for verb, _, _ in COMMANDS])
def test_help_has_examples_and_fits_80_columns(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = epilogue(verb)
    assert text.split("Examples:")[1].count(f"firnline {verb}") >= 2
    assert all(len(line) <= 80 for line in text.splitlines())
    assert run_command([verb, "--help"]) == 0
    assert f"Usage: firnline {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(("alias", "verb"), ALIASES.items())
def test_an_old_name_works_and_is_not_listed(alias: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([alias, "--help"]) == 0
    assert epilogue(verb).splitlines()[0] in capsys.readouterr().out
    assert run_command(["--help"]) == 0
    listed = capsys.readouterr().out
    assert f" {verb} " in listed
    assert f" {alias} " not in listed


def test_status_tells_where_the_pipeline_stands(finished: Path, run_json: Any, sample: SampleInput) -> None:
    found = run_json("status")
    assert (found["pipeline"], found["state"], found["epoch"]) == ("flights", "done", 2)
    assert (found["files_outstanding"], found["files_set_aside"]) == (0, 1)
    assert found["last_committed_file"] == str(sample.path("b2.json"))
    assert [run["status"] for run in found["runs"]] == ["done"]


def test_status_of_a_pipeline_that_never_ran(spec: Path, run_json: Any) -> None:
    found = run_json("status")
    assert (found["state"], found["epoch"], found["table_version"], found["files_outstanding"]) == ("new", 0, None, 4)
    assert not (spec.parent / "out").exists()


def test_a_run_that_vanished_is_told_as_died(finished: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline.run import status

    at = "2026-11-17T05:00:00+00:00"
    running = [{"run": "x", "status": "running", "host": "here", "pid": 2**22 + 1, "restarts": 0, "started_at": at}]
    monkeypatch.setattr(status, "load_runs", lambda *_: running)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert run_json("status")["state"] == "died"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert run_json("status")["state"] == "running"


def test_checkpoints_have_the_fields_in_their_order(finished: Path, run_json: Any) -> None:
    found = run_json("checkpoints")["checkpoints"]
    assert [row["epoch"] for row in found] == [2, 1]
    assert list(found[0])[: len(CHECKPOINT_FIELDS)] == CHECKPOINT_FIELDS
    assert {row["status"] for row in found} == {"COMPLETED"}
    assert {row["acknowledged"] for row in found} == {"1/1"}
    assert all(row["latest_ack_timestamp"] >= row["trigger_timestamp"][:19] for row in found)
    assert [row["epoch"] for row in run_json("checkpoints", "--limit", "1")["checkpoints"]] == [2]


def test_files_have_the_fields_in_their_order(finished: Path, run_json: Any, sample: SampleInput) -> None:
    found = run_json("files")
    assert list(found["files"][0]) == FILE_FIELDS
    assert {Path(f["path"]).name: f["status"] for f in found["files"]} == {
        "a1.json.gz": "committed", "a2.json.gz": "committed", "b1.json.gz": "set_aside", "b2.json": "committed",
    }  # fmt: skip
    aside = run_json("files", "--status", "set_aside")
    assert [Path(f["path"]).name for f in aside["files"]] == ["b1.json.gz"]
    assert aside["files"][0]["reason"]
    assert (len(run_json("files", "--limit", "2")["files"]), run_json("files", "--limit", "2")["total"]) == (2, 4)


def test_records_are_read_again_only_with_yes(finished: Path, run_json: Any, tmp_path: Path) -> None:
    from firnline.cli.common import load_pipeline

    listed = run_json("quarantine", "--limit", "0")["quarantine"]
    plan = run_json("quarantine", "--replay", "--dry-run")
    assert (plan["done"], plan["records"]) == (False, len(listed))
    assert sum(row["records"] for row in plan["plan"]) == len(listed)
    assert load_pipeline(None).requests.load() == []
    assert run_json("quarantine", "--replay", "--yes")["done"]
    (request,) = load_pipeline(None).requests.load()
    assert (request.kind, sum(file["records"] for file in request.files)) == ("replay", len(listed))
    again = run_json("quarantine", "--replay", "--yes")
    assert (again["done"], again["left_out"]) == (False, {"already requested": len(listed)})
    assert run_json("checkpoints", "--audit")["audit"][0]["what"] == "quarantine-replay"
    assert run_json("quarantine", "--export", str(tmp_path / "bad"))["records"] == len(listed)
    assert len((tmp_path / "bad").read_bytes().splitlines()) >= len(listed)
    assert run_json("quarantine", "--pending")["quarantine"] == []


def test_a_file_is_read_again_only_with_yes(finished: Path, run_json: Any) -> None:
    from firnline.cli.common import load_pipeline

    path = next(row["path"] for row in run_json("files")["files"] if row["status"] == "committed")
    plan = run_json("files", "--reread", path, "--dry-run")
    assert (plan["done"], plan["path"], plan["effect"], plan["changed"]) == (False, path, "doubled", False)
    assert plan["records"] > 0
    assert run_json("files", "--reread", path, "--yes")["done"]
    assert run_json("files", "--reread", path, "--yes")["done"]
    assert [(r.kind, r.path) for r in load_pipeline(None).requests.load()] == [("reread", path)]
    assert next(row["reread"] for row in run_json("files")["files"] if row["path"] == path) == "asked"
    assert run_json("checkpoints", "--audit")["audit"][0]["what"] == "files-reread"


def test_retry_is_asked_for_once(finished: Path, run_json: Any, sample: SampleInput) -> None:
    from firnline.cli.common import load_pipeline

    path = str(sample.path("b1.json.gz"))
    assert run_json("files", "--retry", path) == {"path": path, "changed": False, "status": "asked"}
    assert run_json("files", "--retry", "b1.json.gz")["status"] == "already_asked"
    assert run_json("files", "--retry", "in/b1.json.gz", "--changed")["status"] == "asked"
    assert sorted((r.path, r.changed) for r in load_pipeline(None).requests.load()) == [(path, False), (path, True)]


def test_files_are_given_up_by_name_or_pattern_when_told_so_twice(
    finished: Path, run_json: Any, sample: SampleInput, capsys: pytest.CaptureFixture[str]
) -> None:
    from firnline.cli.common import load_pipeline

    path = str(sample.path("b1.json.gz"))
    found = run_json("files", "--drop", "*/b1*", "--dry-run")
    assert ([file["path"] for file in found["files"]], found["done"]) == ([path], False)
    assert load_pipeline(None).requests.load() == []
    for _ in range(2):
        assert run_json("files", "--drop", "b1.json.gz", "--yes")["done"] is True
    assert [(r.path, r.kind) for r in load_pipeline(None).requests.load()] == [(path, "drop")]
    assert run_command(["files", "--drop", "*/nothing-*"]) == 2
    assert "is not set aside" in capsys.readouterr().err
    for wrong in (["--yes"], ["--drop", "b1.json.gz", "--retry", "b1.json.gz"]):
        assert run_command(["files", *wrong]) == 2


def test_retry_of_a_file_that_is_not_set_aside_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["files", "--retry", "a1.json.gz"]) == 2
    assert capsys.readouterr().err == "Error: a1.json.gz is not set aside\nTry: firnline files --status set_aside\n"


def test_quarantine_gives_the_raw_bytes(finished: Path, run_json: Any, sample: SampleInput) -> None:
    found = run_json("quarantine")["quarantine"]
    assert {base64.b64decode(row["raw"]) for row in found} == set(sample.bad)
    assert {(Path(row["file"]).name, row["line"], row["reason"]) for row in found} == {
        ("a2.json.gz", 6, "not-json"), ("a2.json.gz", 7, "not-json"),
    }  # fmt: skip
    limited = run_json("quarantine", "--limit", "1")
    assert (len(limited["quarantine"]), limited["more"]) == (1, True)
    assert run_json("quarantine", "--reason", "too-long")["quarantine"] == []


@pytest.mark.parametrize("verb", ["status", "checkpoints", "files", "quarantine", "dry-run"])
def test_text_output_works_before_and_after_the_first_run(
    spec: Path, verb: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    assert run_command([verb]) == 0
    before = capsys.readouterr()
    request.getfixturevalue("finished")
    assert run_command([verb]) == 0
    after = capsys.readouterr()
    assert before.out
    assert after.out
    assert before.out != after.out
    assert before.err == after.err == ""


def test_looking_writes_nothing(spec: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for verb in ("status", "checkpoints", "files", "quarantine", "dry-run"):
        assert run_command([verb]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_counts_epochs_by_records_too(spec: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRNLINE__BATCH__MAX_EVENTS", "1")
    found = run_json("dry-run")
    assert found["epochs_about"] >= found["sample"]["records"] > 2


def test_dry_run_tells_what_would_happen(spec: Path, run_json: Any) -> None:
    found = run_json("dry-run")
    assert found["source"]["files_outstanding"] == 4
    assert found["first_epoch"]["files"] == 2
    assert found["epochs_about"] == 2
    assert found["resume"]["path"] == "fresh"
    assert [(s["delivery"], s["exists"], s["writable"]) for s in found["sinks"]] == [("exactly-once", False, True)]
    assert [(c["name"], c["type"], c["origin"]) for c in found["schema"]] == [
        ("id", "int64", "new"), ("month", "string", "new"), ("v", "float64", "new"),
    ]  # fmt: skip
    sample = found["sample"]
    assert {key: sample[key] for key in ("files", "of_files", "records", "bad", "rescued")} == {
        "files": 3, "of_files": 4, "records": 17, "bad": sample["bad"], "rescued": 0,
    }  # fmt: skip
    assert any("cannot be read" in warning for warning in found["warnings"])


def test_dry_run_shows_the_share_of_odd_values(
    spec: Path, run_json: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"id": n, "month": "x"}) for n in range(99)] + ['{"id": "odd", "month": 7}']
    (tmp_path / "in" / "0.json").write_text("\n".join(lines))
    found = run_json("dry-run")
    assert {c["name"]: (c["type"], round(c["odd_share"], 2)) for c in found["schema"]} == {
        "id": ("int64", 0.01), "month": ("string", 0.0), "v": ("float64", 0.0), "_rescued_data": ("string", 0.0),
    }  # fmt: skip
    assert found["sample"]["rescued"] == 1
    assert any(warning.startswith("id: 1 of ") and "schema.fields" in warning for warning in found["warnings"])
    assert run_command(["dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "odd values" in shown
    assert "with rescued values" in shown


def test_dry_run_after_a_run_tells_where_it_resumes(finished: Path, run_json: Any, sample: SampleInput) -> None:
    sample.add("a0.json", 1)
    sample.add("c1.json", 3, extra=True)
    found = run_json("dry-run")
    assert (found["resume"]["path"], found["resume"]["epoch"]) == ("sink", 2)
    assert (found["source"]["files_outstanding"], found["source"]["late_files"]) == (1, 1)
    assert {c["name"]: c["origin"] for c in found["schema"]} == {
        "id": "table",
        "month": "table",
        "v": "table",
        "extra": "new",
    }


def test_dry_run_refuses_a_source_that_is_not_there(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(spec.read_text().replace("path: in", "path: nowhere"))
    assert run_command(["dry-run"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_dry_run_refuses_a_schema_that_does_not_fit(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = "schema: {evolution: fail, fields: [{name: id, type: int64}]}"
    spec.write_text(spec.read_text().replace("file_attempts: 1", fields))
    assert run_command(["dry-run"]) == 1
    assert "unknown field 'month'" in capsys.readouterr().err


def test_dry_run_refuses_other_partitions_than_the_tables(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished.write_text(finished.read_text().replace("table: out", "table: out, partition_by: [month]"))
    assert run_command(["dry-run"]) == 1
    assert "partitioned by" in capsys.readouterr().err


def test_init_writes_a_spec_that_is_valid_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from firnline.spec.build import load_options

    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "my flights"]) == 0
    assert load_options(tmp_path / "my flights", environ={}).name == "my-flights"
    capsys.readouterr()
    assert run_command(["init", "my flights"]) == 2
    assert capsys.readouterr().err.splitlines()[1].startswith("Try: Use --yes")
    (tmp_path / "my flights" / "firnline.yml").write_text("mine")
    assert run_command(["init", "my flights", "--dry-run"]) == 0
    assert (tmp_path / "my flights" / "firnline.yml").read_text() == "mine"
    assert run_command(["init", "my flights", "--yes"]) == 0
    assert load_options(tmp_path / "my flights", environ={}).name == "my-flights"
    assert run_command(["init", "orders", "--template", "postgres"]) == 0
    assert [sink.type for sink in load_options(tmp_path / "orders", environ={}).sinks] == ["delta", "postgres"]
    assert run_command(["init", "other", "--template", "oracle"]) == 2


def test_schema_is_json_schema(run_json: Any) -> None:
    assert run_json("schema")["$schema"].startswith("https://json-schema.org/")


ENDS_BADLY = """
import atexit, os, sys

class AbortsAtTheEnd:  # as a native library whose threads still run when the interpreter ends
    def __del__(self, abort=os.abort):
        abort()

last = AbortsAtTheEnd()
atexit.register(lambda: print("exit functions ran"))
sys.argv = ["firnline", *sys.argv[1:]]
from firnline.cli.main import main
main()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["nosuchverb"], 2)])
def test_a_command_ends_without_tearing_down_native_libraries(words: list[str], code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_BADLY, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.endswith("exit functions ran\n")


HANGS_AT_THE_END = """
import atexit, sys, threading

atexit.register(threading.Event().wait)
from firnline.cli import main
main.EXIT_SECONDS = 0.1
main.main(["--version"])
"""


def test_a_library_that_hangs_at_the_end_does_not_hold_a_command() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS_AT_THE_END], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
