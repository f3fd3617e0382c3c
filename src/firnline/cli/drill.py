"""`firnline drill`: runs the user's own spec into a scratch table, kills it, resumes it, compares counts."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec
from firnline.cli.output import Column, count_text, print_failure, say
from firnline.errors import ConfigError, FirnlineError

if TYPE_CHECKING:
    from firnline.engine.parts import Parts
    from firnline.options import PipelineOptions

FILES_SHOWN = 20
COLUMNS = (
    Column("path"),
    Column("status"),
    Column("lines", right=True),
    Column("rows", right=True),
    Column("quarantined", right=True),
    Column("lost", right=True),
    Column("doubled", right=True),
)

EPILOGUE = """\
Reads the whole input of the spec into a scratch table, with small epochs and
with the lineage columns switched on, kills the run with SIGKILL in mid-run,
resumes it, and compares, file by file, the lines that are not blank (counted
by a reader of its own) with the rows in the table (counted by DuckDB) and the
records in quarantine. The spec's own table is never opened for writing.

Output (JSON fields):
  table, kills, recovery_seconds, checkpoints, lost, doubled, files [{path,
  status, lines, rows, quarantined, lost, doubled}]

Exit codes:
  0 nothing lost and nothing doubled, 1 otherwise

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline drill --table /tmp/scratch
  firnline drill flights/firnline.yml --table /tmp/scratch --kills 5 --json
"""

app = App(name="drill", help_epilogue=EPILOGUE)


@app.default
def drill(
    spec: Spec = None,
    /,
    *,
    table: Annotated[Path, Parameter(help="A local folder for the scratch table; must not exist yet, or be empty.")],
    kills: Annotated[int, Parameter(help="How often to kill the run.", validator=Number(gte=1, lte=20))] = 3,
    seed: Annotated[int | None, Parameter(help="Choose the moments as an earlier drill did. [default: random]")] = None,
    common: Common = Common(),
) -> int:
    """Kill a run of your own spec and compare what arrives, on a scratch table."""
    from firnline.spec.build import build_options
    from firnline.spec.loading import load_spec

    loaded = load_spec(spec, environ=os.environ)
    options = build_options(loaded, environ=os.environ)
    scratch = table.expanduser().absolute()
    _check_scratch(options, scratch)
    environ = _overrides(options, scratch, kills)
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    from firnline.cli.chaos import Chaos

    deciding = _tables(options, scratch)[options.deciding.name]
    scratch.mkdir(parents=True, exist_ok=True)
    say(f"running {options.name} into {scratch}; it will be killed {kills} times (seed {seed})")
    chaos = Chaos(
        spec=str(loaded.path), table=deciding, pipeline=options.name, log=scratch / "run.log",
        environ=environ, rng=random.Random(seed), say=say,
    )  # fmt: skip
    ordeal = chaos.run(kills)
    say("counting")
    rows = _compare(options, scratch, environ, str(loaded.path))
    facts = {
        "table": str(scratch),
        "kills": len(ordeal.kills),
        "recovery_seconds": ordeal.recovery_seconds,
        "checkpoints": ordeal.epochs,
        "lost": sum(r["lost"] for r in rows),
        "doubled": sum(r["doubled"] for r in rows),
        "files": rows,
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


def _check_scratch(options: PipelineOptions, scratch: Path) -> None:
    """Refuse any folder that the spec reads or writes, and any that holds something."""
    from firnline.sources.files.listing import Scope
    from firnline.storage import is_remote, normalise

    own = {s.table: "the spec's own table" for s in options.sinks}
    own |= {Scope.of(normalise(s.path)).root: "the spec's source" for s in options.sources}
    for place, what in own.items():
        if is_remote(place):
            continue
        other, here = Path(place).resolve(), scratch.resolve()
        if other == here or other in here.parents or here in other.parents:
            raise ConfigError(f"{scratch} overlaps {what}, {place}", hint="Name a folder elsewhere with --table.")
    if scratch.exists() and (not scratch.is_dir() or any(scratch.iterdir())):
        raise ConfigError(f"{scratch} exists and is not empty", hint="Name a new folder with --table.")


def _tables(options: PipelineOptions, scratch: Path) -> dict[str, Path]:
    return {sink.name: scratch / f"table-{index}" for index, sink in enumerate(options.sinks)}


def _overrides(options: PipelineOptions, scratch: Path, kills: int) -> dict[str, str]:
    """Environment variables that turn the spec into the drill's: other tables, lineage, small epochs."""
    if options.operators or len(options.sources) > 1:
        raise ConfigError("the drill counts rows by file: it needs one source and no operators")
    name = options.sources[0].name
    if "__" in name:
        raise ConfigError(f"the source name {name!r} holds two underscores", hint="Rename the source for the drill.")
    from firnline.engine.parts import assemble

    files = sum(1 for _ in assemble(options).sources[name].list_all())
    per_epoch = max(1, min(options.batch.max_files, math.floor(files / (4 * (kills + 1)))))
    tables = _tables(options, scratch).values()
    return {
        **{f"FIRNLINE__SINKS__{index}__TABLE": str(path) for index, path in enumerate(tables)},
        f"FIRNLINE__SOURCES__{name}__LINEAGE": "true",
        "FIRNLINE__BATCH__MAX_FILES": str(per_epoch),
    }


def _compare(options: PipelineOptions, scratch: Path, environ: dict[str, str], spec: str) -> list[dict[str, Any]]:
    """Lines, rows and quarantined records of every file, for the sink where they differ most."""
    from firnline.cli.counting import count_by_file, count_lines
    from firnline.engine.parts import assemble
    from firnline.history.status import load_files, load_quarantine
    from firnline.spec.build import load_options
    from firnline.storage import open_storage

    parts: Parts = assemble(load_options(spec, environ={**os.environ, **environ}))
    only = options.sources[0]
    source = open_storage(parts.sources[only.name].root, only.storage_options)
    bad = Counter(str(row["file"]) for row in load_quarantine(parts))
    counts = [count_by_file(str(path)) for path in _tables(options, scratch).values()]
    rows = []
    for file in load_files(parts):
        path, status = str(file["path"]), str(file["status"])
        if status == "ignored":
            continue
        # A file that is set aside counts up to where it was read: the rest was never promised.
        lines = count_lines(source, path) if status == "committed" else int(file["records"] or 0)
        found = [per_file.get(path, (0, 0)) for per_file in counts]
        rows.append(
            {
                "path": path,
                "status": status,
                "lines": lines,
                "rows": min(rows for rows, _ in found),
                "quarantined": bad[path],
                "lost": max(max(0, lines - bad[path] - distinct) for _, distinct in found),
                "doubled": max(rows - distinct for rows, distinct in found),
            }
        )
    return rows


def _show(facts: dict[str, Any], common: Common) -> None:
    rows = sorted(facts["files"], key=lambda r: (-r["lost"] - r["doubled"], r["status"] == "committed"))
    common.out.table(COLUMNS, rows[:FILES_SHOWN])
    if len(rows) > FILES_SHOWN:
        common.out.line(f"{len(rows) - FILES_SHOWN:,} more files; --json lists all")
    common.out.line()
    common.out.card(
        {
            "files": f"{len(rows):,}",
            "lines": f"{sum(r['lines'] for r in rows):,}",
            "rows": f"{sum(r['rows'] for r in rows):,}  (counted by DuckDB)",
            "quarantined": f"{sum(r['quarantined'] for r in rows):,}",
            "lost": f"{facts['lost']:,}",
            "doubled": f"{facts['doubled']:,}",
            "kill -9": f"{facts['kills']}",
            "recovery": ", ".join(f"{s:.1f} s" for s in facts["recovery_seconds"]) or "-",
            "checkpoints": count_text(facts["checkpoints"], "epoch"),
            "scratch table": facts["table"],
        }
    )
