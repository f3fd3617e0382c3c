"""Sinks with a template in a spec: which keys they take, who decides, and which places they may not name."""

from __future__ import annotations

from typing import Any

import pytest

from firnline.errors import SpecError
from firnline.names import JOURNAL
from firnline.sinks import registry as sinks
from firnline.sinks.delta.options import MAX_PARTS, PARTS_ALLOWED, DeltaPartsOptions, DeltaSinkOptions
from firnline.sources import registry as sources
from firnline.spec.build import build_options
from firnline.spec.loading import parse_spec

SOURCES, SINKS = dict(sources.KINDS), dict(sinks.KINDS)


def built(*given: dict[str, Any], **settings: Any) -> Any:
    spec = {"name": "p", "sources": {"s": {"path": "in"}}, "sinks": list(given), **settings}
    return build_options(parse_spec(spec, folder="/data"), environ={})


def refusal(*given: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(SpecError) as caught:
        built(*given, **settings)
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


# -- all tables of a captured database ------------------------------------------------------------------------

CAPTURED = {"type": "postgres", "dsn": "postgresql://u:p@h/d", "tables": ["*"]}
ALL = {"table": "lake/{table}", "input": "shop.*"}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A source that captures a database; kinds that the other tests do not know."""
    monkeypatch.setattr(sources, "KINDS", SOURCES)
    monkeypatch.setattr(sinks, "KINDS", SINKS)
    return {"sources": {"shop": CAPTURED}}


@pytest.mark.parametrize("write", ["append", "upsert"])
@pytest.mark.parametrize("table", ["lake/{table}", "lake/{schema}/{table}", "lake/{database}_{table}"])
def test_a_sink_takes_all_tables(captures: dict[str, Any], write: str, table: str) -> None:
    options = built(
        {**ALL, "table": table, "write": write, "exclude": ["secret"], "mask": {"mail": "hash"}}, **captures
    )
    sink = options.sinks[0]
    assert isinstance(sink, DeltaPartsOptions)
    assert sink.takes_tables
    assert (sink.input, sink.key, dict(sink.named_columns)) == ("shop.*", (), {})
    assert options.deciding.name == JOURNAL
    assert not built({"table": "lake/{region}", "input": "shop.orders"}, **captures).sinks[0].takes_tables


def test_what_many_tables_cannot_have_is_refused(captures: dict[str, Any]) -> None:
    assert "each needs a table of its own" in refusal({**ALL, "table": "lake/{schema}"}, **captures)
    assert "{region} is not known of a captured table" in refusal({**ALL, "table": "lake/{table}/{region}"}, **captures)
    assert "each needs a table of its own" in refusal({**ALL, "table": "lake/all"}, **captures)
    other = {"type": "http", "url": "https://h/x", "input": "shop.*"}
    assert "this sink has room for one" in refusal(other, **captures)
    upsert = {**ALL, "write": "upsert"}
    assert "each has its own key" in refusal({**upsert, "key": ["id"]}, **captures)
    for key, value in {"sequence_by": "at", "partition_by": ["day"], "columns": ["id"], "where": "id > 1"}.items():
        assert "they have different columns" in refusal({**upsert, key: value}, **captures)
    assert 'source "s" has no port "*"' in refusal({**ALL, "input": "s.*"})
    dedup = {"name": "d", "type": "deduplicate", "inputs": ["shop.*"], "keys": ["id"]}
    assert "an operator reads one at a time" in refusal({"table": "x", "input": "d"}, operators=[dedup], **captures)


def test_the_folders_of_many_tables_are_known_beforehand(captures: dict[str, Any]) -> None:
    other = {"name": "other", "table": "lake/Order~20Lines", "input": "shop.orders"}
    assert 'may name the table of sink "other"' in refusal(ALL, other, **captures)
