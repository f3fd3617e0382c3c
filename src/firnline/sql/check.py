"""Checks a query without Spark: it is one SELECT over exactly its inputs, and returns the same rows on every replay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from firnline.sql.query import (
    CLOSE,
    EPOCH_TIME,
    OPEN,
    Token,
    arguments,
    closing,
    inside,
    is_call,
    parse_statements,
    read_tokens,
    table_parts,
)

_ONE_QUERY = "A SQL operator is one SELECT, which may begin with WITH."

_USE_EPOCH_TIME = "Use epoch_time(), the time of the epoch: it is the same on every replay."
_CLOCK_WORDS = "CURRENT_TIMESTAMP CURRENT_DATE CURRENT_TIME LOCALTIMESTAMP LOCALTIME"
_SESSION_WORDS = "CURRENT_USER SESSION_USER USER CURRENT_CATALOG CURRENT_DATABASE CURRENT_SCHEMA"
# Functions that a query may not call: their names, why, and a hint.
_RULES = (
    (
        "RAND RANDN RANDOM UUID RANDSTR UNIFORM SHUFFLE",
        "differs on each call, and an epoch must be repeatable",
        "Derive the value from the row, e.g. xxhash64(id) or sha2(id, 256).",
    ),
    (f"NOW CURDATE GETDATE {_CLOCK_WORDS}", "reads the clock, and an epoch must be repeatable", _USE_EPOCH_TIME),
    (
        f"CURRENT_TIMEZONE VERSION {_SESSION_WORDS}",
        "depends on who runs the pipeline and where",
        "Write the value itself, or pass it as ${NAME}.",
    ),
    (
        "MONOTONICALLY_INCREASING_ID SPARK_PARTITION_ID INPUT_FILE_NAME INPUT_FILE_BLOCK_START INPUT_FILE_BLOCK_LENGTH",
        "depends on how Spark distributes the rows",
        "Set `lineage: true` on the source for the columns _firnline_file and _firnline_record.",
    ),
    ("REFLECT JAVA_METHOD TRY_REFLECT", "can run any code in the JVM", "Write an operator of your own instead."),
    ("AI_QUERY", "calls a service, and an epoch must be repeatable", "Write an operator of your own instead."),
    ("IDENTIFIER", "hides which table or function is meant", "Write the name itself."),
)
_REFUSED = {word: (why, hint) for words, why, hint in _RULES for word in words.split()}
_BARE_WORDS = frozenset(f"{_CLOCK_WORDS} {_SESSION_WORDS}".split())  # Spark also calls these without parentheses

_COLLECTING = frozenset(("COLLECT_LIST", "COLLECT_SET", "ARRAY_AGG"))
_UNORDERED = _COLLECTING | frozenset(
    ("FIRST", "FIRST_VALUE", "LAST", "LAST_VALUE", "ANY_VALUE", "MODE", "LISTAGG", "STRING_AGG")
)
_RANKING = frozenset(
    ("ROW_NUMBER", "RANK", "DENSE_RANK", "NTILE", "PERCENT_RANK", "CUME_DIST", "LAG", "LEAD", "NTH_VALUE")
)
_ORDERING = frozenset(("SORT_ARRAY", "ARRAY_SORT", "SIZE", "ARRAY_SIZE", "CARDINALITY"))
_UNORDERED_HINTS = {
    **dict.fromkeys(("FIRST", "FIRST_VALUE"), "Use min_by(value, column), or OVER (... ORDER BY ...)."),
    **dict.fromkeys(("LAST", "LAST_VALUE"), "Use max_by(value, column), or OVER (... ORDER BY ...)."),
    **dict.fromkeys(_COLLECTING, "Put sort_array(...) directly around it."),
    **dict.fromkeys(("LISTAGG", "STRING_AGG"), "Add WITHIN GROUP (ORDER BY ...)."),
    "ANY_VALUE": "Use min or max.",
    "MODE": "Use mode(column, true), which takes the lowest of equals.",
}

_SPECIAL_TIME = re.compile(r"\s*(now|today|tomorrow|yesterday)(\s+\S+)?\s*", re.IGNORECASE)
_TIME_TYPES = frozenset(("DATE", "TIMESTAMP", "TIMESTAMP_LTZ", "TIMESTAMP_NTZ", "TIME"))
_TIME_FUNCTIONS = (
    "TO_DATE TRY_TO_DATE TO_TIMESTAMP TRY_TO_TIMESTAMP TO_TIMESTAMP_LTZ TO_TIMESTAMP_NTZ TO_TIME TRY_TO_TIME"
    " UNIX_TIMESTAMP TO_UNIX_TIMESTAMP DATE_ADD DATEADD DATE_SUB DATEDIFF DATE_DIFF TIMESTAMPADD TIMESTAMPDIFF"
    " ADD_MONTHS MONTHS_BETWEEN LAST_DAY NEXT_DAY TRUNC DATE_TRUNC DATE_PART DATEPART DATE_FORMAT EXTRACT"
    " FROM_UTC_TIMESTAMP TO_UTC_TIMESTAMP CONVERT_TIMEZONE UNIX_DATE UNIX_SECONDS UNIX_MILLIS UNIX_MICROS"
    " YEAR QUARTER MONTH WEEKOFYEAR WEEKDAY DAY DAYNAME MONTHNAME DAYOFMONTH DAYOFWEEK DAYOFYEAR HOUR MINUTE SECOND"
)
_TIME_CALLS = _TIME_TYPES | frozenset(_TIME_FUNCTIONS.split())


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a query; `line` counts from its first line."""

    message: str
    hint: str | None = None
    line: int | None = None


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
        return [Finding("|> is not supported", "Write the query with SELECT and subqueries.", pipe.line)]
    bad_calls = list(_check_calls(tokens))
    try:
        trees = parse_statements(query)
    except ParseError as error:
        # A finding about a call is clearer than the point where the parser gave up.
        return bad_calls or [_syntax(error)]
    except RecursionError:
        return [Finding("nested too deeply")]
    if len(trees) != 1:
        return [Finding(f"must be one statement, not {len(trees)}", _ONE_QUERY)]
    findings = [*_statement(trees[0]), *bad_calls, *_tables(trees[0], inputs), *_rows(trees[0], tokens)]
    return list(dict.fromkeys(findings))


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
            yield Finding(f'"{name}" is defined twice after WITH', "Give one of them another name.", line)
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
    """Check that the rows and their column names are the same on every replay."""
    from sqlglot import exp

    for node in tree.walk():
        if isinstance(node, exp.TableSample):
            yield Finding("TABLESAMPLE returns other rows each time", "Filter by the rows' own values instead.")
        elif isinstance(node, exp.Placeholder | exp.Parameter):
            yield Finding("parameters are not supported", "Write the value itself, or pass it as ${NAME}.")
        elif isinstance(node, exp.Query) and not node.args.get("order"):
            for key in ("limit", "offset"):
                if node.args.get(key) is not None:
                    word = node.args[key].key.upper()
                    yield Finding(f"{word} without ORDER BY returns other rows each time", "Add ORDER BY before it.")
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
    """Find words like CURRENT_DATE without parentheses: Spark takes them for calls if no such column exists."""
    from sqlglot import exp

    if isinstance(node, exp.Column) and not node.table:
        word = node.name.upper()
    elif isinstance(node, exp.Func) and not isinstance(node, exp.Anonymous):
        word = next((name for name in node.sql_names() if name in _BARE_WORDS), "")
    else:
        return
    lines = [t.line for at, t in enumerate(tokens) if t.word == word and not is_call(tokens, at)]
    if word in _BARE_WORDS and lines:
        yield _refuse_bare(word, lines[0])


def _first_line(tokens: Sequence[Token], word: str) -> int | None:
    return next((token.line for token in tokens if token.word == word), None)


def _line(identifier: Any) -> int | None:
    line = identifier.meta.get("line")
    return int(line) if line else None


# --- calls that a replay would answer differently -------------------------------------------------------


def _check_calls(tokens: Sequence[Token]) -> Iterator[Finding]:
    """Find calls that would return other rows when an epoch is repeated, or that are not safe."""
    windows = _named_windows(tokens)
    for at, token in enumerate(tokens):
        if token.is_text:
            yield from _special_time(tokens, at)
        elif token.word == "USING" and tokens[at + 1 : at + 2] and tokens[at + 1].is_text:
            hint = "Write an operator of your own instead."
            yield Finding("a script cannot be run from a query", hint, token.line)
        elif token.word == "OVER":
            yield from _frame(tokens, at)
        elif is_call(tokens, at):
            yield from _call(tokens, at, windows)


def _refuse_bare(word: str, line: int | None) -> Finding:
    """Return the finding for a word like CURRENT_DATE, which Spark takes for a call."""
    why, hint = _REFUSED[word]
    return Finding(f"{word.lower()} {why}", f"{hint} If a column is meant, write its table before it.", line)


def _call(tokens: Sequence[Token], at: int, windows: dict[str, bool]) -> Iterator[Finding]:
    token, count = tokens[at], arguments(tokens, at + 1)
    name = f"{token.word.lower()}()"
    if token.word in _REFUSED:
        why, hint = _REFUSED[token.word]
        yield Finding(f"{name} {why}", hint, token.line)
    elif token.word == "UNIX_TIMESTAMP" and count == 0:
        why, _ = _REFUSED["NOW"]
        yield Finding(f"{name} without an argument {why}", "Use unix_timestamp(epoch_time()).", token.line)
    elif token.word == EPOCH_TIME and count:
        yield Finding(f"{name} takes no argument", None, token.line)
    elif token.word == "AES_ENCRYPT" and count < 5 and not _is_ecb(tokens, at + 1):
        yield Finding(
            f"{name} without an initialisation vector {_REFUSED['RAND'][0]}", "Give the vector yourself.", token.line
        )
    elif token.word in _UNORDERED and not _is_ordered(tokens, at, windows):
        hint = _UNORDERED_HINTS[token.word]
        yield Finding(f"{name} depends on the order of the rows, which is not fixed", hint, token.line)
    elif token.word in _RANKING and not _over_is_ordered(tokens, _tail(tokens, at)[0], windows):
        yield Finding(f"{name} needs a window with ORDER BY", "Write OVER (... ORDER BY ...).", token.line)


def _is_ecb(tokens: Sequence[Token], at: int) -> bool:
    return any(token.is_text and token.text.upper() == "ECB" for token in inside(tokens, at))


def _is_ordered(tokens: Sequence[Token], at: int, windows: dict[str, bool]) -> bool:
    word, (tail, grouped) = tokens[at].word, _tail(tokens, at)
    if grouped or _over_is_ordered(tokens, tail, windows):
        return True
    if word == "MODE":
        return arguments(tokens, at + 1) == 2 and tokens[closing(tokens, at + 1) - 1].word == "TRUE"
    if word not in _COLLECTING or at < 2 or tokens[at - 1].word != OPEN or tokens[at - 2].word not in _ORDERING:
        return False
    # A comparator may call two values equal that are not.
    return tokens[at - 2].word != "ARRAY_SORT" or arguments(tokens, at - 1) == 1


def _tail(tokens: Sequence[Token], at: int) -> tuple[int, bool]:
    """Return the index after a call and its clauses before OVER, and whether WITHIN GROUP is among them."""
    index, grouped = closing(tokens, at + 1) + 1, False
    while index < len(tokens):
        words = [token.word for token in tokens[index : index + 2]]
        if words[0] in ("IGNORE", "RESPECT"):
            index += 2
        elif words[0] == "FILTER":
            index = closing(tokens, index + 1) + 1
        elif words == ["WITHIN", "GROUP"] or words[0] == "WITHIN GROUP":
            grouped = True
            index = closing(tokens, index + (2 if words[0] == "WITHIN" else 1)) + 1
        else:
            break
    return index, grouped


def _over_is_ordered(tokens: Sequence[Token], at: int, windows: dict[str, bool]) -> bool:
    if at + 1 >= len(tokens) or tokens[at].word != "OVER":
        return False
    after = tokens[at + 1]
    return _is_ordered_window(tokens, at + 1) if after.word == OPEN else windows.get(after.word, False)


def _is_ordered_window(tokens: Sequence[Token], at: int) -> bool:
    return any(token.word in ("ORDER BY", "SORT BY") for token in inside(tokens, at))


def _named_windows(tokens: Sequence[Token]) -> dict[str, bool]:
    """Return the windows that WINDOW names, and whether they are ordered; of two with one name, both must be."""
    ordered: dict[str, bool] = {}
    for at, token in enumerate(tokens):
        index = at + 1
        while token.word == "WINDOW" and [t.word for t in tokens[index + 1 : index + 3]] == ["AS", OPEN]:
            name = tokens[index].word
            ordered[name] = _is_ordered_window(tokens, index + 2) and ordered.get(name, True)
            index = closing(tokens, index + 2) + 1
            if tokens[index : index + 1] and tokens[index].word == ",":
                index += 1
    return ordered


def _frame(tokens: Sequence[Token], at: int) -> Iterator[Finding]:
    """Require ORDER BY for a window frame, unless the frame covers all rows."""
    if at + 1 >= len(tokens) or tokens[at + 1].word != OPEN or _is_ordered_window(tokens, at + 1):
        return
    words = [token.word for token in inside(tokens, at + 1)]
    if ("ROWS" in words or "RANGE" in words) and words.count("UNBOUNDED") < 2:
        line = tokens[at].line
        yield Finding("a window with a frame needs ORDER BY", "Write OVER (... ORDER BY ... ROWS ...).", line)


def _special_time(tokens: Sequence[Token], at: int) -> Iterator[Finding]:
    """Find texts like 'now' and 'today' that Spark converts to a date or time by the clock."""
    token = tokens[at]
    if not _SPECIAL_TIME.fullmatch(token.text):
        return
    before = tokens[at - 1].word if at else ""
    after = [t.word for t in tokens[at + 1 : at + 3]]
    cast = after[:1] in (["AS"], ["::"]) and after[1:] and after[1] in _TIME_TYPES
    if before in _TIME_TYPES or cast or _called(tokens, at) in _TIME_CALLS:
        why, hint = _REFUSED["NOW"]
        yield Finding(f"'{token.text.strip()}' as a date or time {why}", hint, token.line)


def _called(tokens: Sequence[Token], at: int) -> str:
    """Return the name of the innermost function call around this token."""
    depth = 0
    for index in range(at - 1, 0, -1):
        depth += {CLOSE: 1, OPEN: -1}.get(tokens[index].word, 0)
        if depth < 0:
            return tokens[index - 1].word
    return ""
