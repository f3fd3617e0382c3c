"""`firnline status`: what it shows of runs, sources and sinks, why a run failed, and `--watch`."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli import status
from firnline.cli.main import run_command
from firnline.errors import SinkError
from firnline.run.open_pipeline import open_pipeline
from firnline.spec.build import load_options
from tests.support.commands import run_plainly
from tests.support.pipelines import run_once
from tests.support.processes import Launcher


def test_a_deleted_table_does_not_look_like_a_new_pipeline(
    finished: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    store = run_json("status")["copies"][0]
    assert (store["epoch"], store["epochs_behind"], store["problem"]) == (2, 0, None)
    shutil.rmtree(finished.parent / "out")
    store = run_json("status")["copies"][0]
    assert store["problem"] == "holds epoch 2, but the table holds none"
    assert run_command(["status"]) == 0
    assert "holds epoch 2, but the table holds none" in capsys.readouterr().out


def test_status_shows_rows_last_commit_sources_sinks_and_files_set_aside(
    finished: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json("status")
    table = DeltaTable(finished.parent / "out")
    assert (found["rows"], found["rows_since"]) == (table.to_pyarrow_table().num_rows, 1)
    committed = datetime.fromtimestamp(table.history(1)[0]["timestamp"] / 1000, UTC)
    assert datetime.fromisoformat(found["last_commit_at"]) == committed
    assert found["last_commit_at"].endswith("+00:00")
    assert found["last_commit_seconds_ago"] >= 0
    assert found["last_error"] is None
    [source], [sink], [aside] = found["sources"], found["sinks"], found["set_aside"]
    assert (source["name"], source["files_outstanding"], source["files_set_aside"]) == ("flights", 0, 1)
    assert source["position"]["last_committed_file"].endswith("/in/b2.json")
    assert (sink["epoch"], sink["version"], sink["epochs_behind"]) == (2, table.version(), 0)
    assert aside["path"].endswith("/in/b1.json.gz")
    [run] = found["runs"]
    assert (run["epochs"], run["files"], run["rows"], run["error"]) == (2, 3, 15, None)
    assert run_command(["status"]) == 0
    lines = shown_facts(capsys.readouterr().out)
    assert lines["rows"] == "15"
    assert re.fullmatch(r"\d+ (s|min) ago|just now", lines["last commit"])
    assert lines["source flights"].endswith("/in/b2.json; no backlog; 1 file set aside")
    assert lines["sink delta-1"].startswith(f"in sync at epoch 2, version {table.version()}, in ")
    assert lines["set aside"].startswith(f"1 file: {aside['path']} (")
    assert lines["set aside"].endswith("; `firnline files --status set_aside` lists them all")
    assert run_command(["status", "-f", str(finished)]) == 0
    named = shown_facts(capsys.readouterr().out)["set aside"]
    assert named.endswith(f"; `firnline files -f {finished} --status set_aside` lists them all")


def shown_facts(text: str) -> dict[str, str]:
    """The facts of the output, by name."""
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in text.split("\n\n")[0].splitlines())


def test_status_says_why_the_last_run_failed(
    spec: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(spec.read_text().replace("file_attempts: 1", "on_bad_record: fail"))
    before = datetime.now(UTC)
    assert run_once(load_options(spec, environ={})).exit_code == 1
    capsys.readouterr()
    found = run_json("status")
    error = found["last_error"]
    assert found["state"] == "failed"
    assert (error["code"], error["exit_code"], error["ended_run"]) == ("bad-records", 1, True)
    assert before <= datetime.fromisoformat(error["at"]) <= datetime.now(UTC)
    assert run_command(["status"]) == 0
    said = shown_facts(capsys.readouterr().out)["last error"]
    assert "bad-records: " in said
    assert f"(it ended run {error['run']})" in said
    assert "Try: " in said


def test_a_run_that_fails_before_it_claims_says_why_too(
    finished: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    finished.write_text(finished.read_text().replace("path: in,", "path: elsewhere,"))
    (finished.parent / "elsewhere").mkdir()
    assert run_once(load_options(finished, environ={})).exit_code == 1
    capsys.readouterr()
    found = run_json("status")
    assert (found["state"], found["last_error"]["code"]) == ("failed", "source-moved")
    assert found["epoch"] == 2


def test_a_run_that_was_killed_is_called_so(
    spec: Path, tmp_path: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Launcher(tmp_path / "children", run_plainly)
    ended = launcher.run(load_options(spec, environ={}), "delta.commit.before:2:kill")
    assert ended.exit_code == -signal.SIGKILL
    found = run_json("status")
    error = found["last_error"]
    assert (found["state"], error["code"], error["ended_run"]) == ("died", "killed", True)
    assert datetime.fromisoformat(error["at"]) <= datetime.now(UTC)
    assert run_command(["status"]) == 0
    facts = shown_facts(capsys.readouterr().out)
    assert facts["state"] == "died; running again is safe"
    assert "ended without a word, probably killed" in facts["last error"]


def test_every_source_and_sink_is_shown_and_one_that_fails_hides_no_other(
    spec: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    second = "  second: {type: files, path: more, min_age_secs: 0}\n"
    archive = "  - {type: delta, name: archive, table: archive, input: second}\n"
    text = spec.read_text().replace("sources:\n", f"sources:\n{second}").replace("sinks:\n", f"sinks:\n{archive}")
    spec.write_text(text.replace("table: out}", "table: out, input: flights}"))
    (spec.parent / "more").mkdir()
    (spec.parent / "more" / "m1.json").write_text('{"id": 1}\n')
    assert run_once(load_options(spec, environ={})).exit_code == 0
    (spec.parent / "in" / "z.json").write_text('{"id": 9}\n')
    shutil.rmtree(spec.parent / "more")
    capsys.readouterr()
    found = run_json("status")
    by_name = {source["name"]: source for source in found["sources"]}
    assert by_name["flights"]["files_outstanding"] == 1
    assert by_name["second"]["files_outstanding"] is None
    assert str(spec.parent / "more") in by_name["second"]["error"]
    assert found["files_outstanding"] is None
    assert [sink["name"] for sink in found["sinks"]] == ["archive", "delta-2"]
    assert run_command(["status"]) == 0
    facts = shown_facts(capsys.readouterr().out)
    assert "cannot be listed: " in facts["source second"]
    assert "backlog 1 file, 10 B" in facts["source flights"]
    assert {"sink archive", "sink delta-2"} < facts.keys()


# -- again and again ----------------------------------------------------------------------------------


@pytest.fixture
def refreshes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`--watch` refreshes three times without a pause, then Ctrl-C is pressed; these are the pauses it wanted."""
    pauses: list[float] = []

    def rest(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("firnline.cli.status.rest", rest)
    return pauses


def test_watching_writes_one_json_value_a_line(
    finished: Path, refreshes: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["status", "--watch", "--json", "--interval", "10s"]) == 130
    values = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [value["epoch"] for value in values] == [2, 2, 2]
    assert refreshes == [10, 10, 10]


def test_watching_goes_on_after_a_failure_and_shows_it(
    finished: Path, refreshes: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = status._load

    def fail_second(options: Any) -> Any:
        if len(refreshes) == 1:
            raise SinkError("out of reach")
        return load(options)

    monkeypatch.setattr(status, "_load", fail_second)
    assert run_command(["status", "--watch", "--json"]) == 130
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert second == {"pipeline": "flights", "error": {"code": "sink", "message": "out of reach"}}
    assert first["epoch"] == third["epoch"] == 2
    assert refreshes == [2, 2, 2]


def test_watching_on_a_terminal_draws_in_place_and_fits(
    finished: Path, refreshes: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run_command(["status", "--watch"]) == 130
    screens = capsys.readouterr().out.split("\x1b[H\x1b[2J")[1:]
    assert len(screens) == 3
    for screen in screens:
        lines = screen.splitlines()
        assert len(lines) <= 12
        assert max(map(len, lines)) <= 60
        assert re.fullmatch(r"… \d+ more lines", lines[-2])


def test_watching_disturbs_no_run(
    spec: Path, tmp_path: Path, refreshes: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    made = load_options(spec, environ={})
    child = Launcher(tmp_path / "children", run_plainly).start(made, once=False)
    try:
        child.wait_for("epoch 2 committed")
        child.wait_for("all read; waiting for new files")
        assert run_command(["status", "--watch", "--json"]) == 130
        values = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {value["state"] for value in values} == {"running"}
        child.signal(signal.SIGTERM)
        assert child.wait().exit_code == 0
    finally:
        child.signal(signal.SIGKILL)
    assert open_pipeline(made).load().generation == 1
