"""Every template of `firnline init` is a valid spec, with its comments and without them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.spec.build import load_options
from firnline.spec.template import TemplateName, render_template


def load(folder: Path, text: str) -> PipelineOptions:
    (folder / "firnline.yml").write_text(text)
    return load_options(
        environ={"AWS_SECRET_ACCESS_KEY": "x", "KAFKA_PASSWORD": "x", "DATABASE_URL": "x://"}, cwd=folder
    )


@pytest.mark.parametrize(
    ("template", "source", "sinks"),
    [
        ("files", "files", ["delta"]),
        ("kafka", "kafka", ["delta"]),
        ("postgres", "files", ["delta", "postgres"]),
        ("chain", "delta", ["delta"]),
        ("postgres-to-delta", "postgres", ["delta", "delta"]),
        ("mysql-to-delta", "mysql", ["delta", "delta"]),
    ],
)
def test_every_template_is_valid_as_it_stands_and_with_its_comments_opened(
    tmp_path: Path, template: TemplateName, source: str, sinks: list[str]
) -> None:
    text = render_template("My.Orders", template=template)
    built = load(tmp_path, text)
    assert ([one.type for one in built.sources], [one.type for one in built.sinks]) == ([source], sinks)
    head, _, body = text.partition("\n\n")
    assert all(line.startswith("#") for line in head.splitlines()), "only the lines on top are prose"
    opened = [re.sub(r"^( *)# ( *)(?=- |[a-z_.]+:)", r"\1\2", line) for line in body.splitlines()]
    assert not [line for line in opened if line.lstrip().startswith("#")]
    whole = load(tmp_path, "\n".join(opened))
    assert whole.batch == built.batch, "the values in comments are the defaults"
    assert [one.type for one in whole.sinks] == [*sinks, *(["kafka"] if template == "kafka" else [])]
