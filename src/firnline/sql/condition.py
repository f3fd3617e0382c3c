"""Conditions on single rows (`where` of a sink): one expression over the columns of a row, the same on every call."""

from __future__ import annotations

import sqlglot
from sqlglot import errors, expressions

from firnline.errors import ConfigError

_CHANGING = frozenset(  # functions that differ from call to call
    (
        *("random", "rand", "uuid", "gen_random_uuid", "nextval", "currval", "getenv", "current_setting"),
        *("now", "today", "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"),
        *("get_current_time", "get_current_timestamp", "transaction_timestamp"),
    )
)

_EXAMPLE = "Write one like: country = 'NO' AND amount > 10. Text is in single quotes."


def check_condition(text: str) -> None:
    """Refuse a condition that is no single expression over the columns of a row, or differs from call to call.

    Raises:
        ConfigError: it says why.
    """
    try:
        parsed = sqlglot.parse(f"SELECT 1 FROM rows WHERE ({text})", dialect="duckdb")  # noqa: S608
    except errors.SqlglotError as error:
        raise ConfigError(f"{text!r} is no condition{_where_of(error)}", hint=_EXAMPLE) from error
    where = parsed[0].find(expressions.Where) if len(parsed) == 1 and parsed[0] is not None else None
    if where is None:
        raise ConfigError(f"{text!r} is no condition", hint=_EXAMPLE)
    if where.find(expressions.Subquery, expressions.Select, expressions.AggFunc, expressions.Window):
        raise ConfigError(
            f"the condition {text!r} looks at more than one row",
            hint="Use an operator of type sql for that.",
        )
    for call in where.find_all(expressions.Func):
        name = call.name if isinstance(call, expressions.Anonymous) else call.sql_name()
        if name.lower() in _CHANGING:
            raise ConfigError(
                f"{name.lower()}() differs from call to call, and a delivery must be repeatable",
                hint="Compare with a column of the row.",
            )


def find_columns(text: str) -> set[str]:
    """Return the columns that a condition names, in lower case: DuckDB takes them in any."""
    parsed = sqlglot.parse_one(f"SELECT 1 FROM rows WHERE ({text})", dialect="duckdb")  # noqa: S608
    return {column.parts[0].name.lower() for column in parsed.find_all(expressions.Column)}


def _where_of(error: errors.SqlglotError) -> str:
    """Return what is wrong with a text that the parser does not take."""
    if not isinstance(error, errors.ParseError) or not error.errors:
        return ": a quote is not closed"
    word = str(error.errors[0].get("highlight") or "")
    return f": {word!r} does not belong there" if word.strip("()") else ": something is missing"
