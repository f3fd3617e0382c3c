"""Values as texts for the screen: printable, and within a width."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

MAX_DIGITS = 20  # a number with more zeros than that is shown with an exponent


def shown(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def exact(value: Any) -> Any:
    """A number of the data with all its digits, and no others; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return value
    number = value if isinstance(value, int) else Decimal(repr(value) if isinstance(value, float) else value)
    if isinstance(number, Decimal) and (not number.is_finite() or abs(number.adjusted()) > MAX_DIGITS):
        return str(value)
    return format(number, "f") if isinstance(number, Decimal) else str(number)


def safe(text: str) -> str:
    """Escape characters that could control a terminal or break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def text_width(text: str) -> int:
    """How many cells of the screen a text takes: some characters take two, some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shorten(text: str, limit: int) -> str:
    """Cut a text that is wider than the limit, and show that it was cut."""
    if text_width(text) <= limit:
        return text
    kept = text[: limit - 1]
    while text_width(kept) > limit - 1:
        kept = kept[:-1]
    return kept + "…"


def shorten_start(text: str, limit: int) -> str:
    """Cut the beginning of a text that is wider than the limit, and show that it was cut."""
    if text_width(text) <= limit:
        return text
    kept = text[len(text) - limit + 1 :]
    while text_width(kept) > limit - 1:
        kept = kept[1:]
    return "…" + kept
