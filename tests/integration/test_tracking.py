"""Alerts over three sources, killed again and again, against one query of DuckDB over all input; without Spark."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from firnline.faults import POINTS
from firnline.options import FieldOptions, OperatorOptions, PipelineOptions, SchemaOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from tests.support.examples import load_example
from tests.support.pipelines import pipeline_options, run_to_end
from tests.support.processes import KILLED, Launcher

GAPS = {"radar": 12, "link": 25, "optical": 40}  # seconds between two rows of an object, on average
SENSORS = tuple(GAPS)
OBJECTS, SECONDS, FILE_SECONDS = 12, 240, 20
SECOND = 1_000_000
RETAIN_US = 45 * SECOND
WAIT = 150  # seconds; a run takes one or two, but the machine may be busy
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
REACHED = [
    point
    for point in POINTS
    if point.startswith(
        ("state.run", "state.timers", "state.begin", "state.shard", "state.commit", "upsert.", "epoch.")
    )
    or point in ("delta.commit.before", "delta.commit.after", "stage.file.after", "storage.put.before")
]

Seen = tuple[str, datetime, str]  # object, time, sensor


generate = load_example("generate")
check = load_example("check")


class Sky:
    """What sensors see, in files of equal columns that are brought in one after the other.

    Each sensor tells of an object now and then, so that alerts begin, end and are parted by silence. Rows arrive out of
    order, and some of them long after the others.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.seen: list[Seen] = []
        rnd = random.Random(seed)
        files: dict[tuple[int, str], list[tuple[float, Seen]]] = {}
        for sensor, gap in GAPS.items():
            (folder / sensor).mkdir(parents=True)
            for number in range(OBJECTS):
                second = 0.0
                while (second := second + rnd.expovariate(1 / gap)) < SECONDS:
                    arrived = second + (rnd.uniform(20, 80) if rnd.random() < 0.08 else rnd.expovariate(0.3))
                    row = (f"T{number:02d}", BEGIN + timedelta(milliseconds=round(second * 1000)), sensor)
                    files.setdefault((int(arrived) // FILE_SECONDS, sensor), []).append((arrived, row))
        self._waiting = [(*name, [row for _, row in sorted(rows)]) for name, rows in sorted(files.items())]

    def bring(self, files: int) -> bool:
        """Bring more files in, in the order of their arrival; whether some are left."""
        for number, sensor, rows in self._waiting[:files]:
            lines = [json.dumps({"object": name, "at": at.isoformat()}) for name, at, _ in rows]
            (self.folder / sensor / f"{number:05d}.json").write_text("\n".join(lines) + "\n")
            self.seen += rows
        del self._waiting[:files]
        return bool(self._waiting)


def tracking_options(folder: Path, **settings: Any) -> PipelineOptions:
    schema = SchemaOptions((FieldOptions("object", "string"), FieldOptions("at", "timestamp")))
    alerts = OperatorOptions(
        "alerts",
        "correlate",
        SENSORS,
        {
            "keys": ["object"],
            "time": "at",
            "window_us": 30 * SECOND,
            "min_inputs": 2,
            "delay_us": 5 * SECOND,
            "retain_us": RETAIN_US,
        },
    )
    return pipeline_options(
        "",
        "",
        sources=[FileSourceOptions(n, str(folder / n), poll_interval_secs=0.05, schema=schema) for n in SENSORS],
        operators=[alerts],
        sinks=[
            DeltaSinkOptions("table", str(folder / "alerts"), input="alerts", write="upsert"),
            DeltaSinkOptions("changes", str(folder / "changes"), input="alerts"),
            DeltaSinkOptions("late", str(folder / "late"), input="alerts.late"),
        ],
        **{"max_files": 3, "shards": 3, **settings},
    )


def rows_of(table: Path) -> list[dict[str, Any]]:
    return list(DeltaTable(str(table)).to_pyarrow_table().to_pylist())


def late_by_the_rule(options: PipelineOptions) -> Counter[Seen]:
    """Rows from before the watermark that stood when their epoch began, less what is retained; epochs as recorded."""
    pipeline = open_pipeline(options)
    found: Counter[Seen] = Counter()
    limit: datetime | None = None
    for entry in reversed(list(pipeline.entries(pipeline.load().entry))):
        for sensor, files in entry.inputs.items():
            for file in files:
                lines = Path(file["path"]).read_text().splitlines()[file["from"] : file["to"]]
                for row in map(json.loads, lines):
                    at = datetime.fromisoformat(row["at"])
                    found[row["object"], at, sensor] += limit is not None and at < limit
        limit = EPOCH + timedelta(microseconds=entry.checkpoint.watermarks["alerts"]["at"] - RETAIN_US)
    return +found


def check_tables(sky: Sky, options: PipelineOptions) -> None:
    """The table is what one query finds in all rows that were not late, and the changes add up to it."""
    late = Counter((row["object"], row["at"], row["_input"]) for row in rows_of(sky.folder / "late"))
    assert late == late_by_the_rule(options)
    seen = Counter(sky.seen)
    assert late <= seen
    with duckdb.connect() as database:
        database.execute("create table seen (object varchar, moment timestamp, sensor varchar)")
        rows = [(name, at.replace(tzinfo=None), sensor) for name, at, sensor in (seen - late).elements()]
        database.executemany("insert into seen values (?, ?, ?)", rows)
        expected = check.expected_alerts(database)
        found = check.read_alerts(database, sky.folder / "alerts")
    assert expected
    assert found == expected
    changes = sorted(rows_of(sky.folder / "changes"), key=lambda row: row["_sequence"])
    standing: dict[tuple[str, datetime], Any] = {}
    for change in changes:
        key = (change["object"], change["alert_start"])
        assert (change["_op"] == "insert") == (key not in standing), change
        if change["_op"] == "delete":
            del standing[key]
        else:
            standing[key] = (change["alert_end"], tuple(sorted(change["inputs"])), change["rows"])
    assert {(k, s.replace(tzinfo=None), v[0].replace(tzinfo=None), *v[1:]) for (k, s), v in standing.items()} == found


def test_alerts_are_those_of_one_query_over_all_rows(tmp_path: Path) -> None:
    sky, options = Sky(tmp_path), tracking_options(tmp_path)
    while sky.bring(5):
        run_to_end(options)
    run_to_end(options)
    check_tables(sky, options)
    assert rows_of(tmp_path / "late")
    assert {row["_op"] for row in rows_of(tmp_path / "changes")} == {"insert", "update", "delete"}


@pytest.mark.crash
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(12 if os.environ.get("FIRNLINE_PROOF") else 1))
def test_alerts_after_random_kills(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    sky = Sky(tmp_path / "sky", seed)
    trigger = TriggerOptions(every_epochs=rnd.choice([1, 2, 3]))
    killed = 0
    more = True
    while more:
        more = sky.bring(rnd.randrange(1, 4))
        options = tracking_options(sky.folder, shards=rnd.choice([1, 2, 3, 5]), trigger=trigger)
        ended = launcher.start(options, f"{rnd.choice(REACHED)}:{rnd.randrange(1, 3)}:kill").wait(WAIT)
        assert ended.exit_code in (KILLED, 0), ended
        killed += ended.exit_code == KILLED
    assert killed >= 10
    assert launcher.start(options).wait(WAIT).exit_code == 0
    check_tables(sky, options)


def test_the_example_generates_the_same_bytes_again(tmp_path: Path) -> None:
    world = generate.World(seconds=12, objects=50, radar=200, link=20, optical=10)
    first, second = generate.write(world, tmp_path / "a"), generate.write(world, tmp_path / "b")
    assert first == second == {"radar": 2400, "link": 240, "optical": 120}
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.ndjson"))
    assert len(files) > 3
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
