"""The `firnline` command: finds the verb, turns failures into two lines and an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from firnline import __version__
from firnline.cli.output import FactsHandler, print_failure
from firnline.errors import FirnlineError, SinkError

# Verb, module and what the list of commands says; a module is imported only when its verb is used.
COMMANDS = (
    ("init", "init", "Write a commented firnline.yml."),
    ("dry-run", "dry_run", "Check spec, access and schema, and tell what would be read; writes nothing."),
    ("run", "run", "Run the pipeline until stopped, or once."),
    ("pause", "pause", "Have a run plan nothing more, and wait until nothing is in flight."),
    ("resume", "resume", "Have a paused run go on."),
    ("stop", "stop", "Have a run end cleanly, and wait until it is gone."),
    ("checkpoint", "checkpoint", "Have a run take a checkpoint now, and wait for it."),
    ("status", "status", "Show where the pipeline stands."),
    ("checkpoints", "checkpoints", "List, show and compare checkpoints; export, import, delete, audit."),
    ("rollback", "rollback", "Take table and checkpoint back to an earlier epoch, together."),
    ("savepoint", "savepoint", "Make, list and dispose of savepoints."),
    ("state", "state", "Show what an operator remembers, now or after an earlier epoch; export it."),
    ("rescale", "rescale", "Give the state of operators another number of shards, without rewriting it."),
    ("files", "files", "List files with their state; take up or give up those that were set aside."),
    ("ledger", "ledger", "Repair a ledger of which a file is missing or damaged."),
    ("quarantine", "quarantine", "Show records that could not be decoded."),
    ("commit", "committer", "Commit what writers of staged tables have staged."),
    ("staging", "staging", "Show what is staged and not committed; retry or discard what was set aside."),
    ("gc", "gc", "Delete files of a table that nobody needs any more."),
    ("compact", "compact", "Turn small files into large ones, without disturbing ingestion."),
    ("demo", "demo", "Kill a pipeline in mid-run and count what arrives."),
    ("drill", "drill", "Do the same with your own spec, in a scratch folder."),
    ("schema", "spec_schema", "Print the JSON Schema of firnline.yml, for editors."),
)

app = App(
    name="firnline",
    help="Exactly-once, checkpointed pipelines into Delta Lake. Kill it anywhere, run it again: every record lands "
    "once."
    "\n\nResults go to stdout, logs to stderr; every command takes --json, --debug and --help.",
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
for _order, (_verb, _module, _help) in enumerate(COMMANDS):
    app.command(f"firnline.cli.{_module}:app", name=_verb, help=_help, sort_key=_order)
app.register_install_completion_command(name="--install-completion", help="Install shell completion.")

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    code = run_command(tokens)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()
    if any(thread.name.startswith("firnline ") for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # a thread that hangs in somebody's storage must not be torn down under its feet
    sys.exit(code)


def run_command(tokens: list[str]) -> int:
    """Run one command and return its exit code; failures are told on stderr."""
    debug = "--debug" in tokens
    # Warnings where no command has set logging up: the facts belong to the message.
    before, logging.lastResort = logging.lastResort, FactsHandler(logging.WARNING)
    try:
        return int(app(tokens) or 0)
    except CycloptsError as error:
        print_failure(_usage_error(error, tokens), debug=debug)
        return 2
    except FirnlineError as error:
        print_failure(error, debug=debug)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        failure = SinkError(f"storage failed: {error}", hint="Check that the files and the table can be read.")
        failure.__cause__ = error
        print_failure(failure, debug=debug)
        return failure.exit_code
    except Exception as error:  # a bug: say so in the same two lines
        print_failure(error, debug=debug)
        return 1
    finally:
        logging.lastResort = before


class _UsageError(FirnlineError):
    code = "usage"
    exit_code = 2


def _usage_error(error: CycloptsError, tokens: list[str]) -> _UsageError:
    verbs = [verb for verb, _, _ in COMMANDS]
    chain = error.command_chain or [t for t in tokens if t in verbs][:1]
    message = str(error).split(" Available commands:")[0]
    made = _UsageError(message, hint=" ".join(["firnline", *chain, "--help"]))
    made.__cause__ = error
    return made


def _give_up_stdout() -> None:
    """The reader is gone (`firnline files | head`): nothing more is written, not even at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
