"""The keys of a PostgreSQL sink in a spec."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from firnline.postgres_client import place_of
from firnline.sinks.postgres.config import PostgresSinkConfig
from firnline.sinks.postgres.options import PostgresSinkOptions

DSN = "postgresql://me:s3cret@db.example:6432/shop"


def config(**keys: Any) -> PostgresSinkConfig:
    return PostgresSinkConfig(**{"name": "copy", "dsn": DSN, "table": "shop.orders", **keys})


def test_the_options_have_what_the_spec_says() -> None:
    model = config(write="upsert", key=["id"], sequence_by="at", delete_when={"op": "D"}, lock_timeout="3s")
    options = model.build("orders", lambda text, _: text)
    assert isinstance(options, PostgresSinkOptions)
    assert (options.dsn, options.table_name, options.input) == (DSN, ("shop", "orders"), "orders")
    assert (options.sequence_by, dict(options.delete_when)) == ("at", {"op": ("D",)})
    assert options.lock_timeout == timedelta(seconds=3)
    assert options.location == options.target == "postgresql://db.example:6432/shop/shop.orders"
    assert "s3cret" not in repr(options)
    assert "s3cret" not in repr(model)


def test_a_table_may_be_a_template() -> None:
    options = config(table="lake.{region}", max_parts=7).build("orders", lambda text, _: text)
    assert isinstance(options, PostgresSinkOptions)
    assert (options.table_name, options.max_parts) == (("lake", "{region}"), 7)
    assert options.own_shape()["parts_allowed"] == "[A-Za-z0-9_]+"
    plain = config().build("orders", lambda text, _: text)
    assert isinstance(plain, PostgresSinkOptions)
    assert "parts_allowed" not in plain.own_shape()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"table": "a.b.c"}, "schema.table"),
        ({"table": ".b"}, "schema.table"),
        ({"table": "a.b.{c}"}, "schema.table"),
        ({"table": "lake.{region"}, "is no template"),
        ({"max_parts": 4}, "only with a template"),
        ({"table": "{c}", "exclude": ["c"]}, '"c" is not delivered'),
        ({"table": "x" * 64}, "63 bytes"),
        ({"table": "firnline.mine"}, "for checkpoints"),
        ({"sequence_by": "at"}, "only with write: upsert"),
        ({"delete_when": {"op": "D"}}, "only with write: upsert"),
        ({"write": "upsert", "key": ["id"], "columns": ["v"]}, '"id" is not delivered'),
        ({"write": "upsert", "key": ["id"], "sequence_by": "at", "exclude": ["at"]}, '"at" is not delivered'),
        ({"write": "upsert", "key": ["id"], "exclude": ["_op"]}, "needs the column _op"),
        ({"write": "upsert", "key": ["id"], "mask": {"_missing": "null"}}, "needs the column _missing"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**keys)


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        ("postgresql://u:p@h:1/d", "postgresql://h:1/d"),
        ("postgresql://u:p%40@h/d?sslmode=require", "postgresql://h:5432/d"),
        ("postgresql://u:p@[::1]:7/d", "postgresql://[::1]:7/d"),
        ("postgresql://u:p@[::1]/d", "postgresql://[::1]:5432/d"),
        ("postgresql:///d?host=/run/pg&port=9", "postgresql:///run/pg:9/d"),
        ("host=h port=1 dbname=d password='a b'", "postgresql://h:1/d"),
        ("dbname = d user = u", "postgresql://localhost:5432/d"),
        ("no dsn 'at all", "postgresql://localhost:5432"),
    ],
)
def test_a_place_has_no_credentials(dsn: str, place: str) -> None:
    assert place_of(dsn) == place
