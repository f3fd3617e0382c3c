"""Runs the console blocks of a page, one command after the other, as a reader would type them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SECONDS = 120
FirnlineCommand = Callable[
    [list[str]], tuple[int, str]
]  # the words after `firnline` -> exit code, and what was printed


@dataclass
class PageCommand:
    """A command of a page, the text that it reads (a here-document), and the lines that the page shows below it."""

    line: str
    text: str = ""
    shown: list[str] = field(default_factory=list)


def page_commands(page: Path, kinds: str = "console") -> list[PageCommand]:
    """The commands in a page's blocks of these kinds, in order: tests run `console`, and only check `sh`."""
    return commands_in(page.read_text(), kinds)


def commands_in(text: str, kinds: str = "console") -> list[PageCommand]:
    """The commands in the blocks of a text."""
    found: list[PageCommand] = []
    for block in re.findall(rf"^ *```(?:{kinds})\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        lines = iter(line.removeprefix("    ") if block.startswith("    ") else line for line in block.splitlines())
        for line in lines:
            if line.startswith("$ "):
                found.append(PageCommand(line.removeprefix("$ ")))
                if end := re.search(r"<<'(\w+)'$", line):
                    found[-1].text = "".join(f"\n{read}" for read in iter(lines.__next__, end[1])) + f"\n{end[1]}"
            elif line and found:
                found[-1].shown.append(line)
    return found


def run_page(page: Path, folder: Path, firnline: FirnlineCommand, python: str = sys.executable) -> None:
    """Run a page's commands in a folder; each must succeed and print the lines that the page shows."""
    run_commands(page_commands(page), folder, firnline, python)


def run_commands(commands: list[PageCommand], folder: Path, firnline: FirnlineCommand, python: str) -> None:
    """Run commands one after the other; `cd` changes the folder of those after it."""
    for command in commands:
        if changed := re.search(r"(?:^|&& )cd (\S+)$", command.line):
            subprocess.run(["bash", "-c", command.line], cwd=folder, check=True, timeout=SECONDS)
            folder = folder / changed[1]
            os.chdir(folder)
            continue
        words = shlex.split(command.line.replace("$PWD", str(folder)), comments=True)
        if words[0] == "firnline":
            code, printed = firnline(words[1:])
        else:
            code, printed = _run(command, words, folder, python)
        assert code == 0, (command.line, printed)
        said = {line_shape(line) for line in printed.splitlines()}
        for line in command.shown:
            assert line == "..." or line_shape(line) in said, (command.line, line, printed)


def _run(command: PageCommand, words: list[str], folder: Path, python: str) -> tuple[int, str]:
    line = [python, *words[1:]] if words[0] == "python" else ["bash", "-c", command.line + command.text]
    done = subprocess.run(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
    )  # fmt: skip
    return done.returncode, done.stdout


def line_shape(line: str) -> str:
    """A line without what differs from run to run: durations, folders of paths, widths."""
    line = re.sub(r"\d[\d.,]* m?s\b|\b(\d+:)?\d+:\d\d$", "0 s", line)  # from a minute on `1:09`, at the end of a line
    line = re.sub(r"\S*/in/", "in/", line)
    return " ".join(line.split())
