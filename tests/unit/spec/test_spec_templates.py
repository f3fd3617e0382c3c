"""Sinks with a template in a spec: which keys they take, who decides, and which places they may not name."""

from __future__ import annotations

from typing import Any

import pytest

from firnline.errors import SpecError
from firnline.names import JOURNAL
from firnline.sinks.delta.options import MAX_PARTS, PARTS_ALLOWED, DeltaPartsOptions, DeltaSinkOptions
from firnline.spec.build import build_options
from firnline.spec.loading import parse_spec


def built(*sinks: dict[str, Any], **settings: Any) -> Any:
    spec = {"name": "p", "sources": {"s": {"path": "in"}}, "sinks": list(sinks), **settings}
    return build_options(parse_spec(spec, folder="/data"), environ={})


def refusal(*sinks: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(SpecError) as caught:
        built(*sinks, **settings)
    return caught.value.message


def test_a_template_is_a_follower_and_never_decides() -> None:
    options = built({"table": "lake/{region}"})
    sink = options.sinks[0]
    assert isinstance(sink, DeltaPartsOptions)
    assert (sink.root, sink.template, sink.target) == ("/data/lake", "{region}", "/data/lake/{region}")
    assert (sink.parts_allowed, sink.max_parts) == (PARTS_ALLOWED, MAX_PARTS)
    assert options.deciding.name == JOURNAL
    assert options.followers == (sink,)
    both = built({"table": "lake/{region}"}, {"table": "all"})
    assert isinstance(both.deciding, DeltaSinkOptions)
    assert both.deciding.table == "/data/all"


def test_keys_of_templates_and_of_tables_are_told_apart() -> None:
    template = {"table": "lake/{region}"}
    sink = built({**template, "exclude": ["x"], "on_bad_row": "dead_letter", "partition_by": ["day"], "max_parts": 5})
    assert (sink.sinks[0].exclude, sink.sinks[0].max_parts) == (("x",), 5)
    assert "not with a template in table" in refusal({**template, "mode": "staged"})
    assert "not with a template in table" in refusal({**template, "interop": "none"})
    for key, value in {"exclude": ["x"], "where": "id > 1", "parts_allowed": "x", "max_parts": 5}.items():
        assert "only with a template in table" in refusal({"table": "lake", key: value})
    assert 'the column "region" is not delivered' in refusal({**template, "exclude": ["region"]})
    assert 'the column "day" is not delivered' in refusal({**template, "exclude": ["day"], "partition_by": ["day"]})
    assert "is no regular expression" in refusal({**template, "parts_allowed": "("})


@pytest.mark.parametrize("table", ["lake/{}", "lake/{region", "lake/region}", "lake/{a{b}}", "s3://b/{x"])
def test_broken_templates_are_refused(table: str) -> None:
    assert "is no template" in refusal({"table": table})


@pytest.mark.parametrize("table", ["/{region}", "s3://{bucket}/lake", "s3://lake-{region}/orders", "s3://b/{region}"])
def test_a_template_needs_a_folder_of_its_own(table: str) -> None:
    if table == "s3://b/{region}":
        sink = built({"table": table}).sinks[0]
        assert (sink.root, sink.template) == ("s3://b", "{region}")
    else:
        assert "needs a folder, or a bucket" in refusal({"table": table})


@pytest.mark.parametrize(
    ("template", "other", "taken"),
    [
        ("lake/{region}", "lake/eu", True),
        ("lake/{region}", "lake/eu/inner", True),
        ("lake/{region}/orders", "lake/eu/orders", True),
        ("lake/{region}/orders", "lake/eu/other", False),
        ("lake/{region}", "other/eu", False),
        ("lake/{region}", "lake/_all", False),
        ("lake/t_{region}", "lake/all", False),
    ],
)
def test_a_template_may_not_name_the_table_of_another_sink(template: str, other: str, taken: bool) -> None:
    sinks = ({"table": template}, {"table": other})
    if taken:
        assert "may name the table of sink" in refusal(*sinks)
        built({**sinks[0], "parts_allowed": "xx"}, sinks[1])
    else:
        built(*sinks)


def test_a_template_may_not_name_the_home() -> None:
    assert "the home /data/lake/home may be named" in refusal({"table": "lake/{region}"}, home="lake/home")
    assert "lies inside the home" in refusal({"table": "lake/{region}"}, home="lake")
