"""Writes the reference pages that follow from the code: errors, spec, metrics, commands. `--check` only compares."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
NOTE = "<!-- Written by scripts/generate_docs.py from the code; edit there. -->\n"


def errors_page() -> str:
    from firnline import errors
    from firnline.errors import FirnlineError

    def tree(root: type[FirnlineError]) -> Iterator[type[FirnlineError]]:
        yield root
        for child in root.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from tree(child)

    lines = [NOTE, "# Errors\n"]
    lines.append(
        "Every failure is two lines on stderr, `Error:` and `Try:`, and an exit code that a scheduler can act on.\n\n"
        "| exit code | meaning |\n|---|---|\n| 0 | done |\n| 1 | failed; a person must look |\n"
        "| 2 | usage or spec; nothing ran |\n| 3 | failed, but safe to run again |\n"
        "| 4 | outcome unknown; the next run finds out |\n| 5 | fenced: another run owns the pipeline |\n"
        "| 130 | interrupted at once, by a second signal |\n"
    )
    for cls in tree(FirnlineError):
        lines.append(f"## `{cls.code}`\n")
        lines.append(f"{(cls.__doc__ or '').strip().splitlines()[0]}\n")
        retry = "yes" if cls.retryable else "no"
        lines.append(f"Exit code {cls.exit_code}; retried by the run itself: {retry}. Try: {cls.default_hint}\n")
    return "\n".join(lines)


def spec_page() -> str:
    from firnline.spec.jsonschema import json_schema
    from firnline.spec.template import render_template

    schema = json_schema()
    lines = [NOTE, "# The spec, `firnline.yml`\n"]
    lines.append(
        "Looked for in the current folder, then its parents; or give a path. Unknown keys are errors with file, line, key path "
        "and a suggestion. `${VAR}` and `${VAR:-default}` are replaced; `FIRNLINE__A__B` overrides the key `a.b`; secrets are "
        "references, `${env:X}` or `${file:path}`. `firnline spec-schema` prints the JSON Schema for editors. `firnline init` "
        "writes this:\n"
    )
    lines.append(f"```yaml\n{render_template('flights').strip()}\n```\n")
    lines += _section("the top level", schema, schema)
    for name, model in sorted(schema.get("$defs", {}).items()):
        lines += _section(name.removesuffix("Config"), model, schema)
    return "\n".join(lines)


def _section(title: str, model: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    if "properties" not in model:
        return []
    lines = [f"## {title}\n", "| key | default | meaning |", "|---|---|---|"]
    required = set(model.get("required", []))
    for key, prop in model["properties"].items():
        default = "required" if key in required else _default(prop.get("default"))
        about = prop.get("description", "") or _about(prop, schema)
        lines.append(f"| `{key}` | {default} | {about.replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def _default(value: Any) -> str:
    return "" if value in (None, "", {}, []) else f"`{value}`".replace("True", "true").replace("False", "false")


def _about(prop: dict[str, Any], schema: dict[str, Any]) -> str:
    ref = prop.get("$ref", "").rsplit("/", 1)[-1]
    return str(schema["$defs"].get(ref, {}).get("description", "")) if ref else ""


def metrics_page() -> str:
    from firnline.clock import monotonic
    from firnline.committer.service import CommitterObserver
    from firnline.run.observer import EpochFacts
    from firnline.service.committer_metrics import StagingMetrics
    from firnline.service.health import CommitterHealth
    from firnline.service.metrics import PipelineMetrics
    from firnline.sources.base import Backlog
    from firnline.stores.replicator import Replication

    running = PipelineMetrics("flights", monotonic)
    epoch = EpochFacts(1, "", "", 1, 1, 1, 1, {"not-json": 1}, 1, 1, 1, 1, 0, 1, 0, 0, durations_ms={"checkpoint": 1})
    running.committed(epoch)
    running.committed(replace(epoch, is_staged=True))
    running.backlog(Backlog(0, 0))
    running.replication(Replication("remote", "", 1))
    running.held_up((1, 1))
    lines = [NOTE, "# Metrics and health\n"]
    lines.append(
        "`firnline run --metrics-port N` and `firnline committer --metrics-port N` serve Prometheus metrics on "
        "`127.0.0.1:N/metrics`. Every metric has the label `pipeline`; none has a path, a key or a run id. Those "
        "of a committer have the label `table`: the name of the table's folder. In a two-stage table an epoch counts as "
        "staged until the committer has committed it.\n"
    )
    for title, collector in (
        ("A run", running),
        ("A committer", StagingMetrics(CommitterObserver(), CommitterHealth(monotonic))),
    ):
        lines += [f"## {title}\n", "| metric | type | meaning |", "|---|---|---|"]
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
        lines.append("")
    lines.append(
        "## Health\n\n`/healthz` answers 200 while the pipeline works, and 503 with the reason in JSON when it has failed, is "
        "failing in a row, or is stuck: there is work, and nothing has moved for 15 minutes. `/readyz` answers 200 once "
        "the sinks have been read, and 503 before that, while failing, and after the run has ended. Both serve on "
        "loopback only. A store or tier that cannot be written changes neither answer: `copies_failing` in their JSON names "
        "it with the reason.\n\nUnder systemd use `KillMode=mixed`, so that the first signal reaches Firnline and not Spark's JVM.\n"
    )
    return "\n".join(lines)


def command_pages() -> dict[str, str]:
    from firnline.cli.main import COMMANDS

    pages = {}
    for verb, target, about in COMMANDS:
        module, _, name = target.partition(":")
        app = getattr(importlib.import_module(f"firnline.cli.{module}"), name)
        below = "".join(
            f"\n## `firnline {verb} {name}`\n\n```text\n{_help(verb, name)}\n```\n"
            for name in app
            if not name.startswith("-")
        )
        pages[f"commands/{verb}.md"] = f"{NOTE}\n# `firnline {verb}`\n\n{about}\n\n```text\n{_help(verb)}\n```\n{below}"
    return pages


def _help(*tokens: str) -> str:
    out = subprocess.run(
        [sys.executable, "-m", "firnline.cli", *tokens, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "110", "TERM": "dumb"},
        check=True,
    )
    return "\n".join(line.rstrip() for line in out.stdout.strip().splitlines())


def pages() -> dict[str, str]:
    return {
        "errors.md": errors_page(),
        "spec.md": spec_page(),
        "metrics.md": metrics_page(),
        **command_pages(),
    }


def stale() -> list[str]:
    """Pages that are not what the code says."""
    return [name for name, text in pages().items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]


def main() -> int:
    if "--check" in sys.argv:
        found = stale()
        if found:
            print(f"stale: {', '.join(found)}; run: python scripts/generate_docs.py")
        return 1 if found else 0
    for name, text in pages().items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
