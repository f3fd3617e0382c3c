"""Writes the reference pages that follow from the code, and the map in CONTRIBUTING.md. `--check` only compares."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "firnline"
MAP_BEGIN = "<!-- Folders: written by scripts/generate_docs.py from docstrings; edit there. -->"
MAP_END = "<!-- End of folders. -->"
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
        "| 6 | already running: another run is alive; nothing was changed |\n"
        "| 130 | interrupted at once, by a second signal |\n"
    )
    for cls in tree(FirnlineError):
        lines.append(f"## `{cls.code}`\n")
        lines.append(f"{(cls.__doc__ or '').strip().splitlines()[0]}\n")
        retry = "yes" if cls.retryable else "no"
        lines.append(f"Exit code {cls.exit_code}; retried by the run itself: {retry}. Try: {cls.default_hint}\n")
    return "\n".join(lines)


def spec_page() -> str:
    from firnline.spec.models import json_schema
    from firnline.spec.template import render_template

    schema = json_schema()
    lines = [NOTE, "# The spec, `firnline.yml`\n"]
    lines.append(
        "Firnline looks for the file in the current folder, then in its parents; or give a path, as the last argument of a command or with `--spec` (`-f`). An unknown key is an error "
        "that names file, line and key path and suggests a known key. `${VAR}` and `${VAR:-default}` are replaced; "
        "`FIRNLINE__A__B` overrides the key `a.b`; secrets are references, `${env:X}` or `${file:path}`; `dry-run` and `run` warn about a secret that is written in the file itself. "
        "`firnline spec-schema` prints the JSON Schema for editors.\n\n"
        "A size is a number of bytes, or text with a unit: `1GB` is 10^9 bytes, `1GiB` is 2^30 (KB, MB, GB, TB; KiB, MiB, "
        "GiB, TiB). A duration is text with units, `250ms`, `30s`, `10m`, `1h30m` or `7d`, or a number: of milliseconds if "
        "the key ends with `_ms`, otherwise of seconds. The command line takes the same forms.\n\n"
        "`firnline init` writes this:\n"
    )
    lines.append(f"```yaml\n{render_template('flights').strip()}\n```\n")
    lines += _all_sections(schema)
    return "\n".join(lines)


def _all_sections(schema: dict[str, Any]) -> list[str]:
    """Describe every section of the file once: what several kinds share has one heading."""
    lines: list[str] = []
    written: dict[str, dict[str, Any]] = {}
    for title, of_type, model in _sections("", schema, schema):
        is_taken = written.get(title, model) != model
        heading = f"{title}{of_type}" if is_taken else title
        if heading not in written:
            written[heading] = model
            lines += _section(heading, model, schema)
    return lines


def _sections(
    path: str, model: dict[str, Any], schema: dict[str, Any], has_kinds: bool = False, of_type: str = ""
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Walk the file's sections in the order of its keys: the heading of each, the kind around it, and its model."""
    if has_kinds:
        of_type = f", `type: {model['properties']['type'].get('const', 'module:Class')}`"
    yield f"`{path}`{of_type if has_kinds else ''}" if path else "Top level", of_type, model
    seen = set()
    for key, prop in model["properties"].items():
        found = list(dict.fromkeys(_models(prop)))
        for suffix, ref in found:
            if ref not in seen:
                seen.add(ref)
                section = schema["$defs"][ref]
                below = f"{path}.{key}{suffix}".lstrip(".")
                yield from _sections(below, section, schema, has_kinds=len(found) > 1, of_type=of_type)


def _models(prop: Any, suffix: str = "") -> Iterator[tuple[str, str]]:
    """Find the models that a key's value refers to, with what the path adds: `[]` in a list, `.NAME` in a mapping."""
    if isinstance(prop, list):
        for choice in prop:
            yield from _models(choice, suffix)
    elif isinstance(prop, dict):
        if "$ref" in prop:
            yield suffix, prop["$ref"].rsplit("/", 1)[-1]
        for key, inner in (("anyOf", suffix), ("oneOf", suffix), ("items", "[]"), ("additionalProperties", ".NAME")):
            yield from _models(prop.get(key), inner)
        yield from _models(list(prop.get("patternProperties", {}).values()), ".NAME")


def _section(title: str, model: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    lines = [f"## {title}\n", f"{model.get('description', '')}\n", "| key | default | meaning |", "|---|---|---|"]
    required = set(model.get("required", []))
    for key, prop in sorted(model["properties"].items(), key=lambda item: _rank(item[0], required)):
        default = "required" if key in required else f"`{_default(prop)}`"
        about = prop.get("description", "") or _about(prop, schema)
        lines.append(f"| `{key}` | {default} | {about.replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def _rank(key: str, required: set[str]) -> int:
    """Sort the keys of a section: name and type first, then what must be given, then the others."""
    return 0 if key in ("name", "type") else 1 + (key not in required)


def _default(prop: dict[str, Any]) -> str:
    """A default as YAML; a section that may be left out is an empty mapping, whatever its own defaults are."""
    value = prop.get("default")
    return "{}" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)


def _about(prop: dict[str, Any], schema: dict[str, Any]) -> str:
    ref = prop.get("$ref", "").rsplit("/", 1)[-1]
    return str(schema["$defs"].get(ref, {}).get("description", "")) if ref else ""


def metrics_page() -> str:
    from firnline.clock import SystemClock, monotonic
    from firnline.committer.service import CommitterObserver
    from firnline.run.observer import Comparison, EpochFacts, SinkLag
    from firnline.service.glance import Glance
    from firnline.service.health import CommitterHealth
    from firnline.service.metrics import PipelineMetrics, StagingMetrics
    from firnline.service.overview_metrics import OverviewMetrics
    from firnline.service.registry import Registered
    from firnline.service.supervise.supervisor import Seen
    from firnline.sources.base import Backlog
    from firnline.stores.replicator import Replication

    running = PipelineMetrics("flights", monotonic)
    epoch = EpochFacts(1, "", "", 1, 1, 1, 1, {"not-json": 1}, 1, 1, 1, 1, 0, 1, 0, 0, durations_ms={"checkpoint": 1})
    running.committed(epoch)
    running.committed(replace(epoch, is_staged=True))
    running.backlog(Backlog(0, 0))
    running.replication(Replication("remote", "", 1))
    running.held_up((1, 1))
    running.sinks([SinkLag("topic", 1, 0, 0)])
    running.reconciled(Comparison())
    lines = [NOTE, "# Metrics and health\n"]
    lines.append(
        "`firnline run --metrics-port N` and `firnline committer --metrics-port N` serve Prometheus metrics on "
        "`127.0.0.1:N/metrics`; `--metrics-host` serves elsewhere, see [who may read](#who-may-read). Every metric has the label `pipeline`; none has a path, a key or a run id. Those "
        "of a committer have the label `table`: the name of the table's folder. `firnline serve` answers `/metrics` to a "
        "token with the role read. In a two-stage table an epoch counts as "
        "staged until the committer has committed it.\n"
    )
    seen = [
        Seen(Registered("flights", Path("flights.yml")), Glance("flights", SystemClock().now().isoformat(), "running"))
    ]
    for title, collector in (
        ("A run", running),
        ("A committer", StagingMetrics(CommitterObserver(), CommitterHealth(monotonic))),
        ("The service", OverviewMetrics(lambda: seen, SystemClock())),
    ):
        lines += [f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in family._labelnames if label != "pipeline")
            lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
        lines.append("")
    lines.append(
        "## Health\n\n`/healthz` answers 200 while the pipeline works, and 503 with the reason in JSON when it has failed, is "
        "failing in a row, or is stuck: there is work, and nothing has moved for 15 minutes. `/readyz` answers 200 once "
        "the sinks have been read, and 503 before that, while failing, and after the run has ended. A store or tier that cannot be written changes neither answer: `copies_failing` in their JSON names "
        "it with the reason. Nor does a source whose folder is gone: `sources_unreachable` names it.\n\n## Who may read\n\nBy default only this machine: the address is 127.0.0.1, and a request under a name other than "
        "`localhost` or a loopback address gets no metrics and no reasons. `--metrics-host` (`FIRNLINE_METRICS_HOST`) takes any "
        "other address, e.g. `0.0.0.0` in a container, and then needs `--metrics-token-file` (`FIRNLINE_METRICS_TOKEN_FILE`). "
        "Firnline reads the token at the start; if the file is missing, it makes one with a random token, readable by its owner alone (mode 0600). "
        "`/metrics` then asks for `Authorization: Bearer TOKEN`. `/healthz` and `/readyz` answer probes without it, "
        "with the status alone; with the token they also give the reasons. With a token file, loopback needs the token, too. The server speaks plain HTTP: "
        "outside a trusted network put a proxy with TLS before it.\n\nUnder systemd use `KillMode=mixed`, so that the first signal reaches Firnline and not Spark's JVM.\n"
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
    from firnline.cli.main import run_command

    settings = {"NO_COLOR": "1", "COLUMNS": "110", "TERM": "dumb"}
    with patch.dict(os.environ, settings), redirect_stdout(io.StringIO()) as out:
        assert run_command([*tokens, "--help"]) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def folder_map() -> str:
    """The packages and top modules, outer layers first, each with the first sentence of its docstring."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    names = [name.strip().removeprefix("firnline.") for layer in layers for name in re.split(r"[|:]", layer)]
    known = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    missing = sorted(known - set(names) - {"__init__"})
    rows = []
    for name in [*names, *missing]:
        folder = SOURCE / name
        inner = sorted(path.parent for path in folder.rglob("__init__.py")) if folder.is_dir() else [folder]
        rows += [(path.relative_to(SOURCE), first_sentence(path)) for path in inner]
    names_width = max(len(str(path)) for path, _ in rows) + 2
    lines = [
        f"    {'  ' * (len(path.parts) - 1)}{path.name + suffix:<{names_width - 2 * (len(path.parts) - 1)}}{text}"
        for path, text in rows
        for suffix in ("/" if (SOURCE / path).is_dir() else ".py",)
    ]
    return "\n".join(
        ["    src/firnline/, outer layers first: a module imports only from layers below its own", "", *lines]
    )


def first_sentence(path: Path) -> str:
    """The first sentence of the docstring of a module or package."""
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(re.split(r"(?<=\.)\s", text, maxsplit=1)[0].split())


def contributing_page() -> str:
    """CONTRIBUTING.md with the map between its two markers."""
    before, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition(MAP_BEGIN)
    _, _, after = rest.partition(MAP_END)
    return f"{before}{MAP_BEGIN}\n\n{folder_map()}\n\n{MAP_END}{after}"


def pages() -> dict[str, str]:
    """Every generated page by its path in the repository."""
    picture = runpy.run_path(str(ROOT / "scripts" / "screen_picture.py"))["screen_picture"]()
    reference = {
        "screen.svg": picture,
        "errors.md": errors_page(),
        "spec.md": spec_page(),
        "metrics.md": metrics_page(),
        **command_pages(),
    }
    return {"CONTRIBUTING.md": contributing_page(), **{f"docs/{name}": text for name, text in reference.items()}}


def stale() -> list[str]:
    """Pages that differ from what the code says."""
    return [name for name, text in pages().items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]


def main() -> int:
    if "--check" in sys.argv:
        names = stale()
        if names:
            print(f"stale: {', '.join(names)}; run: python scripts/generate_docs.py")
        return 1 if names else 0
    for name, text in pages().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
