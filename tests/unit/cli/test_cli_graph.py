"""A pipeline's graph as `dry-run` draws it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firnline.cli.dry_run_preview import draw_graph, graph_json
from firnline.options import OperatorOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions

SHOP = PipelineOptions(
    name="shop",
    sources=(FileSourceOptions("orders", "/in/orders"), FileSourceOptions("clicks", "/in/clicks")),
    operators=(
        OperatorOptions("totals", "aggregate", ("clean",)),
        OperatorOptions("clean", "sql", ("orders", "clicks")),
    ),
    sinks=(
        DeltaSinkOptions("delta-1", "/out/totals", input="totals", write="upsert"),
        DeltaSinkOptions("delta-2", "/out/late", input="totals.late"),
    ),
)
DRAWING = """\
                           +----------------------+
                           | orders               | ---> clean
                           | files                |
                           +----------------------+
                           +----------------------+
                           | clicks               | ---> clean
                           | files                |
                           +----------------------+
                           +----------------------+
               orders ---> | clean                | ---> totals
               clicks ---> | sql                  |
                           +----------------------+
                           +----------------------+
                clean ---> | totals               | ---> delta-1
                           | aggregate, 4 shards  | ---> delta-2 (late)
                           +----------------------+
                           +----------------------+
               totals ---> | delta-1              |
                           | delta, upsert        |
                           +----------------------+
                           +----------------------+
          totals.late ---> | delta-2              |
                           | delta, append        |
                           +----------------------+
"""


def test_the_graph_is_drawn_from_the_sources_to_the_sinks() -> None:
    assert "\n".join(draw_graph(SHOP, 4)) + "\n" == DRAWING


def test_the_graph_as_values() -> None:
    assert graph_json(SHOP, 4) == {
        "nodes": [
            {"name": "orders", "kind": "source", "type": "files", "shards": None, "idle_after_secs": None},
            {"name": "clicks", "kind": "source", "type": "files", "shards": None, "idle_after_secs": None},
            {"name": "clean", "kind": "operator", "type": "sql", "shards": None, "idle_after_secs": None},
            {"name": "totals", "kind": "operator", "type": "aggregate", "shards": 4, "idle_after_secs": None},
            {"name": "delta-1", "kind": "sink", "type": "delta", "shards": None, "idle_after_secs": None},
            {"name": "delta-2", "kind": "sink", "type": "delta", "shards": None, "idle_after_secs": None},
        ],
        "edges": [
            {"from": "clean", "port": None, "to": "totals", "to_kind": "operator"},
            {"from": "orders", "port": None, "to": "clean", "to_kind": "operator"},
            {"from": "clicks", "port": None, "to": "clean", "to_kind": "operator"},
            {"from": "totals", "port": None, "to": "delta-1", "to_kind": "sink"},
            {"from": "totals", "port": "late", "to": "delta-2", "to_kind": "sink"},
        ],
    }


def test_shards_that_only_the_stored_state_knows_are_left_out() -> None:
    assert not any("shard" in line for line in draw_graph(SHOP, None))
    assert graph_json(SHOP, None)["nodes"][3]["shards"] is None


def test_one_shard_is_one_shard() -> None:
    assert any("aggregate, 1 shard " in line for line in draw_graph(SHOP, 1))


NAMES = st.text(alphabet="abcdefghij_-", min_size=1, max_size=100)


@given(st.lists(NAMES, min_size=2, max_size=6, unique=True), st.integers(1, 32768))
def test_a_drawing_fits_80_columns(names: list[str], shards: int) -> None:
    source, *operators = names
    options = PipelineOptions(
        name="p",
        sources=(FileSourceOptions(source, "/in"),),
        operators=tuple(OperatorOptions(name, "module:Class" * 5, (source,)) for name in operators),
        sinks=tuple(DeltaSinkOptions(f"x{name}", f"/out/{name}", input=f"{name}.late") for name in operators),
    )
    lines = draw_graph(options, shards)
    assert max(map(len, lines)) <= 80
    assert len({line.index("+") for line in lines if "+" in line}) == 1
