"""`firnline checkpoints` and its sub-commands: what they show, what they refuse, and that their help documents it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.model import Checkpoint
from firnline.cli.main import app, run_command
from tests.support.commands import keys_of
from tests.support.samples import SampleInput, files_below

VERBS = ("show", "diff", "export", "import", "delete")
FREE = {"file", "pipeline", "flights", "delta-1"}


@pytest.fixture
def stored(spec: Path, sample: SampleInput) -> Path:
    """The pipeline with a checkpoint store and a column that comes with its third epoch, after a run."""
    sample.add("c1.json", 7, extra="x")
    spec.write_text(spec.read_text() + "checkpoint: {rollback_window: 1, store: {type: file, path: store}}\n")
    run(spec)
    return spec


@pytest.fixture
def storeless(spec: Path) -> Path:
    """The pipeline without a store that outlives a run, after a run."""
    spec.write_text(spec.read_text() + "checkpoint: {store: {type: memory}}\n")
    run(spec)
    return spec


def run(spec: Path) -> None:
    from firnline.spec.build import load_options
    from tests.support.pipelines import run_once

    assert run_once(load_options(spec, environ={})).exit_code == 0


def fold_below(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold the ledger's entries before an epoch."""
    from firnline.cli.common import load_pipeline

    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 1)
    pipeline = load_pipeline(None)
    tip = pipeline.load().entry
    assert tip is not None
    assert pipeline.ledger.fold(tip, epoch) == epoch - 1


def failure(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str]:
    capsys.readouterr()
    code = run_command(list(tokens))
    told = capsys.readouterr()
    assert told.out == ""
    return code, told.err


def epilogue(verb: str) -> str:
    return str(app["checkpoints"][verb].help_epilogue)


# -- help -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_and_fits_80_columns(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = epilogue(verb)
    assert text.split("Examples:")[1].count(f"firnline checkpoints {verb}") >= 2
    assert all(len(line) <= 80 for line in text.splitlines())
    assert run_command(["checkpoints", verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: firnline checkpoints {verb}" in out
    assert text.strip().splitlines()[-1] in out


def test_every_json_field_is_documented_in_the_help(stored: Path, run_json: Any) -> None:
    found = {
        "show": run_json("checkpoints", "show", "2"),
        "diff": run_json("checkpoints", "diff", "1", "3"),
        "export": run_json("checkpoints", "export", "x.tar"),
        "import": run_json("checkpoints", "import", "x.tar"),
        "delete": run_json("checkpoints", "delete", "--dry-run"),
    }
    found["show"].pop("checkpoint")  # documented in formats.md
    found["show"].pop("durations_ms")
    for verb, value in found.items():
        text = epilogue(verb)
        for mark in "[]{}(),:":
            text = text.replace(mark, " ")
        unknown = {key for key in keys_of(value) if key not in text.split() and not key.startswith("/")}
        assert unknown <= FREE | {"extra"}, verb


# -- list -----------------------------------------------------------------------------------------------


def test_the_list_names_kind_and_origin(stored: Path, run_json: Any) -> None:
    found = run_json("checkpoints", str(stored))
    assert [(c["epoch"], c["kind"], c["read_from"], c["undone"], c["is_savepoint"]) for c in found["checkpoints"]] == [
        (n, "epoch", "ledger", False, False) for n in (3, 2, 1)
    ]
    assert (found["more"], found["damaged"]) == (False, [])


def test_the_store_fills_in_what_the_ledger_folded(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_json("checkpoints")["checkpoints"]
    fold_below(3, monkeypatch)
    found = run_json("checkpoints")["checkpoints"]
    assert [(c["epoch"], c["read_from"]) for c in found] == [(3, "ledger"), (2, "store"), (1, "store")]
    same = ("id", "run", "generation", "rows", "table_version", "last_committed_file", "checkpointed_size_bytes")
    assert [[c[k] for k in same] for c in found] == [[c[k] for k in same] for c in whole]


def test_the_list_is_paged(stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fold_below(3, monkeypatch)
    seen: list[int] = []
    before: list[str] = []
    for _ in range(3):
        page = run_json("checkpoints", "--limit", "1", *before)
        seen += [c["epoch"] for c in page["checkpoints"]]
        assert page["more"] == (seen[-1] > 1)
        before = ["--before", str(seen[-1])]
    assert seen == [3, 2, 1]
    assert run_json("checkpoints", "--before", "1")["checkpoints"] == []
    assert len(run_json("checkpoints", "--all")["checkpoints"]) == 3


def test_damaged_versions_of_the_store_are_told(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fold_below(3, monkeypatch)
    damage_store(stored, 1)
    found = run_json("checkpoints")
    assert [c["epoch"] for c in found["checkpoints"]] == [3, 2]
    assert [d["version"] for d in found["damaged"]] == [1]
    assert run_command(["checkpoints"]) == 0
    assert "damaged: version 1" in capsys.readouterr().out


def test_the_store_fills_in_behind_a_hole_in_the_ledger(stored: Path, run_json: Any) -> None:
    entry = run_json("checkpoints", "show", "2")["entry"]["name"]
    (stored.parent / "out/_firnline/flights/ledger" / entry).unlink()
    found = run_json("checkpoints")
    assert [(c["epoch"], c["read_from"]) for c in found["checkpoints"]] == [(3, "ledger"), (2, "store"), (1, "store")]
    assert found["damaged"] == [{"version": None, "problem": f"ledger entry {entry} is missing"}]


def damage_store(spec: Path, version: int) -> None:
    path = spec.parent / "store/flights/checkpoint" / f"{version:020d}.json"
    path.write_bytes(path.read_bytes().replace(b"flights", b"blights", 1))


def test_epochs_that_a_rollback_left_behind_are_listed_when_all_are(stored: Path, run_json: Any) -> None:
    from firnline.cli.common import load_pipeline
    from firnline.history.edits.rollback import Rollback

    Rollback(load_pipeline(None), 2).perform("r" * 16)
    run(stored)
    found = run_json("checkpoints", "--all")["checkpoints"]
    assert [(c["epoch"], c["kind"], c["undone"]) for c in found][-4:] == [
        (4, "rollback", False), (3, "epoch", True), (2, "epoch", False), (1, "epoch", False),
    ]  # fmt: skip
    assert 3 not in [c["epoch"] for c in run_json("checkpoints")["checkpoints"]]
    shown = run_json("checkpoints", "show", "3")
    assert (shown["undone"], shown["kind"]) == (True, "epoch")
    assert {c["where"]: c["status"] for c in shown["copies"]}["store"] == "intact"
    moved = run_json("checkpoints", "diff", "2", "4")
    assert [(j["epoch"], j["kind"]) for j in moved["jumps"]] == [(4, "rollback")]


@pytest.mark.parametrize("folded", [False, True])
def test_epochs_before_a_fresh_start_are_undone_in_the_list_and_in_show(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch, folded: bool
) -> None:
    from firnline.cli.common import load_pipeline
    from firnline.history.edits.fresh_start import start_over

    start_over(load_pipeline(None), 3, "r" * 16)
    run(stored)
    newest = run_json("checkpoints")["checkpoints"][0]["epoch"]
    if folded:
        monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 1)
        pipeline = load_pipeline(None)
        tip = pipeline.load().entry
        assert tip is not None
        assert pipeline.ledger.fold(tip, newest) == newest - 4
    assert [c["epoch"] for c in run_json("checkpoints")["checkpoints"]] == list(range(newest, 3, -1))
    every = {c["epoch"]: c for c in run_json("checkpoints", "--all")["checkpoints"]}
    assert sorted(every) == list(range(1, newest + 1))
    for epoch, row in every.items():
        shown = run_json("checkpoints", "show", str(epoch))
        assert (shown["undone"], row["undone"]) == (epoch < 4, epoch < 4), epoch
        assert [sink["holds"] for sink in shown["sinks"]] == [epoch >= 4]
        assert row["acknowledged"] == ("1/1" if epoch >= 4 else "0/1")


def test_epochs_that_a_folded_rollback_left_behind_are_undone(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from firnline.cli.common import load_pipeline
    from firnline.history.edits.rollback import Rollback

    Rollback(load_pipeline(None), 2).perform("r" * 16)
    run(stored)
    fold = load_pipeline(None)
    tip = fold.load().entry
    assert tip is not None
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 1)
    assert fold.ledger.fold(tip, 5) == 3  # epochs 1, 2 and the rollback, 4
    assert [c["epoch"] for c in run_json("checkpoints")["checkpoints"]][-3:] == [4, 2, 1]
    every = run_json("checkpoints", "--all")["checkpoints"]
    assert [(c["epoch"], c["undone"]) for c in every][-4:] == [(4, False), (3, True), (2, False), (1, False)]
    assert [run_json("checkpoints", "show", str(n))["undone"] for n in (1, 2, 3, 4)] == [False, False, True, False]


def test_a_table_that_is_gone_is_no_new_pipeline(
    stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stored.parent / "out")
    assert run_command(["checkpoints"]) == 0
    told = capsys.readouterr()
    assert told.err == (
        f"the table is gone: nothing is at {stored.parent / 'out'}, but the checkpoint store "
        f"{stored.parent / 'store'} holds epoch 3; the list comes from the store\n"
    )
    assert "no checkpoint yet" not in told.out
    rows = run_json("checkpoints")["checkpoints"]
    assert [(c["epoch"], c["read_from"], c["acknowledged"]) for c in rows] == [
        (n, "store", "0/1") for n in (3, 2, 1)
    ]  # fmt: skip
    assert [c["epoch"] for c in run_json("checkpoints", "--before", "3", "--limit", "1")["checkpoints"]] == [2]


def test_before_the_first_run_nothing_is_lost(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoints"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("no checkpoint yet; `firnline run` makes the first\n", "")


# -- show -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_the_checkpoint_survives_json(stored: Path, run_json: Any, epoch: int) -> None:
    out = run_json("checkpoints", "show", str(epoch))
    assert Checkpoint.from_json(out["checkpoint"]).to_json() == out["checkpoint"]
    assert (out["checkpoint"]["epoch"], out["epoch"]) == (epoch, epoch)


def test_show_tells_every_copy_and_sink(stored: Path, run_json: Any, sample: SampleInput) -> None:
    out = run_json("checkpoints", "show", "2", str(stored))
    assert [(c["where"], c["status"]) for c in out["copies"]] == [
        ("ledger", "intact"), ("commitInfo", "intact"), ("store", "intact"),
    ]  # fmt: skip
    assert [(s["name"], s["holds"], s["rows"]) for s in out["sinks"]] == [("delta-1", True, 5)]
    log = stored.parent / "out/_delta_log" / f"{out['sinks'][0]['version']:020d}.json"
    assert out["checkpoint"]["checksum"] in log.read_text()
    entry = stored.parent / "out/_firnline/flights/ledger" / out["entry"]["name"]
    assert out["sizes"]["entry_bytes"] == entry.stat().st_size
    assert out["positions"]["flights"]["last_committed_file"] == str(sample.path("b2.json"))
    assert out["positions"]["flights"]["files_set_aside"] == 1


def test_show_without_a_store(storeless: Path, run_json: Any) -> None:
    out = run_json("checkpoints", "show", "1")
    assert [c["where"] for c in out["copies"]] == ["ledger", "commitInfo"]


def test_show_of_a_folded_epoch_reads_the_other_copies(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_json("checkpoints", "show", "1")
    fold_below(3, monkeypatch)
    out = run_json("checkpoints", "show", "1")
    assert {c["where"]: c["status"] for c in out["copies"]} == {
        "ledger": "folded", "commitInfo": "intact", "store": "intact",
    }  # fmt: skip
    assert (out["checkpoint"], out["entry"]) == (whole["checkpoint"], whole["entry"])


def test_show_of_an_epoch_that_only_the_store_has(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_json("checkpoints", "show", "1")
    fold_below(3, monkeypatch)
    clean_log(stored)
    out = run_json("checkpoints", "show", "1")
    assert {c["where"]: c["status"] for c in out["copies"]} == {
        "ledger": "folded", "commitInfo": "missing", "store": "intact",
    }  # fmt: skip
    assert out["checkpoint"] == whole["checkpoint"]
    damage_store(stored, 1)
    code, told = failure(capsys, "checkpoints", "show", "1")
    assert code == 2
    assert "epoch 1 is folded away in the ledger, and the checkpoint store has no copy of it" in told
    assert "nearest known is 2" in told


def clean_log(spec: Path) -> None:
    """Take away the commits before the newest, as clean-up of the log does."""
    from deltalake import DeltaTable

    table = DeltaTable(spec.parent / "out")
    table.create_checkpoint()
    for path in (spec.parent / "out/_delta_log").glob("*.json"):
        if path.stem.isdigit() and int(path.stem) < table.version():
            path.unlink()


def test_show_of_an_epoch_that_nobody_has(
    storeless: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fold_below(2, monkeypatch)
    clean_log(storeless)
    code, told = failure(capsys, "checkpoints", "show", "1")
    assert code == 2
    assert told == (
        "Error: epoch 1 is folded away in the ledger, and there is no checkpoint store; the nearest known is 2\n"
        "Try: firnline checkpoints show 2\n"
    )


def test_an_unknown_epoch_names_the_nearest(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failure(capsys, "checkpoints", "show", "99") == (
        2, "Error: epoch 99 is not known; the nearest known is 3\nTry: firnline checkpoints show 3\n",
    )  # fmt: skip
    assert failure(capsys, "checkpoints", "diff", "0", "2")[0] == 2
    assert failure(capsys, "checkpoints", "show", "x")[0] == 2


def test_show_before_the_first_run(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = failure(capsys, "checkpoints", "show", "1")
    assert (code, told.splitlines()[0]) == (2, "Error: epoch 1 is not known; there is no checkpoint yet")


@pytest.mark.parametrize("copy", ["ledger", "commitInfo", "store"])
@pytest.mark.parametrize("epoch", [2, 3])
def test_a_damaged_copy_is_told_and_another_one_shown(stored: Path, run_json: Any, copy: str, epoch: int) -> None:
    whole = run_json("checkpoints", "show", str(epoch))
    if copy == "ledger":
        path = stored.parent / "out/_firnline/flights/ledger" / whole["entry"]["name"]
        path.write_bytes(path.read_bytes().replace(b"generation", b"germination", 1))
    elif copy == "commitInfo":
        path = stored.parent / "out/_delta_log" / f"{whole['sinks'][0]['version']:020d}.json"
        text = path.read_text()
        assert whole["checkpoint"]["checksum"] in text
        path.write_text(text.replace(whole["checkpoint"]["checksum"], "0" * 64))
    else:
        damage_store(stored, epoch)
    out = run_json("checkpoints", "show", str(epoch))
    assert {c["where"]: c["status"] for c in out["copies"]} == {
        **dict.fromkeys(("ledger", "commitInfo", "store"), "intact"), copy: "damaged",
    }  # fmt: skip
    assert out["checkpoint"] == whole["checkpoint"]


def test_an_epoch_behind_a_hole_is_shown_from_the_copies_that_name_it(
    stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [run_json("checkpoints", "show", str(n)) for n in (1, 2)]
    folder = stored.parent / "out/_firnline/flights/ledger"
    (folder / whole[1]["entry"]["name"]).unlink()
    out = run_json("checkpoints", "show", "1")
    assert [c["status"] for c in out["copies"]] == ["intact"] * 3  # the commit names its entry
    (folder / whole[0]["entry"]["name"]).unlink()
    out = run_json("checkpoints", "show", "1")
    assert [c["status"] for c in out["copies"]] == ["missing", "intact", "intact"]
    clean_log(stored)
    for version in (1, 2, 3):
        damage_store(stored, version)
    code, told = failure(capsys, "checkpoints", "show", "1")
    assert (code, "epoch 1 cannot be read: ledger entry" in told) == (1, True)


@pytest.mark.parametrize("damage", ["{", '{"kind": "epoch", "pipeline": "flights"}'])
def test_a_commit_that_cannot_be_read_is_told(stored: Path, run_json: Any, damage: str) -> None:
    version = run_json("checkpoints", "show", "2")["sinks"][0]["version"]
    path = stored.parent / "out/_delta_log" / f"{version:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["firnline"] = damage
    path.write_text("\n".join(json.dumps(action) for action in actions))
    out = run_json("checkpoints", "show", "2")
    status = {c["where"]: c["status"] for c in out["copies"]}
    assert status == {"ledger": "intact", "commitInfo": "damaged", "store": "intact"}


def test_the_baseline_of_another_tools_table_is_shown(spec: Path, run_json: Any, sample: SampleInput) -> None:
    """What was read before Firnline took over is epoch 0, which only a claim names."""
    import pyarrow as pa
    from deltalake import write_deltalake

    from tests.support.damage import write_blizzard

    table = spec.parent / "out"
    write_deltalake(str(table), pa.table({"id": [1], "month": ["2026-01"], "v": [0.5]}))
    write_blizzard(str(table), {"files": {}, "last_committed_file": str(sample.path("a1.json.gz"))})
    run(spec)
    found = run_json("checkpoints", "--all")["checkpoints"]
    assert (found[-1]["epoch"], found[-1]["kind"]) == (0, "baseline")
    out = run_json("checkpoints", "show", "0")
    assert (out["kind"], out["copies"][0]["status"], out["copies"][1]["status"]) == ("baseline", "intact", "missing")
    assert run_json("checkpoints", "diff", "0", "1")["epochs"] == 1


def test_a_copy_that_says_something_else_is_told(stored: Path, run_json: Any) -> None:
    from dataclasses import replace

    from firnline.stores.file import FileStore
    from firnline.stores.record import CheckpointRecord

    store = FileStore(str(stored.parent / "store"))
    record = store.get("flights", CheckpointRecord)
    assert record is not None
    store.put("flights", replace(record, checkpoint=replace(record.checkpoint, run="another")))
    out = run_json("checkpoints", "show", "3")
    assert {c["where"]: c["status"] for c in out["copies"]}["store"] == "differs"


# -- diff -----------------------------------------------------------------------------------------------


def test_diff_tells_what_moved(stored: Path, run_json: Any, sample: SampleInput) -> None:
    out = run_json("checkpoints", "diff", "1", "3")
    source = out["sources"]["flights"]
    assert (out["epochs"], out["rows"], out["epochs_unknown"], out["notes"]) == (2, 12, 0, [])
    assert {Path(f["path"]).name: (f["epoch"], f["status"]) for f in source["files_read"]} == {
        "b1.json.gz": (2, "set_aside"), "b2.json": (2, "committed"), "c1.json": (3, "committed"),
    }  # fmt: skip
    assert source["last_committed_file"] == {"from": str(sample.path("a2.json.gz")), "to": str(sample.path("c1.json"))}
    assert [Path(p).name for p in source["set_aside"]] == ["b1.json.gz"]
    assert out["schema"]["columns"] == {"extra": {"from": None, "to": "string"}}
    assert run_json("checkpoints", "diff", "3", "1") == out


def test_diff_of_an_epoch_with_itself_is_empty(stored: Path, run_json: Any) -> None:
    out = run_json("checkpoints", "diff", "2", "2")
    assert (out["epochs"], out["rows"], out["sources"]["flights"]["files_read"]) == (0, 0, [])
    assert out["schema"]["columns"] == {}


def test_diff_over_folded_epochs(stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_json("checkpoints", "diff", "1", "3")
    inner = run_json("checkpoints", "diff", "1", "2")
    fold_below(3, monkeypatch)
    folded, inside = run_json("checkpoints", "diff", "1", "3"), run_json("checkpoints", "diff", "1", "2")
    for before, after in ((whole, folded), (inner, inside)):
        assert after["sources"] == before["sources"]
        same = ("epochs", "rows", "size_bytes", "epochs_unknown")
        assert [after[k] for k in same] == [before[k] for k in same]


def test_diff_inside_a_fold_stops_at_the_newer_epoch(
    stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch, sample: SampleInput
) -> None:
    sample.add("d1.json", 3)
    run(stored)
    before = [run_json("checkpoints", "diff", a, b) for a, b in (("1", "2"), ("1", "3"), ("2", "3"))]
    fold_below(4, monkeypatch)
    after = [run_json("checkpoints", "diff", a, b) for a, b in (("1", "2"), ("1", "3"), ("2", "3"))]
    for one, other in zip(before, after, strict=True):
        same = ("epochs", "rows", "size_bytes", "sources", "epochs_unknown")
        assert [one[k] for k in same] == [other[k] for k in same]


def test_diff_with_an_epoch_that_was_left_behind_says_so(stored: Path, run_json: Any, sample: SampleInput) -> None:
    from firnline.cli.common import load_pipeline
    from firnline.history.edits.rollback import Rollback

    Rollback(load_pipeline(None), 2).perform("r" * 16)
    run(stored)
    out = run_json("checkpoints", "diff", "3", "5")
    assert "epoch 3 does not lie on the history of epoch 5" in out["notes"]
    assert out["generation"]["from"] < out["generation"]["to"]


def test_diff_in_words() -> None:
    from firnline.cli.checkpoints import _diff_lines

    def moved(one: Any, other: Any) -> dict[str, Any]:
        return {"from": one, "to": other}

    told = list(
        _diff_lines(
            {
                "from_epoch": 1, "to_epoch": 20, "epochs": 19, "epochs_unknown": 2, "rows": 1, "size_bytes": 2,
                "quarantined": 3, "jumps": [{"epoch": 5, "kind": "rollback"}],
                "sources": {
                    "files": {
                        "files_read": [{"path": f"/{n}", "epoch": n, "status": "committed"} for n in range(12)],
                        "root": moved("/a", "/b"), "last_committed_file": moved(None, "/9"),
                        "in_progress": {"now": {"/x": 1}, "begun": ["/x"], "ended": []},
                        "set_aside": {"/y": "why"}, "taken_up": ["/z"],
                    },
                    "log": {"files_read": [], "changed": {"lsn": moved(1, 2)}},
                },
                "schema": {
                    "from": {"version": 1}, "to": {"version": 2},
                    "columns": {"a": moved("int64", None), "b": moved("int64", "float64"), "c": moved(None, "string")},
                },
                "watermarks": {"w": moved(1, 2)},
                "state": {"op": moved(None, {"epoch": 7, "shards": 2, "rows": 3, "size_bytes": 5})},
                "generation": moved(1, 2), "floor": moved(0, 4), "notes": ["mind the gap"],
            }
        )
    )  # fmt: skip
    for line in (
        "  at least 1 row, 2 B written", "  3 records quarantined", "  epoch 5 was a rollback", "  12 files read",
        "    and 2 more; --json has them all", "  read up to: the start -> /9", "  root: /a -> /b",
        "    /x, 1 record read", "    /y: why", "    /z", "  lsn: 1 -> 2", "  a gone", "  b: int64 -> float64",
        "  c added: string", "watermark of w: 1 -> 2", "state of op: none -> 3 rows, 5 B in 2 shards (epoch 7)",
        "generation: 1 -> 2", "floor: 0 -> 4", "note: mind the gap",
    ):  # fmt: skip
        assert line in told


def test_diff_says_what_nobody_knows(stored: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fold_below(3, monkeypatch)
    damage_store(stored, 2)
    out = run_json("checkpoints", "diff", "1", "3")
    assert (out["epochs"], out["epochs_unknown"], out["rows"]) == (2, 1, 7)


def test_diff_tells_of_a_hole(stored: Path, run_json: Any) -> None:
    entry = run_json("checkpoints", "show", "2")["entry"]["name"]
    (stored.parent / "out/_firnline/flights/ledger" / entry).unlink()
    out = run_json("checkpoints", "diff", "1", "3")
    assert out["rows"] == 7
    assert "is missing" in out["notes"][0]


def test_positions_that_are_not_of_files_are_compared_by_key() -> None:
    from firnline.history.diff import diff_position
    from firnline.sources.registry import describe

    before, after = describe({"lsn": 5, "slot": "x"}), describe({"lsn": 9, "slot": "x"})
    assert diff_position(before, after) == {"changed": {"lsn": {"from": 5, "to": 9}}}


# -- export, import, delete, audit ----------------------------------------------------------------------


def test_export_delete_import_brings_everything_back(stored: Path, run_json: Any) -> None:
    from firnline.stores.file import FileStore

    store = FileStore(str(stored.parent / "store"))
    before = [store.get_version_raw("flights", n) for n in (1, 2, 3)]
    table = files_below(stored.parent / "out")
    exported = run_json("checkpoints", "export", "x.tar")
    assert (exported["versions"], exported["origin"], exported["left_out"]) == (3, "file", [])
    assert run_json("checkpoints", "import", "x.tar")["status"] == "already_there"
    assert run_json("checkpoints", "delete", "--dry-run")["status"] == "would_delete"
    assert run_json("checkpoints", "delete", "--yes", "--dry-run")["status"] == "would_delete"
    assert run_json("checkpoints", "--audit")["audit"] == []
    assert run_json("checkpoints", "delete", "--yes")["status"] == "deleted"
    assert store.get_raw("flights") is None
    assert run_json("checkpoints", "delete", "--yes")["status"] == "nothing_there"
    assert [c["epoch"] for c in run_json("checkpoints")["checkpoints"]] == [3, 2, 1]  # the table has its own
    assert run_json("checkpoints", "import", "x.tar", "--dry-run")["status"] == "would_import"
    assert store.get_raw("flights") is None
    assert run_json("checkpoints", "import", "x.tar")["put"] == 3
    assert [store.get_version_raw("flights", n) for n in (5, 6, 7)] == before
    assert files_below(stored.parent / "out") == table
    trail = run_json("checkpoints", "--audit")["audit"]
    assert [(r["what"], r["outcome"]) for r in trail] == [
        ("import", "done"), ("import", "begun"), ("delete", "done"), ("delete", "begun"),
    ]  # fmt: skip
    assert (trail[0]["pipeline"], trail[0]["to_epoch"], trail[0]["pid"]) == ("flights", 3, os.getpid())
    assert trail[0]["run"] == trail[1]["run"]
    run(stored)  # the run finds its store as it left it
    assert run_json("checkpoints", "show", "3")["copies"][2]["status"] == "intact"


def test_the_audit_trail_travels_and_is_paged(stored: Path, run_json: Any) -> None:
    run_json("checkpoints", "export", "x.tar")
    for _ in range(2):
        run_json("checkpoints", "delete", "--yes")
        run_json("checkpoints", "import", "x.tar")
    assert run_json("checkpoints", "export", "y.tar")["audit"] == 8
    first = run_json("checkpoints", "--audit", "--limit", "3")
    assert ([r["version"] for r in first["audit"]], first["more"]) == ([8, 7, 6], True)
    rest = run_json("checkpoints", "--audit", "--before", "6")
    assert ([r["version"] for r in rest["audit"]], rest["more"]) == ([5, 4, 3, 2, 1], False)
    stored.write_text(stored.read_text().replace("type: file, path: store", "type: sqlite, path: other.db"))
    assert run_json("checkpoints", "import", "y.tar")["audit"] == 8
    assert len(run_json("checkpoints", "--audit", "--all")["audit"]) == 10
    assert run_json("checkpoints", "import", "y.tar")["status"] == "already_there"


def test_without_a_store_the_ledger_is_exported(storeless: Path, run_json: Any, sample: SampleInput) -> None:
    exported = run_json("checkpoints", "export", "x.tar")
    assert (exported["versions"], exported["origin"]) == (2, "ledger")
    storeless.write_text(storeless.read_text().replace("type: memory", "type: file, path: store"))
    assert run_json("checkpoints", "import", "x.tar")["put"] == 2
    sample.add("d1.json", 3)
    run(storeless)
    out = run_json("checkpoints", "show", "3")
    assert {c["where"]: c["status"] for c in out["copies"]}["store"] == "intact"


def test_an_empty_store_exports_the_ledger_and_its_trail(stored: Path, run_json: Any) -> None:
    run_json("checkpoints", "delete", "--yes")
    exported = run_json("checkpoints", "export", "x.tar")
    assert (exported["versions"], exported["audit"], exported["origin"]) == (3, 2, "ledger")
    assert run_json("checkpoints", "import", "x.tar")["put"] == 3


def test_export_replaces_only_with_yes(stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (stored.parent / "x.tar").write_text("mine")
    code, told = failure(capsys, "checkpoints", "export", "x.tar")
    assert (code, "is there already" in told) == (2, True)
    assert (stored.parent / "x.tar").read_text() == "mine"
    assert run_json("checkpoints", "export", "x.tar", "--yes")["versions"] == 3


def test_an_archive_goes_in_although_the_tables_own_copies_are_damaged(stored: Path, run_json: Any) -> None:
    run_json("checkpoints", "export", "x.tar")
    whole = run_json("checkpoints", "show", "3")
    run_json("checkpoints", "delete", "--yes")
    entry = stored.parent / "out/_firnline/flights/ledger" / whole["entry"]["name"]
    entry.write_bytes(entry.read_bytes().replace(b'"run":"', b'"run":"x', 1))
    log = stored.parent / "out/_delta_log" / f"{whole['sinks'][0]['version']:020d}.json"
    log.write_text(log.read_text().replace(whole["checkpoint"]["checksum"], "0" * 64))
    assert run_json("checkpoints", "import", "x.tar")["put"] == 3
    assert run_json("checkpoints", "show", "3")["checkpoint"] == whole["checkpoint"]


def test_an_archive_of_another_table_is_refused(
    stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str], sample: SampleInput
) -> None:
    """The same pipeline run again from scratch is another history, although every number is the same."""
    run_json("checkpoints", "export", "x.tar")
    original = stored.read_text()
    stored.write_text(original.replace("table: out", "table: out2").replace("path: store", "path: store2"))
    run(stored)
    run_json("checkpoints", "delete", "--yes")
    before = files_below(stored.parent / "store2")
    code, told = failure(capsys, "checkpoints", "import", "x.tar")
    assert code == 1
    assert "of the archive is not the one that the table holds" in told
    stored.write_text(original.replace("table: out", "table: out3").replace("path: store", "path: store2"))
    code, told = failure(capsys, "checkpoints", "import", "x.tar")
    assert code == 1
    assert "the archive knows epoch 3, the table holds 0" in told
    assert files_below(stored.parent / "store2") == before


def test_a_hostile_archive_puts_nothing(stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_json("checkpoints", "export", "x.tar")
    run_json("checkpoints", "delete", "--yes")
    path = stored.parent / "x.tar"
    path.write_bytes(path.read_bytes().replace(b'"generation":1', b'"generation":2'))
    before = files_below(stored.parent / "store")
    code, told = failure(capsys, "checkpoints", "import", "x.tar")
    assert code == 1
    assert told.splitlines()[0].startswith("Error: the archive is refused: checkpoints/")
    assert files_below(stored.parent / "store") == before


@pytest.mark.parametrize("tokens", [["import", "x.tar"], ["delete", "--yes"], ["--audit"]])
def test_what_needs_a_store_says_so(
    storeless: Path, tokens: list[str], capsys: pytest.CaptureFixture[str], run_json: Any
) -> None:
    run_json("checkpoints", "export", "x.tar")
    code, told = failure(capsys, "checkpoints", *tokens)
    assert code == 2
    assert "has no checkpoint store" in told
    assert "store: {type: file}" in told


def test_looking_writes_nothing(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(spec.read_text() + "checkpoint: {store: {type: file, path: store}}\n")
    before = sorted(tmp_path.rglob("*"))
    assert run_command(["checkpoints"]) == 0
    assert run_command(["checkpoints", "--audit"]) == 0
    assert run_command(["checkpoints", "show", "1"]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert "there is no audit trail" in capsys.readouterr().out


def test_a_store_that_cannot_be_opened_is_done_without(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For looking only: what is exported or audited must not be less than all of it."""
    shutil.rmtree(stored.parent / "store")
    (stored.parent / "store").write_text("in the way")
    for tokens in ([], ["show", "2"], ["diff", "1", "2"]):
        assert run_command(["checkpoints", *tokens]) == 0
        told = capsys.readouterr()
        assert told.err.startswith("the checkpoint store cannot be read, so the output comes from the table alone: ")
        assert told.out
    for tokens in (["--audit"], ["export", "x.tar"], ["delete", "--yes"]):
        assert failure(capsys, "checkpoints", *tokens)[0] == 3
    assert not (stored.parent / "x.tar").exists()


@pytest.mark.parametrize("begin", [0, 4096])  # the header, or the pages behind it
def test_a_damaged_sqlite_store_is_done_without(spec: Path, capsys: pytest.CaptureFixture[str], begin: int) -> None:
    spec.write_text(spec.read_text() + "checkpoint: {store: {type: sqlite, path: store.db}}\n")
    run(spec)
    path = spec.parent / "store.db"
    data = path.read_bytes()
    assert len(data) > begin + 100
    for extra in ("-wal", "-shm"):
        Path(f"{path}{extra}").unlink(missing_ok=True)
    path.write_bytes(data[:begin] + b"x" * (len(data) - begin))
    for tokens in ([], ["show", "2"], ["diff", "1", "2"]):
        assert run_command(["checkpoints", *tokens]) == 0
        told = capsys.readouterr()
        assert told.err.startswith("the checkpoint store cannot be read, so the output comes from the table alone: ")
        assert told.out


def test_the_audit_of_a_store_that_cannot_be_read_names_it(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(stored.parent / "store")
    (stored.parent / "store").write_text("in the way")
    code, told = failure(capsys, "checkpoints", "--audit")
    assert code == 3
    assert told.startswith(f"Error: the checkpoint store ({stored.parent / 'store'}) cannot be read: ")
    assert "\nTry: Make it reachable" in told


def test_an_export_onto_a_folder_is_refused(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored.parent / "backup"
    folder.mkdir()
    assert failure(capsys, "checkpoints", "export", str(folder), "--yes") == (
        2, f"Error: {folder} is a folder\nTry: Name a file in it, e.g. {folder / 'flights.tar'}\n",
    )  # fmt: skip


def test_a_damaged_manifest_has_a_hint_that_fits(
    stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json("checkpoints", "export", "x.tar")
    path = stored.parent / "x.tar"
    path.write_bytes(path.read_bytes().replace(b"flights", b"blights", 1))
    code, told = failure(capsys, "checkpoints", "import", "x.tar")
    assert code == 1
    assert told.startswith("Error: the archive is refused: manifest.json")
    assert "\nTry: Nothing was put. Take another copy of the file" in told


def test_wrong_usage_names_the_sub_command(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(capsys, "checkpoints", "show", "x")[1].endswith("\nTry: firnline checkpoints show --help\n")


def test_damaged_audit_records_hide_no_others(stored: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_json("checkpoints", "delete", "--yes")
    path = stored.parent / "store/flights/parts/audit" / f"{1:020d}.json"
    path.write_bytes(path.read_bytes().replace(b"begun", b"ended", 1))
    trail = run_json("checkpoints", "--audit")["audit"]
    assert [bool(r["problem"]) for r in trail] == [False, True]
    assert run_command(["checkpoints", "--audit"]) == 0
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tokens",
    [[], ["show", "2"], ["diff", "1", "3"], ["export", "z.tar"], ["import", "x.tar"], ["delete"], ["--audit"]],
)
def test_text_output(stored: Path, tokens: list[str], run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_json("checkpoints", "export", "x.tar")
    run_json("checkpoints", "delete", "--yes")
    assert run_command(["checkpoints", *tokens]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    wanted = {
        "show": "delta-1", "diff": "extra added: string", "export": "3 checkpoints, 2 audit records",
        "import": "imported 3 checkpoints and 0 audit records", "delete": "has no checkpoint of flights",
        "--audit": "delete  done", "": "COMPLETED",
    }  # fmt: skip
    assert wanted[tokens[0] if tokens else ""] in told.out


def test_json_is_plain(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens in (["show", "2"], ["diff", "1", "2"], ["--audit"]):
        assert run_command(["checkpoints", *tokens, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["pipeline"] == "flights"
