"""The home of a pipeline in a spec: which pipelines have one, where it may be, and who decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firnline.config.secrets import MaskedDict
from firnline.errors import SpecError
from firnline.names import JOURNAL
from firnline.options import PipelineOptions, find_deciding
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.spec.build import build_options
from firnline.spec.loading import parse_spec


def built(folder: Path, **changes: Any) -> PipelineOptions:
    spec = {"name": "p", "sources": {"s": {"path": "in"}}, "sinks": [{"table": "out", "required": False}], **changes}
    return build_options(parse_spec(spec, folder=folder), environ={"KEY": "secret"})


def test_without_a_required_table_the_journal_decides_beside_the_spec(tmp_path: Path) -> None:
    options = built(tmp_path)
    assert options.deciding is options.journal
    assert [sink.name for sink in options.ordered_sinks] == [JOURNAL, "delta-1"]
    assert [sink.name for sink in options.sinks] == ["delta-1"]
    assert options.home.root == str(tmp_path / "data" / "p")


def test_a_home_is_a_path_or_a_mapping(tmp_path: Path) -> None:
    assert built(tmp_path, home="here").home.root == str(tmp_path / "here")
    home = built(tmp_path, home={"path": "s3://b/home", "storage_options": {"KEY": "${env:KEY}"}}).home
    assert (home.root, home.storage_options["KEY"]) == ("s3://b/home", "secret")
    assert isinstance(home.storage_options, MaskedDict)


def sink(name: str, **settings: Any) -> DeltaSinkOptions:
    return DeltaSinkOptions(name, f"/{name}", **settings)


@pytest.mark.parametrize(
    ("sinks", "deciding"),
    [
        ([sink("a"), sink("b")], "a"),
        ([sink("a", required=False), sink("b")], "b"),
        ([sink("a", mode="staged"), sink("b")], "b"),
        ([sink("a", mode="staged"), sink("b", mode="staged")], "a"),
        ([sink("a", mode="staged", required=False), sink("b", mode="staged")], "b"),
        ([sink("a", required=False)], None),
    ],
)
def test_the_first_required_direct_table_decides(sinks: list[DeltaSinkOptions], deciding: str | None) -> None:
    found = find_deciding(sinks)
    assert (found.name if found is not None else None) == deciding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "in"}, None),
        ({"home": "out"}, 'home: the home {}/out is the table of sink "delta-1"'),
        ({"home": "out/home"}, 'home: the home {}/out/home lies inside the table of sink "delta-1"'),
        ({"home": "lake", "sinks": [{"table": "lake/out", "required": False}]},
         'home: the table of sink "delta-1" lies inside the home {}/lake'),
        ({"home": "lake", "sources": {"s": {"path": "lake/in"}}},
         'home: the path of source "s" lies inside the home {}/lake'),
        ({"home": "in/home"}, 'home: the home {}/in/home lies inside the path of source "s"'),
        ({"name": "out", "sinks": [{"table": "data/out", "required": False}]},
         'the home {}/data/out is the table of sink "delta-1"'),
        ({"spark": {"spark.master": "spark://host:7077"}},
         "the home {}/data/p is on this machine alone, and with spark.master spark://host:7077 every worker must "
         "reach it"),
        ({"home": "s3://b/h", "spark": {"spark.master": "spark://host:7077"}}, None),
        ({"spark": {"spark.master": "local-cluster[2,1,1024]"}}, None),
    ],
)  # fmt: skip
def test_a_home_has_a_place_of_its_own(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert built(tmp_path, **changes).journal is not None
        return
    with pytest.raises(SpecError) as caught:
        built(tmp_path, **changes)
    assert caught.value.message == f"spec: {message.format(tmp_path)}"
    assert "home" in (caught.value.hint or "")
