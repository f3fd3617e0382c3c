"""`firnline init`: writes a commented pipeline file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag
from firnline.errors import ConfigError
from firnline.spec.template import TemplateName, name_from, render_template

EPILOGUE = """\
The file is a valid spec. By default it reads the folder `in` beside it and
writes the Delta table `out`; if files lie in `in`, their format is taken from
the first ones. An existing file is kept unless --yes is given. Templates:
  files              files into a Delta table
  kafka              a Kafka topic into a Delta table
  postgres           files into a Delta table and a PostgreSQL table
  chain              the Delta table of another pipeline into a Delta table, by
                     SQL
  postgres-to-delta  the changes of PostgreSQL tables into Delta tables
  mysql-to-delta     the changes of MySQL or MariaDB tables into Delta tables

Output (JSON fields):
  path, name, template, status (written, dry_run), spec (with --dry-run)

Examples:
  firnline init
  firnline init flights --dry-run
  firnline init -f flights/orders.yml
  firnline init orders --template postgres
  firnline init shop --template postgres-to-delta
"""

_NEXT: dict[TemplateName, str] = {
    "files": "set path and table in it if they are not `in` and `out`",
    "kafka": "set brokers, topics and table in it",
    "postgres": "set path, tables and dsn in it",
    "chain": "set the two tables and the query in it",
    "postgres-to-delta": "prepare the server as it says, set tables in it, export DATABASE_URL",
    "mysql-to-delta": "prepare the server as it says, set tables in it, export DATABASE_URL",
}

app = App(name="init", help_epilogue=EPILOGUE)


@app.default
def init(
    target: Annotated[
        Path,
        Parameter(
            name=("--folder", "--spec", "-f"), help="The folder to write to, or the .yml file; created if missing."
        ),
    ] = Path("."),
    *,
    name: Annotated[str | None, Parameter(help="The pipeline's name. [default: the folder's name]")] = None,
    template: Annotated[TemplateName, Parameter(help="What the pipeline reads and writes.")] = "files",
    yes: Annotated[bool, Flag, Parameter(help="Overwrite an existing file.")] = False,
    dry_run: Annotated[bool, Flag, Parameter(help="Print the file, write nothing.")] = False,
    common: Common = Common(),
) -> int:
    """Write a commented firnline.yml."""
    from firnline.spec.loading import FILE_NAMES

    target = target.expanduser().absolute()
    is_file = target.suffix in (".yml", ".yaml")
    folder = target.parent if is_file else target
    path = target if is_file else folder / FILE_NAMES[0]
    name = name_from(name or folder.name)
    file_format, delimiter = "ndjson", ","
    if (folder / "in").is_dir():
        from firnline.sources.files.formats.recognise import guess_format

        file_format, delimiter = guess_format(folder / "in") or (file_format, delimiter)
    text = render_template(name, file_format, delimiter, template)
    facts = {"path": str(path), "name": name, "template": template, "status": "dry_run" if dry_run else "written"}
    if dry_run:
        if common.json:
            common.out.json({**facts, "spec": text})
        else:
            sys.stdout.write(text)
        return 0
    candidates = [path] if is_file else [folder / name for name in FILE_NAMES]
    existing = next((candidate for candidate in candidates if candidate.exists()), None)
    if existing is not None and not yes:
        raise ConfigError(f"{existing} exists", hint="Use --yes to overwrite it, or --dry-run to print a new one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (existing or path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", hint="Name another folder.") from error
    if common.json:
        common.out.json({**facts, "path": str(existing or path)})
    else:
        common.out.line(f"wrote {existing or path}")
        common.out.line(f"next: {_NEXT[template]}; `firnline dry-run`, then `firnline run`")
    return 0
