"""Conditions on single rows: what is no condition is refused in words."""

from __future__ import annotations

import pytest

from firnline.errors import ConfigError
from firnline.sql.condition import check_condition


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("amount >", "'amount >' is no condition: something is missing"),
        ("lower(name = 'x'", "\"lower(name = 'x'\" is no condition: something is missing"),
        ("name = 'x", '"name = \'x" is no condition: a quote is not closed'),
        ("a b c", "'a b c' is no condition: 'c' does not belong there"),
    ],
)
def test_a_text_that_cannot_be_parsed_is_refused_without_words_of_the_parser(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_condition(text)
    assert caught.value.message == message
    assert "country = 'NO' AND amount > 10" in caught.value.hint
