"""Compiles Python functions with numba, and adds the instructions on bytes that numba lacks.

Compiled functions release the interpreter's lock and count no references. The instructions (16-byte loads, bit masks,
a 128-bit product) check no bounds: the caller guarantees that sixteen (or eight) bytes exist from the given index on.
"""

# numba checks the types of compiled code, and fixes the parameters of what describes it.
# mypy: ignore-errors
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Compiled functions neither create nor keep arrays. With numba's default, counting references took half of the
# decoder's time.
_PLAIN = {"nogil": True, "_nrt": False}
_njit: Any = numba.njit  # its types leave out `_nrt`


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function that other compiled functions call."""
    return _njit(**_PLAIN)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into the body of each compiled function that calls it."""
    return _njit(forceinline=True, **_PLAIN)(function)


def entry(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, and cache the machine code on disk beside the function's module.

    numba compiles again when that module's file changes, but not when only a module that it imports changes.
    """
    return _njit(cache=True, **_PLAIN)(function)


# --- instructions --------------------------------------------------------------------------------------

_BYTE = ir.IntType(8)
_BYTES16 = ir.VectorType(_BYTE, 16)
_MASK16 = ir.IntType(16)
_WORD = ir.IntType(64)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_BYTES16, [ir.Constant(_BYTE, value)] * 16)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(cgutils.gep_inbounds(builder, data, index), target.as_pointer())


def _mask(builder: Any, flags: Any) -> Any:
    return builder.zext(builder.bitcast(flags, _MASK16), _WORD)


def _special(builder: Any, chunk: Any) -> Any:
    """Flag the bytes that end a stretch of plain text: quote, backslash, control, not ASCII."""
    flags = builder.icmp_unsigned("==", chunk, _splat(0x22))
    flags = builder.or_(flags, builder.icmp_unsigned("==", chunk, _splat(0x5C)))
    # One signed comparison covers control bytes and, being negative, bytes from 0x80 on.
    return builder.or_(flags, builder.icmp_signed("<", chunk, _splat(0x20)))


@intrinsic
def special16(_typing: Any, data: Any, index: Any) -> Any:
    """Return a bit for each of 16 bytes that is a quote, a backslash, a control or not ASCII."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        chunk = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _BYTES16), align=1)
        return _mask(builder, _special(builder, chunk))

    return types.uint64(data, types.int64), codegen


@intrinsic
def copy16(_typing: Any, data: Any, index: Any, target: Any, offset: Any) -> Any:
    """Copy 16 bytes to `target[offset:]` and return `special16` of them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        chunk = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _BYTES16), align=1)
        builder.store(chunk, _pointer(context, builder, signature.args[2], args[2], args[3], _BYTES16), align=1)
        return _mask(builder, _special(builder, chunk))

    return types.uint64(data, types.int64, target, types.int64), codegen


@intrinsic
def newlines16(_typing: Any, data: Any, index: Any) -> Any:
    """Return a bit for each of 16 bytes that is a line feed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        chunk = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _BYTES16), align=1)
        return _mask(builder, builder.icmp_unsigned("==", chunk, _splat(0x0A)))

    return types.uint64(data, types.int64), codegen


@intrinsic
def load8(_typing: Any, data: Any, index: Any) -> Any:
    """Return eight bytes as one little-endian number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _WORD), align=1)

    return types.uint64(data, types.int64), codegen


@intrinsic
def trailing_zeros(_typing: Any, value: Any) -> Any:
    """Count the zero bits below the lowest one bit; the value must not be zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def leading_zeros(_typing: Any, value: Any) -> Any:
    """Count the zero bits above the highest one bit; the value must not be zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def high_product(_typing: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of the 128-bit product."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)

    return types.uint64(types.uint64, types.uint64), codegen
