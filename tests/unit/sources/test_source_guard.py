"""Every call of a source is guarded: errors of the contract pass, anything else names source, kind and method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError, DamagedError, SourceError, SourceMovedError
from firnline.kinds import load_kind
from firnline.run.open_pipeline import open_pipeline
from firnline.sources import registry
from firnline.sources.base import Source
from firnline.sources.files.reader import FileReader
from firnline.sources.files.source import FileSource
from firnline.sources.guard import GuardedSource, takes_acknowledgements
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput, table_ids

METHODS = sorted(name for name, member in vars(Source).items() if inspect.isfunction(member) and name[0] != "_")


def source_of(error: BaseException) -> GuardedSource:
    """A source all of whose methods raise the error."""

    def method(self: Source, *args: Any, **kwargs: Any) -> Any:
        raise error

    inner = type("Broken", (Source,), dict.fromkeys(METHODS, method))()
    inner.name = "orders"
    return GuardedSource(inner, "own")


def invoke(source: Source, method: str) -> Any:
    needed = [
        p.name
        for p in inspect.signature(getattr(Source, method)).parameters.values()
        if p.default is p.empty and p.name != "self"
    ]
    answer = getattr(source, method)(**dict.fromkeys(needed))
    return list(answer) if method == "list_inputs" else answer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [OSError("away"), ValueError("odd"), RuntimeError()])
def test_a_foreign_exception_names_source_kind_and_method(method: str, error: Exception) -> None:
    with pytest.raises(SourceError) as raised:
        invoke(source_of(error), method)
    assert raised.value.message.startswith(f"source 'orders' (own) failed in {method}: {type(error).__name__}")
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [SourceMovedError("moved"), DamagedError("odd"), MemoryError(), KeyboardInterrupt()])
def test_errors_of_the_contract_pass_unchanged(method: str, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        invoke(source_of(error), method)
    assert raised.value is error


def test_the_guard_does_not_take_acknowledgements_that_the_source_does_not(make_options: MakeOptions) -> None:
    [source] = open_pipeline(make_options()).sources
    assert not takes_acknowledgements(source)
    assert takes_acknowledgements(source_of(OSError()))


def failing(times: int, error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """The real method, after some failures."""
    left = [times]

    def method(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise error
        return real(*args, **kwargs)

    return method


CALLED: dict[str, type[Any]] = {
    "start": FileSource,
    "plan": FileSource,
    "advance": FileSource,
    "reader_settings": FileSource,
    "interchange": FileSource,
    "reconcile": FileSource,
    "read": FileReader,
    "end": FileReader,
}


@pytest.mark.parametrize("error", [OSError("away"), ValueError("odd"), SourceError("does not answer")])
@pytest.mark.parametrize("method", CALLED)
def test_a_run_retries_a_source_that_fails_a_few_times(
    method: str, error: Exception, sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(CALLED[method], method)
    monkeypatch.setattr(CALLED[method], method, failing(2, error, real))
    for number in range(3):
        sample.add(f"{number}.json", 2)
    options = make_options(max_files=1)
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert table_ids(Path(options.sinks[0].location)) == sample.ids


@pytest.mark.parametrize("method", CALLED)
def test_a_source_that_always_fails_ends_the_run_as_a_source_error(
    method: str, sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(CALLED[method], method)
    monkeypatch.setattr(CALLED[method], method, failing(10**6, ValueError("odd"), real))
    sample.add("1.json", 2)
    run = run_once(make_options())
    assert (run.exit_code, run.error_code) == (SourceError.exit_code, "source"), run.result
    assert run.result.error is not None
    assert f"source 'files' (files) failed in {method}: ValueError: odd" in run.result.error.message


@pytest.mark.parametrize("method", ["backlog", "describe", "give_back"])
def test_what_only_informs_stops_nobody(
    method: str, sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSource, method, failing(10**6, ValueError("odd"), getattr(FileSource, method)))
    monkeypatch.setattr(FileReader, "read", failing(1, ValueError("odd"), FileReader.read))  # an epoch is given back
    sample.add("1.json", 2)
    options = make_options()
    assert run_once(options).exit_code == 0
    assert table_ids(Path(options.sinks[0].location)) == sample.ids


def test_a_source_that_cannot_be_opened_is_named(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError("no such setting")

    monkeypatch.setattr(load_kind(registry.KINDS, "source", "files"), "open_source", refuse)
    with pytest.raises(ConfigError, match=r"source 'files' \(files\) cannot be opened: TypeError: no such setting"):
        open_pipeline(make_options())
