"""What a person who is called reads: why, and what helps."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from firnline.cli.serve import serve
from firnline.errors import ConfigError
from firnline.process import Process
from firnline.service import serving
from firnline.service.access.disclosure import without_values
from firnline.service.glance import Glance
from firnline.service.registry import Registered, Registry
from firnline.service.supervise.launches import Launch
from firnline.service.supervise.policy import NeedsPerson
from firnline.service.supervise.supervisor import Seen
from firnline.service.views import summary

RUN = Process("ann", "here", 7, "1")
AT = "2026-01-01T00:00:00+00:00"
ERROR = {"at": AT, "code": "schema", "message": "column a holds 'secret'", "hint": None}
SPEC = 'name: flights\nsources:\n  in: {type: files, path: "%s"}\nsinks:\n  - {type: delta, table: out}\n'


def see(run: Process | None) -> Seen:
    """A pipeline whose last run, a launch, ended with code 2; `run` is the one that the newest record tells of."""
    launch = Launch("00000001-0001", AT, "ann", run=RUN, ended_at=AT, code=2)
    record = {"error": ERROR, **asdict(run)} if run is not None else None
    glance = Glance("flights", AT, "failed", run=record, launches=[launch], last_error={**ERROR, "run": "r"})
    return Seen(Registered("flights", Path("flights.yml")), glance, NeedsPerson("the run ended with exit code 2"))


def test_the_reason_that_the_run_recorded_is_said() -> None:
    row = summary(see(RUN), datetime.now(UTC))
    assert row["needs_person"] == "the run ended with exit code 2: column a holds 'secret'"
    assert "secret" not in str(without_values(row))
    assert "exit code 2" in without_values(row)["needs_person"]


@pytest.mark.parametrize("run", [None, Process("ann", "here", 7, "2"), Process("ann", "there", 7, "1")])
def test_the_reason_of_another_run_is_not_said(run: Process | None) -> None:
    assert see(run).explained == "the run ended with exit code 2"


def test_the_hint_for_a_file_that_cannot_be_used_is_that_of_its_error(tmp_path: Path) -> None:
    path = tmp_path / "flights.yml"
    path.write_text(SPEC % "${PLACE}")
    registry = Registry([tmp_path], {})
    registry.refresh()
    with pytest.raises(ConfigError, match="PLACE is not set") as refused:
        registry.get("flights").usable  # noqa: B018
    assert "export PLACE" in refused.value.hint
    path.write_text("name: [\n")
    registry.refresh()
    with pytest.raises(ConfigError) as refused:
        registry.get("flights").usable  # noqa: B018
    assert refused.value.hint


def test_a_service_that_has_nothing_to_serve_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "leave_out_pandas", lambda: None)
    monkeypatch.setattr(serving, "keep_memory_together", lambda: None)
    with pytest.raises(ConfigError, match="no such file or folder"):
        serve(pipelines=str(tmp_path / "none"), state=str(tmp_path / "state"))
    assert list(tmp_path.iterdir()) == []
