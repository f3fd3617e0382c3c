"""Rules that every command keeps: one order of arguments, the same options with the same meaning, a complete help."""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args

import pytest
from cyclopts import App

from firnline.cli.main import COMMANDS, app, run_command
from tests.unit.cli.conftest import RunJson

WITHOUT_PIPELINE = {"demo", "prepare", "serve", "spec-schema", "topology", "--install-completion", "--show-completion"}
ON_TABLES = {"committer", "staging", "gc", "compact"}
READ_ONLY = {
    "status", "dry-run", "checkpoints", "checkpoints show", "checkpoints diff", "savepoint list", "state", "quarantine",
    "sinks list", "dead-letters list", "trace", "position show", "schema-history", "topology show", "topology list",
    "spec-schema", "--show-completion",
}  # fmt: skip
AT_ONCE = {
    **dict.fromkeys(("pause", "resume", "stop", "checkpoint"), "controls a run, and another command takes it back"),
    **dict.fromkeys(("demo", "drill", "prepare"), "writes to a folder of its own"),
    "serve": "a service; what it starts and stops, people ask for",
    "committer": "a service; `firnline staging` shows what it would commit",
    "topology snapshot": "adds records and pins; `topology drop` deletes it",
    "topology savepoint": "adds a folder of its own, and changes no pipeline",
    "topology withdraw": "ends the holds of a restore that has changed no row; the restore can be ordered again",
    "savepoint create": "adds a folder of its own; `savepoint dispose` deletes it",
}


def walk(parent: App, *path: str) -> Iterator[tuple[tuple[str, ...], App]]:
    """All commands that do something, with their words."""
    if path and parent.default_command is not None:
        yield path, parent
    for name in parent:
        if name not in ("--help", "-h", "--version"):
            yield from walk(parent[name], *path, name)


EVERY = dict(walk(app))
VARIES = re.compile(r"just now|\d+(\.\d+)? (s|min) ago| -f \S+")  # ages, and the spec as it was given


def options(command: App) -> set[str]:
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


def first_words(command: App) -> list[str]:
    """The names of the arguments that need no option, in their order."""
    assert command.default_command is not None
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return [name for name, one in inspect.signature(command.default_command).parameters.items() if one.kind in kinds]


def named(parameter: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(parameter, list(EVERY), ids=" ".join)


def test_the_walk_finds_every_verb_and_the_commands_below_them() -> None:
    assert {words[0] for words in EVERY} == {verb for verb, _, _ in COMMANDS} | {
        "--install-completion",
        "--show-completion",
    }
    assert {("checkpoints", "show"), ("savepoint", "dispose"), ("ledger", "repair")} <= EVERY.keys()


@named("words")
def test_the_spec_is_an_option_of_every_command_on_a_pipeline(words: tuple[str, ...]) -> None:
    has = {"--spec", "-f"} <= options(EVERY[words])
    assert has == (words[0] not in WITHOUT_PIPELINE)


@named("words")
def test_the_spec_or_table_is_the_last_word_and_may_be_left_out(words: tuple[str, ...]) -> None:
    if words[0] in WITHOUT_PIPELINE:
        return
    command = EVERY[words]
    assert command.default_command is not None
    given = first_words(command)
    last = inspect.signature(command.default_command).parameters[given[-1]]
    if words[0] in ON_TABLES:
        assert given in (["table"], ["tables"])
        assert "--table" in options(command)
    elif words[0] == "state":
        assert given == ["words"]  # OPERATOR SPEC, or the older SPEC OPERATOR
    elif words[0] == "init":
        assert given == ["target"]
    else:
        assert given[-1] == "spec"
    assert last.default is not inspect.Parameter.empty or last.kind is inspect.Parameter.VAR_POSITIONAL


@named("words")
def test_every_command_writes_json_and_shows_tracebacks_on_demand(words: tuple[str, ...]) -> None:
    assert {"--json", "--debug"} <= options(EVERY[words])


@named("words")
def test_every_command_that_changes_something_has_yes_and_dry_run(words: tuple[str, ...]) -> None:
    has = options(EVERY[words]) & {"--yes", "--dry-run"}
    assert len(has) in (0, 2), "one without the other"
    assert has or " ".join(words) in READ_ONLY or AT_ONCE[" ".join(words)]


@named("words")
def test_yes_and_dry_run_have_the_same_words_wherever_a_plan_is_shown(words: tuple[str, ...]) -> None:
    text = {one.name: one.parameter.help for one in EVERY[words].assemble_argument_collection()}
    if "--dry-run" in text and words not in {("init",), ("checkpoints", "export")}:
        assert text["--dry-run"] == "Only show the plan, even with --yes."


@named("words")
def test_options_of_sizes_and_times_take_units(words: tuple[str, ...]) -> None:
    """The types of such options have one parser; a plain number with a unit in its name is an older form."""
    for argument in EVERY[words].assemble_argument_collection():
        wants_unit = re.search(
            r"-(secs|seconds|ms|mb|bytes|size|timeout|interval|grace)\b|^--(timeout|grace)", argument.name
        )
        if wants_unit and argument.parameter.show is not False:
            kinds = get_args(argument.hint) or (argument.hint,)
            assert {kind.__name__ for kind in kinds} & {"Duration", "Size"}, argument.name


def help_of(words: tuple[str, ...]) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert run_command([*words, "--help"]) == 0
    return out.getvalue()


@named("words")
def test_help_lists_output_defaults_and_two_examples(words: tuple[str, ...]) -> None:
    text = help_of(words)
    assert "Output" in text or words == ("spec-schema",), "what is written to stdout"
    examples = re.findall(r"^  (?:sudo \S*/)?(firnline .*)", text.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        assert example.split()[1 : 1 + len(words)] == list(words) or len(words) == 1, example


@named("words")
def test_help_names_the_variables_of_the_environment(words: tuple[str, ...]) -> None:
    if words[0] not in WITHOUT_PIPELINE | {"init"}:
        assert "FIRNLINE__A__B" in help_of(words)


@named("words")
def test_every_option_has_a_help_and_those_with_a_value_a_default(words: tuple[str, ...]) -> None:
    for argument in EVERY[words].assemble_argument_collection():
        if argument.parameter.show is False or not argument.show:
            continue
        assert argument.parameter.help, argument.name
        text = argument.parameter.help
        if argument.hint is bool or argument.required:
            continue
        shown = argument.parameter.show_default is not False and argument.field_info.default is not None
        assert shown or "[default:" in text or "repeatable" in text, f"{argument.name}: no default in its help"


# -- the same thing in every form ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "more"),
    [
        (["status"], []),
        (["files"], ["--limit", "1"]),
        (["quarantine"], []),
        (["dry-run"], []),
        (["checkpoints"], []),
        (["checkpoints", "show", "1"], []),
        (["checkpoints", "diff", "1", "2"], []),
        (["savepoint", "list"], []),
        (["ledger", "repair"], []),
        (["gc"], ["--dry-run"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_every_form_of_the_spec_gives_the_same_answer(
    finished: Path, capsys: pytest.CaptureFixture[str], own: list[str], more: list[str]
) -> None:
    answers = set()
    for spec in (
        [],
        ["firnline.yml"],
        ["."],
        [str(finished)],
        ["--spec", "firnline.yml"],
        ["-f", "."],
        ["-ffirnline.yml"],
    ):
        assert run_command([*own, *spec, *more]) == 0, spec
        answers.add(VARIES.sub("", capsys.readouterr().out))
    for spec in (["--spec=firnline.yml"], ["-f", str(finished.parent)]):
        assert run_command([own[0], *own[1:], *more, *spec]) == 0
        answers.add(VARIES.sub("", capsys.readouterr().out))
    assert len(answers) == 1, answers


def test_a_table_and_its_spec_are_alike_for_commands_on_tables(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = set()
    for target in (["out"], ["--table", "out"], ["-f", "firnline.yml"], ["--table", "."], []):
        assert run_command(["gc", *target, "--dry-run", "--json"]) == 0, target
        answers.add(capsys.readouterr().out)
    assert len(answers) == 1


def test_a_spec_that_is_named_twice_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", "firnline.yml", "-f", "firnline.yml"]) == 2
    assert capsys.readouterr().err.startswith('Error: unexpected argument "firnline.yml"\n')


def test_init_writes_the_file_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "-f", "here/orders.yml"]) == 0
    assert (tmp_path / "here" / "orders.yml").read_text().startswith("# A Firnline pipeline")
    assert run_command(["init", "here/orders.yml"]) == 2  # it exists
    assert run_command(["init", "--spec", "there"]) == 0
    assert (tmp_path / "there" / "firnline.yml").is_file()


# -- plan, question, change ----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


ASKS = {
    "rollback": ["rollback", "--to", "1"],
    "gc": ["gc", "--grace", "0s"],
    "delete": ["checkpoints", "delete"],
    "drop": ["files", "--drop", "*/b1*"],
    "dispose": ["savepoint", "dispose", "mine"],
    "fresh start": ["run", "--fresh-after", "2", "--once"],
}


@pytest.fixture
def prepared(finished: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A pipeline with a savepoint and a file that nobody names."""
    assert run_command(["savepoint", "create", "--path", "mine"]) == 0
    (finished.parent / "out" / "part-orphan.parquet").write_bytes(b"nobody names it")
    capsys.readouterr()
    return finished


@pytest.mark.parametrize("case", ASKS)
def test_nothing_changes_without_consent(prepared: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    before = contents(prepared.parent)
    assert run_command([*ASKS[case], "--dry-run"]) == 0
    plan = capsys.readouterr()
    assert plan.out
    assert run_command([*ASKS[case], "--dry-run", "--yes"]) == 0
    assert capsys.readouterr().out == plan.out
    assert run_command([*ASKS[case], "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert run_command(ASKS[case]) == 2
    refused = capsys.readouterr()
    assert refused.out.splitlines()[0] == plan.out.splitlines()[0], "the plan comes first"
    assert refused.err.splitlines()[-2:] == [
        "Error: nothing was changed: without a terminal this needs --yes",
        "Try: Read the plan, then repeat the command with --yes; --dry-run only shows the plan.",
    ]
    assert run_command([*ASKS[case], "--json"]) == 2
    assert json.loads(capsys.readouterr().out).keys() == planned.keys(), "the plan as JSON"
    assert contents(prepared.parent) == before


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("case", [case for case in ASKS if case != "fresh start"])
def test_at_a_terminal_the_answer_decides(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, case: str, answer: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    before = contents(prepared.parent)
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr("sys.stderr", asked := Terminal())
    assert run_command(ASKS[case]) == 0
    assert asked.getvalue().rstrip().endswith("? [y/N]") or answer == "y"
    assert "? [y/N] " in asked.getvalue()
    assert (contents(prepared.parent) != before) == (answer == "y")


def test_commands_that_only_add_show_their_plan_on_demand(
    finished: Path, capsys: pytest.CaptureFixture[str], run_json: RunJson
) -> None:
    before = contents(finished.parent)
    planned = run_json("compact", "--dry-run", "--vacuum")
    assert (planned["dry_run"], planned["commits"], planned["files_removed"] > 1) == (True, 0, True)
    assert run_json("checkpoints", "export", "copy.tar", "--dry-run")["versions"] == 2
    assert run_command(["checkpoints", "export", "firnline.yml", "--dry-run"]) == 2, "it exists"
    assert run_json("files", "--retry", "b1.json.gz", "--dry-run")["status"] == "would_ask"
    assert contents(finished.parent) == before
    done = run_json("compact")
    assert [done[key] for key in ("files_removed", "files_added", "bytes_removed")] == [
        planned[key] for key in ("files_removed", "files_added", "bytes_removed")
    ]
    assert run_json("checkpoints", "export", "copy.tar")["versions"] == 2
