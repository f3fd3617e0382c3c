"""Spark's classes, parsed and verified once per installation: with such an archive a local JVM starts much sooner.

The JVM itself checks that an archive fits: made by the same JVM, from the same jars. Otherwise it ignores the archive,
and starts as it does without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from firnline import installed
from firnline.errors import EngineError

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = installed.PACKAGE / "__pycache__"
PREFIX, SUFFIX = "spark-", ".jsa"
MAKE_SECONDS = 600.0
HINT = "Runs work without it, and start more slowly. Run `firnline prepare --debug` to see why."


def find_archive(java: str) -> str | None:
    """Return the archive for this Java and this Spark, or None."""
    path = installed.find_trusted(_name(java), FOLDER)
    # The options of a JVM are split at blanks.
    return str(path) if path is not None and not set(str(path)) & set(" \t\"'") else None


def make_archive(java: str) -> str:
    """Make the archive, unless it exists, and return its path. A JVM starts in a process beside, runs jobs, and exits.

    Raises:
        EngineError: this JVM makes none, or there is no folder to write to.
    """
    if (found := find_archive(java)) is not None:
        return found
    folder = installed.ensure_folder(FOLDER)
    if folder is None:
        raise EngineError(f"neither {FOLDER} nor {installed.user_cache()} can be written", hint=HINT)
    path = folder / _name(java)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", __spec__.name, str(scratch)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MAKE_SECONDS, check=False,
        )  # fmt: skip
        if ended.returncode or not scratch.exists():
            words = ended.stderr.strip().splitlines()
            raise EngineError(
                f"no archive of Spark's classes: {words[-1] if words else 'the JVM made none'}", hint=HINT
            )
        os.replace(scratch, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"no archive of Spark's classes: {error}", hint=HINT) from error
    finally:
        scratch.unlink(missing_ok=True)
    for other in folder.glob(f"{PREFIX}*{SUFFIX}"):
        if other != path:  # of a Java or a Spark that was replaced
            other.unlink(missing_ok=True)
    return str(path)


def _name(java: str) -> str:
    """Return the name of the archive's file, which is another one for every JVM and every Spark."""
    from pyspark.find_spark_home import _find_spark_home

    binary = Path(java).resolve()
    jars = Path(_find_spark_home()) / "jars"
    facts = [str(binary), str(binary.stat().st_mtime_ns), str(jars)]
    with contextlib.suppress(OSError):
        facts.append((binary.parent.parent / "release").read_text(encoding="utf-8"))
    with contextlib.suppress(OSError):
        facts.append(str(jars.stat().st_mtime_ns))
    return f"{PREFIX}{hashlib.sha256(chr(10).join(facts).encode()).hexdigest()[:16]}{SUFFIX}"


def _train(path: str) -> None:
    """Run jobs of both paths in a JVM that writes the classes it has loaded to a file when it exits."""
    from pyspark import SparkContext

    from firnline.jobs.spark import LOCAL_DEFAULTS, OPTIONS_KEY, SparkEngine

    engine = SparkEngine("classes", {OPTIONS_KEY: f"{LOCAL_DEFAULTS[OPTIONS_KEY]} -XX:ArchiveClassesAtExit={path}"})
    session = engine.session
    session.sparkContext.addJobTag("classes")
    session.range(0, 2, 1, 2).mapInArrow(_same, "id long").collect()
    session.range(0, 100, 1, 2).createOrReplaceTempView("numbers")
    query = "select id % 3 as third, count(*) as rows, sum(id) as total from numbers group by 1 order by 1"
    session.sql(query).mapInArrow(_same, "third long, rows long, total long").collect()
    session.sparkContext.removeJobTag("classes")
    gateway = SparkContext._gateway
    engine.stop()
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM exits, and writes the archive
    gateway.proc.wait()


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    _train(sys.argv[1])
