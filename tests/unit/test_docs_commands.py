"""The commands in the walk-through of docs/rollback.md run as they stand there, one after the other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.usefixtures("no_spark")

PAGE = Path(__file__).parent.parent.parent / "docs" / "rollback.md"
SPEC = """\
name: flights
sources: {flights: {path: in}}
sinks: [{table: out}]
batch: {max_files: 1}
"""


def blocks() -> list[tuple[list[str], list[str]]]:
    """The words of every command, and the lines that the page shows below it."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ firnline "):
                found.append((shlex.split(line.removeprefix("$ firnline ")), []))
            elif line:
                found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, times, names of machines, paths, widths."""
    line = re.sub(r"\d[\d.,:TZ-]*", "0", line)
    line = re.sub(r"\S*/in/", "in/", line)
    return " ".join(line.split())


def test_the_walk_through_works(
    tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "firnline.yml").write_text(SPEC)
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 3)
    assert run_command(["run", "--once"]) == 0
    capfd.readouterr()
    commands = blocks()
    assert len(commands) >= 8
    for words, shown in commands:
        assert run_command(words) == 0, words
        streams = capfd.readouterr()
        said = {shape(line) for line in (streams.out + streams.err).splitlines()}
        for line in shown:
            if line != "..." and "ingest-0" not in shape(line):
                assert shape(line) in said, (words, line, sorted(said))
    assert table_ids(str(tmp_path / "out")) == sample.ids
