"""`firnline checkpoints` in processes that are killed, beside others, on several stores, sinks and kinds of tables."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.model import Checkpoint
from firnline.cli.main import run_command
from firnline.faults import VARIABLE
from firnline.options import StoreOptions
from firnline.spec.build import load_options
from firnline.stores import open_store
from firnline.stores.base import CheckpointStore
from tests.support.pipelines import run_once
from tests.support.processes import KILLED
from tests.support.samples import SampleInput

SPEC = """\
name: flights
sources:
  flights: {type: files, path: in}
sinks:
  - {type: delta, name: first, table: out}
batch: {max_files: 1}
"""
STORES = {
    "file": "{type: file, path: store}",
    "sqlite": "{type: sqlite, path: store.db}",
    "object": "{type: object, uri: bucket}",
}
EPOCHS = 5


@pytest.fixture
def folder(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number in range(EPOCHS):
        sample.add(f"a{number}.json", 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(folder: Path, kind: str, spec: str = SPEC) -> None:
    """Run the pipeline with a store, export it, and empty the store."""
    (folder / "firnline.yml").write_text(f"{spec}checkpoint: {{store: {STORES[kind]}}}\n")
    assert run_once(load_options(folder / "firnline.yml", environ={})).exit_code == 0
    assert run_command(["checkpoints", "export", "x.tar"]) == 0
    for name in ("store", "bucket"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in folder.glob("store.db*"):
        path.unlink()


def open_again(folder: Path) -> CheckpointStore:
    options = load_options(folder / "firnline.yml", environ={}).checkpoint.store
    assert isinstance(options, StoreOptions)
    return open_store(options)


def payloads(folder: Path) -> list[bytes | None]:
    store = open_again(folder)
    versions = store.list_versions("flights", limit=1000)
    found = [store.get_version_raw("flights", info.version) for info in reversed(versions)]
    store.close()
    return found


def child(folder: str, tokens: list[str], fault: str, told: str) -> None:
    os.chdir(folder)
    os.environ[VARIABLE] = fault
    with open(told, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        code = run_command(["checkpoints", *tokens])
        stream.flush()
    os._exit(code)


class Command:
    """One command in a process of its own."""

    def __init__(self, folder: Path, tokens: list[str], fault: str = "", name: str = "told") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.warm"])
        self._told = folder / f"{name}.txt"
        arguments = (str(folder), tokens, fault, str(self._told))
        self._process: Any = context.Process(target=child, args=arguments, daemon=True)
        self._process.start()

    def wait(self) -> int:
        self._process.join(60)
        assert self._process.exitcode is not None, self.told()
        return int(self._process.exitcode)

    def told(self) -> str:
        return self._told.read_text()


def read_json(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    capsys.readouterr()
    assert run_command(["checkpoints", *tokens, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["file", "sqlite"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_an_import_that_is_killed_is_repeated(
    folder: Path, kind: str, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at its first, second, third ... put, each time going on from where the last one came to."""
    prepare(folder, kind)
    kills = 0
    for count in range(1, 40):
        code = Command(folder, ["import", "x.tar"], f"store.put.{side}:{count}:kill").wait()
        if code == 0:
            break
        assert code == KILLED
        kills += 1
        found = payloads(folder)
        assert len(set(found)) == len(found) <= EPOCHS
    assert kills >= 3
    assert len(payloads(folder)) == EPOCHS
    trail = [(r["what"], r["outcome"]) for r in read_json(capsys, "--audit", "--all")["audit"]]
    assert trail[0] == ("import", "done")
    assert {outcome for _, outcome in trail[1:]} == {"begun"}
    assert read_json(capsys, "import", "x.tar")["status"] == "already_there"
    for epoch in range(1, EPOCHS + 1):
        assert [c["status"] for c in read_json(capsys, "show", str(epoch))["copies"]] == ["intact"] * 3


@pytest.mark.crash
@pytest.mark.parametrize("point", ["write.before", "publish.before", "publish.after", "write.after"])
def test_an_export_that_is_killed_leaves_the_old_file_or_the_new_one(folder: Path, point: str) -> None:
    prepare(folder, "file")
    before = (folder / "x.tar").read_bytes()
    code = Command(folder, ["export", "x.tar", "--yes"], f"archive.{point}:1:kill").wait()
    assert code == KILLED
    now = (folder / "x.tar").read_bytes()
    assert (now == before) == point.endswith("before")
    assert run_command(["checkpoints", "import", "x.tar"]) == 0
    assert len(payloads(folder)) == EPOCHS


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_imports_at_the_same_time_put_every_version_once(folder: Path, kind: str) -> None:
    prepare(folder, kind)
    open_again(folder).close()
    started = [Command(folder, ["import", "x.tar"], name=f"told{n}") for n in range(3)]
    for command in started:
        assert command.wait() in (0, 1), command.told()
    assert any("already there" in c.told() or "nothing to import" in c.told() for c in started)
    assert run_command(["checkpoints", "import", "x.tar"]) == 0
    found = payloads(folder)
    assert len(set(found)) == len(found) == EPOCHS


@pytest.mark.parametrize("kind", list(STORES))
def test_every_store_tells_the_same(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(folder, kind)
    imported = read_json(capsys, "import", "x.tar")
    assert (imported["put"], imported["status"]) == (EPOCHS, "imported")
    listed = read_json(capsys)["checkpoints"]
    assert [c["epoch"] for c in listed] == list(range(EPOCHS, 0, -1))
    for epoch in range(1, EPOCHS + 1):
        shown = read_json(capsys, "show", str(epoch))
        assert Checkpoint.from_json(shown["checkpoint"]).to_json() == shown["checkpoint"]
        assert [c["status"] for c in shown["copies"]] == ["intact"] * 3
    assert read_json(capsys, "delete", "--yes")["versions"] == EPOCHS
    assert payloads(folder) == []
    assert [(r["what"], r["outcome"]) for r in read_json(capsys, "--audit")["audit"][:2]] == [
        ("delete", "done"), ("delete", "begun"),
    ]  # fmt: skip


def test_two_sinks_are_shown_with_their_own_versions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = SPEC.replace("table: out}\n", "table: out}\n  - {type: delta, name: second, table: out2}\n")
    prepare(folder, "file", spec)
    shown = read_json(capsys, "show", "2")
    assert [(s["name"], s["holds"], s["rows"]) for s in shown["sinks"]] == [("first", True, 4), ("second", True, 4)]
    for sink, table in zip(shown["sinks"], ("out", "out2"), strict=True):
        text = (folder / table / "_delta_log" / f"{sink['version']:020d}.json").read_text()
        assert shown["checkpoint"]["checksum"] in text
    assert read_json(capsys, "diff", "1", "3")["rows"] == 8
    assert [c["rows"] for c in read_json(capsys)["checkpoints"]] == [4] * EPOCHS


def test_epochs_of_a_staged_table_are_shown_before_and_after_they_are_committed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(folder, "file", SPEC.replace("table: out", "table: out, mode: staged"))
    assert read_json(capsys, "import", "x.tar")["put"] == EPOCHS
    pending = [read_json(capsys, "show", str(n)) for n in range(1, EPOCHS + 1)]
    assert [[c["status"] for c in p["copies"]] for p in pending] == [["intact", "missing", "intact"]] * EPOCHS
    assert run_command(["commit", "out", "--once"]) == 0
    committed = [read_json(capsys, "show", str(n)) for n in range(1, EPOCHS + 1)]
    assert [c["checkpoint"] for c in committed] == [p["checkpoint"] for p in pending]
    in_log = [c["copies"][1] for c in committed]  # only that of the last unit that one commit took
    assert [copy["status"] for copy in in_log] == [*["missing"] * (EPOCHS - 1), "intact"]
    assert "committed together with epoch 5" in in_log[0]["detail"]
    assert {c["sinks"][0]["version"] for c in committed} == {committed[-1]["sinks"][0]["version"]}
    assert read_json(capsys, "diff", "1", str(EPOCHS))["rows"] == 4 * (EPOCHS - 1)


def test_an_epoch_that_a_savepoint_holds_is_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from firnline.cli.common import load_pipeline
    from firnline.history.savepoints.pins import Pin, put_pin

    prepare(folder, "file")
    pipeline = load_pipeline(None)
    whole = Pin("0" * 16, "flights", 2, "", "/elsewhere", True, 1, 1, [], completed=True)
    put_pin(pipeline.storage, whole)
    put_pin(pipeline.storage, Pin("1" * 16, "flights", 3, "", "/elsewhere", True, 1, 1, []))  # still being made
    put_pin(pipeline.storage, Pin("2" * 16, "other", 4, "", "/elsewhere", True, 1, 1, [], completed=True))
    assert [c["epoch"] for c in read_json(capsys)["checkpoints"] if c["is_savepoint"]] == [2]
    assert read_json(capsys, "show", "2")["is_savepoint"] is True
