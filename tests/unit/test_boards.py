"""The shipped Grafana board and alert rules: every metric, label and command in them exists."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from firnline.cli.main import COMMANDS
from tests.support.promql import find_mistakes, known_metrics

ROOT = Path(__file__).parent.parent.parent
KNOWN = known_metrics()
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/firnline.json").read_text())
ALERTS: list[dict[str, Any]] = [
    rule
    for group in YAML(typ="safe").load((ROOT / "deploy/prometheus/firnline-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_metrics_that_exist(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert find_mistakes(target["expr"], KNOWN) == []
        grouped = set(re.findall(r"by \(([^)]*)\)", target["expr"])[0].split(", ")) - {"le"}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == grouped


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for one, other in combinations([panel["gridPos"] for panel in BOARD["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def test_the_variables_of_the_board_are_those_that_it_uses() -> None:
    text = json.dumps(BOARD)
    named = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(?!__)(\w+)", text)) == named
    query = next(one["query"] for one in BOARD["templating"]["list"] if one["name"] == "pipeline")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    assert label in KNOWN[metric]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_and_names_a_command_that_exist(rule: dict[str, Any]) -> None:
    assert find_mistakes(rule["expr"], KNOWN) == []
    metrics = [name for name in KNOWN if re.search(rf"\b{name}\b", rule["expr"])]
    text = " ".join(rule["annotations"].values())
    for label in re.findall(r"{{ \$labels\.(\w+) }}", text):
        assert all(label in KNOWN[metric] for metric in metrics), label
    assert rule["labels"]["severity"] in ("page", "ticket")
    program, verb = rule["annotations"]["command"].split()[:2]
    assert program == "firnline"
    assert verb in {command for command, _, _ in COMMANDS}


def test_alerts_have_names_of_their_own() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) > 10


def test_the_expressions_of_the_docs_name_what_exists() -> None:
    page = (ROOT / "docs/how-to/monitor.md").read_text()
    found = [text for text in re.findall(r"`([^`\n]+)`", page) if text.partition(" ")[0].count("firnline_")]
    assert len(found) > 5
    for expression in found:
        assert find_mistakes(expression, KNOWN) == []


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("firnline_nothing > 0", "there is no metric firnline_nothing"),
        ("firnline_records > 0", "there is no metric firnline_records"),
        ('firnline_epoch{sink="a"} > 0', "firnline_epoch has no label sink"),
        ("sum by (sink) (firnline_epoch)", "not every metric has the label sink"),
        ("rte(firnline_records_total[5m])", "rte is no function that is expected here"),
        ("rate(firnline_records_total[5m]", "a bracket is not closed"),
        ("rate(firnline_records_total)[5m]", "[5m] follows no series"),
        ("1 > 0", "no metric is named"),
        ("firnline_epoch ; 1", "'; 1' is not understood"),
        ("sum by (le) (rate(firnline_checkpoint_duration_seconds_sum[5m]))", "not every metric has the label le"),
    ],
)
def test_the_check_finds_mistakes(expression: str, mistake: str) -> None:
    assert mistake in find_mistakes(expression, KNOWN)
