"""`firnline status` when the table is not what the copies say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command


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
