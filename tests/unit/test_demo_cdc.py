"""The comparison at the end of `make demo-cdc` sees what is lost, doubled or different."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

ROWS = [(1, 2, "a", Decimal("1.50"), None), (2, 1, "b", Decimal("2.00"), None)]
CHANGES = [("insert", 1, 1), ("insert", 2, 1), ("insert", 3, 1), ("update", 1, 2), ("delete", 3, None)]


@pytest.fixture(scope="module")
def demo() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "demo_cdc.py"
    spec = importlib.util.spec_from_file_location("demo_cdc", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_cdc"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rows", "changes", "code"),
    [
        (ROWS, CHANGES, 0),
        (ROWS[:1], CHANGES, 1),
        ([ROWS[0], (2, 1, "other", Decimal("2.00"), None)], CHANGES, 1),
        (ROWS, CHANGES[1:], 1),
        (ROWS, [*CHANGES, CHANGES[0]], 1),
        (ROWS, [], 1),
    ],
)
def test_differences_are_seen(
    demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], changes: list[Any], code: int
) -> None:
    names = demo.COLUMNS
    types = [pa.int64(), pa.int32(), pa.string(), pa.decimal128(12, 2), pa.timestamp("us", "UTC")]
    listed = [dict(zip(names, row, strict=True)) for row in rows]
    table = pa.Table.from_pylist(listed, pa.schema(zip(names, types, strict=True)))
    write_deltalake(str(tmp_path / "lake" / "orders"), table)
    history = pa.schema([("_op", pa.string()), ("id", pa.int64()), ("version", pa.int32())])
    listed = [dict(zip(history.names, change, strict=True)) for change in changes]
    write_deltalake(str(tmp_path / "lake" / "orders_history"), pa.Table.from_pylist(listed, history))
    writer = demo.Writer("", None, committed=Counter(CHANGES))
    assert demo.compare(demo.Pipeline(tmp_path, writer), Counter(ROWS), 1.0) == code
    told = capsys.readouterr()
    assert ("table and database are equal" in told.out) is (code == 0)
    assert ("table and database differ" in told.err) is (code == 1)
