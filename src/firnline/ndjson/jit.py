"""How the functions of this package are compiled: without the interpreter's lock, and without counting references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

# No function here keeps or makes an array. Counting references all the same, as numba does by default, took
# half of the time of the whole walk.
_PLAIN = {"nogil": True, "_nrt": False}
_njit: Any = numba.njit  # its types leave out `_nrt`


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function that other compiled functions call."""
    return _njit(**_PLAIN)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into the body of those that call it."""
    return _njit(forceinline=True, **_PLAIN)(function)


def entry(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, and keep the result on disk.

    numba renews it when the function's own file changes, not when only a file that it imports does.
    """
    return _njit(cache=True, **_PLAIN)(function)
