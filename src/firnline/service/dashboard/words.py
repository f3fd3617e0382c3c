"""Figures in words, as pages show them: counts, sizes, durations and ages; and the tone of a state word."""

from __future__ import annotations

import base64
import json
from datetime import datetime

from firnline.clock import ago_text
from firnline.types import Json

ABSENT = "–"  # noqa: RUF001 - the sign for a figure that is not known

# The colour of a state; the word itself always stands beside it.
_TONES = {
    "good": ("running", "in sync", "decides", "completed", "committed", "intact", "complete"),
    "busy": ("starting", "pausing", "stopping", "catching up", "in progress", "pending", "waits for a run"),
    "calm": ("new", "done", "stopped", "ended", "unknown"),
    "warn": ("paused", "fenced", "set aside", "late", "grown", "changed", "undone", "folded", "differs"),
    "bad": ("failed", "died", "invalid", "unreadable", "fails", "cannot be read", "damaged", "missing", "incomplete"),
}
TONES = {word: tone for tone, words in _TONES.items() for word in words}


def tone(state: str | None) -> str:
    """Return the tone of a state word: good, busy, calm, warn or bad."""
    return TONES.get(state or "", "busy" if (state or "").startswith("is filled") else "calm")


def count(number: float | None) -> str:
    """Return a count: `1,234`; with one digit behind the point if it is small and not whole."""
    if number is None:
        return ABSENT
    if number != int(number) and abs(number) < 100:
        return f"{number:,.1f}"
    return f"{round(number):,}"


def size(size_bytes: float | None) -> str:
    """Return a size in the largest fitting unit."""
    if size_bytes is None:
        return ABSENT
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def duration(seconds: float | None) -> str:
    """Return a duration in its largest units: `35 ms`, `1.2 s`, `3 min 05 s`, `2 h 10 min`, `5 days`."""
    if seconds is None:
        return ABSENT
    if seconds < 1:
        return f"{round(seconds * 1000):,} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} days"


def milliseconds(number: float | None) -> str:
    """Return a duration that is given in milliseconds."""
    return duration(None if number is None else number / 1000)


def ago(moment: str | None, now: datetime) -> str:
    """Return how long ago a moment was: `12 s ago`."""
    return ago_text(moment, now) if moment else ABSENT


def moment_text(moment: str | None) -> str:
    """Return a recorded time to the second, in UTC."""
    if not moment:
        return ABSENT
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M:%S")


def raw_text(encoded: str, limit: int) -> str:
    """Return the bytes of a record, which are given in Base64, as text; what is not UTF-8 shows as `\\xNN`."""
    raw = base64.b64decode(encoded)
    text = raw[:limit].decode("utf-8", "backslashreplace")
    shown = "".join(one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in text)
    return shown if len(raw) <= limit else f"{shown} ... ({size(len(raw))})"


def json_text(value: Json) -> str:
    """Return values as one line of JSON, which a page wraps."""
    return json.dumps(value, ensure_ascii=False, default=str)


def json_lines(value: Json) -> str:
    """Return values as JSON over several lines."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
