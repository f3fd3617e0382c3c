"""No output and no error shows a value as Python writes it: every command, with good and with wrong arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from tests.unit.cli.test_cli_rules import EVERY

REPR = re.compile(
    r"\b(None|True|False)\b|<class |<[\w.]+ object at|PosixPath|datetime\.\w+\(|[\[{(]'|': |\bb'|\w+Error\("
    r"|Decimal\("
)
GOOD = [
    ["status"], ["dry-run"], ["checkpoints"], ["checkpoints", "--audit"], ["checkpoints", "show", "1"],
    ["checkpoints", "diff", "1", "2"], ["checkpoints", "export", "copy.tar", "--dry-run"], ["files"], ["quarantine"],
    ["checkpoints", "delete", "--dry-run"], ["rollback", "--to", "1", "--dry-run"], ["savepoint", "create"],
    ["savepoint", "list"], ["ledger", "repair"], ["gc", "--dry-run"], ["compact", "--dry-run"], ["staging", "out"],
    ["committer", "out", "--once"], ["init", "new", "--dry-run"], ["files", "--drop", "*/b1*", "--dry-run"],
    ["run", "--fresh-after", "2", "--dry-run"], ["--install-completion", "--shell", "fish", "--dry-run"],
]  # fmt: skip
WRONG = [
    ["files", "--status", "nosuch"], ["files", "--limit", "x"], ["files", "--drop", "nosuch"],
    ["files", "--retry", "x"],
    ["rollback"], ["rollback", "--to", "x"], ["rollback", "--to", "99"], ["rollback", "--to-time", "10x"],
    ["rollback", "--to", "1", "--leave", "nosuch"], ["rescale", "--shards", "0"], ["rescale", "--shards", "4"],
    ["checkpoints", "show", "99"], ["checkpoints", "show"], ["checkpoints", "diff", "1"],
    ["checkpoints", "import", "x"],
    ["savepoint", "dispose", "nosuch", "--yes"], ["state", "nosuch"], ["state"], ["staging"], ["committer"],
    ["staging", "nowhere"], ["staging", "out", "--retry", "x"], ["staging", "out", "--discard-from", "1"],
    ["gc", "nowhere"], ["gc", "--grace", "10x"], ["compact", "--target-size", "1G"], ["compact", "--partition", "x"],
    ["compact", "--partition", "nosuch=1"], ["run", "--from-savepoint", "nosuch"], ["run", "--truncate"],
    ["run", "--metrics-port", "99999"], ["run", "--metrics-port", "0", "--metrics-host", "0.0.0.0"], ["pause"],
    ["stop"],
    ["checkpoint"], ["resume"], ["drill", "--table", "in"], ["demo", "--records", "1"], ["init"],
    ["--install-completion", "--shell", "tcsh"], ["nosuch"],
]  # fmt: skip


def check(capsys: pytest.CaptureFixture[str], tokens: list[str]) -> None:
    shown = capsys.readouterr()
    for line in (shown.out + shown.err).splitlines():
        assert not REPR.search(line), f"firnline {' '.join(tokens)}: {line}"
    assert "This is a bug in Firnline" not in shown.err, f"firnline {' '.join(tokens)}: {shown.err}"


@pytest.fixture
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(finished.parent))
    return finished


def test_good_arguments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for tokens in GOOD:
        assert run_command(tokens) == 0, tokens
        check(capsys, tokens)


def test_wrong_arguments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for tokens in WRONG:
        assert run_command(tokens) != 0, tokens
        check(capsys, tokens)


def test_unknown_options_and_too_many_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for words in EVERY:
        for more in (["--nosuch"], ["--nosuch=1"], ["a", "b", "c", "d", "e"], ["--json=perhaps"]):
            if words == ("committer",) and more[0] == "a":
                continue  # it takes any number of tables
            assert run_command([*words, *more]) == 2, (words, more)
            check(capsys, [*words, *more])


@pytest.mark.parametrize(
    "wrong",
    [
        "sources: [1]", "batch: {max_bytes: 10x}", "batch: {max_bytes: [1]}", "batch: {max_files: true}",
        "restart: {backoff_secs: {a: 1}}", "checkpoint: {rollback_window: 1.5}", "checkpoint: {store: {type: x}}",
        "operators: [{name: a}]", "spark: {spark.master: [1]}", "sinks: [{table: out, partition_by: [1, 1]}]", "x: 1",
        "state: {dropped: x}", "checkpoint: {keep_aborted: 2020-01-01}",
    ],
)  # fmt: skip
def test_wrong_specs(here: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    key = wrong.partition(":")[0]
    kept = [line for line in here.read_text().splitlines() if not line.startswith(key)]
    here.write_text("\n".join([*kept, wrong, ""]))
    capsys.readouterr()
    assert run_command(["status"]) == 2
    check(capsys, ["status"])
