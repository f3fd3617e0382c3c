"""The lakehouse example: a bad deployment of gold, and all of it back to the instant before. Without Spark."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.spec.build import load_options
from tests.support.examples import CHAIN, load_example
from tests.support.topologies import running

LAKEHOUSE = CHAIN.parent / "lakehouse"
incident = load_example("incident", LAKEHOUSE)


class LocalRun:
    """A run in a thread."""

    def __init__(self, path: Path) -> None:
        options = load_options(path, environ=os.environ)
        source = options.sources[0]
        if isinstance(source, FileSourceOptions):
            source = replace(source, min_age_secs=0.0, poll_interval_secs=0.05)
        elif isinstance(source, DeltaSourceOptions):
            source = replace(source, poll_interval_secs=0.05)
        options = replace(options, sources=(source,))
        self._stack = ExitStack()
        self._stack.enter_context(running(options))

    def has_ended(self) -> bool:
        return False

    def stop(self) -> None:
        self._stack.close()


class LocalLakehouse(incident.Lakehouse):  # type: ignore[misc, name-defined]  # a module of an example
    """The example, in this process."""

    def firnline(self, *words: str) -> str:
        output = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(output):
            assert run_command(list(words)) == 0, output.getvalue()
        return output.getvalue()

    def start(self, file: str) -> LocalRun:
        return LocalRun(self.folder / file)


def test_a_bad_deployment_is_undone_in_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(LAKEHOUSE, tmp_path / "lake", ignore=shutil.ignore_patterns("in", "out", "data", "*.log"))
    incident.main(LocalLakehouse(tmp_path / "lake"))
    told = capsys.readouterr().out
    assert "gold IS WRONG" in told
    assert told.rstrip().endswith("bronze is right, silver is right, gold is right")
