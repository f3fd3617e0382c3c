"""Sizes and durations as people write them, in a spec and on the command line alike: `512MiB`, `1h30m`."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

__all__ = [
    "DURATION_PATTERN",
    "SIZE_PATTERN",
    "parse_millis",
    "parse_moment",
    "parse_seconds",
    "parse_size",
    "seconds_text",
    "size_text",
]

SIZE_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
MILLIS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}  # largest first
# What an editor checks; the parsers check more.
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KkMmGgTt][Ii]?)?[Bb]?$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|[smhd]))+$"

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,9})?")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)")
_DURATION_PART = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(ms|[smhd])")
_UNITS_BY_CASE = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}


def parse_size(text: str) -> int:
    """Return a size in bytes: `1GB` is 10^9, `1GiB` is 2^30, a plain number is bytes.

    Raises:
        ValueError: the text is no size; the message says what to write.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is not None and (not unit or unit in _UNITS_BY_CASE):
        size = Decimal(match[1]) * _UNITS_BY_CASE.get(unit, 1)
        if size == int(size):
            return int(size)
        raise ValueError(f'must be a whole number of bytes, not "{text}"')
    if match is not None and unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
        letter = unit[0].upper()
        either = f"{match[1]}{letter}B (decimal) or {match[1]}{letter}iB (binary)"
        raise ValueError(f'"{text}" is ambiguous: write {either}')
    raise ValueError(f'must be a size like 1GB, 512MiB or 1048576 (bytes), not "{text}"')


def parse_moment(text: str) -> datetime | None:
    """Return a time with a zone (RFC 3339), or a time ago: `30m`, `1h30m`; None if the text is neither."""
    with contextlib.suppress(ValueError, OverflowError):
        if not text.isdigit():  # 20261116 is a date, or a mistake
            return datetime.now(UTC) - timedelta(seconds=parse_seconds(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def parse_seconds(text: str) -> float:
    """Return a duration in seconds: `10m`, `1h30m`, `250ms`; a plain number is seconds.

    Raises:
        ValueError: the text is no duration; the message says what to write.
    """
    return float(_millis(text, plain_number=1000) / 1000)


def parse_millis(text: str) -> int:
    """Return a duration in whole milliseconds; a plain number is milliseconds.

    Raises:
        ValueError: the text is no duration; the message says what to write.
    """
    millis = _millis(text, plain_number=1)
    if millis == int(millis):
        return int(millis)
    raise ValueError(f'must be a whole number of milliseconds, not "{text}"')


def _millis(text: str, *, plain_number: int) -> Decimal:
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return Decimal(stripped) * plain_number
    parts = list(_DURATION_PART.finditer(stripped))
    units = [list(MILLIS).index(part[2]) for part in parts]
    if not parts or "".join(part[0] for part in parts) != stripped or units != sorted(set(units)):
        plain = "90 (seconds)" if plain_number == 1000 else "200 (milliseconds)"
        raise ValueError(f'must be a time like 250ms, 30s, 10m, 1h30m, 7d or {plain}, not "{text}"')
    return sum((Decimal(part[1]) * MILLIS[part[2]] for part in parts), Decimal())


def seconds_text(seconds: float) -> str:
    """Return a duration as one writes it: `1h30m`."""
    rest, text = Decimal(str(seconds)) * 1000, ""
    for unit, millis in MILLIS.items():
        count, rest = divmod(rest, millis)
        if count or (unit == "ms" and not text):
            text += f"{count:f}{unit}"
    return text


def size_text(size_bytes: int) -> str:
    """Return a size as one writes it, in the largest unit that keeps it whole: `128MiB`, `1GB`, `1000001B`."""
    whole = [(factor, unit) for unit, factor in SIZE_UNITS.items() if size_bytes and not size_bytes % factor]
    factor, unit = max(whole, default=(1, "B"))
    return f"{size_bytes // factor}{unit}"
