"""Splits statements of MySQL and MariaDB into tokens, by the `sql_mode` under which they ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

ANSI_QUOTES, MSSQL, NO_BACKSLASH_ESCAPES = 1 << 2, 1 << 10, 1 << 20  # bits of sql_mode


class Token(NamedTuple):
    """A word, a name in quotes, a text in quotes, or a sign. Of a text both fields are empty."""

    word: str = ""  # in capitals, or the sign; empty if it stands in quotes
    name: str = ""  # without quotes; empty if it cannot be a name


@cache
def _pattern(sql_mode: int) -> re.Pattern[str]:
    """Return the pattern of one token. Nothing in it goes back: the time is linear, whatever the text."""

    def text(quote: str) -> str:
        if sql_mode & NO_BACKSLASH_ESCAPES:
            return rf"{quote}(?:[^{quote}]++|{quote}{quote})*+{quote}?"
        return rf"{quote}(?:[^{quote}\\]++|\\.|{quote}{quote})*+{quote}?"

    names = ["`(?:[^`]++|``)*+`?"]
    if sql_mode & ANSI_QUOTES:
        names.append('"(?:[^"]++|"")*+"?')
    if sql_mode & MSSQL:
        names.append(r"\[(?:[^\]]++|\]\])*+\]?")
    texts = [text("'")] if sql_mode & ANSI_QUOTES else [text("'"), text('"')]
    return re.compile(
        r"(?P<space>[ \t\r\n\f\v\0]++|#[^\n]*+|--(?=[\s\0-\x1f]|\Z)[^\n]*+|/\*(?!M?!)(?:[^*]++|\*(?!/))*+(?:\*/)?)"
        r"|(?P<open>/\*M?!(?:\d{5,6}+)?)|(?P<close>\*/)"
        rf"|(?P<name>{'|'.join(names)})|(?P<text>{'|'.join(texts)})"
        r"|(?P<word>[\w$\u0080-\U0010ffff]++)|(?P<sign>.)",
        re.DOTALL,
    )


def split(statement: str, sql_mode: int = 0) -> Iterator[Token]:
    """Yield the tokens of a statement, without its comments. What stands in `/*! */` and `/*M! */` counts."""
    match = _pattern(sql_mode & (ANSI_QUOTES | MSSQL | NO_BACKSLASH_ESCAPES)).match
    at, depth = 0, 0
    while found := match(statement, at):
        sort, value, at = found.lastgroup, found.group(), found.end()
        if sort == "word":
            yield Token(value.upper() if value.isascii() else value, value)
        elif sort == "name":
            yield Token(name=_unquote(value))
        elif sort == "text":
            yield Token()
        elif sort == "sign":
            yield Token(value)
        elif sort == "open":
            depth += 1
        elif sort == "close" and depth:
            depth -= 1
        elif sort == "close":  # a product before a comment
            at -= 1
            yield Token("*")


def _unquote(name: str) -> str:
    quote = "]" if name[0] == "[" else name[0]
    inside = name[1:-1] if len(name) > 1 and name[-1] == quote else name[1:]
    return inside.replace(quote * 2, quote)
