"""The durable form of a value in a store: JSON with format number, type and checksum; zstd if it is large.

A plain editor reads small ones, `zstd -d` unpacks large ones. The envelope:

    {"checksum": "<sha-256 of the rest>", "format": 1, "type": "Checkpoint", "value": {...}}
"""

from __future__ import annotations

import zstandard

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.types import Json

COMPRESS_ABOVE_BYTES = 16 * 1024
MAX_BYTES = 1 << 31  # limit of one unpacked value: a damaged length must not fill the memory
_MAGIC = b"\x28\xb5\x2f\xfd"


def encode(value: Json, kind: str, compress_above_bytes: int = COMPRESS_ABOVE_BYTES) -> bytes:
    """Return the bytes of a value. The same value always gives the same bytes."""
    text = canonical(seal({"type": kind, "value": value})) + b"\n"
    return zstandard.compress(text) if len(text) > compress_above_bytes else text


def decode(data: bytes, kind: str, what: str) -> Json:
    """Return the value.

    Raises:
        DamagedError: the content differs from what was encoded, or is a value of another type.
        NewerFormatError: a newer Firnline wrote it.
    """
    if is_compressed(data):
        data = _unpack(data, what)
    value = parse(data, what)
    try:
        body = unseal(value, what)
    except (ValueError, RecursionError) as error:  # JSON that `canonical` never writes: infinity, half a surrogate pair
        raise DamagedError(f"{what} is not what was written: {error}", what=what) from error
    if body.get("type") != kind or "value" not in body:
        raise DamagedError(f"{what} holds a {body.get('type')}, not a {kind}", what=what)
    return body["value"]


def is_compressed(data: bytes) -> bool:
    """Return whether these bytes are a zstd frame."""
    return data.startswith(_MAGIC)


def _unpack(data: bytes, what: str) -> bytes:
    try:
        if zstandard.frame_content_size(data) > MAX_BYTES:
            raise DamagedError(f"{what} says that it unpacks to more than {MAX_BYTES:,} bytes", what=what)
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedError(f"{what} cannot be unpacked: {error}", what=what) from error
