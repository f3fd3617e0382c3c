"""Which queries an operator may run: one SELECT over its inputs, with the same rows on every replay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.sql import Finding, check_query

REPEATABLE = "differs on each call, and an epoch must be repeatable"
CLOCK = "reads the clock, and an epoch must be repeatable"
SESSION = "depends on who runs the pipeline and where"
SPREAD = "depends on how Spark distributes the rows"
JVM = "can run any code in the JVM"
ORDER = "depends on the order of the rows, which is not fixed"
RANKED = "needs a window with ORDER BY"

ACCEPTED = [
    "SELECT * FROM t",
    "SELECT a, b AS c FROM t WHERE a > 1 AND b IS NOT NULL",
    "select count(*), sum(x), avg(x), min(x), max(x) from t group by k having count(*) > 1",
    "WITH s AS (SELECT * FROM t) SELECT * FROM s",
    "WITH s AS (SELECT * FROM t), u AS (SELECT a FROM s) SELECT * FROM u JOIN s USING (a)",
    "(SELECT a FROM t) UNION ALL (SELECT b FROM t)",
    "SELECT a FROM t EXCEPT SELECT b FROM t",
    "SELECT DISTINCT a FROM t",
    "SELECT * FROM t ORDER BY a LIMIT 10",
    "SELECT * FROM t ORDER BY a LIMIT 10 OFFSET 5",
    "SELECT a FROM t UNION ALL SELECT b FROM t ORDER BY 1 LIMIT 3",
    "SELECT approx_count_distinct(a), percentile_approx(x, 0.5) FROM t",
    "SELECT row_number() OVER (PARTITION BY k ORDER BY ts) AS n FROM t",
    "SELECT rank() OVER w, lag(x) OVER w FROM t WINDOW w AS (PARTITION BY k ORDER BY ts)",
    "SELECT sum(x) OVER (PARTITION BY k ORDER BY ts ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM t",
    "SELECT sum(x) OVER (PARTITION BY k) FROM t",
    "SELECT sum(x) OVER (PARTITION BY k ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) FROM t",
    "SELECT first_value(x) OVER (PARTITION BY k ORDER BY ts) FROM t",
    "SELECT first(x) IGNORE NULLS OVER (PARTITION BY k ORDER BY ts) FROM t",
    "SELECT sort_array(collect_list(x)) FROM t GROUP BY k",
    "SELECT sort_array(collect_set(x), false) FROM t GROUP BY k",
    "SELECT array_sort(array_agg(x)) FROM t GROUP BY k",
    "SELECT array_join(sort_array(collect_list(x) FILTER (WHERE x > 'a')), ',') FROM t",
    "SELECT size(collect_set(x)) FROM t GROUP BY k",
    "SELECT listagg(x, ',') WITHIN GROUP (ORDER BY x) FROM t",
    "SELECT string_agg(x, ',') WITHIN GROUP (ORDER BY x DESC) FROM t",
    "SELECT mode(x, true) FROM t",
    "SELECT mode() WITHIN GROUP (ORDER BY x) FROM t",
    "SELECT min_by(x, ts), max_by(x, ts) FROM t GROUP BY k",
    "SELECT epoch_time() AS seen_at, a FROM t",
    "SELECT a FROM t WHERE ts < epoch_time() - INTERVAL 1 DAY",
    "SELECT unix_timestamp(ts), unix_timestamp(epoch_time()) AS e FROM t",
    "SELECT TIMESTAMP '2026-01-01 00:00:00Z', DATE '2026-01-01', DATE 'epoch' FROM t",
    "SELECT CAST('2026-01-01' AS DATE) FROM t",
    "SELECT * FROM t WHERE status = 'now' OR status IN ('today', 'rand()')",
    "SELECT 'current_date' AS x, concat('now', a) FROM t -- now() and rand()",
    "SELECT t.user, t.current_date, t.`uuid` FROM t",
    "SELECT rand AS r, first, version, shuffle FROM t",
    "SELECT a AS user, b AS current_date FROM t",
    "SELECT t.a, r.id FROM t CROSS JOIN range(10) AS r",
    "SELECT explode(xs) AS x FROM t",
    "SELECT k, x FROM t LATERAL VIEW explode(xs) e AS x",
    "SELECT transform(xs, x -> x + 1), filter(xs, x -> x > 0), aggregate(xs, 0, (a, b) -> a + b) FROM t",
    "SELECT /*+ BROADCAST(t) */ * FROM t",
    "SELECT a, count(*) FROM t GROUP BY window(ts, '10 minutes'), a",
    "SELECT * FROM t WHERE a IN (SELECT a FROM t WHERE b > 1) AND EXISTS (SELECT 1 FROM t AS u WHERE u.a = t.a)",
    "SELECT * FROM T",
    "SELECT * FROM `t` AS x WHERE x.`a b` = 1;",
    "SELECT xxhash64(a), sha2(a, 256), hash(a, b) FROM t",
    "SELECT aes_encrypt(a, 'k', 'ECB'), aes_encrypt(a, 'k', 'GCM', 'DEFAULT', b) FROM t",
    "SELECT a, CASE WHEN b THEN 1 ELSE 2 END, a::date, s.x.y, xs[0], m['k'] FROM t ORDER BY a NULLS LAST",
    "SELECT * FROM t PIVOT (max(x) FOR k IN ('a', 'b'))",
    "SELECT *, _op, _sequence FROM t WHERE _op <> 'delete'",
    "SELECT from_json(a, 'x INT').x, get_json_object(a, '$.b') FROM t",
    "SELECT * FROM VALUES (1, 'a') AS v(id, name) JOIN t ON t.id = v.id",
]  # fmt: skip

REFUSED = [
    ("SELECT rand() FROM t", f"rand() {REPEATABLE}"),
    ("SELECT `rand`() FROM t", f"rand() {REPEATABLE}"),
    ("SELECT system.builtin.rand() FROM t", f"rand() {REPEATABLE}"),
    ("SELECT RANDN(3) FROM t", f"randn() {REPEATABLE}"),
    ("SELECT random() FROM t", f"random() {REPEATABLE}"),
    ("SELECT uuid() FROM t", f"uuid() {REPEATABLE}"),
    ("SELECT randstr(5) FROM t", f"randstr() {REPEATABLE}"),
    ("SELECT uniform(1, 5) FROM t", f"uniform() {REPEATABLE}"),
    ("SELECT shuffle(xs) FROM t", f"shuffle() {REPEATABLE}"),
    ("SELECT * FROM t ORDER BY rand() LIMIT 3", f"rand() {REPEATABLE}"),
    ("SELECT * FROM t WHERE a IN (SELECT uuid() FROM t)", f"uuid() {REPEATABLE}"),
    ("SELECT aes_encrypt(a, 'k') FROM t", f"aes_encrypt() without an initialisation vector {REPEATABLE}"),
    ("SELECT now() FROM t", f"now() {CLOCK}"),
    ("SELECT current_timestamp() FROM t", f"current_timestamp() {CLOCK}"),
    ("SELECT current_timestamp FROM t", f"current_timestamp {CLOCK}"),
    ("SELECT current_date() FROM t", f"current_date() {CLOCK}"),
    ("SELECT CURRENT_DATE FROM t", f"current_date {CLOCK}"),
    ("SELECT `current_date` FROM t", f"current_date {CLOCK}"),
    ("SELECT date_add(current_date, 1) FROM t", f"current_date {CLOCK}"),
    ("SELECT curdate() FROM t", f"curdate() {CLOCK}"),
    ("SELECT current_time() FROM t", f"current_time() {CLOCK}"),
    ("SELECT current_time FROM t", f"current_time {CLOCK}"),
    ("SELECT localtimestamp() FROM t", f"localtimestamp() {CLOCK}"),
    ("SELECT localtimestamp FROM t", f"localtimestamp {CLOCK}"),
    ("SELECT unix_timestamp() FROM t", f"unix_timestamp() without an argument {CLOCK}"),
    ("SELECT TIMESTAMP 'now' FROM t", f"'now' as a date or time {CLOCK}"),
    ("SELECT timestamp'Today' FROM t", f"'Today' as a date or time {CLOCK}"),
    ("SELECT DATE ' tomorrow ' FROM t", f"'tomorrow' as a date or time {CLOCK}"),
    ("SELECT TIMESTAMP_NTZ 'yesterday' FROM t", f"'yesterday' as a date or time {CLOCK}"),
    ("SELECT CAST('now' AS TIMESTAMP) FROM t", f"'now' as a date or time {CLOCK}"),
    ("SELECT try_cast('now UTC' AS date) FROM t", f"'now UTC' as a date or time {CLOCK}"),
    ("SELECT 'today'::date FROM t", f"'today' as a date or time {CLOCK}"),
    ("SELECT to_date('today') FROM t", f"'today' as a date or time {CLOCK}"),
    ("SELECT date('now') FROM t", f"'now' as a date or time {CLOCK}"),
    ("SELECT datediff(ts, 'today') FROM t", f"'today' as a date or time {CLOCK}"),
    ("SELECT current_timezone() FROM t", f"current_timezone() {SESSION}"),
    ("SELECT current_user() FROM t", f"current_user() {SESSION}"),
    ("SELECT current_user FROM t", f"current_user {SESSION}"),
    ("SELECT user FROM t", f"user {SESSION}"),
    ("SELECT session_user() FROM t", f"session_user() {SESSION}"),
    ("SELECT version() FROM t", f"version() {SESSION}"),
    ("SELECT current_database() FROM t", f"current_database() {SESSION}"),
    ("SELECT monotonically_increasing_id() FROM t", f"monotonically_increasing_id() {SPREAD}"),
    ("SELECT spark_partition_id() FROM t", f"spark_partition_id() {SPREAD}"),
    ("SELECT input_file_name() FROM t", f"input_file_name() {SPREAD}"),
    ("SELECT input_file_block_start() FROM t", f"input_file_block_start() {SPREAD}"),
    ("SELECT reflect('java.lang.Runtime', 'x') FROM t", f"reflect() {JVM}"),
    ("SELECT java_method('java.util.UUID', 'randomUUID') FROM t", f"java_method() {JVM}"),
    ("SELECT try_reflect('a', 'b') FROM t", f"try_reflect() {JVM}"),
    ("SELECT ai_query('m', a) FROM t", "ai_query() calls a service, and an epoch must be repeatable"),
    ("SELECT TRANSFORM(a) USING 'cat' AS (b) FROM t", "a script cannot be run from a query"),
    ("SELECT MAP a USING 'cat' AS (b) FROM t", "a script cannot be run from a query"),
    ("SELECT first(x) FROM t", f"first() {ORDER}"),
    ("SELECT first_value(x) OVER (PARTITION BY k) FROM t", f"first_value() {ORDER}"),
    ("SELECT last(x) IGNORE NULLS FROM t", f"last() {ORDER}"),
    ("SELECT last_value(x) FROM t", f"last_value() {ORDER}"),
    ("SELECT any_value(x) FROM t", f"any_value() {ORDER}"),
    ("SELECT collect_list(x) FROM t", f"collect_list() {ORDER}"),
    ("SELECT collect_set(x) FROM t", f"collect_set() {ORDER}"),
    ("SELECT array_agg(x) FROM t", f"array_agg() {ORDER}"),
    ("SELECT array_sort(collect_list(x), (a, b) -> 0) FROM t", f"collect_list() {ORDER}"),
    ("SELECT mode(x) FROM t", f"mode() {ORDER}"),
    ("SELECT mode(x, false) FROM t", f"mode() {ORDER}"),
    ("SELECT listagg(x, ',') FROM t", f"listagg() {ORDER}"),
    ("SELECT string_agg(DISTINCT x) FROM t", f"string_agg() {ORDER}"),
    ("SELECT first(x) OVER w FROM t WINDOW w AS (PARTITION BY k)", f"first() {ORDER}"),
    ("SELECT row_number() OVER (PARTITION BY k) FROM t", f"row_number() {RANKED}"),
    ("SELECT rank() OVER () FROM t", f"rank() {RANKED}"),
    ("SELECT ntile(4) OVER w FROM t WINDOW w AS (PARTITION BY k)", f"ntile() {RANKED}"),
    ("SELECT sum(x) OVER (ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM t", "a window with a frame needs ORDER BY"),
    ("SELECT * FROM t LIMIT 5", "LIMIT without ORDER BY returns other rows each time"),
    ("SELECT * FROM t OFFSET 5", "OFFSET without ORDER BY returns other rows each time"),
    ("SELECT * FROM (SELECT * FROM t LIMIT 5) ORDER BY a", "LIMIT without ORDER BY returns other rows each time"),
    ("SELECT a FROM t UNION ALL SELECT b FROM t LIMIT 5", "LIMIT without ORDER BY returns other rows each time"),
    ("SELECT * FROM t TABLESAMPLE (10 PERCENT)", "TABLESAMPLE returns other rows each time"),
    ("SELECT epoch_time(1) AS a FROM t", "epoch_time() takes no argument"),
    ("SELECT epoch_time() FROM t", "a column made from epoch_time() needs a name"),
    ("SELECT date(epoch_time()), a FROM t", "a column made from epoch_time() needs a name"),
    ("", "the query is empty"),
    ("-- nothing", "the query is empty"),
    ("SELECT 1 FROM t; SELECT 2 FROM t", "must be one statement, not 2"),
    ("SET a = b", "must be a SELECT, not SET"),
    ("USE x", "must be a SELECT, not USE"),
    ("CREATE TABLE x AS SELECT * FROM t", "must be a SELECT, not CREATE"),
    ("INSERT INTO x SELECT * FROM t", "must be a SELECT, not INSERT"),
    ("DROP TABLE t", "must be a SELECT, not DROP"),
    ("EXPLAIN SELECT * FROM t", "must be a SELECT, not EXPLAIN"),
    ("VALUES (1)", "must be a SELECT, not VALUES"),
    ("FROM t |> LIMIT 3", "must be a SELECT, not FROM"),
    ("SELECT * FROM t |> LIMIT 3", "|> is not supported"),
    ("'x'", "must be a SELECT, not x"),
    ("SELECT 'a FROM t", "not valid SQL: a string, a quoted name or a comment is not closed"),
    ("SELECT FROM WHERE t", 'not valid SQL near "WHERE"'),
    ("SELECT * FROM t AND", 'not valid SQL near "AND"'),
    ("SELECT '${env:HOME}' FROM t", "Spark would replace ${...} in the query by something else"),
    ("SELECT :a FROM t", "parameters are not supported"),
    ("SELECT * FROM identifier('t')", "identifier() hides which table or function is meant"),
    ("SELECT * FROM t JOIN other", '"other" is not among the inputs (inputs: t)'),
    ("SELECT * FROM t JOIN parquet.`/data/x`", '"parquet./data/x" is not among the inputs (inputs: t)'),
    ("SELECT * FROM t JOIN spark_catalog.default.t AS u",
     '"spark_catalog.default.t" is not among the inputs (inputs: t)'),
    ("WITH t AS (SELECT 1) SELECT * FROM t", '"t" after WITH hides the input of that name'),
    ("WITH a AS (SELECT * FROM t), A AS (SELECT 1) SELECT * FROM a", '"A" is defined twice after WITH'),
]  # fmt: skip


@pytest.mark.parametrize("query", ACCEPTED)
def test_a_repeatable_query_is_accepted(query: str) -> None:
    assert check_query(query, ["t"]) == []


@pytest.mark.parametrize(("query", "message"), REFUSED)
def test_what_is_not_repeatable_or_not_a_query_is_refused(query: str, message: str) -> None:
    found = [finding.message for finding in check_query(query, ["t"])]
    assert message in found
    unread = 'the query does not read its input "t"'
    assert [m for m in found if m not in (message, unread)] == []


def test_every_refusal_says_what_to_do_instead() -> None:
    without = {f.message for query, _ in REFUSED for f in check_query(query, ["t"]) if f.hint is None}
    assert without == {
        "epoch_time() takes no argument",
        "not valid SQL: a string, a quoted name or a comment is not closed",
        'not valid SQL near "WHERE"',
        'not valid SQL near "AND"',
    }


def test_a_table_that_is_no_input_is_told_with_its_line_and_a_guess() -> None:
    assert check_query("SELECT *\nFROM orders\nJOIN custmers USING (id)", ["orders", "customers"]) == [
        Finding('"custmers" is not among the inputs (did you mean "customers"?)', "Write customers.", 3),
        Finding('the query does not read its input "customers"', "Read it, or remove it from `inputs`."),
    ]


@pytest.mark.parametrize("written", ["totals.late", "`totals`.`late`", "`totals.late`", "Totals.Late"])
def test_a_port_is_read_by_its_name(written: str) -> None:
    assert check_query(f"SELECT * FROM {written} AS l", ["totals.late"]) == []


def test_a_name_with_a_hyphen_is_quoted() -> None:
    assert check_query("SELECT * FROM `my-orders`", ["my-orders"]) == []


def test_a_word_that_may_be_a_column_tells_how_to_say_so() -> None:
    (finding,) = check_query("SELECT a,\n user FROM t", ["t"])
    assert finding.line == 2
    assert finding.hint is not None
    assert finding.hint.endswith("If a column is meant, write its table before it.")


def test_everything_wrong_is_told_at_once_with_its_line() -> None:
    query = "SELECT\n  rand() AS r,\n  first(x) AS f,\n  now() AS n\nFROM t"
    assert [(f.line, f.message.split(" ")[0]) for f in check_query(query, ["t"])] == [
        (2, "rand()"),
        (3, "first()"),
        (4, "now()"),
    ]


def test_a_call_is_told_even_where_the_rest_is_not_sql() -> None:
    (finding,) = check_query("SELECT rand() FROM t WHERE )", ["t"])
    assert finding.message == f"rand() {REPEATABLE}"


def test_a_query_that_is_nested_too_deeply_is_refused() -> None:
    assert check_query("SELECT " + "(" * 3000 + "1" + ")" * 3000 + " FROM t", ["t"]) == [Finding("nested too deeply")]


WORDS = [
    "SELECT",
    "WITH",
    "FROM",
    "t",
    "(",
    ")",
    ",",
    "first",
    "OVER",
    "WINDOW",
    "w",
    "AS",
    "ORDER BY",
    "ROWS",
    "'now'",
    "date",
    "cast",
    "::",
    "collect_list",
    "sort_array",
    "WITHIN GROUP",
    "FILTER",
    "IGNORE",
    "USING",
    "LIMIT",
    "1",
    "epoch_time",
    "`",
    "'",
    "--",
    "/*",
    ";",
    "|>",
    "window",
    "user",
    "mode",
    "UNION",
    ".",
    "*",
    ":a",
    "?",
    "\n",
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join) | st.text(max_size=30))
def test_any_text_is_judged(text: str) -> None:
    assert all(finding.message for finding in check_query(text, ["t"]))


@settings(max_examples=200)
@given(st.lists(st.sampled_from(WORDS), max_size=20).map(" ".join))
def test_whatever_surrounds_it_a_call_of_rand_is_never_accepted(text: str) -> None:
    assert check_query(f"SELECT rand() AS r FROM t {text}", ["t"])
