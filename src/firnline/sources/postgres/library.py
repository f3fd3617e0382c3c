"""The client library (libpq) below psycopg, for compiled code: the addresses of its functions and of a connection."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from firnline.sources.postgres import stream_kernel as k


class Library:
    """The functions of the client library that a connection uses, by their addresses."""

    def __init__(self, connection: Any) -> None:
        module = sys.modules[type(connection).__module__]
        if hasattr(module, "impl"):  # psycopg's own code in Python
            pointer = ctypes.cast(connection.pgconn_ptr, ctypes.c_void_p).value
            loaded = module.impl.pq
        else:
            pointer, loaded = connection.pgconn_ptr, ctypes.CDLL(module.__file__)
        self._slot: npt.NDArray[np.int64] = np.zeros(1, np.int64)  # where libpq writes the address of a message
        names = ("PQgetCopyData", "PQconsumeInput", "PQfreemem")
        functions = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in names]
        self._addresses: npt.NDArray[np.int64] = np.array((*functions, pointer, self._slot.ctypes.data), np.int64)
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(functions[k.FREE])
        self._state: npt.NDArray[np.int64] = np.zeros(k.STATE_FIELDS, np.int64)

    def take_rows(
        self,
        target: npt.NDArray[np.uint8],
        used: int,
        limit: int,
        known: npt.NDArray[np.int64],
        *,
        passes_all: bool,
        most: int,
    ) -> tuple[int, int, int, bytes]:
        """Take rows, see `stream_kernel.take_rows`; returns how it ended, the end of the frames, how many rows they
        have, and the message that was handed back."""
        state = self._state
        state[k.USED] = used
        ended = int(k.take_rows(self._addresses, self._slot, target, limit, known, passes_all, most, state))
        return ended, int(state[k.USED]), int(state[k.ROWS]), self._take_back(ended)

    def take_copied(
        self, target: npt.NDArray[np.uint8], used: int, most: int, enough: int
    ) -> tuple[int, int, int, bytes]:
        """Take rows of a COPY, see `stream_kernel.take_copied`; returns how it ended, the end of the rows, how many
        came, and the row that was handed back."""
        state = self._state
        state[k.USED] = used
        ended = int(k.take_copied(self._addresses, self._slot, target, most, enough, state))
        return ended, int(state[k.USED]), int(state[k.ROWS]), self._take_back(ended)

    def _take_back(self, ended: int) -> bytes:
        """Return the message that compiled code handed back; empty if there is none."""
        if ended != k.OTHER:
            return b""
        message = ctypes.string_at(int(self._state[k.MESSAGE]), int(self._state[k.SIZE]))
        self._free(int(self._state[k.MESSAGE]))
        return message
