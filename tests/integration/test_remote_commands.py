"""`firnline --server`: the commands against a service give the output of the same commands on its machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from firnline.cli.main import run_command
from firnline.pipeline import Pipeline
from firnline.service.access.guard import Rules
from firnline.service.app import make_app
from firnline.service.serving import Address
from firnline.testing.local import run_locally
from tests.support.service import NAME, rows, run_epochs, serving, write_pipeline

PATIENCE_SECONDS = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 3)
    (tmp_path / "in" / "bad.ndjson.gz").write_bytes(b"no gzip")
    (tmp_path / "in" / "g.ndjson").write_text("not json\n")
    run_locally(Pipeline.load(tmp_path / "firnline.yml").options)
    return tmp_path


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """Serve the folder on a free port."""
    for role in ("read", "admin"):
        (folder / f"{role}.token").write_text(f"token-of-{role}\n")
    with serving(folder) as (_, service), Address(port=0).listen() as listening:
        server = uvicorn.Server(uvicorn.Config(make_app(service, Rules()), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (server.started and service.supervisor.is_ready) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)


class Commands:
    """Runs one command on this machine and against the server."""

    def __init__(self, folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._url, self._capsys = folder, url, capsys

    def here(self, *words: str) -> tuple[int, str]:
        code = run_command([*words, "-f", str(self._folder / "firnline.yml")])
        return code, self._capsys.readouterr().out

    def there(self, *words: str, role: str = "admin", name: str = NAME) -> tuple[int, str, str]:
        token = str(self._folder / f"{role}.token")
        code = run_command(["--server", self._url, f"--token-file={token}", *words, "-f", name])
        out = self._capsys.readouterr()
        return code, out.out, out.err


@pytest.fixture
def commands(folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(folder, url, capsys)


SAME = (
    "checkpoints", "checkpoints --limit 2", "checkpoints --limit 2 --before 3", "checkpoints --json",
    "checkpoints --audit", "files", "files --status set_aside --json", "files --limit 1", "sinks list",
    "sinks list --json", "quarantine", "quarantine --json", "quarantine --reason odd", "dead-letters list",
    "checkpoints show 2", "checkpoints show 2 --json", "checkpoints diff 1 3", "checkpoints diff 1 3 --json",
    "savepoint list", "savepoint list --json", "schema-history", "schema-history --json", "snapshot", "snapshot --json",
    "dead-letters list --reason X",
    "rollback --to 2 --dry-run --json", "files --drop *.gz --dry-run --json", "quarantine --drop --dry-run --json",
)  # fmt: skip


def test_the_output_is_that_of_the_local_command(commands: Commands) -> None:
    for line in SAME:
        code, out, _ = commands.there(*line.split())
        expected, local = commands.here(*line.split())
        same = json.loads(out) == json.loads(local) if "--json" in line else out == local
        assert (code, same) == (expected, True), (line, out, local)


def test_status_and_rollback(commands: Commands, folder: Path) -> None:
    code, out, _ = commands.there("status", role="read")
    assert code == 0
    assert "flights" in out
    code, out, _ = commands.there("status", "--json", role="read")
    assert json.loads(out)["epoch"] == json.loads(commands.here("status", "--json")[1])["epoch"]
    code, _, err = commands.there("rollback", "--to", "2", "--yes", role="read")
    assert (code, "needs the role admin" in err) == (1, True)
    code, out, _ = commands.there("rollback", "--to", "2", "--yes")
    assert code == 0
    assert "back to" in out
    assert "done: epoch" in out
    assert rows(folder) == [1, 2]
    assert "admin" in commands.there("checkpoints", "--audit")[1]


def test_pause_and_stop_without_a_run_are_what_is_wanted(commands: Commands) -> None:
    assert commands.there("pause")[1] == "no run is alive; the pipeline is wanted paused\n"
    assert commands.there("resume")[1] == "no run is alive; the pipeline is wanted running\n"
    code, out, _ = commands.there("stop", "--json")
    assert (code, json.loads(out)["status"]) == (0, "stopped")
    code, _, err = commands.there("checkpoint")
    assert (code, "Error: " in err) == (1, True)


def test_a_pipeline_is_started_by_its_own_word(commands: Commands) -> None:
    code, _, err = commands.there("start")
    assert code in (0, 1)
    assert "Unknown command" not in err
    assert code == 0 or "only watches" in err


def test_refusals_are_clear(commands: Commands, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no registered pipeline has this name" in commands.there("files", name="nope")[2]
    assert "`firnline gc` does not work with --server: type it on the machine" in commands.there("gc")[2]
    assert "`firnline checkpoints import` does not work" in commands.there("checkpoints", "import", "x")[2]
    assert "firnline --server URL --token-file FILE start NAME" in commands.there("run")[2]
    assert "--path names a place of the machine" in commands.there("savepoint", "create", "--path", "/tmp/x")[2]
    assert "is read again by a command on the machine" in commands.there("snapshot", "--table", "x", "--yes")[2]
    assert "is read again by a command on the machine" in commands.there("snapshot", "x", "--yes")[2]
    assert "name the operator" in commands.there("state")[2]
    assert "which a service does not give away" in commands.there("state", "totals", "--key", "a")[2]
    code, out, _ = commands.there("quarantine", role="read")  # counts are no refusal
    assert (code, "not shown" in out or "No record waits" in out) == (0, True)
    assert "Authorization" not in commands.there("rollback", "--to", "1", "--yes", role="read")[2]
    (folder / "wrong.token").write_text("wrong-token\n")
    assert "the token is not valid" in commands.there("files", role="wrong")[2]

    def refused(*words: str) -> str:
        assert run_command(list(words)) in (2, 3)
        return capsys.readouterr().err

    assert "belong together" in refused("--server", "http://127.0.0.1:1", "files")
    assert "needs a value" in refused("--server")
    assert "cannot be read" in refused("--server", "http://127.0.0.1:1", "--token-file", str(folder / "no"), "files")
    token = str(folder / "admin.token")
    assert "does not answer" in refused("--server", "http://127.0.0.1:1", "--token-file", token, "files", "-f", NAME)
    assert "without encryption" in refused("--server", "http://example.com", "--token-file", token, "files")


def test_savepoints_are_made_listed_and_disposed_of(commands: Commands) -> None:
    code, out, err = commands.there("savepoint", "create", "--copy", "--json")
    assert code == 0, err
    made = json.loads(out)
    epoch = json.loads(commands.here("status", "--json")[1])["epoch"]
    assert (made["epoch"], made["copied"], made["rows"]) == (epoch, True, 3)
    assert Path(made["path"]).is_dir()
    assert commands.there("savepoint", "list")[1] == commands.here("savepoint", "list")[1]
    assert made["id"] in commands.there("savepoint", "list")[1]
    code, _, err = commands.there("savepoint", "dispose", made["id"], "--yes", role="read")
    assert (code, "needs the role admin" in err) == (1, True)
    code, out, _ = commands.there("savepoint", "dispose", made["id"], "--dry-run")
    assert (code, out.startswith(f"would delete savepoint {made['id']}")) == (0, True)
    code, out, _ = commands.there("savepoint", "dispose", made["id"], "--yes")
    assert (code, out.startswith(f"deleted savepoint {made['id']}")) == (0, True)
    assert "no savepoints" in commands.there("savepoint", "list")[1]
    code, out, _ = commands.there("savepoint", "create")
    assert (code, "pinned" in out) == (0, True)


def test_an_export_is_the_file_that_the_local_command_writes(commands: Commands, folder: Path) -> None:
    file = folder / "there.firnline"
    code, out, err = commands.there("checkpoints", "export", str(file))
    assert code == 0, err
    local = commands.here("checkpoints", "export", str(folder / "here.firnline"))[1]
    assert out.replace("there.firnline", "here.firnline") == local
    code, _, err = commands.there("checkpoints", "export", str(file))
    assert (code, "already exists" in err) == (2, True)
    assert commands.there("checkpoints", "export", str(file), "--yes")[0] == 0
    assert commands.there("checkpoints", "export", str(folder / "no"), role="read")[0] == 1
    assert not (folder / "no").exists()
    assert [one.name for one in folder.iterdir() if one.name.endswith(".tmp")] == []


def test_a_dry_run_is_done_by_the_service(commands: Commands) -> None:
    code, out, err = commands.there("dry-run", "--json")
    assert code == 0, err
    local = json.loads(commands.here("dry-run", "--json")[1])
    found = json.loads(out)
    assert found.keys() == local.keys()
    assert (found["resume"], found["first_epoch"]) == (local["resume"], local["first_epoch"])
    shown = commands.there("dry-run")[1]
    assert "resuming after epoch" in shown
    assert shown.endswith("nothing was written; `firnline start` starts it\n")  # `run` does not work with --server
