"""Compiles Python functions with numba, caches the machine code, and adds instructions on bytes that numba lacks.

Compiled functions release the interpreter's lock and count no references. The instructions (16-byte loads, bit masks,
a 128-bit product) check no bounds: the caller guarantees that sixteen (or eight) bytes exist from the given index on.
Those that take addresses trust the caller with them.
"""

# numba checks the types of compiled code, and fixes the parameters of what describes it.
# mypy: ignore-errors
# ruff: noqa: ARG001

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import numpy
from llvmlite import ir
from numba import types
from numba.core import caching, cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic

from firnline import installed

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
    """Compile a function that Python calls, and cache the machine code on disk; see `_Locator`."""
    return _njit(cache=True, **_PLAIN)(function)


# --- the cache -----------------------------------------------------------------------------------------


class _Locator(caching._CacheLocator):
    """Where numba keeps the machine code of Firnline's own functions.

    It lies beside the module, for all users of the installation, if somebody compiled it there or may do so; else in
    the user's cache. Its name holds a digest of all that it depends on: the module, the compiled modules that it calls,
    the versions of the compiler, and the processor. So nothing is compiled again without need, or used in spite of it.
    """

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file  # numba reads it for a message
        self._digest = _digest(file)
        self._line = function.__code__.co_firstlineno
        beside = Path(file).parent / "__pycache__"
        pattern = f"{Path(file).stem}.{function.__qualname__}-{self.get_disambiguator()}.*.nbi"
        found = [p for f in (beside, installed.user_cache()) for p in f.glob(pattern) if installed.is_trusted(p)]
        folder = found[0].parent if found else installed.ensure_folder(beside)
        self.is_private = folder is None  # nothing can be kept: every process compiles for itself
        self._folder = str(folder) if folder is not None else tempfile.mkdtemp(prefix="firnline-")

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator | None:
        if numba_config.CACHE_DIR or not Path(file).is_relative_to(installed.PACKAGE):
            return None
        return cls(function, file)

    def ensure_cache_path(self) -> None:
        """Nothing to do: the folder exists, and need not be writable if the code is there."""

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return f"{self._line}-{self._digest}"


_cache_class: Any = getattr(caching, "CacheImpl", None) or caching._CacheImpl  # its name in older versions
_cache_class._locator_classes.insert(0, _Locator)


@cache
def _digest(file: str) -> str:
    """Return a digest of all that the machine code of a module depends on."""
    processor = numba_config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = numba_config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    facts = [numba.__version__, llvmlite.__version__, numpy.__version__, processor, features]
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sorted(_sources(Path(file))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _sources(file: Path) -> set[Path]:
    """Return a module and all the compiled modules that it imports, directly or not."""
    found, left = {Path(__file__)}, [file]
    while left:
        source = left.pop()
        text = source.read_text(encoding="utf-8")
        if source in found or "firnline.jit" not in text:
            continue
        found.add(source)
        for name in re.findall(r"^(?:from|import) firnline\.([\w.]+)", text, re.MULTILINE):
            imported = installed.PACKAGE / f"{name.replace('.', '/')}.py"
            if imported.exists():
                left.append(imported)
    return found


_compile_now = False


@contextmanager
def compiling() -> Iterator[None]:
    """Compile what is called in this block, even if that takes long."""
    global _compile_now
    before, _compile_now = _compile_now, True
    try:
        yield
    finally:
        _compile_now = before


def is_compiled(function: Any) -> bool:
    """Return whether an `entry` may be called: it is compiled already, or must be now."""
    if function.overloads or _compile_now:
        return True
    code = function._cache
    if getattr(code._impl.locator, "is_private", False):
        return True  # waiting for another process to compile it would be in vain
    return any(Path(code.cache_path).glob(f"{code._impl.filename_base}.*.nbc"))


def cache_folder(function: Any) -> str:
    """Return the folder with the machine code of an `entry`."""
    return str(function._cache.cache_path)


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


# --- memory that is no array, and functions of other libraries --------------------------------------------


@intrinsic
def call_c(_typing: Any, address: Any, arguments: Any) -> Any:
    """Call a C function that takes numbers or addresses, and returns an int or nothing."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[1])
        pointer = ir.FunctionType(ir.IntType(32), [_WORD] * len(values)).as_pointer()
        result = builder.call(builder.inttoptr(args[0], pointer), values)
        return builder.sext(result, _WORD)

    return types.int64(types.int64, arguments), codegen


@intrinsic
def load_byte(_typing: Any, address: Any) -> Any:
    """Return the byte at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], _BYTE.as_pointer())), _WORD)

    return types.int64(types.int64), codegen


@intrinsic
def copy_from(_typing: Any, address: Any, target: Any, offset: Any, size: Any) -> Any:
    """Copy `size` bytes from an address to `target[offset:]`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = builder.inttoptr(args[0], _BYTE.as_pointer())
        to = _pointer(context, builder, signature.args[1], args[1], args[2], _BYTE)
        cgutils.raw_memcpy(builder, to, source, args[3], 1)
        return context.get_dummy_value()

    return types.none(types.int64, target, types.int64, types.int64), codegen
