"""Shared by commands: the arguments spec and table, `--json`, `--debug`, the read-only store, the decoder."""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from firnline.cli.logs import VARIABLE, LogFormat
from firnline.cli.output import Output, brief, say
from firnline.config.units import parse_seconds, parse_size, seconds_text, size_text
from firnline.errors import ConfigError, no_such_folder

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from firnline.options import PipelineOptions, SourceOptions
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.service.health import HealthCheck
    from firnline.storage import Storage
    from firnline.stores.base import CheckpointStore

T = TypeVar("T")

COLD_SECONDS = 3.0  # loading what is compiled takes less; compiling it takes much longer
COLD_MESSAGE = "loading the decoder; the first time it is compiled, which takes up to a minute"
COMPILING_MESSAGE = "compiling the decoder in the background, once per installation; reading more slowly meanwhile"

# One rule for all commands: a command's own arguments come first, then the spec, which may also be an option. A
# command on tables takes a table in the same place.
DEFAULT_SPEC = "[default: firnline.yml here or in a folder above]"
Spec = Annotated[
    str | None,
    Parameter(name=("--spec", "-f"), help=f"The pipeline file, or its folder. {DEFAULT_SPEC}", show_default=False),
]
TABLE_NAMES = ("--table", "--spec", "-f")
TABLES_HELP = f"Tables (path or URI), or specs: all their staged tables. {DEFAULT_SPEC}"
Tables = Annotated[str, Parameter(name="TABLES", help=TABLES_HELP, show_default=False)]
MoreTables = Annotated[
    tuple[str, ...],
    Parameter(name=TABLE_NAMES, help="A table or a spec, as an option; repeatable.", negative="", show_default=False),
]
Table = Annotated[
    str | None,
    Parameter(
        name=TABLE_NAMES,
        help=f"The table (path or URI), or a spec: its first staged table. {DEFAULT_SPEC}",
        show_default=False,
    ),
]
TableOrSpec = Annotated[
    str | None,
    Parameter(
        name=TABLE_NAMES,
        help=f"The table (path or URI), or a spec: all its tables. {DEFAULT_SPEC}",
        show_default=False,
    ),
]
CapturedTable = Annotated[
    str,
    Parameter(
        name="TABLE",
        help="The captured table, with or without its schema; or the spec. [default: all]",
        show_default=False,
    ),
]
Flag = Parameter(negative="", show_default=False)


def _to_duration(_: object, tokens: Sequence[Token]) -> Duration:
    return Duration(parse_seconds(tokens[0].value))


def _to_size(_: object, tokens: Sequence[Token]) -> Size:
    return Size(parse_size(tokens[0].value))


@Parameter(converter=_to_duration, show_default=seconds_text)
class Duration(float):
    """An option's value in seconds; written as in a spec, `10m` or `1h30m`."""


@Parameter(converter=_to_size, show_default=size_text)
class Size(int):
    """An option's value in bytes; written as in a spec, `1GB` or `512MiB`."""


Accept = Annotated[
    tuple[str, ...],
    Flag,
    Parameter(help="A writer whose later row changes may be lost; repeatable. [default: none]"),
]
Leave = Annotated[
    tuple[str, ...], Flag, Parameter(help="A sink that keeps its rows, and gets them again. [default: none]")
]
TakeOver = Annotated[bool, Flag, Parameter(help="Do it even while a run is alive, which then ends.")]


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every command."""

    json: Annotated[bool, Flag, Parameter(help="Write the result as JSON.")] = False
    debug: Annotated[bool, Flag, Parameter(help="Show tracebacks and more log lines.")] = False
    log_format: Annotated[
        LogFormat,
        Parameter(help="Log lines on stderr: text, or json (one object a line).", env_var=VARIABLE),
    ] = "text"

    @property
    def out(self) -> Output:
        return Output(as_json=self.json)


@Parameter(name="*")
@dataclass(frozen=True)
class Metrics:
    """Options of commands that serve metrics and health while they run."""

    metrics_port: Annotated[
        int | None,
        Parameter(
            help="Serve /metrics, /healthz and /readyz on this port; 0 means a free port. [default: off]",
            env_var="FIRNLINE_METRICS_PORT",
            validator=Number(gte=0, lte=65535),
        ),
    ] = None
    metrics_host: Annotated[
        str,
        Parameter(
            help="With --metrics-port: the address to serve on, e.g. 0.0.0.0; all but loopback need a token.",
            env_var="FIRNLINE_METRICS_HOST",
        ),
    ] = "127.0.0.1"
    metrics_token_file: Annotated[
        str | None,
        Parameter(
            help="File with the token that /metrics asks for; made if missing. [default: none]",
            env_var="FIRNLINE_METRICS_TOKEN_FILE",
        ),
    ] = None

    @property
    def wanted(self) -> bool:
        """Whether to serve; ConfigError if an option is given that has no meaning without a port."""
        if self.metrics_port is None and (self.metrics_host != "127.0.0.1" or self.metrics_token_file is not None):
            raise ConfigError(
                "--metrics-host and --metrics-token-file belong to --metrics-port", hint="Add --metrics-port 9464."
            )
        return self.metrics_port is not None

    @contextmanager
    def serving(self, registry: CollectorRegistry, health: HealthCheck, say: Callable[[str], None]) -> Iterator[None]:
        """Serve on `metrics_port`, which must be set, while the block runs."""
        from firnline.service.endpoints import Endpoints, ServeAt
        from firnline.service.metrics_token import load_token

        assert self.metrics_port is not None
        token, is_new = load_token(self.metrics_token_file) if self.metrics_token_file is not None else (None, False)
        if is_new:
            say(f"made a metrics token in {self.metrics_token_file}")
        with Endpoints(registry, health, ServeAt(self.metrics_port, self.metrics_host, token)) as served:
            needs = f", with the token in {self.metrics_token_file}" if token is not None else ""
            say(f"metrics on {served.url}/metrics{needs}")
            yield


def load_options(spec: str | None, *, warn: Callable[[str], None] | None = None) -> PipelineOptions:
    """Load the options of a spec file, with the overrides `FIRNLINE__A__B` of the environment.

    Args:
        warn: Called with each warning about the spec.
    """
    from firnline.spec.build import build_options
    from firnline.spec.loading import load_spec

    loaded = load_spec(spec, environ=os.environ)
    if warn is not None:
        for warning in loaded.warnings:
            warn(warning)
    return build_options(loaded, environ=os.environ)


def load_pipeline(spec: str | None, *, warn: Callable[[str], None] | None = None) -> OpenPipeline:
    """Open a pipeline for a read-only command; reads nothing yet."""
    options = load_options(spec, warn=warn)
    from firnline.run.open_pipeline import open_pipeline

    return open_pipeline(options)


@contextmanager
def editing_history(pipeline: OpenPipeline, *, take_over: bool) -> Iterator[str]:
    """Hold the lease while a command edits the history; yields the id of the command, as of a run.

    Raises:
        AlreadyRunningError: a run is alive; with `take_over` that run ends as fenced instead.
    """
    from firnline.run import standby

    run = pipeline.ids.new()
    with standby.editing_history(pipeline.options, run, say, take_over=take_over):
        yield run


def read_with_store(pipeline: OpenPipeline, read: Callable[[CheckpointStore | None], T]) -> T:
    """Call `read` with the checkpoint store, if there is one and it can be read; say so if it cannot."""
    from firnline.history.store import read_with_store as read_and_warn

    return read_and_warn(pipeline, read, lambda text: say(brief(text)))


def warm_decoder(sources: Iterable[SourceOptions], say: Callable[[str], None]) -> None:
    """Compile what the readers of these sources need, or load it if it is already compiled."""
    timer = threading.Timer(COLD_SECONDS, say, [COLD_MESSAGE])
    timer.daemon = True
    timer.start()
    try:
        from firnline.sources.registry import warm_up

        warm_up(sources)
    finally:
        timer.cancel()
    if "firnline.ndjson" in sys.modules:  # otherwise no source reads JSON
        from firnline.ndjson.compiling import is_under_way

        if is_under_way():
            say(COMPILING_MESSAGE)


@dataclass(slots=True)
class NamedTables:
    """The tables that the arguments name, with their storage options."""

    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # uri -> storage options
    poll_interval_secs: float | None = None


def named_tables(arguments: Sequence[str]) -> NamedTables:
    """Resolve arguments; a spec stands for its staged sinks."""
    from firnline.sinks.delta.options import delta_tables
    from firnline.storage import normalise

    named = NamedTables()
    for text in arguments or ("",):
        if text and not is_spec(text):
            named.tables[_existing(normalise(text))] = {}
            continue
        options = load_options(text or None)
        tables = delta_tables(options.sinks)
        staged = {normalise(s.table): dict(s.storage_options) for s in tables if s.mode == "staged"}
        if not staged:
            raise ConfigError(
                f"pipeline {options.name!r} has no staged sink",
                hint="Set mode: staged on a sink, or name a table instead of a spec.",
            )
        named.tables |= staged
        named.poll_interval_secs = options.staging.poll_interval_secs
    return named


@dataclass(frozen=True, slots=True)
class Target:
    """One table to sweep, and the ledgers of pipelines that have it as a further sink."""

    uri: str
    storage_options: dict[str, str]
    is_journal: bool = False
    ledgers: dict[str, Storage] = field(default_factory=dict)


def find_targets(argument: str | None) -> list[Target]:
    """Find the named table, or every Delta table of a spec, the deciding sink's or the journal first."""
    from firnline.sinks.delta.options import delta_tables
    from firnline.storage import normalise, open_storage

    if argument is not None and not is_spec(argument):
        return [Target(_existing(normalise(argument)), {})]
    options = load_options(argument)
    home = options.home
    ledger = open_storage(home.root, home.storage_options)
    targets: dict[str, Target] = {}
    for sink in delta_tables(options.ordered_sinks):
        uri = normalise(sink.table)
        ledgers = {} if uri == normalise(home.root) else {options.name: ledger}
        targets.setdefault(uri, Target(uri, dict(sink.storage_options), sink is options.journal, ledgers))
    for uri, storage_options in find_part_tables(options):
        targets.setdefault(uri, Target(uri, storage_options, ledgers={options.name: ledger}))
    return list(targets.values())


def find_part_tables(options: PipelineOptions) -> list[tuple[str, dict[str, str]]]:
    """Return the tables of Delta sinks with a template, with their storage options."""
    from firnline.run.open_pipeline import open_pipeline
    from firnline.sinks.delta.options import DeltaPartsOptions

    sinks = [sink for sink in options.sinks if isinstance(sink, DeltaPartsOptions)]
    if not sinks:
        return []
    pipeline = open_pipeline(options)
    return [(uri, dict(sink.storage_options)) for sink in sinks for uri in pipeline.sink(sink.name).find_parts() or ()]


def find_other_sinks(options: PipelineOptions | None) -> list[str]:
    """Return the sinks of a pipeline that are no Delta tables, each with its kind, for messages."""
    from firnline.sinks.delta.options import DeltaPartsOptions, delta_tables

    if options is None:
        return []
    tables = (*delta_tables(options.ordered_sinks), *(s for s in options.sinks if isinstance(s, DeltaPartsOptions)))
    return [f"{sink.name} ({sink.type})" for sink in options.ordered_sinks if sink not in tables]


def find_pipeline(argument: str | None) -> PipelineOptions | None:
    """Load the pipeline of a spec; None if the argument is a table."""
    return load_options(argument) if argument is None or is_spec(argument) else None


def _existing(table: str) -> str:
    """Return a table that the command line names; a local one must be a folder."""
    from firnline.storage import is_remote

    if not is_remote(table) and not os.path.isdir(table):
        raise no_such_folder(table, "Name a Delta table, or a pipeline file.")
    return table


_COMMAND = re.compile(r"\bfirnline((?: [a-z]+(?:-[a-z]+)*)+)")
_NO_ARGUMENT = re.compile(r" -|(?! [^ ])")  # what follows a command that names neither a table nor a spec


def name_spec(hint: str, spec: str | None) -> str:
    """Return a hint whose commands name the spec that the command line named, so that they can be pasted."""
    if spec is None:
        return hint
    named = f" -f {shlex.quote(spec)}"

    def complete(found: re.Match[str]) -> str:
        if hint.startswith(" -f", found.end()):
            return found.group()
        command, names = _find_command(found.group(1).split())
        end = found.start(1) + len(command)
        takes_spec = "--spec" in names[:1] or ("--table" in names[:1] and _NO_ARGUMENT.match(hint, end) is not None)
        return hint[found.start() : end] + (named if takes_spec else "") + hint[end : found.end()]

    return _COMMAND.sub(complete, hint)


_OF_TOPOLOGY = re.compile(
    r"\bfirnline topology (?:snapshot|list|drop|savepoint|restore)\b(?!` command| --from-savepoint)"
)


def name_topology(hint: str, file: str | None) -> str:
    """Return a hint whose commands name the topology file that the command line named. Those for pipelines stay: it is
    not their spec."""
    if file is None or file in hint:
        return hint
    return _OF_TOPOLOGY.sub(lambda found: f"{found.group()} --file {shlex.quote(file)}", hint)


def _find_command(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the command, as written, with which some words begin, and the names of its parameter for the spec; none
    if it has no such parameter."""
    from firnline.cli.main import app

    found, command = app, ""
    for word in words:
        if word not in found:
            break
        found, command = found[word], f"{command} {word}"
    if not command or found.default_command is None:
        return command, ()
    return command, next((one.names for one in found.assemble_argument_collection() if "--spec" in one.names), ())


def silent_text(change: Mapping[str, Any], spec: str | None = None) -> str:
    """Say how rows of a captured table may differ from the database, as in `silent_changes` of `status`."""
    way = f"; to read the table again: `{name_spec(change['command'], spec)}`" if change["command"] else ""
    way = f"; {change['way']}" if change["way"] else way
    if change["asked"]:
        way = "; the next epoch begins to read the table again"
        way = "; it is emptied and read when there is a table of this name" if change["again"] == "replace" else way
    return f"{change['table']}: {change['reason']} (epoch {change['epoch']}){way}"


def find_spec_argument(tokens: Sequence[str]) -> str | None:
    """Return the spec that a command line names; None if it leaves it to the current folder."""
    values = [after for before, after in pairwise(tokens) if before in ("-f", "--spec")]
    values += [token.partition("=")[2] for token in tokens if token.startswith("--spec=")]
    values += [token for token in tokens[1:] if not token.startswith("-") and is_spec(token)]
    return values[0] if values else None


def table_and_spec(word: str, spec: str | None, option: str) -> tuple[str, str | None]:
    """Return the captured table and the spec of a command line: `[TABLE] [SPEC]`, each also as an option.

    A single word that is a pipeline file, a path or the folder of a pipeline is the spec, and so is one beside --table.
    """
    if word and spec is None and (option or os.sep in word or is_spec(word)):
        word, spec = "", word
    if word and option:
        raise ConfigError("the table is named twice", hint="Name it as a word or with --table.")
    return word or option, spec


def is_spec(text: str) -> bool:
    """Whether an argument names a pipeline file or the folder of one, and not a table."""
    if text.endswith((".yml", ".yaml")):
        return True
    return any(os.path.isfile(os.path.join(text, name)) for name in ("firnline.yml", "firnline.yaml"))
