"""Tables for people: lays out rows under headings, and makes them fit a given width.

A table that is too wide first gets shorter times, then loses the columns that matter least, then long texts are cut
with an ellipsis. A number is cut only where nothing else is left to give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from firnline.cli.text import safe, shorten, shorten_start, shown, text_width

MAX_CELL = 400  # characters of one cell; JSON is never shortened
GAP = "  "
READABLE, HARD = 24, 8  # a text keeps so many characters while columns can go; so many afterwards
TIME_FORMATS = ("%Y-%m-%dT%H:%M:%SZ", "%m-%d %H:%M:%SZ", "%m-%d %H:%MZ")  # the shorter ones if space is scarce


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the field it shows and how.

    `drop` is the order in which columns go if the table is too wide, the largest first; 0 stays. `cut` is the end at
    which a long text is shortened: a path on the left, because its name matters most. `time`: the field has a moment.
    """

    field: str
    title: str = ""
    right: bool = False
    drop: int = 0
    cut: Literal["", "left", "right"] = ""
    time: bool = False

    @property
    def heading(self) -> str:
        return self.title or self.field


@dataclass(frozen=True, slots=True)
class Layout:
    """A table as lines, the first with the headings, and the headings of the columns that had to go."""

    lines: list[str]
    left_out: list[str]


def lay_out(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], width: int | None) -> Layout:
    """Lay rows out in lines of at most `width` cells of the screen; None: as wide as they are."""
    form = 0
    cells = [_cells(column, rows, form) for column in columns]
    kept = list(range(len(columns)))
    if width is not None:
        while form + 1 < len(TIME_FORMATS) and _needs(columns, cells, kept, MAX_CELL) > width:
            form += 1
            cells = [_cells(column, rows, form) for column in columns]
        while (
            _needs(columns, cells, kept, READABLE) > width and (goes := _next_to_go(columns, cells, kept)) is not None
        ):
            kept.remove(goes)
    widths = {number: _natural(cells[number]) for number in kept}
    if width is not None:
        widths = _shrink(columns, widths, {n: text_width(cells[n][0]) for n in kept}, width)
    lines = []
    for row in range(len(rows) + 1):
        parts = [_pad(columns[n], _fit(columns[n], cells[n][row], widths[n]), widths[n]) for n in kept]
        lines.append(GAP.join(parts).rstrip())
    return Layout(lines, [column.heading for number, column in enumerate(columns) if number not in kept])


def _cells(column: Column, rows: Sequence[Mapping[str, Any]], form: int) -> list[str]:
    return [column.heading, *(_cell(row.get(column.field), column, form) for row in rows)]


def _cell(value: Any, column: Column, form: int) -> str:
    if column.time and value is not None:
        value = datetime.fromisoformat(str(value)).astimezone(UTC).strftime(TIME_FORMATS[form])
    return shorten(safe(shown(value)), MAX_CELL)


def _natural(cells: Sequence[str]) -> int:
    return max(map(text_width, cells))


def _needs(columns: Sequence[Column], cells: Sequence[Sequence[str]], kept: Sequence[int], least: int) -> int:
    """The width that the kept columns need if texts are cut to `least`."""
    widths = [
        max(min(_natural(cells[n]), least), text_width(cells[n][0])) if columns[n].cut else _natural(cells[n])
        for n in kept
    ]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _next_to_go(columns: Sequence[Column], cells: Sequence[Sequence[str]], kept: Sequence[int]) -> int | None:
    """The column that goes next: one without any value first, then by `drop`, the rightmost of equals."""
    can_go = [number for number in kept if columns[number].drop]
    if not can_go:
        return None
    return max(can_go, key=lambda n: (all(cell in ("-", "") for cell in cells[n][1:]), columns[n].drop, n))


def _shrink(
    columns: Sequence[Column], widths: dict[int, int], headings: Mapping[int, int], width: int
) -> dict[int, int]:
    """Take away what is too much, one cell of the screen after the other, each time from the widest that can give."""
    widths = dict(widths)
    cut = [number for number in widths if columns[number].cut]
    rest = [number for number in widths if not columns[number].cut]
    room = width - len(GAP) * (len(widths) - 1)
    for can_give, least in (
        (cut, {n: max(HARD, headings[n]) for n in cut}),
        (cut, dict.fromkeys(cut, HARD)),
        ([n for n in rest if not columns[n].right], dict.fromkeys(rest, HARD)),
        (list(widths), dict.fromkeys(widths, 1)),
    ):
        while sum(widths.values()) > room:
            givers = [number for number in can_give if widths[number] > least[number]]
            if not givers:
                break
            widths[max(givers, key=lambda n: widths[n])] -= 1
    return widths


def _fit(column: Column, text: str, width: int) -> str:
    return shorten_start(text, width) if column.cut == "left" else shorten(text, width)


def _pad(column: Column, text: str, width: int) -> str:
    space = " " * (width - text_width(text))
    return space + text if column.right else text + space
