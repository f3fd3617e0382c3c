"""`firnline serve`: watches, starts and stops pipelines, and answers REST and a dashboard."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag
from firnline.cli.output import FactsHandler, say
from firnline.errors import ConfigError, MissingExtraError

EPILOGUE = """\
The service holds no truth: kill it, and running pipelines go on. It starts runs
as processes of their own and restarts those that failed with exit code 3 or 4
or by a signal. What operators want (running, paused, stopped) lies in the home
of each pipeline. A pipeline that nobody has decided about is not started,
unless with --start.

Every request needs a token. The first one, for an administrator, is made at the
first start, in admin.token of the --state folder. Any address but loopback
needs TLS: --tls-cert and --tls-key, or a proxy that ends it (--trusted-proxy).
SIGTERM and SIGINT stop the service; runs go on.

Output (stderr): one line when it serves; dated lines for starts, restarts and
changes of state, for pipelines that need a person, and for a file of tokens
that cannot be trusted.
Nothing is written to stdout; REST answers what the command line shows.

Examples:
  firnline serve --pipelines /etc/firnline
  firnline serve flights.yml orders.yml --port 8081
"""

INVALID_NAMED = 10

app = App(name="serve", help_epilogue=EPILOGUE)


@contextlib.contextmanager
def logging_dated() -> Iterator[None]:
    """Write what the service logs to stderr, with the time; starts and restarts are of the level INFO."""
    logger = logging.getLogger("firnline")
    handler = FactsHandler(dated=True)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    service = logging.getLogger("firnline.service")
    service_level = service.level
    service.setLevel(logging.INFO)
    try:
        yield
    finally:
        service.setLevel(service_level)
        logger.setLevel(level)
        logger.propagate = propagates
        logger.removeHandler(handler)


@app.default
def serve(
    *files: Annotated[str, Parameter(help="Pipeline files.", negative="")],
    pipelines: Annotated[str | None, Parameter(help="A folder of pipeline files. [default: none]")] = None,
    host: Annotated[str, Parameter(help="The address to serve on; all but loopback need TLS.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The port; 0 means a free one.", validator=Number(gte=0, lte=65535))] = 8080,
    tls_cert: Annotated[str | None, Parameter(help="PEM file: the certificate and its chain. [default: none]")] = None,
    tls_key: Annotated[str | None, Parameter(help="PEM file: the key of --tls-cert. [default: none]")] = None,
    trusted_proxy: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="Address or network of a proxy that ends TLS; repeatable. [default: none]"),
    ] = (),
    allowed_host: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="A name by which clients ask for the service; repeatable. [default: --host, loopback]"),
    ] = (),
    state: Annotated[str, Parameter(help="The service's own folder: tokens, lock.")] = "~/.local/state/firnline",
    max_running: Annotated[
        int | None, Parameter(help="Start at most this many runs. [default: no limit]", validator=Number(gte=1))
    ] = None,
    start: Annotated[bool, Flag, Parameter(help="Start pipelines that nobody has decided about.")] = False,
    only_watch: Annotated[bool, Flag, Parameter(help="Start and restart nothing.")] = False,
    _common: Common = Common(),
) -> int:
    """Serve pipelines: REST, a dashboard, and supervision of their runs."""
    try:
        from firnline.service.app import make_app
    except ImportError as error:
        raise MissingExtraError(extra="serve") from error
    from firnline.clock import SystemClock
    from firnline.service.access.sessions import Sessions, load_key
    from firnline.service.access.tokens import Tokens, ensure_tokens
    from firnline.service.api.common import Service
    from firnline.service.registry import Registry
    from firnline.service.serving import Address, keep_memory_together, leave_out_pandas, locking, serve_app
    from firnline.service.supervise.supervisor import Settings, Supervisor
    from firnline.service.topology_snapshots import PeriodicSnapshots
    from firnline.storage import open_storage
    from firnline.types import RandomIds

    leave_out_pandas()
    keep_memory_together()
    places = [*files, *([pipelines] if pipelines is not None else [])]
    if not places:
        raise ConfigError("name pipeline files, or a folder of them", hint="firnline serve --pipelines .")
    if start and only_watch:
        raise ConfigError("--start and --only-watch exclude each other", hint="Leave one of them out.")
    address = Address(host, port, tls_cert, tls_key, trusted_proxy, allowed_host)
    rules = address.find_rules()
    clock, registry = SystemClock(), Registry(places, os.environ)
    registry.refresh()  # before anything is made for a service that has nothing to serve
    folder = Path(os.path.abspath(os.path.expanduser(state)))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}", hint="Name a folder with --state.") from error
    settings = Settings(str(folder), max_running, only_watch, start)
    with logging_dated(), locking(folder), address.listen() as listening:
        shutil.rmtree(folder / "exports", ignore_errors=True)  # downloads that a kill cut off
        if ensure_tokens(folder / "tokens.json", folder / "admin.token"):
            say(f"made a token for an administrator in {folder / 'admin.token'}")
        tokens = Tokens(folder / "tokens.json", clock)
        sessions = Sessions(load_key(folder / "session.key"), tokens, clock, open_storage(str(folder)))
        with Supervisor(registry, settings, clock, RandomIds(), os.environ) as supervisor:
            service = Service(supervisor, tokens, sessions, clock, secure=rules.secure)
            periodic = PeriodicSnapshots(service.jobs, supervisor, clock)
            if not only_watch:
                periodic.start()
            say(f"serving {len(registry.all())} pipelines on {address.url(listening.getsockname()[1])}")
            invalid = [one.name for one in registry.all() if one.problem is not None]
            if invalid:
                say(f"{len(invalid)} of them cannot be used: {', '.join(invalid[:INVALID_NAMED])}; the log says why")
            serve_app(
                make_app(service, rules),
                address,
                listening,
                clock,
                [periodic.close, service.close],
                [lambda: tokens.problem],
            )
    say("stopped; runs go on")
    return 0
