"""Functions that a query may not call, or only with an order, because their result would differ on a replay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from firnline.sql.reading import CLOSE, OPEN, Finding, Token, arguments, closing, inside, is_call

EPOCH_TIME = "EPOCH_TIME"

_USE_EPOCH_TIME = "Use epoch_time(), the time of the epoch: it is the same on every replay."
_CLOCK_WORDS = "CURRENT_TIMESTAMP CURRENT_DATE CURRENT_TIME LOCALTIMESTAMP LOCALTIME"
_SESSION_WORDS = "CURRENT_USER SESSION_USER USER CURRENT_CATALOG CURRENT_DATABASE CURRENT_SCHEMA"
_RULES = (
    (
        "RAND RANDN RANDOM UUID RANDSTR UNIFORM SHUFFLE",
        "gives something else each time, and an epoch must be repeatable",
        "Derive the value from the row, e.g. xxhash64(id) or sha2(id, 256).",
    ),
    (f"NOW CURDATE GETDATE {_CLOCK_WORDS}", "reads the clock, and an epoch must be repeatable", _USE_EPOCH_TIME),
    (
        f"CURRENT_TIMEZONE VERSION {_SESSION_WORDS}",
        "depends on who runs the pipeline and where",
        "Write the value itself, or bring it in with ${NAME}.",
    ),
    (
        "MONOTONICALLY_INCREASING_ID SPARK_PARTITION_ID INPUT_FILE_NAME INPUT_FILE_BLOCK_START INPUT_FILE_BLOCK_LENGTH",
        "depends on how Spark spreads the rows",
        "Set `lineage: true` on the source for the columns _firnline_file and _firnline_record.",
    ),
    ("REFLECT JAVA_METHOD TRY_REFLECT", "can run any code in the JVM", "Write an operator of your own instead."),
    ("AI_QUERY", "calls a service, and an epoch must be repeatable", "Write an operator of your own instead."),
    ("IDENTIFIER", "hides which table or function is meant", "Write the name itself."),
)
_REFUSED = {word: (why, hint) for words, why, hint in _RULES for word in words.split()}
BARE_WORDS = frozenset(f"{_CLOCK_WORDS} {_SESSION_WORDS}".split())  # Spark takes these for calls without brackets too

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


def check_calls(tokens: Sequence[Token]) -> Iterator[Finding]:
    """Find calls that would give other rows when an epoch is repeated, or that are not safe."""
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


def refuse_bare(word: str, line: int | None) -> Finding:
    """Return the finding for a word like CURRENT_DATE, which Spark takes for a call without brackets."""
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
    """Return the place after a call and its clauses up to OVER, and whether WITHIN GROUP is among them."""
    place, grouped = closing(tokens, at + 1) + 1, False
    while place < len(tokens):
        words = [token.word for token in tokens[place : place + 2]]
        if words[0] in ("IGNORE", "RESPECT"):
            place += 2
        elif words[0] == "FILTER":
            place = closing(tokens, place + 1) + 1
        elif words == ["WITHIN", "GROUP"] or words[0] == "WITHIN GROUP":
            grouped = True
            place = closing(tokens, place + (2 if words[0] == "WITHIN" else 1)) + 1
        else:
            break
    return place, grouped


def _over_is_ordered(tokens: Sequence[Token], at: int, windows: dict[str, bool]) -> bool:
    if at + 1 >= len(tokens) or tokens[at].word != "OVER":
        return False
    after = tokens[at + 1]
    return _is_ordered_window(tokens, at + 1) if after.word == OPEN else windows.get(after.word, False)


def _is_ordered_window(tokens: Sequence[Token], at: int) -> bool:
    return any(token.word in ("ORDER BY", "SORT BY") for token in inside(tokens, at))


def _named_windows(tokens: Sequence[Token]) -> dict[str, bool]:
    """Return the windows that WINDOW names, and whether they are ordered; of two with one name, the worse."""
    found: dict[str, bool] = {}
    for at, token in enumerate(tokens):
        place = at + 1
        while token.word == "WINDOW" and [t.word for t in tokens[place + 1 : place + 3]] == ["AS", OPEN]:
            name = tokens[place].word
            found[name] = _is_ordered_window(tokens, place + 2) and found.get(name, True)
            place = closing(tokens, place + 2) + 1
            if tokens[place : place + 1] and tokens[place].word == ",":
                place += 1
    return found


def _frame(tokens: Sequence[Token], at: int) -> Iterator[Finding]:
    """Require an order for a frame of rows, unless the frame has all of them."""
    if at + 1 >= len(tokens) or tokens[at + 1].word != OPEN or _is_ordered_window(tokens, at + 1):
        return
    words = [token.word for token in inside(tokens, at + 1)]
    if ("ROWS" in words or "RANGE" in words) and words.count("UNBOUNDED") < 2:
        line = tokens[at].line
        yield Finding("a window with a frame needs ORDER BY", "Write OVER (... ORDER BY ... ROWS ...).", line)


def _special_time(tokens: Sequence[Token], at: int) -> Iterator[Finding]:
    """Find 'now' and 'today', which Spark turns into the clock's time when it makes a date or a time of them."""
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
    """Return the function whose bracket is the nearest around this place."""
    depth = 0
    for place in range(at - 1, 0, -1):
        depth += {CLOSE: 1, OPEN: -1}.get(tokens[place].word, 0)
        if depth < 0:
            return tokens[place - 1].word
    return ""
