"""`firnline demo`: ingests made-up flights, kills its own pipeline in mid-run and counts what arrived."""

from __future__ import annotations

import gzip
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import COLD_MESSAGE, Common, Flag
from firnline.cli.output import count_text, print_failure, say, size_text
from firnline.clock import monotonic
from firnline.errors import ConfigError, FirnlineError

if TYPE_CHECKING:
    from firnline.cli.kill_and_count import KillReport

NAME = "flights"
FILES = 40
FILES_PER_EPOCH = 2  # small epochs, so that a kill lands in the middle of one
MARKER = ".firnline-demo"
SPEC = f"""\
# Made by `firnline demo`. Run it again with: firnline run
name: {NAME}
sources:
  {NAME}:
    type: files
    path: in
sinks:
  - type: delta
    table: out
batch: {{max_files: {FILES_PER_EPOCH}}}
"""

EPILOGUE = """\
Generates records in gz files, ingests them with `firnline run` in a process of
its own, kills that process with SIGKILL in mid-run, resumes it, and counts the
table with DuckDB. Takes about a minute on two cores; needs Java 17 or newer.
Replaces the folder of an earlier demo.

Output (JSON fields):
  folder, table, records_in, records_out (counted by DuckDB), distinct_ids,
  lost, doubled, kills, recovery_seconds (per kill, from the start of the next
  run to its first commit), checkpoints, orphan_files (left by killed runs,
  seen by no reader), seconds

Exit codes:
  0 nothing lost and nothing doubled, 1 otherwise

Examples:
  firnline demo
  firnline demo --folder try --records 20000 --json
"""

app = App(name="demo", help_epilogue=EPILOGUE)


@app.default
def demo(
    *,
    folder: Annotated[Path, Parameter(help="Folder for files, spec and table.")] = Path("demo"),
    records: Annotated[int, Parameter(help="Number of records to generate.", validator=Number(gte=1000))] = 200_000,
    kills: Annotated[int, Parameter(help="Number of kills.", validator=Number(gte=0, lte=5))] = 2,
    seed: Annotated[int | None, Parameter(help="Repeat the kill times of an earlier demo. [default: random]")] = None,
    remove: Annotated[bool, Flag, Parameter(help="Delete the folder at the end.")] = False,
    common: Common = Common(),
) -> int:
    """Kill a pipeline in mid-run and count what arrives."""
    began = monotonic()
    folder = folder.expanduser().absolute()
    _make_folder(folder)
    decoder = _prepare_decoder()
    try:
        size = write_flights(folder / "in", records, FILES)
        say(f"made {records:,} flights in {count_text(FILES, 'file')}, {size_text(size)}")
        _wait_for(decoder)
    finally:
        decoder.kill()
        decoder.wait()
    report = _run_and_kill(folder, kills, seed)
    facts = _count(folder, report)
    facts["seconds"] = round(monotonic() - began, 1)
    if common.json:
        common.out.json(facts)
    else:
        _show(facts, common)
    if remove:
        shutil.rmtree(folder)
    if facts["lost"] or facts["doubled"]:
        error = FirnlineError(
            f"{facts['lost']} records lost, {facts['doubled']} doubled", hint=f"Keep {folder} and report it."
        )
        print_failure(error, debug=False)
        return 1
    return 0


def _make_folder(folder: Path) -> None:
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARKER).exists():
            raise ConfigError(f"{folder} is not empty and was not made by a demo", hint="Choose another --folder.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    (folder / "firnline.yml").write_text(SPEC, encoding="utf-8")


def _prepare_decoder() -> subprocess.Popen[bytes]:
    """Compile the decoder in a process beside, where that was never done, while the records are made."""
    code = "from firnline.ndjson import warm_up; warm_up()"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _wait_for(decoder: subprocess.Popen[bytes]) -> None:
    try:
        decoder.wait(timeout=2)
    except subprocess.TimeoutExpired:
        say(COLD_MESSAGE)
        decoder.wait()


def _run_and_kill(folder: Path, kills: int, seed: int | None) -> KillReport:
    from firnline.cli.kill_and_count import RunKiller, plain_environ

    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    say(f"running the pipeline; it will be killed {kills} times (seed {seed})")
    killer = RunKiller(
        command=[sys.executable, "-m", "firnline.cli", "run", str(folder / "firnline.yml"), "--once"],
        table=folder / "out", pipeline=NAME, log=folder / "run.log", environ=plain_environ(),
        rng=random.Random(seed), say=say,
    )  # fmt: skip
    return killer.run(kills, commits_between=(2, 5))


def _count(folder: Path, report: KillReport) -> dict[str, Any]:
    from firnline.cli.kill_and_count import active_files, count_ids, parquet_files

    table = folder / "out"
    inputs = sorted(str(p) for p in (folder / "in").iterdir())
    return {
        "folder": str(folder),
        "table": str(table),
        **count_ids(str(table), inputs),
        "kills": len(report.kills),
        "recovery_seconds": report.recovery_seconds,
        "checkpoints": report.epochs,
        "orphan_files": sum(1 for _ in parquet_files(table)) - len(active_files(str(table))),
    }


def _show(facts: dict[str, Any], common: Common) -> None:
    recovery = ", ".join(f"{s:.1f} s" for s in facts["recovery_seconds"]) or "-"
    common.out.card(
        {
            "records in": f"{facts['records_in']:,}",
            "records out": f"{facts['records_out']:,}  (counted by DuckDB)",
            "distinct ids": f"{facts['distinct_ids']:,}",
            "lost": f"{facts['lost']:,}",
            "doubled": f"{facts['doubled']:,}",
            "kill -9": f"{facts['kills']}",
            "recovery": f"{recovery}  (start to first commit, Spark's start included)",
            "checkpoints": f"{facts['checkpoints']}",
            "left by killed runs": f"{count_text(facts['orphan_files'], 'file')}  (no reader sees them)",
            "time": f"{facts['seconds']:.0f} s",
            "table": facts["table"],
        }
    )
    spec = Path(facts["folder"]) / "firnline.yml"
    if spec.is_relative_to(Path.cwd()):
        spec = spec.relative_to(Path.cwd())
    common.out.line()
    common.out.line(f"next: firnline status {spec}")
    common.out.line(f"      firnline checkpoints {spec}")
    common.out.line("      firnline init, to make a pipeline of your own")


AIRPORTS = (
    ("FRA", 50.033, 8.571), ("OSL", 60.194, 11.1), ("LHR", 51.47, -0.454), ("JFK", 40.641, -73.778),
    ("NRT", 35.772, 140.393), ("GRU", -23.436, -46.473), ("SYD", -33.946, 151.177), ("CPT", -33.97, 18.602),
    ("ZRH", 47.458, 8.555), ("KEF", 63.985, -22.606), ("YVR", 49.195, -123.184), ("SIN", 1.364, 103.991),
)  # fmt: skip
CARRIERS = ("LH", "SK", "BA", "DL", "NH", "LA", "QF", "LX", "FI", "SQ")
AIRCRAFT = ("A320", "A21N", "A359", "B38M", "B789", "E190", "CRJ9")
STATUSES = ("landed",) * 17 + ("diverted", "cancelled", "delayed")


def write_flights(folder: Path, records: int, files: int) -> int:
    """Write `records` records with ids 0, 1, 2, ... into `files` gz files; returns their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(20261101)
    size = written = 0
    for number in range(files):
        until = records * (number + 1) // files
        path = folder / f"flights-{number:04d}.json.gz"
        lines = [flight(rng, i) for i in range(written, until)]
        path.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=1, mtime=0))
        size += path.stat().st_size
        written = until
    return size


def flight(rng: random.Random, number: int) -> str:
    """One record as a line of JSON: nested, with lists, optional fields and text beyond ASCII."""
    pick = rng.random
    origin, lat, lon = AIRPORTS[int(pick() * 12)]
    target, target_lat, target_lon = AIRPORTS[int(pick() * 12)]
    status = STATUSES[int(pick() * 20)]
    minute = number % 1440
    day = number // 1440 % 28 + 1
    delay = f'"delay_minutes":{int(pick() * 90)},' if pick() < 0.3 else ""
    note = '"note":"Gate geändert, bitte beachten",' if pick() < 0.02 else ""
    economy, business = pick() * 400 + 40, pick() * 2000 + 300
    return (
        f'{{"id":{number},"flight":"{CARRIERS[int(pick() * 10)]}{int(pick() * 9000) + 100}","status":"{status}",'
        f'"departure":"2026-10-{day:02d}T{minute // 60:02d}:{minute % 60:02d}:00Z",'
        f'"from":{{"iata":"{origin}","lat":{lat},"lon":{lon}}},'
        f'"to":{{"iata":"{target}","lat":{target_lat},"lon":{target_lon}}},'
        f'{delay}{note}"aircraft":"{AIRCRAFT[int(pick() * 7)]}","passengers":{int(pick() * 300)},'
        f'"fares":[{{"class":"Y","price":{economy:.2f}}},{{"class":"C","price":{business:.2f}}}]}}\n'
    )
