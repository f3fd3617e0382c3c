"""`firnline prepare`: compiles what an installation needs once, so that its commands start quickly."""

from __future__ import annotations

import importlib.util
from typing import Any

from cyclopts import App

from firnline.cli.common import Common
from firnline.cli.output import say, time_text
from firnline.clock import monotonic
from firnline.errors import FirnlineError

EPILOGUE = """\
Compiles the decoder and the writer of JSON, and stores Spark's classes in a
form that a local JVM loads faster (an archive of about 150 MB). Both take about
half a minute, once per installation; what is there already stays as it is. Runs
work without the archive, too, and start more slowly.

The files go into the installation if it can be written, and then serve all its
users: run this command as its owner, or when an image is built. Otherwise they
go into ~/.cache/firnline of this user. Files that everybody may write are never
used. Repeat it after an upgrade of Firnline, Spark, Java or numba.

Output (stdout; JSON fields):
  decoder, spark_classes: each with path, seconds, problem (null, or why it
  could not be made)

Exit codes:
  0 done, 1 the decoder could not be compiled

Environment:
  JAVA_HOME       the Java that Spark starts
  XDG_CACHE_HOME  instead of ~/.cache

Examples:
  firnline prepare
  sudo /opt/firnline/bin/firnline prepare
"""

app = App(name="prepare", help_epilogue=EPILOGUE)


@app.default
def prepare(*, common: Common = Common()) -> int:
    """Compile the decoder, and archive Spark's classes, once per installation."""
    say("compiling the decoder")
    decoder = _timed(_compile_decoder)
    say("archiving Spark's classes")
    classes = _timed(_archive_classes)
    if common.json:
        common.out.json({"decoder": decoder, "spark_classes": classes})
    else:
        common.out.facts({"decoder": _text(decoder), "spark classes": _text(classes)})
    return 0 if decoder["problem"] is None else 1


def _compile_decoder() -> str:
    from firnline import jit
    from firnline.ndjson import decode, write
    from firnline.sources.files.formats import open_format

    with jit.compiling():
        for name in ("ndjson", "json", "csv"):
            open_format({"format": name}).warm_up()
        write.warm_up()
    if importlib.util.find_spec("confluent_kafka") is not None:
        from firnline.avro.decode import warm_up

        warm_up()  # of Avro values, which topics have
    if importlib.util.find_spec("pymysql") is not None:
        from firnline.sources.mysql.decode import warm_up as warm_up_binlog

        warm_up_binlog()
    if importlib.util.find_spec("psycopg") is not None:
        from firnline.sources.postgres.decode import warm_up as warm_up_log

        warm_up_log()
    return decode.cache_folder()


def _archive_classes() -> str:
    from firnline.errors import ConfigError
    from firnline.jobs.class_archive import make_archive
    from firnline.jobs.spark import find_java

    java = find_java()
    if java is None:
        raise ConfigError("no Java found", hint="Install Java 17 or newer, or set JAVA_HOME.")
    return make_archive(java)


def _timed(make: Any) -> dict[str, Any]:
    began = monotonic()
    path, problem = None, None
    try:
        path = make()
    except FirnlineError as error:
        problem = error.message
    return {"path": path, "seconds": round(monotonic() - began, 3), "problem": problem}


def _text(facts: dict[str, Any]) -> str:
    return f"{facts['problem'] or facts['path']}  ({time_text(facts['seconds'])})"
