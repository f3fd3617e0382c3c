"""Fill in a query what differs from epoch to epoch: its time and the views it reads.

Only the words in question are replaced; the rest of the query reaches Spark as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from firnline.sql.calls import EPOCH_TIME
from firnline.sql.reading import is_call, parse_statements, read_tokens, table_parts


def bind_epoch_time(query: str, epoch_time: str) -> str:
    """Return the query with every `epoch_time()` replaced by a timestamp literal, exact to the microsecond.

    Args:
        query: A query that `check_query` accepts.
        epoch_time: A time in RFC 3339, with its zone.

    Raises:
        ValueError: it is no time, or has no zone.
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

    `views` has the name of a view per input; an input may be a port, like `totals.late`. Columns can still be
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
