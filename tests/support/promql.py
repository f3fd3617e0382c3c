"""Checks PromQL expressions against the metrics that Firnline has: names, labels, functions, brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from firnline.clock import SystemClock, monotonic
from firnline.committer.service import CommitterObserver
from firnline.run.observer import Comparison, EpochFacts, SinkLag
from firnline.service.health import CommitterHealth
from firnline.service.metrics import PipelineMetrics, StagingMetrics
from firnline.service.overview_metrics import OverviewMetrics
from firnline.sources.base import Backlog
from firnline.stores.replicator import Replication

FUNCTIONS = {"sum", "max", "min", "avg", "count", "rate", "increase", "deriv", "histogram_quantile"}
MODIFIERS = {"by", "without", "on", "ignoring"}
OPERATORS = {"and", "or", "unless", "bool"}
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
TOKEN = re.compile(
    r"\s+|(?P<text>\"[^\"]*\")|(?P<range>\[[0-9]+[smhdw]\])|(?P<number>[0-9][0-9.]*(e[0-9]+)?)"
    r"|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>={}(),])"
)
CLOSING = {"(": ")", "{": "}"}


def known_metrics() -> dict[str, frozenset[str]]:
    """Every series that a run, a committer or the service can have, with its labels."""
    run = PipelineMetrics("p", monotonic)
    took = {"run": 1, "checkpoint": 1}
    run.committed(EpochFacts(1, "", "", 1, 1, 1, 1, {}, 1, 1, 1, 1, 0, 1, 0, 0, durations_ms=took, is_staged=True))
    run.log_committed(1)
    run.backlog(Backlog(0, 0))
    run.replication(Replication("remote", "", 1))
    run.held_up((1, 1))
    run.sinks([SinkLag("s", 1, 0, 0)])
    run.reconciled(Comparison())
    found: dict[str, frozenset[str]] = {}
    for collector in (
        run,
        StagingMetrics(CommitterObserver(), CommitterHealth(monotonic)),
        OverviewMetrics(list, SystemClock()),
    ):
        for family in collector.collect():
            labels = frozenset(getattr(family, "_labelnames"))  # noqa: B009  # of the library, not in its types
            series = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "summary": ["_count", "_sum"]}
            for suffix in series.get(family.type, [""]):
                more = {"le"} if suffix == "_bucket" else set()
                found[family.name + suffix] = found.get(family.name + suffix, frozenset()) | labels | more
    return found


def find_mistakes(expression: str, known: Mapping[str, frozenset[str]]) -> list[str]:
    """Return what is wrong with an expression; empty if nothing is."""
    mistakes: list[str] = []
    tokens = list(_tokens(expression, mistakes))
    open_brackets: list[tuple[str, str]] = []  # the bracket, and the word before it
    metrics: list[str] = []
    grouped: list[str] = []
    for place, (kind, text) in enumerate(tokens):
        before = tokens[place - 1][1] if place else ""
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        if text in CLOSING and kind == "sign":
            open_brackets.append((text, before))
        elif text in CLOSING.values() and kind == "sign":
            if not open_brackets or CLOSING[open_brackets.pop()[0]] != text:
                mistakes.append(f"bracket {text} closes nothing")
        elif kind == "name" and open_brackets and open_brackets[-1][0] == "{":
            if text not in known.get(open_brackets[-1][1], frozenset()) | SCRAPED:
                mistakes.append(f"{open_brackets[-1][1]} has no label {text}")
        elif kind == "name" and open_brackets and open_brackets[-1][1] in MODIFIERS:
            grouped.append(text)
        elif kind == "name" and (after == "(" or text in MODIFIERS | FUNCTIONS | OPERATORS):
            if text not in FUNCTIONS | MODIFIERS | OPERATORS:
                mistakes.append(f"{text} is no function that is expected here")
        elif kind == "name":
            metrics.append(text)
            if text not in known:
                mistakes.append(f"there is no metric {text}")
        elif kind == "range" and before not in (*known, "}"):
            mistakes.append(f"{text} follows no series")
    if open_brackets:
        mistakes.append("a bracket is not closed")
    if not metrics:
        mistakes.append("no metric is named")
    labels = [known.get(metric, frozenset()) | SCRAPED for metric in metrics]
    mistakes += [f"not every metric has the label {one}" for one in grouped if not all(one in has for has in labels)]
    return mistakes


def _tokens(expression: str, mistakes: list[str]) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        match = TOKEN.match(expression, at)
        if match is None:
            mistakes.append(f"{expression[at:]!r} is not understood")
            return
        at = match.end()
        if match.lastgroup is not None:
            kind = next(name for name in ("text", "range", "number", "name", "sign") if match[name] is not None)
            yield kind, match[kind]
