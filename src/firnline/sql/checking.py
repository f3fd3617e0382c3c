"""Check a query without Spark: one SELECT over exactly its inputs, with the same result on every replay."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from firnline.sql.calls import BARE_WORDS, EPOCH_TIME, check_calls, refuse_bare
from firnline.sql.reading import OPEN, Finding, Token, is_call, parse_statements, read_tokens, table_parts

_ONE_QUERY = "A SQL operator is one SELECT, which may begin with WITH."


def check_query(query: str, inputs: Sequence[str]) -> list[Finding]:
    """Return everything that is wrong with the query of a SQL operator that reads these inputs."""
    from sqlglot.errors import ParseError

    if "${" in query:
        return [Finding("Spark would replace ${...} in the query by something else", "Write the value itself.")]
    try:
        tokens = read_tokens(query)
    except ValueError as error:
        return [Finding(f"not valid SQL: {error}")]
    if not tokens:
        return [Finding("the query is empty", _ONE_QUERY)]
    first = next((token for token in tokens if token.word != OPEN), tokens[0])
    if first.word not in ("SELECT", "WITH"):
        return [Finding(f"must be a SELECT, not {first.word or first.text}", _ONE_QUERY, first.line)]
    pipe = next((token for token in tokens if token.word == "|>"), None)
    if pipe is not None:
        return [Finding("|> is not in this version", "Write the query with SELECT and subqueries.", pipe.line)]
    calls = list(check_calls(tokens))
    try:
        trees = parse_statements(query)
    except ParseError as error:
        # What a call tells is clearer than where the parser gave up.
        return calls or [_syntax(error)]
    except RecursionError:
        return [Finding("nested too deeply")]
    if len(trees) != 1:
        return [Finding(f"must be one statement, not {len(trees)}", _ONE_QUERY)]
    found = [*_statement(trees[0]), *calls, *_tables(trees[0], inputs), *_rows(trees[0], tokens)]
    return list(dict.fromkeys(found))


def _syntax(error: Any) -> Finding:
    detail = error.errors[0] if error.errors else {}
    near = str(detail.get("highlight") or "").strip()
    line = detail.get("line")
    return Finding(f'not valid SQL near "{near}"' if near else "not valid SQL", None, int(line) if line else None)


def _statement(tree: Any) -> Iterator[Finding]:
    from sqlglot import exp

    if not isinstance(tree, exp.Query):
        yield Finding(f"must be a SELECT, not {tree.key.upper()}", _ONE_QUERY)
    for node in tree.find_all(exp.DML, exp.DDL, exp.Into):
        if not isinstance(node, exp.Query):
            yield Finding("must be a SELECT that writes nothing", _ONE_QUERY)


def _tables(tree: Any, inputs: Sequence[str]) -> Iterator[Finding]:
    """Check that the tables are the inputs, and that each input is read."""
    from sqlglot import exp

    known = {name.lower(): name for name in inputs}
    steps: set[str] = set()
    for cte in tree.find_all(exp.CTE):
        name, line = str(cte.alias), _line(cte.args["alias"].this)
        if name.lower() in known:
            yield Finding(f'"{name}" after WITH hides the input of that name', "Give it another name.", line)
        elif name.lower() in steps:
            yield Finding(f'"{name}" stands after WITH twice', "Give one of them another name.", line)
        steps.add(name.lower())
    read: set[str] = set()
    for table in tree.find_all(exp.Table):
        parts = table_parts(table)
        name = ".".join(str(part.this) for part in parts)
        read.add(name.lower())
        if parts and name.lower() not in known and name.lower() not in steps:
            yield _unknown(name, known, _line(parts[-1]))
    for lower, name in known.items():
        if lower not in read:
            yield Finding(f'the query does not read its input "{name}"', "Read it, or remove it from `inputs`.")


def _unknown(name: str, known: dict[str, str], line: int | None) -> Finding:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    words = f'did you mean "{known[close[0]]}"?' if close else f"inputs: {', '.join(known.values())}"
    hint = f"Write {known[close[0]]}." if close else "Add it to `inputs`, or read one of those."
    return Finding(f'"{name}" is not among the inputs ({words})', hint, line)


def _rows(tree: Any, tokens: Sequence[Token]) -> Iterator[Finding]:
    """Check that the rows and their column names do not depend on chance."""
    from sqlglot import exp

    for node in tree.walk():
        if isinstance(node, exp.TableSample):
            yield Finding("TABLESAMPLE takes other rows each time", "Filter by the rows' own values instead.")
        elif isinstance(node, exp.Placeholder | exp.Parameter):
            yield Finding("parameters are not filled in", "Write the value itself, or bring it in with ${NAME}.")
        elif isinstance(node, exp.Query) and not node.args.get("order"):
            for key in ("limit", "offset"):
                if node.args.get(key) is not None:
                    word = node.args[key].key.upper()
                    yield Finding(f"{word} without ORDER BY takes other rows each time", "Add ORDER BY before it.")
        if isinstance(node, exp.Select):
            for column in node.expressions:
                if not isinstance(column, exp.Alias) and _has_epoch_time(column):
                    hint = "Write `epoch_time() AS name`: else the column is named after the time."
                    yield Finding("a column made from epoch_time() needs a name", hint, _first_line(tokens, EPOCH_TIME))
        yield from _bare(node, tokens)


def _has_epoch_time(column: Any) -> bool:
    from sqlglot import exp

    return any(call.name.upper() == EPOCH_TIME for call in column.find_all(exp.Anonymous))


def _bare(node: Any, tokens: Sequence[Token]) -> Iterator[Finding]:
    """Find CURRENT_DATE and the like without brackets: Spark takes them for calls if no such column exists."""
    from sqlglot import exp

    if isinstance(node, exp.Column) and not node.table:
        word = node.name.upper()
    elif isinstance(node, exp.Func) and not isinstance(node, exp.Anonymous):
        word = next((name for name in node.sql_names() if name in BARE_WORDS), "")
    else:
        return
    lines = [t.line for at, t in enumerate(tokens) if t.word == word and not is_call(tokens, at)]
    if word in BARE_WORDS and lines:
        yield refuse_bare(word, lines[0])


def _first_line(tokens: Sequence[Token], word: str) -> int | None:
    return next((token.line for token in tokens if token.word == word), None)


def _line(identifier: Any) -> int | None:
    line = identifier.meta.get("line")
    return int(line) if line else None
