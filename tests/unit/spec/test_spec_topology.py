"""Mistakes in topology files: each message says what is wrong, where, and what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.errors import SpecError
from firnline.spec.build import load_options
from firnline.spec.topology import load_topology


def _write(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)


def _pipeline(folder: Path, file: str, name: str) -> None:
    sink = f"{{name: out, type: delta, table: lake/{name}}}"
    _write(folder, file, f"name: {name}\nsources: {{x: {{type: files, path: in}}}}\nsinks: [{sink}]\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _pipeline(tmp_path, "bronze.yml", "bronze")
    _pipeline(tmp_path, "silver.yml", "silver")
    _pipeline(tmp_path, "copy.yml", "bronze")
    return tmp_path


def _refusal(folder: Path, text: str, file: str = "topology.yml") -> SpecError:
    _write(folder, file, text)
    with pytest.raises(SpecError) as caught:
        load_topology([file], environ={}, cwd=folder)
    return caught.value


def test_names_the_file_of_each_pipeline_as_it_can_be_typed(folder: Path) -> None:
    (folder / "gold").mkdir()
    _pipeline(folder / "gold", "firnline.yml", "gold")
    _write(folder, "topology.yml", "name: lake\npipelines: [bronze.yml, silver.yml, gold]\n")
    loaded = load_topology([], environ={}, cwd=folder)
    assert loaded.files == {"bronze": "bronze.yml", "silver": "silver.yml", "gold": "gold/firnline.yml"}
    elsewhere = load_topology([str(folder)], environ={}, cwd="/")
    assert elsewhere.files["gold"] == str(folder / "gold" / "firnline.yml").removeprefix("/")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "name: lake\npipelines: [bronze.yml, slver.yml]\n",
            'topology.yml:2: pipelines[1]: slver.yml: no such file (did you mean "silver.yml"?)',
            "Write a pipeline file or its folder, relative to FOLDER.",
        ),
        (
            "name: lake\npipelines: [bronze.yml, elsewhere/x.yml]\n",
            "topology.yml:2: pipelines[1]: elsewhere/x.yml: no such file",
            "Write a pipeline file or its folder, relative to FOLDER.",
        ),
        (
            "name: lake\npipelines: [bronze.yml, ./bronze.yml]\n",
            "topology.yml:2: pipelines[1]: bronze.yml is listed twice",
            "Delete one of the two entries.",
        ),
        (
            "name: lake\npipelines:\n  - bronze.yml\n  - copy.yml\n",
            "topology.yml:4: pipelines[1]: copy.yml has the name 'bronze', as bronze.yml has",
            "A name is the identity of a pipeline: write another `name` in copy.yml, if it has not run yet, or list "
            "one.",
        ),
        (
            "name: lake\npipelines: [bronze.yml, topology.yml]\n",
            "topology.yml:2: pipelines[1]: topology.yml is a topology file, not a pipeline file",
            "List the pipeline files of that topology instead: a topology has no topologies as members.",
        ),
        (
            "name: lake\npipelines: bronze.yml\n",
            'topology.yml:2: pipelines: must be a list, not "bronze.yml" (write [bronze.yml])',
            "Correct it and try again: firnline topology show topology.yml",
        ),
        (
            "name: lake\npipelines: [bronze.yml]\nsnapshots: {max_hold: 7}\n",
            'topology.yml:3: snapshots.max_hold: must be a time like 7d or a size like 50GB, not "7"',
            "Correct it and try again: firnline topology show topology.yml",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place_and_a_way_out(folder: Path, text: str, message: str, hint: str) -> None:
    error = _refusal(folder, text)
    assert error.message == message
    assert error.hint == hint.replace("FOLDER", str(folder))


def test_what_is_no_text_is_checked_by_the_command_for_topologies(folder: Path) -> None:
    (folder / "topology.yml").write_bytes(b"name: lake\n\xff\xfe")
    with pytest.raises(SpecError) as caught:
        load_topology([], environ={}, cwd=folder)
    assert caught.value.message == "topology.yml:2: not UTF-8 text"
    assert caught.value.hint == "Correct it and try again: firnline topology show topology.yml"


def test_a_topology_file_with_another_name_is_recognised(folder: Path) -> None:
    error = _refusal(folder, "name: lake\npipelines: [bronze.yml]\n", file="my lake.yml")
    assert error.message == (
        "my lake.yml: it lists pipelines, as a topology file does, but its name does not end with topology.yml"
    )
    assert error.hint == (
        "Rename it: mv 'my lake.yml' 'my lake-topology.yml' && firnline topology show 'my lake-topology.yml'"
    )


def test_a_topology_file_in_place_of_a_pipeline_is_recognised(folder: Path) -> None:
    _write(folder, "lake-topology.yml", "name: lake\npipelines: [bronze.yml]\n")
    with pytest.raises(SpecError) as caught:
        load_options("lake-topology.yml", environ={}, cwd=folder)
    assert caught.value.message == (
        "lake-topology.yml: it lists pipelines, so it is a topology file, not a pipeline file"
    )
    assert caught.value.hint == "firnline topology show lake-topology.yml"
