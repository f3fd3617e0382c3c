"""Building operators: users' own classes come from the allowed folders, and from nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

from firnline.errors import ConfigError
from firnline.operators.aggregate import Aggregate, WindowedAggregate
from firnline.operators.base import MAIN, Operator
from firnline.operators.loading import OwnCode, build_operator, own_code
from firnline.options import OperatorOptions
from firnline.testing.operators import Epoch, Harness, OperatorConformance

SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC"))])
OWN = '''
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from firnline.operators.base import MAIN, Operator, Result


@dataclass
class Step:
    by: int


class Counting(Operator):
    """Counts the rows of a key, in steps."""

    @property
    def keys(self):
        return ("k",)

    @property
    def state_schema(self):
        return pa.schema([("n", pa.int64())])

    def output_schema(self, port=MAIN):
        return pa.schema([("k", pa.string()), ("n", pa.int64())])

    def fold(self, batch, context):
        step = Step(self.settings.get("by", 1))
        count = np.bincount(batch.key_of["in"], minlength=len(batch.exists)) * step.by
        total = batch.state.column("n").fill_null(0).to_numpy() + count
        at = np.flatnonzero(count)
        n = pa.array(total[at])
        output = pa.table([batch.keys.column("k").take(pa.array(at)), n], schema=self.output_schema())
        return Result(at, pa.table({"n": n}), output={MAIN: output})


class Half(Operator):
    pass


class Needy(Counting):
    def __init__(self, name, inputs, settings):
        super().__init__(name, inputs, settings)
        self.must = settings["must"]


class Clumsy(Counting):
    def __init__(self, name, inputs, settings):
        raise RuntimeError("oh no")


class Forgetful(Counting):
    @property
    def state_schema(self):
        return pa.schema([])


class Keyless(Counting):
    @property
    def state_key(self):
        return pa.schema([("other", pa.string())])


class Timeless(Counting):
    times = {"out": "t"}


class Unclear(Counting):
    output_key = ("x",)


class Portless(Counting):
    ports = ("other",)


def function():
    pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own" / "deep").mkdir(parents=True)
    (tmp_path / "own" / "counting.py").write_text(OWN)
    (tmp_path / "own" / "deep" / "__init__.py").write_text(OWN)
    (tmp_path / "own" / "deep" / "er.py").write_text(OWN)
    (tmp_path / "outside.py").write_text(OWN)
    return tmp_path / "own"


def build(kind: str, *paths: Path, **settings: object) -> Operator:
    options = OperatorOptions("mine", kind, ("in",), settings)
    return build_operator(options, {"in": SCHEMA}, [str(path) for path in paths])


def test_the_file_of_a_class_travels_to_workers_that_lack_it(folder: Path) -> None:
    options = OperatorOptions("mine", "counting:Counting", ("in",), {})
    code = own_code(options, [str(folder)])
    assert code is not None
    (folder / "counting.py").unlink()
    built = build_operator(options, {"in": SCHEMA}, (), OwnCode(**code.to_json()))
    assert type(built).__name__ == "Counting"
    assert own_code(OperatorOptions("t", "aggregate", ("in",), {}), []) is None


@pytest.mark.parametrize("kind", ["counting:Counting", "deep:Counting", "deep.er:Counting"])
def test_a_class_of_ones_own(folder: Path, kind: str) -> None:
    operator = build(kind, folder.parent / "nowhere", folder, by=2)
    harness = Harness(operator)
    rows = pa.Table.from_pylist([{"k": "a"}, {"k": "a"}, {"k": "b"}], SCHEMA)
    assert harness.run({"in": rows})[MAIN].to_pylist() == [{"k": "a", "n": 4}, {"k": "b", "n": 2}]
    assert not list(folder.rglob("__pycache__"))
    assert type(build(kind, folder)) is type(operator)


def test_a_changed_file_is_loaded_anew(folder: Path) -> None:
    before = type(build("counting:Counting", folder))
    (folder / "counting.py").write_text(OWN.replace("Counts the rows", "Tells the rows"))
    after = type(build("counting:Counting", folder))
    assert (before.__doc__ or "").startswith("Counts")
    assert (after.__doc__ or "").startswith("Tells")


@pytest.mark.parametrize(
    "kind",
    [
        "outside:Counting",  # beside the folder
        "..outside:Counting",
        "own.counting:Counting",
        "../outside:Counting",
        "deep/er:Counting",
        "json:JSONDecoder",  # installed, but in none of the folders
        "firnline.operators.aggregate:Aggregate",
        "linked:Counting",  # a link that leads out
        "counting:",
        ":Counting",
        "counting:Counting.x",
        "counting:class",
        "counting:Nothing",
        "counting:function",
        "counting:Step",
        "counting.py:Counting",
    ],
)
def test_nothing_else_is_loaded(folder: Path, kind: str) -> None:
    (folder / "linked.py").symlink_to(folder.parent / "outside.py")
    loaded = set(sys.modules)
    with pytest.raises(ConfigError, match="'mine'"):
        build(kind, folder)
    new = [name for name in set(sys.modules) - loaded if name.startswith("firnline_operator_")]
    assert not any(str(folder.parent / "outside.py") == sys.modules[name].__file__ for name in new)


def test_without_folders_there_is_nothing_to_load(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no module 'counting'"):
        build("counting:Counting")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Half", "does not implement fold, keys, output_schema, state_schema"),
        ("Needy", "lacks the setting 'must'"),
        ("Clumsy", "cannot be built: oh no"),
        ("Forgetful", "keeps no state"),
        ("Keyless", "state_key must begin with its keys"),
        ("Timeless", "a time for 'out'"),
        ("Unclear", "output_key has 'x'"),
        ("Portless", "main port"),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(f"counting:{name}", folder)


@pytest.mark.parametrize("text", ["raise ValueError('bad')", "import nothing_of_that_name", "def broken(:"])
def test_a_file_that_cannot_be_loaded_is_told(folder: Path, text: str) -> None:
    (folder / "broken.py").write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'mine': .*broken.py cannot be loaded: "):
            build("broken:Counting", folder)


@pytest.mark.parametrize("kind", ["sql", "agregate", ""])
def test_a_type_that_keeps_no_state_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="not a stateful operator") as caught:
        build(kind)
    assert "aggregate" in caught.value.hint


def test_a_window_makes_a_windowed_aggregate() -> None:
    aggregates = [{"name": "n", "function": "count"}]
    plain = build("aggregate", keys=["k"], aggregates=aggregates)
    windowed = build("aggregate", keys=["k"], aggregates=aggregates, time="t", window={"size_us": 5})
    assert (type(plain), type(windowed)) == (Aggregate, WindowedAggregate)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="lacks the setting 'aggregates'"):
        build("aggregate", keys=["k"])


class TestOwnConformance(OperatorConformance):
    @pytest.fixture
    def operator(self, folder: Path) -> Operator:
        return build("counting:Counting", folder)

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        return [{"in": pa.Table.from_pylist([{"k": k} for k in keys], SCHEMA)} for keys in ("a", "b", "c")]
