"""Builds the operator that a spec describes: a built-in one, or a user's own class from an allowed folder."""

from __future__ import annotations

import hashlib
import inspect
import keyword
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pyarrow as pa

from firnline.errors import ConfigError, FirnlineError
from firnline.operators.base import MAIN, Operator
from firnline.operators.columns import check_names, check_time, get_keys, suggest
from firnline.options import OperatorOptions
from firnline.types import Json

BUILT_IN = ("aggregate", "deduplicate", "correlate")


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The source file of a user's own class; the driver sends it to workers, which may not see the driver's folders."""

    file: str
    text: str

    def to_json(self) -> dict[str, Json]:
        return {"file": self.file, "text": self.text}


def build_operator(
    options: OperatorOptions, inputs: Mapping[str, pa.Schema], paths: Sequence[str], code: OwnCode | None = None
) -> Operator:
    """Return the operator for these options and input columns.

    Args:
        options: Its name, type and settings.
        inputs: The columns of every input, in the order of the spec.
        paths: The folders that may hold a user's own class (`module:Class`).
        code: The file of that class, if it is already read.

    Raises:
        ConfigError: the type is unknown, or the settings do not match the columns.
    """
    kind = _built_in(options) or _load_class(options, code or read_code(options, paths))
    try:
        operator = kind(options.name, inputs, options.settings)
        _check(operator)
    except FirnlineError:
        raise
    except KeyError as error:
        raise ConfigError(f"operator {options.name!r} ({options.type}) lacks the setting {error}") from error
    except Exception as error:
        raise ConfigError(f"operator {options.name!r} ({options.type}) cannot be built: {error}") from error
    return operator


def own_code(options: OperatorOptions, paths: Sequence[str]) -> OwnCode | None:
    """Return the file of a user's own class; None for a built-in operator."""
    return read_code(options, paths) if ":" in options.type else None


def _built_in(options: OperatorOptions) -> type[Operator] | None:
    if options.type == "aggregate":
        from firnline.operators.aggregate import Aggregate, WindowedAggregate

        return WindowedAggregate if options.settings.get("window") else Aggregate
    if options.type == "deduplicate":
        from firnline.operators.deduplicate import Deduplicate

        return Deduplicate
    if options.type == "correlate":
        from firnline.operators.correlate import Correlate

        return Correlate
    if ":" not in options.type:
        raise ConfigError(
            f"operator {options.name!r} has the type {options.type!r}, which is not a stateful operator",
            hint=suggest(options.type, [*BUILT_IN, "module:Class"]),
        )
    return None


def _check(operator: Operator) -> None:
    """Raise ConfigError if the operator's own properties contradict each other."""
    name, inputs = operator.name, operator.inputs
    get_keys(name, inputs, operator.keys)
    for source, column in operator.times.items():
        if source not in inputs:
            raise ConfigError(
                f"operator {name!r} has a time for {source!r}, which is no input", hint=suggest(source, inputs)
            )
        check_time(name, {source: inputs[source]}, column)
    if not len(operator.state_schema):
        raise ConfigError(f"operator {name!r} keeps no state", hint="Give its state_schema at least one column.")
    if tuple(operator.state_key.names[: len(operator.keys)]) != tuple(operator.keys):
        raise ConfigError(f"operator {name!r}: its state_key must begin with its keys")
    check_names(name, operator.state_key)
    check_names(name, operator.state_schema)
    if MAIN not in operator.ports:
        raise ConfigError(f"operator {name!r} lacks the main port")
    for port in operator.ports:
        check_names(name, operator.output_schema(port))
    for column in operator.output_key:
        if column not in operator.output_schema().names:
            raise ConfigError(f"operator {name!r}: its output_key has {column!r}, which is no column of its output")


# -- users' own classes -------------------------------------------------------------------------------


class _Loader(SourceFileLoader):
    """Loads a module from text that is already read; writes no compiled file beside it."""

    def __init__(self, name: str, code: OwnCode) -> None:
        super().__init__(name, code.file)
        self._data = code.text.encode()

    def get_data(self, path: str) -> bytes:
        return self._data

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError(path)


def read_code(options: OperatorOptions, paths: Sequence[str]) -> OwnCode:
    """Read the file of a user's own class.

    Raises:
        ConfigError: no allowed folder has the file, or it cannot be read.
    """
    module, _, name = options.type.partition(":")
    parts = module.split(".")
    if not all(_is_name(part) for part in (*parts, name)):
        raise ConfigError(
            f"operator {options.name!r}: {options.type!r} is not of the form module:Class",
            hint="Write e.g. my_operators.totals:Totals for the class Totals in my_operators/totals.py.",
        )
    file = _find_file(parts, paths)
    if file is None:
        raise ConfigError(
            f"operator {options.name!r}: there is no module {module!r} in the folders of `operator_paths`",
            hint="Put the file into one of them, or add its folder; installed packages are not searched.",
        )
    try:
        with open(file, encoding="utf-8") as stream:
            return OwnCode(file, stream.read())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"operator {options.name!r}: cannot read {file}: {error}") from error


def _load_class(options: OperatorOptions, code: OwnCode) -> type[Operator]:
    name = options.type.partition(":")[2]
    loaded = vars(_load_module(options.name, code)).get(name)
    if not (isinstance(loaded, type) and issubclass(loaded, Operator)):
        raise ConfigError(
            f"operator {options.name!r}: {options.type!r} is not a subclass of firnline.operators.Operator",
            hint="Name a class of that module that inherits from Operator.",
        )
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise ConfigError(f"operator {options.name!r}: class {name!r} does not implement {missing}")
    return loaded


def _is_name(part: str) -> bool:
    return part.isidentifier() and not keyword.iskeyword(part)


def _find_file(parts: Sequence[str], paths: Sequence[str]) -> str | None:
    """Return the real path of the module's file; a link that leads out of its folder does not count."""
    for folder in map(os.path.realpath, paths):
        for candidate in _candidates(folder, parts):
            file = os.path.realpath(candidate)
            if os.path.isfile(file) and os.path.commonpath([folder, file]) == folder:
                return file
    return None


def _candidates(folder: str, parts: Sequence[str]) -> Iterator[str]:
    path = os.path.join(folder, *parts)
    yield f"{path}.py"
    yield os.path.join(path, "__init__.py")


def _load_module(operator: str, code: OwnCode) -> ModuleType:
    """Load a file as a module whose name is a hash of path and content, so that a changed file is loaded again."""
    file = code.file
    name = "firnline_operator_" + hashlib.sha256(f"{file}\0{code.text}".encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file, loader=_Loader(name, code))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"operator {operator!r}: {file} cannot be loaded: {type(error).__name__}: {error}") from error
    return module
