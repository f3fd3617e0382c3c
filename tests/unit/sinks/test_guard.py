"""Every call of a sink is guarded: errors of the contract pass, anything else names sink, kind and method."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import pytest

from firnline.errors import CommitUnknownError, FencedError, SchemaError, SinkError
from firnline.process import HungError
from firnline.sinks import guard
from firnline.sinks.base import Capabilities, Sink
from firnline.sinks.guard import MEANWHILE, GuardedSink
from firnline.types import Delivery
from tests.support.processes import wait_until

LAZY = ("read_log", "read_rows")  # they fail when somebody reads on
METHODS = sorted(name for name, member in vars(Sink).items() if inspect.isfunction(member) and not name.startswith("_"))


class _NativePanicError(BaseException):
    """Like the panic of a native library, which is no Exception."""


def raising(error: BaseException) -> Any:
    def method(self: Sink, *args: Any, **kwargs: Any) -> Any:
        raise error

    return method


def sink_of(method: Any, *, required: bool, seconds: float = 5.0) -> GuardedSink:
    """A sink all of whose methods are the given one."""
    kind = type(
        "Broken", (Sink,), dict.fromkeys(METHODS, method) | {"capabilities": Capabilities(Delivery.EXACTLY_ONCE)}
    )
    inner = kind()
    inner.name, inner.required, inner.uri = "shop", required, "memory"
    return GuardedSink(inner, "own", seconds)


def invoke(sink: Sink, method: str) -> Any:
    """Call a method with something for each argument it needs; the sink inside takes anything."""
    needed = [
        p.name
        for p in inspect.signature(getattr(Sink, method)).parameters.values()
        if p.default is p.empty and p.name != "self"
    ]
    answer = getattr(sink, method)(**dict.fromkeys(needed))
    return list(answer) if method in LAZY else answer


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [OSError("disk"), ValueError("odd"), RuntimeError(), _NativePanicError("native")])
def test_a_foreign_exception_names_sink_kind_and_method(method: str, error: BaseException, required: bool) -> None:
    with pytest.raises(SinkError) as raised:
        invoke(sink_of(raising(error), required=required), method)
    assert raised.value.message.startswith(f"sink 'shop' (own) failed in {method}: {type(error).__name__}")
    assert str(error) in raised.value.message
    assert raised.value.__cause__ is error
    assert raised.value.fields == {"sink": "shop", "kind": "own", "method": method}


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "error",
    [SinkError("away"), CommitUnknownError("lost"), FencedError("other"), SchemaError("columns"), MemoryError()],
)
def test_errors_of_the_contract_pass_unchanged(method: str, error: Exception, required: bool) -> None:
    with pytest.raises(type(error)) as raised:
        invoke(sink_of(raising(error), required=required), method)
    assert raised.value is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_what_ends_the_process_passes(error: BaseException) -> None:
    with pytest.raises(type(error)):
        sink_of(raising(error), required=False).load()


@pytest.mark.parametrize("method", [name for name in METHODS if name not in LAZY])
def test_an_optional_sink_that_hangs_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "ANSWER_SECONDS", 0.05)
    going = threading.Event()
    sink = sink_of(lambda *_, **__: {"waited": going.wait(120)}, required=False, seconds=0.05)
    for _ in range(2):  # the second call does not start: the first has not returned
        with pytest.raises(SinkError, match=f"failed in {method}") as raised:
            invoke(sink, method)
        assert isinstance(raised.value.__cause__, HungError)
    going.set()

    def answers() -> bool:
        with contextlib.suppress(SinkError):  # the call that hung has not returned yet, or this one is late
            return bool(invoke(sink, method)["waited"])
        return False

    wait_until(answers)


def test_a_call_that_hangs_does_not_block_questions_of_other_lanes() -> None:
    going = threading.Event()
    sink = sink_of(lambda *_, **__: {"waited": going.wait(120)}, required=False, seconds=0.05)
    with pytest.raises(SinkError):
        invoke(sink, "commit")
    going.set()
    assert all(invoke(sink, method)["waited"] for method in MEANWHILE)


def test_a_required_sink_is_waited_for() -> None:
    going = threading.Event()
    sink = sink_of(lambda *_, **__: {"waited": going.wait(120)}, required=True, seconds=0.01)
    timer = threading.Timer(0.1, going.set)
    timer.start()
    assert invoke(sink, "commit")["waited"]
