from __future__ import annotations

from firnline.jobs.dataflow import dataflow_of
from firnline.options import OperatorOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions


def test_rows_go_once_to_all_queries_and_to_every_stateful_operator_by_its_own_key() -> None:
    options = PipelineOptions(
        "p",
        sources=(FileSourceOptions("a", "/a"), FileSourceOptions("b", "/b")),
        operators=(
            OperatorOptions("last", "aggregate", ("sums", "q1"), {"keys": ["z"]}),
            OperatorOptions("q1", "sql", ("a",), {"query": "select * from a"}),
            OperatorOptions("q2", "sql", ("a", "b"), {"query": "select * from a join b"}),
            OperatorOptions("sums", "aggregate", ("a", "q2"), {"keys": ["k"], "time": "at", "window": {}}),
        ),
        sinks=(
            DeltaSinkOptions("s1", "/s1", input="last"),
            DeltaSinkOptions("s2", "/s2", input="sums.late"),
            DeltaSinkOptions("s3", "/s3", input="a"),
        ),
    )
    flow = dataflow_of(options)
    assert [o.name for o in flow.operators] == ["q1", "q2", "sums", "last"]
    assert [o.name for o in flow.stateful] == ["sums", "last"]
    ranges = ((0, 64), (64, 128))
    assert [(e.name, e.keys, e.time, e.ranges) for e in flow.edges_of("a", ranges)] == [
        ("sql<a", (), "", ()),
        ("sums<a", ("k",), "at", ranges),
    ]
    assert [e.name for e in flow.edges_of("q1", ranges)] == ["last<q1"]
    assert flow.sinks_of("a") == ("s3",)
    assert flow.inputs_of_query(options.operators[2]) == ["a", "b"]
    assert flow.queries_above(options.operators[2]) == set()
    assert flow.ports_of(options.operators[3]) == ["sums", "sums.late"]
