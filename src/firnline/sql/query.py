"""A query in Spark's dialect, as tokens and as a tree; and the query with its time and inputs replaced for an epoch.

Only these words are replaced; the rest of the query reaches Spark as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

DIALECT = "spark"
OPEN, CLOSE = "(", ")"
EPOCH_TIME = "EPOCH_TIME"  # the function that stands for the time of the epoch


@dataclass(frozen=True, slots=True)
class Token:
    """A word or sign of a query. `word` is in upper case, and empty for string literals and numbers."""

    word: str
    text: str
    line: int
    start: int
    end: int  # the index after it

    @property
    def is_text(self) -> bool:
        return not self.word


def read_tokens(query: str) -> list[Token]:
    """Return the words and signs of a query; comments are left out.

    Raises:
        ValueError: a string, a quoted name or a comment is not closed.
    """
    import sqlglot
    from sqlglot.errors import TokenError

    try:
        tokens = sqlglot.tokenize(query, read=DIALECT)
    except TokenError as error:
        raise ValueError("a string, a quoted name or a comment is not closed") from error
    return [Token(_word(t), t.text, t.line, t.start, t.end + 1) for t in tokens]


def _word(token: Any) -> str:
    kind = token.token_type.name
    return "" if kind == "NUMBER" or "STRING" in kind else str(token.text).upper()


def is_call(tokens: Sequence[Token], at: int) -> bool:
    """Return whether the token at this index is a word followed by an opening parenthesis."""
    return bool(tokens[at].word.strip(OPEN)) and at + 1 < len(tokens) and tokens[at + 1].word == OPEN


def closing(tokens: Sequence[Token], at: int) -> int:
    """Return the index of the parenthesis that closes the one at `at`, or the end of the query."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += {OPEN: 1, CLOSE: -1}.get(tokens[index].word, 0)
        if depth == 0:
            return index
    return len(tokens)


def inside(tokens: Sequence[Token], at: int) -> Iterator[Token]:
    """Yield the tokens inside the parenthesis that opens at `at`, without those nested deeper."""
    depth = 0
    for token in tokens[at + 1 : closing(tokens, at)]:
        depth -= token.word == CLOSE
        if depth == 0:
            yield token
        depth += token.word == OPEN


def arguments(tokens: Sequence[Token], at: int) -> int:
    """Return the number of arguments of the call whose parenthesis opens at `at`."""
    direct = list(inside(tokens, at))
    return 1 + sum(token.word == "," for token in direct) if direct else 0


def parse_statements(query: str) -> list[Any]:
    """Return the trees of all statements.

    Raises:
        sqlglot.errors.ParseError: the query is not valid SQL for sqlglot.
    """
    import sqlglot

    return [tree for tree in sqlglot.parse(_for_parser(query), dialect=DIALECT) if tree is not None]


def _for_parser(query: str) -> str:
    """Return the query with `window(...)` under another name of the same length: sqlglot takes it for a clause."""
    tokens = read_tokens(query)
    for at, token in enumerate(tokens):
        if token.word == "WINDOW" and is_call(tokens, at) and token.end - token.start == len("window"):
            query = f"{query[: token.start]}windo_{query[token.end :]}"
    return query


def table_parts(table: Any) -> list[Any]:
    """Return the parts of a table's name, e.g. the two of `totals.late`; none for a table function."""
    from sqlglot import exp

    parts = [part for key in ("catalog", "db", "this") if (part := table.args.get(key)) is not None]
    return parts if all(isinstance(part, exp.Identifier) for part in parts) else []


# --- binding --------------------------------------------------------------------------------------------


def bind_epoch_time(query: str, epoch_time: str) -> str:
    """Return the query with every `epoch_time()` replaced by a timestamp literal, exact to the microsecond.

    Args:
        query: A query that `check_query` accepts.
        epoch_time: A time in RFC 3339, with its zone.

    Raises:
        ValueError: `epoch_time` is not a time, or has no zone.
    """
    moment = datetime.fromisoformat(epoch_time)
    if moment.tzinfo is None:
        raise ValueError(f"the time {epoch_time!r} has no zone")
    literal = moment.astimezone(UTC).strftime("TIMESTAMP '%Y-%m-%dT%H:%M:%S.%fZ'")
    tokens = read_tokens(query)
    spans = [
        (token.start, tokens[at + 2].end, literal)
        for at, token in enumerate(tokens)
        if token.word == EPOCH_TIME and is_call(tokens, at)
    ]
    return _replace(query, spans)


def bind_tables(query: str, views: Mapping[str, str]) -> str:
    """Return the query with its inputs replaced by the names of views.

    `views` maps each input to the name of its view; an input may be a port, like `totals.late`. Columns can still be
    qualified by the last part of the input's name.
    """
    from sqlglot import exp

    names = {name.lower(): view for name, view in views.items()}
    spans = []
    for tree in parse_statements(query):
        for table in tree.find_all(exp.Table):
            parts = table_parts(table)
            view = names.get(".".join(str(part.this) for part in parts).lower())
            if view is None:
                continue
            alias = "" if table.alias else f" AS {_quoted(str(parts[-1].this))}"
            spans.append((parts[0].meta["start"], parts[-1].meta["end"] + 1, f"{_quoted(view)}{alias}"))
    return _replace(query, spans)


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _replace(query: str, spans: list[tuple[int, int, str]]) -> str:
    for start, end, text in sorted(spans, reverse=True):
        query = query[:start] + text + query[end:]
    return query
