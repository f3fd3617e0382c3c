from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from tests.support.samples import SampleInput

SPEC = """\
name: flights
sources:
  flights: {type: files, path: in, file_attempts: 1, poll_interval_secs: 1, min_age_secs: 0}
sinks:
  - {type: delta, table: out}
batch: {max_files: 2}
restart: {attempts: 2, backoff_secs: 0.01}
"""

RunJson = Callable[..., Any]


@pytest.fixture
def spec(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline file whose input has good and bad records and a broken file; nothing has run yet."""
    sample.add("a1.json.gz", 5)
    sample.add("a2.json.gz", 5, bad=2)
    sample.add_truncated("b1.json.gz")
    sample.add("b2.json", 5)
    path = tmp_path / "firnline.yml"
    path.write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def finished(spec: Path) -> Path:
    """The same pipeline after a run."""
    from firnline.spec.build import load_options
    from tests.support.pipelines import run_once

    assert run_once(load_options(spec, environ={})).exit_code == 0
    return spec


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> RunJson:
    """Run a command with `--json` and return what it says."""

    def run(*tokens: str) -> Any:
        assert run_command([*tokens, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run
