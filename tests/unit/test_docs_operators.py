"""What the pages about operators show is run: the operator, its spec, every command, and the bytes of a key."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.operators.base import Operator
from firnline.operators.loading import build_operator
from firnline.options import OperatorOptions
from firnline.spec.build import load_options
from firnline.state.keys import locate
from firnline.testing.local import LocalEngine
from firnline.testing.operators import Epoch, OperatorConformance

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = pa.schema([("device", pa.string()), ("value", pa.float64())])


def write_example(folder: Path) -> None:
    """Write the files that docs/operators.md shows, each named in its first line."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", (DOCS / "operators.md").read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["operators/spread.py", "firnline.yml", "operators/test_spread.py"]
    for name, text in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def commands(page: str) -> list[tuple[list[str], list[str]]]:
    """The words of every `firnline` command on a page, and the lines that are shown below it."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ firnline "):
                found.append((shlex.split(line.removeprefix("$ firnline "), comments=True), []))
            else:
                found[-1][1].append(line)
    return found


class TestTheExampleOperator(OperatorConformance):
    @pytest.fixture
    def operator(self, tmp_path: Path) -> Operator:
        write_example(tmp_path)
        settings = {"keys": ["device"], "column": "value"}
        options = OperatorOptions("spread", "spread:Spread", ("readings",), settings)
        return build_operator(options, {"readings": SCHEMA}, [str(tmp_path / "operators")])

    @pytest.fixture
    def epochs(self) -> Sequence[Epoch]:
        def rows(*pairs: tuple[str, float | None]) -> Epoch:
            return {"readings": pa.table([[d for d, _ in pairs], [v for _, v in pairs]], schema=SCHEMA)}

        return [rows(("a", 1.0), ("b", 2.0), ("a", -3.0)), rows(("b", 2.0)), rows(("a", 9.0), ("c", 0.0), ("b", 1.0))]


def test_the_commands_on_the_pages_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("firnline.jobs.spark.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)
    write_example(tmp_path)
    (tmp_path / "in").mkdir()
    rows: list[dict[str, Any]] = [{"device": "boiler", "value": v} for v in (61.5, 93.0, 70.0)]
    rows.append({"device": "fridge", "value": 4.5})
    (tmp_path / "in" / "f1.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    ran = 0
    for page in ("operators.md", "state.md", "sizing.md", "checkpoints-of-state.md"):
        for words, shown in commands(page):
            assert run_command(words) == 0, (page, words)
            said = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
            for line in shown:
                assert " ".join(line.split()) in said, (words, line, said)
            ran += 1
    assert ran >= 12
    held = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().sort_by("device").to_pylist()
    assert held == [{"device": "boiler", "low": 61.5, "high": 93.0}, {"device": "fridge", "low": 4.5, "high": 4.5}]


def test_the_first_operators_on_the_page_are_a_valid_spec(tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", (DOCS / "operators.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "firnline.yml").write_text(f"name: shop\nsources: {{clicks: {{path: in}}}}\n{found[1]}")
    options = load_options(tmp_path, environ={})
    assert [operator.name for operator in options.operators] == ["clean", "visits"]
    assert [(sink.input, sink.write) for sink in options.sinks] == [("visits", "upsert"), ("visits.late", "append")]


def test_the_tracking_example_is_a_valid_spec() -> None:
    options = load_options(DOCS.parent / "examples" / "tracking", environ={})
    assert [operator.type for operator in options.operators] == ["sql", "sql", "sql", "correlate", "aggregate"]


def test_the_key_in_the_formats_page_has_those_bytes() -> None:
    found = locate(pa.table({"object": ["T0042"]}), 1, 128)
    text = (DOCS / "formats.md").read_text()
    assert f"bytes       {found.keys[0].hex()}" in text
    assert f"murmur3_32  {int(found.keys.murmur3_32()[0]):08x}       key group {int(found.groups[0])} of 128" in text
    assert f"hash64      {int(found.keys.hash64()[0]):016x}" in text
    assert f"slot        {int(found.slots[0]):016x}" in text
