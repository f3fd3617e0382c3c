"""`firnline drill`: runs the user's own spec into a scratch folder, kills it, resumes it, compares counts.

Run as a module, it is the process that the drill kills.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec
from firnline.cli.kill_and_count import LogWatch
from firnline.cli.output import count_text, print_failure, say
from firnline.cli.table import Column
from firnline.clock import SystemClock
from firnline.errors import ConfigError, FirnlineError

if TYPE_CHECKING:
    from firnline.cli.kill_and_count import KillReport
    from firnline.options import PipelineOptions, SinkOptions, SourceOptions
    from firnline.run.open_pipeline import OpenPipeline

FILES_SHOWN = 20
COMMIT_SECONDS = 0.2  # between two rounds of the committer
PLAN = "plan.json"
ONE_DAY_MS = 24 * 3600 * 1000
COLUMNS = (
    Column("path", cut="left"),
    Column("status"),
    Column("lines", right=True, drop=1),
    Column("rows", right=True),
    Column("quarantined", right=True),
    Column("lost", right=True),
    Column("doubled", right=True),
)
SINK_COLUMNS = (
    Column("name", "sink", cut="right"),
    Column("rows", right=True),
    Column("expected", right=True),
    Column("lost", right=True),
    Column("doubled", right=True),
)

EPILOGUE = """\
Reads the current files of the sources in small epochs, kills the run with
SIGKILL in mid-run, and resumes it. The run is a pipeline of its own, with its
own name, tables, checkpoint store and tiers, all below --table; it takes no
lease and has no control socket. A drill may therefore run beside the pipeline
itself: it reads the spec, operators and input files, and changes nothing of the
pipeline. Staged tables get a committer while the drill runs.

Without operators, the drill compares file by file: the lines that are not blank
(counted by a reader of its own) with the rows in each table (counted by DuckDB)
and the records in quarantine. With operators, it runs the same epochs a second
time, undisturbed, and compares the rows of every table, floating-point numbers
to nine digits.

Output (JSON fields):
  table (the folder), kills, recovery_seconds, checkpoints, lost, doubled,
  files [{path, status, lines, rows, quarantined, lost, doubled}] (without
  operators), sinks [{name, table, rows, expected, lost, doubled}] (with them)

Exit codes:
  0 nothing lost and nothing doubled, 1 otherwise

Environment:
  FIRNLINE__A__B          overrides the key a.b of the spec
  FIRNLINE_OPERATOR_PATH  further folders with operators of your own

Examples:
  firnline drill --table /tmp/scratch
  firnline drill flights/firnline.yml --table /tmp/scratch --kills 5 --json
"""

app = App(name="drill", help_epilogue=EPILOGUE)


@app.default
def drill(
    spec: Spec = None,
    *,
    table: Annotated[Path, Parameter(help="A local folder for the drill's output; must not exist yet, or be empty.")],
    kills: Annotated[int, Parameter(help="Number of kills.", validator=Number(gte=1, lte=20))] = 3,
    seed: Annotated[int | None, Parameter(help="Repeat the kill times of an earlier drill. [default: random]")] = None,
    common: Common = Common(),
) -> int:
    """Kill a run of your own spec and compare what arrives, in a scratch folder."""
    from firnline.spec.build import build_options
    from firnline.spec.loading import load_spec

    loaded = load_spec(spec, environ=os.environ)
    options = build_options(loaded, environ=os.environ)
    scratch = table.expanduser().absolute()
    _check_kinds(options)
    _check_scratch(options, scratch)
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    made = Drill(str(loaded.path), options, scratch, _plan(options, kills), random.Random(seed))
    scratch.mkdir(parents=True, exist_ok=True)
    made.plan.save(scratch / PLAN)
    say(f"running {options.name} into {scratch}; it will be killed {kills} times (seed {seed})")
    report = made.run("killed", kills)
    if options.operators:
        say("running it again, undisturbed, to compare")
        made.run("undisturbed", 0)
    say("counting")
    files, sinks = ([], made.compare_tables()) if options.operators else (made.compare_files(), [])
    facts = {
        "table": str(scratch),
        "kills": len(report.kills),
        "recovery_seconds": report.recovery_seconds,
        "checkpoints": report.epochs,
        "lost": sum(r["lost"] for r in (*files, *sinks)),
        "doubled": sum(r["doubled"] for r in (*files, *sinks)),
        "files": files,
        "sinks": sinks,
    }
    if common.json:
        common.out.json(facts)
    else:
        _show(facts, common)
    if facts["lost"] or facts["doubled"]:
        hint = f"Keep {scratch} and report it."
        print_failure(
            FirnlineError(f"{facts['lost']} records lost, {facts['doubled']} doubled", hint=hint), debug=False
        )
        return 1
    return 0


def _check_kinds(options: PipelineOptions) -> None:
    """Refuse sources and sinks that a drill cannot copy into a folder and count."""
    from firnline.sinks.delta.options import delta_tables
    from firnline.sources.files.options import file_sources

    known = {id(one) for one in (*file_sources(options.sources), *delta_tables(options.sinks))}
    every: tuple[SourceOptions | SinkOptions, ...] = (*options.sources, *options.sinks)
    for one in every:
        if id(one) not in known:
            raise ConfigError(f"a drill supports file sources and Delta tables, not {one.name!r} ({one.type})")


def _check_scratch(options: PipelineOptions, scratch: Path) -> None:
    """Refuse any folder that the pipeline reads or writes, and any that holds something."""
    from firnline.sources.registry import open_source
    from firnline.storage import is_remote

    checkpoint = options.checkpoint
    own = {s.location: "the spec's own table" for s in options.sinks}
    own |= {options.home.root: "the spec's home"} if options.journal is not None else {}
    own |= {open_source(s).location: "the spec's source" for s in options.sources}
    store = (checkpoint.store.path or checkpoint.store.uri) if checkpoint.store else ""
    own |= {store: "the spec's checkpoint store"} if store else {}
    own |= {checkpoint.local.path: "the spec's local tier"} if checkpoint.local else {}
    own |= {checkpoint.remote.uri: "the spec's remote tier"} if checkpoint.remote else {}
    for place, what in own.items():
        if is_remote(place):
            continue
        other, here = Path(place).resolve(), scratch.resolve()
        if other == here or other in here.parents or here in other.parents:
            raise ConfigError(f"{scratch} overlaps {what}, {place}", hint="Name a folder elsewhere with --table.")
    if scratch.exists() and (not scratch.is_dir() or any(scratch.iterdir())):
        raise ConfigError(f"{scratch} exists and is not empty", hint="Name a new folder with --table.")


def _plan(options: PipelineOptions, kills: int) -> DrillPlan:
    """Plan the current files, in epochs small enough for every kill to hit one."""
    from firnline.run.open_pipeline import open_pipeline

    files = {source.name: [stat.name for stat in source.list_inputs()] for source in open_pipeline(options).sources}
    count = sum(len(names) for names in files.values())
    if not count:
        raise ConfigError("the sources of the spec hold no file", hint="Put some input there, then drill.")
    per_epoch = max(len(files), min(options.batch.max_files, math.floor(count / (4 * (kills + 1)))))
    return DrillPlan(files, per_epoch, lineage=not options.operators, time=datetime.now(UTC).isoformat())


def child_command(spec: str, plan: Path, folder: Path) -> list[str]:
    """Return the command of the process that the drill kills."""
    return [sys.executable, "-m", "firnline.cli.drill", spec, str(plan), str(folder)]


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill: runs of the same plan, each in a folder of its own below `scratch`."""

    spec: str
    options: PipelineOptions
    scratch: Path
    plan: DrillPlan
    rng: random.Random

    def run(self, name: str, kills: int) -> KillReport:
        """Run the plan into the folder `name`, with a committer beside it for staged tables."""
        from firnline.cli.kill_and_count import RunKiller, plain_environ
        from firnline.sinks.delta.options import delta_tables

        folder = self.scratch / name
        options = drill_options(self.options, self.plan, folder)
        killer = RunKiller(
            command=child_command(self.spec, self.scratch / PLAN, folder),
            table=Path(options.home.root), pipeline=options.name, log=self.scratch / "run.log",
            environ=plain_environ(), rng=self.rng, say=say,
        )  # fmt: skip
        with _committing(options):
            report = killer.run(kills)
        if delta_tables([options.deciding])[0].mode == "staged" and len(options.sinks) > 1:
            # The other sinks get the last epochs only now that the deciding table's log holds them.
            with _committing(options):
                killer.run(0)
        return replace(report, epochs=LogWatch(Path(options.home.root), options.name).read_epoch())

    def compare_files(self) -> list[dict[str, Any]]:
        """Count lines, rows and quarantined records of every file, for the sink where they differ most."""
        from firnline.cli.kill_and_count import count_by_file, count_lines
        from firnline.graph import sink_input
        from firnline.history.quarantine import load_quarantine
        from firnline.history.status import load_files_by_source
        from firnline.sources.files.options import file_sources
        from firnline.storage import open_storage

        pipeline = drill_pipeline(self.options, self.plan, self.scratch / "killed")
        storages = {
            s.name: open_storage(pipeline.sources[s.name].location, s.storage_options)
            for s in file_sources(pipeline.options.sources)
        }
        bad = Counter(str(row["file"]) for row in load_quarantine(pipeline))
        counts = [(sink_input(pipeline.options, s), count_by_file(s.location)) for s in pipeline.options.sinks]
        by_path: dict[str, dict[str, Any]] = {}
        for source, file in load_files_by_source(pipeline):
            path, status = str(file["path"]), str(file["status"])
            if status == "ignored":
                continue
            # A file that is set aside counts up to where it was read: the rest was never promised.
            lines = count_lines(storages[source], path) if status == "committed" else int(file["records"] or 0)
            seen = [per_file.get(path, (0, 0)) for name, per_file in counts if name == source]
            row = by_path.setdefault(path, _no_rows(path, status, bad[path]))
            row["lines"] += lines
            row["rows"] += min(rows for rows, _ in seen)
            row["distinct"] += min(distinct for _, distinct in seen)
            row["doubled"] += max(rows - distinct for rows, distinct in seen)
        for row in by_path.values():
            row["lost"] = max(0, row["lines"] - row["quarantined"] - row.pop("distinct"))
        return list(by_path.values())

    def compare_tables(self) -> list[dict[str, Any]]:
        """Compare the rows of every table with those of the undisturbed run."""
        from firnline.cli.kill_and_count import compare_rows

        killed, undisturbed = (
            drill_options(self.options, self.plan, self.scratch / name) for name in ("killed", "undisturbed")
        )
        return [
            {"name": one.name, "table": one.location, **compare_rows(one.location, other.location)}
            for one, other in zip(killed.sinks, undisturbed.sinks, strict=True)
        ]


def _no_rows(path: str, status: str, quarantined: int) -> dict[str, Any]:
    zero = {"lines": 0, "rows": 0, "quarantined": quarantined, "lost": 0, "doubled": 0, "distinct": 0}
    return {"path": path, "status": status, **zero}


@contextlib.contextmanager
def _committing(options: PipelineOptions) -> Iterator[None]:
    """Commit what is staged in the drill's tables while runs go on, and what is left at the end."""
    from firnline.clock import SystemClock
    from firnline.committer.service import CommitterService, TableRef
    from firnline.sinks.delta.options import delta_tables
    from firnline.types import RandomIds

    tables = [TableRef(sink.table) for sink in delta_tables(options.sinks) if sink.mode == "staged"]
    if not tables:
        yield
        return
    service = CommitterService(tables, RandomIds().new(), SystemClock(), poll_interval_secs=COMMIT_SECONDS)
    thread = threading.Thread(target=service.run, name="drill committer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        service.stop()
        thread.join()
    service.run_once()


def _show(facts: dict[str, Any], common: Common) -> None:
    rows = sorted(facts["files"], key=lambda r: (-r["lost"] - r["doubled"], r["status"] == "committed"))
    if facts["sinks"]:
        common.out.table(SINK_COLUMNS, facts["sinks"])
        counted = {"rows": f"{sum(r['rows'] for r in facts['sinks']):,}  (counted by DuckDB)"}
    else:
        common.out.table(COLUMNS, rows[:FILES_SHOWN])
        counted = {
            "files": f"{len(rows):,}",
            "lines": f"{sum(r['lines'] for r in rows):,}",
            "rows": f"{sum(r['rows'] for r in rows):,}  (counted by DuckDB)",
            "quarantined": f"{sum(r['quarantined'] for r in rows):,}",
        }
    if len(rows) > FILES_SHOWN:
        common.out.line(f"{len(rows) - FILES_SHOWN:,} more files; --json lists all")
    common.out.line()
    common.out.card(
        {
            **counted,
            "lost": f"{facts['lost']:,}",
            "doubled": f"{facts['doubled']:,}",
            "kill -9": f"{facts['kills']}",
            "recovery": ", ".join(f"{s:.1f} s" for s in facts["recovery_seconds"]) or "-",
            "checkpoints": count_text(facts["checkpoints"], "epoch"),
            "scratch folder": facts["table"],
        }
    )


# -- the pipeline that the drill runs: the user's own, under another name, with everything it writes in one folder ----


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """What every run of one drill reads, and in which portions: only then can two of them be compared."""

    files: Mapping[str, Sequence[str]]  # by source
    max_files: int
    lineage: bool
    time: str  # what the clock shows for `epoch_time()`

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DrillPlan:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class _StoppedClock(SystemClock):
    """A wall clock that stands still, so that `epoch_time()` is the same in every run of the drill."""

    def __init__(self, moment: datetime) -> None:
        self._moment = moment

    def now(self) -> datetime:
        return self._moment


def drill_options(options: PipelineOptions, plan: DrillPlan, folder: Path) -> PipelineOptions:
    """The pipeline with another name, and with tables, journal, store and tiers in `folder`."""
    from firnline.options import Home, StoreOptions
    from firnline.sinks.delta.options import delta_tables, journal_in

    def source(one: SourceOptions) -> SourceOptions:
        return replace(one, lineage=one.lineage or plan.lineage)

    checkpoint = options.checkpoint
    local = replace(checkpoint.local, path=str(folder / "local")) if checkpoint.local else None
    remote = replace(checkpoint.remote, uri=str(folder / "remote"), storage_options={}) if checkpoint.remote else None
    return replace(
        options,
        name=f"{options.name}-drill",
        sources=tuple(source(one) for one in options.sources),
        sinks=tuple(
            replace(table, table=str(folder / f"table-{index}"), storage_options={})
            for index, table in enumerate(delta_tables(options.sinks))
        ),
        journal=journal_in(Home(str(folder / "home"))) if options.journal is not None else None,
        batch=replace(options.batch, max_files=plan.max_files, max_ms=ONE_DAY_MS),
        checkpoint=replace(
            checkpoint, store=StoreOptions(type="file", path=str(folder / "store")), local=local, remote=remote
        ),
    )


def drill_pipeline(options: PipelineOptions, plan: DrillPlan, folder: Path) -> OpenPipeline:
    """Open the pipeline of a drill; its sources show the planned files alone, and wait for each other."""
    from firnline.run.open_pipeline import open_pipeline

    clock = _StoppedClock(datetime.fromisoformat(plan.time))
    pipeline = open_pipeline(drill_options(options, plan, folder), once=True, clock=clock)
    for source in pipeline.sources:
        source.restrict(plan.files[source.name])
    pipeline.sources.align_seconds = ONE_DAY_MS / 1000
    return pipeline


def run_drill(spec: str, plan: Path, folder: Path) -> int:
    """Run the pipeline until the planned input is exhausted; the process that the drill kills does this."""
    from firnline.jobs import spark
    from firnline.run.runner import Runner
    from firnline.spec.build import load_options

    try:
        pipeline = drill_pipeline(load_options(spec, environ=os.environ), DrillPlan.load(plan), folder)
        engine = spark.SparkEngine(pipeline.options.name, pipeline.options.spark)
        try:
            result = Runner(pipeline, engine, once=True).run()
        finally:
            engine.stop()
    except FirnlineError as error:
        print_failure(error, debug=True)
        return error.exit_code
    if result.error is not None:
        print_failure(result.error, debug=True)
    return result.exit_code


def run_child() -> None:
    """Run the process that the drill kills; its arguments are spec, plan and folder."""
    spec, plan, folder = sys.argv[1:]
    code = run_drill(spec, Path(plan), Path(folder))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_child()
