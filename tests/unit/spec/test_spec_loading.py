"""Finding and reading files: lines, variables, overrides and messages."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.errors import SpecError
from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions, StoreOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.spec.build import load_options
from firnline.spec.loading import find_spec, load_spec, parse_spec
from tests.support.pipelines import delta_table, file_source

EXAMPLE = """\
name: flights
sources:
  flights:
    type: files
    path: in                 # folder, glob or URI (local, s3://, gs://, az://); relative to the spec file
    format: ndjson           # compression by suffix: .gz, .zst, none
    poll_interval_secs: 10
sinks:
  - type: delta
    table: out               # path or URI, created when missing
    partition_by: [month]
batch: {max_files: 1000, max_bytes: 1073741824, max_events: 5000000, max_ms: 60000, max_output_files: 10}
"""
SMALL = """\
name: p
sources:
  s:
    path: in
sinks:
  - table: out
"""


def write(folder: Path, text: str, name: str = "firnline.yml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def error_of(folder: Path, text: str, **environ: str) -> SpecError:
    write(folder, text)
    with pytest.raises(SpecError) as caught:
        load_spec(environ=environ, cwd=folder)
    return caught.value


def options_of(folder: Path, text: str, **environ: str) -> PipelineOptions:
    write(folder, text)
    return load_options(environ=environ, cwd=folder)


# --- the example -----------------------------------------------------------------------------------------


def test_the_example_loads_exactly(tmp_path: Path) -> None:
    assert options_of(tmp_path, EXAMPLE) == PipelineOptions(
        name="flights",
        sources=(FileSourceOptions("flights", str(tmp_path / "in"), min_age_secs=2),),
        sinks=(DeltaSinkOptions("delta-1", str(tmp_path / "out"), input="flights", partition_by=("month",)),),
        batch=BatchOptions(
            max_files=1000, max_bytes=1073741824, max_events=5_000_000, max_ms=60_000, max_output_files=10
        ),
        checkpoint=CheckpointOptions(store=StoreOptions(path=str(tmp_path / "data" / "firnline_checkpoints"))),
    )


# --- finding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["firnline.yml", "firnline.yaml"])
def test_the_nearest_file_upwards_is_found(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, SMALL, name)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_spec(cwd=deep) == path
    assert load_options(environ={}, cwd=deep).sources[0].location == str(tmp_path / "in")


def test_a_file_or_folder_may_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "etc", SMALL, "orders.yaml")
    default = write(tmp_path / "other", SMALL)
    assert find_spec("etc/orders.yaml", cwd=tmp_path) == path
    assert find_spec(tmp_path / "other") == default


def test_both_names_in_one_folder_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    write(tmp_path, SMALL, "firnline.yaml")
    with pytest.raises(SpecError) as caught:
        find_spec(cwd=tmp_path)
    assert caught.value.message == f"{tmp_path} holds both firnline.yml and firnline.yaml"
    assert caught.value.hint == "Delete or rename one, or name the file."


def test_no_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        find_spec(tmp_path)
    assert caught.value.message == f"no firnline.yml in {tmp_path}"
    assert caught.value.hint == "`firnline init` writes one; or name the file."
    with pytest.raises(SpecError, match=r"^x\.yml: no such file$"):
        find_spec("x.yml", cwd=tmp_path)


def test_no_file_in_any_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.spec.loading.FILE_NAMES", ("no-such-name.yml",))
    with pytest.raises(SpecError, match=r"^no no-such-name\.yml in .* or the folders above it$"):
        find_spec(cwd=tmp_path)


# --- messages --------------------------------------------------------------------------------------------


def test_a_misspelt_key_is_told_once_with_line_and_suggestion(tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL.replace("table:", "tabel:"))
    assert error.message == 'firnline.yml:6: sinks[0].tabel: unknown key (did you mean "table"?)'
    assert error.hint == "Write `table` instead of `tabel`."
    assert error.fields["file"] == "firnline.yml"
    assert error.fields["line"] == 6
    assert error.fields["key"] == "sinks[0].tabel"
    assert error.exit_code == 2


def test_all_problems_are_told_together_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
sinks:
  - tabel: out
    partition_by: month
sources:
  s:
    poll_interval_secs: often
    late_files: ingset
    evolution: add
    schema: {evolution: ad}
batch: {max_records: 5, max_file: 1, respect_source_tx: 7}
lineage: true
operators: {}
zzz: 1
"""
    assert error_of(tmp_path, text).message.splitlines() == [
        "firnline.yml:1: name: missing",
        'firnline.yml:2: sinks[0].tabel: unknown key (did you mean "table"?)',
        'firnline.yml:3: sinks[0].partition_by: must be a list, not "month" (write [month])',
        "firnline.yml:5: sources.s.path: missing",
        "firnline.yml:6: sources.s.poll_interval_secs: must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), "
        'not "often"',
        'firnline.yml:7: sources.s.late_files: must be one of ingest, ignore, fail, not "ingset" '
        '(did you mean "ingest"?)',
        "firnline.yml:8: sources.s.evolution: unknown key here (it belongs in sources.<name>.schema)",
        'firnline.yml:9: sources.s.schema.evolution: must be one of add, rescue, fail, not "ad" (did you mean "add"?)',
        "firnline.yml:10: batch.respect_source_tx: must be true or false, not 7",
        'firnline.yml:10: batch.max_records: unknown key (did you mean "max_events"?)',
        'firnline.yml:10: batch.max_file: unknown key (did you mean "max_files"?)',
        "firnline.yml:11: lineage: unknown key here (it belongs in sources.<name>)",
        "firnline.yml:12: operators: must be a list, not a mapping",
        "firnline.yml:13: zzz: unknown key "
        "(known: name, sources, operators, sinks, home, state, batch, restart, checkpoint, staging, outbox, spark)",
    ]


def test_a_missing_key_is_told_at_the_part_that_lacks_it(tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL.replace("path: in", "format: ndjson"))
    assert error.message == "firnline.yml:3: sources.s.path: missing"
    assert error.hint == "Add `path: ...` to sources.s."


def test_an_unknown_key_without_a_value_is_still_told(tmp_path: Path) -> None:
    assert error_of(tmp_path, SMALL + "bach:\n").message == (
        'firnline.yml:7: bach: unknown key (did you mean "batch"?)'
    )


def test_a_key_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    text = SMALL + "batch:\n  max_files: 1\n  max_files: 2\n"
    assert error_of(tmp_path, text).message == (
        "firnline.yml:9: batch.max_files: the key is there twice (first on line 8)"
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("name: p\n  sinks: 1\n", "firnline.yml:2: not valid YAML: mapping values are not allowed here",
         "Look at the indentation, the colons and the brackets near that line."),
        ("name: p\nsinks:\n\t- a\n",
         "firnline.yml:3: not valid YAML: found character '\\t' that cannot start any token",
         "Indent with spaces; YAML allows no tabs there."),
        ("name: p\nbatch: {max_files: ${N}}\n",
         "firnline.yml:2: not valid YAML: expected ',' or '}', but got '{'",
         'Inside { } and [ ] put references in quotes: "${NAME}".'),
        ("name: p\n---\nname: q\n", "firnline.yml:2: not valid YAML: only one YAML document is allowed", None),
        ("name: p\nx: \x07\n",
         "firnline.yml:2: not valid YAML: a character that YAML does not allow: '\\x07'", None),
        ("a: &a [*a]\n", "firnline.yml:1: not valid YAML: nested too deeply, or an alias that holds itself", None),
        ("a: " + "[" * 5000 + "\n",
         "firnline.yml:1: not valid YAML: nested too deeply, or an alias that holds itself", None),
        ("", "firnline.yml: the file is empty", "`firnline init` writes a spec."),
        ("# nothing\n", "firnline.yml: the file is empty", "`firnline init` writes a spec."),
        ("- a\n", "firnline.yml:1: must be a mapping that starts with `name: ...`", None),
        (SMALL + "spark: !!python/name:os.system x\n",
         'firnline.yml:7: spark: the tag "!!python/name:os.system" is not allowed', None),
        (SMALL + "? [a]\n: 1\n", "firnline.yml:7: a key must be plain text, not a list or a mapping", None),
    ],
)  # fmt: skip
def test_text_that_is_no_spec_is_told_with_its_line(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    error = error_of(tmp_path, text)
    assert error.message == message
    assert hint is None or error.hint == hint


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    assert "nested too deeply" in error_of(tmp_path, "\n".join(lines)).message


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_bytes(b"name: p\nx: \xff\n")
    with pytest.raises(SpecError, match=r"^firnline\.yml:2: not UTF-8 text$"):
        load_spec(environ={}, cwd=tmp_path)
    (tmp_path / "firnline.yml").write_bytes(b" " * (1024 * 1024 + 1))
    with pytest.raises(SpecError, match="larger than 1048576 bytes"):
        load_spec(environ={}, cwd=tmp_path)


def test_a_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load_spec(environ={}, cwd=tmp_path).spec.name == "p"


def test_a_file_elsewhere_is_named_in_full(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "name: p\n")
    (tmp_path / "b").mkdir()
    with pytest.raises(SpecError) as caught:
        load_spec(path, environ={}, cwd=tmp_path / "b")
    assert caught.value.message.startswith(f"{path}:1: sources: missing")


def test_the_error_survives_pickling(tmp_path: Path) -> None:
    error = error_of(tmp_path, "nam: p\n")
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint, again.fields) == (error.message, error.hint, error.fields)


def test_merge_keys_and_times_are_read_as_written(tmp_path: Path) -> None:
    text = """\
name: p
sources:
  s: {path: in, start_after: 2026-11-01T00:00:00Z}
sinks:
  - &first {table: a, file_size_mb: 64, partition_by: [day]}
  - {<<: *first, table: b}
"""
    built = options_of(tmp_path, text)
    assert file_source(built).start_after == "2026-11-01T00:00:00Z"
    assert built.sinks[1] == DeltaSinkOptions(
        "delta-2", str(tmp_path / "b"), input="s", file_size=64 * 1024 * 1024, partition_by=("day",)
    )


def test_an_anchor_may_be_used_again(tmp_path: Path) -> None:
    text = SMALL.replace("path: in", "path: &a in").replace("table: out", "table: &a out") + "batch: {max_files: 1}\n"
    assert options_of(tmp_path, text).sources[0].location == str(tmp_path / "in")


def test_numbers_are_read_as_yaml_writes_them(tmp_path: Path) -> None:
    batch = options_of(tmp_path, SMALL + "batch: {max_bytes: 1e9, max_files: 0x10, max_events: 1_000}\n").batch
    assert (batch.max_bytes, batch.max_files, batch.max_events) == (1_000_000_000, 16, 1000)


# --- variables -------------------------------------------------------------------------------------------


def test_variables_are_filled_in(tmp_path: Path) -> None:
    text = SMALL.replace("path: in", "path: ${ROOT}/in-${DAY:-all}") + "batch:\n  max_files: ${N:-7}\n"
    built = options_of(tmp_path, text, ROOT="/data", DAY="")
    assert built.sources[0].location == "/data/in-all"
    assert built.batch.max_files == 7
    assert options_of(tmp_path, text, ROOT="/data", N="9").batch.max_files == 9


def test_quoted_variables_stay_text_and_double_dollars_escape(tmp_path: Path) -> None:
    text = SMALL.replace("path: in", "path: 'a$${b}'").replace("name: p", 'name: "${NAME}"')
    built = options_of(tmp_path, text, NAME="123")
    assert built.name == "123"
    assert built.sources[0].location == str(tmp_path / "a${b}")


def test_a_variable_brings_no_structure(tmp_path: Path) -> None:
    assert options_of(tmp_path, SMALL.replace("path: in", "path: ${X}"), X="/a: {b}").sources[0].location == "/a: {b}"


def test_an_unset_variable_is_told_with_line_and_key(tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL.replace("path: in", "path: ${INPUT}/x"))
    assert error.message == "firnline.yml:4: sources.s.path: environment variable INPUT is not set"
    assert error.hint == "Set it, e.g. `export INPUT=...`, or write ${INPUT:-default}."


@pytest.mark.parametrize("text", ["${}", "${a-b}", "${A:x}", "${A", "${A:-${B}"])
def test_what_is_no_reference_is_told(tmp_path: Path, text: str) -> None:
    error = error_of(tmp_path, SMALL.replace("path: in", f"path: '{text}'"))
    assert error.message == f'firnline.yml:4: sources.s.path: "{text}" is not a reference'
    assert error.hint == "Write ${NAME} or ${NAME:-default}; for a plain ${ write $${."


# --- overrides -------------------------------------------------------------------------------------------


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    built = options_of(
        tmp_path,
        EXAMPLE,
        FIRNLINE__BATCH__MAX_FILES="7",
        FIRNLINE__SOURCES__FLIGHTS__LINEAGE="true",
        FIRNLINE__SOURCES__FLIGHTS__SCHEMA__EVOLUTION="fail",
        FIRNLINE__SINKS__0__PARTITION_BY__1="day",
        FIRNLINE__SINKS__1__TABLE="copy",
        FIRNLINE__SPARK__SPARK_MASTER="local[2]",
        FIRNLINE__SPARK__SPARK_DRIVER_MEMORYOVERHEAD="1g",
        FIRNLINE__RESTART__BACKOFF_SECS="0.5",
        OTHER__NAME="ignored",
    )
    assert built.batch.max_files == 7
    assert built.sources[0].lineage is True
    assert built.sources[0].schema.evolution == "fail"
    assert delta_table(built).partition_by == ("month", "day")
    assert built.sinks[1].location == str(tmp_path / "copy")
    assert built.spark == {"spark.master": "local[2]", "spark.driver.memoryOverhead": "1g"}
    assert built.restart.backoff_secs == 0.5


def test_an_override_matches_names_with_other_signs(tmp_path: Path) -> None:
    text = SMALL.replace("  s:", "  My-Source.1:")
    assert options_of(tmp_path, text, FIRNLINE__SOURCES__MY_SOURCE_1__PATH="/x").sources[0].location == "/x"


def test_an_override_heals_what_it_replaces(tmp_path: Path) -> None:
    text = SMALL.replace("path: in", "path: ${UNSET}") + "batch: 5\n"
    built = options_of(tmp_path, text, FIRNLINE__SOURCES__S__PATH="/x", FIRNLINE__BATCH="")
    assert built.sources[0].location == "/x"
    assert built.batch == BatchOptions()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FIRNLINE__BATCH__MAX_FILS", "1",
         'FIRNLINE__BATCH__MAX_FILS: batch.max_fils: unknown key (did you mean "max_files"?)'),
        ("FIRNLINE__BATCH__MAX_FILES", "0", "FIRNLINE__BATCH__MAX_FILES: batch.max_files: must be at least 1, not 0"),
        ("FIRNLINE__SINKS__5__TABLE", "x", "FIRNLINE__SINKS__5__TABLE: sinks: has 1 items; 5 is too high"),
        ("FIRNLINE__SINKS__A__TABLE", "x",
         'FIRNLINE__SINKS__A__TABLE: sinks: a list is reached by number, not by "a"'),
        ("FIRNLINE__NAME__X", "x",
         'FIRNLINE__NAME__X: name: holds a single value; "x" cannot be set below it'),
        ("FIRNLINE____X", "x", "FIRNLINE____X: not a key path (two underscores lead one level down)"),
        ("FIRNLINE__SPARK__SPARK_JARS", "x",
         'FIRNLINE__SPARK__SPARK_JARS: spark["spark.jars"]: not allowed in a spec: it brings code into Spark'),
    ],
)  # fmt: skip
def test_a_wrong_override_is_told_by_its_variable(tmp_path: Path, variable: str, value: str, message: str) -> None:
    assert error_of(tmp_path, SMALL, **{variable: value}).message == message


def test_an_override_that_could_mean_two_keys_is_refused(tmp_path: Path) -> None:
    text = SMALL + "spark: {spark.log.level: INFO, spark.log_level: INFO}\n"
    message = error_of(tmp_path, text, FIRNLINE__SPARK__SPARK_LOG_LEVEL="WARN").message
    assert "FIRNLINE__SPARK__SPARK_LOG_LEVEL: spark: SPARK_LOG_LEVEL could mean spark.log.level or" in message


def test_overrides_alone_can_make_a_spec(tmp_path: Path) -> None:
    built = options_of(
        tmp_path, "", FIRNLINE__NAME="p", FIRNLINE__SOURCES__S__PATH="in", FIRNLINE__SINKS__0__TABLE="out"
    )
    assert (built.name, built.sources[0].name, built.sinks[0].name) == ("p", "s", "delta-1")


# --- whatever the text -----------------------------------------------------------------------------------

WORDS = [*"\n\n\n  :-[]{},&*!<'\"#$|>?%@~", ": ", "- ", "\n  ", "${", "${A}", "}", "<<", "*a", "&a ", "!!int ", "---\n"]
WORDS += [
    "name",
    "sources",
    "sinks",
    "path",
    "table",
    "batch",
    "max_files",
    "spark",
    "schema",
    "fields",
    "1e9",
    "0x",
    "5",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(WORDS)
KEYS = st.sampled_from([w for w in WORDS if w.isidentifier()]) | st.integers() | st.none()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(WORDS), max_size=25).map("".join) | st.text(max_size=40))
def test_any_text_is_a_spec_or_a_spec_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "firnline.yml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(SpecError):
        load_spec(environ={"A": "x"}, cwd=tmp_path)


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(st.sampled_from(["name", "sources", "operators", "sinks", "batch", "state", "spark", "x"]), VALUES)
)
def test_any_mapping_is_a_spec_or_a_spec_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(SpecError):
        parse_spec(data)


# --- what is loaded --------------------------------------------------------------------------------------


def test_a_wrong_spec_is_answered_without_spark_arrow_or_delta(tmp_path: Path) -> None:
    write(tmp_path, SMALL.replace("table:", "tabel:"))
    program = """
import sys
from firnline.errors import SpecError
from firnline.spec.build import load_options
import firnline.spec.models, firnline.spec.template
try:
    load_options(environ={})
except SpecError as error:
    assert "did you mean" in error.message
else:
    raise SystemExit("no error")
heavy = {"pyspark", "pyarrow", "deltalake", "numpy", "pandas", "duckdb", "numba", "obstore"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
