"""Writes one immutable Arrow file in pieces, and knows its size and checksum when it is done."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
from isal import isal_zlib

from firnline.storage import Storage, Writable


class ArrowFile:
    """An uncompressed Arrow file (random-access format) that is durable once `close` has returned."""

    def __init__(self, storage: Storage, key: str, schema: pa.Schema) -> None:
        self.key = key
        self._storage = storage
        self._stream = _Counted(storage.create(key))
        options = pa.ipc.IpcWriteOptions(compression=None)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._stream, mode="w"), schema, options=options)

    @property
    def size_bytes(self) -> int:
        return self._stream.written

    @property
    def crc32(self) -> int:
        return self._stream.crc32

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Write the footer and make the file durable."""
        self._writer.close()
        self._stream.finish()

    def abandon(self) -> None:
        """Remove what was written so far: nobody refers to it, and a full disk must not fill up with what failed."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._stream.finish()
        with contextlib.suppress(OSError):
            self._storage.delete(self.key)


class _Counted:
    """A stream that counts and checksums what passes; the part of a file that Arrow asks for."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self.written = 0
        self.crc32 = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.crc32 = isal_zlib.crc32(view, self.crc32)
        self.written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        """Nothing: durable when it is finished."""

    def close(self) -> None:
        """Nothing: Arrow closes it, but only `finish` makes it durable, where errors can be seen."""

    def finish(self) -> None:
        self._stream.close()
        self.closed = True
