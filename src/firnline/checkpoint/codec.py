"""Durable JSON: canonical text, checksums, format numbers. Never pickle."""

from __future__ import annotations

import hashlib
import json

from firnline.errors import DamagedError, NewerFormatError
from firnline.types import Json

FORMAT = 1


def canonical(value: Json) -> bytes:
    """Return the canonical text of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def checksum(data: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def seal(value: dict[str, Json]) -> dict[str, Json]:
    """Add the format number and a checksum over everything else."""
    body = {**value, "format": FORMAT}
    return {**body, "checksum": checksum(canonical(body))}


def unseal(value: Json, what: str) -> dict[str, Json]:
    """Check format number and checksum, and return the value without them.

    Raises:
        NewerFormatError: a newer Firnline wrote it.
        DamagedError: it differs from what was sealed.
    """
    if not isinstance(value, dict) or "checksum" not in value:
        raise DamagedError(f"{what} has no checksum", what=what)
    body = {key: item for key, item in value.items() if key != "checksum"}
    if checksum(canonical(body)) != value["checksum"]:
        raise DamagedError(f"{what} does not match its checksum", what=what)
    check_format(body, what)
    return body


def check_format(value: dict[str, Json], what: str, key: str = "format") -> None:
    """Raise NewerFormatError, with `what` in the message, if a newer Firnline wrote it."""
    found = value.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise DamagedError(f"{what} has no {key} number", what=what)
    if found > FORMAT:
        raise NewerFormatError(f"{what} has {key} {found}; this Firnline reads up to {FORMAT}", found=found)


def parse(data: bytes, what: str) -> Json:
    """Parse JSON text. Raises DamagedError if it is invalid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is not JSON: {error}", what=what) from error


def short_number(hex_checksum: str) -> int:
    """Return the first 63 bits of a checksum, as a number that fits a Delta transaction version."""
    return int(hex_checksum[:16], 16) >> 1
