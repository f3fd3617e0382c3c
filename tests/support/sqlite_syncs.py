"""Tells of every fsync that SQLite makes in this process, through a VFS of our own around the default one."""

from __future__ import annotations

import ctypes
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAME = b"firnline-syncs"
_WORDS = 19  # of sqlite3_io_methods, version 3
_SYNC = 5  # the word that is xSync

_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_SYNC_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, version 3."""

    _fields_ = (
        ("iVersion", ctypes.c_int),
        ("szOsFile", ctypes.c_int),
        ("mxPathname", ctypes.c_int),
        ("pNext", ctypes.c_void_p),
        ("zName", ctypes.c_char_p),
        ("pAppData", ctypes.c_void_p),
        ("xOpen", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 15),
    )


_kept: list[Any] = []  # SQLite keeps pointers to these for as long as a file is open


@contextmanager
def sqlite_syncs(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with the path after each fsync of a file that SQLite opens meanwhile."""
    library = ctypes.CDLL(_library())
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
    original = library.sqlite3_vfs_find(None)
    vfs = _Vfs.from_buffer_copy(original.contents)
    open_original = _OPEN(vfs.xOpen)
    tables: dict[tuple[int, str], Any] = {}

    def opened(_: int, name: int | None, file: int, flags: int, out: int | None) -> int:
        code: int = open_original(ctypes.addressof(original.contents), name, file, flags, out)
        methods = ctypes.c_void_p.from_address(file)
        if code == sqlite3.SQLITE_OK and name and methods.value:
            path = ctypes.string_at(name).decode()  # the pointer itself goes on to SQLite, which keeps it
            if (methods.value, path) not in tables:
                tables[methods.value, path] = _watched(methods.value, path, tell)
            methods.value = ctypes.addressof(tables[methods.value, path][0])
        return code

    callback = _OPEN(opened)
    vfs.zName = _NAME
    vfs.xOpen = ctypes.cast(callback, ctypes.c_void_p)
    _kept.append((vfs, callback, tables, open_original))
    library.sqlite3_vfs_register(ctypes.byref(vfs), 1)
    try:
        yield
    finally:
        library.sqlite3_vfs_register(original, 1)
        library.sqlite3_vfs_unregister(ctypes.byref(vfs))


def _watched(methods: int, path: str, tell: Callable[[str], None]) -> tuple[Any, Any]:
    """A copy of a file's methods whose xSync tells."""
    words = (ctypes.c_void_p * _WORDS).from_buffer_copy((ctypes.c_void_p * _WORDS).from_address(methods))
    sync_original = _SYNC_CALL(words[_SYNC] or 0)

    def sync(file: int, flags: int) -> int:
        code: int = sync_original(file, flags)
        if code == sqlite3.SQLITE_OK:
            tell(path)
        return code

    callback = _SYNC_CALL(sync)
    words[_SYNC] = ctypes.cast(callback, ctypes.c_void_p).value
    return words, callback


def _library() -> str:
    """The shared library that Python's sqlite3 uses; Python itself where it has SQLite built in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rsplit(" ", 1)[-1]
        if "libsqlite3" in path:
            return path
    return sys.executable
