"""The names that the columns of captured tables get here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.schema import is_column_name_ok
from firnline.sources.cdc.column_names import column_names


@pytest.mark.parametrize(
    ("names", "here"),
    [
        (["id", "amount", "Größe", "a.b", "_x"], ["id", "amount", "Größe", "a.b", "_x"]),
        (["Order Id", "Line,No", "(net)"], ["Order~20Id", "Line~2CNo", "~28net~29"]),
        (["Order~20Id", "Order Id", "~"], ["Order~7E20Id", "Order~20Id", "~"]),
        (["Id", "id", "ID"], ["Id", "~69~64", "~49~44"]),
        (["_op", "_missing", "_before", "_position"], ["~5Fop", "~5Fmissing", "~5Fbefore", "~5Fposition"]),
        (["_rescued_data", "_firnline_epoch"], ["~5Frescued_data", "~5Ffirnline_epoch"]),
    ],
)
def test_names_that_tables_may_have(names: list[str], here: list[str]) -> None:
    assert column_names(names) == here


NAMES = st.text(st.sampled_from("aAé _,=\\n(~2C"), min_size=1, max_size=4) | st.sampled_from(["_op", "~5Fop"])


@given(st.lists(NAMES, unique=True), st.lists(NAMES))
def test_every_column_gets_a_name_of_its_own_and_keeps_it(names: list[str], more: list[str]) -> None:
    here = column_names(names)
    assert len({name.lower() for name in here}) == len(names)
    assert all(map(is_column_name_ok, here))
    later = [name for name in dict.fromkeys(more) if name not in names]
    assert column_names([*names, *later])[: len(names)] == here
