"""The `firnline` command: dispatches to the verb, and turns failures into two lines and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import UnusedCliTokensError

from firnline import __version__
from firnline.cli import logs
from firnline.cli.common import find_spec_argument, name_spec, name_topology
from firnline.cli.output import FactsHandler, print_failure
from firnline.errors import CommitUnknownError, FencedError, FirnlineError, SinkError, find_denied, hint_at_full_disk
from firnline.process import HungError, TimedCalls

# Verb, app and its line in the list of commands; an app is imported only when its verb is used.
COMMANDS = (
    ("init", "init:app", "Write a commented firnline.yml."),
    ("dry-run", "dry_run:app", "Check spec, access and schema, and show what a run would read; writes nothing."),
    ("run", "run:app", "Run the pipeline until stopped, or once."),
    ("pause", "control:pause_app", "Pause planning and wait until in-flight epochs are committed."),
    ("resume", "control:resume_app", "Let a paused run continue."),
    ("stop", "control:stop_app", "Stop a run cleanly, and wait until its process has exited."),
    ("checkpoint", "control:checkpoint_app", "Make a run take a checkpoint now, and wait for it."),
    ("status", "status:app", "Show epoch, backlog, health and copies of a pipeline."),
    (
        "checkpoints",
        "checkpoints:app",
        "List, show and compare checkpoints; export, import, delete, audit.",
    ),
    ("rollback", "rollback:app", "Roll tables and checkpoint back to an earlier epoch, together."),
    ("savepoint", "savepoint:app", "Create, list and dispose of savepoints."),
    ("state", "state:app", "Show or export an operator's state, now or after an earlier epoch."),
    ("rescale", "rescale:app", "Change the number of shards of operators' state without rewriting it."),
    ("sinks", "sinks:app", "List the sinks of a pipeline; copy one anew, let one go on, forget one."),
    ("dead-letters", "dead_letters:app", "List rows that a sink refused; deliver them once more or drop them."),
    ("recover", "recover:app", "Rebuild a lost journal from the head of a sink."),
    ("position", "position:app", "Show where each source stands; set a source to another position, or skip input."),
    ("snapshot", "snapshot:app", "Read the rows of a captured table again, or list how far tables have been read."),
    ("schema-history", "schema_history:app", "List the schemas that captured tables had, and what changed."),
    ("trace", "trace:app", "Show which input an event comes from."),
    ("files", "files:app", "List files with their state; retry or drop files that were set aside."),
    ("ledger", "ledger:app", "Repair a ledger that has a missing or damaged file."),
    ("quarantine", "quarantine:app", "Show records that could not be decoded."),
    ("committer", "committer:app", "Run the committer of two-stage tables."),
    ("staging", "staging:app", "Show units that are staged and not committed; retry or discard units set aside."),
    ("gc", "gc:app", "Delete unreferenced files of a table."),
    ("compact", "compact:app", "Rewrite small files as large ones, without disturbing ingestion."),
    ("serve", "serve:app", "Serve pipelines: REST, a dashboard, and supervision of their runs."),
    ("topology", "topology:app", "Show pipelines that read what others write; snapshots and restores of all at once."),
    ("demo", "demo:app", "Kill a pipeline in mid-run and count what arrives."),
    ("drill", "drill:app", "Kill a run of your own spec in a scratch folder, and count."),
    ("prepare", "prepare:app", "Compile the decoder, and archive Spark's classes, once per installation."),
    ("spec-schema", "spec_schema:app", "Print the JSON Schema of firnline.yml, for editors."),
)
ALIASES = {"commit": "committer", "schema": "spec-schema"}  # other names of a verb, absent from the list of commands

app = App(
    name="firnline",
    help="Exactly-once, checkpointed pipelines into Delta Lake. Kill it anywhere, run it again: every record lands "
    "once."
    "\n\nResults go to stdout, logs to stderr; every command takes --json, --log-format, --debug and --help. "
    "`firnline --server URL --token-file FILE COMMAND NAME` asks a `firnline serve` about its pipeline NAME.",
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
for _order, (_verb, _target, _help) in enumerate(COMMANDS):
    app.command(f"firnline.cli.{_target}", name=_verb, help=_help, sort_key=_order)
for _name, _target, _help in (
    ("--install-completion", "install_app", "Install shell completion; shows which files it changes, and asks."),
    ("--show-completion", "show_app", "Print the shell completion."),
):
    app.command(f"firnline.cli.completion:{_target}", name=_name, help=_help)

INTERRUPTED = 130
EXIT_SECONDS = 20.0  # for what libraries do when a process exits


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    code = run_command(tokens)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()
    is_stuck = any(thread.name.startswith("firnline ") for thread in threading.enumerate())
    if not is_stuck:
        with contextlib.suppress(HungError):  # the hooks of libraries, which may wait for threads of their own
            TimedCalls(EXIT_SECONDS, "exit hooks").call(atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Without tearing the interpreter down: a thread may hang in a storage call, and threads of native libraries that
    # are still ending would abort the process.
    os._exit(code)


def run_command(tokens: list[str]) -> int:
    """Run one command and return its exit code; failures are printed on stderr."""
    tokens = [*(ALIASES.get(token, token) for token in tokens[:1]), *tokens[1:]]
    with logs.using_format(logs.find_format(tokens, os.environ)):
        return _dispatch(tokens)


def _dispatch(tokens: list[str]) -> int:
    debug = "--debug" in tokens
    # Warnings where no command has set logging up: the facts belong to the message.
    before, logging.lastResort = logging.lastResort, FactsHandler(logging.WARNING)
    try:
        if tokens and tokens[0].partition("=")[0] in ("--server", "--token-file"):
            from firnline.cli.remote import run_remotely, take_server

            options, tokens = take_server(tokens)
            return run_remotely(app.parse_args, options, tokens)
        return int(app(tokens) or 0)
    except CycloptsError as error:
        print_failure(_usage_error(error, tokens), debug=debug)
        return 2
    except FirnlineError as error:
        failure = _plainly(error, tokens)
        print_failure(failure, debug=debug)
        return failure.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        failure = SinkError(f"storage failed: {error}", hint="Check that the files and the table can be read.")
        failure.__cause__ = error
        failure = _plainly(failure, tokens)
        print_failure(failure, debug=debug)
        return failure.exit_code
    except Exception as error:  # a bug: report it in the same two lines
        print_failure(error, debug=debug)
        return 1
    finally:
        logging.lastResort = before


def _plainly(error: FirnlineError, tokens: Sequence[str]) -> FirnlineError:
    """Return an error that names a path to which access is denied, with a hint that can be pasted."""
    if not isinstance(error, CommitUnknownError | FencedError):
        denied = find_denied(error)
        if denied is not None and denied is not error:
            denied.__cause__ = error
            error = denied
    hint_at_full_disk(error)
    named = find_spec_argument(tokens)
    error.hint = name_topology(error.hint, named) if tokens[:1] == ["topology"] else name_spec(error.hint, named)
    return error


class _UsageError(FirnlineError):
    code = "usage"
    exit_code = 2


def _usage_error(error: CycloptsError, tokens: list[str]) -> _UsageError:
    verbs = [verb for verb, _, _ in COMMANDS]
    chain = error.command_chain or [t for t in tokens if t in verbs][:1]
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        words = ", ".join(f'"{word}"' for word in error.unused_tokens)
        message = f"unexpected argument{'s' if len(error.unused_tokens) > 1 else ''} {words}"
    else:
        message = str(error).split(" Available commands:")[0]
    failure = _UsageError(message, hint=" ".join(["firnline", *chain, "--help"]))
    failure.__cause__ = error
    return failure


def _give_up_stdout() -> None:
    """Discard further output, also at exit: the reader has closed the pipe (`firnline files | head`)."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
