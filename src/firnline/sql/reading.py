"""A query as tokens and as a tree, in Spark's dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DIALECT = "spark"
OPEN, CLOSE = "(", ")"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a query; `line` counts from its first line."""

    message: str
    hint: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A word or sign of a query. `word` is in capitals, and empty for texts and numbers."""

    word: str
    text: str
    line: int
    start: int
    end: int  # the place after it

    @property
    def is_text(self) -> bool:
        return not self.word


def read_tokens(query: str) -> list[Token]:
    """Return the words and signs of a query; comments are left out.

    Raises:
        ValueError: a text, a quoted name or a comment does not end.
    """
    import sqlglot
    from sqlglot.errors import TokenError

    try:
        found = sqlglot.tokenize(query, read=DIALECT)
    except TokenError as error:
        raise ValueError("a text, a quoted name or a comment does not end") from error
    return [Token(_word(t), t.text, t.line, t.start, t.end + 1) for t in found]


def _word(token: Any) -> str:
    kind = token.token_type.name
    return "" if kind == "NUMBER" or "STRING" in kind else str(token.text).upper()


def is_call(tokens: Sequence[Token], at: int) -> bool:
    """Whether the word at this place is followed by an opening bracket."""
    return bool(tokens[at].word.strip(OPEN)) and at + 1 < len(tokens) and tokens[at + 1].word == OPEN


def closing(tokens: Sequence[Token], at: int) -> int:
    """Return the place of the bracket that closes the one at `at`, or the end of the query."""
    depth = 0
    for place in range(at, len(tokens)):
        depth += {OPEN: 1, CLOSE: -1}.get(tokens[place].word, 0)
        if depth == 0:
            return place
    return len(tokens)


def inside(tokens: Sequence[Token], at: int) -> Iterator[Token]:
    """Yield what stands directly between the bracket at `at` and its end, not what is nested deeper."""
    depth = 0
    for token in tokens[at + 1 : closing(tokens, at)]:
        depth -= token.word == CLOSE
        if depth == 0:
            yield token
        depth += token.word == OPEN


def arguments(tokens: Sequence[Token], at: int) -> int:
    """Return how many arguments the call whose bracket opens at `at` has."""
    direct = list(inside(tokens, at))
    return 1 + sum(token.word == "," for token in direct) if direct else 0


def parse_statements(query: str) -> list[Any]:
    """Return the trees of all statements.

    Raises:
        sqlglot.errors.ParseError: it is not SQL, as far as can be told without Spark.
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
    """Return the names that lead to a table, e.g. those of `totals.late`; none for a function's rows."""
    from sqlglot import exp

    parts = [part for key in ("catalog", "db", "this") if (part := table.args.get(key)) is not None]
    return parts if all(isinstance(part, exp.Identifier) for part in parts) else []
