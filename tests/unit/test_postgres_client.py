"""Connection strings of PostgreSQL: what is shown of them, and which are refused."""

from __future__ import annotations

import pytest

from firnline.errors import ConfigError
from firnline.postgres_client import parse_dsn, place_of


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        ("postgresql://u:secret@h:5433/d", "postgresql://h:5433/d"),
        ("postgresql://h/d?application_name=a@b", "postgresql://h:5432/d"),
        ("postgresql://u:se%40cret@[::1]:5433/d?sslmode=require", "postgresql://[::1]:5433/d"),
        ("postgresql:///d?host=/run/pg", "postgresql:///run/pg:5432/d"),
        ("host=h dbname=d password=secret", "postgresql://h:5432/d"),
        ("postgresql://u:se#cret@h/d", "postgresql://h:5432/d"),
        ("postgresql://u:se?cret@h/d", "postgresql://h:5432/d"),
    ],
)
def test_the_place_of_a_dsn_has_no_credentials(dsn: str, place: str) -> None:
    assert place_of(dsn) == place
    assert parse_dsn(dsn, "source")


@pytest.mark.parametrize("dsn", ["postgresql://u:p@secret/ret@h:5433/d", "postgresql://u:sec/ret@h/d", "", " "])
def test_a_dsn_that_is_empty_or_has_signs_that_must_be_escaped(dsn: str) -> None:
    with pytest.raises(ConfigError, match="dsn of the sink") as caught:
        parse_dsn(dsn, "sink")
    assert "%XX" in str(caught.value.hint)
    for part in ("sec", "ret"):
        assert part not in f"{caught.value.message} {place_of(dsn)}"
