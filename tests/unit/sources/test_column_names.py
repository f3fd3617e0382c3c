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
        (["Order Id", "Line,No", "(net)"], ["Order_Id", "Line_No", "_net_"]),
        (["a b", "a_b"], ["a_b_", "a_b"]),
        (["Id", "id", "ID"], ["Id", "id_", "ID__"]),
        (["_op", "_missing", "_before", "_position"], ["_op_", "_missing_", "_before_", "_position_"]),
        (["_rescued_data", "_firnline_epoch"], ["column_rescued_data", "column_firnline_epoch"]),
    ],
)
def test_names_that_tables_may_have(names: list[str], here: list[str]) -> None:
    assert column_names(names) == here


@given(st.lists(st.text(st.sampled_from("aA _,=\n("), max_size=3) | st.sampled_from(["_op", "_op_"]), unique=True))
def test_every_column_gets_a_name_of_its_own_and_keeps_it(names: list[str]) -> None:
    here = column_names(names)
    assert len({name.lower() for name in here}) == len(names)
    assert all(map(is_column_name_ok, here))
    assert column_names(here) == here
