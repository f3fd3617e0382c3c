"""Shell completion: it names the files that it changes, asks first, and can be printed instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from firnline.cli.main import run_command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ZSH", "ZSH_CUSTOM"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("shell", "script", "startup"),
    [
        ("bash", ".local/share/bash-completion/completions/firnline", ".bashrc"),
        ("zsh", ".zsh/completions/_cyclopts_firnline", ".zshrc"),
        ("fish", ".config/fish/completions/firnline.fish", None),
    ],
)
def test_it_names_the_files_first_and_changes_only_those(
    home: Path, capsys: pytest.CaptureFixture[str], shell: str, script: str, startup: str | None
) -> None:
    install = ["--install-completion", "--shell", shell]
    assert run_command(install) == 2, "there is no terminal to ask"
    told = capsys.readouterr()
    assert str(home / script) in told.out
    assert startup is None or str(home / startup) in told.out
    assert "needs --yes" in told.err
    assert run_command([*install, "--dry-run", "--yes"]) == 0
    assert list(home.iterdir()) == [], "nothing was made, no folder either"
    assert run_command([*install, "--yes"]) == 0
    assert files(home) == {script, *([startup] if startup else [])}
    before = {name: (home / name).read_bytes() for name in files(home)}
    assert run_command([*install, "--yes"]) == 0
    assert {name: (home / name).read_bytes() for name in files(home)} == before, "repeating it changes nothing"


@pytest.mark.parametrize(
    ("answer", "is_done"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_at_a_terminal_it_asks(home: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_done: bool) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", asked := Terminal())
    assert run_command(["--install-completion", "--shell", "fish"]) == 0
    assert asked.getvalue() == "Change these files? [y/N] "
    assert bool(files(home)) == is_done


def test_json_says_what_would_change_and_asks_nobody(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--install-completion", "--shell", "bash", "--json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert (plan["shell"], plan["startup"], plan["done"]) == ("bash", str(home / ".bashrc"), False)
    assert run_command(["--install-completion", "--shell", "bash", "--json", "--yes"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] is True


def test_a_home_that_cannot_be_written_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / ".config").write_text("a file")
    assert run_command(["--install-completion", "--shell", "fish", "--yes"]) == 2
    assert "Try: firnline --show-completion prints the script" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_is_printed_without_any_change(home: Path, capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert run_command(["--show-completion", "--shell", shell]) == 0
    text = capsys.readouterr().out
    assert "checkpoints" in text
    assert "--metrics-host" in text
    assert list(home.iterdir()) == []


def test_an_unknown_shell_is_named(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", lambda: "powershell")
    assert run_command(["--show-completion"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "Error: your shell is none of bash, zsh, fish",
        "Try: Name one of them with --shell.",
    ]
