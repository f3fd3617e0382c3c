"""What a command says when it fails: one wording, the path or the line to look at, and a command to paste."""

from __future__ import annotations

import ast
import re
import shutil
from decimal import Decimal
from io import StringIO
from pathlib import Path

import pytest
from deltalake.exceptions import DeltaError

import firnline
from firnline.cli.common import find_spec_argument, name_spec, name_topology
from firnline.cli.main import app, run_command
from firnline.cli.output import cut_trace, print_failure
from firnline.cli.text import exact
from firnline.errors import AccessError, OperatorError, SinkError, SourceError, find_denied, hint_at_full_disk
from firnline.storage import LocalStorage
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput

# -- missing folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["committer --once", "gc", "compact", "staging"])
def test_a_missing_table_has_one_wording_and_is_not_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    missing = tmp_path / "nowhere"
    verb, *options = words.split()
    assert run_command([verb, str(missing), *options]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"Error: {missing}: no such folder"
    assert not missing.exists()


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize("words", [["dry-run"], ["run", "--once"]])
def test_a_missing_source_has_one_wording(spec: Path, capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    folder = spec.parent / "in"
    shutil.rmtree(folder)
    assert run_command([*words, "-f", str(spec)]) == 2
    assert f"Error: {folder}: no such folder" in capfd.readouterr().err
    assert not folder.exists()


def test_status_works_without_its_source(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = finished.parent / "in" if finished.is_file() else finished / "in"
    shutil.rmtree(folder)
    assert run_command(["status"]) == 0
    (warning,) = [record for record in caplog.records if record.message == "the source cannot be listed"]
    assert warning.__dict__["reason"] == f"{folder}: no such folder"


# -- permissions --------------------------------------------------------------------------------------


def test_denied_access_is_found_in_causes_and_texts() -> None:
    def caused(error: BaseException) -> SinkError:
        failure = SinkError("the table cannot be read")
        failure.__cause__ = error
        return failure

    for error in (
        PermissionError(13, "Permission denied", "/data/out/x"),
        DeltaError("Unable to open file /data/out/x: Permission denied (os error 13)"),
        RuntimeError("a task failed: [Errno 13] Permission denied: '/data/out/x'"),
    ):
        denied = find_denied(caused(error))
        assert denied is not None
        assert denied.message.startswith("/data/out/x: permission denied for user ")
    assert find_denied(caused(OSError(28, "No space left on device", "/data/out/x"))) is None
    assert not AccessError(path="/x").retryable


@pytest.mark.parametrize(
    "cause",
    [
        OSError(28, "No space left on device", "/data/out/x"),
        DeltaError("Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)"),
        RuntimeError("a task failed: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_is_named(cause: Exception) -> None:
    failure = SourceError("the source cannot be read")
    failure.__cause__ = cause
    hint_at_full_disk(failure)
    assert failure.hint.startswith("The disk is full: free some space")
    assert ("/data/out/x" in failure.hint) == isinstance(cause, OSError)
    other = SourceError("the source cannot be read")
    before = other.hint
    hint_at_full_disk(other)
    assert other.hint == before


def test_a_source_that_may_not_be_listed_is_not_tried_again(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sample.add("a.json", 1)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path.parent))

    monkeypatch.setattr(LocalStorage, "list", denied)
    run = run_once(make_options(attempts=50))
    assert (run.exit_code, run.error_code) == (1, "access")
    assert len(run.told.troubles) == 1
    assert str(path.parent) in run.told.troubles[0].message


# -- hints to paste -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        ("firnline checkpoints delete --yes", "firnline checkpoints delete -f 'a b.yml' --yes"),
        ("See `firnline status`.", "See `firnline status -f 'a b.yml'`."),
        ("firnline run --fresh-after 3", "firnline run -f 'a b.yml' --fresh-after 3"),
        ("firnline staging TABLE --discard-from 2", "firnline staging TABLE --discard-from 2"),
        ("firnline init writes one", "firnline init writes one"),
        ("firnline sinks forget copy --yes", "firnline sinks forget -f 'a b.yml' copy --yes"),
        ("See `firnline position show`.", "See `firnline position show -f 'a b.yml'`."),
        ("firnline schema-history --table t", "firnline schema-history -f 'a b.yml' --table t"),
        ("firnline snapshot lists them", "firnline snapshot -f 'a b.yml' lists them"),
        ("firnline committer --once", "firnline committer -f 'a b.yml' --once"),
        ("firnline gc s3://lake/t --yes", "firnline gc s3://lake/t --yes"),
        ("firnline is for tables", "firnline is for tables"),
        ("firnline checkpoints show -f x.yml", "firnline checkpoints show -f x.yml"),
    ],
)
def test_a_hint_names_the_spec_that_was_named(hint: str, named: str) -> None:
    assert name_spec(hint, "a b.yml") == named
    assert name_spec(hint, None) == hint


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        ("firnline topology list", "firnline topology list --file 'a b.yml'"),
        ("firnline topology restore 4f2a --yes", "firnline topology restore --file 'a b.yml' 4f2a --yes"),
        ("repeat the `firnline topology restore` command", "repeat the `firnline topology restore` command"),
        ("firnline topology restore --from-savepoint x FILE", "firnline topology restore --from-savepoint x FILE"),
        ("firnline gc --yes", "firnline gc --yes"),
    ],
)
def test_a_hint_names_the_topology_file_that_was_named(hint: str, named: str) -> None:
    assert name_topology(hint, "a b.yml") == named
    assert name_topology(hint, None) == hint


def commands_in_hints() -> list[tuple[str, str]]:
    """The first words of every command that a hint in the sources names, with the file."""
    found = []
    for path in sorted(Path(firnline.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        hints = [one.value for one in ast.walk(tree) if isinstance(one, ast.keyword) and one.arg == "hint"]
        texts = [part for hint in hints for part in ast.walk(hint) if isinstance(part, ast.Constant)]
        found += [
            (path.name, command)
            for text in texts
            for command in re.findall(r"\bfirnline ([a-z]+(?:-[a-z]+)*)", str(text.value))
        ]
    return found


def test_hints_name_commands_that_exist() -> None:
    named = commands_in_hints()
    assert len(named) > 100
    assert [one for one in named if one[1] not in app] == []


def test_the_spec_of_a_command_line() -> None:
    assert find_spec_argument(["run", "-f", "x.yml"]) == "x.yml"
    assert find_spec_argument(["run", "--spec=x.yml", "--once"]) == "x.yml"
    assert find_spec_argument(["run", "y.yaml"]) == "y.yaml"
    assert find_spec_argument(["run", "--once"]) is None


@pytest.mark.usefixtures("no_spark")
def test_a_table_that_is_gone_is_answered_with_a_command_to_paste(
    spec: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "--once", "-f", str(spec)]) == 0
    shutil.rmtree(spec.parent / "out")
    assert run_command(["run", "--once", "-f", str(spec)]) == 1
    hint = capfd.readouterr().err.splitlines()[-1]
    command = f"firnline checkpoints delete -f {spec} --yes"
    assert hint.endswith(command)
    assert run_command(command.split()[1:]) == 0
    assert run_command(["run", "--once", "-f", str(spec)]) == 0


def test_epoch_zero_is_answered_with_what_to_use(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rollback", "--to", "0"]) == 1
    assert "firnline run --fresh-after" in capsys.readouterr().err


# -- foreign errors -----------------------------------------------------------------------------------


def failure_text(error: BaseException, *, debug: bool = False) -> str:
    stream = StringIO()
    try:
        raise error
    except BaseException as caught:
        print_failure(caught, debug=debug, stream=stream)
    return stream.getvalue()


def test_a_fault_of_a_library_is_not_called_a_bug_in_firnline() -> None:
    text = failure_text(DeltaError("log segment is broken"))
    assert "bug in Firnline" not in text
    assert "DeltaError: log segment is broken" in text


def test_stack_traces_are_cut() -> None:
    text = (
        "An error occurred while calling o1.collect.\n: java.io.IOException: no space\n"
        "\tat java.base/java.lang.Thread.run(Thread.java:840)\n\t... 12 more\n"
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: odd'
    )
    assert cut_trace(text).splitlines() == [
        "An error occurred while calling o1.collect.",
        ": java.io.IOException: no space",
        "ValueError: odd",
    ]


def test_debug_shows_the_traceback_of_a_worker() -> None:
    error = OperatorError("operator 'mine': process failed", traceback="Traceback of the worker\n")
    assert "Traceback of the worker" in failure_text(error, debug=True)
    assert "Traceback of the worker" not in failure_text(error)


# -- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1_000_000, "1000000"),
        (1e6, "1000000.0"),
        (1e16, "10000000000000000"),
        (19.99, "19.99"),
        (1e-7, "0.0000001"),
        (Decimal("1E+6"), "1000000"),
        (Decimal("0.10"), "0.10"),
        (1e300, "1e+300"),
        (float("inf"), "inf"),
        (True, True),
        ("text", "text"),
        (None, None),
    ],
)
def test_numbers_are_shown_as_they_are(value: object, text: object) -> None:
    assert exact(value) == text
