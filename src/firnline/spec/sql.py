"""Checks the queries of a pipeline file, and reports problems with the line of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from firnline.spec.models import PipelineSpec
from firnline.spec.operators import SqlOperatorConfig
from firnline.spec.problems import KeyPath, Origin, Problem, origin_of

__all__ = ["query_problems"]


def query_problems(spec: PipelineSpec, origins: Mapping[KeyPath, Origin]) -> Iterator[Problem]:
    """Find what is wrong with the queries; a spec without any does not load the SQL parser."""
    for index, operator in enumerate(spec.operators):
        if isinstance(operator, SqlOperatorConfig):
            from firnline.sql import check_query

            path = ("operators", index, "query")
            origin = origin_of(path, origins)
            for finding in check_query(operator.query, operator.inputs):
                yield Problem(origin.at(finding.line), path, finding.message, finding.hint)
